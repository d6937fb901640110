def speedups(rows):
    timed = [row for row in rows if hasattr(row, "ms")]
    ms = {(row.label, row.shape.T): row.ms for row in timed}
    return {T: ms["naive", T] / ms["cudnn", T] for label, T in ms if label == "cudnn" and ("naive", T) in ms}
