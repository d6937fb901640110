"""The claims of 07_transformer_engine_fp8."""

from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_number
from attnlab.records import MissingRecord, Shape, Timing

claim = claims_of("07_transformer_engine_fp8")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FP8_SHAPES = {64: Shape.square(4, 2048, 8, 64), 128: Shape.square(4, 2048, 8, 128)}
LONG = Shape.square(2, 8192, 16, 128)


def _percent(share: float) -> str:
    return f"{format_number(100 * share, 2)}%"


# ---- the formats -------------------------------------------------------------------------------------------


@claim("two_formats", "E4M3 reaches 448 and has eight values from 1 to 2; E5M2 reaches 57344 and has four.")
def _(r):
    found = {d: (r.finding("largest value", dtype=d), r.finding("values from 1 to 2", dtype=d)) for d in (E4M3, E5M2)}
    words = ", ".join(f"{d}: {format_number(most)}, {count}" for d, (most, count) in found.items())
    return found == {E4M3: (448, 8), E5M2: (57344, 4)}, words


@claim(
    "scale_saves_small_values",
    "Values of size 2^-12 are lost in E4M3 without a scale; with one they keep an error below 5%.",
)
def _(r):
    bare, scaled = (r.finding("error of the cast at 2^-12", label=x) for x in ("no scale", "with a scale"))
    return bare > 0.5 and scaled < 0.05, f"without {_percent(bare)}, with {_percent(scaled)}"


@claim(
    "plain_fp8_product",
    "A plain dot_general of scaled float8 arrays becomes cuBLAS's FP8 product: no extra library is needed.",
    needs="fp8_matmul",
)
def _(r):
    calls = r.finding("FP8 products in the program")
    return calls == 1, f"{calls} call in the program"


def _product(r, label) -> Timing:
    return on_device(r.timing(label, table="plain product"))


@claim("fp8_product_is_faster", "The FP8 product is at least 15% faster than the bfloat16 one.", needs="fp8_matmul")
def _(r):
    half, eight = _product(r, "bfloat16"), _product(r, "FP8")
    return half.ms > 1.15 * eight.ms, f"{times(half.ms / eight.ms)} as fast ({format_number(eight.tflops)} TFLOP/s)"


@claim("fp8_product_error", "On random normal factors the FP8 product has a relative error between 2% and 6%.")
def _(r):
    error = r.timing("FP8", table="plain product").error
    return 0.02 < error < 0.06, _percent(error)


HISTORIES = ("history 1024", "history 4", "current scaling")


@claim(
    "delayed_scaling_lags",
    "Where inputs suddenly grow, delayed scaling is wrong for a step: values are cut off. Current scaling is not.",
)
def _(r):
    found = {x: r.finding("error where inputs grow", label=x) for x in HISTORIES}
    ok = found["current scaling"] < 0.05 and found["history 1024"] > 0.5 and found["history 4"] > 0.5
    return ok, ", ".join(f"{x}: {_percent(e)}" for x, e in found.items())


@claim(
    "long_history_remembers",
    "After a spike a history of 1024 steps keeps a scale that is far too small; one of 4 has forgotten the spike.",
)
def _(r):
    found = {x: r.finding("last error", label=x) for x in HISTORIES}
    ok = found["history 1024"] > 2 * found["history 4"] and found["history 4"] < 0.05
    return ok, ", ".join(f"{x}: {_percent(e)}" for x, e in found.items())


# ---- TransformerEngine's attention -------------------------------------------------------------------------


@claim("te_default_is_causal", "TE's DotProductAttention is causal unless told otherwise.", needs="transformer_engine")
def _(r):
    default, full = (r.finding("TE setting", label=f"attn_mask_type {x}") for x in ("left out", "no mask"))
    return (default, full) == ("like causal", "like full"), f"left out: {default}; 'no_mask': {full}"


@claim(
    "te_transpose_is_silent",
    "transpose_batch_sequence=True on (B, T, N, H) arrays gives a wrong answer, and no word.",
    needs="transformer_engine",
)
def _(r):
    right, wrong = (
        r.finding("TE setting", label=f"transpose_batch_sequence=True, {x} given")
        for x in ("(T, B, N, H)", "(B, T, N, H)")
    )
    return right == "like causal" and wrong.startswith("wrong:"), f"(T, B, N, H): {right}; (B, T, N, H): {wrong}"


@claim(
    "te_groups_must_be_said",
    "num_gqa_groups has to be said: left out, DotProductAttention fails. A number that is not K changes nothing: the "
    "arrays decide.",
    needs="transformer_engine", others="TE's documentation says: left out, it is the number of query heads",
)  # fmt: skip
def _(r):
    right, wrong = (r.finding("TE setting", label=f"K=2, num_gqa_groups={x}") for x in (2, 8))
    none = r.finding("TE setting", label="num_gqa_groups left out")
    ok = right == wrong == "like causal" and "Error" in none.split(":")[0]
    return ok, f"K: {right}; N: {wrong}; left out: {none.split(':')[0]}"


def _causal(r, label, T) -> Timing:
    return on_device(r.timing(label, table="causal sweep", shape=Shape.square(4, T, 8, 64)))


@claim(
    "te_runs_cudnn", "TE's attention is a cuDNN kernel: the very one that JAX's cuDNN path launches.",
    needs="transformer_engine",
)  # fmt: skip
def _(r):
    te, cudnn = (_causal(r, x, 2048) for x in ("te", "cudnn"))
    shared = {name for name, _ in te.kernels} & {name for name, _ in cudnn.kernels}
    return any("sdpa" in name for name in shared), f"{len(te.kernels)} kernels, of them in cuDNN's row: {len(shared)}"


@claim(
    "te_costs_small_kernels",
    "Beside cuDNN's kernel TE launches three small ones, one for a random state: its call takes over a quarter longer "
    "than cuDNN's at T 128, and differs by less than a tenth at T 2048.",
    needs="transformer_engine",
)
def _(r):
    ratios = {T: _causal(r, "te", T).ms / _causal(r, "cudnn", T).ms for T in (128, 2048)}
    te, cudnn = (_causal(r, x, 128).kernels for x in ("te", "cudnn"))
    small = len(te) == len(cudnn) + 3 and any("rng" in name for name, _ in te)
    ok = small and ratios[128] > 1.25 and 0.9 < ratios[2048] < 1.1
    return ok, ", ".join(f"T {T}: {times(x)}" for T, x in ratios.items())


@claim(
    "te_beats_xla",
    "Causal and in bfloat16, TE's attention beats XLA's at every length of the sweep, at 2048 by more than twice the "
    "factor at 128.",
    needs="transformer_engine",
)  # fmt: skip
def _(r):
    ratios = [_causal(r, "xla", T).ms / _causal(r, "te", T).ms for T in (128, 256, 512, 1024, 2048)]
    return min(ratios) > 1 and ratios[-1] > 2 * ratios[0], f"from {times(ratios[0])} to {times(ratios[-1])}"


@claim(
    "te_falls_back",
    "Without a fused kernel TE falls back to products and a softmax, and says so in a warning at most.",
    needs="transformer_engine",
)
def _(r):
    labels = ("default", "NVTE_FUSED_ATTN=0", "float32")
    calls, products = (
        [r.finding(f"{what} in the program", label=x) for x in labels] for what in ("fused calls", "matrix products")
    )
    said = [x for x in labels[1:] if r.finding("warning", label=x) != "none"]
    ok = calls == [1, 0, 0] and products[1:] == [2, 2]
    return ok, f"fused calls, products: {list(zip(calls, products, strict=True))}; warned: {', '.join(said) or 'never'}"


@claim(
    "te_mask_is_inverted",
    "TE's padding mask is True where a key is hidden, the opposite of JAX's.",
    needs="transformer_engine",
)
def _(r):
    seen, hidden = (r.finding("TE setting", label=f"padding, the mask True where {x}") for x in ("seen", "hidden"))
    return hidden == "like padded" and seen != "like padded", f"True where hidden: {hidden}; where seen: {seen}"


@claim(
    "import_order_matters",
    "With the system's cuDNN in reach, the order counts: JAX started first, TE's import fails; TE first, JAX computes "
    "with the system's cuDNN. With both paths at JAX's own, either order runs that one.",
    needs="transformer_engine",
)
def _(r):
    if not r.finding("the system has a cuDNN too"):
        raise MissingRecord("only one cuDNN is in reach here")
    bare, own = (
        [r.finding("import of TE", label=f"{path}, {order}") for order in ("TE first", "JAX first")]
        for path in ("as the system finds it", "with the path")
    )
    right = f"imports, cuDNN {r.finding('cuDNN of this process')}"
    ok = bare[0].startswith("imports") and bare[0] != right and "Error" in bare[1] and own == [right, right]
    return ok, f"TE first: {bare[0]}; JAX first: {bare[1]}; with the path: {own[0]}, {own[1]}"


@claim(
    "autocast_leaves_attention",
    "Under FP8 autocast TE's attention in JAX is bit for bit what it was, with no eight-bit type in its program; "
    "fp8_dpa=True changes nothing.",
    needs="transformer_engine", others="Older material says: under te.autocast DotProductAttention runs in FP8",
)  # fmt: skip
def _(r):
    labels = ("recipe", "recipe with fp8_dpa=True")
    off = [r.finding("difference under autocast", label=x) for x in labels]
    eight = [r.finding("eight-bit types in the program", label=x) for x in labels]
    return off == [0, 0] and not any(eight), f"largest differences {off[0]:g} and {off[1]:g}; FP8 types: {any(eight)}"


# ---- FP8 products in TransformerEngine ---------------------------------------------------------------------


def _scales(r, whose) -> list[float]:
    found = [f.value for f in r.latest(name="scale of the input") if f.label.startswith(whose)]
    if len(found) < 20:
        raise MissingRecord(f"{len(found)} steps of {whose} scaling, and it takes 20")
    return found


@claim(
    "te_follows_the_rule", "TE's delayed scaling follows the rule by hand, step for step.", needs="transformer_engine"
)
def _(r):
    te, hand = _scales(r, "TE"), _scales(r, "by hand")
    off = [abs(a / b - 1) for a, b in zip(te, hand, strict=True)]
    return all(x < 0.01 for x in off) and len(set(te)) > 2, f"{len(te)} steps, furthest apart by {_percent(max(off))}"


@claim(
    "te_first_scale_is_one",
    "At the first step TE's delayed scale is 1, whatever comes in; it moves only if the state is written back.",
    needs="transformer_engine",
)
def _(r):
    te, stuck = _scales(r, "TE"), r.finding("scale after 3 steps, state not written back")
    words = f"first {format_number(te[0])}, last {format_number(te[-1])}; not written back: {format_number(stuck)}"
    return te[0] == stuck == 1 and abs(te[-1] - 1) > 0, words  # NaN is no move


@claim(
    "te_modules_compute_in_fp8",
    "Under FP8 autocast DenseGeneral, LayerNormMLP and TransformerLayer have E4M3 and E5M2 in their programs; without "
    "it they have neither.",
    needs="transformer_engine",
)
def _(r):
    modules = ("DenseGeneral", "LayerNormMLP", "TransformerLayer")
    cast, plain = (
        {r.finding("eight-bit types of a module", label=f"{x}, {how}") for x in modules}
        for how in ("autocast", "plain")
    )
    ok = cast == {"f8e4m3fn, f8e5m2"} and plain == {"none"}
    return ok, f"with: {'; '.join(sorted(cast))}; without: {'; '.join(sorted(plain))}"


def _layer(r, label, table) -> Timing:
    return on_device(r.timing(label, table=table))


def _gain(r, recipe, what, table) -> float:
    return _layer(r, f"bfloat16, {what}", table).ms / _layer(r, f"{recipe}, {what}", table).ms


@claim(
    "dense_fp8_is_faster",
    "A large dense layer is at least a tenth faster in FP8 with delayed scaling than in bfloat16, forward and with its "
    "backward pass.",
    needs="transformer_engine",
)
def _(r):
    gains = [_gain(r, "FP8 delayed", x, "dense layer") for x in ("forward", "forward and backward")]
    return min(gains) > 1.1, f"forward {times(gains[0])}, with backward {times(gains[1])}"


@claim(
    "dense_current_pays_a_pass",
    "Current scaling is slower than delayed, by a kernel that finds the amax: delayed scaling has no such reduction.",
    needs="transformer_engine",
)
def _(r):
    delayed, current = (_layer(r, f"FP8 {x}, forward", "dense layer") for x in ("delayed", "current"))
    reductions = [sum("reduce" in name for name, _ in row.kernels) for row in (delayed, current)]
    ok = current.ms > delayed.ms and reductions[0] < reductions[1]
    return ok, f"current takes {times(current.ms / delayed.ms)} as long; reductions {reductions[0]} and {reductions[1]}"


@claim(
    "dense_fp8_error",
    "A dense layer in FP8 errs by 2% to 10% in its output and gradients, ten times as much as bfloat16 or more.",
    needs="transformer_engine",
)
def _(r):
    names = ("out", "dx", "dparams")
    half = [r.finding("error", label=f"bfloat16: {x}") for x in names]
    eight = [r.finding("error", label=f"FP8 {kind}: {x}") for kind in ("delayed", "current") for x in names]
    ok = all(0.02 < e < 0.1 for e in eight) and max(half) * 10 <= min(eight)
    return ok, f"FP8 {_percent(min(eight))} to {_percent(max(eight))}, bfloat16 at most {_percent(max(half))}"


@claim(
    "layer_gains_too",
    "A whole transformer layer, forward and backward, is at least a quarter faster in FP8 with delayed scaling.",
    needs="transformer_engine",
)  # fmt: skip
def _(r):
    gain = _gain(r, "FP8 delayed", "forward and backward", "transformer layer")
    return gain > 1.25, times(gain)


# ---- FP8 attention -----------------------------------------------------------------------------------------


@claim(
    "fp8_attention_is_right",
    "cuDNN's FP8 attention is within 10% of float64 in every head of every batch element, and repeats bit for bit.",
    needs="fp8_attention", others="Older material takes one run, one error over everything",
)  # fmt: skip
def _(r):
    worst = r.latest(name="worst head")
    if len(worst) < 4:
        raise MissingRecord(f"{len(worst)} of 4 FP8 runs were checked")
    same = [f.value for f in r.latest(name="repeats agree")]
    # Not: max(...) < 0.1, which NaN in the first place would pass.
    ok = all(f.value < 0.1 for f in worst) and all(same)
    return ok, f"worst heads {', '.join(_percent(f.value) for f in worst)}; repeats agree: {all(same)}"


def _fp8_gain(r, shape, mask="full") -> float:
    half, eight = (on_device(r.timing(x, table="FP8 attention", shape=shape, mask=mask)) for x in ("cudnn", "FP8"))
    return half.ms / eight.ms


@claim(
    "fp8_attention_is_faster",
    "At head dim 128 FP8 attention is at least a quarter faster than bfloat16, full and causal.",
    needs="fp8_attention",
)
def _(r):
    gains = {mask: _fp8_gain(r, LONG, mask) for mask in ("full", "causal")}
    return min(gains.values()) > 1.25, ", ".join(f"{mask} {times(x)}" for mask, x in gains.items())


@claim(
    "fp8_attention_small_heads_gain_less", "At head dim 64 FP8 attention gains less than at 128.", needs="fp8_attention"
)
def _(r):
    gains = {H: _fp8_gain(r, shape) for H, shape in FP8_SHAPES.items()}
    return gains[64] < gains[128], ", ".join(f"H {H}: {times(x)}" for H, x in gains.items())


@claim(
    "l4_has_fp8_products",
    "By NVIDIA's documents, not measured here: an L4, capability 8.9, has FP8 products and no FP8 attention; an H200 "
    "has both.",
    others="Older material says: the L4 has no FP8 support, that takes Hopper",
)
def _(r):
    runs = {
        card: tuple(r.finding("runs by capability", label=f"{x} on {card}") for x in ("fp8_matmul", "fp8_attention"))
        for card in ("A100", "L4", "H100, H200")
    }
    words = "; ".join(f"{card}: products {a}, attention {b}" for card, (a, b) in runs.items())
    return runs == {"A100": (False, False), "L4": (True, False), "H100, H200": (True, True)}, words
