def roofline_bound(intensity, tflops, gbps):
    return min(tflops, intensity * gbps)
