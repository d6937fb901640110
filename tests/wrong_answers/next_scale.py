def next_scale(history, scale, margin):
    return 448 / history[-1] / 2**margin
