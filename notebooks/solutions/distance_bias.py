def distance_bias(slopes, T, S):
    apart = jnp.abs(jnp.arange(T)[:, None] - jnp.arange(S)[None, :])
    return -slopes[None, :, None, None] * apart
