def zero_blind(out, mask):
    sees = mask.any(axis=-1)  # (B, N, T)
    return jnp.where(sees.transpose(0, 2, 1)[..., None], out, 0)
