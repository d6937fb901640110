"""What changed between two sets of results: what an instructor reads before a class on a new driver or a new JAX.

Rows are matched by what they are: notebook, table, variant, shape, dtype and mask. A row counts as slower or faster
when the ratio of its medians lies outside its noise, which has two parts:

- what the percentiles of both runs say: half the spread from the 20th to the 80th percentile is 0.84 standard
  deviations, and the median of n samples is uncertain by 1.25 of them over √n. Three such errors, of both sides;
- a floor, because a run can't see how much another run would differ: other memory addresses, another clock rate,
  another choice of the compiler's autotuner.

Host times beside a device clock and compile times are not compared: they move by half and more from run to run.
Errors and temporaries of a row are compared as findings are.

On another device times and findings differ by nature. They are shown and not counted; claims are counted.
"""

import dataclasses
import math
import os
import pathlib
import re

from attnlab.claims import UNTESTABLE, has_time
from attnlab.course import BadRequest
from attnlab.display import NOTHING, cell_text, format_ms, format_number, show_table
from attnlab.ledger import LEDGER
from attnlab.records import Finding, Records, Timing, load

# Relative drift from run to run, by clock. Measured over four recorded runs of this course on H200s, same driver and
# versions: nine rows have device times in all four, so 54 ratios. 51 lie within 9%. The other three are one row,
# bfloat16 attention by hand at the default shape, where two of seven kernels of the same names took 1.4 times as long
# in the last run (13% to 16% in all). Such a change is a real one of the compiled program, and is to be seen.
DEVICE_FLOOR = 0.10
# The host's times of the same nine rows differ by up to 91%, and the times of two runs on a busy CPU of two cores by a
# factor of 2.5: this clock tells little. Chained calls are timed by it too.
HOST_FLOOR = 2.0
ERRORS = 3  # standard errors of the medians that the percentiles leave room for

# Floats move from run to run where they come from clocks: by up to a third in the four runs (a bound over an unblocked
# time). Errors keep their digits on the same software; on another, another order of summing moves them.
FLOAT_TOLERANCE = 0.5
# Counts below a thousand are exact; XLA's temporaries differ by an alignment of 256 bytes in hundreds of MiB.
INT_TOLERANCE = 1e-3
# Texts that hold measured numbers: each of these is compared as a float, the words around them as words.
MEASURED_TEXTS = {"crossover", "heads", "refused"}

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\d|\.\d)")  # no version, no "fp16"
LONG = 60  # longer texts are shortened to where they differ

ENVIRONMENT = {"device": "device", "driver": "driver", "jax": "JAX", "cudnn": "cuDNN", "te": "TE", "python": "Python"}


@dataclasses.dataclass(frozen=True)
class Side:
    """One set of results. `things` are the latest records by what they are."""

    name: str
    records: Records
    things: dict

    def env(self, key: str) -> str:
        """What its records say of their environment; several where they come from several runs."""
        return ", ".join(sorted({str(r.env.get(key) or NOTHING) for r in self.records}))

    @property
    def notebooks(self) -> set:
        return {r.notebook for r in self.records}


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of one row. `kind` is what the closing line counts, `weight` sorts: the biggest first."""

    kind: str
    words: str
    weight: float = 0.0
    counted: bool = True


def main(places: list[str]) -> int:
    """Print what changed from the first of `places` to each other one, and return the exit status.

    Args:
      places: as `attnlab.records.load` takes them. None: the saved H200 results and build/results. One: the saved
        ones and that. More: the old ones, and each of the new ones beside them.

    Returns:
      0 if nothing changed beyond noise, 1 if something did.

    Raises:
      BadRequest: a place without results, with a line that is no record of this schema, or of several devices; or
        two without a notebook in common.
    """
    places = [*(["nvidia-h200"] if len(places) < 2 else []), *(places or ["build/results"])]
    old, *new = sides = [_side(place, again=places[:n].count(place)) for n, place in enumerate(places)]
    for side in new:
        if not old.notebooks & side.notebooks:
            raise BadRequest(
                f"{old.name} and {side.name} have no notebook in common ({_numbers(old.notebooks)} against "
                f"{_numbers(side.notebooks)}): run the same ones"
            )
    _show_sides(sides)
    rows, findings = _rows(old, new), _findings(old, new)
    claims = _claims(old, new)
    return int(any([_close(old, side, rows[i], findings[i], claims[i]) for i, side in enumerate(new)]))


def _side(place: str, again: int) -> Side:
    try:
        records = load(place)
    except (LookupError, ValueError, OSError) as e:
        why = f"{e.strerror}: {e.filename}" if isinstance(e, OSError) and e.filename else str(e)
        raise BadRequest(why if str(place) in why else f"{place}: {why}") from e
    things = {}
    for notebook in dict.fromkeys(r.notebook for r in records):
        for r in records.latest(notebook=notebook):
            name = getattr(r, "name", "refused")  # a row that was refused is the same thing as one that was timed
            things[notebook, name, r.table, r.label, r.shape, r.dtype, r.mask] = r
    name = place if len(place) <= 30 else f"…{os.sep}{pathlib.Path(place).name}"
    side = Side(name + (f" ({again + 1})" if again else ""), records, things)
    if len({str(r.env.get("device")) for r in records}) > 1:
        raise BadRequest(f"{place} holds results of several devices ({side.env('device')}): compare one at a time")
    return side


def _numbers(notebooks) -> str:
    return " ".join(sorted(name.split("_")[0] or "unnamed" for name in notebooks))


def _show_sides(sides) -> None:
    rows = [(word, *(s.env(key) for s in sides)) for key, word in ENVIRONMENT.items()]
    rows += [("notebooks", *(_numbers(s.notebooks) for s in sides)), ("records", *(len(s.records) for s in sides))]
    body = [(*row, "differs" if len(set(row[1:])) > 1 else "") for row in rows]
    show_table(["", *(s.name for s in sides), ""], body, title="What is compared", aligns=["left"] * (len(sides) + 2))
    print()


# ---- rows --------------------------------------------------------------------------------------------------


def noise(old: Timing, new: Timing) -> float:
    """The factor within which the two medians may differ without anything having changed: 1.11 is 11%, either way."""

    def error(r: Timing) -> float:
        spread = (r.p80 - r.p20) / 2 / 0.8416 / r.ms
        return 1.2533 * spread / math.sqrt(max(r.samples, 1)) if spread > 0 and math.isfinite(spread) else 0.0

    floor = DEVICE_FLOOR if old.clock == "cupti" else HOST_FLOOR
    return (1 + floor) * math.exp(ERRORS * math.hypot(error(old), error(new)))


def row_change(old, new, same_device: bool = True) -> Change | None:
    """What became of a row, or None if nothing did. `old` and `new` are timings, refusals, or None where missing."""
    for r, when in ((new, "now"), (old, "before")):
        if isinstance(r, Timing) and not has_time(r):
            return Change("without a time", f"no time {when}: {r.ms} ms, host {str(r.wall_ms)[:6]} ms", math.inf)
    if old is None or new is None:
        kind = "gone" if new is None else "new"
        return Change(kind, kind, -2, same_device)
    if isinstance(new, Finding):  # the words of two refusals are compared as findings
        return None if isinstance(old, Finding) else Change("refused", f"refused now: {new.value}", 1e9, same_device)
    if isinstance(old, Finding):
        return Change("run now", f"runs now, before: {old.value}", 1e9, same_device)
    ratio = new.ms / old.ms
    size, words = abs(math.log(ratio)), f"{format_number(ratio)}×"
    clocks = f"clock {old.clock} before, {new.clock} now" if old.clock != new.clock else ""
    if not same_device:  # the host's clock may be the right one there
        return Change("side by side", f"{words}, {clocks}" if clocks else words, size, counted=False)
    if clocks:
        return Change("by another clock", f"not compared: {clocks}", -1)
    bound = noise(old, new)
    if size <= math.log(bound):
        return None
    kind = "slower" if ratio > 1 else "faster"
    other = ", other kernels" if [n for n, _ in old.kernels] != [n for n, _ in new.kernels] else ""
    return Change(kind, f"{kind}: {words}, noise to {format_number(bound)}×{other}", size)


def _is_row(key) -> bool:
    return key[1] == "refused"


def _rows(old: Side, new: list[Side]) -> list[list]:
    """Show the rows that changed; of each new side the changes of all its rows, None where nothing did."""
    keys = [key for key in dict.fromkeys(key for side in (old, *new) for key in side.things) if _is_row(key)]
    all_changes, lines = [[] for _ in new], []
    for key in keys:
        notebook, _, table, label, shape, dtype, mask = key
        cells, weight = [], None
        for side, changes in zip(new, all_changes, strict=True):
            mine, change = side.things.get(key), None
            if notebook in side.notebooks & old.notebooks and (mine or key in old.things):
                change = row_change(old.things.get(key), mine, side.env("device") == old.env("device"))
                changes.append(change)
            # On another device the sizes are others: only the closing line speaks of rows that one side lacks.
            if change and (change.counted or change.weight >= 0):
                weight = max(change.weight, -math.inf if weight is None else weight)
            cells += [_time(mine), change.words if change else "as before" if mine and key in old.things else None]
        if weight is not None:
            what = (notebook.split("_")[0], table, label, str(shape or NOTHING), dtype, mask)
            lines.append((weight, (*what, _time(old.things.get(key)), *cells)))
    if lines:
        headers = ["in", "table", "variant", "shape", "dtype", "mask", old.name]
        headers += [h for side in new for h in (side.name, "change")]
        aligns = ["left"] * 6 + ["right"] + ["right", "left"] * len(new)
        body = [line for _, line in sorted(lines, key=lambda x: -x[0])]
        show_table(headers, body, title="Rows", aligns=aligns)
        print()
    return all_changes


def _time(r) -> str | None:
    if r is None:
        return None
    if isinstance(r, Finding):
        return "refused"
    return format_ms(r.ms) if has_time(r) else f"{r.ms} ms"


# ---- findings ----------------------------------------------------------------------------------------------


def differs(name: str, old, new) -> bool:
    """Whether two values of the finding `name` differ by more than such values do from run to run."""
    numbers = [type(x) in (int, float) for x in (old, new)]
    if all(numbers):
        whole = type(old) is type(new) is int
        return _apart(old, new, INT_TOLERANCE if whole else FLOAT_TOLERANCE)
    if name in MEASURED_TEXTS and isinstance(old, str) and isinstance(new, str):
        pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=False)
        return NUMBER.split(old) != NUMBER.split(new) or any(
            _apart(float(a.replace(",", "")), float(b.replace(",", "")), FLOAT_TOLERANCE) for a, b in pairs
        )
    return type(old) is not type(new) or old != new


def _apart(a: float, b: float, tolerance: float) -> bool:
    if a == b or (a != a and b != b):
        return False
    if not (math.isfinite(a) and math.isfinite(b)) or a * b <= 0:
        return True
    return max(a / b, b / a) > 1 + tolerance


_MISSING = object()


def _facts(side: Side) -> dict:
    """Name, label and the rest → value: the findings, refusals among them, and what timed rows found besides times."""
    found = {}
    for key, r in side.things.items():
        if isinstance(r, Finding):
            found[key] = r.value
        else:
            more = {"error": r.error, "temporaries": r.temp_bytes}
            found |= {(key[0], f"{name} of a row", *key[2:]): x for name, x in more.items() if x is not None}
    return found


def _findings(old: Side, new: list[Side]) -> list[tuple[int, int]]:
    """Show the findings that changed; of each new side how many did, and how many did not."""
    facts = [_facts(side) for side in (old, *new)]
    counts, lines = [[0, 0] for _ in new], []
    for key in dict.fromkeys(key for of_one in facts for key in of_one):
        values = [of_one.get(key, _MISSING) for of_one in facts]
        shown = False
        for i, side in enumerate(new):
            of_row = _is_row(key) or key[1].endswith(" of a row")
            if key[0] not in old.notebooks & side.notebooks or values[0] is values[i + 1] is _MISSING:
                continue
            if _MISSING in (values[0], values[i + 1]):
                # What a row found is missing where the row is, and that was said.
                if not of_row and side.env("device") == old.env("device"):
                    counts[i][0], shown = counts[i][0] + 1, True
            elif differs(key[1], values[0], values[i + 1]):
                counts[i][0], shown = counts[i][0] + 1, True
            else:
                counts[i][1] += 1
        if shown:
            notebook, name, table, *rest = key
            where = ", ".join(str(x) for x in (table, *rest) if x and x != "full")
            lines.append((notebook.split("_")[0], name, where, *_shortened(values)))
    if lines:
        headers = ["in", "finding", "of", old.name, *(side.name for side in new)]
        show_table(headers, lines, title="Findings", aligns=["left"] * len(headers))
        print()
    return [tuple(c) for c in counts]


def _shortened(values) -> list[str]:
    """The values as text; long ones from where they begin to differ to where they end to."""
    texts = [NOTHING if v is _MISSING else "NaN" if v != v else cell_text(v) for v in values]
    long = [t for t in texts if t != NOTHING]
    if len(set(long)) < 2 or max(map(len, long)) <= LONG:
        return texts
    start = len(os.path.commonprefix(long))
    end = len(os.path.commonprefix([t[start:][::-1] for t in long]))
    start = max(0, start - 15)
    return [
        t if t == NOTHING
        else ("…" if start else "") + t[start : len(t) - max(0, end - 15)][: 3 * LONG] + ("…" if end > 15 else "")
        for t in texts
    ]  # fmt: skip


# ---- claims ------------------------------------------------------------------------------------------------


def _claims(old: Side, new: list[Side]) -> list[tuple[list[str], int, int]]:
    """Show the claims whose verdict changed; of each new side the changes in words, how many did not change, and how
    many only one of two devices can test, which is no change."""
    out, lines = [([], 0, 0) for _ in new], []
    for c in LEDGER.values():
        before = c.judge_recorded(old.records)
        after = [
            c.judge_recorded(side.records) if c.notebook in side.notebooks & old.notebooks else None for side in new
        ]
        changed = False
        for i, (side, verdict) in enumerate(zip(new, after, strict=True)):
            words, same, one_sided = out[i]
            if not verdict:
                continue
            if verdict.state == before.state:
                same += 1
            elif UNTESTABLE in (verdict.state, before.state) and side.env("device") != old.env("device"):
                one_sided += 1
            else:
                changed = True
                words.append(f"{c.name} {before.state} → {verdict.state}")
            out[i] = words, same, one_sided
        if changed:
            cells = [f"{v.state}: {v.measured}" if v else "notebook not run" for v in (before, *after)]
            lines.append((c.notebook.split("_")[0], f"{c.name}: {c.sentence}", *cells))
    if lines:
        headers = ["in", "claim", old.name, *(side.name for side in new)]
        show_table(headers, lines, title="Claims", aligns=["left"] * len(headers))
        print()
    return out


# ---- the closing lines -------------------------------------------------------------------------------------


def _close(old: Side, new: Side, changes: list, findings: tuple, claims: tuple) -> bool:
    """Print the lines that say it all of one new side; whether anything changed."""
    same_device = new.env("device") == old.env("device")
    head = f"{new.name} against {old.name}"
    for one, other in ((old, new), (new, old)):
        if alone := one.notebooks - other.notebooks:
            count = sum(c.notebook in alone for c in LEDGER.values())
            print(f"{head}: only {one.name} has {_numbers(alone)}, with {count} claims: not compared")
    if not same_device:
        what = f"another device ({new.env('device')} against {old.env('device')})"
        print(f"{head}: {what}: rows and findings differ by nature and are not counted")
    by_host = sum(isinstance(r, Timing) and r.clock != "cupti" for r in new.things.values())
    if same_device and by_host:
        print(f"{head}: {by_host} rows are timed by the host's clock, where less than {1 + HOST_FLOOR:.0f}× is noise")
    kinds = [change.kind for change in changes if change]
    words = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    rows = ", ".join(words) + (", " if words else "") + f"{changes.count(None)} within noise"
    print(
        f"{head}: rows: {rows}; findings: {findings[0]} changed, {findings[1]} did not; "
        f"claims: {len(claims[0])} changed, {claims[1]} did not"
        + (f", {claims[2]} can be tested on one of the two devices only" if claims[2] else "")
    )
    for line in claims[0]:
        print(f"  {line}")
    return any(c and c.counted for c in changes) or (same_device and findings[0] > 0) or bool(claims[0])
