"""Records as tables and bars: measured here, saved from the H200, and the bound of this device side by side."""

from attnlab import device as _device
from attnlab.display import (
    NOTHING,
    cell_text,
    format_bytes,
    format_count,
    format_ms,
    format_number,
    show,
    show_bars,
    show_table,
    table_bundle,
)
from attnlab.features import features, has
from attnlab.records import LOG, Finding, Records, Timing, saved

SAVED = "H200, saved"


def _key(row):
    return (row.label, row.shape, row.dtype, row.mask)


def saved_elsewhere() -> Records:
    """The saved H200 records, empty when this device is that one: what was measured here is newer."""
    rows = saved()
    return Records() if rows and rows[0].env.get("device") == _device.current().name else rows


def _merged(rows, table: str = "") -> list[tuple]:
    """(row here or None, saved row or None), those of here first, then saved ones at shapes not run here."""
    beside = saved_elsewhere().find(notebook=LOG.notebook)
    names = {r.table for r in rows} | ({table} if table else set())
    theirs = {(name, _key(r)): r for name in sorted(names) for r in beside.find(table=name)}
    return [(r, theirs.pop((r.table, _key(r)), None)) for r in rows] + [(None, r) for r in theirs.values()]


def _refused(row) -> bool:
    return isinstance(row, Finding)


_WHAT = ["variant", "shape", "dtype", "mask"]
_MEASURED = ["time", "clock", "wall", "TFLOP/s", "bound", "error"]


def _what(row) -> list:
    return [row.label, str(row.shape or NOTHING), row.dtype, row.mask]


def _measured(row) -> list:
    if row is None or _refused(row):
        return ["not run here" if row is None else "refused", None, None, None, None, None]
    error = format_number(row.error, 2) if row.error is not None else None
    times = [format_ms(row.ms), row.clock, format_ms(row.wall_ms)]
    return [*times, format_number(row.tflops), format_ms(row.bound_ms), error]


def show_timings(rows, title: str, table: str = "") -> None:
    """Timings and refusals of one comparison as a table.

    Columns: what ran; the time with its clock, and the host's wall time of one blocked call; what it
    achieved, the bound of this device, and the error against float64. Elsewhere than on the H200 its saved
    rows stand beside. A refused row says why below the table.

    Args:
      rows: timings and refusals; may be empty where nothing of the comparison runs here.
      title: what is shown.
      table: the comparison's name, for its saved rows; needed only where `rows` is empty.
    """
    pairs = _merged(rows, table)
    with_saved = any(theirs for _, theirs in pairs)
    headers = [*_WHAT, "time here", "clock", "wall here", "TFLOP/s", "bound here", "error"]
    headers += [f"time, {SAVED}", f"wall, {SAVED}"] if with_saved else []
    body = []
    for mine, theirs in pairs:
        beside = _measured(theirs) if theirs else [None] * len(_MEASURED)
        body.append(_what(mine or theirs) + _measured(mine) + ([beside[0], beside[2]] if with_saved else []))
    aligns = ["left"] * len(_WHAT) + ["right"] * (len(headers) - len(_WHAT))
    show_table(headers, body, title=f"{title} ({_device.current().name})", aligns=aligns)
    notes = {f"{r.label}: {r.value}" for r in rows if _refused(r)} | {r.note for r in rows if getattr(r, "note", "")}
    for note in sorted(notes):
        print(note)


def show_saved(number: str, device: str = "nvidia-h200") -> None:
    """The saved comparisons of the notebook whose name begins with `number` ("03", "3"; "" for all), one table each.

    Raises:
      LookupError: nothing is saved for it.
    """
    timed = [r for r in saved(device) if isinstance(r, Timing)]
    start = number.zfill(2) if number.isdigit() else number.removesuffix(".ipynb")
    rows = [r for r in timed if r.notebook.startswith(start)]
    if not rows:
        known = ", ".join(dict.fromkeys(r.notebook for r in timed)) or "none"
        raise LookupError(f"no saved timings of a notebook {number!r} on {device}. There are: {known}")
    for notebook, table in dict.fromkeys((r.notebook, r.table) for r in rows):
        show(_saved_bundle([r for r in rows if (r.notebook, r.table) == (notebook, table)]))


def saved_text(notebook: str, table: str) -> str:
    """One of the tables of `show_saved`, as text. Raises `LookupError`: nothing of that name is saved."""
    rows = [r for r in saved().find(notebook=notebook, table=table) if isinstance(r, Timing)]
    if not rows:
        raise LookupError(f"no saved timings of {table!r} in {notebook}")
    return _saved_bundle(rows)["text/plain"]


def _saved_bundle(rows) -> dict:
    env = rows[0].env
    return table_bundle(
        [*_WHAT, *_MEASURED],
        [_what(r) + _measured(r) for r in rows],
        title=f"{rows[0].notebook}, {rows[0].table} ({env['device']}, JAX {env['jax']}, cuDNN {env['cudnn']})",
        aligns=["left"] * len(_WHAT) + ["right"] * len(_MEASURED),
    )


def show_times(rows, title: str, wall: bool = False) -> None:
    """Times of one comparison as bars in µs: of this device, and of the H200 where its saved rows are at hand.

    Args:
      rows: timings and refusals; a refused row has no bar.
      title: what is shown.
      wall: the host's time of one blocked call instead of the row's own clock.
    """
    here = _device.current()
    labels = {r.label for r in rows}
    theirs = [row for _, row in _merged(rows) if isinstance(row, Timing) and row.label in labels]
    for device, timed in ((here.name, [r for r in rows if isinstance(r, Timing)]), (SAVED, theirs)):
        if timed:
            bars = [(f"{r.label}, {r.dtype}", (r.wall_ms if wall else r.ms) * 1e3) for r in timed]
            show_bars(bars, f"{title}, {device}", unit="µs", lower_is_better=True)


def show_kernels(row: Timing, title: str) -> None:
    """The kernels of one call in launch order, with the time of each; the saved H200 ones where none were seen here."""
    if not row.kernels:
        print(f"{row.label}: no kernels seen here (clock: {row.clock}{'; ' + row.note if row.note else ''})")
        found = saved_elsewhere().find(notebook=LOG.notebook, table=row.table, label=row.label, dtype=row.dtype)
        row = next((r for r in found if isinstance(r, Timing) and r.kernels), row)
    if row.kernels:
        what = ", ".join(filter(None, (row.label, str(row.shape or ""), row.dtype)))
        show_table(
            ["#", "kernel", "time"],
            [(i, name, format_ms(ms)) for i, (name, ms) in enumerate(row.kernels, 1)],
            title=f"{title}: {what} on {row.env['device']}",
        )


def show_findings(name: str, title: str, form=cell_text) -> None:
    """The findings of one name in this notebook, with the H200's saved ones beside; `form` writes a value as text."""
    here = LOG.records.find(name=name)
    theirs = {_key(f): f for f in saved_elsewhere().find(name=name, notebook=LOG.notebook)}
    keys = list(dict.fromkeys([_key(f) for f in here] + list(theirs)))
    mine = {_key(f): f for f in here}
    body = []
    for key in keys:
        label, shape, dtype, _ = key
        value = form(mine[key].value) if key in mine else "not run here"
        cells = [label or NOTHING, str(shape or NOTHING), dtype or NOTHING, value]
        body.append(cells + ([form(theirs[key].value) if key in theirs else None] if theirs else []))
    headers = ["what", "shape", "dtype", "here"] + ([SAVED] if theirs else [])
    keep = [i for i in range(len(headers)) if i > 2 or any(row[i] != NOTHING for row in body)]
    show_table([headers[i] for i in keep], [[row[i] for i in keep] for row in body], title=title)


def show_grid(name: str, title: str, form=cell_text, axis: str = "T") -> None:
    """The findings of one name as a grid: sizes down, labels across; the saved H200 ones as a grid of their own.

    Args:
      name: of the findings; those without a shape are left out.
      title: what is shown.
      form: writes a value as text.
      axis: the field of `Shape` that varies.
    """
    sides = ((_device.current().name, LOG.records), (SAVED, saved_elsewhere().find(notebook=LOG.notebook)))
    for side, records in sides:
        found = [f for f in records.latest(name=name) if f.shape]
        labels = list(dict.fromkeys(f.label for f in found))
        cells = {(getattr(f.shape, axis), f.label): form(f.value) for f in found}
        body = [[size, *(cells.get((size, x)) for x in labels)] for size in sorted({size for size, _ in cells})]
        if body:
            show_table([axis, *labels], body, title=f"{title} ({side})", aligns=["right"] * (1 + len(labels)))
    if not any(name == getattr(r, "name", "") for _, records in sides for r in records):
        print(f"{title}: nothing was measured here.")


def show_device() -> None:
    """What this process computes on, and where its ceilings come from."""
    d, env = _device.current(), _device.environment()
    c = d.ceilings
    rows = [
        ("device", d.name),
        ("compute capability", d.capability),
        ("memory", format_bytes(d.memory)),
        ("driver", d.driver),
        ("JAX", env["jax"]),
        ("cuDNN", env["cudnn"]),
        ("Python", env["python"]),
    ]
    if c:
        as_tf32 = {"float32": "float32 as TF32"} if d.kind == "gpu" and has("tf32_matmul") else {}
        rows += [(f"ceiling, {as_tf32.get(x, x)}", f"{format_number(rate)} TFLOP/s") for x, rate in c.tflops.items()]
        rows += [("memory bandwidth", f"{format_count(c.gbps)} GB/s")] if c.gbps else []
        rows += [("L2 cache, by the driver" if d.live else "L2 cache", format_bytes(c.l2))] if c.l2 else []
        rows += [("ceilings from", c.source)]
    show_table(["what", "this machine"], rows, title="The device")


def show_features(d: _device.Device | None = None) -> None:
    """What can run on `d` (default: here), each with its reason, and what to do about a no."""
    rows = [(f.name, f.ok, f.reason, f.todo or None) for f in features(d).values()]
    show_table(
        ["what", "runs" if d else "runs here", "why", "what to do"],
        rows,
        title=f"What runs on {(d or _device.current()).name}",
    )
