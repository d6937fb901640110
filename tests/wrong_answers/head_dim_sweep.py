def head_dim_sweep(sweep, variants):
    return [sweep(variants, table="head dim", B=4, T=256, N=8, H=H, dtype="bfloat16") for H in (32, 64, 128)]
