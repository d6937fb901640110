def softmax_rows(scores):
    weights = jnp.exp(scores)
    return weights / weights.sum(axis=-1, keepdims=True)
