"""`attnlab bench`: the course cold and warm, the seconds of each notebook and of its slowest cells.

Cold means that JAX compiles everything; warm, that it finds in its persistent cache what the cold run compiled.
The kernel's start and papermill's bookkeeping are in a notebook's seconds, as a reader has them.
"""

import pathlib
import shutil

from attnlab import course
from attnlab.device import nvidia_smi
from attnlab.display import format_number, show_table
from attnlab.notebook_files import CourseNotebook, code_cells, read, source, tags

SLOWEST = 3  # cells shown of each notebook
BUDGET = {"GPU": 60, "CPU": 20}  # seconds that a notebook may take, cold; a CPU means two cores
BUDGET_OF_SWEEPS = {"GPU": 180, "CPU": 30}


def main(notebooks: list[CourseNotebook], out) -> int:
    """Run each notebook cold and warm in the folder `out`, and print both tables. 1 if one failed, else 0."""
    rows, cells, failed = [], [], []
    with course.Progress(notebooks) as progress:
        for nb in notebooks:
            progress.start(nb.name)
            folder = pathlib.Path(out) / nb.name
            shutil.rmtree(folder, ignore_errors=True)  # an empty cache is what makes it cold
            runs = []
            for kind in ("cold", "warm"):
                copy = folder / f"{kind}.ipynb"
                outcome = course.execute(nb.path, copy, on_cell=progress.cell, cache=folder / "jax-cache")
                runs.append((outcome.seconds, seconds_of_cells(copy)))
                if outcome.problem:
                    failed.append(f"{nb.name}, {kind}: failed {outcome.where}: {outcome.problem}")
                    break
            else:
                rows.append((nb.name, runs[0][0], runs[1][0], budget(nb)))
                cells += slowest(nb, runs[0][1], runs[1][1])
            progress.finish(outcome)
    show_table(
        ["notebook", "cold (s)", "warm (s)", "saved (s)", "may take, cold (s)"],
        [(name, *map(_seconds, (cold, warm, cold - warm)), f"{may}{' over' * (cold > may)}" if may else None)
         for name, cold, warm, may in [*rows, ("all", sum(r[1] for r in rows), sum(r[2] for r in rows), 0)]],
        title="The course cold and warm",
        aligns=["left"] + ["right"] * 4,
    )  # fmt: skip
    show_table(["notebook", "cell", "begins with", "cold (s)", "warm (s)"], cells, title="Its slowest cells")
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def budget(nb: CourseNotebook) -> int:
    """Seconds that a notebook may take, cold, on this kind of machine."""
    return (BUDGET_OF_SWEEPS if "sweep" in nb.name else BUDGET)["GPU" if nvidia_smi("-L") else "CPU"]


def seconds_of_cells(copy) -> list[float]:
    """Of each code cell of an executed copy, by papermill; 0 for what did not run."""
    return [cell["metadata"].get("papermill", {}).get("duration") or 0.0 for cell in code_cells(read(copy))]


def slowest(nb: CourseNotebook, cold: list[float], warm: list[float]) -> list[tuple]:
    """(notebook, number of the cell among all, its first line of code, seconds cold, warm) of the slowest few."""
    content = read(nb.path)
    cells = sorted(zip(cold, warm, code_cells(content), strict=True), key=lambda row: -row[0])
    return [
        (nb.name, content["cells"].index(cell) + 1, _first_line(cell), _seconds(of_cold), _seconds(of_warm))
        for of_cold, of_warm, cell in cells[:SLOWEST]
    ]


def _first_line(cell: dict) -> str:
    exercise = [tag for tag in tags(cell) if tag.startswith("exercise:")]
    lines = [
        line for line in source(cell).splitlines() if line.strip() and not line.startswith(("#", "import", "from"))
    ]
    return exercise[0] if exercise else lines[0][:60] if lines else "imports"


def _seconds(value: float) -> str:
    return format_number(value, 2) if abs(value) >= 0.1 else "0"
