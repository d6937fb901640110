def runs_in_fp8(what, capability):
    return capability >= {"matmul": (8, 9), "attention": (9, 0), "mxfp8 matmul": (10, 0)}[what]
