def window_pairs(T, W):
    return T * W
