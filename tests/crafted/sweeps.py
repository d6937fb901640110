"""Made up for the tests of 05_sweeps; see `crafted`."""

from attnlab.records import Shape
from crafted import DEFAULT, fact, row

LENGTHS = (64, 128, 1024, 2048, 4096, 8192)
NAIVE = {64: 0.010, 128: 0.0131, 1024: 0.08, 2048: 0.3, 4096: 1.2, 8192: 4.72}
XLA = {64: 0.010, 128: 0.0124, 1024: 0.1, 2048: 0.44, 4096: 1.8, 8192: 7.05}
CUDNN = {64: 0.0037, 128: 0.0039, 1024: 0.02, 2048: 0.078, 4096: 0.28, 8192: 1.12}
WALL = 0.08


def at(T, B=4, N=8, H=64):
    return Shape.square(B, T, N, H)


def default(naive=0.0131, cudnn=0.0039, walls=(0.089, 0.0998)):
    common = dict(table="default shape", shape=DEFAULT)
    return [row("naive", naive, wall_ms=walls[0], **common), row("cudnn", cudnn, wall_ms=walls[1], **common)]


def length(naive=None, xla=None, cudnn=None, walls=None, xla_bytes=None, cudnn_bytes=512):
    """The sweep in bfloat16; each dict changes some lengths of a variant. `walls` are of naive, by length."""
    out = []
    for T in LENGTHS:
        flops = 4.0 * 4 * 8 * 64 * T * T
        common = dict(table="length, bfloat16", shape=at(T), flops=flops, bound_ms=flops / 989e9)
        ms = {"naive": NAIVE, "xla": XLA, "cudnn": CUDNN}
        ms = {label: {**ms[label], **(change or {})}[T]
              for label, change in (("naive", naive), ("xla", xla), ("cudnn", cudnn))}  # fmt: skip
        wall = (walls or {}).get(T, WALL + ms["naive"])
        size = (xla_bytes or {}).get(T, 6 * 32 * T * T)
        out += [
            row("naive", ms["naive"], wall_ms=wall, temp_bytes=4 * 32 * T * T, **common),
            row("xla", ms["xla"], temp_bytes=size, **common),
            row("cudnn", ms["cudnn"], wall_ms=WALL + ms["cudnn"], temp_bytes=cudnn_bytes, **common),
        ]
    return out


def longest(xla, cudnn=True):
    """The sweep with T = 16384, where XLA is refused in these words, and cuDNN is there or is not."""
    common = dict(table="length, bfloat16", shape=at(16384))
    no = fact("refused", "MemoryError: cudnn ran out of memory", "cudnn", dtype="bfloat16", **common)
    there = row("cudnn", 4.75, temp_bytes=512, **common) if cudnn else no
    return [*length(), fact("refused", xla, "xla", dtype="bfloat16", **common), there]


def steps(**exact):
    """The bfloat16 sweep, and naive float32 at two lengths."""
    common = dict(table="length, float32", dtype="float32")
    return [*length(), *(row("naive", ms, shape=at(int(T[1:])), **common) for T, ms in exact.items())]


def memory(ratios):
    return [fact("memory", x, "xla over cudnn", shape=at(T), dtype="bfloat16") for T, x in ratios.items()]


def batch(one, sixteen):
    common = dict(table="batch, bfloat16", flops=1e9)
    return [row("cudnn", one, shape=at(256, B=1), **common), row("cudnn", sixteen, shape=at(256, B=16), **common)]


def heads(*ms):
    shapes = [at(2048, N=512 // H, H=H) for H in (32, 64, 128)]
    common = dict(table="heads of one width")
    return [
        fact("refused", "ValueError: no", "cudnn", shape=shape, dtype="bfloat16", **common)
        if x is None else row("cudnn", x, shape=shape, flops=3.4e10, **common)
        for shape, x in zip(shapes, ms, strict=True)
    ]  # fmt: skip


CRAFTED = {
    "short_gain_is_hidden": (
        default(), [default(cudnn=0.0075), default(walls=(0.16, 0.1))],
    ),
    "out_of_memory_is_survived": (
        longest("MemoryError: xla at B4 T16384 N8 H64 ran out of memory"),
        [longest("ValueError: no"), longest("MemoryError: xla ran out of memory", cudnn=False)],
    ),
    "gain_at_long_lengths": (
        length(), [length(naive={4096: 0.5}), length(cudnn={8192: 0.5}), length(naive={2048: 0.05})],
    ),
    "length_fills_the_device": (length(), [length(cudnn={4096: 0.5}), length(cudnn={8192: 12.0})]),
    "temporaries_by_length": (
        length(),
        [length(xla_bytes={2048: 2 * 6 * 32 * 1024**2}), length(cudnn_bytes=2**21)],
    ),
    "memory_ratio_grows": (
        memory({512: 7.0, 1024: 13.0, 2048: 25.0, 4096: 49.0}),
        [memory({1024: 15.0, 2048: 15.0}), memory({1024: 13.0, 2048: 25.0, 4096: 30.0})],
    ),
    "xla_falls_behind": (
        length(), [length(xla={8192: 4.7}), length(xla={2048: 0.31}), length(xla={2048: 0.29, 4096: 1.0})],
    ),
    "cudnn_leads_everywhere": (length(), [length(cudnn={64: 0.011}), length(naive={8192: 1.0})]),
    "hidden_behind_dispatch": (
        length(), [length(walls={128: 0.16}), length(walls={8192: 1.3}), length(walls={4096: 0.3})],
    ),
    "two_steps_two_causes": (
        steps(T128=0.0163, T4096=2.4),
        [steps(T128=0.0120, T4096=2.4), steps(T128=0.0163, T4096=1.1), steps(T128=0.06, T4096=2.4)],
    ),
    "batch_fills_the_device": (batch(0.0043, 0.011), [batch(0.0043, 0.04), batch(0.001, 0.016)]),
    "large_heads_are_faster": (
        heads(0.12, 0.078, 0.055), [heads(0.06, 0.06, 0.055), heads(0.12, None, 0.055), heads(0.05, 0.06, 0.07)],
    ),
}  # fmt: skip


def timed(rows, dtype="bfloat16"):
    return [r for r in rows if hasattr(r, "ms") and r.dtype == dtype]


def ratio(rows, first, second, value):
    found = {(r.label, r.shape.T): getattr(r, value) for r in rows}
    both = [T for label, T in found if label == second and (first, T) in found]
    return {T: found[first, T] / found[second, T] if found[second, T] else float("inf") for T in both}


MISTAKES = {
    "roofline_bound": [
        lambda intensity, tflops, gbps: max(tflops, intensity * gbps / 1e3),
        lambda intensity, tflops, gbps: tflops,
        lambda intensity, tflops, gbps: intensity * gbps / 1e3,
        lambda intensity, tflops, gbps: min(tflops, gbps / 1e3 / intensity),
    ],
    "speedups": [
        lambda rows: ratio(timed(rows), "naive", "cudnn", "wall_ms"),
        lambda rows: ratio(timed(rows), "cudnn", "naive", "ms"),
        lambda rows: ratio(timed(rows), "xla", "cudnn", "ms"),
        lambda rows: ratio(rows, "naive", "cudnn", "ms"),
        lambda rows: ratio([r for r in rows if hasattr(r, "ms")], "naive", "cudnn", "ms"),
        lambda rows: {T: 3.0 for T in (256, 512, 1024)},
        lambda rows: 3.0,
    ],
    "memory_ratio": [
        lambda rows: ratio(timed(rows), "xla", "cudnn", "temp_bytes"),
        lambda rows: ratio(timed(rows), "xla", "cudnn", "bytes"),
        lambda rows: {},
    ],
    "head_dim_sweep": [
        lambda sweep, variants: sweep(variants, table="head dim", T=256, H=64),
        lambda sweep, variants: sweep(variants, table="head dim", H=(32, 64, 128)),
        lambda sweep, variants: sweep(variants, table="head dim", T=256, H=(32, 64, 128), dtype="float32"),
        lambda sweep, variants: sweep({"cudnn": None}, table="head dim", T=256, H=(32, 64, 128)),
        lambda sweep, variants: bool(sweep(variants, table="head dim", T=256, H=(32, 64, 128))),
        lambda sweep, variants: sweep(variants, T=256, H=(32, 64, 128)),
    ],
}
