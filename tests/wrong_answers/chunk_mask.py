def chunk_mask(start, T, S):
    return jnp.tril(jnp.ones((1, 1, T, S), bool), S - T)
