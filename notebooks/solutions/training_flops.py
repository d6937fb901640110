def training_flops(B, T, N, H):
    return 7 * 2 * B * N * H * T * (T + 1) // 2
