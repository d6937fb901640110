def temporaries_ratio(rows):
    size = {(row.label, row.shape.T): row.temp_bytes for row in rows if hasattr(row, "temp_bytes")}
    return {T: size["xla", T] / size["cudnn", T] for label, T in size if label == "cudnn"}
