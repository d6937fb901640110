"""The ledger: every sentence of the course that a number can contradict, with the check that decides it.

A claim is judged over records. It holds, it fails, or it is not testable here, and then it says why. The
saved H200 records are judged by a test, so that no committed sentence contradicts the committed results.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable

from attnlab import device as _device
from attnlab.display import format_number, show_table
from attnlab.features import OTHERS, RULES, feature, has
from attnlab.records import LOG, MissingRecord, Records, Shape, Timing
from attnlab.tables import saved_elsewhere

HOLDS, FAILS, UNTESTABLE = "holds", "fails", "not testable here"

Verdict = collections.namedtuple("Verdict", ["state", "measured"])


@dataclasses.dataclass(frozen=True)
class Claim:
    """`check(records)` returns (bool, what was measured); `needs` is the feature without which nobody can tell."""

    name: str
    notebook: str
    sentence: str
    check: Callable
    needs: str | None = None
    others: str = ""  # who says otherwise, and what

    def judge(self, records: Records) -> Verdict:
        """The verdict over `records`; missing records make it untestable, never false."""
        try:
            ok, measured = self.check(records.find(notebook=self.notebook))
        except MissingRecord as e:
            return Verdict(UNTESTABLE, str(e))
        return Verdict(HOLDS if ok else FAILS, measured)

    def judge_here(self) -> Verdict:
        """The verdict over this process's log."""
        if self.needs and not has(self.needs):
            return Verdict(UNTESTABLE, feature(self.needs).reason)
        return self.judge(LOG.records)


LEDGER: dict[str, Claim] = {}


def _claim(name: str, notebook: str, sentence: str, needs: str | None = None, others: str = ""):
    def register(check):
        if name in LEDGER:
            raise ValueError(f"two claims are called {name!r}")
        if needs and needs not in RULES and needs not in OTHERS:
            raise ValueError(f"claim {name!r} needs {needs!r}, which is no feature")
        LEDGER[name] = Claim(name, notebook, sentence, check, needs, others)
        return check

    return register


def _show(claims, title: str | None = None) -> None:
    beside = saved_elsewhere()
    headers = ["claim", "verdict here", "measured here"] + (["H200, saved"] if beside else [])
    rows = []
    for c in claims:
        here, there = c.judge_here(), c.judge(beside)
        saved = f"{there.state if there.state != UNTESTABLE else 'no record'}: {there.measured}"
        row = [f"{c.sentence}\n({c.others})" if c.others else c.sentence, here.state, here.measured]
        rows.append(row + ([saved] if beside else []))
    show_table(headers, rows, title=title, aligns=["left"] * len(headers))


def claim(*names: str) -> None:
    """Show claims: the sentence, its verdict here with what was measured, and the verdict on the saved H200 run.

    Raises:
      KeyError: no claim of that name.
    """
    for name in names:
        if name not in LEDGER:
            raise KeyError(f"no claim {name!r}: the ledger has {', '.join(LEDGER)}")
    _show([LEDGER[name] for name in names])


def summary() -> None:
    """Show every claim of this notebook with its verdict."""
    mine = [c for c in LEDGER.values() if c.notebook == LOG.notebook]
    _show(mine, title=f"What you saw, on {_device.current().name}")


def _on_device(row: Timing) -> Timing:
    """`row`, if its times and kernels are the device's own. Raises `MissingRecord`."""
    if row.clock != "cupti":
        raise MissingRecord(f"the device's own clock was not to be had ({row.clock}; {row.note})")
    return row


def _times(ratio: float) -> str:
    return f"{format_number(ratio, 2)}×"


DEFAULT = Shape.square(4, 128, 8, 64)
LONG = Shape.square(2, 8192, 16, 128)

# ---- 00 ----------------------------------------------------------------------------------------------------

START = "00_start_here"


@_claim("rows_sum_to_one", START, "Each row of the weights sums to 1: a query spreads one unit of attention.")
def _(r):
    off = r.finding("largest distance of a row sum from 1")
    return off < 1e-5, f"furthest from 1: {format_number(off, 2)}"


@_claim(
    "undivided_saturates", START,
    "At H = 256, without the division by √H one key takes nearly all of the weight, and the slope of the softmax "
    "falls.",
)  # fmt: skip
def _(r):
    divided, undivided = (r.finding("mean largest weight", label=x) for x in ("divided", "undivided"))
    fall = r.finding("mean slope", label="divided") / r.finding("mean slope", label="undivided")
    ok = undivided > 0.8 and divided < 0.5 and fall > 2
    weights = f"{format_number(undivided, 2)} against {format_number(divided, 2)}"
    return ok, f"largest weight {weights}; slope down {_times(fall)}"


@_claim(
    "unblocked_is_impossible", START,
    "A clock that does not wait for the device shows a time that the device can't reach.",
)  # fmt: skip
def _(r):
    ratio = r.finding("bound over unblocked time")
    return r.finding("unblocked time refused"), f"the bound is {_times(ratio)} that time"


@_claim(
    "dispatch_hides_the_device", START,
    "For cuDNN at the default shape the host's clock shows more than five times what the device needs.",
    needs="cudnn_attention", others="Older material says: time a call on the host, and compare variants by that",
)  # fmt: skip
def _(r):
    row = _on_device(r.timing("cudnn", table="two clocks"))
    return row.wall_ms > 5 * row.ms, _times(row.wall_ms / row.ms)


@_claim(
    "late_library_path", START,
    "Setting LD_LIBRARY_PATH inside a running process does not change where that process looks for libraries.",
    others='Older material says: os.environ["LD_LIBRARY_PATH"] = … in the first cell',
)  # fmt: skip
def _(r):
    here, child = r.finding("library found after os.environ"), r.finding("library found by a new process")
    return not here and child, f"found in this process: {here}; in a new one: {child}"


@_claim("three_quarters", START, "Unless told otherwise, JAX may take three quarters of the GPU's memory.", needs="gpu")
def _(r):
    share = r.finding("share of the memory that JAX may take")
    return abs(share - 0.75) < 0.02, f"{share:.1%} of what nvidia-smi reports"


@_claim(
    "preallocation", START,
    "XLA_PYTHON_CLIENT_MEM_FRACTION is the share of the GPU that JAX takes at once; without preallocation it "
    "takes what it needs.",
    needs="gpu",
)  # fmt: skip
def _(r):
    held = [r.finding("memory held", label=x) for x in ("fraction .10", "fraction .20", "no preallocation")]
    if None in held:
        raise MissingRecord("a program found too little memory free")
    tenth, fifth, none = (x / r.finding("memory of the GPU") for x in held)
    # A tenth more asked for is a tenth more taken; the rest is the CUDA context, the same each time.
    return abs(fifth - tenth - 0.1) < 0.01 and none < 0.05, f"held: {tenth:.1%}, {fifth:.1%}, {none:.1%}"


@_claim("one_cudnn", START, "This process has loaded exactly one cuDNN.", needs="cudnn_attention")
def _(r):
    count = r.finding("cuDNN libraries loaded")
    return count == 1, f"{count} loaded"


# ---- 01 ----------------------------------------------------------------------------------------------------

NAIVE = "01_naive_attention"


@_claim(
    "naive_is_right", NAIVE,
    "Attention by hand agrees with the float64 reference as closely as its dtype allows.",
)  # fmt: skip
def _(r):
    error, allowed = r.finding("error by hand"), r.finding("error allowed")
    return error <= allowed, f"relative error {format_number(error, 2)}, allowed {format_number(allowed, 2)}"


@_claim(
    "more_than_three_kernels", NAIVE,
    "Compiled naive attention launches more than three kernels: transposes stand beside the two products and the "
    "softmax.",
    needs="gpu", others="Older material says: it launches three separate kernels",
)  # fmt: skip
def _(r):
    row = _on_device(r.timing("naive", table="naive kernels"))
    return len(row.kernels) > 3, f"{len(row.kernels)} kernels"


@_claim(
    "weights_grow_with_T2", NAIVE,
    "From T = 1024 on, twice the length means four times the temporaries: naive memory is O(T²).",
    needs="gpu",
)  # fmt: skip
def _(r):
    found = sorted((f for f in r.latest(name="temporaries") if f.shape.T >= 1024), key=lambda f: f.shape.T)
    pairs = [(a, b) for a, b in itertools.pairwise(found) if b.shape.T == 2 * a.shape.T]
    if not pairs:
        raise MissingRecord("no length from 1024 on was compiled together with its double")
    ratios = [b.value / a.value for a, b in pairs]
    return all(3.5 <= x <= 4.5 for x in ratios), f"at each doubling: {', '.join(_times(x) for x in ratios)}"


@_claim(
    "weights_are_written", NAIVE,
    "The T×S weights are written to memory, and the temporaries hold at least all of them.",
    needs="gpu",
)  # fmt: skip
def _(r):
    found = r.latest(name="temporaries")
    if not found:
        raise MissingRecord("no temporaries were recorded")
    least = min(f.value / r.finding("weight bytes", shape=f.shape) for f in found)
    written = all(r.finding("T×S array written", shape=f.shape) for f in found)
    return written and least >= 1, f"T×S arrays written: {written}; temporaries are {_times(least)} the weights or more"


# ---- 02 ----------------------------------------------------------------------------------------------------

SDPA = "02_sdpa"


@_claim(
    "none_is_xla", SDPA,
    "implementation=None and implementation='xla' are one and the same compiled program.",
    others="Older material says: None picks the best backend, maybe cuDNN",
)  # fmt: skip
def _(r):
    same, calls = r.finding("None compiles to the XLA program"), r.finding("cuDNN calls under None")
    return same and calls == 0, f"same program: {same}, cuDNN calls: {calls}"


@_claim(
    "logits_are_written", SDPA,
    "On XLA the steps are not fused into one: at T 8192 a T×S array in float32 is written, for bfloat16, float16 "
    "and float32 inputs.",
    needs="gpu", others="Older material says: it fuses all steps and can avoid the weight matrix",
)  # fmt: skip
def _(r):
    written = {d: r.finding("float32 T×S array written", dtype=d) for d in ("bfloat16", "float16", "float32")}
    return all(written.values()), ", ".join(f"{d}: {'written' if w else 'not written'}" for d, w in written.items())


@_claim(
    "xla_takes_more_memory", SDPA,
    "In bfloat16 XLA's attention takes more temporary memory than the naive bfloat16 version.", needs="gpu",
)  # fmt: skip
def _(r):
    xla = r.finding("temporaries", label="xla", dtype="bfloat16")
    naive = r.finding("temporaries", label="naive", dtype="bfloat16")
    return xla > naive, f"{_times(xla / naive)} the naive one's"


@_claim(
    "xla_slower_than_naive", SDPA,
    "At T 8192 in bfloat16 XLA's attention is slower than the naive version, and more accurate.",
    needs="gpu",
)  # fmt: skip
def _(r):
    xla, naive = (_on_device(r.timing(x, table="long bf16", shape=LONG)) for x in ("xla", "naive"))
    ok = xla.ms > naive.ms and xla.error < naive.error
    return ok, f"{_times(xla.ms / naive.ms)} the time, {_times(naive.error / xla.error)} less error"


@_claim("options_agree", SDPA, "scale, mask, bias and both lengths do what the reference says.")
def _(r):
    found = r.latest(name="option error")
    if len(found) < 6:
        raise MissingRecord(f"{len(found)} of 6 options were tried")
    worst = max(found, key=lambda f: f.value)
    ok = all(f.value <= r.finding("error allowed") for f in found)
    return ok, f"{len(found)} options, worst {format_number(worst.value, 2)} ({worst.label})"


@_claim(
    "tf32_by_default", SDPA,
    "float32 attention is multiplied in TF32 by default; at 'highest' its error is over a hundred times smaller.",
    needs="tf32_matmul", others="Older material compares bfloat16 on cuDNN with float32 by hand, as if that were exact",
)  # fmt: skip
def _(r):
    default, tf32, highest = (r.finding("precision error", label=x) for x in ("default", "tensorfloat32", "highest"))
    same = abs(default / tf32 - 1) < 0.01
    words = f"default {format_number(default, 2)}, TF32 {format_number(tf32, 2)}, highest {format_number(highest, 2)}"
    return same and default > 100 * highest, words


# ---- 03 ----------------------------------------------------------------------------------------------------

CUDNN = "03_cudnn"


def _default(r, label: str) -> Timing:
    return _on_device(r.timing(label, table="first timing", dtype="bfloat16", shape=DEFAULT))


@_claim(
    "cudnn_is_visible", CUDNN,
    "Which implementation ran is visible: the compiled program names cuDNN's call, and the profiler its kernel.",
    needs="cudnn_attention", others="Older material says: from outside you can't tell which kernel ran",
)  # fmt: skip
def _(r):
    row = _on_device(r.timing("cudnn", table="first timing"))
    calls = r.finding("cuDNN calls")
    seen = [name for name, _ in row.kernels if "cudnn" in name.lower() or "sdpa" in name.lower()]
    return calls >= 1 and len(seen) >= 1, f"{calls} call in the program, {len(seen)} kernel seen"


@_claim("cudnn_one_kernel", CUDNN, "cuDNN does all of it in one kernel.", needs="cudnn_attention")
def _(r):
    row = _on_device(r.timing("cudnn", table="first timing"))
    return len(row.kernels) == 1, f"{len(row.kernels)} kernel"


@_claim(
    "cudnn_writes_no_weights", CUDNN,
    "cuDNN writes no T×S matrix: from T 1024 to 8192 its temporaries are the same.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    found = r.latest(name="temporaries", label="cudnn")
    if len(found) < 2:
        raise MissingRecord("fewer than two lengths were compiled")
    return len({f.value for f in found}) == 1, f"{found[0].value} bytes at every length"


@_claim(
    "cudnn_beats_naive", CUDNN,
    "At the default shape in bfloat16 cuDNN takes less than half the device time of the naive version.",
    needs="cudnn_attention", others="Older material says: at the small default shape every version is about equal",
)  # fmt: skip
def _(r):
    naive, cudnn = (_default(r, x) for x in ("naive", "cudnn"))
    return cudnn.ms < naive.ms / 2, f"naive takes {_times(naive.ms / cudnn.ms)} as long"


@_claim(
    "host_clock_shows_dispatch", CUDNN,
    "By the host's clock each of these calls takes more than four times its device time: it shows the dispatch.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    rows = [_default(r, x) for x in ("naive", "xla", "cudnn")]
    ratios = [row.wall_ms / row.ms for row in rows]
    words = ", ".join(f"{row.label} {_times(ratio)}" for row, ratio in zip(rows, ratios, strict=True))
    return min(ratios) > 4, f"host over device: {words}"


@_claim(
    "dispatch_hides_behind_work", CUDNN,
    "Twenty dependent calls in one program take less than half of the host's time for twenty blocked calls.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    ratios = [
        _default(r, x).wall_ms / r.finding("host ms a call, twenty in one program", label=x) for x in ("naive", "cudnn")
    ]
    return min(ratios) > 2, f"blocked over chained: naive {_times(ratios[0])}, cuDNN {_times(ratios[1])}"


@_claim(
    "dtype_share", CUDNN,
    "A part of the way from float32 by hand to bfloat16 on cuDNN is the dtype's: naive attention gains from it too.",
    needs="cudnn_attention", others="Older material compares bfloat16 on cuDNN with float32 by hand",
)  # fmt: skip
def _(r):
    exact, half = _on_device(r.timing("naive", table="two steps", dtype="float32")), _default(r, "naive")
    return exact.ms > half.ms, f"naive float32 takes {_times(exact.ms / half.ms)} as long as naive bfloat16"


@_claim(
    "cudnn_as_accurate", CUDNN,
    "cuDNN's error against float64 is no larger than one and a half times XLA's, in bfloat16 and in float16.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    ratios = [
        r.finding("error", label="cudnn", dtype=d) / r.finding("error", label="xla", dtype=d)
        for d in ("bfloat16", "float16")
    ]
    return max(ratios) <= 1.5, "cuDNN over XLA: " + ", ".join(_times(x) for x in ratios)


@_claim("cudnn_refuses_float32", CUDNN, "cuDNN takes no float32, and says so instead of falling back.",
        needs="cudnn_attention")  # fmt: skip
def _(r):
    words = r.finding("cudnn call", label="float32")
    return "float32" in words and words != "runs", words


@_claim("head_dim_multiple_of_eight", CUDNN, "The head dim must be a multiple of 8.", needs="cudnn_attention")
def _(r):
    runs = {H: r.finding("cudnn call", label=f"head dim {H}") == "runs" for H in (36, 40, 128)}
    return runs == {36: False, 40: True, 128: True}, ", ".join(
        f"{H}: {'runs' if ok else 'refused'}" for H, ok in runs.items()
    )


@_claim("head_dim_256_on_hopper", CUDNN, "On this card, 9.0 or newer, the head dim goes up to 256 and not to 512.",
        needs="cudnn_head_dim_256")  # fmt: skip
def _(r):
    runs = {H: r.finding("cudnn call", label=f"head dim {H}") == "runs" for H in (256, 512)}
    return runs == {256: True, 512: False}, ", ".join(f"{H}: {'runs' if ok else 'refused'}" for H, ok in runs.items())


@_claim(
    "row_mask_is_refused", CUDNN,
    "A (B, 1, 1, S) mask is refused; key lengths say the same and run.",
    needs="cudnn_attention", others="JAX's documentation says: the mask must be broadcastable to (B, N, T, S)",
)  # fmt: skip
def _(r):
    row = r.finding("cudnn call", label="mask (B, 1, 1, S)")
    lengths = r.finding("cudnn call", label="key_value_seq_lengths alone")
    return row != "runs" and lengths == "runs", f"mask: {row}; lengths: {lengths}"


@_claim(
    "window_without_causal", CUDNN,
    "A window (16, 0) without is_causal runs on cuDNN and is wrong, without a word.",
    needs="cudnn_attention", others="JAX's documentation says: a query sees 16 keys to its left, none to its right",
)  # fmt: skip
def _(r):
    wrong, right = (r.finding("cudnn call", label=f"window (16, 0), {x}") for x in ("not causal", "causal"))
    return wrong.startswith("runs, but") and right == "runs", f"not causal: {wrong}; causal: {right}"
