"""The claims of 04_causal_and_windows."""

from attnlab.attention import TOLERANCE
from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_bytes, format_number
from attnlab.records import MissingRecord, Timing

claim = claims_of("04_causal_and_windows")
HALF_BLOCK = (192, 320, 448)  # S mod 128 is 64


def _values(r, name: str, count: int = 1, **fields) -> dict:
    """{(label, shape): value} of the findings of that name, at least `count` of them."""
    found = {(f.label, f.shape): f.value for f in r.latest(name=name, **fields)}
    if len(found) < count:
        raise MissingRecord(f"{len(found)} findings named {name!r}, and it takes {count}")
    return found


def _who(found: dict) -> str:
    return " and ".join(dict.fromkeys(label.split(",")[0] for label, _ in found))


def _ms(r, label: str, table: str) -> Timing:
    return on_device(r.timing(label, table=table))


@claim("causal_keeps_the_last", "Of 16 positions the causal mask changes 15: only the last output stays the same.")
def _(r):
    changed, last = r.finding("positions that change"), r.finding("last position changes")
    return changed == 15 and not last, f"{changed} change, the last {'changes' if last else 'does not'}"


@claim(
    "pattern_is_the_mask",
    "Read off the implementation, a causal mask and a causal window show exactly the keys of the definition.",
)
def _(r):
    found = _values(r, "wrong pairs", 2)
    return not any(found.values()), f"{sum(found.values())} wrong pairs in {len(found)} patterns of {_who(found)}"


@claim(
    "causal_skips_in_cudnn",
    "In cuDNN is_causal skips work: at long T it takes less than 0.7 of the time without a mask.",
    needs="cudnn_attention", others="Older material says: causal masking is free inside the kernel",
)  # fmt: skip
def _(r):
    full, causal = (_ms(r, "cudnn", table) for table in ("no mask", "causal"))
    return causal.ms < 0.7 * full.ms, f"{times(causal.ms / full.ms)} the time"


@claim(
    "causal_costs_on_xla",
    "On XLA is_causal costs time: more than 1.1 times that without a mask.",
    needs="gpu", others="Older material says: causal masking is free inside the kernel",
)  # fmt: skip
def _(r):
    full, causal = (_ms(r, "xla", table) for table in ("no mask", "causal"))
    return causal.ms > 1.1 * full.ms, f"{times(causal.ms / full.ms)} the time"


@claim(
    "hidden_pairs_beat_the_peak",
    "cuDNN's causal call ends sooner than this card's peak allows for all T·S pairs: counting hidden pairs is wrong.",
    needs="cudnn_attention", others="Some published TFLOP/s count the hidden pairs too",
)  # fmt: skip
def _(r):
    full, causal = (_ms(r, "cudnn", table) for table in ("no mask", "causal"))
    if full.bound_ms is None:
        raise MissingRecord("this device's peak is not published")
    counted = f"{format_number(full.flops / causal.ms / 1e9)} TFLOP/s if all pairs are counted"
    return causal.ms < full.bound_ms, f"{counted}, {format_number(causal.tflops)} by the visible ones"


@claim(
    "causal_is_top_left",
    "With T 16 and S 32 is_causal is aligned top-left; a bottom-right pattern needs a mask, and that is kept as given.",
    others="flash-attn from 2.1 on aligns bottom-right",
)
def _(r):
    top, bottom = _values(r, "causal, T 16, S 32: wrong pairs"), _values(r, "bottom-right mask: wrong pairs")
    wrong = sum(top.values()), sum(bottom.values())
    return wrong == (0, 0), f"{wrong[0]} and {wrong[1]} pairs differ, on {_who(top)}"


@claim(
    "decode_without_the_flag",
    "One query against a cache: with is_causal the answer is wrong by more than half its size, without the flag right.",
)
def _(r):
    found = _values(r, "decode error", 2)
    wrong = [e for (label, _), e in found.items() if label.endswith("is_causal")]
    right = [e for (label, _), e in found.items() if label.endswith("no flag")]
    words = f"error {format_number(min(wrong), 2)} with, {format_number(max(right), 2)} without, on {_who(found)}"
    # all(): min() and max() overlook a NaN that does not come first.
    return all(e > 0.5 for e in wrong) and all(e <= TOLERANCE["bfloat16"] for e in right), words


@claim("window_counts_itself", "local_window_size=(W − 1, 0) with is_causal shows a query W keys, its own among them.")
def _(r):
    found = _values(r, "keys seen", 2)
    left = {key: int(key[0].rsplit(" ", 1)[1]) for key in found}
    words = ", ".join(f"{label}: {value}" for (label, _), value in found.items())
    return all(value == left[key] + 1 for key, value in found.items()), words


def _windows(r, label: str, device: bool = True) -> list[tuple[int, Timing]]:
    """(left, timing) of the sweep, the smallest window first."""
    rows = [x for x in r.latest(table="windows", label=label) if isinstance(x, Timing)]
    if len(rows) < 2:
        raise MissingRecord(f"{len(rows)} windows were timed with {label}, and it takes two")
    return sorted((int(x.mask.split("(")[1].split(",")[0]), on_device(x) if device else x) for x in rows)


def _ends(r, label, device=True):
    found = _windows(r, label, device)
    (small, first), (large, last) = found[0], found[-1]
    return first, last, f"W {small + 1} against W {large + 1}"


@claim(
    "window_cuts_cudnn_time",
    "cuDNN's time falls with the window: the smallest takes less than a quarter of the time of the largest.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    first, last, words = _ends(r, "cudnn")
    return first.ms < last.ms / 4, f"{times(first.ms / last.ms)} the time, {words}"


@claim(
    "window_saves_no_time_on_xla",
    "XLA's time does not fall with the window: smallest and largest differ by less than 15%.",
    needs="gpu",
)  # fmt: skip
def _(r):
    first, last, words = _ends(r, "xla")
    return abs(first.ms / last.ms - 1) < 0.15, f"{times(first.ms / last.ms)} the time, {words}"


@claim("window_saves_no_memory_on_xla", "XLA's temporaries are the same with every window.")
def _(r):
    sizes = [row.temp_bytes for _, row in _windows(r, "xla", device=False)]
    return max(sizes) <= 1.01 * min(sizes), f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}"


@claim(
    "window_sees_the_future",
    "Through cuDNN a window (16, 0) without is_causal sees keys of the future; on XLA it sees none.",
    needs="cudnn_attention", others="JAX's documentation says: a query sees 16 keys to its left, none to its right",
)  # fmt: skip
def _(r):
    xla, cudnn = (r.finding("future pairs seen", label=x) for x in ("xla", "cudnn"))
    return xla == 0 and cudnn > 0, f"XLA {xla} pairs, cuDNN {cudnn}"


@claim(
    "window_error_is_large",
    "The fault is gross: an error above 10% on cuDNN; with is_causal, and on XLA both ways, it is rounding only.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    calls = ("cudnn, is_causal=False", "cudnn, is_causal=True", "xla, is_causal=False", "xla, is_causal=True")
    wrong, *right = (r.finding("window error", label=x) for x in calls)
    words = f"{format_number(wrong, 2)}; the others at most {format_number(max(right), 2)}"
    return not wrong <= 0.1 and all(e <= TOLERANCE["bfloat16"] for e in right), words


@claim("guard_refuses_the_window", "The course's cuDNN function refuses that window.")
def _(r):
    refused = r.finding("guard refuses")
    return refused, "refused" if refused else "taken"


@claim("right_window_needs_causal", "cuDNN takes a window to the right with is_causal only.", needs="cudnn_attention")
def _(r):
    without, with_flag = (r.finding("cuDNN, window (16, 16)", label=f"is_causal={x}") for x in (False, True))
    return "right window" in without and with_flag == "runs", f"without: {without}; with: {with_flag}"


def _blind(r, case: str) -> dict:
    """{"xla": what, "cudnn": what} of one kind of row."""
    found = {label.split(", ")[0]: words for (label, _), words in _values(r, "sees nothing").items() if case in label}
    if "xla" not in found:
        raise MissingRecord(f"no finding of a {case}")
    return found


def _said(found: dict) -> str:
    return ", ".join(f"{label}: {words}" for label, words in found.items())


@claim(
    "blind_row_is_the_mean", "A row that the mask hides wholly is the mean of v, without a NaN.",
    others="flash-attn returns zeros there",
)  # fmt: skip
def _(r):
    found = _blind(r, "row hidden by the mask")
    return set(found.values()) == {"the mean of v"}, _said(found)


@claim("padded_queries_are_zero", "Rows beyond query_seq_lengths are zeros.")
def _(r):
    found = _blind(r, "rows beyond query_seq_lengths")
    return set(found.values()) == {"zeros"}, _said(found)


@claim(
    "no_keys_at_all",
    "A batch element whose key length is 0 is the mean of v on XLA, and zeros on cuDNN.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    found = _blind(r, "key_value_seq_lengths of 0")
    if "cudnn" not in found:
        raise MissingRecord("no finding of cuDNN with a key length of 0")
    return found == {"xla": "the mean of v", "cudnn": "zeros"}, _said(found)


@claim(
    "mask_is_an_array",
    "To cuDNN a mask is a T×S array: it is written, and its temporaries grow with T². The flag writes none.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    written = {label: set() for label in ("is_causal", "mask=tril")}
    for (label, _), value in _values(r, "cuDNN: T×S array written", 2).items():
        written[label].add(value)
    sizes = {s.T: x for (_, s), x in _values(r, "temporaries of cuDNN", 2, label="mask=tril").items()}
    small, large = min(sizes), max(sizes)
    grows = sizes[large] > 0.9 * (large / small) ** 2 * sizes[small]
    words = f"mask: {format_bytes(sizes[small])} at T {small}, {format_bytes(sizes[large])} at T {large}"
    return written == {"is_causal": {False}, "mask=tril": {True}} and grows, words


@claim(
    "mask_skips_nothing",
    "With mask=tril cuDNN skips nothing: at long T it takes more than 1.4 times as long as with is_causal.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    mask, causal, full = _ms(r, "cudnn, mask", "mask"), _ms(r, "cudnn", "causal"), _ms(r, "cudnn", "no mask")
    words = f"{times(mask.ms / causal.ms)} as long as is_causal, {times(mask.ms / full.ms)} as long as no mask"
    return mask.ms > 1.4 * causal.ms, words


def _nan(r, way: str, count: int) -> dict:
    """{(S, std): NaN rows of dQ} of one way, at `count` points or more."""
    found = {
        (shape.S, label.rsplit(" ", 1)[1]): value
        for (label, shape), value in _values(r, "NaN rows of dQ").items()
        if label.startswith(f"{way}, std ")
    }
    if len(found) < count:
        raise MissingRecord(f"{len(found)} gradients by {way}, and it takes {count}")
    return found


def _finite(r, way: str, count: int):
    rows, rest = sum(_nan(r, way, count).values()), r.finding("NaN rows of output, dK, dV", label=way)
    return rows == rest == 0, f"{rows} rows of dQ hold NaN, {rest} elsewhere"


@claim(
    "mask_gradients_hold_nan",
    "With large q and k, dQ by cuDNN through mask=tril holds NaN rows at lengths of which S mod 128 is 64; at 256 and "
    "384 it holds none.",
    needs="cudnn_attention", others="Older material says: gradients through a mask are as safe as through is_causal",
)  # fmt: skip
def _(r):
    found, rest = _nan(r, "cudnn, mask", 10), r.finding("NaN rows of output, dK, dV", label="cudnn, mask")
    hit = sum(rows for (S, std), rows in found.items() if S in HALF_BLOCK and std == "10")
    other = sum(found.values()) - hit
    return hit > 0 and other == 0 and rest == 0, f"{hit} rows there, {other} at the others, {rest} outside dQ"


@claim(
    "flag_gradients_are_finite", "With is_causal=True cuDNN's gradients hold no NaN at these lengths and scales.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    return _finite(r, "cudnn, is_causal", 10)


@claim("xla_gradients_are_finite", "On XLA the gradients through the mask hold no NaN either.")
def _(r):
    return _finite(r, "xla, mask", 4)
