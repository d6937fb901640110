def pad_head_dim(attend, q, k, v):
    H = q.shape[-1]
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -H % 8))) for x in (q, k, v))
    return attend(q, k, v, scale=1 / math.sqrt(H))[..., :H]
