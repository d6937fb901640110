"""Regenerate: execute notebooks in a temporary place, and put what is right in place of what is committed.

A notebook and its records change together or not at all. What failed is kept aside, and the notebook stays
byte for byte as it was. The records of a checkout lie in src/attnlab/data/results; those of other notebooks,
or with --out, in a folder `results` beside them.
"""

import ast
import dataclasses
import pathlib
import re
import shutil
import sys
import tempfile
import time

from attnlab import changes, course, files
from attnlab.device import gpu_names
from attnlab.notebook_files import (
    CourseNotebook,
    NotebookError,
    code_cells,
    dumps,
    for_people,
    read,
    source,
    tags,
    tidy,
)
from attnlab.records import RESULTS, Records, to_json

FAILED = pathlib.Path("build/failed")  # the executed copies of notebooks that failed
BEFORE = pathlib.Path("build/before")  # the records that the last regeneration replaced


def regenerate(notebooks: list[CourseNotebook], parameters: dict, out, cell_seconds: int, dry_run: bool) -> int:
    """Execute `notebooks` and replace their outputs and records.

    Args:
      notebooks: what `attnlab.course.choose` returns.
      parameters: what `attnlab.course.parse_parameters` returns. They are written into the cell tagged
        `parameters`, so that a notebook's outputs are of the values that stand in it.
      out: the folder for notebooks and records; None replaces the notebooks themselves.
      cell_seconds: the time limit of a cell.
      dry_run: only say what would be done.

    Returns:
      0, 1 when a notebook failed, 130 when Ctrl-C stopped it.

    Raises:
      attnlab.notebook_files.NotebookError: one of them is not in Python, or has no cell tagged `parameters`.
      attnlab.files.CanNotWrite: a folder that is read-only, or too full.
      attnlab.records.BadRecords: records beside the notebooks that can't be read, and so not be kept.
      attnlab.course.BadRequest: another regeneration of these notebooks is running; or outputs of a GPU would
        be replaced on a machine without one.
    """
    folder = notebooks[0].path.parent
    in_place = not out or pathlib.Path(out).resolve() == folder.resolve()
    target = folder if in_place else pathlib.Path(out)
    results = _results_of(folder) if in_place else target / "results"
    if cell_seconds < 1:
        raise course.BadRequest(f"--cell-seconds {cell_seconds}: give one second or more")
    for nb in notebooks:
        _with_parameters(nb, parameters)  # refused before anything is made or waited for
    known = Records(r for path in sorted(results.glob("*.jsonl")) for r in Records.read(path))
    recorded_on = {r.notebook: r.env["device"] for r in known if r.env.get("kind") == "gpu"} if in_place else {}
    gpus = gpu_names()
    if dry_run:
        _say_what(notebooks, parameters, target, results, gpus, cell_seconds)
    if not gpus and (lost := [nb.name for nb in notebooks if nb.name in recorded_on]):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise course.BadRequest(f"{lost[0]}{more}: {_no_cpu(recorded_on[lost[0]])}")
    size = sum(nb.path.stat().st_size for nb in notebooks) + sum(p.stat().st_size for p in results.glob("*.jsonl"))
    for place in (target, results, BEFORE):
        files.require_room(place, 3 * size)  # a new file and a copy of the old one stand beside it for a moment
    if dry_run:
        return 0
    try:
        with files.only_one(folder), tempfile.TemporaryDirectory(prefix="attnlab-") as temporary:
            files.remove_left_over(target, results)
            run = _Run(target, results, recorded_on, pathlib.Path(temporary), cell_seconds)
            return run.of(notebooks, parameters)
    except BlockingIOError as e:
        raise course.BadRequest(
            f"another regeneration of {folder} is running: wait until it has ended, "
            "two would disturb each other's times"
        ) from e


# --- before anything runs


def _no_cpu(device: str) -> str:
    return (
        f"the outputs are of an {device}, and here they would be of a CPU. "
        "Run this on a GPU, or give --out another folder than that of the notebooks"
    )


def _results_of(folder: pathlib.Path) -> pathlib.Path:
    package = folder.resolve().parent / "src" / "attnlab" / "data" / "results"
    return package if package.is_dir() else folder / "results"


def _with_parameters(nb: CourseNotebook, values: dict) -> dict:
    """The notebook with `values` in its cell tagged `parameters`. Raises `NotebookError`."""
    content = read(nb.path)
    spec = content["metadata"].get("kernelspec", {})
    language = spec.get("language") or content["metadata"].get("language_info", {}).get("name", "python")
    if language.lower() != "python":
        raise NotebookError(
            f"{nb.path}: its kernel is {spec.get('display_name', language)} ({language}), and the course is in "
            "Python: open it in JupyterLab, choose a Python kernel and save it"
        )
    tagged = [cell for cell in code_cells(content) if "parameters" in tags(cell)]
    if len(tagged) != 1:
        raise NotebookError(f"{nb.path}: {len(tagged)} cells tagged parameters, wanted one: add the tag, or remove it")
    if mine := {name: value for name, value in values.items() if name in nb.parameters}:
        tagged[0]["source"] = with_values(source(tagged[0]), mine)
    return content


def with_values(text: str, values: dict) -> str:
    """Python source whose assignments to the names in `values` have these values; comments and layout stay."""
    lines = text.encode().splitlines(keepends=True)  # ast counts columns in bytes
    for node in reversed(ast.parse(text).body):
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name) and t.id in values]
        if names:
            old = node.value
            before, after = lines[old.lineno - 1][: old.col_offset], lines[old.end_lineno - 1][old.end_col_offset :]
            lines[old.lineno - 1 : old.end_lineno] = [before + repr(values[names[0]]).encode() + after]
    return b"".join(lines).decode()


def _say_what(notebooks, parameters, target, results, gpus, cell_seconds) -> None:
    count = f"{len(notebooks)} notebook{'s' * (len(notebooks) > 1)}"
    print(f"Would execute {count} on {gpus[0] if gpus else 'the CPU'}, by {sys.executable},")
    print(f"with at most {cell_seconds} s a cell. Nothing was changed.")
    for nb in notebooks:
        values = ", ".join(f"{name}={value!r}" for name, value in parameters.items() if name in nb.parameters)
        verb = "replaces" if (target / nb.path.name).exists() else "makes"
        print(f"  {nb.name} {verb} {target / nb.path.name}" + (f", with {values}" if values else ""))
    print(f"Records would go into {results}/DEVICE.jsonl; what fails would be kept in {FAILED}/.")


# --- the run


class _Run:
    """One regeneration: where its files go, and what it has replaced so far.

    `recorded_on` maps the notebooks whose outputs are of a GPU to that GPU's name.
    """

    def __init__(self, target, results, recorded_on: dict, temporary: pathlib.Path, cell_seconds: int):
        self.target, self.results, self.recorded_on = target, results, recorded_on
        self.temporary, self.cell_seconds = temporary, cell_seconds
        self.placed = []  # names of notebooks
        self.before = {}  # {file of records: the copy of what it was, None where it is new}

    def of(self, notebooks, parameters) -> int:
        outcomes = []
        with course.Progress(notebooks) as progress:
            for nb in notebooks:
                progress.start(nb.name)
                outcomes.append(self._one(nb, parameters, progress))
                progress.finish(outcomes[-1])
                if outcomes[-1].status == "stopped":
                    break
        return self._summary(outcomes, len(notebooks))

    def _one(self, nb, parameters, progress) -> course.Outcome:
        given, made = self.temporary / nb.path.name, self.temporary / "executed" / nb.path.name
        began = time.perf_counter()
        try:
            as_it_was = nb.path.read_bytes()
            given.write_text(dumps(_with_parameters(nb, parameters)), encoding="utf-8")
            # Without a cache of compiled programs: recorded compile times are of compilations.
            outcome = course.execute(
                given, made, on_cell=progress.cell, results=self.temporary / "results", cell_seconds=self.cell_seconds
            )
            problem = outcome.problem or self._put_in_place(nb, made, as_it_was)
        except KeyboardInterrupt:
            return course.Outcome(nb.name, "stopped", time.perf_counter() - began, *progress.at)
        except (OSError, NotebookError) as e:  # the temporary place is full, the notebook is gone: the others go on
            return course.Outcome(nb.name, "failed", time.perf_counter() - began, problem=course.one_line(e))
        if problem and made.exists():
            problem += f"; the failed run is {_keep_aside(made)}"
        return dataclasses.replace(outcome, status="failed" if problem else "done", problem=problem)

    def _put_in_place(self, nb, made: pathlib.Path, as_it_was: bytes) -> str:
        """Write the canonical notebook and its records, both or neither. Returns what went wrong, or ""."""
        content = tidy(read(made))
        if faults := [f"cell {n}: {what}" if n else what for n, what in for_people(content)]:
            return f"its outputs can't be committed: {'; '.join(faults)}"
        if nb.path.read_bytes() != as_it_was:
            return f"{nb.path} was changed while it ran, and stays as it is now: regenerate it again"
        texts, path, copy = {self.target / nb.path.name: dumps(content)}, None, None
        made_records = self.temporary / "results" / f"{nb.name}.jsonl"
        try:
            mine = Records.read(made_records) if made_records.exists() else []
            if nb.name in self.recorded_on and not any(r.env.get("kind") == "gpu" for r in mine):
                return _no_cpu(self.recorded_on[nb.name]) if mine else "it left no records, and its outputs have some"
            if mine:
                path = self.results / f"{slug(str(mine[-1].env.get('device')))}.jsonl"
                old = Records.read(path) if path.exists() else []
                rows = sorted([r for r in old if r.notebook != nb.name] + mine, key=lambda r: r.notebook)
                texts[path] = "".join(to_json(r) + "\n" for r in rows)
                copy = _keep(path, BEFORE) if old and path not in self.before else None
            with files.uninterrupted():  # what was replaced, and what we know of it, go together too
                files.write_all(texts)
                self.placed.append(nb.name)
                if path:
                    self.before.setdefault(path, copy)
        except (OSError, ValueError) as e:
            return f"it could not be put in place, and nothing was replaced: {course.one_line(e)}"
        return ""

    def _summary(self, outcomes, asked: int) -> int:
        last, failed = outcomes[-1], [o for o in outcomes if o.status == "failed"]
        print()
        for o in failed:
            print(f"{o.notebook} failed {o.where}: {o.problem}")
        if last.status == "stopped":
            what = "and is regenerated" if last.notebook in self.placed else f"{last.where}, and is as it was"
            print(f"stopped: {last.notebook} {what}")
        seconds = sum(o.seconds for o in outcomes)
        print(f"{len(self.placed)} of {asked} notebooks regenerated in {self.target}/ ({seconds:.0f} s)")
        for path, before in self.before.items():
            print(f"records: {path}")
            if path.resolve() == (RESULTS / "nvidia-h200.jsonl").resolve():
                _redraw()
            if before:
                print(f"\nWhat changed against the records before, kept as {before}:\n")
                changes.main([str(before), str(path)])
        return course.INTERRUPTED if last.status == "stopped" else 1 if failed else 0


def slug(device: str) -> str:
    """A device's name as a file's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def _keep(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(shutil.copy(path, folder))


def _keep_aside(made: pathlib.Path) -> pathlib.Path | str:
    try:
        return _keep(made, FAILED)
    except OSError:  # perhaps that disk is the full one
        try:
            return _keep(made, pathlib.Path(tempfile.mkdtemp(prefix="attnlab-failed-")))
        except OSError as e:
            return f"lost ({e.strerror})"


def _redraw() -> None:
    """Make README's figure and table anew: they show the saved records."""
    from attnlab import curves, tables

    readme = RESULTS.parents[3] / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    block = r"(<!-- saved: (\w+), ([^>]+) -->\n```\n).*?(?=```)"
    try:
        curves.save_length_figure(RESULTS / "nvidia-h200-length.png")
        new = re.sub(block, lambda m: m[1] + tables.saved_text(m[2], m[3]) + "\n", text, flags=re.DOTALL)
    except LookupError as e:
        print(f"README's figure and table stay as they were: {e}")
        return
    if new != text:
        files.write_all({readme: new})
