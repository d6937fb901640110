"""Every notebook has the anatomy of the course, and is a file that stays readable in a diff."""

import json
import pathlib
import re

import pytest

import toy_notebooks as toys
from attnlab import notebook_files
from attnlab.notebook_files import code_cells, joined, source, tags

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
SOLUTIONS = ROOT / "notebooks" / "solutions"
WRONG_ANSWERS = ROOT / "tests" / "wrong_answers"

MAX_BYTES = 700_000
MAX_CODE_LINES = 25
MAX_WORDS = 180
NEVER_COMPARED = {"nbval-ignore-output", "nbval-skip", "raises-exception"}
# A decimal point, an exponent, or what floats become: they differ from machine to machine.
FLOAT = re.compile(r"\d\.\d|\b\d+e[+-]?\d|\bnan\b|\binf\b", re.IGNORECASE)
NVIDIA = re.compile(r"NVIDIA|Tesla|GeForce")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def shown(cell: dict) -> str:
    """What a reader sees of a cell's outputs, as text; not pictures."""
    texts = []
    for o in cell.get("outputs", []):
        texts.append(joined(o.get("text", "")))
        for mime, value in o.get("data", {}).items():
            text = joined(value) if mime.startswith("text/") else ""
            texts.append(re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL) if "html" in mime else text)
    return "\n".join(texts)


def start_cell(nb: dict) -> dict:
    """The code cell with lab.start, if it stands before the first section; else the first code cell."""
    for cell in nb["cells"]:
        if cell["cell_type"] == "code" and "lab.start(" in source(cell):
            return cell
        if cell["cell_type"] == "markdown" and source(cell).startswith("## "):
            break
    return code_cells(nb)[0]


def exercises(nb: dict) -> dict[str, tuple[dict, dict]]:
    """By name: the stub and the code cell after it."""
    cells = code_cells(nb)
    pairs = zip(cells, cells[1:], strict=False)
    return {t.removeprefix("exercise:"): pair for pair in pairs for t in tags(pair[0]) if t.startswith("exercise:")}


def compared(nb: dict) -> list[dict]:
    """The cells whose outputs nbval compares on every machine, checks of untouched exercises aside."""
    skipped = NEVER_COMPARED | {"nbval-gpu"}
    cells = [c for c in code_cells(nb) if not skipped & set(tags(c)) and "lab.check_" not in source(c)]
    return [c for c in cells if shown(c).strip()]


def anatomy(nb: dict, name: str, solutions=SOLUTIONS, wrong_answers=WRONG_ANSWERS) -> list[str]:
    """What a notebook of the course lacks, one line each."""
    cells, code = nb["cells"], code_cells(nb)
    faults = []

    def expect(condition, fault):
        if not condition:
            faults.append(fault)

    for key in ("title", "minutes", "needs"):
        expect(nb["metadata"]["attnlab"].get(key), f"metadata.attnlab has no {key}")
    expect(source(cells[0]).startswith("# "), "no title cell")
    expect("parameters" in tags(code[0]), "the first code cell is not tagged parameters")
    expect("import attnlab as lab" in source(start_cell(nb)), "the start cell does not import attnlab as lab")
    expect(f'lab.start("{name}")' in source(start_cell(nb)), f'no lab.start("{name}") before the first section')
    text = "\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    expect(headings and headings[-1].startswith("What you saw"), "the last section is not 'What you saw'")

    expect(len(exercises(nb)) >= 3, f"{len(exercises(nb))} exercises, wanted three")
    for exercise, (stub, check) in exercises(nb).items():
        expect("..." in source(stub), f"exercise {exercise}: the stub leaves no ...")
        expect(f"lab.check_{exercise}(" in source(check), f"exercise {exercise}: no lab.check_{exercise}(…) after it")
        expect((solutions / f"{exercise}.py").exists(), f"exercise {exercise}: no solution")
        expect((wrong_answers / f"{exercise}.py").exists(), f"exercise {exercise}: no wrong answer")

    expect(len(compared(nb)) >= 3, f"{len(compared(nb))} compared cells with outputs, wanted three or more")
    for n, cell in enumerate(cells, 1):
        lines, words = len(source(cell).splitlines()), len(source(cell).split())
        if cell["cell_type"] == "markdown":
            expect(words <= MAX_WORDS, f"cell {n}: {words} words of prose")
            continue
        expect(lines <= MAX_CODE_LINES, f"cell {n}: {lines} lines of code")
        expect("NBVAL_" not in source(cell), f"cell {n}: an nbval comment; use a tag")
        found = None if NEVER_COMPARED & set(tags(cell)) else FLOAT.search(shown(cell))
        expect(not found, f"cell {n}: compared, but shows a float: {found and found.group()!r}")
    return faults


def twins(notebooks: dict[str, dict]) -> list[str]:
    """Pairs of code cells with one text, over all notebooks; cells of imports and calls of lab aside."""
    seen, found = {}, []
    for name, nb in notebooks.items():
        for cell in code_cells(nb):
            text = source(cell)
            if re.fullmatch(r"(((import|from) .*|lab\.\w+\(.*\))?\n?)*", text):
                continue
            if text in seen:
                found.append(f"{seen[text]} and {name}: {text.splitlines()[0]}")
            seen.setdefault(text, name)
    return found


def test_the_course_is_there():
    assert [nb.number for nb in notebook_files.course_notebooks(ROOT / "notebooks")][:4] == ["00", "01", "02", "03"]


@each_notebook
def test_anatomy(path):
    assert anatomy(notebook_files.read(path), path.stem) == []


@each_notebook
def test_canonical_and_small(path):
    assert notebook_files.check(path) == []
    assert path.stat().st_size <= MAX_BYTES


@each_notebook
def test_outputs_are_of_an_nvidia_device(path):
    start = start_cell(notebook_files.read(path))
    assert NVIDIA.search(shown(start)), f"the start cell says {shown(start)[:200]!r}"


def test_no_code_twice():
    assert twins({p.stem: notebook_files.read(p) for p in NOTEBOOKS}) == []


def test_exercise_files_belong_to_exercises():
    names = [name for p in NOTEBOOKS for name in exercises(notebook_files.read(p))]
    assert len(names) == len(set(names)), "two exercises have one name"
    for folder in (SOLUTIONS, WRONG_ANSWERS):
        assert {p.stem for p in folder.glob("*.py")} - set(names) == set(), f"{folder.name} of no exercise"


# --- the checks above can fail: each fault planted in a toy is found


def _set(find, key, value):
    return lambda nb: find(nb).__setitem__(key, value)


def _first(nb):
    return code_cells(nb)[0]


def _compared(nb):
    return compared(nb)[0]


def _output(**fields):
    return lambda nb: _first(nb)["outputs"].append(fields)


ANATOMY = {
    "2 compared cells": _set(_compared, "outputs", []),
    "wanted three or more": _set(_compared, "metadata", {"tags": ["nbval-gpu"]}),
    "shows a float: '0.2'": lambda nb: _compared(nb)["outputs"][0].update(text=["0.25\n"]),
    "shows a float: '3.2'": lambda nb: _compared(nb)["outputs"][0].update(
        data={"text/html": ["<b style='width:1.5em'>3.25</b>"]}
    ),
    "no title": _set(lambda nb: nb["cells"][0], "source", ["A toy"]),
    "has no minutes": _set(lambda nb: nb["metadata"]["attnlab"], "minutes", None),
    "not tagged parameters": _set(_first, "metadata", {}),
    'no lab.start("00_toy")': _set(start_cell, "source", 'import attnlab as lab\nlab.start("01_other")'),
    "does not import attnlab": _set(start_cell, "source", 'lab.start("00_toy")'),
    "before the first section": lambda nb: nb["cells"].insert(1, toys.markdown("## Early")),
    "leaves no ...": _set(lambda nb: exercises(nb)["00_toy_one"][0], "source", "answer = 42"),
    "no lab.check_00_toy_two": _set(lambda nb: exercises(nb)["00_toy_two"][1], "source", "pass"),
    "2 exercises": _set(lambda nb: exercises(nb)["00_toy_two"][0], "metadata", {}),
    "no solution": _set(lambda nb: exercises(nb)["00_toy_two"][0], "metadata", {"tags": ["exercise:none_such"]}),
    "What you saw": _set(lambda nb: nb["cells"][-1], "source", "## Appendix"),
    "30 lines": _set(_compared, "source", "x = 1\n" * 30),
    "words of prose": _set(lambda nb: nb["cells"][0], "source", "# T\n" + "word " * 300),
    "nbval comment": _set(_compared, "source", "# NBVAL_IGNORE_OUTPUT\n1"),
}


@pytest.mark.parametrize("fault", [None, *ANATOMY])
def test_planted_fault_in_the_anatomy(tmp_path, fault):
    nb = toys.course_notebook()
    for exercise in exercises(nb):
        (tmp_path / f"{exercise}.py").write_text("")
    if fault:
        ANATOMY[fault](nb)
    faults = anatomy(nb, "00_toy", tmp_path, tmp_path)
    assert any(fault in line for line in faults) if fault else faults == []


def test_planted_twins():
    one, other = toys.course_notebook("00_toy"), toys.course_notebook("01_joy")
    assert all("repeats" in line for line in twins({"00_toy": one, "01_joy": other}))
    other["cells"].append(one["cells"][5])
    assert any("len(toy)" in line for line in twins({"00_toy": one, "01_joy": other}))


REPAIRED = {
    "not canonical: papermill": lambda nb: nb["metadata"].update(papermill={"duration": 1.0}),
    "not canonical: language_info": lambda nb: nb["metadata"]["language_info"].update(version="3.11.7"),
    "not canonical: metadata": lambda nb: _first(nb)["metadata"].update(execution={"iopub.status.busy": "2025"}),
    "not canonical: execution_count": lambda nb: _first(nb).update(execution_count=7),
    "cell 2: not canonical: id": lambda nb: _first(nb).pop("id"),
    "cell 2: not canonical: id;": lambda nb: nb["cells"][1].update(id=nb["cells"][0]["id"]),
    "not canonical: outputs": _output(output_type="stream", name="stderr", text="UserWarning"),
    "not canonical: outputs;": _output(output_type="display_data", metadata={}, data={}),
    "put in by papermill": lambda nb: nb["cells"].insert(2, toys.code("repeats = 7", "injected-parameters")),
    "cell 17: empty": lambda nb: nb["cells"].append(toys.code("")),
    "not canonical: nbformat_minor": lambda nb: nb.update(nbformat_minor=4),
}


@pytest.mark.parametrize("fault", REPAIRED)
def test_format_repairs(tmp_path, fault):
    nb = toys.course_notebook()
    REPAIRED[fault](nb)
    path = toys.write(tmp_path / "00_toy.ipynb", nb)
    assert any(fault in line for line in notebook_files.check(path)), notebook_files.check(path)
    assert notebook_files.format(path)
    assert notebook_files.check(path) == []
    assert not notebook_files.format(path), "formatting twice changes the file"


def test_format_repairs_the_layout(tmp_path):
    path = tmp_path / "00_toy.ipynb"
    path.write_text(json.dumps(toys.course_notebook()))
    assert "laid out" in notebook_files.check(path)[0]
    assert notebook_files.main(["format", str(tmp_path)]) == 0
    assert notebook_files.check(path) == []


LEFT = {
    "0 cells tagged parameters": _set(_first, "metadata", {}),
    "not run, so without": _set(_first, "execution_count", None),
    "never run": lambda nb: [c.update(execution_count=None, outputs=[]) for c in code_cells(nb)],
    "ends in an error: ValueError": _output(output_type="error", ename="ValueError", evalue="no", traceback=[]),
    "/home/jo/x.py": lambda nb: _compared(nb)["outputs"][0].update(text="see /home/jo/x.py:3"),
    "lib/site-packages/": lambda nb: _compared(nb)["outputs"][0].update(text="lib/site-packages/jax"),
}


@pytest.mark.parametrize("fault", LEFT)
def test_format_leaves_to_people(tmp_path, capsys, fault):
    nb = toys.course_notebook()
    LEFT[fault](nb)
    path = toys.write(tmp_path / "00_toy.ipynb", nb)
    assert notebook_files.main(["format", str(path)]) == 1
    assert fault in capsys.readouterr().out


def test_an_error_shown_on_purpose_is_no_fault(tmp_path):
    nb = toys.course_notebook()
    cell = toys.code("1/0", "raises-exception")
    cell["outputs"] = [{"output_type": "error", "ename": "E", "evalue": "e", "traceback": ["https://x.org/home/y"]}]
    nb["cells"].insert(4, cell)
    path = toys.write(tmp_path / "00_toy.ipynb", notebook_files.tidy(nb))
    assert notebook_files.check(path) == []


BROKEN = ['{"nbformat": 4}', '{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code"}]}']


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nbformat": 3}', *BROKEN])
def test_not_a_notebook(tmp_path, capsys, text):
    path = tmp_path / "00_toy.ipynb"
    path.write_text(text)
    assert notebook_files.main(["check", str(path)]) == 1
    assert re.search("00_toy.ipynb: (not a notebook|a notebook whose cells)", capsys.readouterr().out)
