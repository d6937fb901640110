def longest_T(B, N, itemsize, budget):
    return budget // (B * N * itemsize)
