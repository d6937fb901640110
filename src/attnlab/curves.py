"""Sweeps as tables and lines: what was measured here, and the saved H200 rows where this device is another."""

import math
import pathlib
import re

from attnlab import device as _device
from attnlab import plots
from attnlab.display import format_bytes, format_ms, format_number, show_table
from attnlab.records import LOG, Records, Shape, Timing, saved
from attnlab.tables import SAVED, saved_elsewhere

# What a row has to show: how it is written, and what an axis calls it.
VALUES = {
    "ms": (format_ms, "time of one call, ms"),
    "wall_ms": (format_ms, "host's time of one blocked call, ms"),
    "tflops": (format_number, "TFLOP/s"),
    "temp_bytes": (format_bytes, "temporary memory, MiB"),
}
WINDOW = "window"  # the axis of masks; all others are fields of Shape


def _size(row, axis: str):
    """Where a row stands on an axis: a size, or for windows how many keys a query sees at most."""
    if axis != WINDOW:
        return getattr(row.shape, axis)
    if not row.mask.startswith(WINDOW):
        return row.shape.S
    left, right = map(int, re.findall(r"-?\d+", row.mask))
    return min(row.shape.S, left + 1 + (0 if row.mask.endswith("causal") else right))


def _series(rows, axis: str, value: str) -> dict:
    """{(variant, dtype): [(size, value), ...]}, None for a refused row, NaN for a timed one without this value."""
    if axis not in (*Shape._fields, WINDOW):
        raise ValueError(f"no axis {axis!r}: there are {', '.join(Shape._fields)} and {WINDOW!r}")
    if value not in VALUES:
        raise ValueError(f"no value {value!r}: there are {', '.join(VALUES)}")
    out, seen = {}, {}
    for row in rows:
        x, what = _size(row, axis), (row.shape, row.mask)
        if seen.setdefault((row.label, row.dtype, x), what) != what:
            one, two = (f"{shape} {mask}" for shape, mask in (seen[row.label, row.dtype, x], what))
            raise ValueError(
                f"two rows of {row.label}, {row.dtype}, at {axis} {x}: {one} and {two}. Show one at a time"
            )
        y = getattr(row, value) if isinstance(row, Timing) else None
        out.setdefault((row.label, row.dtype), {})[x] = math.nan if y is None and isinstance(row, Timing) else y
    return {name: sorted(points.items()) for name, points in out.items()}


def _fixed(rows, axis: str) -> str:
    """What is the same in every row, as the end of a title: ", bfloat16, B4 N8 H64". The axis itself is left out."""
    shapes, dtypes = [r.shape for r in rows], {r.dtype for r in rows}
    told = ["B", "T", "N", "H"]
    told += ["S"] if any(s.S != s.T for s in shapes) else []
    told += ["K"] if any(s.K != s.N for s in shapes) else []
    sizes = {name: {getattr(s, name) for s in shapes} for name in ("B", "T", "S", "N", "K", "H") if name in told}
    same = " ".join(f"{name}{min(found)}" for name, found in sizes.items() if len(found) == 1 and name != axis)
    return "".join(f", {x}" for x in (dtypes.pop() if len(dtypes) == 1 else "", same) if x)


def _ceilings(device: str):
    """The published ceilings of a side, None where there are none: a CPU's are a loose limit, and no ceiling."""
    found = _device.CEILINGS["NVIDIA H200"] if device == SAVED else _device.current().ceilings
    return found if found and found.gbps else None


def _peaks(ceilings, dtypes) -> dict:
    """{label: TFLOP/s} of those dtypes that have a published rate."""
    rates = {d: ceilings.tflops.get(d, math.nan) for d in sorted(dtypes)}
    return {f"peak, {d}": rate for d, rate in rates.items() if not math.isnan(rate)}


def _sides(rows) -> list[tuple[str, Records]]:
    """(device, rows) of here, and of the saved sweep where it is another device's."""
    theirs = Records()
    for table in dict.fromkeys(r.table for r in rows):
        theirs += saved_elsewhere().find(notebook=LOG.notebook, table=table)
    labels = {r.label for r in rows}
    theirs = Records(r for r in theirs if r.label in labels)
    return [(_device.current().name, rows)] + ([(SAVED, theirs)] if theirs else [])


def show_sweep(rows, axis: str, title: str, value: str = "ms") -> None:
    """A sweep as a table: sizes down, variants across. Elsewhere than on the H200 its saved sweep follows.

    Args:
      rows: of `attnlab.sweep`, along one axis.
      axis: a field of `Shape`, or "window" for how many keys a query sees.
      title: what is shown.
      value: "ms", "wall_ms", "tflops" or "temp_bytes".
    """
    for device, those in _sides(rows):
        series, form = _series(those, axis, value), VALUES[value][0]
        dtypes = {dtype for _, dtype in series}
        cells = {name: dict(points) for name, points in series.items()}
        sizes = sorted({x for points in cells.values() for x in points})
        headers = [axis] + [label if len(dtypes) == 1 else f"{label} {dtype}" for label, dtype in series]
        body = [[x] + [_cell(cells[name], x, form) for name in series] for x in sizes]
        show_table(headers, body, title=f"{title}{_fixed(those, axis)} ({device})", aligns=["right"] * len(headers))
        for words in sorted({f"{r.label}, {r.dtype}: {r.value}" for r in those if not isinstance(r, Timing)}):
            print(words)


def _cell(points: dict, x, form):
    if x not in points:
        return None
    return "refused" if points[x] is None else form(points[x])


def show_lines(rows, axis: str, title: str, value: str = "ms", reference: dict | None = None) -> None:
    """A sweep as lines on logarithmic axes, a line a variant and dtype; a refused row leaves a gap.

    With "tflops" the published peaks of each device are drawn too, where it has any.

    Args:
      rows, axis, title, value: as for `show_sweep`.
      reference: as for `attnlab.plots.lines`.
    """
    for device, those in _sides(rows):
        if any(isinstance(r, Timing) for r in those):
            plots.lines(*_lines(those, device, axis, title, value), reference=_guides(those, device, value, reference))


def show_ladder(rows, title: str) -> None:
    """TFLOP/s of variants at one shape as bars, in the order of `rows`, each with its gain over the one before.

    The published peak is drawn where the device has one; elsewhere than on the H200 its saved ladder follows.
    """
    order = list(dict.fromkeys(r.label for r in rows))
    for device, those in _sides(rows):
        found = {r.label: r.tflops for r in those if isinstance(r, Timing)}
        if found:
            ceilings = _ceilings(device)
            peaks = _peaks(ceilings, {r.dtype for r in those}) if ceilings else {}
            rungs = {label: found.get(label) for label in order}
            plots.ladder(rungs, peaks, "TFLOP/s", f"{title}{_fixed(those, '')}, {device}")


def _guides(rows, device: str, value: str, reference: dict | None) -> dict:
    ceilings = _ceilings(device) if value == "tflops" else None
    peaks = _peaks(ceilings, {r.dtype for r in rows if isinstance(r, Timing)}) if ceilings else {}
    return peaks | (reference or {})


def _lines(rows, device: str, axis: str, title: str, value: str) -> tuple:
    """The series, both labels and the title, as `attnlab.plots.lines` takes them."""
    series, ylabel = _series(rows, axis, value), VALUES[value][1]
    if value == "temp_bytes":
        if any(y == 0 for points in series.values() for _, y in points):
            ylabel += " (none is drawn as 1 byte)"  # no place for zero on a logarithmic axis
        series = {
            name: [(x, y if y is None else max(y, 1) / 2**20) for x, y in points] for name, points in series.items()
        }
    dtypes = {dtype for _, dtype in series}
    named = series if len(dtypes) > 1 else {label: points for (label, _), points in series.items()}
    return named, axis, ylabel, f"{title}{_fixed(rows, axis)}, {device}"


def save_length_figure(path) -> str:
    """Draw the saved sweep over lengths of 05_sweeps into a PNG, for README; return what it shows in words.

    Raises:
      LookupError: no such sweep is saved.
    """
    rows = Records(r for r in saved() if r.notebook == "05_sweeps" and r.table.startswith("length"))
    rows = Records(r for r in rows if isinstance(r, Timing))
    if not rows:
        raise LookupError("the sweep over lengths of 05_sweeps is not among the saved results")
    env = rows[0].env
    device = f"{env['device']} (JAX {env['jax']}, cuDNN {env['cudnn']})"
    series = _lines(rows, device, "T", "Attention, forward", "ms")
    figure, words = plots.draw_lines(*series, reference={"grows as T²": ("slope", 2)})
    pathlib.Path(path).write_bytes(plots.png(figure, words))
    return words


def show_roofline(rows, axis: str, title: str) -> None:
    """Achieved TFLOP/s of each row against the device's ceilings; FLOP per byte is the problem's own.

    A device without published bandwidth has no roofline; then only the saved sweep is drawn.
    """
    for device, those in _sides(rows):
        ceilings = _ceilings(device)
        timed = [r for r in those if isinstance(r, Timing) and r.flops and r.bytes]
        if not (timed and ceilings):
            print(f"{device}: {'no published memory bandwidth' if timed else 'nothing was timed'}, so no roofline.")
            continue
        points = {}
        for r in timed:
            point = (r.flops / r.bytes, r.tflops, f"{axis} {_size(r, axis)}")
            points.setdefault((r.label, r.dtype), []).append(point)
        peaks = _peaks(ceilings, {r.dtype for r in timed})
        plots.roofline(points, ceilings.gbps, peaks, f"{title}{_fixed(those, axis)}, {device}")
