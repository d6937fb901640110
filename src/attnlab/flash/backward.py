"""Gradients of the forward kernel: the scores are computed again, block by block, from the log-sum-exp.

FlashAttention-2 (Dao, arXiv:2307.08691), algorithm 2, as two kernels without atomics, so that the same inputs give the
same bits: one for each block of queries (dq), one for each block of keys (dk and dv).
With p = exp(s − lse) and delta = Σ out·dout of a row:
dv = pᵀ·dout, ds = p∘(dout·vᵀ − delta), dq = scale·ds·k, dk = scale·dsᵀ·q.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from attnlab.flash import tiles
from attnlab.flash.forward import LOG2E, dot, hide, load, rows_of, store
from attnlab.flash.tiles import Band, Tile


def _dq_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, *, scale, band: Band, tile: Tile):
    (T, H), S = q_ref.shape, k_ref.shape[0]
    i = pl.num_programs(0) - 1 - pl.program_id(0)
    start, row = i * tile.q, rows_of(i * tile.q, tile.q)
    q, do, lse, delta = (load(ref, start, tile.q, T) for ref in (q_ref, do_ref, lse_ref, delta_ref))

    def step(j, dq, *, masked: bool):
        end = S if masked else tile.k
        k, v = load(k_ref, j * tile.k, tile.k, end), load(v_ref, j * tile.k, tile.k, end)
        s = dot(q, k, (1, 1)) * (scale * LOG2E) - lse[:, None] * LOG2E
        if masked:
            s = hide(s, band, row, rows_of(j * tile.k, tile.k), S)
        ds = jnp.exp2(s) * (dot(do, v, (1, 1)) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k, (1, 0))

    dq = tiles.over_blocks(step, band.blocks(i, tile.q, tile.k, S), jnp.zeros((tile.q, H), jnp.float32))
    store(dq_ref, start, T, (dq * scale).astype(dq_ref.dtype))


def _dkv_kernel(q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, scale, band: Band, tile: Tile):
    (T, group, _), (S, H) = q_ref.shape, k_ref.shape
    j = pl.program_id(0)  # the first keys are seen by most queries: heavy blocks first, as they come
    start, col = j * tile.k, rows_of(j * tile.k, tile.k)
    k, v = load(k_ref, start, tile.k, S), load(v_ref, start, tile.k, S)

    def step(i, carry, *, masked: bool, head):
        dk, dv = carry
        at, end = i * tile.q, T if masked else tile.q
        q, do = load(q_ref, at, tile.q, end, head), load(do_ref, at, tile.q, end, head)
        lse, delta = load_row(lse_ref, head, at, tile.q, end), load_row(delta_ref, head, at, tile.q, end)
        s = dot(k, q, (1, 1)) * (scale * LOG2E) - lse[None, :] * LOG2E  # (keys, queries): no transpose needed below
        if masked:
            s = hide(s, band.transposed, col, rows_of(at, tile.q), T)
        p = jnp.exp2(s)
        ds = p * (dot(v, do, (1, 1)) - delta[None, :])
        return dk + dot(ds.astype(q.dtype), q, (1, 0)), dv + dot(p.astype(do.dtype), do, (1, 0))

    blocks = band.transposed.blocks(j, tile.k, tile.q, T)

    def one_head(head, carry):
        return tiles.over_blocks(functools.partial(step, head=head), blocks, carry)

    zero = jnp.zeros((tile.k, H), jnp.float32)
    dk, dv = lax.fori_loop(0, group, one_head, (zero, zero))
    store(dk_ref, start, S, (dk * scale).astype(dk_ref.dtype))
    store(dv_ref, start, S, dv.astype(dv_ref.dtype))


def load_row(ref, head, start, count: int, end: int):
    """`count` numbers of row `head` of `ref` (heads, length); those at or beyond `end` read as 0."""
    where = (head, pl.ds(start, count))
    if end % count == 0 and count <= ref.shape[1]:
        return ref[where]
    return plt.load(ref.at[where], mask=rows_of(start, count) < end, other=0)


def backward(q, k, v, out, lse, do, dlse, *, scale: float, band: Band, tile: Tile, interpret: bool):
    """dq, dk, dv in the shapes and dtypes of q, k, v.

    `out` and `lse` are `forward`'s, `do` and `dlse` their gradients; the other arguments are `forward`'s too.
    """
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    group = N // K
    delta = jnp.einsum("btnh,btnh->bnt", out, do, preferred_element_type=jnp.float32) - dlse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a row that saw no key: exp(s − inf) = 0, no gradient

    queries = pl.BlockSpec((None, T, None, H), lambda i, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, S, None, H), lambda i, n, b: (b, 0, n // group, 0))
    sums = pl.BlockSpec((None, None, T), lambda i, n, b: (b, n, 0))
    options = dict(
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages), interpret=interpret
    )
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, scale=scale, band=band, tile=tile),
        grid=(pl.cdiv(T, tile.q), N, B),
        in_specs=[queries, keys, keys, queries, sums, sums],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="flash_dq",
        **options,
    )(q, k, v, do, lse, delta)
    # A key's gradient sums over every query head that shares it: one program sees the whole group.
    queries = pl.BlockSpec((None, T, group, H), lambda j, n, b: (b, 0, n, 0))
    keys = pl.BlockSpec((None, S, None, H), lambda j, n, b: (b, 0, n, 0))
    sums = pl.BlockSpec((None, group, T), lambda j, n, b: (b, n, 0))
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, scale=scale, band=band, tile=tile),
        grid=(pl.cdiv(S, tile.k), K, B),
        in_specs=[queries, keys, keys, queries, sums, sums],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
        name="flash_dkv",
        **options,
    )(q, k, v, do, lse, delta)
    return dq, dk, dv
