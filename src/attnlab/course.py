"""Run the course: papermill executes copies of the notebooks, nbconvert makes a page of each.

The committed notebooks are only read. A run leaves in its folder:

    NN_name.html       a page a notebook, and index.html, the course map
    notebooks/         the executed copies, also of a notebook that failed
    results/           the records of each notebook, one JSON-lines file each
    run.json           status and seconds of each notebook, for the index of a later, partial run
    jax-cache/         compiled programs, which the next run need not compile again
"""

import ast
import dataclasses
import difflib
import json
import logging
import os
import pathlib
import sys
import tempfile
import time

from attnlab.notebook_files import CourseNotebook, code_cells, read
from attnlab.pages import write_index, write_page

INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


class BadRequest(ValueError):
    """What was asked for does not exist; the message names it and what there is instead."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one notebook. `cells` counts code cells; `problem` is "" when all went well."""

    notebook: str
    status: str  # "done", "failed" or "stopped"
    seconds: float
    cell: int = 0  # where it failed or stopped, from 1
    cells: int = 0
    problem: str = ""

    @property
    def where(self) -> str:
        return f"in cell {self.cell} of {self.cells}" if self.cell else "before its first cell"


# --- what is asked for


def choose(notebooks: list[CourseNotebook], wanted: list[str]) -> list[CourseNotebook]:
    """The notebooks meant by `wanted`: numbers ("2", "02"), names or paths. None wanted means all.

    Raises:
      BadRequest: one that isn't there, with the nearest that are; a path to a file outside of the course.
    """
    chosen = []
    for word in wanted:
        path = pathlib.Path(word)
        name = path.name.removesuffix(".ipynb")
        meant = [nb for nb in notebooks if name == nb.name or name and name.zfill(2) == nb.number]
        if not meant:
            names = [nb.name for nb in notebooks]
            raise BadRequest(f"no notebook {word!r}{_nearest(name, names)} There are: {', '.join(names)}.")
        if path.name != word and not (path.exists() and path.samefile(meant[0].path)):
            folder = meant[0].path.parent
            raise BadRequest(f"{word} is not in {folder}: name one of there, or give --notebooks {path.parent}")
        chosen += meant
    return [nb for nb in notebooks if nb in chosen] or notebooks


def parse_parameters(settings: list[str], notebooks: list[CourseNotebook]) -> dict[str, object]:
    """NAME=VALUE words as parameters. A value is a Python literal, or else a string.

    Raises:
      BadRequest: a word without "=", or a name that none of `notebooks` has, with the nearest that they have.
    """
    known = list(dict.fromkeys(name for nb in notebooks for name in nb.parameters))
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise BadRequest(f"{setting!r} sets no parameter: write NAME=VALUE, for example -p repeats=5")
        if name in values:
            raise BadRequest(f"{name} is set twice, by {setting!r} again: say which value is meant")
        if name not in known:
            where = notebooks[0].name if len(notebooks) == 1 else "the chosen notebooks"
            have = ", ".join(known) or "none"
            raise BadRequest(f"no parameter {name!r} in {where}{_nearest(name, known)} There are: {have}.")
        try:
            value = ast.literal_eval(text)
            # papermill writes a tuple into the notebook as text, and a list as a list.
            values[name] = list(value) if isinstance(value, tuple) else value
        except (ValueError, SyntaxError):
            values[name] = text
        for nb in notebooks:
            _check_kind(nb, name, text, values[name])
    return values


def _check_kind(nb: CourseNotebook, name: str, text: str, value) -> None:
    """Refuse a value of another kind than the notebook's own; a default of None, or an expression, takes any."""
    try:
        default = ast.literal_eval(nb.parameters[name])
    except (KeyError, ValueError):
        return
    kind = {int: int, str: str, tuple: list, list: list}.get(type(default))
    if kind and (type(value) is not kind or value == []):
        # A shell, and make above it, would take spaces and round brackets for their own.
        like = repr(list(default) if isinstance(default, tuple) else default).replace(" ", "")
        raise BadRequest(f"{name}={text} does not fit {nb.name}: write it like {name}={like}")


def _nearest(word: str, words: list[str]) -> str:
    known = {w.lower(): w for w in words}
    near = [known[w] for w in difflib.get_close_matches(word.lower(), known, n=2, cutoff=0.5)]
    return f"; did you mean {' or '.join(near)}?" if near else "."


# --- the run


def run(notebooks: list[CourseNotebook], out="build", parameters=None, course=None) -> int:
    """Execute `notebooks` into the folder `out`, write a page of each and the index, and say how it goes.

    Args:
      notebooks: what `choose` returns.
      out: the folder for pages, copies and records.
      parameters: what `parse_parameters` returns; each notebook gets those that it has.
      course: all notebooks, for the index, where only some are run.

    Returns:
      0, 1 when a notebook failed, 130 when Ctrl-C stopped the run.

    Raises:
      BadRequest: a folder whose copies would replace the notebooks themselves.
    """
    out = pathlib.Path(out)
    for nb in notebooks:
        if (out / "notebooks").resolve() == nb.path.parent.resolve():
            raise BadRequest(f"--out {out} would put executed copies in place of the notebooks: give another folder")
    for folder in ("notebooks", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    outcomes = []
    with Progress(notebooks) as progress:
        for nb in notebooks:
            progress.start(nb.name)
            outcomes.append(_run_one(nb, out, parameters or {}, progress))
            progress.finish(outcomes[-1])
            if outcomes[-1].status == "stopped":
                break
    known = last_run(out) | {o.notebook: o for o in outcomes}
    state = {name: dataclasses.asdict(o) for name, o in known.items()}
    (out / "run.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    index = write_index(course or notebooks, out, known)
    return _summary(outcomes, out, index)


def last_run(out) -> dict[str, Outcome]:
    """What became of each notebook when it was last run into the folder `out`, by name."""
    path = pathlib.Path(out) / "run.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {name: Outcome(**fields) for name, fields in state.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}  # never run, or cut off while it was written


def _run_one(nb: CourseNotebook, out: pathlib.Path, parameters: dict, progress) -> Outcome:
    page, copy = out / f"{nb.name}.html", out / "notebooks" / f"{nb.name}.ipynb"
    for old in (page, copy, out / "results" / f"{nb.name}.jsonl"):
        old.unlink(missing_ok=True)  # what an earlier run left must not pass for this one's
    mine = {name: value for name, value in parameters.items() if name in nb.parameters}
    began = time.perf_counter()
    try:
        outcome = execute(nb.path, copy, mine, on_cell=progress.cell, results=out / "results", cache=out / "jax-cache")
        try:
            write_page(copy, page, nb.title)
        except Exception as e:  # the executed copy is there: a page is not worth the rest of the course
            problem = outcome.problem or f"no page could be made of it: {one_line(e)}"
            outcome = dataclasses.replace(outcome, status="failed", problem=problem)
        return outcome
    except KeyboardInterrupt:
        return Outcome(nb.name, "stopped", time.perf_counter() - began, *progress.at)


def execute(path, copy, parameters=None, on_cell=None, results=None, cell_seconds=None, cache=None) -> Outcome:
    """Execute the notebook at `path` through papermill and keep the executed copy at `copy`.

    The kernel is this interpreter, whatever kernels are installed under the notebook's kernel name.

    Args:
      parameters: values by name, put in after the cell tagged `parameters`.
      on_cell: called with (code cell from 1, number of code cells) before each of them.
      results: the folder for the notebook's records; none are kept without it.
      cell_seconds: the time limit of a cell; none without it.
      cache: the folder for JAX's compiled programs; everything is compiled anew without it.

    Returns:
      The outcome. A failing cell, a cell over its time and a dead kernel are outcomes, not exceptions; Ctrl-C
      passes through.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import remove_error_markers

    path, copy = pathlib.Path(path).resolve(), pathlib.Path(copy).resolve()
    places = {"ATTNLAB_RESULTS": results, "ATTNLAB_CACHE": cache}
    env = {k: v for k, v in os.environ.items() if k not in places}
    env |= {name: str(pathlib.Path(place).resolve()) for name, place in places.items() if place}
    if not cache:
        env["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # nor one of the reader's own
    copy.parent.mkdir(parents=True, exist_ok=True)
    cells = len(code_cells(read(path))) + bool(parameters)
    began, at = time.perf_counter(), 0

    def cell_starts(cell, cell_index):
        nonlocal at
        if cell.cell_type == "code":
            at += 1
            if on_cell:
                on_cell(at, cells)

    def outcome(problem=""):
        status = "failed" if problem else "done"
        return Outcome(path.stem, status, time.perf_counter() - began, at, cells, problem)

    for library in ("papermill", "asyncio"):  # what they have to say, the outcome says
        logging.getLogger(library).setLevel(logging.CRITICAL + 1)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            papermill.execute_notebook(
                path,
                copy,
                parameters=parameters or {},
                kernel_name="python3",
                language="python",
                cwd=copy.parent,
                progress_bar=False,
                on_cell_start=cell_starts,
                execution_timeout=cell_seconds,
                kernel_manager_class=_this_python(log, env),
                shutdown_kernel="immediate",  # after Ctrl-C too, when the kernel may be in a long cell
            )
        except PapermillExecutionError as e:
            # papermill also says so of an error that a cell tagged raises-exception shows on purpose.
            done = nbformat.read(copy, as_version=4)
            if any(c.metadata.get("papermill", {}).get("exception") for c in done.cells):
                return outcome(one_line(f"{e.ename}: {e.evalue}"))
            nbformat.write(remove_error_markers(done), copy)
        except CellTimeoutError:
            return outcome(f"it took longer than {cell_seconds} s, the time limit of a cell")
        except DeadKernelError:
            flags = os.environ.get("XLA_FLAGS")
            # An unknown flag ends the process before any cell could say so.
            why = f"XLA_FLAGS={flags} may hold a flag that this JAX does not know" if flags else "too little memory"
            return outcome(f"the kernel died; a likely reason: {why}" + _last_words(log))
        except Exception as e:  # the kernel did not start, the disk is full, …: the other notebooks may still run
            return outcome(one_line(e) + _last_words(log))
    return outcome()


def one_line(problem: Exception | str) -> str:
    """An error as a line: its kind and what it says, at most 300 characters."""
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    return " ".join(text.split())[:300]


def _last_words(log) -> str:
    log.seek(0)
    lines = [line.strip() for line in log if line.strip() and not line.startswith("[IPKernelApp]")]
    return f"; its last words: {lines[-1]}" if lines else ""


def _this_python(log, env):
    """A kernel manager class whose every kernel is the interpreter that runs attnlab.

    A kernel spec named python3 in the user's home or in another prefix may belong to another
    environment, and would win over ours.
    """
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisPython(AsyncKernelManager):
        kernel_spec = KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

        async def start_kernel(self, **kwargs):
            # What a kernel says outside of its cells would break the progress bar.
            await super().start_kernel(stdout=log, stderr=log, env=env, **kwargs)

    return ThisPython


# --- what the person sees while it runs


class Progress:
    """On a terminal two bars, one for the course and one for the cells of a notebook; plain lines elsewhere."""

    def __init__(self, notebooks):
        from tqdm import tqdm

        self.names = [nb.name for nb in notebooks]
        self.n = 0  # the notebook, from 1
        self.at = (0, 0)  # its cell, from 1, and how many it has
        look = {"file": sys.stdout, "disable": None, "dynamic_ncols": True, "leave": False}  # None: no terminal, no bar
        self.course, self.cells = (
            tqdm(bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} " + what, position=position, **look)
            for position, what in enumerate(("notebooks [{elapsed}]", "cells"))
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cells.close()
        self.course.close()

    def start(self, name):
        self.n, self.at = self.n + 1, (0, 0)
        self.course.total = len(self.names)
        self.course.set_description_str(f"notebook {self.n} of {len(self.names)}: {name}")
        self.cells.n = 0
        self.cells.set_description_str("  its kernel starts")
        if self.course.disable:
            print(f"[{self.n}/{len(self.names)}] {name} …", flush=True)

    def cell(self, number, cells):
        self.at = (number, cells)
        self.cells.total, self.cells.n = cells, number - 1
        self.cells.set_description_str(f"  cell {number} of {cells}")
        self.course.refresh()  # its clock

    def finish(self, outcome):
        self.course.n = self.n
        line = f"[{self.n}/{len(self.names)}] {outcome.notebook}  {outcome.status} {outcome.seconds:.1f} s"
        line += f" {outcome.where}: {outcome.problem}" if outcome.problem else ""
        if self.course.disable:
            print(line, flush=True)
        else:
            self.course.write(line, file=sys.stdout)  # above the bars
            self.course.refresh()


def _summary(outcomes: list[Outcome], out: pathlib.Path, index: pathlib.Path) -> int:
    print()
    last = outcomes[-1]
    if last.status == "stopped":
        print(f"stopped: {last.notebook} {last.where}; the notebooks are untouched; finished pages are in {out}/")
        return INTERRUPTED
    failed = [o for o in outcomes if o.status == "failed"]
    for o in failed:
        print(f"{o.notebook} failed {o.where}: {o.problem}")
        print(f"  its page: {out / o.notebook}.html  its copy: {out / 'notebooks' / o.notebook}.ipynb")
    done, seconds = len(outcomes) - len(failed), sum(o.seconds for o in outcomes)
    print(f"{done} of {len(outcomes)} notebooks done in {seconds:.0f} s. Course map: {index}")
    return 1 if failed else 0
