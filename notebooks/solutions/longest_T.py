def longest_T(B, N, itemsize, budget):
    return math.isqrt(budget // (B * N * itemsize))
