def fair_speedup(rows):
    naive = next(row for row in rows if row.label == "naive")
    cudnn = next(row for row in rows if row.label == "cudnn")
    return naive.wall_ms / cudnn.wall_ms
