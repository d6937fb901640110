"""The matrix of JAX versions: which Pythons it takes, what it says and what it returns. Nothing is installed."""

import ast
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from test_environment import PROJECT, ROOT, fake_python, only, script  # noqa: F401, only is a fixture

spec = importlib.util.spec_from_file_location("matrix", ROOT / "deploy" / "matrix.py")
matrix = importlib.util.module_from_spec(spec)
sys.path.insert(0, str(ROOT / "deploy"))
spec.loader.exec_module(matrix)

FLOOR = next(text for text in PROJECT["project"]["dependencies"] if text.startswith("jax>=")).removeprefix("jax>=")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """What the matrix writes goes here."""
    monkeypatch.setattr(matrix, "ROOT", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def bases(*versions):
    return [matrix.make_env.Base(f"python{v}", v, True, f"/fake/python{v}") for v in versions]


# ---- which Python


def test_pythons_are_those_that_run(only, tmp_path, monkeypatch):  # noqa: F811
    fake_python(only, "python3", "3.10.13")  # too old
    script(only, "python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")  # a shim that can't run
    fake_python(only, "python3.13", "3.13.0", ensurepip=False)  # makes no environment
    fake_python(only, "python3.11", "3.11.9")
    versions = tmp_path / "pyenv" / "versions"
    versions.mkdir(parents=True)
    for version in ("3.9.18", "3.12.1", "3.11.2"):
        (versions / version).mkdir()
        fake_python(versions / version / "bin", "python", version)
    (versions / "3.13.1" / "bin").mkdir(parents=True)  # its build never finished
    (only / "python3.12").symlink_to(versions / "3.12.1" / "bin" / "python")  # the same one twice
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(sys, "executable", str(only / "python3.11"))
    assert [base.version for base in matrix.pythons()] == ["3.11.2", "3.11.9", "3.12.1"]


def test_without_pyenv_root_the_home_folder_is_looked_at(only, tmp_path, monkeypatch):  # noqa: F811
    place = tmp_path / ".pyenv" / "versions" / "3.12.1"
    place.mkdir(parents=True)
    fake_python(place / "bin", "python", "3.12.1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.setattr(sys, "executable", str(only / "none"))
    assert [base.version for base in matrix.pythons()] == ["3.12.1"]


def test_each_row_has_its_own_order_of_pythons():
    found = bases("3.11.7", "3.12.1", "3.13.0")
    assert [b.version for b in matrix.bases_for("oldest", found)] == ["3.11.7", "3.12.1", "3.13.0"]
    assert [b.version for b in matrix.bases_for("newest", found)] == ["3.13.0", "3.12.1"]


def test_the_oldest_jax_is_the_floor_in_pyproject():
    assert matrix.floor() == FLOOR
    oldest, newest = map(matrix.requirements, matrix.ROWS)
    assert f"jax=={FLOOR}" in oldest and f"jax>={FLOOR}" in newest
    assert [x for x in oldest if not x.startswith("jax==")] == [x for x in newest if not x.startswith("jax>=")]


def test_an_old_python_can_read_it():
    ast.parse((ROOT / "deploy" / "matrix.py").read_text(), feature_version=(3, 8))


def test_a_row_without_a_fitting_python_is_not_run_and_not_passed(root, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "pythons", lambda: bases("3.11.7"))
    assert matrix.main(["newest"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = "not run: JAX newer than 0.10 needs Python 3.12 or newer, found 3.11.7"
    assert lines[0] == f"newest: {words}" and lines[-1].endswith(words) and "passed" not in lines[-1]


def test_no_python_and_a_row_that_is_none_are_refused(root, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "pythons", lambda: [])
    assert matrix.main([]) == 1
    assert matrix.main(["middle"]) == 2
    python, row = capsys.readouterr().err.splitlines()
    assert "no Python of 3.11" in python and row == "matrix: no row 'middle': the rows are oldest, newest"


# ---- the environment, with fakes in place of venv, pip and pytest

JUNIT = '<testsuites><testsuite tests="9" failures="{}" errors="0" skipped="2"/></testsuites>'
GOOD = JUNIT.format(0)


def fake_env(pip="exit 0", tests=GOOD, status=0):
    """The text of a Python of an environment: it installs as `pip` says, and its pytest leaves `tests`."""
    return f"""#!/bin/sh
case "$*" in
  *"-m pip"*) {pip} ;;
  *"-m pytest"*)
    echo "pytest: PYTHONPATH=$PYTHONPATH PYTHONHOME=$PYTHONHOME $*"
    while [ "$1" != --junitxml ]; do shift; done
    [ -z '{tests}' ] || echo '{tests}' > "$2"
    exit {status} ;;
  *) echo "versions 0.9.9 0.12.9" ;;
esac
"""


def fake_base(folder, version, **env):
    """A Python that makes such an environment."""
    folder.mkdir(exist_ok=True)
    (folder / f"env-{version}").write_text(fake_env(**env))
    body = f"""for last; do :; done
mkdir -p "$last/bin" && cp {folder}/env-{version} "$last/bin/python" && chmod +x "$last/bin/python" """
    path = script(folder, f"python{version}", body)
    return matrix.make_env.Base(path.name, version, True, str(path))


def run_main(monkeypatch, *found, rows=("oldest",)):
    monkeypatch.setattr(matrix, "pythons", lambda: list(found))
    return matrix.main(list(rows))


@pytest.mark.parametrize(
    ("env", "status", "words"),
    [
        ({}, 0, "passed: 7 passed, 0 failed, 2 skipped"),
        ({"tests": JUNIT.format(3), "status": 1}, 1, "FAILED: 4 passed, 3 failed, 2 skipped"),
        ({"tests": "", "status": 4}, 1, "FAILED: pytest ended with status 4 and without a result"),
    ],
)
def test_the_result_of_pytest_is_the_result_of_the_row(root, monkeypatch, capsys, env, status, words):
    assert run_main(monkeypatch, fake_base(root / "bin", "3.11.7", **env)) == status
    row = capsys.readouterr().out.splitlines()[-1].split(None, 4)
    assert row[:4] == ["oldest", "3.11.7", "0.9.9", "0.12.9"] and row[4].startswith(words)


def test_one_failed_row_of_two_fails_all(root, monkeypatch, capsys):
    good, bad = fake_base(root / "bin", "3.11.7"), fake_base(root / "bin", "3.13.0", tests=JUNIT.format(1), status=1)
    assert run_main(monkeypatch, good, bad, rows=()) == 1
    oldest, newest = capsys.readouterr().out.splitlines()[-2:]
    assert oldest.startswith("oldest  3.11.7") and "passed: " in oldest
    assert newest.startswith("newest  3.13.0") and "FAILED: " in newest


def test_the_environment_is_made_once(root, monkeypatch, capsys):
    base = fake_base(root / "bin", "3.11.7")
    assert [run_main(monkeypatch, base) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.count("installing into build/matrix/oldest with Python 3.11.7") == 1
    (stamp,) = root.glob("build/matrix/oldest/matrix.json")
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"requirements": ["jax==0.1"]}))
    assert run_main(monkeypatch, base) == 0
    assert "installing into" in capsys.readouterr().out


def test_half_made_is_made_anew(root, monkeypatch, capsys):
    base = fake_base(root / "bin", "3.11.7", pip="echo 'ERROR: the disk melted'; exit 1")
    assert [run_main(monkeypatch, base) for _ in range(2)] == [1, 1]
    said = capsys.readouterr().out
    assert said.count("installing into") == 2 and said.count("oldest: -I -m pip failed: ERROR: the disk melted") == 2


def test_without_a_network_one_line_says_so(root, monkeypatch, capsys):
    base = fake_base(root / "bin", "3.11.7", pip="echo 'WARNING: Retrying: Connection refused'; exit 1")
    assert run_main(monkeypatch, base) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("oldest: ")]
    assert len(lines) == 2 and lines[1].startswith("oldest: no network for pip: Connection refused (all of its words:")
    assert "Retrying" in (root / "build" / "matrix" / "oldest.log").read_text()


def test_a_python_without_wheels_gives_way_to_the_next(root, monkeypatch, capsys):
    none = "echo 'ERROR: No matching distribution found for jax=='; exit 1"
    old, new = fake_base(root / "bin", "3.11.7", pip=none), fake_base(root / "bin", "3.12.1")
    assert run_main(monkeypatch, old, new) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["oldest", "3.12.1"]
    assert run_main(monkeypatch, old) == 1
    assert "no wheels of it for the Pythons here (3.11.7)" in capsys.readouterr().out


def test_the_surroundings_do_not_reach_in(root):
    """Run as make does: a foreign PYTHONPATH is gone, and the tests see this checkout's src."""
    base = fake_base(root / "bin", "3.11.7")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'deploy')!r}); import matrix; matrix.ROOT = {str(root)!r}\n"
        f"matrix.pythons = lambda: [matrix.make_env.Base(*{tuple(base)!r})]\nsys.exit(matrix.main(['oldest']))"
    )
    # PYTHONHOME stops the very Python that would read it, so it is set where that one has started.
    code = f"import os; os.environ['PYTHONHOME'] = '/elsewhere'\n{code}"
    env = os.environ | {"PYTHONPATH": "/elsewhere"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("pytest: ")]
    assert f"PYTHONPATH={root}/src PYTHONHOME= " in line and "/elsewhere" not in line
    assert all(f"--ignore={path}" in line and (ROOT / path).exists() for path in matrix.LEFT_OUT)
    path, test = matrix.DESELECTED.split("::")
    assert f"--deselect={matrix.DESELECTED}" in line and f"def {test}(" in (ROOT / path).read_text(encoding="utf-8")


# ---- CI


@pytest.mark.parametrize("failing", ["", "lint", "matrix", "test"])
def test_ci_fails_with_any_of_its_commands_and_closes_with_the_tests(tmp_path, failing):
    body = f'[ "$1" != test ] || echo "=== 3 passed in 1 s ==="\n[ "$1" != "{failing}" ] || exit 2'
    script(tmp_path / "bin", "make", body)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(failing)
    assert done.stdout.splitlines()[-1] == "=== 3 passed in 1 s ==="
    assert (f"make {failing} failed" in done.stderr) == (failing in ("lint", "matrix"))
