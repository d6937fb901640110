"""The ledger: every sentence of the course that a number can contradict, with the check that decides it.

A claim is judged over records. It holds, it fails, or it is not testable here, and then it says why. The
saved H200 records are judged by a test, so that no committed sentence contradicts the committed results.
"""

import collections
import dataclasses
from collections.abc import Callable

from attnlab import device as _device
from attnlab.display import format_number, show_table
from attnlab.features import OTHERS, RULES, feature, has
from attnlab.records import LOG, MissingRecord, Records, Shape, saved

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
    older: str = ""  # what older material says, where it says otherwise

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


def _claim(name: str, notebook: str, sentence: str, needs: str | None = None, older: str = ""):
    def register(check):
        if name in LEDGER:
            raise ValueError(f"two claims are called {name!r}")
        if needs and needs not in RULES and needs not in OTHERS:
            raise ValueError(f"claim {name!r} needs {needs!r}, which is no feature")
        LEDGER[name] = Claim(name, notebook, sentence, check, needs, older)
        return check

    return register


def _rows(claims) -> list[tuple]:
    beside = saved()
    rows = []
    for c in claims:
        here, there = c.judge_here(), c.judge(beside)
        sentence = f"{c.sentence}\n(Older material says: {c.older})" if c.older else c.sentence
        rows.append((sentence, here.state, here.measured, f"{there.state}: {there.measured}" if beside else None))
    return rows


_HEADERS = ["claim", "verdict here", "measured here", "H200, saved"]


def claim(*names: str) -> None:
    """Show claims: the sentence, its verdict here with what was measured, and the verdict on the saved H200 run.

    Raises:
      KeyError: no claim of that name.
    """
    for name in names:
        if name not in LEDGER:
            raise KeyError(f"no claim {name!r}: the ledger has {', '.join(LEDGER)}")
    show_table(_HEADERS, _rows([LEDGER[name] for name in names]), aligns=["left"] * 4)


def summary() -> None:
    """Show every claim of this notebook with its verdict."""
    mine = [c for c in LEDGER.values() if c.notebook == LOG.notebook]
    show_table(
        _HEADERS,
        _rows(mine),
        title=f"What you saw, on {_device.current().name}",
        aligns=["left"] * 4,
    )


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
    "Without the division by √H one key takes nearly all of the weight, and the slope of the softmax falls.",
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
    "At the default shape the host's clock shows more than five times what the device needs.",
    needs="cudnn_attention", older="time a call on the host, and compare variants by that",
)  # fmt: skip
def _(r):
    row = r.timing("cudnn", table="two clocks")
    return row.wall_ms > 5 * row.ms and row.clock == "cupti", f"{_times(row.wall_ms / row.ms)} ({row.clock})"


@_claim(
    "late_library_path", START,
    "Setting LD_LIBRARY_PATH inside a running process changes nothing for that process.",
    older='os.environ["LD_LIBRARY_PATH"] = … in the first cell',
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
    tenth, fifth, none = (
        r.finding("memory held", label=x) for x in ("fraction .10", "fraction .20", "no preallocation")
    )
    ok = tenth is not None and none < tenth < fifth
    return ok, f"GiB held: {', '.join(format_number(x / 2**30) for x in (tenth, fifth, none))}"


@_claim(
    "l4_has_fp8_matmul", START,
    "By its compute capability, 8.9, an L4 has FP8 matrix products and no FP8 attention.",
    older="an L4 has no FP8, which needs Hopper",
)  # fmt: skip
def _(r):
    product, attention = r.finding("8.9 has FP8 matrix products"), r.finding("8.9 has FP8 attention")
    return product and not attention, f"matrix products: {product}, attention: {attention}"


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
    needs="gpu", older="it launches three separate kernels",
)  # fmt: skip
def _(r):
    row = r.timing("naive", table="naive kernels")
    return len(row.kernels) > 3, f"{len(row.kernels)} kernels"


@_claim("weights_grow_with_T2", NAIVE, "Twice the length means four times the temporaries: naive memory is O(T²).")
def _(r):
    found = sorted(r.latest(name="temporaries"), key=lambda f: f.shape.T)
    if len(found) < 2:
        raise MissingRecord("fewer than two lengths were compiled")
    ratio = found[-1].value / found[-2].value
    return 3.5 <= ratio <= 4.5 and found[-1].shape.T == 2 * found[-2].shape.T, f"{_times(ratio)} at twice the length"


@_claim(
    "weights_are_written",
    NAIVE,
    "The whole weight matrix is written to memory: the temporaries hold at least it.",
)
def _(r):
    found = r.latest(name="temporaries")
    if not found:
        raise MissingRecord("no temporaries were recorded")
    least = min(f.value / r.finding("weight bytes", shape=f.shape) for f in found)
    return least >= 1, f"temporaries are {_times(least)} the weights or more"


# ---- 02 ----------------------------------------------------------------------------------------------------

SDPA = "02_sdpa"


@_claim(
    "none_is_xla", SDPA,
    "implementation=None and implementation='xla' are one and the same compiled program.",
    older="None picks the best backend, maybe cuDNN",
)  # fmt: skip
def _(r):
    same, calls = r.finding("None compiles to the XLA program"), r.finding("cuDNN calls under None")
    return same and calls == 0, f"same program: {same}, cuDNN calls: {calls}"


@_claim(
    "logits_are_written", SDPA,
    "On XLA nothing is fused away: the T×S logits are written to memory in float32, whatever the input dtype.",
    older="it fuses all steps and can avoid the weight matrix",
)  # fmt: skip
def _(r):
    return r.finding("float32 logits written"), f"float32 T×S array in memory: {r.finding('float32 logits written')}"


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
    "At long T in bfloat16 XLA's attention is slower than the naive version, and more accurate.",
    needs="gpu",
)  # fmt: skip
def _(r):
    xla, naive = (r.timing(x, table="long bf16", shape=LONG) for x in ("xla", "naive"))
    ok = xla.ms > naive.ms and xla.error < naive.error
    return ok, f"{_times(xla.ms / naive.ms)} the time, {_times(naive.error / xla.error)} less error"


@_claim("options_agree", SDPA, "scale, mask, bias and both lengths do what the reference says.")
def _(r):
    found = r.latest(name="option error")
    if not found:
        raise MissingRecord("no option was tried")
    worst = max(found, key=lambda f: f.value)
    ok = all(f.value <= r.finding("error allowed") for f in found)
    return ok, f"{len(found)} options, worst {format_number(worst.value, 2)} ({worst.label})"


@_claim(
    "tf32_by_default", SDPA,
    "A float32 matrix product runs in TF32 by default; at 'highest' the error is over a hundred times smaller.",
    needs="tf32_matmul", older="float32 attention is the exact baseline",
)  # fmt: skip
def _(r):
    default, highest = (r.finding("precision error", label=x) for x in ("default", "highest"))
    return default > 100 * highest, f"{format_number(default, 2)} against {format_number(highest, 2)}"


# ---- 03 ----------------------------------------------------------------------------------------------------

CUDNN = "03_cudnn"


@_claim(
    "cudnn_is_visible", CUDNN,
    "Which implementation ran is visible: the compiled program names cuDNN's call, and the profiler its kernel.",
    needs="cudnn_attention", older="from outside you can't tell which kernel ran",
)  # fmt: skip
def _(r):
    row = r.timing("cudnn", table="first timing")
    calls = r.finding("cuDNN calls")
    seen = [name for name, _ in row.kernels if "cudnn" in name.lower() or "sdpa" in name.lower()]
    return calls >= 1 and len(seen) >= 1, f"{calls} call in the program, {len(seen)} kernel seen"


@_claim("cudnn_one_kernel", CUDNN, "cuDNN does all of it in one kernel.", needs="cudnn_attention")
def _(r):
    row = r.timing("cudnn", table="first timing")
    if row.clock != "cupti":
        raise MissingRecord("no kernels were seen: " + row.note)
    return len(row.kernels) == 1, f"{len(row.kernels)} kernel"


@_claim("cudnn_writes_no_weights", CUDNN, "cuDNN never writes the T×S matrix: its temporaries do not grow with T.",
        needs="cudnn_attention")  # fmt: skip
def _(r):
    found = r.latest(name="temporaries", label="cudnn")
    if len(found) < 2:
        raise MissingRecord("fewer than two lengths were compiled")
    return len({f.value for f in found}) == 1, f"{found[0].value} bytes at every length"


@_claim(
    "cudnn_three_times", CUDNN,
    "At the default shape in bfloat16 cuDNN takes less than half the device time of the naive version.",
    needs="cudnn_attention", older="at the small default shape every version is about equal",
)  # fmt: skip
def _(r):
    naive, cudnn = (r.timing(x, table="first timing", dtype="bfloat16", shape=DEFAULT) for x in ("naive", "cudnn"))
    return cudnn.ms < naive.ms / 2, f"naive takes {_times(naive.ms / cudnn.ms)} as long"


@_claim(
    "host_clock_shows_dispatch", CUDNN,
    "By the host's clock each of these calls takes more than four times its device time: it shows the dispatch.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    rows = [r.timing(x, table="first timing", dtype="bfloat16", shape=DEFAULT) for x in ("naive", "xla", "cudnn")]
    ratios = [row.wall_ms / row.ms for row in rows]
    words = ", ".join(f"{row.label} {_times(ratio)}" for row, ratio in zip(rows, ratios, strict=True))
    return min(ratios) > 4, f"host over device: {words}"


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


@_claim("head_dim_256_on_hopper", CUDNN, "From compute capability 9.0 the head dim goes up to 256, and no further.",
        needs="cudnn_head_dim_256")  # fmt: skip
def _(r):
    runs = {H: r.finding("cudnn call", label=f"head dim {H}") == "runs" for H in (256, 512)}
    return runs == {256: True, 512: False}, ", ".join(f"{H}: {'runs' if ok else 'refused'}" for H, ok in runs.items())


@_claim(
    "row_mask_is_refused", CUDNN,
    "A (B, 1, 1, S) mask is refused, although the documentation promises broadcasting; key lengths do it.",
    needs="cudnn_attention", older="the mask must be broadcastable to (B, N, T, S)",
)  # fmt: skip
def _(r):
    row = r.finding("cudnn call", label="mask (B, 1, 1, S)")
    lengths = r.finding("cudnn call", label="key_value_seq_lengths alone")
    return row != "runs" and lengths == "runs", f"mask: {row}; lengths: {lengths}"
