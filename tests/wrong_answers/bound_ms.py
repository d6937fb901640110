def bound_ms(flops, nbytes, tflops, gbps):
    return 1e3 * (flops / (tflops * 1e12) + nbytes / (gbps * 1e9))
