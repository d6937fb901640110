"""Every notebook runs and gives its committed outputs (nbval); its exercises judge answers rightly.

Each of these runs a notebook as a whole, so there are three runs a notebook: untouched, with the solutions,
with a wrong answer to each exercise. A failed notebook leaves build/test/NAME.html, a page with what differs.
"""

import difflib
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

import toy_notebooks as toys
from attnlab import course, notebook_files
from attnlab.notebook_files import source
from test_structure import NOTEBOOKS, ROOT, SOLUTIONS, WRONG_ANSWERS, compared, exercises, shown

REPORTS = ROOT / "build" / "test"
STATES = ("right", "wrong", "not tried yet")


# --- nbval, and a page of what it found


def nbval(path, reports) -> tuple[int, list[dict]]:
    """Run nbval on the notebook at `path`: its exit status, and one dictionary a code cell.

    JUnit goes to NAME.xml in `reports`. The dictionaries are what notebooks/conftest.py writes.
    """
    path, reports = pathlib.Path(path), pathlib.Path(reports)
    reports.mkdir(parents=True, exist_ok=True)
    cells = reports / f"{path.stem}.jsonl"
    cells.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120",
        "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--color=no",
        f"--junitxml={reports / path.stem}.xml", str(path),
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "ATTNLAB_RESULTS"}
    # Two notebooks at once must fit on one GPU.
    env |= {"ATTNLAB_NBVAL_OUTPUTS": str(cells), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, cwd=path.parent)
    lines = cells.read_text(encoding="utf-8").splitlines() if cells.exists() else []
    if not lines:
        pytest.fail(f"nbval ran no cell of {path.name}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    cells.unlink()
    return done.returncode, [json.loads(line) for line in lines]


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}: cells that differ</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; }}
pre {{ overflow: auto; border: 1px solid #767676; padding: .5rem; white-space: pre-wrap; }}
.sides {{ display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }}
</style></head>
<body><h1>{name}: cells that differ</h1>
{cells}
</body></html>
"""


def write_failure_page(path, results: list[dict], page) -> list[str]:
    """Write a page with each failed cell: source, what was expected, what came, the difference.

    Returns one line a failed cell.
    """
    nb = notebook_files.read(path)
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    parts, lines = [], []
    for result in (r for r in results if r["failed"]):
        cell = code[result["cell"]]
        number = nb["cells"].index(cell) + 1
        expected, got = _everything(cell["outputs"]), _everything(result["outputs"])
        changes = difflib.unified_diff(expected.splitlines(), got.splitlines(), "expected", "got", lineterm="", n=1)
        message = re.sub(r"\x1b\[[0-9;]*m", "", result["message"])
        first = next((line for line in source(cell).splitlines() if line.strip()), "")
        lines.append(f"cell {number} (In [{cell['execution_count']}]): {first}")
        texts = {"source": source(cell), "expected": expected, "got": got}
        texts |= {"difference": "\n".join(changes), "message": message}
        safe = {key: f"<pre>{html.escape(text or '(nothing)')}</pre>" for key, text in texts.items()}
        parts.append(
            f"<section><h2>Cell {number}</h2>{safe['source']}<div class='sides'>"
            f"<div><h3>Expected</h3>{safe['expected']}</div><div><h3>Got</h3>{safe['got']}</div></div>"
            f"<h3>Difference</h3>{safe['difference']}<h3>What nbval says</h3>{safe['message']}</section>"
        )
    pathlib.Path(page).write_text(_PAGE.format(name=path.stem, cells="\n".join(parts)), encoding="utf-8")
    return lines


def _everything(outputs: list[dict]) -> str:
    """Outputs as text, with the kind of each; pictures by their size only."""
    texts = []
    for o in outputs:
        if o["output_type"] == "error":
            texts.append(f"[error] {o['ename']}: {o['evalue']}")
        elif o["output_type"] == "stream":
            texts.append(f"[{o['name']}]\n{notebook_files.joined(o['text'])}")
        for mime, value in o.get("data", {}).items():
            text = value if isinstance(value, (str, list)) else json.dumps(value)
            text = notebook_files.joined(text)
            texts.append(f"[{mime}]\n" + (f"{len(text)} bytes" if mime.startswith("image/png") else text))
    return "\n".join(texts)


def state_of(outputs: list[dict]) -> tuple[str, str]:
    """What the check of an exercise says, and its whole text: (one of STATES or "", text)."""
    plain = [notebook_files.joined(o["data"]["text/plain"]) for o in outputs if "text/plain" in o.get("data", {})]
    plain += [notebook_files.joined(o["text"]) for o in outputs if o["output_type"] == "stream"]
    text = "\n".join(plain)
    head = text.splitlines()[0] if text else ""
    return next((s for s in STATES if re.search(rf"\b{s}\b", head)), ""), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_nbval(path):
    status, results = nbval(path, REPORTS)
    page = REPORTS / f"{path.stem}.html"
    page.unlink(missing_ok=True)
    if status:
        failed = write_failure_page(path, results, page)
        pytest.fail(f"{path.name} differs; see {page.relative_to(ROOT)}\n" + "\n".join(failed))
    nb = notebook_files.read(path)
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    for exercise, (_, check) in exercises(nb).items():
        state, text = state_of(results[code.index(check)]["outputs"])
        assert state == "not tried yet", f"untouched {exercise}: {text}"


# --- exercises


def answered(path, answers, tmp_path) -> dict[str, tuple[str, str]]:
    """Execute the notebook with every stub replaced by answers/NAME.py: what each check says."""
    nb = notebook_files.read(path)
    stubs = exercises(nb)
    for exercise, (stub, _) in stubs.items():
        stub["source"] = (answers / f"{exercise}.py").read_text(encoding="utf-8").splitlines(True)
    changed = toys.write(tmp_path / path.name, nb)
    copy = tmp_path / "executed" / path.name
    outcome = course.execute(changed, copy)
    assert outcome.status == "done", f"{path.name}, cell {outcome.cell} of {outcome.cells}: {outcome.problem}"
    executed = exercises(notebook_files.read(copy))
    return {name: state_of(executed[name][1]["outputs"]) for name in stubs}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_solutions_are_right(path, tmp_path):
    found = answered(path, SOLUTIONS, tmp_path)
    assert {name: text for name, (state, text) in found.items() if state != "right"} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_wrong_answers_get_a_hint(path, tmp_path):
    found = answered(path, WRONG_ANSWERS, tmp_path)
    assert {name: text for name, (state, text) in found.items() if state != "wrong"} == {}
    for name, (_, text) in found.items():
        hint = re.search(r"^Hint: (.*)", text, re.MULTILINE | re.DOTALL)
        assert hint and len(hint.group(1).strip()) > 20, f"{name}: no hint that helps in {text!r}"


def test_answers_are_put_into_stubs(tmp_path):
    lab = (
        "from types import SimpleNamespace\n"
        "from attnlab.exercises import compare\n"
        "lab = SimpleNamespace(check_six=lambda x: compare('six', x, 42, 'It is six times seven, in all.'))"
    )
    cells = [
        toys.parameters(),
        toys.code(lab),
        toys.code("x = ...", "exercise:six"),
        toys.code("lab.check_six(x)"),
    ]
    path = toys.write(tmp_path / "00_toy.ipynb", toys.notebook(*cells))
    for answer, state in (("x = 6 * 7", "right"), ("x = 41", "wrong"), ("x = ...", "not tried yet")):
        (tmp_path / "six.py").write_text(answer + "\n")
        assert answered(path, tmp_path, tmp_path / "changed")["six"][0] == state


# --- nbval goes red for what matters, and only for that


def failures(xml) -> set[str]:
    """The names of the failed test cases of a JUnit file."""
    cases = ElementTree.parse(xml).iter("testcase")
    return {c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None}


def test_planted_faults_in_a_real_notebook(tmp_path):
    """A changed shape and a cell that raises, in a copy: these two cells turn red, and no other."""
    with_shapes = {}
    for path in NOTEBOOKS:
        nb = notebook_files.read(path)
        shaped = [c for c in compared(nb) if re.search(r"\(\d+, ", shown(c))]
        if shaped:
            with_shapes[path] = nb, shaped[0]
    assert with_shapes, "no notebook has a compared cell that shows a shape"
    path = min(with_shapes, key=lambda p: len(with_shapes[p][0]["cells"]))
    nb, changed = with_shapes[path]
    code = [c for c in nb["cells"] if c["cell_type"] == "code"]
    changed["outputs"] = json.loads(re.sub(r"\((\d+), ", r"(1\1, ", json.dumps(changed["outputs"])))
    raises = toys.code("raise ValueError('planted')")
    nb["cells"].append(raises)
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    copy = toys.write(tmp_path / path.name, notebook_files.tidy(nb)[0])
    status, results = nbval(copy, tmp_path / "reports")
    assert status == 1
    red = {code.index(changed), len(code)}
    assert {r["cell"] for r in results if r["failed"]} == red
    assert len(failures(tmp_path / "reports" / f"{path.stem}.xml")) == 2
    page = tmp_path / "page.html"
    lines = write_failure_page(copy, results, page)
    assert len(lines) == 2 and "planted" in lines[1]


def run_toy(tmp_path, *cells) -> dict[int, dict]:
    """nbval on a toy with these cells after the parameters: the results by cell, from 1."""
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    path = toys.write(tmp_path / "00_toy.ipynb", toys.notebook(toys.parameters(), *cells))
    return {r["cell"]: r for r in nbval(path, tmp_path / "reports")[1]}


def displays(text: str, *tags: str, **data) -> dict:
    """A code cell whose committed output is a display of `data` (mime types with _ for /)."""
    cell = toys.code(text, *tags)
    bundle = {mime.replace("_", "/"): value for mime, value in data.items()}
    cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": bundle}]
    return cell


FIGURE = "from IPython.display import display\ndisplay({mime}, raw=True)"


def test_what_turns_red(tmp_path):
    cells = {
        "shape": toys.code("print((4, 128))", prints="(4, 64)"),
        "dtype": toys.code("'float32'", prints="'float16'"),
        "missing output": toys.code("pass", prints="True"),
        "new output": toys.code("print(True)"),
        "html": displays(
            FIGURE.format(mime={"text/html": "<b>1</b>", "text/plain": "1"}),
            text_html="<b>2</b>",
            text_plain="1",
        ),
        "text": toys.code("print('<b>', 1)", prints="<b> 2"),
        "raises": toys.code("1/0"),
    }
    results = run_toy(tmp_path, *cells.values())
    red = {name for n, name in enumerate(cells, 1) if results[n]["failed"]}
    assert red == set(cells)

    page = tmp_path / "page.html"
    lines = write_failure_page(tmp_path / "00_toy.ipynb", list(results.values()), page)
    assert lines[0] == "cell 2 (In [2]): print((4, 128))" and len(lines) == len(cells)
    text = page.read_text()
    assert "[stdout]\n(4, 64)" in text and "[stdout]\n(4, 128)" in text
    assert "&lt;b&gt; 2" in text and "<b>" not in text


def test_what_stays_green(tmp_path):
    warned = toys.code("print(1)", prints="1")
    warned["outputs"].append({"output_type": "stream", "name": "stderr", "text": "UserWarning: old\n"})
    figure = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 600x400 with 2 Axes>"}
    cells = {
        "a new warning": toys.code("import sys\nprint(1)\nprint('Warning', file=sys.stderr)", prints="1"),
        "a warning that is gone": warned,
        "figure size": displays(
            FIGURE.format(mime=figure),
            image_png="iVBORw0KAAA=",
            text_plain="<Figure size 640x480 with 1 Axes>",
        ),
        "time": toys.code("import time\nprint(time.time())", "nbval-ignore-output", prints="0.1"),
        "error on purpose": toys.code("1/0", "raises-exception", "nbval-ignore-output"),
    }
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    nb = toys.notebook(toys.parameters(), *cells.values())
    # After tidying, which drops what is on stderr.
    nb["cells"][2]["outputs"].append({"output_type": "stream", "name": "stderr", "text": "UserWarning: old\n"})
    _, results = nbval(toys.write(tmp_path / "00_toy.ipynb", nb), tmp_path / "reports")
    assert {name for n, name in enumerate(cells, 1) if results[n]["failed"]} == set()


@pytest.mark.parametrize("gpu", [False, True], ids=["without a GPU", "with a GPU"])
def test_gpu_cells_are_compared_on_a_gpu_only(tmp_path, monkeypatch, gpu):
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\n" + ("echo 'GPU 0: NVIDIA Fake (UUID: GPU-0)'\n" if gpu else "exit 9\n"))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    cell = toys.code("print('kernels', 1)", "nbval-gpu", prints="kernels 2")
    both = toys.code("print('kernels', 1)", "nbval-gpu", prints="kernels 1")
    results = run_toy(tmp_path, cell, both)
    assert results[1]["failed"] is gpu and results[1]["compared"] is gpu
    assert not results[2]["failed"]


def test_the_state_of_an_answer():
    def check(text):
        return state_of([{"output_type": "display_data", "data": {"text/plain": text}}])[0]

    assert [check(t) for t in ("✓ x: right\nwrong", "✗ x: wrong\nright", "○ x: not tried yet", "")] == [
        *STATES,
        "",
    ]
