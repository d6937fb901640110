def roofline_bound(intensity, tflops, gbps):
    return min(tflops, intensity * gbps / 1e3)
