def runs_in_fp8(what, capability):
    return capability >= (9, 0)
