"""Exercises refuse the answers that look right: the typical mistakes beyond the one in wrong_answers/."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab as lab


def late_clock(fn, x):
    result = fn(x)
    start = time.perf_counter()
    result.block_until_ready()
    return 1e3 * (time.perf_counter() - start)


def takes(dtypes, step, longest):
    return lambda dtype, H, c: c >= (8, 0) and dtypes(dtype) and H % step == 0 and H <= longest(c)


def half(dtype):
    return dtype in ("bfloat16", "float16")


def hopper(c):
    return 256 if c >= (9, 0) else 128


WRONG = {
    "fair_speedup": [
        lambda rows: (lambda ms: ms["naive"] / ms["cudnn"])({r.label: r.ms for r in rows}),  # the last dtype wins
        lambda rows: rows[1].ms / rows[2].ms,
        lambda rows: 3.0,
    ],
    "cudnn_takes": [
        takes(lambda d: d != "float32", 8, hopper),
        takes(lambda d: d == "bfloat16", 8, hopper),
        takes(half, 16, hopper),
        takes(half, 8, lambda c: 256 if c[0] == 9 else 128),
    ],
    "honest_ms": [lambda fn, x: 42.0, late_clock],
    "padding_mask": [lambda n, S: (jnp.arange(S)[None, None, None] < n[:, None, None, None]).astype(int)],
    "one_head": [lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v],
    "pad_head_dim": [lambda attend, q, k, v: lab.naive_attention(q, k, v)],
    "round_to_tf32": [lambda x: x.astype(np.float16).astype(np.float32)],
    "bound_ms": [lambda flops, nbytes, tflops, gbps: flops / tflops / 1e9],
    "longest_T": [lambda B, N, itemsize, budget: round((budget / (B * N * itemsize)) ** 0.5) + 1],
    "matrix_bytes": [lambda B, T, S, N, itemsize: B * N * T * T * itemsize],
    "softmax_rows": [lambda x: jax.nn.softmax(x, axis=0)],
    "distance_bias": [lambda s, T, S: -s[None, :, None, None] * (jnp.arange(T)[:, None] - jnp.arange(S)[None])],
}


@pytest.mark.parametrize("name, number", [(name, i) for name in WRONG for i in range(len(WRONG[name]))])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_plausible_mistake_is_wrong(name, number):
    answer = getattr(lab, f"check_{name}")(WRONG[name][number])
    assert answer.state == "wrong", answer
    assert answer.rows and len(answer.hint) > 20
