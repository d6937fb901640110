"""The runner and the command line, on toy notebooks: refusals, failures, Ctrl-C, pages and the report."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

import toy_notebooks as toys
from attnlab import cli, course, notebook_files, pages, records

# One worker runs them all, so that the courses below are run once.
pytestmark = pytest.mark.xdist_group("course")

ENV = {"device": "NVIDIA Test 1", "jax": "0.9.2"}
RECORD = (
    "import os, pathlib\n"
    "from attnlab import records\n"
    f"finding = records.Finding(name='n', value=repeats, env={ENV})\n"
    "records.Records([finding]).write(pathlib.Path(os.environ['ATTNLAB_RESULTS']) / '00_one.jsonl')"
)


def attnlab(*arguments, env=(), **kwargs):
    """Run the command line as people do; text of both streams is kept."""
    command = [sys.executable, "-m", "attnlab", *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | dict(env)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **kwargs)


def write_course(folder):
    toy, code = toys.parameters, toys.code
    cells = {
        "00_one": [
            toys.markdown("# One\n\n$a^2$"), toy(), code("import sys\nsys.executable"),
            code("print('repeats', repeats, repr(name))"), code(RECORD),
            code("print('cache', os.environ.get('ATTNLAB_CACHE'))"),
        ],
        "01_two": [toy("size = None"), code("print(1)"), code("raise ValueError('why\\nlast line')"), code("'never'")],
        "02_three": [toys.markdown("# Three"), toy(), code("1/0", "raises-exception"), code("print('three')")],
        "03_four": [toy(), code("import os\nos.write(2, b'out of memory\\n')\nos.kill(os.getpid(), 9)")],
    }  # fmt: skip
    for name, mine in cells.items():
        toys.write(folder / f"{name}.ipynb", toys.notebook(*mine, title=name[3:] + " & more"))
    return folder


def contents(folder):
    return {p: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: (folder, what was printed, exit status, whether the notebooks stayed as they were)."""
    folder = tmp_path_factory.mktemp("course")
    notebooks = write_course(folder / "notebooks")
    # Another environment's kernel under our name, where Jupyter looks first.
    spec = folder / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "other", "language": "python"}))
    before = contents(notebooks)
    done = attnlab(
        "run", "--notebooks", notebooks, "-p", "repeats=7", "-p", "name=some words", cwd=folder,
        env={"JUPYTER_PATH": str(folder / "jupyter"), "JUPYTER_PREFER_ENV_PATH": "0"},
    )  # fmt: skip
    return folder / "build", done, contents(notebooks) == before


def outputs(path) -> str:
    return json.dumps([c.get("outputs") for c in toys.read(path)["cells"]], ensure_ascii=False)


def test_a_failing_notebook_stops_no_other_and_the_notebooks_are_only_read(finished):
    _, done, untouched = finished
    assert done.returncode == 1 and done.stderr == "" and untouched
    assert "[1/4] 00_one …\n[1/4] 00_one  done" in done.stdout and "02_three  done" in done.stdout
    assert "01_two failed in cell 3 of 4: ValueError: why last line" in done.stdout
    assert "03_four failed in cell 3 of 3: the kernel died" in done.stdout
    assert "its last words: out of memory" in done.stdout
    assert "2 of 4 notebooks done" in done.stdout and "build/index.html" in done.stdout


def test_a_copy_keeps_what_happened(finished):
    copies = finished[0] / "notebooks"
    one = outputs(copies / "00_one.ipynb")
    assert "repeats 7 'some words'" in one and sys.executable in one
    assert f"cache {(finished[0] / 'jax-cache').resolve()}" in one
    two = outputs(copies / "01_two.ipynb")
    assert "last line" in two and "never" not in two and "repeats" not in (copies / "01_two.ipynb").read_text()
    shown_on_purpose = (copies / "02_three.ipynb").read_text()
    assert "ZeroDivisionError" in shown_on_purpose and "papermill-error-cell-tag" not in shown_on_purpose


def test_pages_and_the_course_map(finished):
    out = finished[0]
    index = (out / "index.html").read_text()
    for words in ("00_one.html", "one &amp; more", "failed in cell 3 of 4", "NVIDIA Test 1", "light dark"):
        assert words in index, words
    three, one = (out / "02_three.html").read_text(), (out / "00_one.html").read_text()
    assert "<script" not in index + three + one and "(prefers-color-scheme: dark)" in three
    assert "http" not in one.split("<body")[1] and 'href="index.html"' in one
    assert "last line" in (out / "01_two.html").read_text()


def test_a_partial_run_keeps_the_rest_of_the_index_and_outlives_a_page(finished, tmp_path, monkeypatch, capsys):
    def breaks(*_):
        raise RuntimeError("no\ntemplate")

    out = shutil.copytree(finished[0], tmp_path / "build")
    everything = notebook_files.course_notebooks(finished[0].parent / "notebooks")
    monkeypatch.setattr(course, "write_page", breaks)
    assert course.run(course.choose(everything, ["2"]), out, course=everything) == 1
    assert "no page could be made of it: RuntimeError: no template" in capsys.readouterr().out
    monkeypatch.setattr(course, "write_page", pages.write_page)
    assert course.run(course.choose(everything, ["2"]), out, course=everything) == 0
    index = (out / "index.html").read_text()
    assert index.count("<td>done</td>") == 2 and "failed in cell 3 of 4" in index


def test_report_collects_every_record(finished, tmp_path):
    done = attnlab("report", "--results", finished[0] / "results", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = records.Records.read(tmp_path / "attnlab-report-nvidia-test-1.jsonl")
    assert (record.value, record.env) == (7, ENV)
    assert "1 records of NVIDIA Test 1" in done.stdout and "00_one 1" in done.stdout
    assert "01_two failed in cell 3 of 4" in done.stdout and "02_three made no records" in done.stdout


def finding(device):
    return records.to_json(records.Finding(name="n", value=1, env={"device": device}))


@pytest.mark.parametrize(
    "lines, words",
    [
        ([], "run the course first"),
        (["{broken"], "0.jsonl, line 1"),
        ([finding("H200"), finding("L4")], "2 devices (H200, L4)"),
    ],
)
def test_report_refuses(tmp_path, capsys, lines, words):
    for n, line in enumerate(lines):
        (tmp_path / f"{n}.jsonl").write_text(line + "\n")
    assert cli.main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "report")]) == 1 + ("line" in words)
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "-p", "repeat=3"], "no parameter 'repeat' in the chosen notebooks; did you mean repeats?"),
        (["run", "02", "-p", "size=3"], "no parameter 'size' in 02_three. There are: repeats, name."),
        (["run", "-p", "repeats"], "write NAME=VALUE"),
        (["run", "-p", "REPEAT=3"], "no parameter 'REPEAT' in the chosen notebooks; did you mean repeats?"),
        (["run", "-p", "repeats=3", "-p", "repeats=4"], "repeats is set twice"),
        (["run", "02_tree"], "did you mean 02_three?"),
        (["run", ""], "no notebook ''"),
        (["run", "elsewhere/00_one.ipynb"], "elsewhere/00_one.ipynb is not in"),
        (["run", "9"], "no notebook '9'. There are: 00_one"),
        (["walk"], "invalid choice: 'walk'"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(tmp_path, capsys, arguments, words):
    notebooks = write_course(tmp_path / "notebooks")
    if arguments[:1] == ["run"]:
        arguments = [*arguments, "--notebooks", str(notebooks), "--out", str(tmp_path / "build")]
    try:
        status = cli.main(arguments)
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    assert status == 2 and words in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "build").exists()


def test_a_run_never_writes_over_the_notebooks(tmp_path, capsys, monkeypatch):
    before = contents(write_course(tmp_path / "notebooks"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--out", "."]) == 2
    assert "would put executed copies in place of the notebooks" in capsys.readouterr().err
    assert contents(tmp_path / "notebooks") == before and os.listdir(tmp_path) == ["notebooks"]


def test_no_notebooks(tmp_path, capsys):
    assert cli.main(["run", "--notebooks", str(tmp_path / "none")]) == 1
    assert "--notebooks DIR" in capsys.readouterr().err


def test_what_is_asked_for(tmp_path):
    write_course(tmp_path)
    toys.write(tmp_path / "Untitled.ipynb", toys.notebook(toys.parameters()))
    found = notebook_files.course_notebooks(tmp_path)
    assert [nb.number for nb in found] == ["00", "01", "02", "03"]
    assert (found[0].title, found[0].minutes, found[0].needs) == ("one & more", 5, "nothing")
    assert found[0].parameters == {"repeats": "5", "name": "'x'"}
    assert course.choose(found, []) == found
    assert course.choose(found, ["02_three", str(tmp_path / "01_two.ipynb"), "1"]) == found[1:3]


def test_values_are_parsed_and_must_fit_the_notebooks_own(tmp_path):
    toys.write(tmp_path / "00_one.ipynb", toys.notebook(toys.parameters("size = None\nrepeats = 5\nlengths = (1, 2)")))
    found = notebook_files.course_notebooks(tmp_path)
    toys.write(tmp_path / "01_two.ipynb", toys.notebook(toys.parameters("LENGTHS = (1, 2)")))
    with pytest.raises(course.BadRequest, match="did you mean LENGTHS"):
        course.parse_parameters(["LENGHTS=(1,)"], notebook_files.course_notebooks(tmp_path))
    for text, value in {"3": 3, "None": None, "(4, 128)": [4, 128], "'3'": "3", "a=b": "a=b", "": ""}.items():
        assert course.parse_parameters([f"size={text}"], found) == {"size": value}
    assert course.parse_parameters(["repeats=7", "lengths=(8, 9)"], found) == {"repeats": 7, "lengths": [8, 9]}
    for wrong in ("repeats=abc", "repeats=1e3", "repeats=True", "lengths=512", "lengths=[]"):
        with pytest.raises(course.BadRequest, match="does not fit 00_one: write it like"):
            course.parse_parameters([wrong], found)


def test_a_dead_kernel_and_xla_flags_are_named_together(tmp_path, monkeypatch):
    toys.write(
        tmp_path / "00_dead.ipynb", toys.notebook(toys.parameters(), toys.code("import os\nos.kill(os.getpid(), 9)"))
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    outcome = course.execute(tmp_path / "00_dead.ipynb", tmp_path / "out" / "00_dead.ipynb")
    assert outcome.status == "failed" and "XLA_FLAGS=--xla_no_such_flag=1" in outcome.problem


@pytest.mark.parametrize("text", ["", "[]", '{"00_one": {"unknown": 1}}'])
def test_a_state_file_that_was_cut_off_counts_as_no_earlier_run(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert course.last_run(tmp_path) == {}


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def interrupted(running, by=signal.SIGINT):
    """What a process says that is interrupted as by a terminal: its whole group."""
    os.killpg(running.pid, by)
    return running.communicate(timeout=40)


# A script's background jobs are born deaf to Ctrl-C.
DEAF = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]


@pytest.mark.parametrize("shell", [[], DEAF], ids=["terminal", "background"])
def test_ctrl_c(tmp_path, shell):
    notebooks, pid_file = tmp_path / "notebooks", tmp_path / "pid"
    wait = f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    toys.write(notebooks / "00_quick.ipynb", toys.notebook(toys.parameters(), toys.code("print(1)")))
    toys.write(notebooks / "01_long.ipynb", toys.notebook(toys.parameters(), toys.code(wait), toys.code("print(2)")))
    before = contents(notebooks)
    running = subprocess.Popen(
        [*shell, sys.executable, "-m", "attnlab", "run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: running.poll() is not None or pid_file.exists() and pid_file.read_text(), 60)
    said, errors = interrupted(running)
    assert (running.returncode, errors) == (130, "")
    assert "stopped: 01_long in cell 2 of 3; the notebooks are untouched; finished pages are in build/" in said
    assert contents(notebooks) == before
    assert (tmp_path / "build" / "00_quick.html").exists()
    assert "stopped in cell 2 of 3" in (tmp_path / "build" / "index.html").read_text()
    wait_for(lambda: not os.path.exists(f"/proc/{pid_file.read_text()}/cmdline"), 10)  # the kernel is gone too


def test_the_bench_runs_a_notebook_cold_and_warm(tmp_path, capsys):
    compiled = (
        "import jax, time\nfrom attnlab import session, timing\nsession.keep_compiled(os.environ['ATTNLAB_CACHE'])\n"
        "print(timing.compile_timed(lambda x: x * 2, 1.0)[1])"
    )
    cells = [toys.code("import os\nimport time\n\ntime.sleep(0.3)"), toys.code(compiled)]
    toys.write(tmp_path / "nb" / "00_good.ipynb", toys.notebook(toys.parameters(), *cells))
    toys.write(tmp_path / "nb" / "01_bad.ipynb", toys.notebook(toys.parameters(), toys.code("1/0")))
    assert cli.main(["bench", "--notebooks", str(tmp_path / "nb"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert "01_bad  failed" in said and "ZeroDivisionError" in said and "\n01_bad " not in said
    assert len([line for line in said.splitlines() if line.startswith("00_good ")]) == 1 + 3
    assert "time.sleep(0.3)" in said  # a cell is known by its first line of work
    cold, warm = (outputs(tmp_path / "out" / "00_good" / f"{kind}.ipynb") for kind in ("cold", "warm"))
    kept = jax.__version_info__ >= (0, 10)
    assert "None" not in cold and ("None" in warm) == kept and ("No program was kept" in said) != kept


def test_a_bar_on_a_terminal(tmp_path):
    toys.write(tmp_path / "nb" / "00_x.ipynb", toys.notebook(toys.parameters(), toys.code("print(1)")))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with contextlib.redirect_stdout(terminal):
        assert course.run(notebook_files.course_notebooks(tmp_path / "nb"), tmp_path / "build") == 0
    assert "notebook 1 of 1: 00_x" in terminal.getvalue() and "cell 2 of 2" in terminal.getvalue()


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path):
    command = f"{sys.executable} -m attnlab claims 2>errors | head -n 1; cat errors"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "00_start_here, claims\n"


def test_doctor():
    table = attnlab("doctor")
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    assert ["what", "runs", "here", "why", "what", "to", "do"] in [line.split() for line in lines]
    assert any(line.startswith("NVIDIA GPU ") and " no " in line for line in lines)


def test_doctor_where_the_device_is_missing():
    done = attnlab("doctor", env={"JAX_PLATFORMS": "cuda"})
    if done.returncode == 0:
        pytest.skip("this machine has the GPU that should be missing")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "JAX_PLATFORMS" in done.stderr


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = (
        "import sys\n"
        "from attnlab import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'matplotlib', 'IPython', 'papermill', 'nbconvert'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr
