"""The tests and the notebooks on the oldest and on the newest JAX, each in an environment of its own.

    matrix.py                    both rows
    matrix.py oldest             one of them

`oldest` is the floor of jax in pyproject.toml, on the oldest Python here; `newest` is what pip finds newest, on
the newest Python here. The environments are build/matrix/NAME. They hold wheels only, and stay for the next time.

Standard library only, in the syntax of Python 3.8, like make_env.py, whose functions it uses.
"""

import glob
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import namedtuple

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import make_env  # noqa: E402
from make_env import OLDEST, ROOT, Problem, last_line, output_of, release, say  # noqa: E402

ROWS = ("oldest", "newest")
NEWEST_NEEDS = (3, 12)  # Python 3.11 gets JAX 0.10, whatever newer there is
# What is about the locks and about this tool, not about JAX.
LEFT_OUT = ("tests/test_environment.py", "tests/test_matrix.py", "tests/cloud")
# `make test` runs every notebook a third time, with wrong answers: what a hint says does not depend on JAX.
DESELECTED = "tests/test_notebooks.py::test_wrong_answers_get_a_hint"
VERSIONS = "from importlib.metadata import version as v; print('versions', v('jax'), v('flax'))"

Result = namedtuple("Result", "row python jax flax words failed")


# ---- which Python


def pythons():
    """The Pythons here that run, are new enough and can make an environment; the oldest first."""
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    named = [sys.executable, *make_env.PYTHONS, *glob.glob(os.path.join(pyenv, "versions", "*", "bin", "python"))]
    # One on PATH may be a version manager's shim, which runs nothing: each is asked what it is.
    found = {os.path.realpath(base.path): base for base in map(make_env.probe, named) if base}
    fit = [base for base in found.values() if not make_env.unfit(base)]
    return sorted(fit, key=lambda base: release(base.version))


def bases_for(row, found):
    """The Pythons to try for a row, the best first. Raises `Problem` when none of `found` can be."""
    if row == "oldest":
        return found
    fit = [base for base in reversed(found) if release(base.version) >= NEWEST_NEEDS]
    if not fit:
        here = ", ".join(base.version for base in found)
        raise Problem(f"JAX newer than 0.10 needs Python 3.12 or newer, found {here}")
    return fit


# ---- its environment


def floor():
    """The oldest JAX that pyproject.toml allows."""
    (text,) = [text for text in make_env.needed_for("test") if text.startswith("jax>=")]
    return text[len("jax>=") :]


def requirements(row):
    """What pip is to install: what `make test` needs, with the row's JAX."""
    exact = "jax==" + floor()
    return [exact if text.startswith("jax>=") and row == "oldest" else text for text in make_env.needed_for("test")]


def folder_of(row):
    return os.path.join(ROOT, "build", "matrix", row)


def python_of(row):
    return os.path.join(folder_of(row), "bin", "python")


def prepare(row, bases):
    """Make the row's environment, or find it as it should be; return its Python's version.

    Raises `Problem`: no network, or no Python here for which this JAX comes as a wheel.
    """
    stamp = os.path.join(folder_of(row), "matrix.json")
    # What is newest is asked of pip anew each day.
    wanted = {
        "requirements": requirements(row),
        "root": ROOT,
        "day": time.strftime("%Y-%m-%d") if row == "newest" else "",
    }
    try:
        with open(stamp, encoding="utf-8") as file:
            done = json.load(file)
    except (OSError, ValueError):
        done = {}
    version = done.pop("python", "")
    if done == wanted and version in [base.version for base in bases] and os.path.exists(python_of(row)):
        say(f"{row}: its environment is there, with Python {version}")
        return version
    for base in bases:
        if install(row, base):
            with open(stamp, "w", encoding="utf-8") as file:
                json.dump({**wanted, "python": base.version}, file, indent=1)
            return base.version
    tried = ", ".join(base.version for base in bases)
    raise Problem(f"there are no wheels of it for the Pythons here ({tried}). Install another, such as python3.12-venv")


def install(row, base):
    """Make the environment with one Python; False when a package has no wheel for it. Raises `Problem`."""
    log = folder_of(row) + ".log"
    say(f"{row}: installing into {os.path.relpath(folder_of(row), ROOT)} with Python {base.version} ...")
    shutil.rmtree(folder_of(row), ignore_errors=True)
    os.makedirs(os.path.dirname(log), exist_ok=True)
    pip = [python_of(row), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    words = ""
    for command in (
        [base.path, "-I", "-m", "venv", folder_of(row)],
        [*pip, "--only-binary", ":all:", *requirements(row)],
    ):
        status, text = output_of(command, 1800)
        words += f"$ {' '.join(command)}\n{text}\n"
        with open(log, "w", encoding="utf-8") as file:
            file.write(words)
        if not status:
            continue
        where = f"(all of its words: {os.path.relpath(log, ROOT)})"
        unreached = make_env.UNREACHED.search(text)
        if unreached:
            raise Problem(f"no network for pip: {unreached.group()} {where}. Check the network or the proxy")
        if "No matching distribution" in text or "ResolutionImpossible" in text:
            return False
        raise Problem(f"{' '.join(command[1:4])} failed: {last_line(text)} {where}")
    return True


# ---- the tests in it


def run_tests(row):
    """Run the tests in the row's environment; return (what to say of them, whether they failed)."""
    junit = os.path.join(ROOT, "build", "test", f"matrix-{row}.xml")
    if os.path.exists(junit):
        os.remove(junit)  # an older run's must not pass for this one's
    os.makedirs(os.path.dirname(junit), exist_ok=True)
    command = [
        python_of(row), "-m", "pytest", "-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup",
        "--junitxml", junit, *(f"--ignore={path}" for path in LEFT_OUT), f"--deselect={DESELECTED}",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.path.join(ROOT, "src"),
        "JAX_PLATFORMS": "cpu",
        "ATTNLAB_REPORTS": folder_of(row) + "-pages",
    }
    started = time.monotonic()
    status = subprocess.call(command, cwd=ROOT, env=environment)
    seconds = f"{time.monotonic() - started:.0f} s"
    try:
        suite = xml.etree.ElementTree.parse(junit).getroot().find("testsuite")
        total, failed, errors, skipped = (int(suite.get(x)) for x in ("tests", "failures", "errors", "skipped"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return f"FAILED: pytest ended with status {status} and without a result, {seconds}", True
    counts = f"{total - failed - errors - skipped} passed, {failed + errors} failed, {skipped} skipped, {seconds}"
    return ("FAILED: " if status else "passed: ") + counts, bool(status)


def run_row(row, found):
    """One row, from its Python to its result."""
    nothing = ("–", "–", "–")
    try:
        bases = bases_for(row, found)
    except Problem as problem:
        say(f"{row}: not run: {problem}")
        return Result(row, *nothing, f"not run: {problem}", False)
    try:
        version = prepare(row, bases)
        status, text = output_of([python_of(row), "-I", "-c", VERSIONS], 60)
        if status:
            raise Problem(f"its environment is broken: {last_line(text)} Remove {folder_of(row)} and run again")
    except Problem as problem:
        say(f"{row}: {problem}")
        return Result(row, *nothing, f"FAILED: {problem}", True)
    jax, flax = last_line(text).split()[1:]
    say(f"{row}: Python {version}, JAX {jax}, flax {flax}")
    return Result(row, version, jax, flax, *run_tests(row))


def show(results):
    """The closing table."""
    rows = [("", "Python", "JAX", "flax", "result")] + [result[:5] for result in results]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        say("  ".join(row[i].ljust(widths[i]) for i in range(5)).rstrip())


def main(argv=None):
    """Run the rows named, or both; the exit status is 1 when one failed, 2 for a row that is none."""
    rows = (sys.argv[1:] if argv is None else argv) or ROWS
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        print(f"matrix: no row {unknown[0]!r}: the rows are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    # What a module system or a container set for another Python must not reach in.
    for name in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(name, None)
    try:
        found = pythons()
        if not found:
            print("matrix: no Python of 3.11 or newer that has venv runs here: install python3-venv", file=sys.stderr)
            return 1
        if sys.version_info < OLDEST:  # pyproject.toml is read by a module that came with 3.11
            return subprocess.call([found[-1].path, os.path.abspath(__file__), *rows])
        results = [run_row(row, found) for row in rows]
    except KeyboardInterrupt:
        print("matrix: interrupted", file=sys.stderr)
        return 130
    say("")
    show(results)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
