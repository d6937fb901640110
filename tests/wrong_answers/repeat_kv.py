def repeat_kv(x, N):
    return jnp.tile(x, (1, 1, N // x.shape[2], 1))
