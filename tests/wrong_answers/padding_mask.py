def padding_mask(lengths, S):
    return jnp.arange(S)[None, None, None, :] <= lengths[:, None, None, None]
