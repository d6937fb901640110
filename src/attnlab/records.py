"""The two records that carry every fact of the course: `Timing` and `Finding`.

A notebook makes records, and tables, bars, plots, claims and saved results take them. Each one
serialises to one JSON line together with the environment that it was made in.
"""

import dataclasses
import json
import math
import operator
import pathlib
from typing import NamedTuple

from attnlab import files

SCHEMA = 1  # raised when a field changes its meaning; readers refuse other schemas


class Shape(NamedTuple):
    """An attention problem: B batch, T query length, S key/value length, N heads, K KV heads, H head dim."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int

    @classmethod
    def of(cls, q, k) -> "Shape":
        """The shape of `q` (B, T, N, H) and `k` (B, S, K, H)."""
        B, T, N, H = q.shape
        return cls(B, T, k.shape[1], N, k.shape[2], H)

    @classmethod
    def square(cls, B: int, T: int, N: int, H: int) -> "Shape":
        """Self-attention with one KV head a query head: S = T and K = N."""
        return cls(B, T, T, N, N, H)

    def __str__(self) -> str:
        s = f" S{self.S}" if self.S != self.T else ""
        k = f" K{self.K}" if self.K != self.N else ""
        return f"B{self.B} T{self.T}{s} N{self.N}{k} H{self.H}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured row. Times are milliseconds unless the name says otherwise; sizes are bytes."""

    label: str  # the variant as the reader sees it: "naive", "xla", "cudnn"
    shape: Shape | None = None
    dtype: str = ""
    mask: str = "full"
    ms: float  # median time of one call, by `clock`
    p20: float
    p80: float
    samples: int
    clock: str  # "cupti" (sum over kernels), "chain" (slope of dependent calls) or "wall"
    wall_ms: float  # median host time around one blocked call
    compile_s: float | None  # None: not compiled, but found in JAX's persistent cache
    temp_bytes: int | None = None
    kernels: tuple[tuple[str, float], ...] = ()  # (name, ms) of one call, in launch order
    flops: float | None = None
    bytes: float | None = None
    bound_ms: float | None = None  # the time that no device of this kind can beat
    error: float | None = None  # relative error against the float64 reference
    note: str = ""  # why a clock was not used, or what the reader should know
    table: str = ""  # the comparison that the row belongs to, so that saved rows can stand beside
    notebook: str = ""
    env: dict = dataclasses.field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        """Achieved TFLOP/s, from the counted FLOPs and the median time."""
        return self.flops / self.ms / 1e9 if self.flops and self.ms > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One observed fact that is not a time: an error, an equality, a refusal in the library's words."""

    name: str
    value: bool | int | float | str | None
    label: str = ""
    shape: Shape | None = None
    dtype: str = ""
    mask: str = "full"
    table: str = ""
    notebook: str = ""
    env: dict = dataclasses.field(default_factory=dict)


KINDS = {"Timing": Timing, "Finding": Finding}


class BadRecords(ValueError):
    """A file that holds no records, or none that this attnlab reads; the message names it and the line."""


class MissingRecord(LookupError):
    """No record answers the question; the message says which one was looked for."""


def to_json(record: Timing | Finding) -> str:
    """One JSON line. NaN and infinity become strings, because JSON has no such numbers."""

    def plain(value):
        value = value.item() if hasattr(value, "item") else value  # a NumPy scalar
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": repr(value)}
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return json.dumps({"schema": SCHEMA, "kind": type(record).__name__} | plain(fields), allow_nan=False)


def from_json(line: str) -> Timing | Finding:
    """The record of one line.

    Raises:
      ValueError: not JSON, another schema, or unknown fields; the message says which.
    """

    def rich(value):
        if isinstance(value, dict):
            return float(value["float"]) if set(value) == {"float"} else {k: rich(v) for k, v in value.items()}
        return [rich(v) for v in value] if isinstance(value, list) else value

    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not a record: {line[:60]!r} is not JSON ({e})") from e
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise ValueError(f"a record of schema {found!r}: this attnlab reads schema {SCHEMA}. Run the course again.")
    data = rich(data)
    kind = data.pop("kind", None)
    if kind not in list(KINDS):
        raise ValueError(f"unknown kind of record in {line[:60]!r}: known are {', '.join(KINDS)}")
    try:
        if data.get("shape"):
            data["shape"] = Shape(*map(operator.index, data["shape"]))
        if "kernels" in data:
            data["kernels"] = tuple((name, ms) for name, ms in data["kernels"])
        record = KINDS[kind](**{key: value for key, value in data.items() if key != "schema"})
    except TypeError as e:
        raise ValueError(f"a {kind} whose fields, shape or kernels are not this attnlab's: {e}") from e
    numbers = ("ms", "p20", "p80", "samples", "wall_ms") if kind == "Timing" else ()
    texts = ("label", "dtype", "mask", "table", "notebook") + (("clock",) if kind == "Timing" else ("name",))
    for names, types in ((numbers, (int, float)), (texts, str), (("env",), dict)):
        for name in names:
            if not isinstance(getattr(record, name), types):
                raise ValueError(f"a {kind} whose {name} is {getattr(record, name)!r}")
    return record


class Records(list):
    """A list of records that can be asked for one by its fields."""

    def find(self, **fields) -> "Records":
        """Those whose fields equal `fields`; the latest last."""
        return Records(r for r in self if all(getattr(r, k, None) == v for k, v in fields.items()))

    def latest(self, **fields) -> "Records":
        """As `find`, but of records of the same thing only the last: a cell that was run twice counts once."""

        def thing(r):
            return getattr(r, "name", "refused"), r.label, r.shape, r.dtype, r.mask, r.table

        return Records({thing(r): r for r in self.find(**fields)}.values())

    def timing(self, label: str, **fields) -> Timing:
        """The latest `Timing` of that label. Raises `MissingRecord`."""
        return self._last(Timing, label=label, **fields)

    def finding(self, name: str, **fields):
        """The value of the latest `Finding` of that name. Raises `MissingRecord`."""
        return self._last(Finding, name=name, **fields).value

    def _last(self, kind, **fields):
        found = [r for r in self.find(**fields) if type(r) is kind]
        if not found:
            asked = ", ".join(f"{k} {v}" for k, v in fields.items())
            raise MissingRecord(f"no {kind.__name__.lower()} with {asked}")
        return found[-1]

    @classmethod
    def read(cls, path) -> "Records":
        """The records of a JSON-lines file. Raises `BadRecords` with file and line number."""
        out = cls()
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise BadRecords(f"{path}: not a file of records, it is not UTF-8 text") from e
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    out.append(from_json(line))
                except ValueError as e:
                    raise BadRecords(f"{path}, line {number}: {e}") from e
        return out

    def write(self, path) -> None:
        """Write one JSON line a record."""
        files.write_all({path: "".join(to_json(r) + "\n" for r in self)})


class Log:
    """The records of this process, and the file that they go to as they come.

    `attnlab.start` names the notebook and the folder. One process is one notebook, so there is one log.
    """

    def __init__(self):
        self.records = Records()
        self.notebook = ""
        self.path: pathlib.Path | None = None

    def open(self, notebook: str, folder=None) -> None:
        """Begin `notebook` with an empty log; write to `<folder>/<notebook>.jsonl` if a folder is given."""
        self.records = Records()
        self.notebook = notebook
        self.path = pathlib.Path(folder) / f"{notebook}.jsonl" if folder else None
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")

    def add(self, record):
        """Keep `record`, with the notebook's name in it, and return it."""
        record = dataclasses.replace(record, notebook=self.notebook)
        self.records.append(record)
        if self.path:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(to_json(record) + "\n")
        return record


LOG = Log()


def log() -> Records:
    """What this notebook has recorded so far."""
    return LOG.records


RESULTS = pathlib.Path(__file__).parent / "data" / "results"


def saved(device: str = "nvidia-h200") -> Records:
    """The committed results of `device`: records of a full run of the course on it."""
    path = RESULTS / f"{device}.jsonl"
    return Records.read(path) if path.exists() else Records()


def load(place) -> Records:
    """The records at `place`: a file, a folder of such files, or the name of saved results ("nvidia-h200").

    Raises:
      BadRecords: nothing there, no record in it, or a line that is no record of this schema.
    """
    path = pathlib.Path(place)
    if path.is_dir():
        found = Records(r for file in sorted(path.glob("*.jsonl")) for r in Records.read(file))
    elif path.is_file():
        found = Records.read(path)
    elif path.name == str(place) and (RESULTS / f"{place}.jsonl").exists():
        found = saved(str(place))
    else:
        names = ", ".join(sorted(p.stem for p in RESULTS.glob("*.jsonl")))
        raise BadRecords(f"no results at {place}: give a file or a folder of records, or a saved device: {names}")
    if not found:
        raise BadRecords(f"no records in {place}: run the course first (make run)")
    return found
