"""Made up for the tests of 04_causal_and_windows; see `crafted`."""

import jax.numpy as jnp

from attnlab.records import Shape
from crafted import LONG, fact, row


def timed(full=1.65, causal=0.90, mask=1.9, xla=(7.4, 11.4)):
    """The long shape without a mask, causal, and by mask; the bound is that of all pairs."""
    work = dict(shape=LONG, flops=1.1e12, bound_ms=1.11)
    half = dict(shape=LONG, flops=0.55e12, bound_ms=0.56, mask="causal")
    return [
        row("cudnn", full, table="no mask", **work),
        row("xla", xla[0], table="no mask", **work),
        row("cudnn", causal, table="causal", **half),
        row("xla", xla[1], table="causal", **half),
        row("cudnn, mask", mask, table="mask", **half),
    ]


def windows(label, ms, memory=0):
    memory = memory if isinstance(memory, tuple) else (memory, memory)
    return [
        row(label, t, table="windows", shape=LONG, mask=f"window ({W - 1}, 0) causal", temp_bytes=m)
        for W, t, m in zip((8192, 128), reversed(ms), reversed(memory), strict=True)
    ]


def pairs(name, *wrong, labels=("xla", "cudnn")):
    return [fact(name, x, label) for x, label in zip(wrong, labels, strict=True)]


def positions(changed, last):
    return [fact("positions that change", changed), fact("last position changes", last)]


def alignment(top=0, bottom=0):
    return [
        *pairs("causal, T 16, S 32: wrong pairs", 0, top), *pairs("bottom-right mask: wrong pairs", 0, bottom),
    ]  # fmt: skip


def decode(wrong, right):
    return [
        fact("decode error", e, f"{x}, {name}")
        for x in ("xla", "cudnn")
        for name, e in (("is_causal", wrong), ("no flag", right))
    ]


def seen(first, second):
    return [fact("keys seen", first, "xla, left 0"), fact("keys seen", second, "cudnn, left 7")]


def window_errors(cudnn=1.2, flag=2e-3, xla=2e-3):
    values = {"cudnn, is_causal=False": cudnn, "cudnn, is_causal=True": flag}
    values |= {"xla, is_causal=False": xla, "xla, is_causal=True": xla}
    return [fact("window error", x, label) for label, x in values.items()]


def right_window(without, with_flag):
    name = "cuDNN, window (16, 16)"
    return [fact(name, without, "is_causal=False"), fact(name, with_flag, "is_causal=True")]


def nothing(case, xla, cudnn):
    return [fact("sees nothing", x, f"{label}, {case}") for label, x in (("xla", xla), ("cudnn", cudnn))]


def programs(flag=False, mask=True, sizes=(2**21, 2**23, 2**25)):
    out = []
    for T, size in zip((1024, 2048, 4096), sizes, strict=True):
        for label, written, temporaries in (("is_causal", flag, 512), ("mask=tril", mask, size)):
            where = dict(label=label, shape=Shape.square(2, T, 8, 64))
            out.append(fact("temporaries of cuDNN", temporaries, **where))
            out.append(fact("cuDNN: T×S array written", written, **where))
    return out


def gradients(way, hit=(), rest=0, lengths=(192, 256, 320, 384, 448)):
    """`hit` are the (S, std) at which one row of dQ is NaN."""
    return [
        *(
            fact("NaN rows of dQ", int((S, std) in hit), f"{way}, std {std}", shape=Shape.square(2, S, 4, 64))
            for S in lengths
            for std in (1, 10)
        ),
        fact("NaN rows of output, dK, dV", rest, way),
    ]


NO = "ValueError: cuDNN doesn't support right window: 16 when causal mask is not used."
MEAN = "the mean of v"

CRAFTED = {
    "causal_keeps_the_last": (positions(15, False), [positions(16, True), positions(14, False)]),
    "pattern_is_the_mask": (
        pairs("wrong pairs", 0, 0, labels=("xla, causal", "cudnn, causal")),
        [pairs("wrong pairs", *x, labels=("xla, causal", "cudnn, causal")) for x in ((0, 3), (1, 0))],
    ),
    "causal_skips_in_cudnn": (timed(), [timed(causal=1.65), timed(causal=1.2)]),
    "causal_costs_on_xla": (timed(), [timed(xla=(7.4, 7.4)), timed(xla=(7.4, 4.0))]),
    "hidden_pairs_beat_the_peak": (timed(), [timed(causal=1.2)]),
    "causal_is_top_left": (alignment(), [alignment(top=256), alignment(bottom=1)]),
    "decode_without_the_flag": (
        decode(9.5, 2e-3), [decode(0.0, 2e-3), decode(9.5, 0.3), decode(9.5, float("nan"))],
    ),
    "window_counts_itself": (seen(1, 8), [seen(0, 7), seen(1, 7), seen(1, 9)]),
    "window_cuts_cudnn_time": (
        windows("cudnn", (0.093, 0.94)), [windows("cudnn", (0.94, 0.94)), windows("cudnn", (0.3, 0.94))],
    ),
    "window_saves_no_time_on_xla": (
        windows("xla", (11.4, 11.4)), [windows("xla", (6.0, 11.4)), windows("xla", (14.0, 11.4))],
    ),
    "window_saves_no_memory_on_xla": (
        windows("xla", (11.4, 11.4), 12 * 2**30), [windows("xla", (11.4, 11.4), (2**30, 12 * 2**30))],
    ),
    "window_sees_the_future": (
        pairs("future pairs seen", 0, 496), [pairs("future pairs seen", *x) for x in ((0, 0), (496, 496))],
    ),
    "window_error_is_large": (
        window_errors(), [window_errors(cudnn=2e-3), window_errors(flag=0.5), window_errors(xla=0.5)],
    ),
    "guard_refuses_the_window": ([fact("guard refuses", True)], [[fact("guard refuses", False)]]),
    "right_window_needs_causal": (
        right_window(NO, "runs"),
        [right_window("runs", "runs"), right_window(NO, NO), right_window("Error: x", "runs")],
    ),
    "blind_row_is_the_mean": (
        nothing("row hidden by the mask", MEAN, MEAN),
        [nothing("row hidden by the mask", *x) for x in ((MEAN, "zeros"), ("NaN", MEAN))],
    ),
    "padded_queries_are_zero": (
        nothing("rows beyond query_seq_lengths", "zeros", "zeros"),
        [nothing("rows beyond query_seq_lengths", *x) for x in (("zeros", MEAN), (MEAN, "zeros"))],
    ),
    "no_keys_at_all": (
        nothing("key_value_seq_lengths of 0", MEAN, "zeros"),
        [nothing("key_value_seq_lengths of 0", *x) for x in ((MEAN, MEAN), ("zeros", "zeros"), (MEAN, "NaN"))],
    ),
    "mask_is_an_array": (
        programs(), [programs(flag=True), programs(mask=False), programs(sizes=(2**21, 2**22, 2**23))],
    ),
    "mask_skips_nothing": (timed(), [timed(mask=0.9), timed(mask=1.2)]),
    "mask_gradients_hold_nan": (
        gradients("cudnn, mask", {(192, 10), (448, 10)}),
        [
            gradients("cudnn, mask"),
            gradients("cudnn, mask", {(192, 10), (256, 10)}),
            gradients("cudnn, mask", {(192, 10), (192, 1)}),
            gradients("cudnn, mask", {(192, 10)}, rest=1),
        ],
    ),
    "flag_gradients_are_finite": (
        gradients("cudnn, is_causal"),
        [gradients("cudnn, is_causal", {(192, 10)}), gradients("cudnn, is_causal", rest=2)],
    ),
    "xla_gradients_are_finite": (
        gradients("xla, mask", lengths=(192, 256)),
        [gradients("xla, mask", {(256, 1)}), gradients("xla, mask", rest=1)],
    ),
}  # fmt: skip


def tril(k):
    return lambda start, T, S: jnp.tril(jnp.ones((1, 1, T, S), bool), k(start, T, S))


def options(**more):
    return lambda W: {"is_causal": True, "local_window_size": (W - 1, 0), **more}


MISTAKES = {
    "chunk_mask": [
        tril(lambda start, T, S: 0),  # JAX's own causal flag
        tril(lambda start, T, S: start - 1),
        tril(lambda start, T, S: start + 1),
        lambda start, T, S: jnp.arange(S)[None, None, None] < start + T,  # new tokens see each other's future
        lambda start, T, S: jnp.tril(jnp.ones((T, S), bool), start),
        lambda start, T, S: jnp.tril(jnp.ones((1, 1, T, S)), start),  # no mask, but numbers
        lambda start, T, S: jnp.broadcast_to(jnp.arange(S) <= start, (1, 1, T, S)),
    ],
    "window_pairs": [
        lambda T, W: T * (T + 1) // 2,
        lambda T, W: T * W - W * (W - 1) // 2,  # W above T
        lambda T, W: T * (W + 1) - W * (W + 1) // 2,  # one key too many
        lambda T, W: T * min(W, T),
        lambda T, W: 36,
    ],
    "window_for": [
        options(local_window_size=(3, 0)),
        lambda W: {"is_causal": True, "local_window_size": (W, 0)},
        lambda W: {"is_causal": True},
        lambda W: {"local_window_size": W - 1},
        lambda W: {"local_window_size": (W - 1, W - 1)},
        lambda W: {"is_causal": False, "local_window_size": (W - 1, 0)},
        lambda W: {"window": W},
        lambda W: (W - 1, 0),
    ],
    "zero_blind": [
        lambda out, mask: out,
        lambda out, mask: jnp.nan_to_num(out),
        lambda out, mask: jnp.where(mask.all(axis=-1).transpose(0, 2, 1)[..., None], out, 0),
        lambda out, mask: jnp.where(mask.any(axis=(1, 3))[:, :, None, None], out, 0),  # all heads at once
        lambda out, mask: jnp.zeros_like(out),
    ],
}
