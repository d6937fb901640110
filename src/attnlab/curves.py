"""Sweeps as tables and lines: what was measured here, and the saved H200 rows where this device is another."""

import math

from attnlab import device as _device
from attnlab import plots
from attnlab.display import format_bytes, format_ms, format_number, show_table
from attnlab.records import LOG, Records, Timing
from attnlab.tables import SAVED, saved_elsewhere

# What a row has to show: how it is written, and what an axis calls it.
VALUES = {
    "ms": (format_ms, "time of one call, ms"),
    "wall_ms": (format_ms, "host's time of one blocked call, ms"),
    "tflops": (format_number, "TFLOP/s"),
    "temp_bytes": (format_bytes, "temporary memory, bytes"),
}
WINDOW = "window"  # the axis of masks; all others are fields of Shape


def _size(row, axis: str):
    """Where a row stands on an axis: a size, or for windows how many keys a query sees at most."""
    if axis != WINDOW:
        return getattr(row.shape, axis)
    found = row.mask.split("(")[1:]
    return int(found[0].split(",")[0]) + 1 if found else row.shape.S


def _series(rows, axis: str, value: str) -> dict:
    """{(variant, dtype): [(size, value), ...]}, None for a refused row."""
    out = {}
    for row in rows:
        point = (_size(row, axis), getattr(row, value) if isinstance(row, Timing) else None)
        out.setdefault((row.label, row.dtype), []).append(point)
    return {name: sorted(points, key=lambda p: p[0]) for name, points in out.items()}


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
    form, _ = VALUES[value]
    for device, those in _sides(rows):
        series = _series(those, axis, value)
        dtypes = {dtype for _, dtype in series}
        cells = {name: dict(points) for name, points in series.items()}
        sizes = sorted({x for points in cells.values() for x in points})
        headers = [axis] + [label if len(dtypes) == 1 else f"{label} {dtype}" for label, dtype in series]
        body = [[x] + [_cell(cells[name], x, form) for name in series] for x in sizes]
        more = f", {dtypes.pop()}" if len(dtypes) == 1 else ""
        show_table(headers, body, title=f"{title}{more} ({device})", aligns=["right"] * len(headers))
        for words in sorted({f"{r.label}, {r.dtype}: {r.value}" for r in those if not isinstance(r, Timing)}):
            print(words)


def _cell(points: dict, x, form):
    if x not in points:
        return None
    return "refused" if points[x] is None else form(points[x])


def show_lines(rows, axis: str, title: str, value: str = "ms", reference: dict | None = None) -> None:
    """A sweep as lines on logarithmic axes, a line a variant and dtype; a refused row leaves a gap.

    Args:
      rows, axis, title, value: as for `show_sweep`.
      reference: as for `attnlab.plots.lines`.
    """
    for device, those in _sides(rows):
        series = _series(those, axis, value)
        if value == "temp_bytes":  # no place for zero on a logarithmic axis
            series = {name: [(x, y or None) for x, y in points] for name, points in series.items()}
        if any(y is not None for points in series.values() for _, y in points):
            dtypes = {dtype for _, dtype in series}
            named = series if len(dtypes) > 1 else {label: points for (label, _), points in series.items()}
            more = f", {dtypes.pop()}" if len(dtypes) == 1 else ""
            plots.lines(named, axis, VALUES[value][1], f"{title}{more}, {device}", reference=reference)


def show_roofline(rows, axis: str, title: str) -> None:
    """Achieved TFLOP/s of each row against the device's ceilings; FLOP per byte is the problem's own.

    A device without published bandwidth has no roofline; then only the saved sweep is drawn.
    """
    for device, those in _sides(rows):
        ceilings = _device.CEILINGS["NVIDIA H200"] if device == SAVED else _device.current().ceilings
        timed = [r for r in those if isinstance(r, Timing) and r.flops and r.bytes]
        if not (timed and ceilings and ceilings.gbps):
            print(f"{device}: no published memory bandwidth, so no roofline.")
            continue
        points = {}
        for r in timed:
            point = (r.flops / r.bytes, r.tflops, f"{axis} {_size(r, axis)}")
            points.setdefault((r.label, r.dtype), []).append(point)
        dtypes = {r.dtype for r in timed}
        peaks = {
            f"peak, {d}": ceilings.tflops[d] for d in sorted(dtypes) if not math.isnan(ceilings.tflops.get(d, math.nan))
        }
        plots.roofline(points, ceilings.gbps, peaks, f"{title}, {device}")
