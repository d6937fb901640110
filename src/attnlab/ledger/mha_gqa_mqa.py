"""The claims of 06_mha_gqa_mqa."""

from attnlab.attention import TOLERANCE
from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_bytes, format_ms, format_number
from attnlab.records import Shape

claim = claims_of("06_mha_gqa_mqa")
PATTERNS = {"MHA": 8, "GQA": 2, "MQA": 1}


def _decode(r, label: str, K: int):
    """The large step: at these sizes no K fits into the L2 cache."""
    return on_device(r.timing(label, table="decode", shape=Shape(32, 1, 8192, 8, K, 128)))


def _patterns(r, label: str):
    errors = [
        r.finding("error of a pattern", label=label, shape=Shape(2, 64, 64, 8, K, 64), dtype="bfloat16")
        for K in PATTERNS.values()
    ]
    words = ", ".join(f"{name} {format_number(e, 2)}" for name, e in zip(PATTERNS, errors, strict=True))
    return all(e <= TOLERANCE["bfloat16"] for e in errors), f"relative error: {words}"


@claim(
    "xla_takes_fewer_kv_heads",
    "XLA takes 8, 2 or 1 KV heads for 8 query heads without the caller copying them, and is right.",
)
def _(r):
    return _patterns(r, "xla")


@claim(
    "cudnn_takes_fewer_kv_heads",
    "cuDNN takes 8, 2 or 1 KV heads for 8 query heads without the caller copying them, and is right.",
    needs="cudnn_attention",
)
def _(r):
    return _patterns(r, "cudnn")


@claim(
    "repeat_not_tile",
    "Grouped attention is attention with each KV head copied in place (repeat); copied in turn (tile) it is another.",
)
def _(r):
    repeat, tile = (r.finding("error of explicit heads", label=x) for x in ("repeat", "tile"))
    apart = r.finding("difference from the grouped call", label="repeat")
    words = f"error with repeat {format_number(repeat, 2)}, with tile {format_number(tile, 2)}"
    return repeat <= TOLERANCE["float32"] and apart <= 1e-2 and tile > 0.5, words


@claim(
    "cache_outweighs_weights",
    "At 128k tokens in bfloat16 the cache of one sequence of Llama 3.1 8B is larger than its weights; with MHA it "
    "would be four times as large.",
)
def _(r):
    mha, gqa = (r.finding("cache at 128k", label=x) for x in ("MHA", "GQA, as published"))
    weights = r.finding("weights in bfloat16", label="8B")
    words = f"cache {format_bytes(gqa)}, weights {format_bytes(weights)}, with MHA {format_bytes(mha)}"
    return gqa > weights and mha == 4 * gqa, words


@claim(
    "fewer_bytes_same_flops",
    "Counted in the traced program, fewer KV heads save no FLOPs of attention; 1 instead of 8 leave under a fifth of "
    "the bytes that must move.",
    others="Older material says: GQA and MQA save memory and compute at inference",
)
def _(r):
    work = [r.finding("FLOPs of a decode step", label=x) for x in PATTERNS]
    moved = [r.finding("bytes of a decode step", label=x) for x in PATTERNS]
    ok = max(work) < 1.05 * min(work) and moved[2] < moved[0] / 5
    return ok, f"FLOPs of MHA over MQA {times(work[0] / work[2])}, bytes {times(moved[0] / moved[2])}"


@claim("decode_follows_bytes", "A decode step beyond the L2 cache follows its bytes: cuDNN takes over four times as "
        "long with 8 KV heads as with 1.", needs="cudnn_attention")  # fmt: skip
def _(r):
    many, one = (_decode(r, "cudnn", K) for K in (8, 1))
    return many.ms > 4 * one.ms, f"{format_ms(many.ms)} and {format_ms(one.ms)}: {times(many.ms / one.ms)}"


@claim("decode_near_bandwidth", "With 8 KV heads cuDNN's decode step reaches at least 80% of the published bandwidth.",
        needs="cudnn_attention")  # fmt: skip
def _(r):
    row = _decode(r, "cudnn", 8)
    published, rate = r.finding("published GB/s"), row.bytes / row.ms / 1e6
    return rate >= 0.8 * published, f"{rate:,.0f} of {published:,.0f} GB/s: {rate / published:.0%}"


@claim("xla_wastes_grouping", "With 2 KV heads instead of 8, a quarter of the bytes, XLA and the naive version still "
        "take more than half of their time.", needs="gpu")  # fmt: skip
def _(r):
    ratios = {label: _decode(r, label, 2).ms / _decode(r, label, 8).ms for label in ("xla", "naive")}
    return min(ratios.values()) > 0.5, "K = 2 over K = 8: " + ", ".join(f"{x} {times(y)}" for x, y in ratios.items())


@claim(
    "xla_follows_at_one",
    "With 1 KV head XLA follows the bytes too: under a quarter of its time with 8.",
    needs="gpu",
)
def _(r):
    ratio = _decode(r, "xla", 1).ms / _decode(r, "xla", 8).ms
    return ratio < 0.25, f"K = 1 over K = 8: {times(ratio)}"


@claim(
    "repeating_saves_nothing",
    "The naive version, which repeats the KV heads, saves nothing with 1 KV head: over three quarters of its time with "
    "8, at an eighth of the bytes.",
    needs="gpu",
)
def _(r):
    ratio = _decode(r, "naive", 1).ms / _decode(r, "naive", 8).ms
    return ratio > 0.75, f"K = 1 over K = 8: {times(ratio)}"


@claim("small_decode_has_a_floor", "Within the L2 cache a decode step stops following its bytes: half of them, 1 KV "
        "head instead of 2, save cuDNN less than a fifth of the time.", needs="cudnn_attention")  # fmt: skip
def _(r):
    two, one = (
        on_device(r.timing("cudnn", table="decode within L2", shape=Shape(4, 1, 8192, 8, K, 64))) for K in (2, 1)
    )
    return one.ms > 0.8 * two.ms, f"{format_ms(two.ms)} with 2, {format_ms(one.ms)} with 1"


@claim("prefill_gains_little", "A long prompt gains hardly anything: with 16, 4 and 1 KV heads cuDNN's times are "
        "within 20% of each other.", needs="cudnn_attention")  # fmt: skip
def _(r):
    rows = [on_device(r.timing("cudnn", table="prefill", shape=Shape(2, 4096, 4096, 16, K, 128))) for K in (16, 4, 1)]
    spread = max(row.ms for row in rows) / min(row.ms for row in rows)
    return spread < 1.2, ", ".join(f"K = {row.shape.K}: {format_ms(row.ms)}" for row in rows)
