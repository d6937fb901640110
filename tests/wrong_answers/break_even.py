def break_even(H, itemsize):
    return H // 2 + 1
