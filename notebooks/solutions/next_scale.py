def next_scale(history, scale, margin):
    amax = max(history)
    if not 0 < amax < math.inf:
        return scale
    return 448 / amax / 2**margin
