"""Every notebook runs and gives its committed outputs (nbval); its exercises judge answers rightly.

Each of these runs a notebook as a whole, so there are three runs a notebook: untouched, with the solutions,
with a wrong answer to each exercise. A failed notebook leaves build/test/NAME.html, a page with what differs.
"""

import difflib
import html
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import toy_notebooks as toys
from attnlab import course, notebook_files
from attnlab.notebook_files import code_cells, joined, source
from test_structure import NOTEBOOKS, ROOT, SOLUTIONS, WRONG_ANSWERS, compared, each_notebook, exercises

REPORTS = ROOT / "build" / "test"


# --- nbval, and a page of what it found


def nbval(path, reports) -> list[dict]:
    """Run nbval on the notebook at `path`: one dictionary a code cell, as notebooks/conftest.py writes them.

    JUnit goes to NAME.xml in the folder `reports`.
    """
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
    assert cells.exists(), f"nbval ran no cell of {path.name}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    results = [json.loads(line) for line in cells.read_text(encoding="utf-8").splitlines()]
    assert (done.returncode != 0) == any(r["failed"] for r in results), done.stdout[-3000:]
    cells.unlink()
    return results


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}: cells that differ</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; }}
pre {{ overflow: auto; border: 1px solid #767676; padding: .5rem; white-space: pre-wrap; }}
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
    parts, lines = [], []
    for result in (r for r in results if r["failed"]):
        cell = code_cells(nb)[result["cell"]]
        number = nb["cells"].index(cell) + 1
        expected, got = _everything(cell["outputs"]), _everything(result["outputs"])
        changes = difflib.unified_diff(expected.splitlines(), got.splitlines(), "expected", "got", lineterm="", n=1)
        texts = {"Source": source(cell), "Expected": expected, "Got": got, "Difference": "\n".join(changes)}
        texts["What nbval says"] = re.sub(r"\x1b\[[0-9;]*m", "", result["message"])
        lines.append(f"cell {number} (In [{cell['execution_count']}]): {source(cell).strip().splitlines()[0]}")
        parts.append(f"<h2>Cell {number}</h2>")
        parts += [f"<h3>{title}</h3><pre>{html.escape(text)}</pre>" for title, text in texts.items()]
    page.write_text(_PAGE.format(name=path.stem, cells="\n".join(parts)), encoding="utf-8")
    return lines


def _everything(outputs: list[dict]) -> str:
    """Outputs as text, with the kind of each; pictures by their size only."""
    texts = []
    for o in outputs:
        if o["output_type"] == "error":
            texts.append(f"[error] {o['ename']}: {o['evalue']}")
        elif o["output_type"] == "stream":
            texts.append(f"[{o['name']}]\n{joined(o['text'])}")
        for mime, value in o.get("data", {}).items():
            text = joined(value) if mime.startswith("text/") else f"{len(value)} long"
            texts.append(f"[{mime}]\n{text}")
    return "\n".join(texts)


@each_notebook
def test_nbval(path):
    results = nbval(path, REPORTS)
    page = REPORTS / f"{path.stem}.html"
    page.unlink(missing_ok=True)
    if any(r["failed"] for r in results):
        failed = write_failure_page(path, results, page)
        pytest.fail(f"{path.name} differs; see {page.relative_to(ROOT)}\n" + "\n".join(failed))
    nb = notebook_files.read(path)
    for exercise, (_, check) in exercises(nb).items():
        text = said(results[code_cells(nb).index(check)]["outputs"])
        assert "not tried yet" in text.splitlines()[0], f"untouched {exercise}: {text}"


# --- exercises


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


# --- nbval goes red for what matters, and only for that


def test_planted_faults_in_a_real_notebook(tmp_path):
    """A changed output and a cell that raises, in a copy: these two cells turn red, and no other."""
    path = NOTEBOOKS[1]
    nb = notebook_files.read(path)
    assert compared(nb), f"{path.name} has no compared cell"
    changed = compared(nb)[0]
    changed["outputs"] = toys.code("", prints="(1, 2, 3)")["outputs"]
    nb["cells"].append(toys.code("raise ValueError('planted')"))
    nb = notebook_files.tidy(nb)
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    results = nbval(toys.write(tmp_path / path.name, nb), tmp_path)
    assert [r["cell"] for r in results if r["failed"]] == [
        [c["id"] for c in code_cells(nb)].index(changed["id"]),
        len(code_cells(nb)) - 1,
    ]


def run_toy(tmp_path, cells: dict) -> dict[str, dict]:
    """nbval on a toy with these cells after the parameters: the result of each."""
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    nb = toys.notebook(toys.parameters())
    nb["cells"] += list(cells.values())
    _, *results = nbval(toys.write(tmp_path / "00_toy.ipynb", nb), tmp_path / "reports")
    return dict(zip(cells, results, strict=True))


def displays(now: dict, before: dict) -> dict:
    """A code cell that displays `now`, by mime type, and once displayed `before`."""
    cell = toys.code(f"from IPython.display import display\ndisplay({now}, raw=True)")
    cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": before}]
    return cell


def test_what_turns_red(tmp_path):
    cells = {
        "shape": toys.code("print((4, 128))", prints="(4, 64)"),
        "dtype": toys.code("'float32'", prints="'float16'"),
        "missing output": toys.code("pass", prints="True"),
        "new output": toys.code("print(True)"),
        "html": displays({"text/html": "<b>1</b>", "text/plain": "1"}, {"text/html": "<b>2</b>", "text/plain": "1"}),
        "text": toys.code("print('<b>', 1)", prints="<b> 2"),
        "raises": toys.code("1/0"),
    }
    results = run_toy(tmp_path, cells)
    assert {name for name, r in results.items() if r["failed"]} == set(cells)

    page = tmp_path / "page.html"
    lines = write_failure_page(tmp_path / "00_toy.ipynb", list(results.values()), page)
    assert lines[0].startswith("cell 2 (In [") and lines[0].endswith("print((4, 128))") and len(lines) == len(cells)
    text = page.read_text()
    assert "[stdout]\n(4, 64)" in text and "[stdout]\n(4, 128)" in text
    assert "&lt;b&gt; 2" in text and "<b>" not in text


def test_what_stays_green(tmp_path):
    warned = toys.code("print(1)", prints="1")
    warned["outputs"].append({"output_type": "stream", "name": "stderr", "text": "UserWarning: old\n"})
    cells = {
        "a new warning": toys.code("import sys\nprint(1)\nprint('Warning', file=sys.stderr)", prints="1"),
        "a warning that is gone": warned,
        "figure size": displays(
            {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 600x400 with 2 Axes>"},
            {"image/png": "iVBORw0KAAA=", "text/plain": "<Figure size 640x480 with 1 Axes>"},
        ),
        "time": toys.code("import time\nprint(time.time())", "nbval-ignore-output", prints="0.1"),
        "error on purpose": toys.code("1/0", "raises-exception", "nbval-ignore-output"),
    }
    assert {name for name, r in run_toy(tmp_path, cells).items() if r["failed"]} == set()


@pytest.mark.parametrize("gpu", [False, True], ids=["without a GPU", "with a GPU"])
def test_gpu_cells_are_compared_on_a_gpu_only(tmp_path, monkeypatch, gpu):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\n" + ("echo 'GPU 0: NVIDIA Fake (UUID: GPU-0)'\n" if gpu else "exit 9\n"))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    cells = {n: toys.code("print('kernels', 1)", "nbval-gpu", prints=f"kernels {n}") for n in (1, 2)}
    assert {n: r["failed"] for n, r in run_toy(tmp_path, cells).items()} == {1: False, 2: gpu}
