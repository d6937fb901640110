"""The environment: which set of packages and which Python `make` picks, and its words when it can't."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETS = ("cpu", "cuda12", "cuda13")

spec = importlib.util.spec_from_file_location("make_env", ROOT / "deploy" / "make_env.py")
make_env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_env)


def script(folder, name, body):
    """An executable shell script that stands in for a program."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def only(tmp_path, monkeypatch):
    """A PATH with one empty folder on it: what a test puts there is all that exists."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


# ---- the set that fits the driver

OLD_HEADER = "| NVIDIA-SMI 580.159    Driver Version: 580.159    CUDA Version: {}     |"
NEW_HEADER = "| NVIDIA-SMI 610.43.02  KMD Version: 610.43.02     CUDA UMD Version: {} |"  # since driver 610


def fake_smi(folder, header, capabilities="9.0"):
    rows = "\n".join(f"echo {capability}" for capability in capabilities.split())
    script(folder, "nvidia-smi", f"if [ $# = 0 ]; then echo '{header}'; else\n{rows}\nfi")


@pytest.mark.parametrize(
    ("header", "version", "expected"),
    [
        (OLD_HEADER, "12.8", "cuda12"),
        (OLD_HEADER, "13.0", "cuda13"),
        (NEW_HEADER, "12.9", "cuda12"),
        (NEW_HEADER, "14.0", "cuda13"),  # a driver runs programs of older CUDAs
    ],
)
def test_set_follows_the_drivers_cuda_version(only, header, version, expected):
    fake_smi(only, header.format(version))
    choice = make_env.choose_set()
    assert (choice.name, choice.mend) == (expected, False)
    assert version in choice.why


def test_a_gpu_that_cuda_13_left_out_gets_cuda_12(only):
    fake_smi(only, OLD_HEADER.format("13.0"), capabilities="9.0 7.0")
    choice = make_env.choose_set()
    assert choice.name == "cuda12"
    assert "compute capability 7.0" in choice.why


def test_no_driver_gives_cpu_quietly(only):
    assert make_env.choose_set()[::2] == ("cpu", False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (f"echo '{OLD_HEADER.format('11.8')}'", "CUDA 11.8, and JAX needs 12 or newer"),
        ("echo 'No devices were found'; exit 6", "exit status 6: No devices were found"),
        (f"echo '{OLD_HEADER.format('N/A')}'", "gives no CUDA version"),
        ("exec /bin/sleep 20", "no answer"),
    ],
)
def test_a_driver_that_will_not_do_gives_cpu_and_says_why(only, monkeypatch, body, words):
    monkeypatch.setattr(make_env, "SMI_SECONDS", 1)
    script(only, "nvidia-smi", body)
    choice = make_env.choose_set()
    assert (choice.name, choice.mend) == ("cpu", True)
    assert words in choice.why and "\n" not in choice.why


# ---- the Python that .venv is made with


def fake_python(folder, name, version, ensurepip=True):
    return script(folder, name, f"echo attnlab {version} {ensurepip} {folder / name}")


def test_python3_is_taken_when_it_will_do_and_else_another(only):
    fake_python(only, "python3", "3.10.13")
    script(only, "python3.14", "echo 'python3.14: command not found' >&2; exit 127")  # a shim that can't run
    fake_python(only, "python3.13", "3.13.0", ensurepip=False)
    fake_python(only, "python3.12", "3.12.1")
    assert make_env.find_base("").version == "3.12.1"
    fake_python(only, "python3", "3.11.3")
    assert make_env.find_base("").version == "3.11.3"


@pytest.mark.parametrize(
    ("pythons", "named", "words"),
    [
        ({"python3": "3.10.13"}, "python3", "Python 3.10.13 (python3) is too old: the course needs 3.11 or newer."),
        ({"python3": "3.10.13", "python3.12": "3.12.1"}, "", "sudo apt install python3.12-venv"),
        ({"python3": "3.12.1", "old": "3.9.2"}, "old", "Python 3.9.2 (old) is too old"),  # not replaced by another
        ({"python3": "3.12.1"}, "nowhere", "BASE_PYTHON=nowhere does not run"),
    ],
)
def test_a_python_that_will_not_do_is_refused_in_one_line(only, pythons, named, words):
    for name, version in pythons.items():
        fake_python(only, name, version, ensurepip=False)
    with pytest.raises(make_env.Problem) as caught:
        make_env.find_base(named)
    assert words in str(caught.value)
    assert "BASE_PYTHON=" in str(caught.value) and "\n" not in str(caught.value)


def test_an_old_python_can_read_make_env():
    import ast

    source = (ROOT / "deploy" / "make_env.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    body = ast.parse(source).body
    early = {name.name for node in body if isinstance(node, ast.Import) for name in node.names}
    assert "tomllib" not in early and {name.split(".")[0] for name in early} <= sys.stdlib_module_names


# ---- making .venv, in a small checkout of its own


@pytest.fixture
def checkout(tmp_path):
    """make_env.py with a project of one file and a lock of one package, which no test may fetch."""
    root = tmp_path / "checkout"
    (root / "deploy" / "locks").mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "make_env.py", root / "deploy")
    shutil.copy(ROOT / "Makefile", root)
    (root / "pyproject.toml").write_text('[project]\nname = "tiny"\nversion = "1"\n')
    for name in SETS:
        (root / "deploy" / "locks" / f"{name}.txt").write_text(f"tiny-package==1.0 --hash=sha256:{'0' * 64}\n")
    return root


def start(root, *arguments, **more):
    """Run make_env.py venv there, with an index that refuses every connection."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "deploy/make_env.py", "venv", "--set", "cpu", *arguments]
    return run(command, root, env=environment | more)


def run(command, root, **more):
    # What `make test PYTHON=…` hands down to every make below it is not for the make that is tested.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "PYTHON")}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, **{"env": environment} | more)


def finished(root, /, **changes):
    """A .venv as a finished run leaves it, without the cost of one."""
    (root / ".venv" / "bin").mkdir(parents=True)
    script(root / ".venv" / "bin", "python", f'exec {sys.executable} "$@"')
    stamp = {
        "extras": "",
        "lock": make_env.digest(root / "deploy" / "locks" / "cpu.txt"),
        "project": make_env.digest(root / "pyproject.toml"),
        "python": "3.11.7",
        "root": str(root),
        "set": "cpu",
        "named": "cpu",
    }
    (root / ".venv" / "attnlab.json").write_text(json.dumps(stamp | changes))


def test_without_a_network_one_line_says_so_and_a_half_made_venv_is_not_trusted(checkout):
    finished(checkout)
    (checkout / ".venv" / "attnlab.json").write_text("{}")  # what an interrupted run leaves
    (checkout / ".venv" / "left-over").write_text("")
    done = start(checkout)
    assert done.returncode == 1
    assert "making .venv" in done.stdout
    assert not (checkout / ".venv" / "left-over").exists()
    (line,) = done.stderr.splitlines()
    assert "no network for pip while installing the cpu set: Connection refused" in line
    assert "make run PYTHON=python3" in line and "tiny-package" in (checkout / "build" / "make_env.log").read_text()
    assert json.loads((checkout / ".venv" / "attnlab.json").read_text()) == {}  # nor is this one, next time


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("WARNING: ... Failed to resolve 'index' (Temporary failure in name resolution)", "no network"),
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES.\n    Expected sha256 1", "DO NOT MATCH THE HASHES"),
        ("Traceback\nKeyError: 'x'", "KeyError: 'x'"),
    ],
)
def test_each_way_pip_fails_is_one_line(text, words):
    line = make_env.explain(text, "installing the cpu set")
    assert words in line and "installing the cpu set" in line and "\n" not in line


def test_a_finished_venv_is_left_alone_at_once(checkout):
    finished(checkout)
    done = start(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"lock": "another"}, "bringing .venv up to date"), ({"root": "/elsewhere"}, "making .venv")],
)
def test_what_changed_decides_between_an_update_and_a_new_venv(checkout, monkeypatch, capsys, change, words):
    finished(checkout, **change)
    calls = []
    for name in ("VENV", "VENV_PYTHON", "STAMP", "LOG", "ROOT"):
        old = Path(getattr(make_env, name))
        monkeypatch.setattr(make_env, name, str(checkout / old.relative_to(ROOT)))
    monkeypatch.setattr(make_env, "run_pip", lambda arguments, doing: calls.append(doing))
    monkeypatch.setattr(make_env, "find_base", lambda named: make_env.probe(sys.executable))
    real = make_env.output_of
    monkeypatch.setattr(make_env, "output_of", lambda c, s: (0, "") if "venv" in c else real(c, s))
    make_env.prepare(set_named="cpu")
    assert words in capsys.readouterr().out
    assert calls == ["installing the cpu set", "installing attnlab itself"]
    assert make_env.read_stamp()["lock"] == make_env.digest(checkout / "deploy" / "locks" / "cpu.txt")


def test_a_venv_that_make_did_not_make_is_never_removed(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine").write_text("work")
    done = start(checkout)
    assert done.returncode == 1
    assert ".venv is here but was not made by make" in done.stderr
    assert (checkout / ".venv" / "mine").read_text() == "work"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "rocm"), "SET=rocm is unknown: the sets are cpu, cuda12, cuda13"),
        (("--extras", "fp8"), "EXTRAS=fp8 is unknown"),
        (("--extras", "te"), "EXTRAS=te needs an NVIDIA GPU"),
        (("--set", "cuda13", "--extras", "te"), "no nvcc"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_made(checkout, arguments, words):
    done = start(checkout, *arguments, PATH="/usr/bin:/bin", CUDA_HOME="/nowhere")
    assert done.returncode == 1
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (checkout / ".venv").exists()


# ---- an interpreter of the reader's own


def test_own_interpreter_is_told_all_that_is_missing_and_one_line_that_keeps_its_jax(monkeypatch):
    there = {"jax": "0.11.2.dev1+nv", "jaxlib": "0.11.2", "numpy": "2.3.1", "matplotlib": "3.10"}
    monkeypatch.setattr(make_env, "installed_version", there.get)
    monkeypatch.setenv("PYTHON", "python3")
    with pytest.raises(make_env.Problem) as caught:
        make_env.check("run")
    text = str(caught.value)
    lacks = ["flax", "ipykernel", "ipython", "nbconvert", "nbformat", "papermill", "psutil", "tqdm"]
    assert f"lacks {', '.join(lacks)}." in text
    (line,) = re.findall(r"^  python3 -m pip install .*$", text, re.MULTILINE)
    assert line.split()[4:7] == ["jax==0.11.2.dev1+nv", "jaxlib==0.11.2", "numpy==2.3.1"]
    assert line.split()[7 : 7 + len(lacks)] == lacks


def test_own_interpreter_with_an_old_jax_is_told_so_and_else_used_as_it_is(monkeypatch):
    monkeypatch.setattr(make_env, "choose_set", lambda: make_env.Choice("cuda13", "", False))
    monkeypatch.setattr(make_env, "installed_version", lambda name: {"jax": "0.8.1"}.get(name, "99"))
    with pytest.raises(make_env.Problem, match=r"lacks jax 0\.9\.2 or newer \(has 0\.8\.1\)") as caught:
        make_env.check("run")
    assert "'jax[cuda13]>=0.9.2'" in str(caught.value)
    monkeypatch.setattr(make_env, "installed_version", lambda name: "99.0")
    for purpose in ("run", "lab", "test", "lint", "format", "clock", "doctor", "saved", "regenerate"):
        make_env.check(purpose)


def test_a_target_asks_for_what_it_uses_and_no_more():
    assert "nbval" in make_env.needed_for("validate") and "nbval" not in make_env.needed_for("run")
    assert "jupyterlab" in make_env.needed_for("lab") and "jupyterlab" not in make_env.needed_for("validate")


# ---- the locks


def locked(name, python):
    """Package name to version in one lock, for one Python on Linux; no package may stand there twice."""
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    environment = {"python_version": python, "python_full_version": f"{python}.4", "sys_platform": "linux"}
    environment |= {"platform_machine": "x86_64", "platform_system": "Linux"}
    packages = {}
    for line in text.splitlines():
        if not re.match(r"[A-Za-z0-9]", line):
            continue
        requirement = Requirement(line.rstrip(" \\"))
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert canonicalize_name(requirement.name) not in packages, line
            packages[canonicalize_name(requirement.name)] = Version(str(requirement.specifier).removeprefix("=="))
    return packages


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("name", SETS)
def test_every_lock_holds_what_pyproject_asks_for(name, python):
    packages = locked(name, python)
    extras = PROJECT["project"]["optional-dependencies"]
    texts = PROJECT["project"]["dependencies"] + extras["test"] + extras.get(name, [])
    texts += PROJECT["dependency-groups"]["build"] + PROJECT["build-system"]["requires"]
    for requirement in map(Requirement, texts):
        version = packages.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is missing: make lock"
        assert version in requirement.specifier, f"{requirement} is locked at {version}: make lock"
    for cuda in ("cuda12", "cuda13"):
        plugin = packages.get(f"jax-{cuda}-plugin")
        assert plugin == (packages["jax"] if name == cuda else None)


@pytest.mark.parametrize("name", SETS)
def test_every_lock_has_hashes_and_names_no_place(name):
    text = (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()
    pins = re.findall(r"^[A-Za-z0-9].*==.*$", text, re.MULTILINE)
    assert pins and all(pin.endswith("\\") for pin in pins)
    assert not re.search(r"https?:|file:|@ |--index|--find-links|^#.*/\w+/", text, re.MULTILINE)


# ---- the commands


def targets():
    return set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_help_is_the_default_and_lists_every_target():
    shown = subprocess.run(["make", "-C", ROOT, "-s"], capture_output=True, text=True, timeout=20).stdout
    assert targets() == set(re.findall(r"^make ([a-z-]+) ", shown, re.MULTILINE))
    wanted = "run test lab lint format regenerate compare claims validate matrix site preclass bench clock doctor lock"
    assert {*wanted.split(), "clean"} <= targets()


def test_every_make_command_in_the_readme_is_a_target():
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", (ROOT / "README.md").read_text(), re.DOTALL))
    named = set(re.findall(r"\bmake ([a-z-]+)\b", code))
    assert {"run", "test"} <= named <= targets()


@pytest.mark.parametrize("given, asks", [("YES=1", False), ("YES=0", True), ("YES=", True)])
def test_teardown_asks_unless_it_is_told_not_to(given, asks):
    environment = {**os.environ, "YES": "1", "PORT": "80"}  # of the environment: meant for something else
    said = run(["make", "-n", "teardown", "forward", given], ROOT, env=environment).stdout
    assert ("--yes" not in said) == asks and '--port "8884"' in said, said


def test_ci_calls_readmes_test_command_last():
    text = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in text
    assert "for target in lint matrix test-cloud; do\n  make " in text
    assert re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE)[-1] == "test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("body", ["exit 3", "kill -INT $$"])
def test_a_failed_or_interrupted_command_fails_make(checkout, body):
    fake = script(checkout, "python", f'case "$1" in -m) {body} ;; esac')
    done = run(["make", "run", f"PYTHON={fake}"], checkout)
    assert done.returncode != 0


@pytest.mark.parametrize("name", ["BASE_PYTHON", "PYTHON"])
def test_make_names_a_python_that_is_not_here(checkout, name):
    done = run(["make", "run", f"{name}=not-a-python"], checkout)
    assert done.returncode != 0
    assert f"make: {name}=not-a-python is not here." in done.stderr
