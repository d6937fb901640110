def zero_blind(out, mask):
    return jnp.where(mask.any(axis=-1)[..., None], out, 0)
