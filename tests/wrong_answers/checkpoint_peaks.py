def checkpoint_peaks(L, weights, inputs):
    return L * weights, L * inputs
