def most_tokens(weights, cache, B, gbps):
    return gbps * 1e9 / (weights + cache) * B
