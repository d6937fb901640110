"""The exercises of 06_mha_gqa_mqa."""

import jax.numpy as jnp
import numpy as np

from attnlab.exercises import Answer, compare, over_cases, together


def check_repeat_kv(yours) -> Answer:
    """Exercise: KV heads (B, S, K, H) copied to N heads, so that each query head finds its own."""
    hint = (
        "query head n uses KV head n // (N / K): the copies of a head stand side by side, along axis 2. jnp.repeat "
        "does that; jnp.tile lays the heads out in turn."
    )
    answers = []
    for K, N in ((2, 8), (3, 6), (4, 4)):
        x = np.random.default_rng(K).normal(size=(2, 5, K, 3)).astype(np.float32)
        what = f"(B, S, N, H) for K {K}, N {N}"
        right = np.repeat(x, N // K, axis=2)
        answers.append(compare("repeat_kv", yours, right, hint, args=(jnp.asarray(x), N), what=what))
    return together("repeat_kv", answers)


def check_cache_savings(yours) -> Answer:
    """Exercise: bytes of KV cache that K = 2 and K = 1 save against MHA."""
    hint = "the cache has 2 · layers · K · H · S · B numbers, with K = N for MHA. Saved is what MHA has more than that."
    cases = ((12, 8, 64, 1024, 1, 2), (32, 32, 128, 8192, 4, 2), (2, 4, 16, 10, 3, 4))

    def right(layers, N, H, S, B, itemsize):
        return tuple(2 * layers * (N - K) * H * S * B * itemsize for K in (2, 1))

    return over_cases(
        "cache_savings",
        yours,
        right,
        hint,
        cases,
        "saved with K 2 and 1 at layers {}, N {}, H {}, S {}, B {}, itemsize {}",
    )


def check_longest_context(yours) -> Answer:
    """Exercise: how long B sequences can be whose caches share the memory with the weights."""
    hint = (
        "divide what the weights leave by what one token of all B sequences takes, 2 · layers · K · H · B · itemsize: "
        "whole tokens, rounded down, and never below 0."
    )
    cases = (
        (24 * 2**30, 16_060_522_496, 32, 8, 128, 1, 2), (24 * 2**30, 16_060_522_496, 32, 32, 128, 4, 2),
        (24 * 2**30, 141_107_412_992, 80, 8, 128, 1, 2), (1000, 40, 1, 2, 4, 3, 2),
    )  # fmt: skip

    def right(memory, weights, layers, K, H, B, itemsize):
        return max(0, memory - weights) // (2 * layers * K * H * B * itemsize)

    return over_cases(
        "longest_context",
        yours,
        right,
        hint,
        cases,
        "tokens at memory {}, weights {}, layers {}, K {}, H {}, B {}, itemsize {}",
    )


def check_most_tokens(yours) -> Answer:
    """Exercise: tokens a second of B sequences that the memory's bandwidth allows."""
    hint = (
        "a step moves weights + B · cache bytes and makes B tokens. It takes at least those bytes over gbps · 10^9; "
        "tokens a second are B over that time."
    )
    cases = ((16e9, 1e9, 1, 300), (16e9, 1e9, 32, 300), (16e9, 17e9, 4, 4800))

    def right(weights, cache, B, gbps):
        return B * gbps * 1e9 / (weights + B * cache)

    what = "tokens a second at weights {}, cache {}, B {}, gbps {}"
    return over_cases("most_tokens", yours, right, hint, cases, what)
