def largest_block(shared, H, itemsize, bq, stages):
    bk = 0
    for size in (16, 32, 64, 128, 256, 512, 1024):
        if itemsize * H * (bq + 2 * stages * size) <= shared:
            bk = size
    return bk
