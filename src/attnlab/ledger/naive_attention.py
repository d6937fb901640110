"""The claims of 01_naive_attention."""

import itertools

from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_number
from attnlab.records import MissingRecord

claim = claims_of("01_naive_attention")


@claim(
    "naive_is_right",
    "Attention by hand agrees with the float64 reference as closely as its dtype allows.",
)  # fmt: skip
def _(r):
    error, allowed = r.finding("error by hand"), r.finding("error allowed")
    return error <= allowed, f"relative error {format_number(error, 2)}, allowed {format_number(allowed, 2)}"


@claim(
    "more_than_three_kernels",
    "Compiled naive attention launches more than three kernels: transposes stand beside the two products and the "
    "softmax.",
    needs="gpu", others="Older material says: it launches three separate kernels",
)  # fmt: skip
def _(r):
    row = on_device(r.timing("naive", table="naive kernels"))
    return len(row.kernels) > 3, f"{len(row.kernels)} kernels"


@claim("eager_launches_more", "Run eagerly, without jit, the same function launches more kernels.", needs="cupti")
def _(r):
    eager, compiled = (r.finding("kernels", label=x) for x in ("eager", "compiled"))
    return eager > compiled, f"{eager} eager, {compiled} compiled"


@claim(
    "weights_grow_with_T2",
    "From T = 1024 on, twice the length means four times the temporaries: naive memory is O(T²).",
    needs="gpu",
)  # fmt: skip
def _(r):
    found = sorted((f for f in r.latest(name="temporaries") if f.shape.T >= 1024), key=lambda f: f.shape.T)
    pairs = [(a, b) for a, b in itertools.pairwise(found) if b.shape.T == 2 * a.shape.T]
    if not pairs:
        raise MissingRecord("no length from 1024 on was compiled together with its double")
    ratios = [b.value / a.value for a, b in pairs]
    return all(3.5 <= x <= 4.5 for x in ratios), f"at each doubling: {', '.join(times(x) for x in ratios)}"


@claim(
    "weights_are_written",
    "The T×S weights are written to memory, and the temporaries hold at least all of them.",
    needs="gpu",
)  # fmt: skip
def _(r):
    found = r.latest(name="temporaries")
    if not found:
        raise MissingRecord("no temporaries were recorded")
    least = min(f.value / r.finding("weight bytes", shape=f.shape) for f in found)
    written = all(r.finding("T×S array written", shape=f.shape) for f in found)
    return written and least >= 1, f"T×S arrays written: {written}; temporaries are {times(least)} the weights or more"
