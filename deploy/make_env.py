"""Make the course's Python environment: `.venv`, from the lock that fits this machine.

The Makefile starts it before every target that needs Python; when `.venv` is up to date it returns at once.
`make_env.py venv` makes or updates `.venv`; `make_env.py check` looks at an interpreter of the reader's own
(`make run PYTHON=python3`) and installs nothing. Every refusal is one line: what is wrong, what was found,
what to do.

Standard library only, in the syntax of Python 3.8: an old Python must be able to read this file to be told
that it is too old. Modules that only Python 3.11 has are imported where they are used.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from importlib import metadata

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "attnlab.json")
LOG = os.path.join(ROOT, "build", "make_env.log")
SETS = ("cpu", "cuda12", "cuda13")
OLDEST = (3, 11)
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")  # tried in this order
SMI_SECONDS = 30  # a GPU that wakes up takes a few; a wedged driver never answers

Base = namedtuple("Base", "command version ensurepip path")
Choice = namedtuple("Choice", "name why mend")


class Problem(Exception):
    """What is wrong, what was found and what to do, in one line."""


def say(text):
    print(text, flush=True)


def output_of(command, seconds):
    """Run a command; return (exit status, output and errors as text), also when it never starts or ends."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, timeout=seconds, encoding="utf-8", errors="replace", **streams)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {seconds} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout


def last_line(text):
    return (text.strip().splitlines() or ["no words"])[-1].strip()


def release(text):
    """The numbers that a version starts with: 0.11.2.dev7+nv gives (0, 11, 2)."""
    return tuple(int(n) for n in re.match(r"[\d.]*\d", text).group().split("."))


# ---- which Python makes .venv

PROBE = (
    "import sys; from importlib.util import find_spec as f; "
    "print('attnlab', '%d.%d.%d' % sys.version_info[:3], bool(f('venv') and f('ensurepip')), sys.executable)"
)


def probe(command):
    """Run an interpreter to learn what it is: a version manager's shim can be on PATH and still not run."""
    status, text = output_of([command, "-c", PROBE], 30)
    found = re.search(r"^attnlab ([\d.]+) (True|False) (.+)$", text, re.MULTILINE)
    return Base(command, found[1], found[2] == "True", found[3]) if found and not status else None


def unfit(base):
    """Why this interpreter can't make .venv, and what to do; "" when it can."""
    another = "or name another Python: make run BASE_PYTHON=/path/to/python3.12"
    if release(base.version) < OLDEST:
        return (
            f"Python {base.version} ({base.command}) is too old: the course needs 3.11 or newer. Install it with "
            f"`sudo apt install python3.11-venv` (or a newer one that your release has), {another}"
        )
    if not base.ensurepip:
        # Debian's and Ubuntu's package for this very version: python3-venv only fits the release's own.
        package = "python{}.{}-venv".format(*release(base.version))
        return (
            f"Python {base.version} ({base.command}) can't make .venv: its venv or ensurepip module is missing. "
            f"Install it with `sudo apt install {package}`, {another}"
        )
    return ""


def find_base(named):
    """The interpreter to make .venv with: the one named, else python3, else the newest other that will do."""
    found = [base for base in map(probe, PYTHONS if named in ("", "python3") else [named]) if base]
    if not found:
        raise Problem(
            f"BASE_PYTHON={named or 'python3'} does not run as a Python. Install one (sudo apt install "
            "python3-venv), or name one of 3.11 or newer that does, for example BASE_PYTHON=python3.12"
        )
    # The first that will do; else the one with least to mend: a missing package is less than a missing Python.
    base = max(found, key=lambda base: (not unfit(base), release(base.version) >= OLDEST))
    if unfit(base):
        raise Problem(unfit(base))
    return base


# ---- which set fits the machine


def choose_set():
    """The set for this machine's NVIDIA driver: Choice(name, why in one line, does something need mending).

    A driver that is too old or broken gives the cpu set and says so, instead of stopping: the whole course
    runs on a CPU too, and the driver is often not the reader's to mend. The next `make` looks again.
    """
    smi = shutil.which("nvidia-smi")
    if not smi:
        return Choice("cpu", "no NVIDIA driver here (no nvidia-smi): the cpu set", False)
    status, text = output_of([smi], SMI_SECONDS)
    # Drivers from 610 on say "CUDA UMD Version", older ones "CUDA Version".
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)(\.\d+)", text)
    on_cpu = "the cpu set, and the course runs on the CPU. To use the GPU,"
    if status or not found:
        why = (
            f"nvidia-smi is here but gives no CUDA version (exit status {status}: {text.strip().split(chr(10))[0]}): "
            f"{on_cpu} mend the driver (a container: start it with GPUs) and make run again, or name the set: "
            "make run SET=cuda12"
        )
        return Choice("cpu", why, True)
    major, offers = int(found[1]), f"the NVIDIA driver offers CUDA {found[1]}{found[2]}"
    if major < 12:
        why = f"{offers}, and JAX needs 12 or newer: {on_cpu} update the driver to 525 or newer and make run again"
        return Choice("cpu", why, True)
    if major == 12:
        return Choice("cuda12", f"{offers}: the cuda12 set", False)
    # CUDA 13 left out every GPU older than Turing (compute capability 7.5); CUDA 12 still has them.
    _, text = output_of([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], SMI_SECONDS)
    oldest = min(re.findall(r"^\d+\.\d+$", text, re.MULTILINE), key=release, default="7.5")
    if release(oldest) < (7, 5):
        why = f"{offers}, but a GPU here has compute capability {oldest} and CUDA 13 starts at 7.5: the cuda12 set"
        return Choice("cuda12", why, False)
    return Choice("cuda13", f"{offers}: the cuda13 set", False)


def lock_of(name):
    return os.path.join(ROOT, "deploy", "locks", name + ".txt")


# ---- the stamp: what .venv holds


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def read_stamp():
    """What the last run finished; {} when it did not finish, None when there is no .venv of ours."""
    try:
        with open(STAMP, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError:  # cut off while it was written
        return {}


def write_stamp(stamp):
    with open(STAMP, "w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=1, sort_keys=True)


# ---- making it

UNREACHED = re.compile(
    "name resolution|Failed to resolve|Name or service not known|Connection refused|Connection reset"
    "|unreachable|No route to host|timed out|CERTIFICATE_VERIFY_FAILED|Cannot connect to proxy"
)


def explain(text, doing):
    """pip's failure in one line."""
    if "No space left on device" in text:
        return f"the disk is full while {doing}. Free some (a CUDA set takes several GB) and make run again"
    words = f"(all of pip's words: {os.path.relpath(LOG, ROOT)})"
    reason = UNREACHED.search(text)
    if reason:
        return (
            f"no network for pip while {doing}: {reason.group()} {words}. Check the network or the proxy and make "
            "run again. `make run PYTHON=python3` needs no network: it uses the modules that python3 has"
        )
    errors = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    return f"pip failed while {doing}: {last_line(errors[-1] if errors else text)} {words}"


def run_pip(arguments, doing):
    """Run pip in .venv; show its words as one moving line in a terminal, and keep them all in LOG."""
    # -I: neither PYTHONPATH nor the user's own site-packages may answer for what .venv lacks.
    command = [VENV_PYTHON, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    live, lines = sys.stdout.isatty(), []
    say(f"{doing} ...")
    os.makedirs(os.path.dirname(LOG), exist_ok=True)
    with open(LOG, "a", encoding="utf-8") as log, subprocess.Popen(
        command, cwd=ROOT, encoding="utf-8", errors="replace", **streams
    ) as pip:
        log.write(f"\n$ {' '.join(command)}\n")
        for line in pip.stdout:
            lines.append(line)
            log.write(line)
            if live:
                print("\r\x1b[K  " + line.strip()[: shutil.get_terminal_size().columns - 4], end="", flush=True)
    if live:
        print("\r\x1b[K", end="", flush=True)
    if pip.returncode:
        raise Problem(explain("".join(lines), doing))


def make_empty(base):
    """A new .venv with pip in it, stamped as begun; never in place of one that somebody else made."""
    if os.path.lexists(VENV) and read_stamp() is None:
        raise Problem(
            ".venv is here but was not made by make. Move or remove it and make run again, or use it as it "
            "is: make run PYTHON=.venv/bin/python"
        )
    os.makedirs(VENV, exist_ok=True)
    # Stamped first and the stamp kept: a removal that is interrupted leaves something known as ours.
    write_stamp({})
    for entry in list(os.scandir(VENV)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.path != STAMP:
            os.remove(entry.path)
    say(f"making .venv with Python {base.version}")
    status, text = output_of([base.path, "-I", "-m", "venv", VENV], 600)
    if status:
        raise Problem(
            f"Python {base.version} ({base.path}) could not make .venv: {last_line(text)} Name another Python: "
            "make run BASE_PYTHON=/path/to/python3.12"
        )


def check_te(name):
    """Stop early where TransformerEngine can't be built: its JAX part comes as source only."""
    if name == "cpu":
        raise Problem("EXTRAS=te needs an NVIDIA GPU and its set of packages; the set here is cpu")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [os.path.join(top, "include") for top in (os.environ.get("CUDNN_PATH", home), home, "/usr")]
    lacks = []
    if not (shutil.which("nvcc") or os.path.exists(os.path.join(home, "bin", "nvcc"))):
        lacks.append(f"no nvcc (looked on PATH and in {home}/bin)")
    if not any(os.path.exists(os.path.join(folder, "cudnn.h")) for folder in folders):
        lacks.append(f"no cudnn.h (looked in {', '.join(folders)})")
    if lacks:
        cuda = name[len("cuda") :]
        raise Problem(
            f"EXTRAS=te builds TransformerEngine's JAX part from source and found {' and '.join(lacks)}. Install "
            f"the CUDA {cuda} toolkit and the cuDNN headers (libcudnn9-dev-cuda-{cuda}) and set CUDA_HOME and "
            "CUDNN_PATH, or use NVIDIA's JAX container, which has TransformerEngine: make run PYTHON=python3"
        )


def add_te(name):
    """Build TransformerEngine against the JAX in .venv, and change nothing that the lock put there."""
    with open(lock_of(name), encoding="utf-8") as file:
        pins = [line.rstrip(" \\\n") + "\n" for line in file if re.match(r"[\w.-]+==", line)]
    held = os.path.join(VENV, "attnlab-held.txt")
    with open(held, "w", encoding="utf-8") as file:
        file.writelines(pins)
    engine = f"transformer-engine[jax,core_cu{name[len('cuda') :]}]"
    run_pip(["-c", held, "pybind11[global]", "nvidia-cudnn-frontend"], "adding what builds TransformerEngine")
    run_pip(["-c", held, "--no-build-isolation", engine], "building TransformerEngine (takes many minutes)")


def prepare(base_named="", set_named="", extras=""):
    """Make .venv, or bring it up to date, or find it so and return at once."""
    if set_named not in ("", *SETS):
        raise Problem(f"SET={set_named} is unknown: the sets are {', '.join(SETS)}")
    if extras not in ("", "te"):
        raise Problem(f"EXTRAS={extras} is unknown: te (TransformerEngine) is the one there is")
    done = read_stamp() or {}
    # What was named once holds until another is named: `make test` after `make run SET=cpu` changes nothing.
    set_named = set_named or done.get("named", "")
    choice = Choice(set_named, f"the {set_named} set, as named", False) if set_named else choose_set()
    if choice.mend:
        say(choice.why)
    name = choice.name
    if name == "cpu" and not set_named:
        name = done.get("set", name)  # a login node without a GPU does not take the GPU node's set away
    base = find_base(base_named) if base_named not in ("", "python3") else None
    stamp = {
        "extras": extras or done.get("extras", ""),
        "lock": digest(lock_of(name)),
        "project": digest(os.path.join(ROOT, "pyproject.toml")),
        "python": base.version if base else done.get("python"),
        "root": ROOT,  # the .venv of a copied checkout still points at the old place
        "set": name,
        "named": set_named,
    }
    alive = os.path.exists(VENV_PYTHON)  # false too when the Python that it links to is gone
    if alive and stamp == done:
        return
    if stamp["extras"]:
        check_te(name)
    started = time.monotonic()
    if alive and all(stamp[key] == done.get(key) for key in ("python", "root", "set")):
        say("bringing .venv up to date")
        write_stamp({})
    else:
        base = base or find_base("")
        stamp["python"] = base.version
        if not choice.mend:
            say(choice.why)
        make_empty(base)
    # Wheels only: a source package would be built with whatever its build step fetches, past the lock.
    run_pip(["--require-hashes", "--only-binary", ":all:", "-r", lock_of(name)], f"installing the {name} set")
    # The lock holds the build backend too, so this step needs no network.
    run_pip(["--no-deps", "--no-index", "--no-build-isolation", "-e", ROOT], "installing attnlab itself")
    if stamp["extras"]:
        add_te(name)
    write_stamp(stamp)
    say(f".venv is ready: Python {stamp['python']}, the {name} set ({time.monotonic() - started:.0f} s)")


# ---- an interpreter of the reader's own


def installed_version(name):
    """The version of a distribution, None for what is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def needed_for(purpose):
    """The requirements in pyproject.toml that a make target needs; a container is not asked for more."""
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    tests = project["optional-dependencies"]["test"]
    if purpose in ("lint", "format"):
        return [text for text in tests if text.startswith("ruff")]
    users = {"jupyterlab": ("lab",), "nbval": ("test", "validate")}  # all else is needed for everything
    needed = [text for text in project["dependencies"] if purpose in users.get(text, (purpose,))]
    return needed + (tests if purpose == "test" else [])


def check(purpose):
    """Look at this interpreter for what a target needs; name all it lacks and one pip line to add that."""
    command, version = os.environ.get("PYTHON") or sys.executable, sys.version.split()[0]
    if sys.version_info < OLDEST:
        raise Problem(
            f"PYTHON={command} is Python {version}, which is too old: the course needs 3.11 or newer. "
            f"Name another: make {purpose} PYTHON=/path/to/python3.12"
        )
    missing, words = {}, []
    for text in needed_for(purpose):
        name, _, floor = text.partition(">=")
        found = installed_version(name)
        if not found or floor and release(found) < release(floor):
            missing[name] = text
            words.append(f"{name} {floor} or newer (has {found})" if found else name)
    if not missing:
        return
    # Pinned, JAX and numpy stay as they are: pip then picks a flax that fits them, not another JAX for flax.
    there = {name: installed_version(name) for name in ("jax", "jaxlib", "numpy") if name not in missing}
    held = [f"{name}=={found}" for name, found in there.items() if found]
    if "jax" in missing:
        held, name = [], choose_set().name
        missing["jax"] = missing["jax"].replace("jax", "jax" if name == "cpu" else f"jax[{name}]", 1)
    # Quoted, because ">" and "[" mean something to a shell.
    line = " ".join([command, "-m pip install", *map(shlex.quote, [*held, *missing.values()])])
    kept = ", which leaves JAX as it is" if held else ""
    raise Problem(
        f"PYTHON={command} (Python {version}) lacks {', '.join(words)}. Nothing was installed. "
        f"To add them{kept}:\n  {line}\nOr let make build its own .venv: make {purpose}"
    )


# ---- the command


def main(argv=None):
    parser = argparse.ArgumentParser(description="Make .venv from the lock that fits, or check an interpreter.")
    parser.add_argument("action", choices=("venv", "check"))
    parser.add_argument("--base", default="", help="venv: the Python to make .venv with (BASE_PYTHON)")
    parser.add_argument("--set", default="", help=f"venv: {', '.join(SETS)}; by the driver if not given (SET)")
    parser.add_argument("--extras", default="", help="venv: te adds TransformerEngine (EXTRAS)")
    parser.add_argument("--for", dest="purpose", default="run", help="check: the make target")
    options = parser.parse_args(argv)
    try:
        if options.action == "check":
            check(options.purpose)
        else:
            prepare(options.base, options.set, options.extras)
    except Problem as problem:
        print(f"make_env: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_env: interrupted; the next make finishes or remakes .venv", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
