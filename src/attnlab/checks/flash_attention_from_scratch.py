"""The exercises of 08_flash_attention_from_scratch."""

import numpy as np

from attnlab.attention import visible
from attnlab.exercises import Answer, compare, over_cases, together, untried


def check_join_halves(yours) -> Answer:
    """Exercise: the softmax over two halves of the keys, from each half's maximum, sum and output."""
    hint = (
        "bring both to the larger maximum: each sum shrinks by exp(its top − new top). An output is already divided "
        "by its own sum: weigh it by that shrunken sum, then divide by the new one. A half without keys has top −inf."
    )
    if untried(yours) or not callable(yours):
        return compare("join_halves", yours, 0.0, hint, what="maximum, sum and output")

    def halves(seed, scale, split, hidden=False):
        rng = np.random.default_rng(seed)
        x, v = scale * rng.normal(size=12), rng.normal(size=(12, 3))
        if hidden:
            x[split:] = -np.inf

        def part(x, v):
            top = x.max()
            p = np.exp(x - top) if top > -np.inf else np.zeros(len(x))
            return top, p.sum(), p @ v / (p.sum() or 1.0)

        return (*part(x[:split], v[:split]), *part(x[split:], v[split:])), part(x, v)

    answers = []
    for name, *case in (
        ("two halves", 0, 1.0, 6), ("unequal parts", 1, 1.0, 9), ("the larger first", 6, 3.0, 4),
        ("logits of 1e4", 2, 1e4, 5), ("a half without keys", 3, 1.0, 6, True),
    ):  # fmt: skip
        arguments, right = halves(*case)
        for i, what in enumerate(("maximum", "sum", "output")):

            def one(*args, i=i):
                with np.errstate(all="ignore"):
                    found = yours(*args)
                return found if untried(found) or not isinstance(found, tuple) else found[i]

            answers.append(compare("join_halves", one, right[i], hint, args=arguments, what=f"{name}: {what}"))
    return together("join_halves", answers)


def check_window_blocks(yours) -> Answer:
    """Exercise: the first block of keys to visit, and the one after the last, for a causal window."""
    hint = (
        "the first row sees the keys from start − left, or from 0; the last row, start + bq − 1, sees itself last. "
        "Divide by bk: down for the first block; the end is one more than the block of the last key. Never beyond S."
    )

    def right(start, bq, bk, left, S):
        rows = np.arange(start, min(start + bq, S))
        seen = visible(S, S, rows, is_causal=True, local_window_size=(left, 0)).any(axis=0)
        keys = np.flatnonzero(seen)
        return int(keys[0]) // bk, int(keys[-1]) // bk + 1

    cases = (
        (0, 16, 16, 1000, 128), (64, 16, 16, 20, 128), (64, 32, 16, 16, 128), (48, 16, 32, 0, 128),
        (96, 32, 32, 33, 128), (112, 32, 16, 15, 120),
    )  # fmt: skip
    return over_cases("window_blocks", yours, right, hint, cases, "start {}, bq {}, bk {}, left {}, S {}: blocks")


def check_largest_block(yours) -> Answer:
    """Exercise: the largest power of two of keys that fits into shared memory."""
    hint = (
        "solve bytes = itemsize · H · (bq + 2 · stages · bk) for bk, and go down to a power of two; below 16 it is 0."
    )

    def right(shared, H, itemsize, bq, stages):
        room = (shared // (itemsize * H) - bq) // (2 * stages)
        return 2 ** (room.bit_length() - 1) if room >= 16 else 0

    cases = (
        (227 * 1024, 128, 2, 128, 3), (99 * 1024, 128, 2, 128, 2), (99 * 1024, 64, 2, 128, 3),
        (163 * 1024, 128, 2, 256, 3), (99 * 1024, 128, 4, 128, 2), (99 * 1024, 128, 4, 128, 3),
        (227 * 1024, 128, 4, 64, 2),
    )  # fmt: skip
    return over_cases("largest_block", yours, right, hint, cases, "{} bytes, H {}, itemsize {}, bq {}, stages {}: bk")
