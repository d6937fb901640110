def window_for(W):
    return {"is_causal": True, "local_window_size": (W - 1, 0)}
