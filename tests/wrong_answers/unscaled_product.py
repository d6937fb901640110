def unscaled_product(x8, w8, scale_x, scale_w):
    return x8.astype(jnp.float32) @ w8.astype(jnp.float32).T * scale_x * scale_w
