def repeat_kv(x, N):
    return jnp.repeat(x, N // x.shape[2], axis=2)
