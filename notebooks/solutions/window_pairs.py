def window_pairs(T, W):
    W = min(W, T)
    return T * W - W * (W - 1) // 2
