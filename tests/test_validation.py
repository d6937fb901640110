"""`make validate` goes red for what matters, cell by cell, and for nothing that legitimately differs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from xml.etree import ElementTree

import psutil
import pytest

import toy_notebooks as toys
from attnlab import notebook_files, records, validation
from attnlab.notebook_files import code_cells, joined, source
from attnlab.validation import claim_faults, validate
from test_course import wait_for
from test_structure import NOTEBOOKS, ROOT, start_cell

QUICK = NOTEBOOKS[1]


def warns(issuer: str, words: str, kind: str = "DeprecationWarning") -> str:
    """The source of a cell in which a module of that name warns."""
    return f'exec("import warnings; warnings.warn({words!r}, {kind})", {{"__name__": "{issuer}"}})'


def beside(folder, nb: dict, name: str = "00_toy"):
    """A notebook in `folder`, with the course's conftest.py beside it."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "notebooks" / "conftest.py", folder)
    return toys.write(folder / f"{name}.ipynb", nb)


def cell_with(nb: dict, text: str) -> dict:
    return next(c for c in code_cells(nb) if text in source(c))


def replace(outputs: list[dict], old: str, new: str) -> None:
    """Change a word in every form of every output, at its first place in each."""
    for o in outputs:
        for holder, key in [(o, "text")] * ("text" in o) + [(o["data"], mime) for mime in o.get("data", {})]:
            text = joined(holder[key])
            holder[key] = text.replace(old, new, 1).splitlines(True)


def test_planted_faults_in_a_real_notebook(tmp_path):
    """Each in a copy of a real notebook, all in one run: its own cell turns red, and no other."""
    nb = notebook_files.read(QUICK)
    planted = {}

    def plant(text, words, old="", new=""):
        cell = cell_with(nb, text)
        if old:
            before = json.dumps(cell["outputs"])
            replace(cell["outputs"], old, new)
            assert json.dumps(cell["outputs"]) != before, f"nothing planted in {text}"
        else:
            cell["outputs"] = []
        planted[nb["cells"].index(cell) + 1] = words

    plant('print("output", out.shape', "outputs differ", "(4, 128, 8, 64)", "(4, 64, 8, 64)")  # a shape
    plant('title="Attention inputs"', "outputs differ", "float32", "bfloat16")  # a dtype
    plant('print("all on the default device', "outputs differ")  # an output that nbval compares, stripped
    plant('lab.show_timings([row], "Naive', "no committed output")  # one that it does not
    plant('lab.claim("weights_grow_with_T2"', "by the ledger", "holds", "fails")  # a verdict
    plant("lab.summary()", "by the ledger", "holds", "fails")
    plant('"more_than_three_kernels"', "shows 0 tables of claims")
    nb["cells"].append(toys.code(warns("jax._src.old", "planted: use the new one")))
    planted[len(nb["cells"])] = "DeprecationWarning by jax._src.old, line 1"
    nb["cells"].append(toys.code("raise ValueError('planted')"))
    planted[len(nb["cells"])] = "ValueError: planted"
    nb["cells"].append(toys.code("import os\nos.kill(os.getpid(), 9)"))
    planted[len(nb["cells"])] = "the kernel died in this cell"
    nb["cells"].append(toys.code("print('not reached')", prints="not reached"))

    found = validate(beside(tmp_path, notebook_files.tidy(nb), QUICK.stem), tmp_path / "out")
    left = list(found.faults)
    for number, words in planted.items():
        mine = [f for f in left if f"cell {number} " in f or f"cell {number}:" in f]
        assert mine and any(words in f for f in mine), f"cell {number}, {words}: {found.faults}"
        left = [f for f in left if f not in mine]
    assert left == []
    page = (tmp_path / "out" / f"{QUICK.stem}.html").read_text(encoding="utf-8")
    assert "planted: use the new one" in page and "[stdout]\noutput (4, 64, 8, 64)" in page
    junit = ElementTree.parse(tmp_path / "out" / f"{QUICK.stem}.xml")
    failed = [case for case in junit.iter("testcase") if case.find("failure") is not None]
    assert len(failed) == len(found.faults)


def test_a_dead_kernel_is_seen_at_once(tmp_path):
    nb = toys.notebook(toys.parameters(), toys.code("import os\nos.kill(os.getpid(), 9)"), toys.code("1", prints="2"))
    began = time.perf_counter()
    found = validate(beside(tmp_path, nb), tmp_path / "out")
    assert time.perf_counter() - began < validation.CELL_SECONDS / 2
    assert [f.split(",")[0] for f in found.faults] == ["cell 2 (In [2]"] and "the kernel died" in found.faults[0]


def test_a_kernel_that_dies_between_two_cells_is_one_fault(tmp_path):
    later = "import os, threading\nthreading.Timer(0.2, os._exit, [9]).start()"
    waits = toys.code("import time\ntime.sleep(20)")
    nb = toys.notebook(toys.parameters(), toys.code(later), waits, toys.code("print(1)", prints="1"))
    (fault,) = validate(beside(tmp_path, nb), tmp_path / "out").faults
    assert fault.startswith("cell 3 ") and "the kernel died" in fault


def test_a_missing_parameters_cell_is_red(tmp_path):
    nb = toys.notebook(toys.code("repeats = 5"))
    found = validate(beside(tmp_path, nb), tmp_path / "out")
    assert [f for f in found.faults if "0 cells tagged parameters" in f] == found.faults


def run_toy(tmp_path, cells: dict) -> tuple[dict[str, list[str]], validation.Validation]:
    """Validate a toy with these cells after the parameters: the faults of each by its name."""
    nb = toys.notebook(toys.parameters())
    nb["cells"] += list(cells.values())
    nb = notebook_files.tidy(nb)
    found = validate(beside(tmp_path, nb), tmp_path / "out")
    of_cells = {name: [f for f in found.faults if f"cell {n} " in f] for n, name in enumerate(cells, 2)}
    assert sum(map(len, of_cells.values())) == len(found.faults), found.faults
    return of_cells, found


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
        "stripped": toys.code("print(1.5)", "nbval-ignore-output"),
        "raises": toys.code("1/0"),
        "jaxlib": toys.code(warns("jaxlib.x", "gone in March", "FutureWarning"), "nbval-ignore-output"),
        "flax, hidden by a filter": toys.code(
            "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    "
            + warns("flax", "soon", "PendingDeprecationWarning")
        ),
    }
    faults, found = run_toy(tmp_path, cells)
    assert {name for name, lines in faults.items() if len(lines) == 1} == set(cells)
    assert "FutureWarning by jaxlib.x" in faults["jaxlib"][0] and "gone in March" in faults["jaxlib"][0]
    page = (tmp_path / "out" / "00_toy.html").read_text(encoding="utf-8")
    assert "[stdout]\n(4, 64)" in page and "[stdout]\n(4, 128)" in page
    assert "&lt;b&gt; 2" in page and "<b>" not in page


def test_what_stays_green(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "EXCEPTIONS", {"^known to go": "a reason"})
    cells = {
        "a new warning": toys.code("import sys\nprint(1)\nprint('Warning', file=sys.stderr)", prints="1"),
        "a warning alone": toys.code("import sys\nprint('Warning', file=sys.stderr)"),
        "figure size": displays(
            {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure size 600x400 with 2 Axes>"},
            {"image/png": "iVBORw0KAAA=", "text/plain": "<Figure size 640x480 with 1 Axes>"},
        ),
        "time": toys.code("import time\nprint(time.time())", "nbval-ignore-output", prints="0.1"),
        "progress, cleared": toys.code(
            "from IPython.display import display\nhandle = display({}, raw=True, display_id=True)\n"
            "handle.update({'text/plain': '1/2'}, raw=True)\nhandle.update({}, raw=True)", "nbval-ignore-output",
        ),
        "error on purpose": toys.code("1/0", "raises-exception", "nbval-ignore-output", prints=" "),
        "deprecated by others": toys.code(warns("matplotlib.pyplot", "old")),
        "another warning of JAX": toys.code(warns("jax", "slow", "UserWarning")),
        "an exception": toys.code(warns("jax", "known to go")),
        "names and filters are untouched": toys.code(
            "import warnings\nwith warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n"
            "    warnings.warn('here', DeprecationWarning)\nprint(said[0].filename == __import__('sys')"
            "._getframe().f_code.co_filename, 'record' in dir())", prints="True False",
        ),
    }  # fmt: skip
    faults, found = run_toy(tmp_path, cells)
    assert found.faults == [] and not (tmp_path / "out" / "00_toy.html").exists()
    assert f"{found}".startswith("00_toy  as committed, 3 of 11 cells compared")


def test_a_committed_warning_is_the_files_fault_and_not_the_runs(tmp_path):
    nb = toys.notebook(toys.parameters(), toys.code("print(1)", prints="1"))
    nb["cells"][1]["outputs"].append({"output_type": "stream", "name": "stderr", "text": "UserWarning: old\n"})
    (fault,) = validate(beside(tmp_path, nb), tmp_path / "out").faults
    assert fault.endswith("cell 2: not canonical: outputs; `make format` repairs it")


def test_a_real_deprecation_is_followed_to_the_line_that_led_to_it(tmp_path):
    """The one that JAX itself would issue: through its own machinery, in a module that a cell calls."""
    cell = toys.code("import jax._src.deprecations as d\nd.register('toy')\nd.warn('toy', 'toy goes', stacklevel=1)")
    faults, _ = run_toy(tmp_path, {"jax": cell})
    (line,) = faults["jax"]
    assert "DeprecationWarning by jax._src.deprecations" in line and "from __main__, line 3" in line


def deprecates(module: str, by: str, what: str) -> str:
    """The source of a cell in which a module of that name marks `what` as deprecated, and line 3 calls it."""
    text = f"import {by} as by\n@by.deprecated('goes soon')\n{what}"
    return f"there = {{'__name__': {module!r}}}\nexec({text!r}, there)\nit = there['it']()"


def test_what_is_marked_as_deprecated_is_seen_where_it_is_called(tmp_path):
    markers = ["typing_extensions"] + ["warnings"] * hasattr(warnings, "deprecated")
    kinds = {"function": "def it(): return 1", "class": "class it: pass"}
    explicit = "import warnings\n\nwarnings.warn_explicit('goes soon', {}, 'x.py', 7, {!r})"
    cells = {
        f"{module}, {kind}, {by}": toys.code(deprecates(module, by, what))
        for kind, what in kinds.items()
        for by in markers
        for module in ("jax.nn", "numpy")
    }
    cells["jax.nn, explicit"] = toys.code(explicit.format("FutureWarning", "jax.nn"))
    cells["numpy, explicit"] = toys.code(explicit.format("FutureWarning", "numpy"))
    cells["no deprecation"] = toys.code(explicit.format("UserWarning", "jax.nn"))
    faults, _ = run_toy(tmp_path, cells)
    assert {name for name, lines in faults.items() if lines} == {name for name in cells if "jax.nn" in name}
    lines = [line for mine in faults.values() for line in mine]
    assert all("Warning by jax.nn, from __main__, line 3: goes soon" in line for line in lines), lines


@pytest.mark.parametrize("gpu", [False, True], ids=["without a GPU", "with a GPU"])
def test_gpu_cells_are_compared_on_a_gpu_only(tmp_path, monkeypatch, gpu):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\n" + ("echo 'GPU 0: NVIDIA Fake (UUID: GPU-0)'\n" if gpu else "exit 9\n"))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    cells = {n: toys.code("print('kernels', 1)", "nbval-gpu", prints=f"kernels {n}") for n in ("1", "2")}
    faults, found = run_toy(tmp_path / "toy", cells)
    assert {n: bool(lines) for n, lines in faults.items()} == {"1": False, "2": gpu}
    assert sum(c["compared"] for c in found.cells) == 2 * gpu


# --- claims, without a run


def claims_of(cell_text: str, old: str, new: str) -> list[str]:
    nb = notebook_files.read(QUICK)
    replace(cell_with(nb, cell_text)["outputs"], old, new)
    return claim_faults(nb, QUICK.stem)


def test_an_edited_claim_is_red_with_both_readings():
    assert claim_faults(notebook_files.read(QUICK), QUICK.stem) == []
    for old, new in (("holds", "fails"), ("kernels", "kernals"), ("launches", "starts")):
        (fault,) = claims_of('lab.claim("more_than_three_kernels"', old, new)
        assert fault.startswith("cell 23: ") and old in fault and new in fault


def test_how_a_table_is_drawn_is_no_matter_of_claims():
    assert claims_of("lab.summary()", "padding:4px", "padding:9px") == []


def test_a_claim_that_the_ledger_lacks_is_red():
    nb = notebook_files.read(QUICK)
    cell_with(nb, 'lab.claim("naive_is_right")')["source"] = 'lab.claim("naive_is_wrong")'
    (fault,) = claim_faults(nb, QUICK.stem)
    assert fault.startswith("cell 13: ") and "naive_is_wrong" in fault


def test_claims_of_another_device_are_not_judged_by_the_saved_results(tmp_path):
    nb = notebook_files.read(QUICK)
    for cell in (start_cell(nb), cell_with(nb, "lab.summary()")):
        replace(cell["outputs"], "NVIDIA H200", "NVIDIA L4")
    assert claim_faults(nb, QUICK.stem) is None


def test_another_model_of_the_device_is_another_device():
    nb = notebook_files.read(QUICK)
    for cell in (start_cell(nb), cell_with(nb, "lab.summary()")):
        replace(cell["outputs"], "NVIDIA H200", "NVIDIA H200 NVL")
    assert claim_faults(nb, QUICK.stem) is None


@pytest.mark.parametrize("text", ["lab.start(", "lab.summary()"])
def test_a_notebook_that_names_two_devices_is_red(text):
    """Or else another name in the start would keep a flipped verdict from being looked at."""
    nb = notebook_files.read(QUICK)
    replace(cell_with(nb, text)["outputs"], "NVIDIA H200", "NVIDIA L4")
    (fault,) = claim_faults(nb, QUICK.stem)
    assert "NVIDIA H200" in fault and "NVIDIA L4" in fault
    start_cell(nb)["outputs"] = []
    (fault,) = claim_faults(nb, QUICK.stem)
    assert "started on no device" in fault


# --- the command


def test_saved_results_of_another_schema_end_it_before_anything_runs(tmp_path, monkeypatch):
    bad = tmp_path / "nvidia-h200.jsonl"
    bad.write_text('{"schema": 0}\n')
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(validation, "_run", None)  # no run can begin
    with pytest.raises(ValueError, match=f"^{bad}, line 1: a record of schema 0"):
        validation.main([notebook_files.describe(path) for path in NOTEBOOKS], tmp_path / "out")


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("to", [os.kill, os.killpg], ids=["the command", "its group, as a terminal does"])
def test_ctrl_c(tmp_path, to):
    """It ends what runs and starts nothing more: no queued notebook, and none for a second time."""
    began = f"import os, pathlib, time\n(pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch()"
    for n in range(validation.AT_ONCE + 2):
        nb = toys.notebook(toys.parameters(), toys.code(f"{began}\ntime.sleep(60)"))
        nb["cells"].insert(0, nb["cells"].pop())  # no cell has an outcome yet: nbval would get a second try
        beside(tmp_path / "notebooks", nb, f"0{n}_toy")

    def pids():
        return [int(file.stem) for file in tmp_path.glob("*.pid")]

    running = subprocess.Popen(
        [sys.executable, "-m", "attnlab", "validate"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: running.poll() is not None or len(pids()) == validation.AT_ONCE, 60)
    family = psutil.Process(running.pid).children(recursive=True)
    assert set(pids()) <= {process.pid for process in family}
    to(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=20)
    assert (running.returncode, errors) == (130, "attnlab: stopped\n")
    wait_for(lambda: not any(alive(process.pid) for process in family), 5)
    assert len(pids()) == validation.AT_ONCE


def test_the_command_goes_on_after_a_red_notebook(tmp_path, capsys):
    good = beside(tmp_path / "nbs", toys.notebook(toys.parameters(), toys.code("print(1)", prints="1")), "01_good")
    beside(tmp_path / "nbs", toys.notebook(toys.parameters(), toys.code("print(1)", prints="2")), "00_bad")
    chosen = notebook_files.course_notebooks(good.parent)
    bad_json = chosen[1].path.with_name("02_json.ipynb")
    bad_json.write_text("{")
    chosen.append(notebook_files.CourseNotebook(bad_json, "02_json", "02", "", 0, "", {}))
    assert validation.main(chosen, tmp_path / "out") == 1
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert any("01_good  as committed, 1 of 2 cells compared" in line for line in lines), said
    assert any("00_bad  1 red, 1 of 2 cells compared" in line for line in lines)
    assert any("02_json.ipynb: not a notebook, the file is not JSON" in line for line in lines)
    assert lines[-1].startswith("1 of 3 notebooks are as committed (") and lines[-1].endswith("; red: 00_bad, 02_json")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "00_bad.html", "00_bad.xml", "01_good.xml", "02_json.html", "02_json.xml",
    }  # fmt: skip


def test_green_notebooks_give_status_0(tmp_path):
    path = beside(tmp_path, toys.notebook(toys.parameters()))
    assert validation.main([notebook_files.describe(path)], tmp_path / "out") == 0


def test_a_notebook_that_takes_too_long_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "NOTEBOOK_SECONDS", 1)
    path = beside(tmp_path, toys.notebook(toys.parameters(), toys.code("import time\ntime.sleep(60)")))
    (fault,) = validate(path, tmp_path / "out").faults
    assert "stopped after 1 s" in fault


def test_a_run_that_comes_to_no_cell_gets_a_second_try(tmp_path):
    path = beside(tmp_path, toys.notebook(toys.parameters(), toys.code("print(1)", prints="1")))
    conftest, tried = tmp_path / "conftest.py", tmp_path / "tried"
    once = f"import os, sys\nif not os.path.exists({str(tried)!r}):\n    open({str(tried)!r}, 'w')\n    sys.exit(9)\n"
    conftest.write_text(f"{conftest.read_text()}\n{once}")
    assert validate(path, tmp_path / "out").faults == []
    conftest.write_text("import no_such_module")
    (fault,) = validate(path, tmp_path / "out").faults
    assert "nbval ended with status 4 after 0 cells" in fault and "no_such_module" in fault


def test_a_kernel_that_does_not_watch_for_deprecations_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(validation, "RECORDER", "1/0")
    (fault,) = validate(beside(tmp_path, toys.notebook(toys.parameters())), tmp_path / "out").faults
    assert "did not watch for deprecations" in fault


def test_a_notebook_without_the_courses_conftest_is_red_at_once(tmp_path):
    nb = toys.notebook(toys.parameters(), toys.code("print(1)", prints="1"))
    found = validate(toys.write(tmp_path / "00_toy.ipynb", nb), tmp_path / "out")
    assert len(found.faults) == 1 and "without a conftest.py beside it" in found.faults[0]
