def window_blocks(start, bq, bk, left, S):
    return 0, (start + bq) // bk
