"""Made up for the tests of 06_mha_gqa_mqa; see `crafted`."""

import numpy as np

from attnlab.records import Shape
from crafted import fact, row


def patterns(label, *errors):
    return [
        fact("error of a pattern", e, label, shape=Shape(2, 64, 64, 8, K, 64), dtype="bfloat16")
        for K, e in zip((8, 2, 1), errors, strict=True)
    ]


def copies(repeat=4e-4, tile=1.4, apart=1e-6):
    return [
        fact("error of explicit heads", repeat, "repeat"),
        fact("error of explicit heads", tile, "tile"),
        fact("difference from the grouped call", apart, "repeat"),
    ]


def cache(mha=4 * 2**34, gqa=2**34, weights=16_060_522_496):
    return [
        fact("cache at 128k", mha, "MHA"),
        fact("cache at 128k", gqa, "GQA, as published"),
        fact("weights in bfloat16", weights, "8B"),
    ]


def counted(work, moved):
    named = zip(("MHA", "GQA", "MQA"), work, moved, strict=True)
    return [
        fact(what, value, name)
        for name, flops, nbytes in named
        for what, value in (("FLOPs of a decode step", flops), ("bytes of a decode step", nbytes))
    ]


def decode(label, *ms):
    """The large step with 8, 2 and 1 KV heads, in µs."""
    shapes = [Shape(32, 1, 8192, 8, K, 128) for K in (8, 2, 1)]
    return [
        row(label, us / 1e3, shape=s, table="decode", bytes=4 * 32 * 8192 * s.K * 128)
        for s, us in zip(shapes, ms, strict=True)
    ]


def near(us, published=4800):
    return [*decode("cudnn", us, 67, 37), fact("published GB/s", published)]


def within(two, one):
    shapes = [Shape(4, 1, 8192, 8, K, 64) for K in (2, 1)]
    return [row("cudnn", ms, shape=s, table="decode within L2") for s, ms in zip(shapes, (two, one), strict=True)]


def prefill(*ms):
    shapes = [Shape(2, 4096, 4096, 16, K, 128) for K in (16, 4, 1)]
    return [row("cudnn", x, shape=s, table="prefill") for s, x in zip(shapes, ms, strict=True)]


CRAFTED = {
    "xla_takes_fewer_kv_heads": (
        patterns("xla", 2e-3, 2e-3, 2e-3), [patterns("xla", 2e-3, 0.1, 2e-3), patterns("xla", 2e-3, 2e-3, np.nan)],
    ),
    "cudnn_takes_fewer_kv_heads": (
        patterns("cudnn", 2e-3, 2e-3, 2e-3),
        [patterns("cudnn", 1.3, 2e-3, 2e-3), patterns("cudnn", 2e-3, np.nan, 2e-3)],
    ),
    "repeat_not_tile": (copies(), [copies(repeat=0.1), copies(tile=4e-4), copies(apart=0.3)]),
    "cache_outweighs_weights": (cache(), [cache(gqa=2**30, mha=2**32), cache(mha=2**34), cache(weights=2**35)]),
    "fewer_bytes_same_flops": (
        counted((9, 9, 9), (100, 25, 13)), [counted((9, 3, 1), (100, 25, 13)), counted((9, 9, 9), (100, 50, 25))],
    ),
    "decode_follows_bytes": (decode("cudnn", 243, 67, 37), [decode("cudnn", 243, 200, 100)]),
    "decode_near_bandwidth": (near(243), [near(300), near(243, published=8000)]),
    "xla_wastes_grouping": (
        [*decode("xla", 307, 224, 48), *decode("naive", 304, 235, 338)],
        [
            [*decode("xla", 307, 90, 48), *decode("naive", 304, 235, 338)],
            [*decode("xla", 307, 224, 48), *decode("naive", 304, 80, 338)],
        ],
    ),
    "xla_follows_at_one": (decode("xla", 307, 224, 48), [decode("xla", 307, 224, 150)]),
    "repeating_saves_nothing": (decode("naive", 304, 235, 338), [decode("naive", 304, 80, 40)]),
    "small_decode_has_a_floor": (within(0.0084, 0.0081), [within(0.0084, 0.0042)]),
    "prefill_gains_little": (prefill(0.45, 0.44, 0.43), [prefill(0.45, 0.44, 0.2), prefill(0.4, 0.5, 0.4)]),
}  # fmt: skip

MISTAKES = {
    "repeat_kv": [
        lambda x, N: np.repeat(x, N, axis=2),
        lambda x, N: np.repeat(x, N // x.shape[2], axis=1).reshape(x.shape[0], x.shape[1], N, x.shape[3]),
        lambda x, N: x[:, :, np.arange(N) % x.shape[2]],
        lambda x, N: np.broadcast_to(x[:, :, :1], (*x.shape[:2], N, x.shape[3])),
    ],
    "cache_savings": [
        lambda layers, N, H, S, B, itemsize: (N // 2, N),
        lambda layers, N, H, S, B, itemsize: tuple(layers * (N - K) * H * S * B * itemsize for K in (2, 1)),
        lambda layers, N, H, S, B, itemsize: tuple(2 * layers * (N - K) * H * S * itemsize for K in (2, 1)),
        lambda layers, N, H, S, B, itemsize: tuple(2 * layers * (N - K) * H * S * B * itemsize for K in (1, 2)),
    ],
    "longest_context": [
        lambda memory, weights, layers, K, H, B, itemsize: (memory - weights) // (2 * layers * K * H * B * itemsize),
        lambda memory, weights, layers, K, H, B, itemsize: max(0, memory - weights) // (layers * K * H * B * itemsize),
        lambda memory, weights, layers, K, H, B, itemsize: max(0, memory - weights) // (2 * layers * K * H * itemsize),
        lambda memory, weights, layers, K, H, B, itemsize: (
            max(0, memory - weights) / (2 * layers * K * H * B * itemsize)
        ),
    ],
    "most_tokens": [
        lambda weights, cache, B, gbps: gbps * 1e9 / (weights + B * cache),
        lambda weights, cache, B, gbps: B * gbps * 1e9 / (B * weights + B * cache),
        lambda weights, cache, B, gbps: B * gbps * 1e9 / (B * cache),
    ],
}
