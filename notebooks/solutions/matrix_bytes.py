def matrix_bytes(B, T, S, N, itemsize):
    return B * N * T * S * itemsize
