def window_blocks(start, bq, bk, left, S):
    last = min(start + bq, S) - 1
    return max(0, start - left) // bk, last // bk + 1
