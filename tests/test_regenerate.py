"""Regeneration on toy notebooks: what is right is put in place whole, and nothing else touches a notebook."""

import ast
import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

import toy_notebooks as toys
from attnlab import cli, files, notebook_files, records, regenerate
from test_course import attnlab, contents, interrupted, wait_for

pytestmark = pytest.mark.xdist_group("regenerate")

ENV = {"device": "NVIDIA Test 1", "kind": "cpu", "jax": "0.9.2"}


def record(name: str, env=ENV) -> str:
    """A cell that leaves one record, as a notebook of the course does."""
    return (
        "import os, pathlib\nfrom attnlab import records\n"
        f"finding = records.Finding(name='repeats', value=repeats, notebook={name!r}, env={env})\n"
        f"records.Records([finding]).write(pathlib.Path(os.environ['ATTNLAB_RESULTS']) / '{name}.jsonl')"
    )


PARAMETERS = "# How often.\nrepeats = 5  # times\nname = 'µ'; lengths = (1,\n  2)"


def write(folder, name="00_one", *cells: str, parameters=PARAMETERS) -> pathlib.Path:
    """A toy notebook with an old output, whose last cell leaves a record."""
    shown = toys.code("import sys\nprint('repeats', repeats)\nprint('careful', file=sys.stderr)", prints="old")
    nb = toys.notebook(toys.parameters(parameters), shown, *map(toys.code, cells), toys.code(record(name)))
    return toys.write(pathlib.Path(folder) / f"{name}.ipynb", nb)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with its own folder for temporary files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(regenerate.tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(regenerate.tempfile, "tempdir", None)


def run(*arguments) -> int:
    return cli.main(["regenerate", *map(str, arguments)])


def printed(path) -> str:
    return "".join(o.get("text", [""])[0] for c in toys.read(path)["cells"] for o in c.get("outputs", []))


def test_what_is_right_is_put_in_place_in_canonical_form(here, capsys):
    path = write("notebooks")
    os.mkdir("notebooks/results")
    old = [records.Finding(name="repeats", value=v, notebook=n, env=ENV) for n, v in (("00_one", 1), ("01_two", 2))]
    records.Records(old).write("notebooks/results/nvidia-test-1.jsonl")
    assert run() == 0
    assert notebook_files.check(path) == []  # canonical: no times, no stderr, no injected cell
    text = path.read_text()
    assert "repeats 5" in printed(path) and "old" not in printed(path)
    assert "careful\\n" not in text.replace("print('careful'", "") and "papermill" not in text
    saved = records.load("notebooks/results")
    assert [(r.notebook, r.value) for r in saved] == [("00_one", 5), ("01_two", 2)]  # the other's stay
    said = capsys.readouterr().out
    assert "1 of 1 notebooks regenerated" in said and "What changed" in said
    assert records.load("build/before")[0].value == 1
    assert os.listdir("tmp") == [] and sorted(os.listdir("notebooks")) == ["00_one.ipynb", "results"]


def test_parameters_stand_in_the_notebook_whose_outputs_are_of_them(here):
    path = write("notebooks")
    assert run("-p", "repeats=7", "-p", "lengths=(3,)") == 0
    cell = notebook_files.source(notebook_files.code_cells(toys.read(path))[0])
    assert cell == "# How often.\nrepeats = 7  # times\nname = 'µ'; lengths = [3]"
    assert "repeats 7" in printed(path) and notebook_files.check(path) == []
    assert records.load("notebooks/results").finding("repeats") == 7


@pytest.mark.parametrize("text", ["a = 1", "é = 'ü'; a = (1,\n 2) # µ\nb = a", "b, c = 1, 2\na = d = {\n'x': 1}\n"])
def test_only_the_value_of_an_assignment_changes(text):
    new = regenerate.with_values(text, {"a": None})
    assert [ast.unparse(n.targets[0]) for n in ast.parse(new).body] == [
        ast.unparse(n.targets[0]) for n in ast.parse(text).body
    ]
    scope = {}
    exec(new, scope)
    assert scope["a"] is None
    assert "#" not in text or new.split("#")[1] == text.split("#")[1]


def test_out_leaves_the_notebooks_alone(here):
    write("notebooks")
    before = contents(here / "notebooks")
    assert run("--out", "new", "-p", "repeats=2") == 0
    assert contents(here / "notebooks") == before
    assert "repeats 2" in printed("new/00_one.ipynb") and notebook_files.check("new/00_one.ipynb") == []
    assert records.load("new/results").finding("repeats") == 2


def test_a_dry_run_says_what_would_be_done_and_does_nothing(here, capsys):
    write("notebooks")
    write("notebooks", "01_two")
    before = contents(here / "notebooks")
    assert run("--dry-run", "1", "-p", "repeats=3") == 0
    said = capsys.readouterr().out
    assert "01_two replaces notebooks/01_two.ipynb, with repeats=3" in said and "00_one" not in said
    assert "notebooks/results/DEVICE.jsonl" in said and "Nothing was changed" in said
    assert contents(here / "notebooks") == before and sorted(os.listdir(here)) == ["notebooks", "tmp"]


def test_a_failure_leaves_the_notebook_and_keeps_what_happened(here, capsys):
    bad = write("notebooks", "00_one", "raise ValueError('why\\nso')")
    good = write("notebooks", "01_two")
    before = bad.read_bytes()
    assert run() == 1
    said = capsys.readouterr().out
    assert bad.read_bytes() == before and "repeats 5" in printed(good)
    assert "00_one failed in cell 3 of 4: ValueError: why so; the failed run is build/failed/00_one.ipynb" in said
    assert "1 of 2 notebooks regenerated" in said
    assert "why\\n" in pathlib.Path("build/failed/00_one.ipynb").read_text()
    assert [r.notebook for r in records.load("notebooks/results")] == ["01_two"]
    assert os.listdir("tmp") == []


@pytest.mark.parametrize(
    "cell, words",
    [
        ("import os\nos.kill(os.getpid(), 9)", "the kernel died"),
        ("import time\ntime.sleep(100)", "it took longer than 2 s, the time limit of a cell"),
        ("import tempfile\nprint(tempfile.mkdtemp(dir='/tmp'))", "an output names a path of the machine: /tmp/"),
    ],
    ids=["killed", "too long", "a path of the machine"],
)
def test_what_else_fails_is_noticed_within_seconds(here, capsys, cell, words):
    path = write("notebooks", "00_one", cell)
    before, began = path.read_bytes(), time.monotonic()
    assert run("--cell-seconds", "2") == 1
    assert time.monotonic() - began < 20
    said = capsys.readouterr().out
    assert words in said and "build/failed/00_one.ipynb" in said and pathlib.Path("build/failed/00_one.ipynb").exists()
    assert path.read_bytes() == before and not pathlib.Path("notebooks/results").exists()


def started(folder, *arguments):
    command = [sys.executable, "-m", "attnlab", "regenerate", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_and_other_ends_are_clean(here, ended_by):
    wait = "import os, pathlib, time\npathlib.Path(os.environ['TMPDIR'], 'pid').write_text(str(os.getpid()))\n"
    path, pid = write("notebooks", "00_one", wait + "time.sleep(60)"), here / "tmp" / "pid"
    before = path.read_bytes()
    running = started(here)
    wait_for(lambda: running.poll() is not None or pid.exists() and pid.read_text(), 60)
    said, errors = interrupted(running, ended_by)
    assert (running.returncode, errors) == (130, "")
    assert "stopped: 00_one in cell 3 of 4, and is as it was" in said
    assert path.read_bytes() == before and os.listdir("notebooks") == ["00_one.ipynb"]
    assert os.listdir("tmp") == ["pid"]
    wait_for(lambda: not os.path.exists(f"/proc/{pid.read_text()}/cmdline"), 10)


def test_what_a_killed_run_left_is_removed(here):
    write("notebooks")
    left = here / "notebooks" / f".00_one.ipynb.1{files.NEW}"
    left.write_text("half")
    assert run() == 0 and not left.exists()


def test_a_second_run_on_the_same_notebooks_is_refused_and_disturbs_nothing(here, capsys):
    wait = "import os, pathlib, time\nopen(os.environ['TMPDIR'] + '/up', 'w')\n"
    wait += "while not pathlib.Path(os.environ['TMPDIR'], 'go').exists(): time.sleep(0.05)"
    path = write("notebooks", "00_one", wait)
    running = started(here)
    wait_for(lambda: running.poll() is not None or (here / "tmp" / "up").exists(), 60)
    before = path.read_bytes()
    assert run() == 2
    assert "another regeneration of notebooks is running" in capsys.readouterr().err and path.read_bytes() == before
    (here / "tmp" / "go").touch()
    assert running.wait(60) == 0 and "repeats 5" in printed(path)
    assert run() == 0  # the lock went with its process


def test_recorded_compile_times_are_of_compilations(here, monkeypatch):
    for name in ("ATTNLAB_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, str(here / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    compiled = (
        "import attnlab as lab\nlab.start('00_one')\n"
        "print('compiled', lab.timing.compile_timed(lambda x: x * 2 + 1, 1.0)[1] is not None)"
    )
    for _ in range(2):  # the second run would find it
        path = write("notebooks", "00_one", compiled)
        assert run() == 0 and "compiled True" in printed(path)
    assert not (here / "cache").exists()


def test_two_bars_on_a_terminal(here):
    write("notebooks")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with contextlib.redirect_stdout(terminal):
        assert run() == 0
    said = terminal.getvalue()
    assert "notebook 1 of 1: 00_one" in said and "cell 3 of 3" in said and "00_one  done" in said


# --- bad input


def test_an_unknown_parameter_is_answered_with_the_nearest(here, capsys):
    write("notebooks")
    assert run("-p", "repeat=1") == 2
    assert "no parameter 'repeat' in 00_one; did you mean repeats?" in capsys.readouterr().err


def change(path, edit) -> None:
    nb = toys.read(path)
    edit(nb)
    path.write_text(json.dumps(nb))


def as_r(nb):
    nb["metadata"]["kernelspec"] = {"name": "ir", "display_name": "R", "language": "R"}


BAD = {
    "no JSON": (lambda p: p.write_text("{"), "not a notebook, the file is not JSON"),
    "no notebook": (lambda p: p.write_text("[]"), "not a notebook of format 4"),
    "another language": (lambda p: change(p, as_r), "its kernel is R (R), and the course is in Python"),
    "two cells": (
        lambda p: change(p, lambda nb: nb["cells"][1]["metadata"].update(tags=["parameters"])),
        "2 cells tagged parameters, wanted one",
    ),
    "no cell": (lambda p: change(p, lambda nb: nb["cells"].pop(0)), "0 cells tagged parameters, wanted one"),
}


@pytest.mark.parametrize("spoil, words", BAD.values(), ids=BAD)
def test_a_bad_notebook_is_named_before_anything_runs(here, capsys, spoil, words):
    write("notebooks")
    bad = write("notebooks", "01_two")
    spoil(bad)
    before = contents(here / "notebooks")
    assert run() == 1
    err = capsys.readouterr().err
    assert words in err and "01_two.ipynb" in err and err.count("\n") == 1
    assert contents(here / "notebooks") == before


def test_a_kernel_of_another_name_is_this_python(here):
    path = write("notebooks")
    change(path, lambda nb: nb["metadata"].update(kernelspec={"name": "conda-x", "language": "python"}))
    assert run() == 0
    assert toys.read(path)["metadata"]["kernelspec"] == notebook_files.KERNELSPEC


def test_outputs_of_a_gpu_are_not_replaced_by_those_of_a_cpu(here, capsys):
    path = write("notebooks")
    gpu_records()
    before = path.read_bytes()
    assert run() == 2
    assert "00_one: the outputs are of an NVIDIA H200" in capsys.readouterr().err and path.read_bytes() == before
    assert run("--dry-run") == 2  # the plan, and why it would be refused
    said = capsys.readouterr()
    assert "Would execute 1 notebook on the CPU" in said.out and "here they would be of a CPU" in said.err
    assert run("--out", "new") == 0


def gpu_records(folder="notebooks/results"):
    """What a run of 00_one on a GPU left."""
    os.makedirs(folder)
    gpu = {"device": "NVIDIA H200", "kind": "gpu"}
    records.Records([records.Finding(name="n", value=1, notebook="00_one", env=gpu)]).write(
        f"{folder}/nvidia-h200.jsonl"
    )


def test_nor_where_jax_computes_on_the_cpu_beside_a_gpu(here, capsys, monkeypatch):
    fake = here / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'NVIDIA H200'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    path = write("notebooks")
    gpu_records()
    before = path.read_bytes()
    assert run() == 1
    said = capsys.readouterr().out
    assert "the outputs are of an NVIDIA H200, and here they would be of a CPU" in said and "records:" not in said
    assert path.read_bytes() == before and os.listdir("notebooks/results") == ["nvidia-h200.jsonl"]


def test_the_notebooks_own_folder_as_out_is_in_place(here, capsys):
    write("notebooks")
    gpu_records()
    assert run("--out", "notebooks") == 2 and "the outputs are of an NVIDIA H200" in capsys.readouterr().err


def test_what_was_saved_while_it_ran_stays(here, capsys):
    edit = "import pathlib\npath = pathlib.Path({!r})\npath.write_text(path.read_text().replace('How often', 'Mine'))"
    path = write("notebooks", "00_one", edit.format(str(here / "notebooks" / "00_one.ipynb")))
    assert run() == 1
    assert "was changed while it ran, and stays as it is now" in capsys.readouterr().out
    assert "Mine" in path.read_text() and "old" in printed(path) and not os.path.exists("notebooks/results")


def test_ctrl_c_while_files_are_replaced_comes_after(here, capsys, monkeypatch):
    path, write_all = write("notebooks"), files.write_all

    def interrupted(texts):
        os.kill(os.getpid(), signal.SIGINT)
        write_all(texts)

    monkeypatch.setattr(files, "write_all", interrupted)
    assert run() == 130
    assert "stopped: 00_one and is regenerated" in capsys.readouterr().out
    assert "repeats 5" in printed(path) and records.load("notebooks/results").finding("repeats") == 5


@pytest.mark.parametrize("line", ['{"schema": 99, "kind": "Finding"}', "{", '{"schema": 1, "kind": "Finding", "x": 1}'])
def test_records_that_can_not_be_read_are_named_before_anything_runs(here, capsys, line):
    path, saved = write("notebooks"), here / "notebooks" / "results" / "nvidia-test-1.jsonl"
    saved.parent.mkdir()
    saved.write_text(line + "\n")
    before = path.read_bytes()
    for arguments in ([], ["--dry-run"]):
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert "nvidia-test-1.jsonl, line 1" in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert saved.read_text() == line + "\n" and path.read_bytes() == before
    assert run("--out", "new") == 0  # they are not in its way


def test_nan_among_the_results_is_kept_as_such(here):
    env = ENV | {"x": 1}
    cell = record("00_one", env).replace("value=repeats", "value=float('nan')")
    toys.write("notebooks/00_one.ipynb", toys.notebook(toys.parameters(), toys.code(cell)))
    assert run() == 0
    value = records.load("notebooks/results").finding("repeats")
    assert value != value and "NaN" not in pathlib.Path("notebooks/results/nvidia-test-1.jsonl").read_text()


# --- places that take no file


def mounted(folder, options: str, script: str):
    """Run a shell script where `folder` is a small file system of its own. Only root can do that."""
    mount = f"mount -t tmpfs -o {options} none {folder}"
    command = ["unshare", "--mount", "sh", "-ec", f"{mount}\n{script}"]
    if subprocess.run(["unshare", "--mount", "sh", "-ec", mount], capture_output=True).returncode:
        pytest.skip("this needs root and a system that lets it mount")
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder.parent, timeout=120)


def on_small_disk(here, cell, size="256k", full=True):
    """Regenerate a notebook that lies on a small disk: (result, the notebook before, and after)."""
    write("original", "00_one", cell)
    (here / "notebooks").mkdir()
    fill = "dd if=/dev/zero of=notebooks/fill bs=1k count=150 2>/dev/null" if full else ""
    script = (
        f"cp original/00_one.ipynb notebooks; {fill}\nset +e\n{sys.executable} -m attnlab regenerate; status=$?\n"
        "cp notebooks/00_one.ipynb after.ipynb; ls -A notebooks > after.txt; exit $status"
    )
    done = mounted(here / "notebooks", f"size={size}", script)
    before, after = (pathlib.Path(p).read_bytes() for p in ("original/00_one.ipynb", "after.ipynb"))
    assert before == after
    return done, pathlib.Path("after.txt").read_text().split()


def test_a_disk_that_is_too_small_is_said_before_anything_runs(here):
    done, left = on_small_disk(here, "open('ran', 'w')")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "may be needed: free some, or name a folder on another disk" in done.stderr
    assert sorted(left) == ["00_one.ipynb", "fill"] and done.stdout == ""


def test_a_disk_that_fills_while_it_runs_costs_nothing(here):
    fill = (
        f"import os\nfile = os.open({str(here / 'notebooks' / 'fill')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "try:\n    while os.write(file, bytes(1000)): pass\nexcept OSError: print('full')"
    )
    done, left = on_small_disk(here, fill, size="2m", full=False)
    assert done.returncode == 1 and done.stderr == ""
    assert "it could not be put in place, and nothing was replaced" in done.stdout and "records:" not in done.stdout
    assert "No space left on device" in done.stdout and "the failed run is build/failed/00_one.ipynb" in done.stdout
    assert pathlib.Path("build/failed/00_one.ipynb").exists() and sorted(left) == ["00_one.ipynb", "fill"]


def test_a_read_only_folder_is_named_before_anything_runs(here):
    path = write("notebooks")
    (here / "kept").mkdir()
    done = mounted(here / "kept", "size=1m,ro", f"{sys.executable} -m attnlab regenerate --out kept/new")
    assert done.returncode == 1 and "kept is read-only for you: name a folder that takes files" in done.stderr
    assert done.stderr.count("\n") == 1 and "old" in printed(path)


def test_a_place_that_is_a_file_is_named(here, capsys):
    write("notebooks")
    pathlib.Path("taken").write_text("mine")
    assert run("--out", "taken") == 1
    assert "taken is no folder" in capsys.readouterr().err and pathlib.Path("taken").read_text() == "mine"


def test_all_files_are_written_or_none(tmp_path):
    one, two = tmp_path / "one", tmp_path / "missing" / "two"
    one.write_text("old")
    (tmp_path / "missing").write_text("a file where a folder is wanted")
    with pytest.raises(OSError):
        files.write_all({one: "new", two: "new"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):  # one is in place already when the other can't be
        files.write_all({one: "new", tmp_path / "four": "new", tmp_path / "folder": "new"})
    assert one.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["folder", "missing", "one"]
    one.chmod(0o600)
    files.write_all({one: "new", tmp_path / "three": "3"})
    assert (one.read_text(), one.stat().st_mode & 0o777) == ("new", 0o600)


def test_a_run_over_ssh_needs_no_terminal(here):
    write("notebooks")
    done = attnlab("regenerate", cwd=here, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and done.stdout.startswith("[1/1] 00_one …\n[1/1] 00_one  done")


def test_readme_shows_what_was_recorded(here, monkeypatch):
    """The figure and the table of a checkout follow its records."""
    root = pathlib.Path(regenerate.__file__).parents[2]
    results = here / "src" / "attnlab" / "data" / "results"
    results.mkdir(parents=True)
    shutil.copy(root / "src/attnlab/data/results/nvidia-h200.jsonl", results)
    readme = (root / "README.md").read_text()
    (here / "README.md").write_text(readme.replace("│", "|").replace("µs  cupti", "µs  wrong"))
    monkeypatch.setattr(regenerate, "RESULTS", results)
    regenerate._redraw()
    assert (here / "README.md").read_text() == readme
    assert (results / "nvidia-h200-length.png").stat().st_size > 1000
