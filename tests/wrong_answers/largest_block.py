def largest_block(shared, H, itemsize, bq, stages):
    return (shared // (itemsize * H) - bq) // (2 * stages)
