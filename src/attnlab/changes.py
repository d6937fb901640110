"""What changed between two sets of results: what an instructor reads before a class on a new driver or a new JAX.

Rows are matched by what they are: notebook, table, variant, shape, dtype and mask. A row counts as slower or faster
when the ratio of its medians lies outside its noise, which has two independent parts, added in quadrature:

- what the percentiles of both runs say: half the spread from the 20th to the 80th percentile is 0.84 standard
  deviations, and the median of n samples is uncertain by 1.25 of them over √n. Three such errors, of both sides;
- a floor, because a run can't see how much another run would differ: other memory addresses, another clock rate,
  another choice of the compiler's autotuner. About one row in a hundred lies beyond it by chance: of the course's 152,
  expect one or two, and look at the same rows in a second run.

Host times beside a device clock and compile times are not compared: they move by half and more from run to run.
Findings that come from the host's clock are shown where they moved, and not counted. Errors and temporaries of a row
are compared as findings are.

On another device times and findings differ by nature. They are shown and not counted. Claims are counted, save those
that only one of the two devices can test.
"""

import collections
import dataclasses
import math
import os
import pathlib
import re

from attnlab.claims import UNTESTABLE, has_time
from attnlab.course import BadRequest, last_run
from attnlab.display import NOTHING, cell_text, format_ms, format_number, show_table
from attnlab.ledger import LEDGER
from attnlab.records import Finding, Records, Timing, load

# Relative drift from run to run, by clock. Measured over two full runs of this course on an H200, same driver and
# versions. Of the 152 rows with device times half differ by less than 1.3%, 95% by less than 6.1%, 99% by less than
# 13.3%, and one by 16%: bfloat16 attention by hand at the default shape, where two of seven kernels of the same names
# took 1.4 times as long in one run. That is a real change of the compiled program, and is to be seen. Three earlier
# runs share nine rows with these two. Their ratios lie within 9%, but for the same row against the same run.
DEVICE_FLOOR = 0.14
# The host's times of these rows differ by up to a factor of 2.1, and the times of two runs on a busy CPU of two cores
# by 2.5: this clock tells little. The slope of chained calls leaves the host's part out, so it gets the device's floor;
# how far it drifts has not been measured, because no GPU without CUPTI was at hand.
HOST_FLOOR = 2.0
ERRORS = 3  # standard errors of the medians that the percentiles leave room for

# Floats move from run to run where they come from clocks: by up to 6% between the two full runs where the clock is the
# device's, and a crossover by 28%. Errors keep their digits on the same software; on another, another order of summing
# moves them.
FLOAT_TOLERANCE = 0.5
# Counts below a thousand are exact; XLA's temporaries differ by an alignment of 256 bytes in hundreds of MiB.
INT_TOLERANCE = 1e-3
# Texts that hold measured numbers, by the finding's name, and which of their numbers those are: they are compared as
# floats. Everything else is compared as words: a limit, a capability or a version in a refusal, a count of heads.
NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?"
MEASURED_TEXTS = {
    "crossover": re.compile(rf"(?<== ){NUMBER}(?![\w.,])"),  # a length
    "heads": re.compile(rf"{NUMBER}(?=%)"),  # errors
    "refused": re.compile(rf"{NUMBER}(?=\s?(?:[kKMGTP]?i?B|[bB]ytes?)\b)"),  # memory that was free, or asked for
}
# Findings that the host's clock made say so in name or label: "host ms a call", "by the host's clock", "bound over
# unblocked time" (read from time.perf_counter). Without such words a time or a ratio of times is the device's. What
# the clock gives are numbers, or a crossover's words; True or False over them is a verdict, and is counted.
HOSTS = re.compile(r"\bhost's clock\b|\bhost ms\b|\bunblocked time\b")
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


@dataclasses.dataclass
class Comparison:
    """One new side beside the old one, and what became of its rows, findings and claims."""

    old: Side
    new: Side
    rows: list = dataclasses.field(default_factory=list)  # a Change each, None where nothing changed
    findings: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    claims: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    verdicts: list = dataclasses.field(default_factory=list)  # of the claims that changed, in words

    @property
    def same_device(self) -> bool:
        return self.new.env("device") == self.old.env("device")

    @property
    def on_cpu(self) -> bool:
        return {self.new.env("kind"), self.old.env("kind")} == {"cpu"}

    @property
    def notebooks(self) -> set:
        """Those that both have."""
        return self.old.notebooks & self.new.notebooks


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
    beside = [Comparison(old, side) for side in new]
    for c in beside:
        if not c.notebooks:
            raise BadRequest(
                f"{old.name} and {c.new.name} have no notebook in common ({_numbers(old.notebooks)} against "
                f"{_numbers(c.new.notebooks)}): run the same ones"
            )
    _show_sides(sides)
    _rows(old, beside)
    _findings(old, beside)
    _claims(old, beside)
    return int(any([_close(c) for c in beside]))


def _side(place: str, again: int) -> Side:
    try:
        records = load(place)
    except (LookupError, ValueError, OSError) as e:
        why = f"{e.strerror}: {e.filename}" if isinstance(e, OSError) and e.filename else str(e)
        raise BadRequest(why if str(place) in why else f"{place}: {why}") from e
    for name, outcome in last_run(pathlib.Path(place).parent).items() if pathlib.Path(place).is_dir() else ():
        if outcome.status != "done" and (found := records.find(notebook=name)):
            print(f"{name} {outcome.status} {outcome.where}: not compared. Run it again: make run ARGS={name[:2]}")
            records = Records(r for r in records if r not in found)
    things = {}
    for notebook in dict.fromkeys(r.notebook for r in records):
        for r in records.latest(notebook=notebook):
            name = getattr(r, "name", "refused")  # a row that was refused is the same thing as one that was timed
            things[notebook, name, r.table, r.label, r.shape, r.dtype, r.mask] = r
    name = place if len(place) <= 30 else os.sep.join(("…", *pathlib.Path(place).parts[-2:]))
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
    """The factor within which the two medians may differ without anything having changed: 1.14 is 14%, either way."""

    def error(r: Timing) -> float:
        spread = (r.p80 - r.p20) / 2 / 0.8416 / r.ms
        return 1.2533 * spread / math.sqrt(max(r.samples, 1)) if spread > 0 and math.isfinite(spread) else 0.0

    floor = HOST_FLOOR if old.clock == "wall" else DEVICE_FLOOR
    return math.exp(math.hypot(math.log(1 + floor), ERRORS * error(old), ERRORS * error(new)))


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


def _rows(old: Side, beside: list[Comparison]) -> None:
    """Enter what became of all rows, and show those that changed."""
    sides = (old, *(c.new for c in beside))
    keys = [key for key in dict.fromkeys(key for side in sides for key in side.things) if _is_row(key)]
    lines = []
    for key in keys:
        notebook, _, table, label, shape, dtype, mask = key
        before = old.things.get(key)
        cells, weight = [], None
        for c in beside:
            now, change = c.new.things.get(key), None
            if notebook in c.notebooks and (now or before):
                change = row_change(before, now, c.same_device)
                c.rows.append(change)
            # On another device the sizes are others: only the closing line speaks of rows that one side lacks.
            if change and (change.counted or change.weight >= 0):
                weight = max(change.weight, -math.inf if weight is None else weight)
            cells += [_time(now), change.words if change else "as before" if now and before else None]
        if weight is not None:
            what = (notebook.split("_")[0], table, label, str(shape or NOTHING), dtype, mask)
            lines.append((weight, (*what, _time(before), *cells)))
    if lines:
        headers = ["in", "table", "variant", "shape", "dtype", "mask", old.name]
        headers += [h for c in beside for h in (c.new.name, "change")]
        aligns = ["left"] * 6 + ["right"] + ["right", "left"] * len(beside)
        body = [line for _, line in sorted(lines, key=lambda x: -x[0])]
        show_table(headers, body, title="Rows", aligns=aligns)
        print()


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
    measured = MEASURED_TEXTS.get(name)
    if measured and isinstance(old, str) and isinstance(new, str):
        pairs = zip(measured.findall(old), measured.findall(new), strict=False)
        return measured.split(old) != measured.split(new) or any(
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


def _by_host(c: Comparison, name: str, label: str, *values) -> bool:
    """Whether `values` of a finding were read from the host's clock."""
    numbers = all(type(x) in (int, float) and math.isfinite(x) for x in values)
    if HOSTS.search(f"{name} {label}"):
        return numbers or all(isinstance(x, str) for x in values)
    # A CPU has no other clock: what is no count and no error there comes from it.
    return c.on_cpu and (
        name in ("crossover", "refused") or (numbers and "error" not in name and float in map(type, values))
    )


def _findings(old: Side, beside: list[Comparison]) -> None:
    """Count the findings that changed and those that did not, and show the former."""
    facts = [_facts(side) for side in (old, *(c.new for c in beside))]
    lines = []
    for key in dict.fromkeys(key for of_one in facts for key in of_one):
        notebook, name, table, label, *rest = key
        before, *after = values = [of_one.get(key, _MISSING) for of_one in facts]
        # What a row found is missing where the row is, and that was said.
        of_row = _is_row(key) or name.endswith(" of a row")
        shown = False
        for c, now in zip(beside, after, strict=True):
            missing = _MISSING in (before, now)
            if notebook not in c.notebooks or before is now is _MISSING or (missing and (of_row or not c.same_device)):
                continue
            moved = missing or differs(name, before, now)
            kind = "same" if not moved else "by host" if _by_host(c, name, label, before, now) else "changed"
            c.findings[kind] += 1
            shown |= moved
        if shown:
            where = ", ".join(str(x) for x in (table, label, *rest) if x and x != "full")
            lines.append((notebook.split("_")[0], name, where, *_shortened(values)))
    if lines:
        headers = ["in", "finding", "of", old.name, *(c.new.name for c in beside)]
        show_table(headers, lines, title="Findings", aligns=["left"] * len(headers))
        print()


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


def _claims(old: Side, beside: list[Comparison]) -> None:
    """Count the claims by what became of their verdicts, and show those whose verdict changed."""
    lines = []
    for claim in LEDGER.values():
        before = claim.judge_recorded(old.records)
        cells, changed = [f"{before.state}: {before.measured}"], False
        for c in beside:
            if claim.notebook not in c.notebooks:
                cells.append("notebook not run")
                continue
            now = claim.judge_recorded(c.new.records)
            cells.append(f"{now.state}: {now.measured}")
            if now.state == before.state:
                c.claims["same"] += 1
            elif UNTESTABLE in (now.state, before.state) and not c.same_device:
                c.claims["one-sided"] += 1
            else:
                changed = True
                c.verdicts.append(f"{claim.name} {before.state} → {now.state}")
        if changed:
            lines.append((claim.notebook.split("_")[0], f"{claim.name}: {claim.sentence}", *cells))
    if lines:
        headers = ["in", "claim", old.name, *(c.new.name for c in beside)]
        show_table(headers, lines, title="Claims", aligns=["left"] * len(headers))
        print()


# ---- the closing lines -------------------------------------------------------------------------------------


def _close(c: Comparison) -> bool:
    """Print the lines that say it all of one new side; whether anything changed."""
    old, new = c.old, c.new
    head = f"{new.name} against {old.name}"
    for one, other in ((old, new), (new, old)):
        if alone := one.notebooks - other.notebooks:
            count = sum(claim.notebook in alone for claim in LEDGER.values())
            print(f"{head}: only {one.name} has {_numbers(alone)}, with {count} claims: not compared")
    if not c.same_device:
        what = f"another device ({new.env('device')} against {old.env('device')})"
        print(f"{head}: {what}: rows and findings differ by nature and are not counted")
    by_host = sum(isinstance(r, Timing) and r.clock == "wall" for r in new.things.values())
    if c.same_device and by_host:
        print(f"{head}: {by_host} rows are timed by the host's clock, where less than {1 + HOST_FLOOR:.0f}× is noise")
    kinds = collections.Counter(change.kind for change in c.rows if change)
    rows = [*(f"{n} {kind}" for kind, n in kinds.items()), f"{c.rows.count(None)} within noise"]
    findings = [f"{c.findings['changed']} changed", f"{c.findings['same']} did not"]
    if n := c.findings["by host"]:
        findings.append(f"{n} moved by the host's clock, not counted")
    claims = [f"{len(c.verdicts)} changed", f"{c.claims['same']} did not"]
    if n := c.claims["one-sided"]:
        claims.append(f"{n} can be tested on one of the two devices only")
    print(f"{head}: rows: {', '.join(rows)}; findings: {', '.join(findings)}; claims: {', '.join(claims)}")
    for line in c.verdicts:
        print(f"  {line}")
    return any(r and r.counted for r in c.rows) or (c.same_device and c.findings["changed"] > 0) or bool(c.verdicts)
