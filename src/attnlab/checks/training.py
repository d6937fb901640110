"""The exercises of 09_training_and_memory."""

import numpy as np

from attnlab.attention import visible_pairs
from attnlab.exercises import Answer, compare, over_cases, together


def check_softmax_backward(yours) -> Answer:
    """Exercise: the gradient of the scores from weights and their gradient."""
    hint = (
        "a weight rises only if the others of its row fall: dS = P * (dP - sum of P * dP over the row). Keep the "
        "summed axis: `keepdims=True`."
    )

    def right(p, dp):
        return p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    answers = []
    for T, S, seed in ((3, 5, 0), (4, 4, 1), (1, 2, 2)):
        rng = np.random.default_rng(seed)
        p = np.exp(rng.normal(size=(T, S)))
        case = p / p.sum(axis=-1, keepdims=True), rng.normal(size=(T, S))
        answers.append(compare("softmax_backward", yours, right, hint, args=case, what=f"T {T}, S {S}: ds"))
    return together("softmax_backward", answers)


def check_training_flops(yours) -> Answer:
    """Exercise: FLOPs of forward and backward, causal, by the count of 7 products."""
    hint = (
        "one product takes 2·H FLOPs for each visible pair of each head of each batch element, and causal attention "
        "sees T·(T + 1) / 2 pairs."
    )

    def right(B, T, N, H):
        return 7 * 2 * B * N * H * visible_pairs(T, T, is_causal=True)

    cases = ((1, 1, 1, 1), (2, 8, 4, 16), (4, 2048, 16, 128))
    return over_cases("training_flops", yours, right, hint, cases, "B {}, T {}, N {}, H {}: FLOPs")


def check_break_even(yours) -> Answer:
    """Exercise: the smallest T at which naive attention keeps more than a kernel that recomputes."""
    hint = (
        "for one head, naive keeps 2·T·T·itemsize bytes and the kernel T·H·itemsize + 4·T. Divide both by T, and take "
        "the first whole T beyond."
    )

    def right(H, itemsize):
        return (H * itemsize + 4) // (2 * itemsize) + 1

    cases = ((128, 2), (64, 2), (128, 4), (16, 4))
    return over_cases("break_even", yours, right, hint, cases, "H {}, {} bytes a number: T")


def check_checkpoint_peaks(yours) -> Answer:
    """Exercise: the peak of L layers, without and with checkpoints."""
    hint = (
        "without, the weights of all L layers wait. With, the inputs of all L layers wait, and of one layer at a time "
        "the weights are made again."
    )

    def right(L, weights, inputs):
        return L * weights, L * inputs + weights

    cases = ((4, 1000, 10), (1, 1000, 10), (32, 2**30, 2**24))
    return over_cases("checkpoint_peaks", yours, right, hint, cases, "L {}, weights {}, inputs {}: peaks")
