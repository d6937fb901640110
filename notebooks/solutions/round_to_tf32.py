def round_to_tf32(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    half = np.uint32(1 << 12)  # half of the last bit that stays
    return ((bits + half) & ~np.uint32((1 << 13) - 1)).view(np.float32)
