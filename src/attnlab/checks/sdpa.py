"""The exercises of 02_sdpa."""

import jax.numpy as jnp
import numpy as np

from attnlab.exercises import RIGHT, Answer, compare, together


def check_padding_mask(yours) -> Answer:
    """Exercise: the (B, 1, 1, S) mask that hides keys beyond each length."""
    lengths, S = jnp.array([3, 5, 0]), 5
    right = np.arange(S)[None, None, None, :] < np.asarray(lengths)[:, None, None, None]
    hint = (
        "key j is real when j < length, so that a length of 3 shows keys 0, 1 and 2; axes of length 1 broadcast. "
        "JAX takes masks of bool alone."
    )
    answer = compare("padding_mask", yours, right, hint, args=(lengths, S), what="mask (B, 1, 1, S)")
    if answer.state != RIGHT:
        return answer
    dtype = np.asarray(yours(lengths, S)).dtype.name
    return together("padding_mask", [compare("padding_mask", dtype, "bool", hint, what="dtype of the mask"), answer])


def check_distance_bias(yours) -> Answer:
    """Exercise: a (1, N, T, S) bias of −slope · |i − j|."""
    slopes, T, S = jnp.array([0.5, 0.25]), 3, 4
    apart = np.abs(np.arange(T)[:, None] - np.arange(S)[None, :])
    right = -np.asarray(slopes)[None, :, None, None] * apart
    hint = "a far key must score lower, so the bias is negative: −slope · |i − j|, slopes along the head axis."
    return compare("distance_bias", yours, right, hint, args=(slopes, T, S), what="bias (1, N, T, S)")


def check_round_to_tf32(yours) -> Answer:
    """Exercise: float32 values rounded to TF32's 10 bits of mantissa."""
    x = np.array([1, 1 + 2**-10, 1 + 2**-11 + 2**-13, 1 + 2**-13, -3.14159274, 1e-3, 1e30, 1e-10], np.float32)
    bits = x.view(np.uint32)
    right = ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
    hint = (
        "float32 has 23 bits of mantissa and TF32 10, so the last 13 go: add half of the last kept bit (1 << 12) "
        "to the integer view, then clear the low 13 bits."
    )
    return compare("round_to_tf32", yours, right, hint, args=(x,), what="rounded values", rtol=1e-7, atol=0)
