def cudnn_takes(dtype, H, capability):
    return capability >= (8, 0) and dtype in ("bfloat16", "float16") and H % 8 == 0 and H <= 128
