def te_mask(mask, T):
    return jnp.broadcast_to(mask, (mask.shape[0], 1, T, mask.shape[3]))
