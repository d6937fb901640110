"""The forward pass once more, on Hopper's own units: Pallas's Mosaic GPU backend, compute capability 9.x only.

The schedule is FlashAttention-3's (Shah et al., arXiv:2407.08608, section 3.1). How Pallas spells it was learnt from
JAX's own kernel, jax/experimental/pallas/ops/gpu/attention_mgpu.py. Three warpgroups (of 128 threads each) compute
128 query rows of one head:
- the producer fetches blocks of K and V into a ring in shared memory with the copy engine (TMA);
- two consumers own 64 rows each and take turns: one feeds the tensor cores (wgmma), the other computes its softmax.

The copy engine reads zeros beyond the end of an array and drops what is written there, so tails need only a mask.
"""

import dataclasses
import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnlab import device as _device
from attnlab.features import feature, has
from attnlab.inputs import check_qkv, scale_of

ROWS = 64  # query rows of a consumer: the height of one wgmma
KEYS = 128  # keys of a block: the scores of 64 rows, their weights and the output fit a consumer's registers
SLOTS = 2  # of the ring: one block is read while the next one arrives
CONSUMERS = 2
TILE = CONSUMERS * ROWS


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What the kernel knows when it is compiled."""

    S: int
    group: int  # query heads that share a KV head
    tiles: int
    is_causal: bool
    scale: float
    interpret: bool


class _Shared(NamedTuple):
    """What the three warpgroups share: blocks, and the barriers that say when each may be touched."""

    q: Any  # a block for each consumer; at the end the output leaves through it
    k: Any
    v: Any
    q_full: Any  # the copy engine has written it
    k_full: Any
    v_full: Any
    k_free: Any  # both consumers have read it
    v_free: Any
    turn: Any  # the consumers swap roles


def hopper_attention(q, k, v, *, is_causal: bool = False, scale: float | None = None, interpret: bool = False):
    """Attention and its log-sum-exp, forward only.

    Args:
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H), bfloat16 or float16; H is 64 or 128, K divides N.
      is_causal: query t sees keys 0 to t, also when T and S differ.
      scale: of the scores, a Python number; 1/√H if not given.
      interpret: run on a CPU in Pallas's interpreter: slowly, with the same ring, barriers and masks.

    Returns:
      out (B, T, N, H) in the dtype of q; lse (B, N, T) float32, not in flash_attention's layout: the natural logarithm
      of each row's sum of exponentials.

    Raises:
      ValueError: another head dim; no Hopper GPU here; sizes as `attnlab.inputs.check_qkv`.
      TypeError: another dtype.
      NotImplementedError: its gradient; `interpret` on a JAX that has no such interpreter.
    """
    B, T, S, N, K, H = check_qkv(q, k, v)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise TypeError(f"the Hopper kernel takes bfloat16 or float16, got {q.dtype}: cast with .astype(jnp.bfloat16)")
    if H not in (64, 128):
        todo = f"pad it with zeros and pass scale=1/√{H}" if H < 128 else "use jax.nn.dot_product_attention"
        raise ValueError(f"the Hopper kernel takes head dim 64 or 128, got {H}: {todo}")
    here = _device.current().kind
    if not interpret and here != "gpu" and not isinstance(q, jax.core.Tracer):  # traced: it may be lowered for a GPU
        raise ValueError("the Hopper kernel can't run on a CPU: pass interpret=True, or use attnlab.flash_attention")
    if not interpret and here == "gpu" and not has("wgmma"):
        raise ValueError(f"the Hopper kernel can't run here: {feature('wgmma').reason}. Use attnlab.flash_attention")
    scale = scale_of(scale, H)
    q, k, v = _forward_only((q, k, v))
    if scale <= 0:  # the kernel looks for the largest score before it scales: the sign goes into q
        q, scale = (-q if scale else jnp.zeros_like(q)), -scale or 1.0
    # The copy engine wants groups of 8 rows and knows where the array ends. JAX 0.10's interpreter does not: it gets
    # whole blocks.
    q, k, v = (_pad(x, whole if interpret else 8) for x, whole in ((q, TILE), (k, KEYS), (v, KEYS)))
    p = _Problem(S, N // K, pl.cdiv(T, TILE), is_causal, scale, interpret)
    # The last axis of the grid runs fastest. Under a causal mask the long rows of all heads start first, and the short
    # ones fill the gaps at the end; without one, neighbours share a head, and its K and V stay in the L2 cache.
    grid = {"batch": B, "tile": p.tiles, "head": N} if is_causal else {"batch": B, "head": N, "tile": p.tiles}
    # Whole tiles of log-sum-exp, cut below: threads write it, and they know no end of the array.
    lse = jax.ShapeDtypeStruct((B, N, p.tiles * TILE), jnp.float32)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, p),
        **_by_version([jax.ShapeDtypeStruct(q.shape, q.dtype), lse], interpret),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),  # exp2 in one instruction
        kernel_name="hopper_forward",
    )(q, k, v)
    return out[:, :T], lse[:, :, :T]


@jax.custom_jvp
def _forward_only(arrays):
    return arrays


@_forward_only.defjvp
def _no_gradient(primals, tangents):
    raise NotImplementedError("the Hopper kernel has no gradient: use attnlab.flash_attention")


def _kernel(p, q_ref, k_ref, v_ref, out_ref, lse_ref):
    """One tile of one head: lay out shared memory, and send each warpgroup to its work."""
    batch, head, tile = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("tile")
    if p.is_causal:
        tile = p.tiles - 1 - tile  # long rows first
    seen = jnp.minimum((tile + 1) * TILE, p.S) if p.is_causal else jnp.int32(p.S)
    blocks = lax.div(seen + (KEYS - 1), jnp.int32(KEYS))  # those behind the mask are never fetched

    def roles(**shared):
        s, me = _Shared(**shared), lax.axis_index("warpgroup")

        @pl.when(me < CONSUMERS)
        def _():
            plgpu.set_max_registers(240, action="increase")  # the producer's registers go to those who compute
            _consume(p, s, me, q_ref, out_ref, lse_ref, batch, head, tile, blocks)

        @pl.when(me == CONSUMERS)
        def _():
            plgpu.set_max_registers(24, action="decrease")
            _produce(s, k_ref, v_ref, batch, lax.div(head, jnp.int32(p.group)), blocks)

    # wgmma wants tiles of 8 rows of 128 bytes, swizzled so that no two threads of a warp meet at one memory bank.
    layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def buffer(count, rows):
        return plgpu.SMEM((count, rows, q_ref.shape[-1]), q_ref.dtype, transforms=layout)

    full, free = plgpu.Barrier(num_barriers=SLOTS), plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=SLOTS)
    pl.run_scoped(
        roles, q=buffer(CONSUMERS, ROWS), k=buffer(SLOTS, KEYS), v=buffer(SLOTS, KEYS),
        q_full=plgpu.Barrier(num_barriers=CONSUMERS), k_full=full, v_full=full, k_free=free, v_free=free,
        turn=plgpu.Barrier(num_arrivals=CONSUMERS), collective_axes="warpgroup",
    )  # fmt: skip


def _produce(s, k_ref, v_ref, batch, kv_head, blocks):
    """Fetch K and V block by block, each into the slot of the block that came `SLOTS` before it."""

    # The last turns fetch nothing. They wait until all blocks are read, so that no barrier is left half used.
    @pl.loop(0, blocks + SLOTS)
    def _(j):
        slot, rows = lax.rem(j, jnp.int32(SLOTS)), pl.ds(j * KEYS, KEYS)

        def fetch(source, target, full, free):
            # A consumer may still be reading the old block.
            pl.when(j >= SLOTS)(lambda: plgpu.barrier_wait(free.at[slot]))

            @pl.when(j < blocks)
            def _():
                plgpu.copy_gmem_to_smem(source.at[batch, rows, kv_head], target.at[slot], full.at[slot])

        fetch(k_ref, s.k, s.k_full, s.k_free)  # K first, with barriers of its own: it is needed a softmax earlier
        fetch(v_ref, s.v, s.v_full, s.v_free)


def _consume(p, s, me, q_ref, out_ref, lse_ref, batch, head, tile, blocks):
    """Attention of 64 rows, block of keys by block of keys."""
    first = tile * TILE + me * ROWS
    rows = pl.ds(first, ROWS)
    plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], s.q.at[me], s.q_full.at[me])
    plgpu.barrier_wait(s.q_full.at[me])

    # Only blocks on the diagonal and the last one need a mask; every row of the tile sees the others whole.
    clear = jnp.minimum(lax.div(tile * TILE, jnp.int32(KEYS)), p.S // KEYS) if p.is_causal else p.S // KEYS
    acc = _place(p, jnp.zeros((ROWS, q_ref.shape[-1]), jnp.float32))
    top = _place(p, jnp.full((ROWS,), -jnp.inf, jnp.float32))
    total = _place(p, jnp.zeros((ROWS,), jnp.float32))
    step = functools.partial(_step, p, s, me, first)
    # Consumer 1 waits for one swap more before it starts, and so stays half a block behind: hence they alternate.
    pl.when(me == 1)(lambda: _swap(s))
    carry = lax.fori_loop(0, clear, functools.partial(step, masked=False), (acc, top, total))
    acc, top, total = lax.fori_loop(clear, blocks, functools.partial(step, masked=True), carry)
    pl.when(me == 0)(lambda: _swap(s))  # a swap takes two: consumer 1 has one left

    lse_ref[batch, head, rows] = top * math.log(2) + jnp.log(total)
    s.q[me] = (acc / _along_rows(total, acc)).astype(q_ref.dtype)  # every row sees key 0: no total is 0
    plgpu.commit_smem()  # what threads wrote, the copy engine sees only after this
    plgpu.copy_smem_to_gmem(s.q.at[me], out_ref.at[batch, rows, head])
    plgpu.wait_smem_to_gmem(0)  # shared memory goes to the next tile when the kernel ends


def _step(p, s, me, first, j, carry, masked):
    """One block of keys: scores, online softmax in base 2, weighted sum."""
    acc, top, total = carry
    slot = lax.rem(j, jnp.int32(SLOTS))
    plgpu.barrier_wait(s.k_full.at[slot])
    # Swap as soon as the product is under way. This consumer's softmax comes next, so the other may multiply.
    scores = _scores(p, s.q.at[me], s.k.at[slot], lambda: _swap(s))
    plgpu.barrier_arrive(s.k_free.at[slot])
    if masked:
        row, key = (_place(p, lax.broadcasted_iota(jnp.int32, scores.shape, axis)) for axis in (0, 1))
        key += j * KEYS
        seen = key < p.S
        if p.is_causal:
            seen &= key <= first + row
        scores = jnp.where(seen, scores, -jnp.inf)

    to_base_2 = p.scale * math.log2(math.e)  # exp2 is one instruction; this product fuses with the subtraction
    new_top = jnp.maximum(top, scores.max(axis=1) * to_base_2)
    weights = jnp.exp2(scores * to_base_2 - _along_rows(new_top, scores))
    shrink = jnp.exp2(top - new_top)
    total = total * shrink + weights.sum(axis=1)
    acc = acc * _along_rows(shrink, acc)
    # The compiler may move no part of the softmax behind the swap: the tensor cores would wait for it.
    acc, new_top, total, weights = lax.optimization_barrier((acc, new_top, total, weights.astype(s.v.dtype)))

    plgpu.barrier_arrive(s.turn)  # half a swap: this softmax is done. While the other gets there, wait for V
    plgpu.barrier_wait(s.v_full.at[slot])
    plgpu.barrier_wait(s.turn)  # the other half: the other's products are under way, its softmax comes next
    acc = _add_product(p, acc, weights, s.v.at[slot])
    plgpu.barrier_arrive(s.v_free.at[slot])
    return acc, new_top, total


def _swap(s):
    """Wait until both consumers are here."""
    plgpu.barrier_arrive(s.turn)
    plgpu.barrier_wait(s.turn)


def _scores(p, q, k, meanwhile):
    """q·kᵀ in registers; calls `meanwhile` while the tensor cores work."""
    if p.interpret:  # JAX 0.10's interpreter knows no transposed operand
        meanwhile()
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)

    def product(scores_ref):
        plgpu.wgmma(scores_ref, q, k.transpose((1, 0)))
        meanwhile()
        return scores_ref[...]  # waits for the product

    return pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), jnp.float32))


def _add_product(p, acc, weights, v):
    """acc + weights·v, with acc and weights in registers."""
    if p.interpret:  # the interpreter knows no operand in registers
        return acc + jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, v))(plgpu.ACC.init(acc))


def _place(p, x):
    """x in the threads' registers as wgmma leaves its results: a block, or one number a row."""
    layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
    return x if p.interpret else plgpu.layout_cast(x, layout)


def _along_rows(x, like):
    return lax.broadcast_in_dim(x, like.shape, [0])


def _pad(x, multiple):
    """x with rows of zeros at the end, up to a multiple."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))


def _by_version(outputs, interpret):
    """The arguments of `plgpu.kernel` that differ from one JAX to the next."""
    name = "out_type" if "out_type" in inspect.signature(plgpu.kernel).parameters else "out_shape"
    if not interpret:
        return {name: outputs}
    try:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # 0.10 has no public name for it
    except ImportError:
        raise NotImplementedError(
            f"interpret=True needs JAX 0.10 or newer, found {jax.__version__}: install it, or use a Hopper GPU"
        ) from None
    return {name: outputs, "interpret": InterpretGPUParams()}
