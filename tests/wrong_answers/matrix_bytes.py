def matrix_bytes(B, T, S, N, itemsize):
    return B * T * S * itemsize
