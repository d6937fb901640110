def cache_savings(layers, N, H, S, B, itemsize):
    head = 2 * layers * H * S * B * itemsize
    return 2 * head, 1 * head
