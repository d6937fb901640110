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
from attnlab.display import format_ms
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
    """Work that is queued and ready `seconds` later, as on a GPU."""

    def __init__(self, seconds):
        self._ready = time.perf_counter() + seconds

    def block_until_ready(self):
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return self


def _queue(seconds):
    time.sleep(0.02)  # the call itself takes its time too
    return _Queued(seconds)


def check_honest_ms(yours) -> Answer:
    """Exercise: milliseconds of one call of `fn(x)`, waiting for the result."""
    hint = (
        "start the clock before the call. The call returns before the work is done: call .block_until_ready() on its "
        "result before you read the clock again."
    )
    answers = []
    for work in (0.03, 0.12):
        least = 1e3 * (0.02 + work)
        # A busy machine takes longer than the work, and a clock that does not wait shows less.
        answer = compare(
            "honest_ms", yours, 2 * least, hint, args=(_queue, work), what="time", unit="ms", atol=1.02 * least
        )
        rows = [
            (f"time of {format_ms(least)} of work", given, f"{format_ms(least)} or more")
            if what == "time"
            else (what, given, right)
            for what, given, right in answer.rows
        ]
        message = "it waited for the work" if answer.state == RIGHT else answer.message
        answers.append(dataclasses.replace(answer, rows=rows, message=message))
    return together("honest_ms", answers)


# ---- 01_naive_attention ------------------------------------------------------------------------------------


def check_one_head(yours) -> Answer:
    """Exercise: attention of one head, q (T, H), k and v (S, H), by hand."""
    hint = "scores are q @ k.T / sqrt(H), H being the last size of q; the softmax runs over the keys, the last axis."
    answers = []
    for H in (16, 8):
        q, k, v = (2 * x[0, :, 0] for x in qkv(1, 6, 1, H, S=9, seed=7))
        right = reference(q[None, :, None], k[None, :, None], v[None, :, None])[0, :, 0]
        what = f"output (T, H) at H {H}"
        answers.append(compare("one_head", yours, right, hint, args=(q, k, v), what=what, rtol=1e-2, atol=1e-2))
    return together("one_head", answers)


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


# ---- 03_cudnn ----------------------------------------------------------------------------------------------


def check_cudnn_takes(yours) -> Answer:
    """Exercise: whether cuDNN attention takes a dtype and head dim at a compute capability."""
    hint = (
        "three rules: capability 8.0 or newer; bfloat16 or float16; H a multiple of 8, up to 128, from 9.0 up to 256."
    )
    cases = (
        ("bfloat16", 64, (9, 0)), ("float32", 64, (9, 0)), ("float16", 36, (9, 0)), ("bfloat16", 256, (9, 0)),
        ("bfloat16", 256, (8, 9)), ("bfloat16", 128, (8, 9)), ("float16", 64, (7, 5)), ("float16", 512, (10, 0)),
        ("float16", 64, (9, 0)), ("bfloat16", 40, (8, 0)), ("float64", 64, (9, 0)), ("bfloat16", 256, (10, 0)),
        ("bfloat16", 136, (8, 9)),
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

    hint = "compare equal dtypes (bfloat16 with bfloat16), and the device's time, row.ms, not row.wall_ms."
    answers = []
    for order, (exact, half, fused) in (((0, 1, 2), (12.0, 6.0, 2.0)), ((2, 1, 0), (9.0, 5.0, 2.0))):
        times = (("naive", "float32", exact), ("naive", "bfloat16", half), ("cudnn", "bfloat16", fused))
        rows = [row(*times[i], wall=times[i][2] + 0.5) for i in order]
        answers.append(
            compare("fair_speedup", yours, half / fused, hint, args=(rows,), what="naive over cuDNN", unit="×")
        )
    return together("fair_speedup", answers)


def check_pad_head_dim(yours) -> Answer:
    """Exercise: attention at a head dim that is no multiple of 8 through a kernel that needs one, by padding."""
    hint = (
        "zeros change no dot product, but 1/√H would now use the padded H: pass scale=1/√H of the true H, and cut the "
        "output back to it."
    )
    calls = []

    def attend(q, k, v, **options):
        calls.append(q.shape)
        if q.shape[-1] % 8:
            raise ValueError(f"The head dim must be a multiple of 8, but got {q.shape[-1]}.")
        return jax.nn.dot_product_attention(q, k, v, **options)

    answers = []
    for H in (36, 20):
        calls.clear()
        q, k, v = (2 * x for x in qkv(1, 8, 2, H, seed=3))
        what = f"output (B, T, N, {H})"
        answer = compare(
            "pad_head_dim", yours, reference(q, k, v), hint, args=(attend, q, k, v), what=what, rtol=1e-2, atol=1e-2
        )
        if answer.state == RIGHT and not calls:
            answer = compare(
                "pad_head_dim", False, True, "the output must come from `attend`.", what="attend was called"
            )
        answers.append(answer)
    return together("pad_head_dim", answers)
