def longest_context(memory, weights, layers, K, H, B, itemsize):
    return memory // (2 * layers * K * H * B * itemsize)
