"""The exercises of 07_transformer_engine_fp8."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.exercises import Answer, compare, over_cases, together


def check_next_scale(yours) -> Answer:
    """Exercise: the scale of delayed scaling after a history of amaxes (floats, the newest last)."""
    hint = (
        "amax = max(history): the largest counts, not the newest. If it is 0 or not finite, return the old scale; "
        "else 448 / amax / 2**margin."
    )
    cases = (
        ([1.0, 7.0, 2.0], 3.0, 0), ([0.5, 0.25], 1.0, 3), ([3.0, 0.0], 1.0, 0), ([0.7], 1.0, 0),
        ([0.0, 0.0], 5.0, 0), ([2.0, float("inf")], 9.0, 1),
        ([4.0], 1.0, 0),
    )  # fmt: skip

    def right(history, scale, margin):
        amax = max(history)
        return 448.0 / amax / 2**margin if 0 < amax < float("inf") else scale

    return over_cases("next_scale", yours, right, hint, cases, "history {}, scale {}, margin {}")


def check_unscaled_product(yours) -> Answer:
    """Exercise: x (M, K) times w (N, K) transposed, float32, from scaled FP8 arrays and their scales."""
    hint = (
        "the numbers were multiplied by their scales, so the product is too large by scale_x · scale_w: divide by "
        "both. Multiply in float32: x8.astype(jnp.float32) @ w8.astype(jnp.float32).T."
    )
    answers = []
    for seed, (scale_x, scale_w) in enumerate(((16.0, 4.0), (0.5, 32.0))):
        x, w = (jax.random.normal(jax.random.key(i), (n, 16)) for i, n in ((seed, 5), (seed + 9, 3)))
        x8, w8 = (x * scale_x).astype(jnp.float8_e4m3fn), (w * scale_w).astype(jnp.float8_e4m3fn)
        right = np.asarray(x8, np.float32) @ np.asarray(w8, np.float32).T / (scale_x * scale_w)
        args, what = (x8, w8, scale_x, scale_w), f"product at scales {scale_x:g} and {scale_w:g}"
        answers.append(compare("unscaled_product", yours, right, hint, args=args, what=what, rtol=1e-2, atol=1e-2))
    return together("unscaled_product", answers)


def check_runs_in_fp8(yours) -> Answer:
    """Exercise: whether "matmul", "attention" or "mxfp8 matmul" runs in eight bits at a compute capability."""
    hint = "products from 8.9 (Ada: the L4), attention from 9.0 (Hopper), MXFP8 from 10.0 (Blackwell). Compare pairs."
    first = {"matmul": (8, 9), "attention": (9, 0), "mxfp8 matmul": (10, 0)}
    cases = [(what, c) for what in first for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
    return over_cases("runs_in_fp8", yours, lambda what, c: c >= first[what], hint, cases, "{} at {}")


def check_te_mask(yours) -> Answer:
    """Exercise: TE's (B, 1, T, S) mask, True where hidden, from JAX's (B, 1, 1, S), True where seen."""
    hint = "invert it with ~ (or jnp.logical_not), then jnp.broadcast_to(…, (B, 1, T, S))."
    answers = []
    for lengths, S, T in (((3, 5), 5, 4), ((1, 0, 2), 3, 2)):
        mask = jnp.arange(S)[None, None, None] < jnp.array(lengths)[:, None, None, None]
        right = np.broadcast_to(~np.asarray(mask), (len(lengths), 1, T, S))
        what = f"mask (B, 1, T, S) at T {T}"
        answers.append(compare("te_mask", yours, right, hint, args=(mask, T), what=what))
    return together("te_mask", answers)
