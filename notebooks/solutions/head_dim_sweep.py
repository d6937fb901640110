def head_dim_sweep(sweep, variants):
    return sweep(variants, table="head dim", B=4, T=256, N=8, H=(32, 64, 128), dtype="bfloat16")
