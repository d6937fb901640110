def one_head(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v
