"""The forward kernel of notebook 08, with windows: a block of queries meets the keys block by block.

FlashAttention (Dao et al., arXiv:2205.14135 and 2307.08691) on Pallas's Triton backend: compiled on Ampere and
newer, interpreted on a CPU. The scores never leave the chip; memory is O(T).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from attnlab.flash import tiles
from attnlab.flash.tiles import Band, Tile

LOG2E = math.log2(math.e)  # exp2 is one instruction, exp is two
LOWEST = float(jnp.finfo(jnp.float32).min)  # finite: a running maximum of -inf would make NaN of -inf - -inf


def dot(a, b, contract: tuple[int, int]):
    """a · b over axis `contract[0]` of a and `contract[1]` of b, summed in float32."""
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def rows_of(start, count: int):
    """The row numbers start … start + count − 1, int32."""
    return start + lax.iota(jnp.int32, count)


def load(ref, start, count: int, end: int, *head):
    """Rows start … of `ref` (all of it after the first axis, or its `head`); those at or beyond `end` read as 0.

    With `end` a multiple of `count` it reads without a mask: right for blocks that lie inside whole.
    """
    where = (pl.ds(start, count), *head)
    if end % count == 0 and count <= ref.shape[0]:
        return ref[where]
    shape = (count, *ref.shape[1 + len(head) :])
    inside = lax.broadcast_in_dim(rows_of(start, count) < end, shape, (0,))
    return plt.load(ref.at[where], mask=inside, other=0)


def store(ref, start, end: int, value):
    """Write `value` to the rows from `start`; those at or beyond `end` are dropped."""
    where = pl.ds(start, value.shape[0])
    if end % value.shape[0] == 0:
        ref[where] = value
    else:
        inside = lax.broadcast_in_dim(rows_of(start, value.shape[0]) < end, value.shape, (0,))
        plt.store(ref.at[where], value, mask=inside)


def hide(scores, band: Band, row, col, end: int):
    """`scores` (rows, cols) with −inf where `row` does not see `col` in `band`, or `col` is at or beyond `end`."""
    seen = band.sees(row[:, None], col[None, :])
    if end % col.shape[0]:
        exists = lax.broadcast_in_dim(col < end, scores.shape, (1,))
        seen = exists if seen is None else seen & exists
    return jnp.where(seen, scores, -jnp.inf)


def _kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, scale, band: Band, tile: Tile):
    (T, H), S = q_ref.shape, k_ref.shape[0]
    # The last rows of a causal mask see most keys. The heavy blocks go first, so that none runs on alone at the end.
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    row = rows_of(i * tile.q, tile.q)
    q = load(q_ref, i * tile.q, tile.q, T)

    def step(j, carry, *, masked: bool):
        acc, top, total = carry
        end = S if masked else tile.k  # inner blocks are whole: they load without a mask
        s = dot(q, load(k_ref, j * tile.k, tile.k, end), (1, 1)) * (scale * LOG2E)
        if masked:
            s = hide(s, band, row, rows_of(j * tile.k, tile.k), S)
        new_top = jnp.maximum(top, s.max(axis=1))
        p = jnp.exp2(s - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        v = load(v_ref, j * tile.k, tile.k, end)
        acc = acc * shrink[:, None] + dot(p.astype(v.dtype), v, (1, 0))
        return acc, new_top, total * shrink + p.sum(axis=1)

    nothing = (jnp.zeros((tile.q, H), jnp.float32), jnp.full(tile.q, LOWEST), jnp.zeros(tile.q, jnp.float32))
    acc, top, total = tiles.over_blocks(step, band.blocks(i, tile.q, tile.k, S), nothing)
    out = acc / jnp.where(total == 0, 1.0, total)[:, None]  # a row that sees no key: 0, as flash-attn has it
    store(o_ref, i * tile.q, T, out.astype(o_ref.dtype))
    store(lse_ref, i * tile.q, T, (top + jnp.log2(total)) / LOG2E)


def forward(q, k, v, *, scale: float, band: Band, tile: Tile, interpret: bool):
    """Attention and its log-sum-exp.

    Args:
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H).
      scale: of the scores.
      band: which keys a query sees.
      tile: block sizes; powers of two.
      interpret: run the kernel's steps one by one in JAX instead of compiling it.

    Returns:
      out (B, T, N, H) in the dtype of q, 0 where a query sees no key; lse (B, N, T) float32, the natural logarithm
      of each row's sum of exponentials, −inf there.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    group = N // K
    # Heads outside the block, the whole sequence inside: the kernel cuts its own blocks out of it.
    queries = pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, n // group, 0))
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale, band=band, tile=tile),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[queries, keys, keys],
        out_specs=[queries, pl.BlockSpec((None, None, T), lambda i, n, b: (b, n, 0))],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="flash_forward",
    )(q, k, v)
