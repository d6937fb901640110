def speedups(rows):
    ms = {(row.label, row.shape.T): row.ms for row in rows if hasattr(row, "ms") and row.dtype == "bfloat16"}
    return {T: ms["naive", T] / ms["cudnn", T] for label, T in ms if label == "cudnn" and ("naive", T) in ms}
