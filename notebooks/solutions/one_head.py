def one_head(q, k, v):
    scores = q @ k.T / math.sqrt(q.shape[-1])
    return jax.nn.softmax(scores, axis=-1) @ v
