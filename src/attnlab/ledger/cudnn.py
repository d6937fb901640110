"""The claims of 03_cudnn."""

from attnlab.claims import claims_of, on_device, times
from attnlab.records import MissingRecord, Shape, Timing

claim = claims_of("03_cudnn")
DEFAULT = Shape.square(4, 128, 8, 64)


def _default(r, label: str) -> Timing:
    return on_device(r.timing(label, table="first timing", dtype="bfloat16", shape=DEFAULT))


@claim(
    "cudnn_is_visible",
    "Which implementation ran is visible: the compiled program names cuDNN's call, and the profiler its kernel.",
    needs="cudnn_attention", others="Older material says: from outside you can't tell which kernel ran",
)  # fmt: skip
def _(r):
    row = on_device(r.timing("cudnn", table="first timing"))
    calls = r.finding("cuDNN calls")
    seen = [name for name, _ in row.kernels if "cudnn" in name.lower() or "sdpa" in name.lower()]
    return calls >= 1 and len(seen) >= 1, f"{calls} call in the program, {len(seen)} kernel seen"


@claim("cudnn_one_kernel", "cuDNN does all of it in one kernel.", needs="cudnn_attention")
def _(r):
    row = on_device(r.timing("cudnn", table="first timing"))
    return len(row.kernels) == 1, f"{len(row.kernels)} kernel"


@claim(
    "cudnn_writes_no_weights",
    "cuDNN writes no T×S matrix: from T 1024 to 8192 its temporaries are the same.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    found = r.latest(name="temporaries", label="cudnn")
    if len(found) < 2:
        raise MissingRecord("fewer than two lengths were compiled")
    return len({f.value for f in found}) == 1, f"{found[0].value} bytes at every length"


@claim(
    "cudnn_beats_naive",
    "At the default shape in bfloat16 cuDNN takes less than half the device time of the naive version.",
    needs="cudnn_attention", others="Older material says: at the small default shape every version is about equal",
)  # fmt: skip
def _(r):
    naive, cudnn = (_default(r, x) for x in ("naive", "cudnn"))
    return cudnn.ms < naive.ms / 2, f"naive takes {times(naive.ms / cudnn.ms)} as long"


@claim(
    "host_clock_shows_dispatch",
    "By the host's clock each of these calls takes more than four times its device time: it shows the dispatch.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    rows = [_default(r, x) for x in ("naive", "xla", "cudnn")]
    ratios = [row.wall_ms / row.ms for row in rows]
    words = ", ".join(f"{row.label} {times(ratio)}" for row, ratio in zip(rows, ratios, strict=True))
    return min(ratios) > 4, f"host over device: {words}"


@claim(
    "dispatch_hides_behind_work",
    "Twenty dependent calls in one program take less than half of the host's time for twenty blocked calls.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    ratios = [
        _default(r, x).wall_ms / r.finding("host ms a call, twenty in one program", label=x) for x in ("naive", "cudnn")
    ]
    return min(ratios) > 2, f"blocked over chained: naive {times(ratios[0])}, cuDNN {times(ratios[1])}"


@claim(
    "dtype_share",
    "A part of the way from float32 by hand to bfloat16 on cuDNN is the dtype's: naive attention gains from it too.",
    needs="cudnn_attention", others="Older material compares bfloat16 on cuDNN with float32 by hand",
)  # fmt: skip
def _(r):
    exact, half = on_device(r.timing("naive", table="two steps", dtype="float32")), _default(r, "naive")
    return exact.ms > half.ms, f"naive float32 takes {times(exact.ms / half.ms)} as long as naive bfloat16"


@claim(
    "cudnn_as_accurate",
    "cuDNN's error against float64 is no larger than one and a half times XLA's, in bfloat16 and in float16.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    ratios = [
        r.finding("error", label="cudnn", dtype=d) / r.finding("error", label="xla", dtype=d)
        for d in ("bfloat16", "float16")
    ]
    return all(x <= 1.5 for x in ratios), "cuDNN over XLA: " + ", ".join(times(x) for x in ratios)


@claim("cudnn_refuses_float32", "cuDNN takes no float32, and says so instead of falling back.",
        needs="cudnn_attention")  # fmt: skip
def _(r):
    words = r.finding("cudnn call", label="float32")
    return "float32" in words and words != "runs", words


@claim("head_dim_multiple_of_eight", "The head dim must be a multiple of 8.", needs="cudnn_attention")
def _(r):
    runs = {H: r.finding("cudnn call", label=f"head dim {H}") == "runs" for H in (36, 40, 128)}
    return runs == {36: False, 40: True, 128: True}, ", ".join(
        f"{H}: {'runs' if ok else 'refused'}" for H, ok in runs.items()
    )


@claim("head_dim_256_on_hopper", "On this card, 9.0 or newer, the head dim goes up to 256 and not to 512.",
        needs="cudnn_head_dim_256")  # fmt: skip
def _(r):
    runs = {H: r.finding("cudnn call", label=f"head dim {H}") == "runs" for H in (256, 512)}
    return runs == {256: True, 512: False}, ", ".join(f"{H}: {'runs' if ok else 'refused'}" for H, ok in runs.items())


@claim(
    "row_mask_is_refused",
    "A (B, 1, 1, S) mask is refused; key lengths say the same and run.",
    needs="cudnn_attention", others="JAX's documentation says: the mask must be broadcastable to (B, N, T, S)",
)  # fmt: skip
def _(r):
    row = r.finding("cudnn call", label="mask (B, 1, 1, S)")
    lengths = r.finding("cudnn call", label="key_value_seq_lengths alone")
    return row != "runs" and lengths == "runs", f"mask: {row}; lengths: {lengths}"


@claim(
    "window_without_causal",
    "A window (16, 0) without is_causal runs on cuDNN and is wrong, without a word.",
    needs="cudnn_attention", others="JAX's documentation says: a query sees 16 keys to its left, none to its right",
)  # fmt: skip
def _(r):
    wrong, right = (r.finding("cudnn call", label=f"window (16, 0), {x}") for x in ("not causal", "causal"))
    return wrong.startswith("runs, but") and right == "runs", f"not causal: {wrong}; causal: {right}"


@claim(
    "bias_gradient_needs_even_lengths",
    "The gradient through a bias needs even T and S: 128 runs, in both dtypes of the bias, and 127 is refused.",
    needs="cudnn_attention",
)
def _(r):
    even = [r.finding("cudnn call", label=f"T = 128, gradient with a {d} bias") for d in ("bfloat16", "float32")]
    odd, forward = (r.finding("cudnn call", label=f"T = 127{x}") for x in (", gradient with a bfloat16 bias", ""))
    ok = even == ["runs", "runs"] and forward == "runs" and "sequence length" in odd
    return ok, f"128: {', '.join(even)}; 127: {odd}; 127 forward: {forward}"
