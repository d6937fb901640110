def cudnn_takes(dtype, H, capability):
    longest = 256 if capability >= (9, 0) else 128
    return capability >= (8, 0) and dtype in ("bfloat16", "float16") and H % 8 == 0 and H <= longest
