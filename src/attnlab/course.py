"""Run the course: papermill executes copies of the notebooks, nbconvert makes a page of each.

The committed notebooks are only read. A run leaves in its folder:

    NN_name.html       a page a notebook, and index.html, the course map
    notebooks/         the executed copies, also of a notebook that failed
    results/           the records of each notebook, one JSON-lines file each
    run.json           status and seconds of each notebook, for the index of a later, partial run
"""

import ast
import contextlib
import dataclasses
import difflib
import logging
import os
import pathlib
import signal
import sys
import time

from attnlab import notebook_files
from attnlab.notebook_files import CourseNotebook
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


# --- what is asked for


def choose(notebooks: list[CourseNotebook], wanted: list[str]) -> list[CourseNotebook]:
    """The notebooks meant by `wanted`: numbers ("2", "02"), names or paths. None wanted means all.

    Raises:
      BadRequest: one that isn't there, with the nearest that are.
    """
    chosen = []
    for word in wanted:
        name = pathlib.Path(word).stem if word.endswith(".ipynb") else word
        meant = [nb for nb in notebooks if name == nb.name or name.zfill(2) == nb.number]
        if not meant:
            names = [nb.name for nb in notebooks]
            raise BadRequest(f"no notebook {word!r}{_nearest(name, names)} There are: {', '.join(names)}.")
        chosen += [nb for nb in meant if nb not in chosen]
    return sorted(chosen or notebooks, key=lambda nb: nb.name)


def parse_parameters(settings: list[str], notebooks: list[CourseNotebook]) -> dict[str, object]:
    """NAME=VALUE words as parameters. A value is a Python literal, or else a string.

    Raises:
      BadRequest: a word without "=", or a name that none of `notebooks` has, with the nearest that they have.
    """
    known = list(dict.fromkeys(name for nb in notebooks for name in nb.parameters))
    values = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise BadRequest(f"{setting!r} sets no parameter: write NAME=VALUE, for example -p repeats=5")
        if name not in known:
            have = f"There are: {', '.join(known)}." if known else "These notebooks have no parameters."
            where = notebooks[0].name if len(notebooks) == 1 else "the chosen notebooks"
            raise BadRequest(f"no parameter {name!r} in {where}{_nearest(name, known)} {have}")
        try:
            values[name] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word.lower(), words, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else "."


# --- the run


def run(
    notebooks: list[CourseNotebook],
    out="build",
    parameters: dict[str, object] | None = None,
    course: list[CourseNotebook] | None = None,
    stream=None,
) -> int:
    """Execute `notebooks` into the folder `out` and write a page of each and the index.

    Args:
      notebooks: what `choose` returns.
      out: the folder for pages, copies and records.
      parameters: by name; each notebook gets those that it has. Others were refused by `parse_parameters`.
      course: all notebooks, for the index, where only some are run.
      stream: where lines and the progress bar go; standard output by default.

    Returns:
      0, 1 when a notebook failed, 130 when Ctrl-C stopped the run.
    """
    stream = stream or sys.stdout
    out = pathlib.Path(out)
    parameters = parameters or {}
    unknown = sorted(set(parameters).difference(*(nb.parameters for nb in notebooks)))
    if unknown:
        parse_parameters([f"{name}=" for name in unknown], notebooks)  # raises, with the nearest names
    for folder in ("notebooks", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)

    outcomes = []
    with (
        _progress(notebooks, stream) as progress,
        _results_in(out / "results"),
        _ctrl_c_once() as interrupted,
    ):
        for nb in notebooks:
            progress.start(nb)
            page, copy = out / f"{nb.name}.html", out / "notebooks" / f"{nb.name}.ipynb"
            for old in (page, copy, out / "results" / f"{nb.name}.jsonl"):
                old.unlink(missing_ok=True)  # what an earlier run left must not pass for this one's
            mine = {name: value for name, value in parameters.items() if name in nb.parameters}
            outcome = Outcome(nb.name, "stopped", 0.0)
            with contextlib.suppress(KeyboardInterrupt):
                outcome = execute(nb.path, copy, mine, on_cell=progress.cell, interrupted=interrupted)
                if copy.exists() and not interrupted.is_set():
                    try:
                        write_page(copy, page, nb.title)
                    except Exception as e:  # the executed copy is there: a page is not worth the rest of the course
                        words = " ".join(str(e).split())[:200]
                        problem = outcome.problem or f"no page could be made of it: {type(e).__name__}: {words}"
                        outcome = dataclasses.replace(outcome, status="failed", problem=problem)
            if interrupted.is_set():
                outcome = dataclasses.replace(outcome, status="stopped")
            outcomes.append(outcome)
            progress.finish(outcome)
            if outcome.status == "stopped":
                break
    index = write_index(course or notebooks, out, outcomes)
    return _summary(outcomes, out, index, stream)


def execute(path, copy, parameters=None, on_cell=None, interrupted=None) -> Outcome:
    """Execute the notebook at `path` through papermill and keep the executed copy at `copy`.

    The kernel is this interpreter, whatever kernels are installed under the notebook's kernel name.

    Args:
      parameters: values by name, put in after the cell tagged `parameters`.
      on_cell: called with (code cell from 1, number of code cells) before each of them.
      interrupted: a `threading.Event`-like; when set, the kernel is killed and not asked to finish.

    Returns:
      The outcome. A failing cell, a dead kernel and Ctrl-C are outcomes, not exceptions.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import remove_error_markers

    path, copy = pathlib.Path(path), pathlib.Path(copy)
    began, at = time.perf_counter(), [0, 0]

    def cell_starts(cell, cell_index):
        if cell.cell_type == "code":
            at[0] += 1
            if on_cell:
                on_cell(*at)

    def outcome(status, problem=""):
        if status != "failed":
            log.unlink(missing_ok=True)
        return Outcome(path.stem, status, time.perf_counter() - began, at[0], at[1], problem)

    nb = nbformat.read(path, as_version=4)
    at[1] = sum(c.cell_type == "code" for c in nb.cells) + bool(parameters)
    copy.parent.mkdir(parents=True, exist_ok=True)
    log = copy.with_suffix(".kernel.log")
    logging.getLogger("papermill").addHandler(logging.NullHandler())  # what it has to say, the outcome says
    try:
        with open(log, "w", encoding="utf-8") as kernel_log:
            papermill.execute_notebook(
                _literal(path),
                _literal(copy),
                parameters=parameters or {},
                kernel_name="python3",
                language="python",
                cwd=copy.parent,
                progress_bar=False,
                on_cell_start=cell_starts,
                kernel_manager_class=_this_python(kernel_log, interrupted),
            )
    except PapermillExecutionError as e:
        # papermill also says so of an error that a cell tagged raises-exception shows on purpose.
        done = nbformat.read(copy, as_version=4)
        if not any(c.metadata.get("papermill", {}).get("exception") for c in done.cells):
            nbformat.write(remove_error_markers(done), copy)
            return outcome("done")
        last = f"{e.ename}: {e.evalue}".strip().splitlines()
        return outcome("failed", last[-1] if len(last) == 1 else f"{last[0]} … {last[-1]}")
    except DeadKernelError:
        return outcome("failed", "the kernel died; the usual reason is too little memory" + _last_words(log))
    except KeyboardInterrupt:
        return outcome("stopped")
    except Exception as e:  # the kernel did not start, the disk is full, …: the other notebooks may still run
        return outcome("failed", f"{type(e).__name__}: {e}".splitlines()[0] + _last_words(log))
    return outcome("done")


def _literal(path: pathlib.Path) -> str:
    # papermill formats paths with str.format.
    return str(path.resolve()).replace("{", "{{").replace("}", "}}")


def _last_words(log: pathlib.Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = [line for line in lines if line.strip() and not line.startswith("[IPKernelApp]")][-1:]
    return f"; its last words: {last[0].strip()}" if last else ""


def _this_python(log, interrupted):
    """A kernel manager class whose every kernel is the interpreter that runs attnlab.

    A kernel spec named python3 in the user's home or in another prefix may belong to another
    environment, and would win over ours.
    """
    from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisPythonOnly(KernelSpecManager):
        def get_kernel_spec(self, kernel_name):
            return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())

    class ThisPython(AsyncKernelManager):
        def __init__(self, **kwargs):
            super().__init__(kernel_spec_manager=ThisPythonOnly(), **kwargs)

        async def start_kernel(self, **kwargs):
            # What a kernel says outside of its cells would break the progress bar.
            return await super().start_kernel(**{"stdout": log, "stderr": log} | kwargs)

        async def shutdown_kernel(self, now=False, restart=False):
            now = now or bool(interrupted and interrupted.is_set())
            return await super().shutdown_kernel(now=now, restart=restart)

    return ThisPython


@contextlib.contextmanager
def _results_in(folder: pathlib.Path):
    """Tell the kernels where their records go: they inherit the environment."""
    before = os.environ.get("ATTNLAB_RESULTS")
    os.environ["ATTNLAB_RESULTS"] = str(folder.resolve())
    try:
        yield
    finally:
        if before is None:
            del os.environ["ATTNLAB_RESULTS"]
        else:
            os.environ["ATTNLAB_RESULTS"] = before


@contextlib.contextmanager
def _ctrl_c_once():
    """Let one Ctrl-C raise KeyboardInterrupt; more of them must not break the tidying up after it."""
    import threading

    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def handler(number, frame):
        if not pressed.is_set():
            pressed.set()
            # The cell that it breaks off would otherwise be reported once more, as a lost task.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


# --- what the person sees while it runs


class _Lines:
    """Progress as plain lines, for logs and pipes."""

    def __init__(self, notebooks, stream):
        self.total, self.stream, self.n = len(notebooks), stream, 0

    def start(self, nb):
        self.n += 1
        self.say(f"[{self.n}/{self.total}] {nb.name} …")

    def cell(self, number, cells):
        pass

    def finish(self, outcome):
        line = f"[{self.n}/{self.total}] {outcome.notebook}  {outcome.status} {outcome.seconds:.1f} s"
        if outcome.status == "failed":
            line += f" in cell {outcome.cell} of {outcome.cells}: {outcome.problem}"
        self.say(line)

    def say(self, line):
        print(line, file=self.stream, flush=True)


class _Bar(_Lines):
    """One bar for the course, a step a code cell, so that it moves evenly."""

    def __init__(self, notebooks, stream):
        from tqdm import tqdm

        super().__init__(notebooks, stream)
        cells = [notebook_files.read(nb.path)["cells"] for nb in notebooks]
        self.sizes = [sum(c["cell_type"] == "code" for c in mine) for mine in cells]
        self.bar = tqdm(
            total=sum(self.sizes),
            file=stream,
            bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} cells [{elapsed}<{remaining}]{postfix}",
            dynamic_ncols=True,
            leave=False,
        )

    def start(self, nb):
        self.n += 1
        self.bar.set_description_str(f"notebook {self.n} of {self.total}: {nb.name}")

    def cell(self, number, cells):
        self.bar.n = sum(self.sizes[: self.n - 1]) + min(number - 1, self.sizes[self.n - 1])
        self.bar.set_postfix_str(f"cell {number} of {cells}")

    def finish(self, outcome):
        self.bar.n = sum(self.sizes[: self.n])
        super().finish(outcome)

    def say(self, line):
        self.bar.write(line, file=self.stream)

    def close(self):
        self.bar.set_postfix_str("")
        self.bar.close()


@contextlib.contextmanager
def _progress(notebooks, stream):
    if not (hasattr(stream, "isatty") and stream.isatty()):
        yield _Lines(notebooks, stream)
        return
    bar = _Bar(notebooks, stream)
    try:
        yield bar
    finally:
        bar.close()


def _summary(outcomes: list[Outcome], out: pathlib.Path, index: pathlib.Path, stream) -> int:
    def say(line=""):
        print(line, file=stream, flush=True)

    say()
    if outcomes[-1].status == "stopped":
        o = outcomes[-1]
        where = f"cell {o.cell} of {o.cells}" if o.cell else "before its first cell"
        say(f"stopped in {o.notebook}, {where}; the committed notebooks are untouched; finished pages are in {out}/")
        return INTERRUPTED
    failed = [o for o in outcomes if o.status == "failed"]
    for o in failed:
        say(f"{o.notebook} failed in cell {o.cell} of {o.cells}: {o.problem}")
        say(f"  its page: {out / o.notebook}.html  its copy: {out / 'notebooks' / o.notebook}.ipynb")
    seconds = sum(o.seconds for o in outcomes)
    done = f"{len(outcomes) - len(failed)} of {len(outcomes)} notebooks done"
    say(f"{done} in {seconds:.0f} s. Course map: {index}")
    return 1 if failed else 0
