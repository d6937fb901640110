def fair_speedup(rows):
    ms = {row.label: row.ms for row in rows if row.dtype == "bfloat16"}
    return ms["naive"] / ms["cudnn"]
