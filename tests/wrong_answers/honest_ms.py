def honest_ms(fn, x):
    start = time.perf_counter()
    fn(x)
    return 1e3 * (time.perf_counter() - start)
