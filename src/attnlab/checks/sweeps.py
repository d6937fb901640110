"""The exercises of 05_sweeps."""

import functools

from attnlab.exercises import RIGHT, Answer, compare, over_cases, together, untried
from attnlab.records import Finding, Records, Shape, Timing


def check_roofline_bound(yours) -> Answer:
    """Exercise: the most TFLOP/s that a roofline allows, from FLOP per byte, TFLOP/s and GB/s."""
    hint = (
        "the roof is the lower of two lines: the peak, and FLOP per byte times bandwidth. FLOP/byte times GB/s is "
        "GFLOP/s, a thousandth of a TFLOP/s."
    )
    cases = ((32.0, 989.0, 4800.0), (1024.0, 989.0, 4800.0), (256.0, 121.0, 300.0), (512.0, 121.0, 300.0))

    def right(intensity, tflops, gbps):
        return min(tflops, intensity * gbps / 1e3)

    what = "{} FLOP/byte under {} TFLOP/s and {} GB/s"
    return over_cases("roofline_bound", yours, right, hint, cases, what, unit="TFLOP/s")


def _row(label, T, dtype, ms, temp_bytes, wall_ms):
    return Timing(
        label=label, shape=Shape.square(4, T, 8, 64), dtype=dtype, ms=ms, p20=ms, p80=ms, samples=1, clock="cupti",
        wall_ms=wall_ms, compile_s=0.0, temp_bytes=temp_bytes, bytes=1000.0 * T,
    )  # fmt: skip


def _refused(label, T, dtype):
    return Finding(name="refused", value="no", label=label, shape=Shape.square(4, T, 8, 64), dtype=dtype)


def _sweeps() -> list[Records]:
    """Two sweeps with refusals, one in the order of lengths, one from behind and with float32 last."""
    sweeps = []
    for lengths, fast in (((256, 512, 1024), 3.0), ((2048, 512), 2.0)):
        rows = Records()
        for i, T in enumerate(lengths, 1):
            ms = T / 1000
            rows += [
                _row("naive", T, "bfloat16", fast * i * ms, T * T, fast * i * ms + 0.1),
                _row("xla", T, "bfloat16", 9 * ms, 6 * i * T * T, 9.5 * ms),
                _row("cudnn", T, "bfloat16", ms, 0 if T == 512 else 512, ms + 0.1),
                _row("naive", T, "float32", 20 * ms, 2 * T * T, 21 * ms),
                _row("xla", T, "float32", 21 * ms, 13 * T * T, 22 * ms),
                _refused("cudnn", T, "float32"),
            ]
        rows += [_refused("xla", 16384, "bfloat16"), _refused("naive", 16384, "bfloat16")]
        rows += [_row("cudnn", 16384, "bfloat16", 5.0, 512, 5.1)]
        sweeps.append(rows)
    sweeps[1].reverse()
    sweeps[1].sort(key=lambda r: r.dtype, reverse=True)  # who takes the first row of a length takes float32
    return sweeps


def _by_length(rows, dtype, first, second, of) -> dict:
    """{T: ratio} of the timings of both labels; the right answer."""
    timed = {(r.label, r.shape.T): of(r) for r in rows if isinstance(r, Timing) and r.dtype == dtype}
    lengths = sorted(T for label, T in timed if label == second and (first, T) in timed)
    return {T: timed[first, T] / timed[second, T] for T in lengths}


def _check_by_length(name, yours, right, hint, what) -> Answer:
    """Hold the reader's {T: number} against the right one: which lengths, then each number."""
    if not callable(yours) or untried(yours):
        return compare(name, yours, {}, hint, what="{T: ratio}")
    answers = []
    for rows in _sweeps():
        want, got = right(rows), {}

        @functools.wraps(yours)
        def lengths(rows, got=got):
            out = yours(rows)
            if not isinstance(out, dict):
                return out
            got.update(out)
            return ", ".join(str(T) for T in sorted(out))

        text = ", ".join(str(T) for T in sorted(want))
        answers.append(compare(name, lengths, text, hint, args=(Records(rows),), what="lengths"))
        if answers[-1].state == RIGHT:
            given = {T: "nothing" if untried(got[T]) else got[T] for T in want}
            answers += [compare(name, given[T], want[T], hint, what=f"{what} at T = {T}", unit="×") for T in want]
    return together(name, answers)


def check_speedups(yours) -> Answer:
    """Exercise: {T: naive over cuDNN} in bfloat16 and device time, from the rows of a sweep with refusals."""
    return _check_by_length(
        "speedups",
        yours,
        lambda rows: _by_length(rows, "bfloat16", "naive", "cudnn", lambda r: r.ms),
        "keep the rows that are a lab.Timing and bfloat16, put `row.ms` under (row.label, row.shape.T), and divide "
        "naive by cuDNN at the lengths that both have.",
        "naive over cuDNN",
    )


def check_memory_ratio(yours) -> Answer:
    """Exercise: {T: XLA's memory over cuDNN's} in bfloat16, temporaries with inputs and output."""
    return _check_by_length(
        "memory_ratio",
        yours,
        lambda rows: _by_length(rows, "bfloat16", "xla", "cudnn", lambda r: r.temp_bytes + r.bytes),
        "as for the speed-up, with `row.temp_bytes + row.bytes` of XLA over cuDNN's: what is written on the way, and "
        "what any version must hold.",
        "XLA over cuDNN",
    )


def check_head_dim_sweep(yours) -> Answer:
    """Exercise: one call of `sweep` over the head dims, whose rows are returned."""
    hint = (
        'one call does it: return sweep(variants, table="head dim", B=4, T=256, N=8, H=(32, 64, 128), '
        "dtype=…): a tuple of sizes is an axis."
    )
    if not callable(yours) or untried(yours):
        return compare("head_dim_sweep", yours, True, hint, what="rows of the sweep")
    variants, calls, rows = {"naive": None, "cudnn": None}, [], Records([_refused("cudnn", 256, "bfloat16")])

    def sweep(variants, *, table, B=4, T=128, N=8, H=64, S=None, K=None, dtype="bfloat16", **options):
        listed = tuple(H) if isinstance(H, (tuple, list, range)) else (H,)
        one = [x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x for x in (B, T, N, S, K, dtype)]
        calls.append({"variants": list(variants), "table": table, "H": listed, "one": one, "more": options})
        return rows

    @functools.wraps(yours)
    def returned(*args):
        out = yours(*args)
        return out if untried(out) else out is rows

    first = compare("head_dim_sweep", returned, True, hint, args=(sweep, variants), what="the sweep's rows come back")
    if first.state != RIGHT and not (first.rows and calls):
        return first
    want = [("calls of sweep", len(calls), 1)]
    if calls:
        call = calls[0]
        B, T, N, S, K, dtype = call["one"]
        sizes = (("B", B, 4), ("T", T, 256), ("N", N, 8), ("S", S or T, 256), ("K", K or N, 8))
        want += [
            ("head dims", ", ".join(map(str, call["H"])), "32, 64, 128"),
            *((name, str(mine), str(right)) for name, mine, right in sizes),
            ("dtype", getattr(dtype, "__name__", str(dtype)), "bfloat16"),
            ("variants", ", ".join(call["variants"]), "naive, cudnn"),
            ("table", str(call["table"]), "head dim"),
            ("further options", ", ".join(sorted(call["more"].keys() - {"seconds"})) or "none", "none"),
        ]
    details = [compare("head_dim_sweep", mine, right, hint, what=what) for what, mine, right in want]
    return together("head_dim_sweep", [*details, first])
