"""The exercises' checks, one a NAME: `check_NAME(answer)` says not tried yet, right, or wrong with a hint.

Each check runs the reader's function on small cases and sets its results beside the right ones.
"""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.attention import reference
from attnlab.exercises import RIGHT, Answer, compare, together
from attnlab.inputs import qkv
from attnlab.records import Shape, Timing

# ---- 00_start_here -----------------------------------------------------------------------------------------


def check_softmax_rows(yours) -> Answer:
    """Exercise: softmax over the last axis of `scores` (T, S), also for scores of 1e4."""
    hint = "exp overflows beyond about 88 in float32: subtract each row's largest score first, which changes no weight."
    cases = (("small scores", [[0.0, 1.0], [2.0, 2.0]]), ("scores of 1e4", [[1e4, 1e4 - 1.0], [-1e4, 0.0]]))
    return together(
        "softmax_rows",
        [
            compare(
                "softmax_rows",
                yours,
                jax.nn.softmax(jnp.array(x), axis=-1),
                hint,
                args=(jnp.array(x),),
                what=what,
            )
            for what, x in cases
        ],
    )


def check_bound_ms(yours) -> Answer:
    """Exercise: the shortest time in ms from FLOPs, bytes, TFLOP/s and GB/s."""
    hint = (
        "arithmetic and memory traffic overlap, so the bound is the larger of the two times, not their sum. "
        "FLOPs over (TFLOP/s · 1e12) is in seconds; a millisecond is 1e-3 of one."
    )
    cases = ((2e12, 1e6, 1000, 5000), (1e6, 1e10, 1000, 5000), (1e12, 5e9, 1000, 5000))

    def right(flops, nbytes, tflops, gbps):
        return max(flops / (tflops * 1e9), nbytes / (gbps * 1e6))

    return together(
        "bound_ms",
        [
            compare(
                "bound_ms",
                yours,
                right,
                hint,
                args=case,
                what=f"{case[0]:.0e} FLOPs, {case[1]:.0e} bytes",
                unit="ms",
            )
            for case in cases
        ],
    )


class _Queued:
    """Work that is queued at once and ready 30 ms later, as on a GPU."""

    def __init__(self):
        self._ready = time.perf_counter() + 0.03

    def block_until_ready(self):
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return self


def _queue(_):
    return _Queued()


def check_honest_ms(yours) -> Answer:
    """Exercise: milliseconds of one call of `fn(x)`, waiting for the result."""
    hint = "the call returns before the work is done: call .block_until_ready() on its result before the second clock."
    # 30 ms of work: a busy machine may well take 10 times that, and a clock that does not wait far less than 1.
    answer = compare(
        "honest_ms",
        yours,
        165.0,
        hint,
        args=(_queue, None),
        what="time of 30 ms of work",
        unit="ms",
        atol=137,
    )
    if answer.state == RIGHT:
        return dataclasses.replace(answer, message="it waited for the work")
    return dataclasses.replace(
        answer, rows=[(w, g, "30 ms or more" if w.startswith("time") else r) for w, g, r in answer.rows]
    )


# ---- 01_naive_attention ------------------------------------------------------------------------------------


def check_one_head(yours) -> Answer:
    """Exercise: attention of one head, q (T, H), k and v (S, H), by hand."""
    q, k, v = (4 * x[0, :, 0] for x in qkv(1, 6, 1, 16, S=9, seed=7))
    right = reference(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0]
    hint = "scores are q @ k.T / sqrt(H), H being the last size of q; the softmax runs over the keys, the last axis."
    return compare("one_head", yours, right, hint, args=(q, k, v), what="output (T, H)", rtol=1e-2, atol=1e-2)


def check_matrix_bytes(yours) -> Answer:
    """Exercise: bytes of the weight matrix of a batch."""
    hint = "there is one T×S matrix for each head of each batch element: B · N · T · S numbers of `itemsize` bytes."
    cases = ((4, 128, 128, 8, 4), (2, 64, 256, 16, 2))
    return together(
        "matrix_bytes",
        [
            compare(
                "matrix_bytes",
                yours,
                math.prod(case),
                hint,
                args=case,
                what=f"B, T, S, N, itemsize = {case}",
                unit="B",
            )
            for case in cases
        ],
    )


def check_longest_T(yours) -> Answer:
    """Exercise: the largest T whose (B, N, T, T) weights fit in `budget` bytes."""
    hint = "B · N · T² · itemsize must not exceed the budget, so T is a square root, rounded down: math.isqrt."
    cases = ((1, 8, 2, 2**30), (4, 16, 4, 10**9), (1, 1, 4, 3))

    def right(B, N, itemsize, budget):
        return math.isqrt(budget // (B * N * itemsize))

    return together(
        "longest_T",
        [
            compare("longest_T", yours, right, hint, args=case, what=f"B, N, itemsize, budget = {case}")
            for case in cases
        ],
    )


# ---- 02_sdpa -----------------------------------------------------------------------------------------------


def check_padding_mask(yours) -> Answer:
    """Exercise: the (B, 1, 1, S) mask that hides keys beyond each length."""
    lengths, S = jnp.array([3, 5, 0]), 5
    right = np.arange(S)[None, None, None, :] < np.asarray(lengths)[:, None, None, None]
    hint = "key j is real when j < length, so that a length of 3 shows keys 0, 1 and 2; axes of length 1 broadcast."
    return compare("padding_mask", yours, right, hint, args=(lengths, S), what="mask (B, 1, 1, S)")


def check_distance_bias(yours) -> Answer:
    """Exercise: a (1, N, T, S) bias of −slope · |i − j|."""
    slopes, T, S = jnp.array([0.5, 0.25]), 3, 4
    apart = np.abs(np.arange(T)[:, None] - np.arange(S)[None, :])
    right = -np.asarray(slopes)[None, :, None, None] * apart
    hint = "a far key must score lower, so the bias is negative: −slope · |i − j|, slopes along the head axis."
    return compare("distance_bias", yours, right, hint, args=(slopes, T, S), what="bias (1, N, T, S)")


def check_round_to_tf32(yours) -> Answer:
    """Exercise: float32 values rounded to TF32's 10 bits of mantissa."""
    x = np.array([1.0, 1.0 + 2**-10, 1.0 + 2**-11 + 2**-13, 1.0 + 2**-13, -3.14159274, 1e-3], np.float32)
    bits = x.view(np.uint32)
    right = ((bits + 0x0FFF + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)
    hint = (
        "float32 has 23 bits of mantissa and TF32 10, so the last 13 go: add half of the last kept bit (1 << 12) "
        "to the integer view, then clear the low 13 bits."
    )
    return compare("round_to_tf32", yours, right, hint, args=(x,), what="rounded values", rtol=1e-7, atol=0)


# ---- 03_cudnn ----------------------------------------------------------------------------------------------


def check_cudnn_takes(yours) -> Answer:
    """Exercise: whether cuDNN attention takes a dtype and head dim at a compute capability."""
    hint = (
        "three rules: capability 8.0 or newer; bfloat16 or float16; H a multiple of 8, up to 128, from 9.0 up to 256."
    )
    cases = (
        ("bfloat16", 64, (9, 0)), ("float32", 64, (9, 0)), ("float16", 36, (9, 0)), ("bfloat16", 256, (9, 0)),
        ("bfloat16", 256, (8, 9)), ("bfloat16", 128, (8, 9)), ("float16", 64, (7, 5)), ("float16", 512, (10, 0)),
    )  # fmt: skip

    def right(dtype, H, capability):
        most = 256 if capability >= (9, 0) else 128
        return capability >= (8, 0) and dtype in ("bfloat16", "float16") and H % 8 == 0 and H <= most

    return together(
        "cudnn_takes",
        [
            compare("cudnn_takes", yours, right, hint, args=case, what=f"{case[0]}, H {case[1]}, {case[2]}")
            for case in cases
        ],
    )


def check_fair_speedup(yours) -> Answer:
    """Exercise: the speed-up of cuDNN over naive from rows of one shape, device time, equal dtypes."""
    shape = Shape.square(4, 2048, 16, 128)

    def row(label, dtype, ms, wall):
        return Timing(label=label, shape=shape, dtype=dtype, ms=ms, p20=ms, p80=ms, samples=1, clock="cupti",
                      wall_ms=wall, compile_s=0.0)  # fmt: skip

    rows = [
        row("naive", "float32", 12.0, 12.5),
        row("naive", "bfloat16", 6.0, 6.5),
        row("cudnn", "bfloat16", 2.0, 2.5),
    ]
    hint = "compare equal dtypes (bfloat16 with bfloat16), and the device's time, row.ms, not row.wall_ms."
    return compare("fair_speedup", yours, 3.0, hint, args=(rows,), what="naive over cuDNN", unit="×", rtol=1e-6)


def check_pad_head_dim(yours) -> Answer:
    """Exercise: attention with H = 36 through a kernel that needs a multiple of 8, by padding with zeros."""
    q, k, v = (2 * x for x in qkv(1, 8, 2, 36, seed=3))
    hint = (
        "zeros change no dot product, but 1/√H would now use the padded H: pass scale=1/√36 and cut the output "
        "back to 36."
    )

    def attend(q, k, v, **options):
        if q.shape[-1] % 8:
            raise ValueError(f"The head dim must be a multiple of 8, but got {q.shape[-1]}.")
        return jax.nn.dot_product_attention(q, k, v, **options)

    return compare(
        "pad_head_dim", yours, reference(q, k, v), hint, args=(attend, q, k, v), what="output (B, T, N, 36)",
        rtol=1e-2, atol=1e-2,
    )  # fmt: skip
