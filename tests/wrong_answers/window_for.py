def window_for(W):
    return {"local_window_size": (W - 1, 0)}
