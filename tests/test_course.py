"""The runner and the command line, on toy notebooks: refusals, failures, Ctrl-C, pages and the report."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import toy_notebooks as toys
from attnlab import cli, course, notebook_files, records
from attnlab.course import BadRequest

ENV = {"device": "NVIDIA Test 1", "jax": "0.9.2", "python": "3.11"}
RECORD = (
    "import json, os, pathlib\n"
    "folder = pathlib.Path(os.environ['ATTNLAB_RESULTS'])\n"
    f"record = {{'schema': {records.SCHEMA}, 'kind': 'Finding', 'env': {ENV!r}}}\n"
    "record |= {'name': 'n', 'value': repeats}\n"
    "(folder / '00_one.jsonl').write_text(json.dumps(record) + '\\n')"
)


def attnlab(*arguments, **kwargs):
    """Run the command line as people do; text of both streams is kept."""
    command = [sys.executable, "-m", "attnlab", *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | kwargs.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **kwargs)


def write_course(folder):
    toy, code = toys.parameters, toys.code
    cells = {
        "00_one": [toys.markdown("# One\n\n$a^2$"), toy(), code("import sys\nsys.executable")],
        "01_two": [toy("size = None"), code("print(1)"), code("raise ValueError('first line\\nlast line')")],
        "02_three": [
            toys.markdown("# Three"),
            toy(),
            code("1/0", "raises-exception"),
            code("print('three')"),
        ],
        "03_four": [toy(), code("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")],
    }
    cells["00_one"] += [code("print('repeats', repeats, repr(name))"), code(RECORD)]
    cells["01_two"] += [code("print('never')")]
    for name, mine in cells.items():
        toys.write(folder / f"{name}.ipynb", toys.notebook(*mine, title=name.split("_")[1] + " & more"))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run: (folder, what was printed, exit status, whether the notebooks stayed as they were)."""
    folder = tmp_path_factory.mktemp("course")
    notebooks = write_course(folder / "notebooks")
    # Another environment's kernel under our name, where Jupyter looks first.
    spec = folder / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["/bin/false"], "display_name": "other", "language": "python"}))
    before = {p: p.read_bytes() for p in notebooks.iterdir()}
    out = folder / "build"
    done = attnlab(
        "run", "--notebooks", notebooks, "--out", out, "-p", "repeats=7", "-p", "name=some words",
        env={"JUPYTER_PATH": str(folder / "jupyter"), "JUPYTER_PREFER_ENV_PATH": "0"}, cwd=folder,
    )  # fmt: skip
    return out, done, {p: p.read_bytes() for p in notebooks.iterdir()} == before


def outputs(path) -> str:
    return json.dumps([c.get("outputs") for c in toys.read(path)["cells"]])


def test_a_failing_notebook_stops_no_other(finished):
    out, done, _ = finished
    assert done.returncode == 1
    assert "00_one  done" in done.stdout and "02_three  done" in done.stdout
    assert "01_two failed in cell 3 of 4: ValueError: first line … last line" in done.stdout
    assert "03_four failed in cell 3 of 3: the kernel died" in done.stdout
    assert "2 of 4 notebooks done" in done.stdout and f"{out / 'index.html'}" in done.stdout
    assert done.stderr == ""


def test_the_notebooks_are_only_read(finished):
    assert finished[2]


def test_parameters_arrive_where_they_exist(finished):
    out = finished[0]
    assert "repeats 7 'some words'" in outputs(out / "notebooks" / "00_one.ipynb")
    injected = [c for c in toys.read(out / "notebooks" / "01_two.ipynb")["cells"] if "repeats" in str(c["source"])]
    assert injected == []


def test_the_kernel_is_this_interpreter(finished):
    assert sys.executable in outputs(finished[0] / "notebooks" / "00_one.ipynb")


def test_a_copy_keeps_what_happened(finished):
    out = finished[0]
    assert "last line" in outputs(out / "notebooks" / "01_two.ipynb")
    assert "last line" in (out / "01_two.html").read_text()
    assert "never" not in outputs(out / "notebooks" / "01_two.ipynb")
    shown_on_purpose = (out / "notebooks" / "02_three.ipynb").read_text()
    assert "ZeroDivisionError" in shown_on_purpose and "papermill-error-cell-tag" not in shown_on_purpose


def test_the_index_is_a_course_map(finished):
    text = (finished[0] / "index.html").read_text()
    for words in (
        "00_one.html",
        "one &amp; more",
        "failed in cell 3 of 4",
        "NVIDIA Test 1",
        "prefers-color-scheme",
    ):
        assert words in text, words
    assert "<script" not in text


def test_pages_follow_the_theme_and_load_no_script_without_formulas(finished):
    out = finished[0]
    assert "(prefers-color-scheme: dark)" in (out / "02_three.html").read_text()
    assert "<script" not in (out / "02_three.html").read_text()
    assert "mathjax" in (out / "00_one.html").read_text()
    assert 'href="index.html"' in (out / "00_one.html").read_text()


def test_a_partial_run_keeps_the_rest_of_the_index(finished, tmp_path):
    import shutil

    out = tmp_path / "build"
    shutil.copytree(finished[0], out)
    everything = notebook_files.course_notebooks(finished[0].parent / "notebooks")
    text = io.StringIO()
    assert course.run(course.choose(everything, ["2"]), out, course=everything, stream=text) == 0
    assert "1 of 1 notebooks done" in text.getvalue()
    index = (out / "index.html").read_text()
    assert index.count("<td>done</td>") == 2 and "failed in cell 3 of 4" in index


def test_report_collects_every_record(finished, tmp_path):
    done = attnlab("report", "--results", finished[0] / "results", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "attnlab-report-nvidia-test-1.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    assert header["schema"] == records.SCHEMA and header["env"] == ENV and header["notebooks"] == {"00_one": 1}
    assert records.from_json(lines[1]).value == 7
    assert "01_two did not finish" in done.stdout and "02_three made no records" in done.stdout


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "run the course first"),
        ({"a": ""}, "run the course first"),
        ({"a": "{broken\n"}, "a.jsonl, line 1"),
        ({"a": '{"schema": 99}\n'}, "schema 99"),
    ],
)
def test_report_refuses(tmp_path, capsys, content, words):
    for name, text in (content or {}).items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert cli.main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "report")]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_report_is_of_one_device(tmp_path, capsys):
    for name in ("H200", "L4"):
        finding = records.Finding(name="n", value=1, env={"device": name})
        (tmp_path / f"{name}.jsonl").write_text(records.to_json(finding) + "\n")
    assert cli.main(["report", "--results", str(tmp_path)]) == 1
    assert "2 devices (H200, L4)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["run", "-p", "repeat=3"], "no parameter 'repeat' in the chosen notebooks; did you mean repeats?"),
        (["run", "02", "-p", "size=3"], "no parameter 'size' in 02_three. There are: repeats, name."),
        (["run", "-p", "repeats"], "write NAME=VALUE"),
        (["run", "02_tree"], "did you mean 02_three?"),
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


def test_run_itself_refuses_unknown_parameters(tmp_path):
    everything = notebook_files.course_notebooks(write_course(tmp_path / "notebooks"))
    with pytest.raises(BadRequest, match="did you mean repeats"):
        course.run(everything, tmp_path / "build", {"repeat": 3})
    assert not (tmp_path / "build").exists()


def test_no_notebooks(tmp_path, capsys):
    assert cli.main(["run", "--notebooks", str(tmp_path / "none")]) == 1
    assert "--notebooks DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("None", None),
        ("(4, 128)", (4, 128)),
        ("'3'", "3"),
        ("H200", "H200"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_values_are_literals_or_strings(tmp_path, text, value):
    toys.write(tmp_path / "00_x.ipynb", toys.notebook(toys.parameters()))
    found = course.parse_parameters([f"repeats={text}"], notebook_files.course_notebooks(tmp_path))
    assert found == {"repeats": value}


def test_notebooks_register_themselves(tmp_path):
    write_course(tmp_path)
    toys.write(tmp_path / "Untitled.ipynb", toys.notebook(toys.parameters()))
    toys.write(tmp_path / "10_ten.ipynb", toys.notebook(toys.parameters("a: int = 1\nb = c = None"), title="Ten"))
    found = notebook_files.course_notebooks(tmp_path)
    assert [nb.number for nb in found] == ["00", "01", "02", "03", "10"]
    assert (found[-1].title, found[-1].minutes, found[-1].needs) == ("Ten", 5, "nothing")
    assert found[-1].parameters == {"a": "1", "b": "None", "c": "None"}


def test_two_notebooks_of_one_number(tmp_path):
    write_course(tmp_path)
    toys.write(tmp_path / "03_other.ipynb", toys.notebook(toys.parameters()))
    with pytest.raises(notebook_files.NotebookError, match="one number"):
        notebook_files.course_notebooks(tmp_path)


def test_ctrl_c(tmp_path):
    notebooks, pid_file = tmp_path / "notebooks", tmp_path / "pid"
    wait = f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    wait += "\ntime.sleep(60)"
    toys.write(notebooks / "00_quick.ipynb", toys.notebook(toys.parameters(), toys.code("print(1)")))
    cells = [toys.markdown("# Long"), toys.parameters(), toys.code(wait), toys.code("print(2)")]
    toys.write(notebooks / "01_long.ipynb", toys.notebook(*cells))
    before = {p: p.read_bytes() for p in notebooks.iterdir()}
    command = [sys.executable, "-m", "attnlab", "run", "--notebooks", notebooks, "--out", "build"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
    said, errors = running.communicate(timeout=30)
    assert running.returncode == 130
    assert (
        "stopped in 01_long, cell 2 of 3; the committed notebooks are untouched; finished pages are in build/" in said
    )
    assert errors == ""
    assert {p: p.read_bytes() for p in notebooks.iterdir()} == before
    assert (tmp_path / "build" / "00_quick.html").exists()
    assert "stopped in cell 2 of 3" in (tmp_path / "build" / "index.html").read_text()
    deadline = time.monotonic() + 10
    while pathlib.Path(f"/proc/{pid_file.read_text()}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not pathlib.Path(f"/proc/{pid_file.read_text()}/cmdline").exists(), "the kernel still runs"


def test_a_bar_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    toys.write(tmp_path / "nb" / "00_x.ipynb", toys.notebook(toys.parameters(), toys.code("print(1)")))
    terminal = Terminal()
    assert course.run(notebook_files.course_notebooks(tmp_path / "nb"), tmp_path / "build", stream=terminal) == 0
    assert "notebook 1 of 1: 00_x" in terminal.getvalue() and "cell 2 of 2" in terminal.getvalue()


def test_doctor():
    table = attnlab("doctor")
    assert table.returncode == 0, table.stderr
    lines = table.stdout.splitlines()
    assert "kind cpu" in lines[0]
    assert lines[2].split() == ["what", "here", "why", "what", "to", "do"]
    assert any(line.startswith("NVIDIA GPU") and " no " in line for line in lines)
    data = json.loads(attnlab("doctor", "--json").stdout)
    assert data["environment"]["kind"] == "cpu" and data["features"]["gpu"]["ok"] is False


def test_doctor_where_the_device_is_missing():
    done = attnlab("doctor", env={"JAX_PLATFORMS": "cuda"})
    if done.returncode == 0:
        pytest.skip("this machine has the GPU that should be missing")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "JAX_PLATFORMS" in done.stderr


def test_text_table_wraps_and_keeps_every_word():
    text = cli.text_table(("a", "b"), [("x", "many words " * 20), ("y", "")], width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("many") == 20


def test_help_is_quick_and_without_jax():
    code = (
        "import sys; sys.argv = ['attnlab', '--help']\n"
        "from attnlab import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'matplotlib', 'IPython', 'papermill', 'nbconvert'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = []
    for _ in range(3):
        began = time.perf_counter()
        assert "doctor" in attnlab("--help").stdout
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5, times
