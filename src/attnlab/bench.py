"""`attnlab bench`: the course cold and warm, the seconds of each notebook and of its slowest cells.

Cold means that JAX's persistent cache is empty when a notebook starts; warm, that it holds what the cold run
compiled. The kernel's start is in a notebook's seconds, as a reader has it.
"""

import pathlib
import shutil

from attnlab import course
from attnlab.display import format_number, show_table
from attnlab.notebook_files import CourseNotebook, code_cells, read, source, tags

SLOWEST = 3  # cells shown of each notebook


def main(notebooks: list[CourseNotebook], out) -> int:
    """Run each notebook cold and warm in the folder `out`, and print both tables.

    Returns:
      0, 1 if a notebook failed, 130 if Ctrl-C stopped it; what was timed before is printed.
    """
    out, status = pathlib.Path(out), 0
    rows, cells = [], []
    with course.Progress(notebooks) as progress:
        for nb in notebooks:
            progress.start(nb.name)
            try:
                outcome, runs = _cold_and_warm(nb, out / nb.name, progress)
            except KeyboardInterrupt:
                status = course.INTERRUPTED
                print(f"stopped in {nb.name}: the tables are of the {len(rows)} of {len(notebooks)} before it")
                break
            progress.finish(outcome)
            if outcome.problem:
                status = 1
                continue
            (cold, cold_cells), (warm, warm_cells) = runs
            rows.append((nb.name, cold, warm))
            cells += slowest(nb, cold_cells, warm_cells)
    if rows:
        rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        body = [(name, *map(_seconds, (cold, warm, cold - warm))) for name, cold, warm in rows]
        headers = ["notebook", "cold (s)", "warm (s)", "saved (s)"]
        show_table(headers, body, title="The course cold and warm", aligns=["left"] + ["right"] * 3)
        headers = ["notebook", "cell", "begins with", "cold (s)", "warm (s)"]
        show_table(headers, cells, title="Its slowest cells")
        if not any(out.glob("*/jax-cache/*/*")):
            print("No program was kept: this JAX keeps none on this device, so nothing is warm.")
    return status


def _cold_and_warm(nb: CourseNotebook, folder: pathlib.Path, progress):
    """The outcome of the last run, and of both (seconds, seconds of each code cell)."""
    shutil.rmtree(folder / "jax-cache", ignore_errors=True)  # an empty one is what makes it cold
    runs = []
    for kind in ("cold", "warm"):
        copy = folder / f"{kind}.ipynb"
        outcome = course.execute(nb.path, copy, on_cell=progress.cell, cache=folder / "jax-cache")
        if outcome.problem:
            break
        runs.append((outcome.seconds, seconds_of_cells(copy)))
    return outcome, runs


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
