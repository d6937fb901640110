"""Every notebook is as committed (what `make validate` looks at); its exercises judge answers rightly.

Each of these runs a notebook as a whole, so there are three runs a notebook: untouched, with the solutions,
with a wrong answer to each exercise. A red notebook leaves a page, build/test/NAME.html, of what was found.
"""

import os
import pathlib
import re

import toy_notebooks as toys
from attnlab import course, notebook_files, validation
from attnlab.notebook_files import code_cells, joined
from test_structure import ROOT, SOLUTIONS, WRONG_ANSWERS, each_notebook, exercises

# A row of `make matrix` has its own.
REPORTS = pathlib.Path(os.environ.get("ATTNLAB_REPORTS", ROOT / "build" / "test"))


@each_notebook
def test_nbval(path):
    found = validation.validate(path, REPORTS)
    assert not found.faults, f"{path.name}; see {REPORTS / path.stem}.html\n" + "\n".join(found.faults)
    nb = notebook_files.read(path)
    for exercise, (_, check) in exercises(nb).items():
        text = said(found.cells[code_cells(nb).index(check)]["outputs"])
        assert "not tried yet" in text.splitlines()[0], f"untouched {exercise}: {text}"


def said(outputs: list[dict]) -> str:
    """What the check of an exercise says; its verdict stands in the first line."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    return "\n".join(map(joined, texts)).strip() or "nothing"


def answered(path, answers, tmp_path) -> dict[str, str]:
    """Execute the notebook with every stub replaced by answers/NAME.py: what each check says."""
    nb = notebook_files.read(path)
    for exercise, (stub, _) in exercises(nb).items():
        stub["source"] = (answers / f"{exercise}.py").read_text(encoding="utf-8")
    copy = tmp_path / "executed" / path.name
    outcome = course.execute(toys.write(tmp_path / path.name, nb), copy)
    assert outcome.status == "done", f"{path.name} {outcome.where}: {outcome.problem}"
    return {name: said(check["outputs"]) for name, (_, check) in exercises(notebook_files.read(copy)).items()}


@each_notebook
def test_solutions_are_right(path, tmp_path):
    for name, text in answered(path, SOLUTIONS, tmp_path).items():
        assert re.search(r"\bright\b", text.splitlines()[0]), f"{name}: {text}"


@each_notebook
def test_wrong_answers_get_a_hint(path, tmp_path):
    for name, text in answered(path, WRONG_ANSWERS, tmp_path).items():
        assert re.search(r"\bwrong\b", text.splitlines()[0]), f"{name}: {text}"
        assert re.search(r"^Hint: .{20}", text, re.MULTILINE), f"{name}: no hint that helps in {text!r}"
