def longest_context(memory, weights, layers, K, H, B, itemsize):
    return max(0, memory - weights) // (2 * layers * K * H * B * itemsize)
