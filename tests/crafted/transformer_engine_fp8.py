"""Made up for the tests of 07_transformer_engine_fp8; see `crafted`."""

import math

import jax.numpy as jnp

from attnlab.records import Shape
from crafted import LONG, fact, row

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HALF, FULL = Shape.square(4, 2048, 8, 64), Shape.square(4, 2048, 8, 128)


def formats(most, count):
    return [
        *(fact("largest value", x, dtype=d) for x, d in zip(most, (E4M3, E5M2), strict=True)),
        *(fact("values from 1 to 2", x, dtype=d) for x, d in zip(count, (E4M3, E5M2), strict=True)),
    ]


def cast(bare, scaled):
    name = "error of the cast at 2^-12"
    return [fact(name, bare, "no scale"), fact(name, scaled, "with a scale")]


def product(half, eight, error=0.036):
    common = dict(table="plain product", flops=1e12)
    return [row("bfloat16", half, **common), row("FP8", eight, dtype=E4M3, error=error, **common)]


def histories(name, long, short, current):
    return [fact(name, long, "history 1024"), fact(name, short, "history 4"), fact(name, current, "current scaling")]


def settings(**words):
    return [fact("TE setting", value, LABELS[name]) for name, value in words.items()]


LABELS = {
    "default": "attn_mask_type left out",
    "no_mask": "attn_mask_type no mask",
    "swapped": "transpose_batch_sequence=True, (T, B, N, H) given",
    "seen": "padding, the mask True where seen",
    "hidden": "padding, the mask True where hidden",
    "not_swapped": "transpose_batch_sequence=True, (B, T, N, H) given",
    "groups": "K=2, num_gqa_groups=2",
    "wrong_groups": "K=2, num_gqa_groups=8",
    "no_groups": "num_gqa_groups left out",
}


def sweep(
    te, cudnn=(0.004, 0.005, 0.008, 0.02, 0.056), xla=(0.014, 0.03, 0.07, 0.25, 0.72), kernel="cudnn_sdpa", extra=3
):
    out = []
    for i, T in enumerate((128, 256, 512, 1024, 2048)):
        common = dict(table="causal sweep", shape=Shape.square(4, T, 8, 64))
        out += [row("xla", xla[i], **common), row("cudnn", cudnn[i], kernels=(("cudnn_sdpa", cudnn[i]),), **common)]
        small = (("broadcast", 0.001), ("multiply", 0.001), ("populate_rng_state", 0.001))[:extra]
        out.append(row("te", te[i], kernels=(*small, (kernel, te[i])), **common))
    return out


TE_TIMES = (0.0065, 0.008, 0.0105, 0.022, 0.059)


def fallback(calls, products):
    labels = ("default", "NVTE_FUSED_ATTN=0", "float32")
    out = [fact("fused calls in the program", n, x) for n, x in zip(calls, labels, strict=True)]
    out += [fact("matrix products in the program", n, x) for n, x in zip(products, labels, strict=True)]
    return out + [fact("warning", "falling back", x) for x in labels]


def autocast(difference, eight):
    labels = ("recipe", "recipe with fp8_dpa=True")
    return [fact("difference under autocast", difference, x) for x in labels] + [
        fact("eight-bit types in the program", eight, x) for x in labels
    ]


def scales(te, hand):
    out = [fact("scale of the input", x, f"TE, step {i}") for i, x in enumerate(te)]
    return out + [fact("scale of the input", x, f"by hand, step {i}") for i, x in enumerate(hand)]


STUCK = "scale after 3 steps, state not written back"
RULE = [1.0, *[448.0] * 4, *[0.1] * 19]


def layer(table, half, delayed, current, backward=3, reductions=(0, 1)):
    out = []
    counts = (0, *reductions)
    for label, ms, count in zip(
        ("bfloat16", "FP8 delayed", "FP8 current"), (half, delayed, current), counts, strict=True
    ):
        kernels = (("gemm", ms),) + (("input_reduce_fusion", 0.01),) * count
        out.append(row(f"{label}, forward", ms, table=table, kernels=kernels))
        out.append(row(f"{label}, forward and backward", backward * ms, table=table))
    return out


def errors(half, eight):
    labels = {"bfloat16": half, "FP8 delayed": eight, "FP8 current": eight}
    return [fact("error", e, f"{x}: {name}") for x, e in labels.items() for name in ("out", "dx", "dparams")]


def modules(cast, plain):
    return [fact("eight-bit types of a module", words, f"{name}, {how}")
            for how, words in (("autocast", cast), ("plain", plain))
            for name in ("DenseGeneral", "LayerNormMLP", "TransformerLayer")]  # fmt: skip


def imports(*words):
    labels = [f"{path}, {order}" for path in ("as the system finds it", "with the path")
              for order in ("TE first", "JAX first")]  # fmt: skip
    found = [fact("import of TE", x, label) for x, label in zip(words, labels, strict=True)]
    return [fact("the system has a cuDNN too", True), fact("cuDNN of this process", "9.19.0"), *found]


def heads(*worst, agree=True):
    shapes = [(HALF, "full"), (FULL, "full"), (LONG, "full"), (LONG, "causal")]
    out = []
    for (shape, mask), error in zip(shapes, worst, strict=True):
        out.append(fact("worst head", error, f"FP8, {mask}", shape=shape))
        out.append(fact("repeats agree", agree, f"FP8, {mask}", shape=shape))
    return out


def attention(shape, half, eight, mask="full"):
    common = dict(table="FP8 attention", shape=shape, mask=mask)
    return [row("cudnn", half, **common), row("FP8", eight, dtype=E4M3, **common)]


def cards(a100, l4, h200):
    out = []
    for card, runs in (("A100", a100), ("L4", l4), ("H100, H200", h200)):
        out += [
            fact("runs by capability", ok, f"{x} on {card}")
            for x, ok in zip(("fp8_matmul", "fp8_attention"), runs, strict=True)
        ]
    return out


OWN, SYSTEMS = "imports, cuDNN 9.19.0", "imports, cuDNN 9.14.0"

CRAFTED = {
    "two_formats": (formats((448, 57344), (8, 4)), [formats((240, 57344), (8, 4)), formats((448, 57344), (8, 8))]),
    "scale_saves_small_values": (cast(1.0, 0.027), [cast(0.1, 0.027), cast(1.0, 0.5), cast(1.0, math.nan)]),
    "plain_fp8_product": (
        [fact("FP8 products in the program", 1)], [[fact("FP8 products in the program", x)] for x in (0, 2)],
    ),
    "fp8_product_is_faster": (product(0.35, 0.22), [product(0.35, 0.34), product(0.2, 0.4)]),
    "fp8_product_error": (product(1, 1), [product(1, 1, 0.2), product(1, 1, 0.001), product(1, 1, math.nan)]),
    "delayed_scaling_lags": (
        histories("error where inputs grow", 0.99, 0.99, 0.026),
        [histories("error where inputs grow", 0.03, 0.03, 0.026),
         histories("error where inputs grow", 0.99, 0.99, 0.99)],
    ),
    "long_history_remembers": (
        histories("last error", 0.1, 0.026, 0.026),
        [histories("last error", 0.03, 0.026, 0.026), histories("last error", 0.9, 0.3, 0.026)],
    ),
    "te_default_is_causal": (
        settings(default="like causal", no_mask="like full"),
        [settings(default="like full", no_mask="like full"), settings(default="like causal", no_mask="like causal")],
    ),
    "te_transpose_is_silent": (
        settings(swapped="like causal", not_swapped="wrong: 1.2 off causal"),
        [settings(swapped="like causal", not_swapped="ValueError: no"),
         settings(swapped="wrong: 1", not_swapped="wrong: 1")],
    ),
    "te_groups_must_be_said": (
        settings(groups="like causal", wrong_groups="like causal", no_groups="RuntimeError: cast"),
        [settings(groups="like causal", wrong_groups="like causal", no_groups="like causal"),
         settings(groups="like causal", wrong_groups="wrong: 1.2 off causal", no_groups="RuntimeError: cast"),
         settings(groups="wrong: 1 off", wrong_groups="like causal", no_groups="RuntimeError: cast")],
    ),
    "te_runs_cudnn": (sweep(TE_TIMES), [sweep(TE_TIMES, kernel="cudnn_sdpa_other"), sweep(TE_TIMES, kernel="softmax")]),
    "te_costs_small_kernels": (sweep(TE_TIMES), 
        [sweep((0.0041, *TE_TIMES[1:])), sweep((*TE_TIMES[:4], 0.08)), sweep(TE_TIMES, extra=2)]),
    "te_beats_xla": (sweep(TE_TIMES), [sweep((0.02, *TE_TIMES[1:])), sweep((*TE_TIMES[:4], 0.5))]),
    "te_falls_back": (
        fallback((1, 0, 0), (0, 2, 2)),
        [fallback((1, 1, 0), (0, 2, 2)), fallback((0, 0, 0), (0, 2, 2)), fallback((1, 0, 1), (0, 2, 2)),
         fallback((1, 0, 0), (0, 0, 0))],
    ),
    "te_mask_is_inverted": (
        settings(hidden="like padded", seen="wrong: at least 1.2 off"),
        [settings(hidden="like padded", seen="like padded"), settings(hidden="like full", seen="like padded")],
    ),
    "te_modules_compute_in_fp8": (
        modules("f8e4m3fn, f8e5m2", "none"),
        [modules("none", "none"), modules("f8e4m3fn", "none"), modules("f8e4m3fn, f8e5m2", "f8e4m3fn, f8e5m2")],
    ),
    "autocast_leaves_attention": (autocast(0.0, False), [autocast(0.01, False), autocast(0.0, True)]),
    "te_follows_the_rule": (
        scales(RULE, RULE), [scales([2 * x for x in RULE], RULE), scales([1.0] * 24, [1.0] * 24)],
    ),
    "te_first_scale_is_one": (
        [*scales(RULE, RULE), fact(STUCK, 1.0)],
        [[*scales(RULE[1:], RULE), fact(STUCK, 1.0)], [*scales([1.0] * 24, RULE), fact(STUCK, 1.0)],
         [*scales(RULE, RULE), fact(STUCK, 448.0)]],
    ),
    "dense_fp8_is_faster": (
        layer("dense layer", 0.35, 0.23, 0.26),
        [layer("dense layer", 0.35, 0.34, 0.4), layer("dense layer", 0.2, 0.3, 0.3)],
    ),
    "dense_current_pays_a_pass": (layer("dense layer", 0.35, 0.23, 0.26), 
        [layer("dense layer", 0.35, 0.23, 0.2), layer("dense layer", 0.35, 0.23, 0.26, reductions=(1, 1))]),
    "dense_fp8_error": (
        errors(0.002, 0.04), [errors(0.002, 0.2), errors(0.02, 0.04), errors(0.0001, 0.001), errors(0.002, math.nan)],
    ),
    "layer_gains_too": (layer("transformer layer", 5, 3, 3.3), [layer("transformer layer", 5, 4.9, 3)]),
    "import_order_matters": (
        imports(SYSTEMS, "OSError: no", OWN, OWN),
        [imports(OWN, "OSError: no", OWN, OWN), imports(SYSTEMS, SYSTEMS, OWN, OWN),
         imports("OSError: no", "OSError: no", OWN, OWN), imports(SYSTEMS, "OSError: no", OWN, SYSTEMS)],
    ),
    "fp8_attention_is_right": (
        heads(0.06, 0.06, 0.06, 0.04),
        [heads(12.7, 0.06, 0.06, 0.04), heads(math.nan, 0.06, 0.06, 0.04), heads(0.06, 0.06, 0.06, math.nan),
         heads(0.06, 0.06, 0.06, 0.04, agree=False)],
    ),
    "fp8_attention_is_faster": (
        [*attention(LONG, 1.65, 1.11), *attention(LONG, 0.9, 0.58, "causal")],
        [[*attention(LONG, 1.65, 1.5), *attention(LONG, 0.9, 0.58, "causal")],
         [*attention(LONG, 1.65, 1.11), *attention(LONG, 0.9, 0.8, "causal")]],
    ),
    "fp8_attention_small_heads_gain_less": (
        [*attention(HALF, 0.078, 0.068), *attention(FULL, 0.106, 0.078)],
        [[*attention(HALF, 0.078, 0.04), *attention(FULL, 0.106, 0.078)]],
    ),
    "l4_has_fp8_products": (
        cards((False, False), (True, False), (True, True)),
        [cards((False, False), (False, False), (True, True)), cards((False, False), (True, True), (True, True))],
    ),
}  # fmt: skip


def scale_of_max(history, scale, margin):
    return 448 / max(history) / 2**margin if max(history) else scale


MISTAKES = {
    "next_scale": [
        lambda history, scale, margin: 448 / max(history) if 0 < max(history) < math.inf else scale,
        lambda history, scale, margin: 448 / max(history) * 2**margin if 0 < max(history) < math.inf else scale,
        scale_of_max,
        lambda history, scale, margin: 64.0,
    ],
    "unscaled_product": [
        lambda x8, w8, scale_x, scale_w: x8.astype(jnp.float32) @ w8.astype(jnp.float32).T,
        lambda x8, w8, scale_x, scale_w: x8.astype(jnp.float32) @ w8.astype(jnp.float32).T / scale_x,
        lambda x8, w8, scale_x, scale_w: x8.astype(jnp.float32) @ w8.astype(jnp.float32).T / 64,
    ],
    "runs_in_fp8": [
        lambda what, capability: capability[0] >= 9,
        lambda what, capability: capability >= (8, 9),
        lambda what, capability: True,
    ],
    "te_mask": [
        lambda mask, T: ~mask,
        lambda mask, T: jnp.broadcast_to(~mask, (mask.shape[0], 1, mask.shape[3], mask.shape[3])),
    ],
}
