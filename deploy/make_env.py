"""Make the course's Python environment: `.venv`, from the lock that fits this machine.

The Makefile starts it before every target that needs Python; when `.venv` is up to date it returns at once.
`make_env.py venv` makes or updates `.venv`; `make_env.py check` looks at an interpreter of the reader's own
(`make run PYTHON=python3`) and installs nothing. Every refusal is one line: what is wrong, what was found,
what to do.

Standard library only, in the syntax of Python 3.7: an old Python must be able to read this file to be told
that it is too old. Modules that only Python 3.11 has are imported where they are used.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "attnlab.json")
LOG = os.path.join(ROOT, "build", "make_env.log")
SETS = ("cpu", "cuda12", "cuda13")
OLDEST = (3, 11)
OTHERS = ("python3.14", "python3.13", "python3.12", "python3.11")  # tried when python3 won't do
SMI_SECONDS = 30  # a GPU that wakes up takes a few; a wedged driver never answers

Base = namedtuple("Base", "command version text ensurepip path")
Choice = namedtuple("Choice", "name why mend")


class Problem(Exception):
    """What is wrong, what was found and what to do, in one line."""


def say(text):
    print(text, flush=True)


def output_of(command, seconds):
    """Run a command; return (exit status, output and errors as text), also when it never starts or ends."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {seconds} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def last_line(text):
    return (text.strip().splitlines() or ["no words"])[-1].strip()


# ---- which Python makes .venv

PROBE = (
    "import sys; from importlib.util import find_spec as f; "
    "print('attnlab', '%d.%d.%d' % sys.version_info[:3], bool(f('venv') and f('ensurepip')), sys.executable)"
)


def probe(command):
    """Run an interpreter to learn what it is: a version manager's shim can be on PATH and still not run."""
    status, text = output_of([command, "-c", PROBE], 30)
    found = re.search(r"^attnlab (\d+)\.(\d+)\.(\d+) (True|False) (.+)$", text, re.MULTILINE)
    if status or not found:
        return None
    numbers = found.groups()[:3]
    version = tuple(int(n) for n in numbers)
    return Base(command, version, ".".join(numbers), found.group(4) == "True", found.group(5).strip())


def unfit(base):
    """Why this interpreter can't make .venv, and what to do; "" when it can."""
    if base.version < OLDEST:
        return (
            f"Python {base.text} ({base.command}) is too old: the course needs 3.11 or newer. Install it "
            "with `sudo apt install python3.11-venv` (or a newer one that your release has), or name "
            "another: make run BASE_PYTHON=/path/to/python3.12"
        )
    if not base.ensurepip:
        return (
            f"Python {base.text} ({base.command}) can't make .venv: its venv or ensurepip module is missing. "
            f"Install it with `sudo apt install {venv_package(base)}`, or name another Python: "
            "make run BASE_PYTHON=/path/to/python3.12"
        )
    return ""


def venv_package(base):
    """Debian's and Ubuntu's package for this very version: python3-venv only fits the release's own."""
    return f"python{base.version[0]}.{base.version[1]}-venv"


def find_base(named):
    """The interpreter to make .venv with: the one named, else python3, else the newest other that will do."""
    if named and named != "python3":
        base = probe(named)
        if not base:
            raise Problem(
                f"BASE_PYTHON={named} does not run as a Python. Name a Python of 3.11 or newer that does, "
                "for example BASE_PYTHON=python3.12"
            )
        if unfit(base):
            raise Problem(unfit(base))
        return base
    rejected = []
    for command in ("python3", *OTHERS):
        base = probe(command)
        if base and not unfit(base):
            return base
        if base:
            rejected.append(base)
    if not rejected:
        raise Problem("no Python runs here. Install one: sudo apt install python3-venv; then make run again")
    # Of those found, speak of the one with least to mend: a missing package is less than a missing Python.
    raise Problem(unfit(max(rejected, key=lambda base: base.version >= OLDEST)))


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
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", text)
    if status or not found:
        said = (text.strip().splitlines() or ["no output"])[0].strip()
        why = (
            f"nvidia-smi is here but gives no CUDA version (exit status {status}: {said}): the cpu set, and "
            "the course runs on the CPU. To use the GPU, mend the driver (a container: start it with GPUs) "
            "and make run again, or name the set: make run SET=cuda12"
        )
        return Choice("cpu", why, True)
    major, minor = int(found.group(1)), int(found.group(2))
    offers = f"the NVIDIA driver offers CUDA {major}.{minor}"
    if major < 12:
        why = (
            f"{offers}, and JAX needs 12 or newer: the cpu set, and the course runs on the CPU. To use the "
            "GPU, update the driver to 525 or newer and make run again"
        )
        return Choice("cpu", why, True)
    if major == 12:
        return Choice("cuda12", f"{offers}: the cuda12 set", False)
    # CUDA 13 left out every GPU older than Turing (compute capability 7.5); CUDA 12 still has them.
    status, text = output_of([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], SMI_SECONDS)
    found = re.findall(r"^\s*(\d+)\.(\d+)\s*$", text, re.MULTILINE) if status == 0 else []
    oldest = min(((int(a), int(b)) for a, b in found), default=(7, 5))
    if oldest < (7, 5):
        why = (
            f"{offers}, but a GPU here has compute capability {oldest[0]}.{oldest[1]} and CUDA 13 starts "
            "at 7.5: the cuda12 set"
        )
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
            stamp = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp):
    with open(STAMP + ".new", "w", encoding="utf-8") as file:
        json.dump(stamp, file, indent=1, sort_keys=True)
    os.replace(STAMP + ".new", STAMP)


@contextlib.contextmanager
def one_at_a_time():
    """Let a second make wait: two of them in one .venv would leave neither whole."""
    import fcntl

    with open(os.path.abspath(__file__), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make prepares .venv: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        yield


# ---- making it

UNREACHED = re.compile(
    r"Temporary failure in name resolution|Failed to resolve|Name or service not known"
    r"|Connection refused|Connection reset|Network is unreachable|No route to host|[Rr]ead timed out"
    r"|[Cc]onnect(?:ion)? timed? ?out|CERTIFICATE_VERIFY_FAILED"
    r"|Cannot connect to proxy|Tunnel connection failed"
)


def explain(text, doing):
    """pip's failure in one line."""
    log = os.path.relpath(LOG, ROOT)
    reason = UNREACHED.search(text)
    if "No space left on device" in text:
        return f"the disk is full while {doing}. Free some (a CUDA set takes several GB) and make run again"
    if reason:
        wanted = re.search(r"No matching distribution found for (\S+)", text)
        package = f" for {wanted.group(1)}" if wanted else ""
        return (
            f"no network for pip while {doing}: {reason.group(0)}{package} (all of pip's words: {log}). "
            "Check the network or the proxy and make run again. `make run PYTHON=python3` needs no network: "
            "it uses the modules that python3 has"
        )
    if "from versions: none" in text:
        return (
            f"pip failed while {doing}: its index offers nothing for this Python and machine, so it was not "
            f"reached or has no such wheel (all of pip's words: {log}). `make run PYTHON=python3` needs none"
        )
    errors = [line[len("ERROR: ") :] for line in text.splitlines() if line.startswith("ERROR: ")]
    said = last_line("\n".join(errors) or text).rstrip(".")
    return f"pip failed while {doing}: {said} (all of pip's words: {log})"


def run_pip(arguments, doing):
    """Run pip in .venv; show one moving line in a terminal, a count every 20 s elsewhere; keep all in LOG."""
    # -I: neither PYTHONPATH nor the user's own site-packages may answer for what .venv lacks.
    command = [
        VENV_PYTHON,
        "-I",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
    ] + arguments
    started = spoken = time.monotonic()
    lines, packages = [], 0
    live = sys.stdout.isatty()
    say(f"{doing} ...")
    os.makedirs(os.path.dirname(LOG), exist_ok=True)
    with open(LOG, "a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        pip = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT
        )
        try:
            for raw in pip.stdout:
                line = raw.decode("utf-8", "replace").rstrip()
                lines.append(line)
                log.write(line + "\n")
                packages += line.startswith("Collecting ")
                if live:
                    print(
                        "\r\x1b[K  " + line.strip()[: shutil.get_terminal_size().columns - 4],
                        end="",
                        flush=True,
                    )
                elif time.monotonic() - spoken > 20:
                    spoken = time.monotonic()
                    say(f"  {packages} packages so far")
            status = pip.wait()
        finally:
            if live:
                print("\r\x1b[K", end="", flush=True)
            if pip.poll() is None:  # interrupted: pip must not write on behind our back
                pip.terminate()
                pip.wait()
    if status:
        raise Problem(explain("\n".join(lines), doing))
    return time.monotonic() - started


def make_empty(base):
    """A new .venv with pip in it, stamped as begun; never in place of one that somebody else made."""
    begun = read_stamp() is not None
    foreign = os.path.islink(VENV) or (os.path.isdir(VENV) and os.listdir(VENV) and not begun)
    if foreign or (os.path.lexists(VENV) and not os.path.isdir(VENV)):
        raise Problem(
            ".venv is here but was not made by make. Move or remove it and make run again, or use it as it "
            "is: make run PYTHON=.venv/bin/python"
        )
    os.makedirs(VENV, exist_ok=True)
    # Stamped first and the stamp kept: a removal that is interrupted leaves something known as ours.
    write_stamp({})
    for name in os.listdir(VENV):
        path = os.path.join(VENV, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif path != STAMP:
            os.remove(path)
    say(f"making .venv with Python {base.text}")
    status, text = output_of([base.path, "-I", "-m", "venv", VENV], 600)
    if status:
        raise Problem(
            f"Python {base.text} ({base.path}) could not make .venv: {last_line(text)} Install its venv "
            f"package, `sudo apt install {venv_package(base)}`, or name another Python: "
            "make run BASE_PYTHON=/path/to/python3.12"
        )


def check_te(name):
    """Stop early where TransformerEngine can't be built: its JAX part comes as source only."""
    if name == "cpu":
        raise Problem("EXTRAS=te needs an NVIDIA GPU and its set of packages; the set here is cpu")
    cuda = name[len("cuda") :]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    needs = "EXTRAS=te builds TransformerEngine's JAX part from source and found no"
    container = "or use NVIDIA's JAX container, which has TransformerEngine: make run PYTHON=python3"
    if not (shutil.which("nvcc") or os.access(os.path.join(home, "bin", "nvcc"), os.X_OK)):
        raise Problem(
            f"{needs} nvcc (looked on PATH and in {home}/bin). Install the CUDA {cuda} toolkit and set "
            f"CUDA_HOME, {container}"
        )
    given = [os.environ[key] for key in ("CUDNN_PATH", "CUDNN_HOME") if os.environ.get(key)]
    folders = [os.path.join(folder, "include") for folder in (*given, home)] + ["/usr/include"]
    if not any(os.path.exists(os.path.join(folder, "cudnn.h")) for folder in folders):
        raise Problem(
            f"{needs} cudnn.h (looked in {', '.join(folders)}). Install the cuDNN headers "
            f"(libcudnn9-dev-cuda-{cuda}) or set CUDNN_PATH, {container}"
        )


def add_te(name):
    """Build TransformerEngine against the JAX in .venv, and change nothing that the lock put there."""
    frozen = os.path.join(VENV, "attnlab-installed.txt")
    status, text = output_of([VENV_PYTHON, "-I", "-m", "pip", "freeze", "--exclude-editable"], 120)
    if status:
        raise Problem(f"pip could not list what .venv holds: {last_line(text)}")
    with open(frozen, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in text.splitlines() if re.match(r"[\w.-]+==", line))
    cuda = name[len("cuda") :]
    run_pip(["-c", frozen, "pybind11[global]", "nvidia-cudnn-frontend"], "adding what builds TransformerEngine")
    run_pip(
        ["-c", frozen, "--no-build-isolation", f"transformer-engine[jax,core_cu{cuda}]"],
        "building TransformerEngine (takes many minutes)",
    )


def prepare(base_named="", set_named="", extras=""):
    """Make .venv, or bring it up to date, or find it so and return at once."""
    wanted = [word for word in re.split(r"[,\s]+", extras) if word]
    if set_named and set_named not in SETS:
        raise Problem(f"SET={set_named} is unknown: the sets are {', '.join(SETS)}")
    if set(wanted) - {"te"}:
        raise Problem(f"EXTRAS={extras} is unknown: te (TransformerEngine) is the one there is")
    done = read_stamp() or {}
    # What was named once holds until another is named: `make test` after `make run SET=cpu` changes nothing.
    set_named = set_named or (done["set"] if done.get("set_named") else "")
    choice = Choice(set_named, f"the {set_named} set, as named", False) if set_named else choose_set()
    if choice.mend:
        say(choice.why)
    name = choice.name
    if not set_named and name == "cpu":
        name = done.get("set", "cpu")  # a login node without a GPU does not take the GPU node's set away
    base = find_base(base_named) if base_named not in ("", "python3") else None
    stamp = {
        "extras": sorted({*wanted, *done.get("extras", [])}),
        "lock": digest(lock_of(name)),
        "project": digest(os.path.join(ROOT, "pyproject.toml")),
        "python": base.text if base else done.get("python"),
        "root": ROOT,  # the .venv of a copied checkout still points at the old place
        "set": name,
        "set_named": bool(set_named),
    }
    alive = os.access(VENV_PYTHON, os.X_OK)  # false too when the Python that it links to is gone
    if stamp == done and alive:
        return
    te = "te" in stamp["extras"]
    if te:
        check_te(name)
    started = time.monotonic()
    keeps = alive and all(stamp[key] == done.get(key) for key in ("python", "root", "set"))
    if keeps:
        say("bringing .venv up to date")
        write_stamp({})
    else:
        base = base or find_base("")
        stamp["python"] = base.text
        if not choice.mend:
            say(choice.why)
        make_empty(base)
    locked = keeps and stamp["lock"] == done["lock"]
    if not locked:
        with open(lock_of(name), encoding="utf-8") as file:
            hashes = ["--require-hashes"] if "--hash=" in file.read() else []
        # Wheels only: a source package would be built with whatever its build step fetches, past the lock.
        run_pip([*hashes, "--only-binary", ":all:", "-r", lock_of(name)], f"installing the {name} set")
    # The lock holds the build backend too, so this step needs no network.
    run_pip(["--no-deps", "--no-index", "--no-build-isolation", "-e", ROOT], "installing attnlab itself")
    if te and not (locked and "te" in done["extras"]):
        add_te(name)
    write_stamp(stamp)
    say(f".venv is ready: Python {stamp['python']}, the {name} set ({time.monotonic() - started:.0f} s)")


# ---- an interpreter of the reader's own

# What a target can do without, so that a container is not asked for more than it needs.
NOT_IN = {
    "run": ("jupyterlab", "nbval"),
    "bench": ("jupyterlab", "nbval"),
    "doctor": ("jupyterlab", "nbval"),
    "lab": ("nbval",),
    "test": ("jupyterlab",),
}
# Where the import has another name than the package.
MODULES = {"ipython": "IPython", "pytest-xdist": "xdist", "pyyaml": "yaml"}


def release(text):
    """The numbers a version starts with: 0.11.2.dev7+nv gives (0, 11, 2)."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(n) for n in found.group(0).split(".")) if found else ()


def installed_version(name):
    """A distribution's version, "?" for a module without one, None for what is not there."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "?" if importlib.util.find_spec(MODULES.get(name, name)) else None


def needed_for(purpose):
    """The requirements in pyproject.toml that a make target needs, as (text, name, oldest version or "")."""
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    texts, tests = project["dependencies"], project["optional-dependencies"]["test"]
    if purpose == "test":
        texts = texts + tests
    elif purpose in ("lint", "format"):
        texts = [text for text in texts + tests if re.match("nbformat|ruff", text)]
    parts = [(text, *text.partition(">=")[::2]) for text in texts]
    return [part for part in parts if part[1] not in NOT_IN.get(purpose, ())]


def check(purpose):
    """Look at this interpreter for what a target needs; name all it lacks and one pip line to add that."""
    command, version = os.environ.get("PYTHON") or sys.executable, sys.version.split()[0]
    if sys.version_info < OLDEST:
        raise Problem(
            f"PYTHON={command} is Python {version}, which is too old: the course needs 3.11 or newer. "
            f"Name another: make {purpose} PYTHON=/path/to/python3.12"
        )
    missing, words = {}, []
    for text, name, floor in needed_for(purpose):
        found = installed_version(name)
        if found is None:
            words.append(name)
        elif floor and found != "?" and release(found) < release(floor):
            words.append(f"{name} {floor} or newer (has {found})")
        else:
            continue
        missing[name] = text
    if not missing:
        return
    # Pinned, JAX and numpy stay as they are: pip then picks a flax that fits them, not another JAX for flax.
    held = [f"{name}=={installed_version(name)}" for name in ("jax", "jaxlib", "numpy") if name not in missing]
    held = [text for text in held if not text.endswith(("==None", "==?"))]
    if "jax" in missing:
        name = choose_set().name
        extra = "" if name == "cpu" else f"[{name}]"
        missing["jax"] = missing["jax"].replace("jax", "jax" + extra, 1)
        held = []
    # Quoted, because ">" and "[" mean something to a shell.
    line = " ".join([command, "-m pip install", *map(shlex.quote, [*held, *missing.values()])])
    managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if os.path.exists(managed) and sys.prefix == sys.base_prefix:
        line += " --break-system-packages"
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.action == "check":
            check(options.purpose)
        else:
            with one_at_a_time():
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
