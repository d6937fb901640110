"""Made up for the tests of 09_training_and_memory; see `crafted`."""

import numpy as np

from attnlab.records import Shape
from crafted import fact, row

STEP = Shape.square(4, 2048, 16, 128)
HOPPER = {"capability": "9.0", "kind": "gpu"}


def by(name, values: dict, **fields):
    return [fact(name, value, label, **fields) for label, value in values.items()]


def gradient(auto=4e-7, differences=2e-6):
    return by("error of a gradient", {"jax.grad, float32": auto, "finite differences, float64": differences})


def errors(**worse):
    return by("error of dq, dk, dv", {"naive": 6e-3, "xla": 2e-3, "flash": 3e-3, **worse})


def products(**other):
    return by("matrix products", {"naive": 6, "xla": 6, "flash": 9, **other})


def timed(forward=(0.15, 0.2), both=(0.6, 1.1), xla=4.0):
    labels = ("cudnn", "flash")
    fields = dict(shape=STEP, mask="causal")
    return [
        *(row(x, ms, table="forward", **fields) for x, ms in zip(labels, forward, strict=True)),
        *(row(x, ms, table="forward and backward", **fields) for x, ms in zip(labels, both, strict=True)),
        row("xla", xla, table="forward and backward", **fields),
    ]


def lengths(name, sizes: dict, **fields):
    """`sizes` is {label: {T: value}}."""
    return [
        fact(name, value, label, shape=Shape.square(1, T, 16, 128), **fields)
        for label, of in sizes.items()
        for T, value in of.items()
    ]


def kept(naive=2, xla=2, flash=0, **more):
    counts = {"naive": naive, "xla": xla, "flash": flash, **more}
    return lengths("T×S arrays kept", {label: {256: n, 2048: n} for label, n in counts.items()})


def kept_bytes(naive=(14, 1000), flash=(8, 16)):
    sides = {"naive": naive, "flash": flash}
    return lengths("bytes kept", {label: dict(zip((256, 16384), of, strict=True)) for label, of in sides.items()})


def memory(naive=4.0, xla=4.0, flash=2.0, **more):
    growth = {"naive": naive, "xla": xla, "flash": flash, **more}
    return lengths("temporaries", {label: {4096: 2**20, 8192: int(x * 2**20)} for label, x in growth.items()})


def layers(one=(100, 93), four=(400, 140)):
    values = {}
    for count, (plain, again) in (("one layer", one), ("four layers", four)):
        values |= {f"{count}, naive": plain, f"{count}, naive, checkpoint": again}
    return by("temporaries of layers", values)


def longest(naive=24576, xla=16384, flash=131072, **more):
    return by("longest T", {"naive": naive, "xla": xla, "flash": flash, **more})


def analysed(naive=24576, xla=16384):
    tried = {
        label: {T: T <= limit for T in (8192, 16384, 24576, 32768, 49152)}
        for label, limit in (("naive", naive), ("xla", xla))
    }
    return [*longest(), *lengths("fits by analysis", tried)]


def finite(way, bad=None):
    """What the check found of `way`: "none" but for `bad`, {(S, scale): names}."""
    return [
        fact("not finite", (bad or {}).get((S, scale), "none"), f"{way}, scale {scale}",
             shape=Shape.square(2, S, 4, 64), env=HOPPER)
        for S in (128, 192, 256)
        for scale in (1, 8, 10)
    ]  # fmt: skip


def others(bad=None, cudnn=None):
    ways = {"naive": None, "xla": None, "flash": bad, "cudnn": cudnn, "cudnn, mask=tril": {(192, 10): "dq"}}
    return [f for way, found in ways.items() for f in finite(way, found)]


def tril(bad):
    return finite("cudnn, mask=tril", bad)


def bits(flash=0):
    return by("runs with other bits", {"naive": 0, "xla": 0, "cudnn": 9, "flash": flash})


def training(name, **values):
    return by(name, {"naive": 0.0, "xla": 0.0, "cudnn": 0.0, "flash": 0.0, "tampered": 0.0, **values})


def losses(**end):
    ends = {"naive": 0.5, "xla": 0.5, "cudnn": 0.5, "flash": 0.5, "tampered": 0.05, **end}
    return [*training("loss at the start", **dict.fromkeys(ends, 3.3)), *training("loss at the end", **ends)]


def curves(**differ):
    return training(
        "largest difference of the loss", **{"xla": 4e-3, "cudnn": 5e-3, "flash": 5e-3, "tampered": 0.9, **differ}
    )


def steps(name, xla, **more):
    return training(name, **{"naive": xla, "xla": xla, "cudnn": xla / 4, "flash": xla / 3, **more})


NAN = float("nan")

CRAFTED = {
    "formula_is_right": (gradient(), [gradient(auto=0.1), gradient(differences=1e-3), gradient(differences=NAN)]),
    "gradients_are_right": (errors(cudnn=2e-3), [errors(flash=0.1), errors(cudnn=NAN), errors(naive=0.05)]),
    "products_of_a_step": (products(), [products(flash=7), products(naive=7), products(xla=2)]),
    "training_costs_more_than_three": (timed(), [timed(both=(0.4, 1.1)), timed(both=(0.6, 0.5))]),
    "fused_step_is_faster": (timed(), [timed(xla=2.0), timed(both=(2.5, 1.1))]),
    "kernels_keep_no_weights": (kept(cudnn=0), [kept(naive=0), kept(flash=1), kept(cudnn=1)]),
    "ratio_of_kept_grows": (kept_bytes(), [kept_bytes(naive=(80, 160)), kept_bytes(flash=(8, 900))]),
    "temporaries_follow_the_formula": (memory(cudnn=2.0), [memory(naive=2.0), memory(flash=4.0), memory(cudnn=4.0)]),
    "checkpoint_saves_over_layers": (layers(), [layers(one=(100, 30)), layers(four=(400, 390))]),
    "kernels_fit_longer": (
        longest(cudnn=131072), [longest(flash=32768), longest(cudnn=16384), longest(naive=65536)],
    ),
    "analysis_predicts_the_limit": (
        analysed(), [analysed(naive=49152), analysed(xla=8192), analysed(naive=16384)],
    ),
    "tril_gradient_is_nan": (
        tril({(192, 8): "dq", (192, 10): "dq"}),
        [
            tril({}), tril({(192, 8): "dq"}), tril({(192, 10): "dq", (256, 10): "dq"}), tril({(192, 10): "dq, out"}),
            tril({(192, 10): "dq", (192, 1): "dq"}),
        ],
    ),
    "other_gradients_are_finite": (others(), [others(bad={(128, 1): "dk"}), others(cudnn={(192, 8): "dq"})]),
    "flash_gives_the_same_bits": (bits(), [bits(flash=1), bits(flash=9)]),
    "loss_falls": (losses(), [losses(flash=2.5), losses(cudnn=NAN), losses(naive=3.4)]),
    "curves_agree": (curves(), [curves(flash=0.2), curves(cudnn=NAN), curves(xla=0.011)]),
    "tampering_is_found": (curves(), [curves(tampered=0.01), curves(tampered=0.029), curves(tampered=NAN)]),
    "fused_training_is_faster": (steps("ms a step", 3.0), [steps("ms a step", 3.0, flash=2.95)]),
    "fused_training_is_smaller": (
        steps("temporaries of a step", 2**30), [steps("temporaries of a step", 2**30, cudnn=2**29 + 1)],
    ),
}  # fmt: skip

MISTAKES = {
    "softmax_backward": [
        lambda p, dp: p * dp,
        lambda p, dp: p * (dp - dp.sum(axis=-1, keepdims=True)),
        lambda p, dp: p * (1 - p) * dp,  # the diagonal alone
        lambda p, dp: p * (dp - (p * dp).sum(axis=0, keepdims=True)),
        lambda p, dp: dp - (p * dp).sum(axis=-1, keepdims=True),
        lambda p, dp: p * (dp - np.mean(p * dp, axis=-1, keepdims=True)),
    ],
    "training_flops": [
        lambda B, T, N, H: 7 * 2 * B * N * H * T * T,
        lambda B, T, N, H: 6 * 2 * B * N * H * T * (T + 1) // 2,
        lambda B, T, N, H: 7 * B * N * H * T * (T + 1) // 2,
        lambda B, T, N, H: 7 * 2 * B * N * H * T * (T - 1) // 2,  # without the diagonal
        lambda B, T, N, H: 14,
    ],
    "break_even": [
        lambda H, itemsize: H // 2 + 1,  # without the log-sum-exp
        lambda H, itemsize: (H * itemsize + 4) // (2 * itemsize),  # the last at which it doesn't
        lambda H, itemsize: (H * itemsize + 4) // itemsize + 1,  # one array of weights
        lambda H, itemsize: (4 * H * itemsize + 4) // (2 * itemsize) + 1,  # q, k and v counted on one side
        lambda H, itemsize: (H + 1) // 2 + 1,  # the log-sum-exp as wide as the rest
        lambda H, itemsize: H / 2 + 2 / itemsize + 1,
        lambda H, itemsize: 66,
    ],
    "checkpoint_peaks": [
        lambda L, weights, inputs: (L * weights, L * inputs),
        lambda L, weights, inputs: (L * weights, weights),
        lambda L, weights, inputs: (weights, L * inputs + weights),
        lambda L, weights, inputs: (L * weights, L * (inputs + weights)),
        lambda L, weights, inputs: (L * weights + L * inputs, L * inputs + weights),
    ],
}
