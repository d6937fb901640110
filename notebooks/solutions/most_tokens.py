def most_tokens(weights, cache, B, gbps):
    seconds = (weights + B * cache) / (gbps * 1e9)
    return B / seconds
