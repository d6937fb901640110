def temporaries_ratio(rows):
    timed = [row for row in rows if hasattr(row, "temp_bytes") and row.dtype == "bfloat16"]
    size = {(row.label, row.shape.T): row.temp_bytes for row in timed}
    both = [T for label, T in size if label == "cudnn" and ("xla", T) in size]
    return {T: size["xla", T] / size["cudnn", T] if size["cudnn", T] else math.inf for T in both}
