"""Every notebook has the anatomy of the course, and is a file that stays readable in a diff."""

import copy
import pathlib
import re

import pytest

import toy_notebooks as toys
from attnlab import notebook_files
from attnlab.notebook_files import source, tags

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


def shown(cell: dict) -> str:
    """What a reader sees of a cell's outputs, as text; not pictures."""
    texts = []
    for o in cell.get("outputs", []):
        if o["output_type"] == "stream":
            texts.append(notebook_files.joined(o["text"]))
        for mime, value in o.get("data", {}).items():
            text = notebook_files.joined(value) if mime.startswith("text/") else ""
            if mime == "text/html":
                text = re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)
            texts.append(text)
    return "\n".join(texts)


def code_cells(nb: dict) -> list[dict]:
    return [c for c in nb["cells"] if c["cell_type"] == "code"]


def start_cell(nb: dict) -> dict:
    """The code cell with lab.start, if it stands before the first section; else the first code cell."""
    for cell in nb["cells"]:
        if cell["cell_type"] == "markdown" and source(cell).startswith("## "):
            break
        if cell["cell_type"] == "code" and "lab.start(" in source(cell):
            return cell
    return code_cells(nb)[0]


def exercises(nb: dict) -> dict[str, tuple[dict, dict | None]]:
    """By name: the stub and the code cell after it."""
    cells = code_cells(nb)
    found = {}
    for i, cell in enumerate(cells):
        for tag in tags(cell):
            if tag.startswith("exercise:"):
                found[tag.removeprefix("exercise:")] = (cell, cells[i + 1] if i + 1 < len(cells) else None)
    return found


def compared(nb: dict) -> list[dict]:
    """The cells whose outputs nbval compares on every machine, checks of untouched exercises aside."""
    return [
        c for c in code_cells(nb)
        if shown(c).strip() and not NEVER_COMPARED & set(tags(c)) and "nbval-gpu" not in tags(c)
        and "lab.check_" not in source(c)
    ]  # fmt: skip


def anatomy(nb: dict, name: str, solutions=SOLUTIONS, wrong_answers=WRONG_ANSWERS) -> list[str]:
    """What a notebook of the course lacks, one line each."""
    cells, code = nb["cells"], code_cells(nb)
    faults = []

    def expect(condition, fault):
        if not condition:
            faults.append(fault)

    about = nb["metadata"].get("attnlab", {})
    for key, kind in (("title", str), ("minutes", int), ("needs", str)):
        expect(isinstance(about.get(key), kind) and about[key], f"metadata.attnlab has no {key}")
    expect(cells[0]["cell_type"] == "markdown" and source(cells[0]).startswith("# "), "no title cell")
    expect("parameters" in tags(code[0]), "the first code cell is not tagged parameters")
    expect(sum("parameters" in tags(c) for c in code) == 1, "not one cell tagged parameters")
    start = source(start_cell(nb))
    expect("import attnlab as lab" in start, "the start cell does not import attnlab as lab")
    expect(f'lab.start("{name}")' in start, f'no lab.start("{name}") before the first section')
    headings = [line for c in cells if c["cell_type"] == "markdown" for line in source(c).splitlines()]
    headings = [line for line in headings if line.startswith("## ")]
    expect(headings and headings[-1].startswith("## What you saw"), "the last section is not 'What you saw'")

    stubs = exercises(nb)
    expect(len(stubs) >= 3, f"{len(stubs)} exercises, wanted three")
    for exercise, (stub, check) in stubs.items():
        expect("..." in source(stub), f"exercise {exercise}: the stub leaves no ...")
        called = check is not None and f"lab.check_{exercise}(" in source(check)
        expect(called, f"exercise {exercise}: no lab.check_{exercise}(…) after it")
        expect((solutions / f"{exercise}.py").exists(), f"exercise {exercise}: no solution")
        expect((wrong_answers / f"{exercise}.py").exists(), f"exercise {exercise}: no wrong answer")

    expect(len(compared(nb)) >= 3, f"{len(compared(nb))} compared cells with outputs, wanted three or more")
    for n, cell in enumerate(cells, 1):
        text = source(cell)
        if cell["cell_type"] == "markdown":
            expect(len(text.split()) <= MAX_WORDS, f"cell {n}: {len(text.split())} words of prose")
            continue
        lines = len(text.splitlines())
        expect(lines <= MAX_CODE_LINES, f"cell {n}: {lines} lines of code")
        expect("NBVAL_" not in text, f"cell {n}: an nbval comment; use a tag")
        if not NEVER_COMPARED & set(tags(cell)):
            found = FLOAT.search(shown(cell))
            expect(not found, f"cell {n}: compared, but shows a float: {found and found.group()!r}")
    return faults


def twins(notebooks: dict[str, dict]) -> list[str]:
    """Pairs of code cells with one text, over all notebooks; cells of imports and calls of lab aside."""
    seen, found = {}, []
    for name, nb in notebooks.items():
        for n, cell in enumerate(nb["cells"], 1):
            text = "\n".join(line.rstrip() for line in source(cell).splitlines() if line.strip())
            ritual = re.fullmatch(r"((import|from) .*\n?|lab\.\w+\(.*\)\n?)*", text)
            if cell["cell_type"] == "code" and not ritual:
                if text in seen:
                    found.append(f"{seen[text]} and {name}, cell {n}: {text.splitlines()[0]}")
                seen.setdefault(text, f"{name}, cell {n}")
    return found


def test_the_course_is_there():
    assert [nb.number for nb in notebook_files.course_notebooks(ROOT / "notebooks")][:4] == [
        "00",
        "01",
        "02",
        "03",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_anatomy(path):
    assert anatomy(notebook_files.read(path), path.stem) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_canonical_and_small(path):
    assert notebook_files.check(path) == []
    assert path.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
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


# --- the checks above can fail


@pytest.fixture
def toy(tmp_path):
    nb = toys.course_notebook()
    for exercise in exercises(nb):
        (tmp_path / f"{exercise}.py").write_text("")
    return nb, lambda changed: anatomy(changed, "00_toy", tmp_path, tmp_path)


def _strip(nb):
    for cell in code_cells(nb):
        cell["outputs"] = []


def _tag_gpu(nb):
    for cell in code_cells(nb):
        cell["metadata"]["tags"] = [*tags(cell), "nbval-gpu"]


def _float_in(nb):
    compared(nb)[0]["outputs"][0]["text"] = ["0.25\n"]


def _float_in_html(nb):
    html = {"text/html": ["<b style='width:1.5em'>3.25</b>"], "text/plain": ["x"]}
    compared(nb)[0]["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": html}]


def _set(find, key, value):
    def plant(nb):
        find(nb)[key] = value

    return plant


PLANTED = {
    "compared cells": _strip,
    "compared cells with": _tag_gpu,
    "shows a float: '0.2'": _float_in,
    "shows a float: '3.2'": _float_in_html,
    "no title": _set(lambda nb: nb["cells"][0], "source", ["A toy"]),
    "has no minutes": _set(lambda nb: nb["metadata"]["attnlab"], "minutes", None),
    "not tagged parameters": _set(lambda nb: code_cells(nb)[0], "metadata", {}),
    'no lab.start("00_toy")': _set(start_cell, "source", 'import attnlab as lab\nlab.start("01_other")'),
    "does not import attnlab": _set(start_cell, "source", 'lab.start("00_toy")'),
    "before the first section": lambda nb: nb["cells"].insert(1, toys.markdown("## Early")),
    "leaves no ...": _set(lambda nb: exercises(nb)["00_toy_one"][0], "source", "answer = 42"),
    "no lab.check_00_toy_two": _set(lambda nb: exercises(nb)["00_toy_two"][1], "source", "pass"),
    "2 exercises": _set(lambda nb: exercises(nb)["00_toy_two"][0], "metadata", {}),
    "no solution": _set(lambda nb: exercises(nb)["00_toy_two"][0], "metadata", {"tags": ["exercise:none_such"]}),
    "What you saw": _set(lambda nb: nb["cells"][-1], "source", "## Appendix"),
    "30 lines": _set(lambda nb: compared(nb)[0], "source", "x = 1\n" * 30),
    "words of prose": _set(lambda nb: nb["cells"][0], "source", "# T\n" + "word " * 300),
    "nbval comment": _set(lambda nb: compared(nb)[0], "source", "# NBVAL_IGNORE_OUTPUT\n1"),
}


def test_the_toy_has_the_anatomy(toy):
    nb, faults = toy
    assert faults(nb) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_in_the_anatomy(toy, fault):
    nb, faults = toy
    changed = copy.deepcopy(nb)
    PLANTED[fault](changed)
    assert any(fault in line for line in faults(changed))


def test_planted_twins():
    one, other = toys.course_notebook("00_toy"), toys.course_notebook("01_joy")
    assert all("repeats" in line for line in twins({"00_toy": one, "01_joy": other}))
    other["cells"].append(one["cells"][5])
    assert any("len(toy)" in line for line in twins({"00_toy": one, "01_joy": other}))


def _first_code(nb):
    return code_cells(nb)[0]


NOT_CANONICAL = {
    "papermill": lambda nb: nb["metadata"].update(papermill={"duration": 1.0}),
    "language_info": lambda nb: nb["metadata"]["language_info"].update(version="3.11.7"),
    "kernelspec": lambda nb: nb["metadata"]["kernelspec"].update(name="venv"),
    "timing": lambda nb: _first_code(nb)["metadata"].update(execution={"iopub.status.busy": "2025"}),
    "execution count 7": lambda nb: _first_code(nb).update(execution_count=7),
    "no cell id": lambda nb: _first_code(nb).pop("id"),
    "is taken": lambda nb: nb["cells"][0].update(id=nb["cells"][1]["id"]),
    "stderr": lambda nb: _first_code(nb)["outputs"].append(
        {"output_type": "stream", "name": "stderr", "text": "UserWarning"}
    ),
    "nothing in it": lambda nb: _first_code(nb)["outputs"].append(
        {"output_type": "display_data", "metadata": {}, "data": {}}
    ),
    "papermill put in": lambda nb: nb["cells"].insert(2, toys.code("repeats = 7", "injected-parameters")),
    "empty cell": lambda nb: nb["cells"].append(toys.code("")),
    "wanted 4.5": lambda nb: nb.update(nbformat_minor=4),
}
NAMES = {"timing": "metadata that is not content"}


@pytest.mark.parametrize("fault", NOT_CANONICAL)
def test_format_repairs(tmp_path, fault):
    nb = toys.course_notebook()
    NOT_CANONICAL[fault](nb)
    path = toys.write(tmp_path / "00_toy.ipynb", nb)
    assert any(NAMES.get(fault, fault) in line for line in notebook_files.check(path))
    assert notebook_files.format(path)
    assert notebook_files.check(path) == []
    assert not notebook_files.format(path), "formatting twice changes the file"


def test_format_repairs_the_layout(tmp_path):
    import json

    path = tmp_path / "00_toy.ipynb"
    path.write_text(json.dumps(toys.course_notebook()))
    assert "laid out" in notebook_files.check(path)[0]
    assert notebook_files.main(["format", str(tmp_path)]) == 0
    assert notebook_files.check(path) == []


FOR_PEOPLE = {
    "0 cells tagged parameters": lambda nb: _first_code(nb).update(metadata={}),
    "2 cells tagged parameters": lambda nb: nb["cells"].insert(1, toys.parameters("x = 1")),
    "not run, so without": lambda nb: code_cells(nb)[-1].update(execution_count=None),
    "never run": lambda nb: [c.update(execution_count=None, outputs=[]) for c in code_cells(nb)],
    "ends in an error: ValueError": lambda nb: _first_code(nb)["outputs"].append(
        {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []}
    ),
    "/home/jo/x.py": lambda nb: compared(nb)[0]["outputs"][0].update(text="see /home/jo/x.py:3"),
    "lib/site-packages/": lambda nb: compared(nb)[0]["outputs"][0].update(text="lib/site-packages/jax"),
}


@pytest.mark.parametrize("fault", FOR_PEOPLE)
def test_format_leaves_to_people(tmp_path, capsys, fault):
    nb = toys.course_notebook()
    FOR_PEOPLE[fault](nb)
    path = toys.write(tmp_path / "00_toy.ipynb", nb)
    assert notebook_files.main(["format", str(path)]) == 1
    assert fault in capsys.readouterr().out


def test_an_error_shown_on_purpose_is_no_fault(tmp_path):
    nb = toys.course_notebook()
    cell = toys.code("1/0", "raises-exception")
    cell["outputs"] = [{"output_type": "error", "ename": "E", "evalue": "e", "traceback": ["https://x.org/home/y"]}]
    nb["cells"].insert(4, cell)
    path = toys.write(tmp_path / "00_toy.ipynb", notebook_files.tidy(nb)[0])
    assert notebook_files.check(path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [{"cell_type": "x"}]}'])
def test_not_a_notebook(tmp_path, capsys, text):
    path = tmp_path / "00_toy.ipynb"
    path.write_text(text)
    assert notebook_files.main(["check", str(path)]) == 1
    assert "00_toy.ipynb: not a notebook" in capsys.readouterr().out
