"""The exercises of 01_naive_attention."""

import math

from attnlab.attention import reference
from attnlab.exercises import Answer, compare, over_cases, together
from attnlab.inputs import qkv


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
    return over_cases(
        "matrix_bytes",
        yours,
        lambda *case: math.prod(case),
        hint,
        cases,
        "B {}, T {}, S {}, N {}, itemsize {}",
        unit="B",
    )


def check_longest_T(yours) -> Answer:
    """Exercise: the largest T whose (B, N, T, T) weights fit in `budget` bytes."""
    hint = "B · N · T² · itemsize must not exceed the budget, so T is a square root, rounded down: math.isqrt."
    cases = ((1, 8, 2, 2**30), (4, 16, 4, 10**9), (1, 1, 4, 3))

    def right(B, N, itemsize, budget):
        return math.isqrt(budget // (B * N * itemsize))

    return over_cases("longest_T", yours, right, hint, cases, "B {}, N {}, itemsize {}, budget {}")
