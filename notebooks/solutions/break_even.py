def break_even(H, itemsize):
    return (H * itemsize + 4) // (2 * itemsize) + 1
