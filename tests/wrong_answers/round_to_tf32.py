def round_to_tf32(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return (bits & ~np.uint32((1 << 16) - 1)).view(np.float32)
