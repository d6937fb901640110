def cache_savings(layers, N, H, S, B, itemsize):
    head = 2 * layers * H * S * B * itemsize
    return (N - 2) * head, (N - 1) * head
