"""`flash_attention`: the kernels behind the interface of `jax.nn.dot_product_attention`, with their gradients."""

import functools

import jax
import jax.numpy as jnp

from attnlab.features import has
from attnlab.flash import tiles
from attnlab.flash.backward import backward
from attnlab.flash.forward import forward
from attnlab.flash.tiles import Band
from attnlab.inputs import check_qkv, scale_of

HEAD_DIMS = (16, 32, 64, 128)


def flash_attention(
    q, k, v, *, is_causal: bool = False, local_window_size=None, scale=None, return_residual: bool = False
):
    """softmax(scale · QKᵀ)·V without ever storing the scores: O(T) memory, forward and backward.

    Compiled on a GPU of compute capability 8.0 or newer; elsewhere Pallas interprets the same kernels, slowly.

    Args:
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H); float16, bfloat16 or float32; H is 16, 32, 64 or 128.
      is_causal, local_window_size: as in `jax.nn.dot_product_attention`, aligned top-left.
      scale: of the scores, a Python number; 1/√H if not given. Scores up to 1e8 are safe: beyond, the rounding of the
        running maximum is itself large enough for exp to overflow.
      return_residual: return the log-sum-exp too. Unlike JAX's it is always float32, and gradients flow through it.

    Returns:
      (B, T, N, H); with `return_residual` also the natural log-sum-exp of every row, (B, T, N) float32 as JAX has
      it. A query that sees no key gets the mean of v (JAX's convention) and −inf.

    First derivatives in reverse mode only. Over several devices: inside `jax.shard_map(..., check_vma=False)`.
    A row whose scores are all −inf although it sees keys gives 0.

    Raises as `attnlab.inputs.check_qkv` and `scale_of`, and `ValueError` for another H or for a window that is none.
    """
    shape = check_qkv(q, k, v)
    if shape.H not in HEAD_DIMS:
        todo = f"pad it with zeros and pass scale=1/√{shape.H}" if shape.H < 128 else "use jax.nn.dot_product_attention"
        raise ValueError(f"the head dim must be one of {HEAD_DIMS}, got {shape.H}: {todo}")
    band = Band.of(shape.T, shape.S, is_causal=is_causal, local_window_size=local_window_size)
    out, lse = _attention(q, k, v, scale_of(scale, shape.H), band)
    lse = lse.transpose(0, 2, 1)
    if band.has_blind_rows(shape.T, shape.S):
        mean = jnp.repeat(v.mean(axis=1, keepdims=True), shape.N // shape.K, axis=2)
        out = jnp.where(jnp.isneginf(lse)[..., None], mean, out)
    return (out, lse) if return_residual else out


def _settings(q, k, band: Band, *, backward: bool = False) -> dict:
    # Any bound to the right makes the early rows short, as a causal mask does.
    tile = tiles.tile_for(q, k, is_causal=band.right is not None, backward=backward)
    return {"tile": tile, "interpret": not has("pallas_triton")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attention(q, k, v, scale: float, band: Band):
    with jax.enable_x64(False):  # the kernels count in int32 and sum in float32, whatever the caller's default is
        return forward(q, k, v, scale=scale, band=band, **_settings(q, k, band))


def _attention_fwd(q, k, v, scale, band):
    out, lse = _attention(q, k, v, scale, band)
    return (out, lse), (q, k, v, out, lse)


def _attention_bwd(scale, band, kept, gradients):
    return _gradients(scale, band, *kept, *gradients)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradients(scale, band, q, k, *others):
    with jax.enable_x64(False):
        return backward(q, k, *others, scale=scale, band=band, **_settings(q, k, band, backward=True))


@_gradients.defjvp
def _no_second_derivative(scale, band, primals, tangents):
    raise NotImplementedError(
        "flash_attention has first derivatives only: for second ones use jax.nn.dot_product_attention"
    )


_attention.defvjp(_attention_fwd, _attention_bwd)
