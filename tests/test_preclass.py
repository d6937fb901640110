"""The check of a class's machines: the real script in real shells, behind an ssh and a kubectl that are not."""

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
from attnlab import cli, device, doctor, preclass, records
from attnlab.claims import HOLDS
from attnlab.ledger import LEDGER

# One worker runs them all, so that the classes below are asked once.
pytestmark = pytest.mark.xdist_group("preclass")

ROOT = pathlib.Path(__file__).parents[1]
GIB = 2**30
DOCTOR = {
    "device": "NVIDIA H200", "kind": "gpu", "driver": "580.1", "jax": "0.11.2", "cudnn": "9.19.0", "python": "3.12.3",
    "memory": {"total": 140 * GIB, "free": 139 * GIB, "held": GIB, "holders": []},
    "features": [{"key": "gpu", "name": "NVIDIA GPU", "ok": True, "reason": "NVIDIA H200", "todo": ""}],
    "checks": [{"name": "modules", "ok": True, "reason": "all import", "todo": ""}],
}  # fmt: skip
SAVED = [records.to_json(r) for r in records.saved().find(notebook="00_start_here")]
DONE = {"notebook": "00_start_here", "status": "done", "seconds": 12.0, "cell": 20, "cells": 20, "problem": ""}
SHELLS = ["sh", "dash", "bash --posix", "busybox sh", "ksh", "mksh"]
# Each machine is a folder, its home. It says what the tool itself would, or hangs, or runs the script there.
SHELL = """
cd "$MACHINES/$machine" || exit 99
if [ -f greeting ]; then cat greeting; fi
if [ -f complaint ]; then cat complaint >&2; exit 255; fi
if [ -f hangs ]; then echo $$ >hangs; exec sleep 60; fi
mkdir -p tmp
HOME=$PWD TMPDIR=$PWD/tmp PATH=$PWD/bin:$PATH
export HOME TMPDIR PATH
exec ${SHELL_THERE:-sh} -s
"""
SSH = '#!/bin/sh\nprintf "%s\\n" "$*" >>"$MACHINES/ssh.log"\nwhile [ "$1" != -- ]; do shift; done\nmachine=$2\n' + SHELL
KUBECTL = """#!/bin/sh
printf "%s\\n" "$*" >>"$MACHINES/kubectl.log"
if [ "$1" = get ]; then
  if [ -f "$MACHINES/pods.json" ]; then exec cat "$MACHINES/pods.json"; fi
  echo "Unable to connect to the server: dial tcp: i/o timeout" >&2; exit 1
fi
while [ "$1" != -- ]; do machine=$1; shift; done
"""


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def python_there(path, environment=""):
    """This interpreter, as another machine's."""
    program(path, f'#!/bin/sh\n{environment} exec "{sys.executable}" "$@"\n')


def checkout(folder, notebooks=ROOT / "notebooks"):
    folder.mkdir(parents=True)
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "notebooks").symlink_to(notebooks)
    return folder


def actor(folder, doctor=DOCTOR, outcome=DONE, lines=SAVED, status=0, errors="", then=""):
    """A checkout whose Python only says what a machine with a GPU would."""
    checkout(folder)
    line = doctor if isinstance(doctor, str) else json.dumps(doctor)
    (folder / "doctor.json").write_text(f"a library says hello\n{line}\n")
    (folder / "run.json").write_text(json.dumps(outcome and {outcome["notebook"]: outcome}))
    (folder / "records.jsonl").write_text("".join(f"{line}\n" for line in lines))
    program(
        folder / ".venv" / "bin" / "python",
        f"""#!/bin/sh
        case "$*" in
        *doctor*) cat doctor.json; printf '%s\\n' '{errors}' >&2; {then}
          exit {status} ;;
        *"run 00 --out"*) echo "[1/1] 00_start_here …"; mkdir -p "$6/results"
          if [ -s run.json ] && [ "$(cat run.json)" != null ]; then cp run.json "$6"; fi
          cp records.jsonl "$6/results/00_start_here.jsonl" ;;
        esac
        """,
    )
    return folder


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def machines(tmp_path_factory, patched):
    """The folder of all machines; ssh and kubectl reach them."""
    folder = tmp_path_factory.mktemp("machines")
    program(folder / "bin" / "ssh", SSH)
    program(folder / "bin" / "kubectl", KUBECTL + SHELL)
    patched.setenv("MACHINES", str(folder))
    patched.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return folder


def ask(machines, *arguments, env=(), **kwargs):
    command = [sys.executable, "-m", "attnlab", "preclass", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")} | dict(env)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=machines, **kwargs)


def changed(line, **fields):
    return json.dumps(json.loads(line) | fields)


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
The fingerprint for the ED25519 key sent by the remote host is
SHA256:KyddTA+3yUUFzOW4srPBJdx5nuDYkQREw5m5bJ60tr4.
Please contact your system administrator.
Add correct host key in /home/u/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/u/.ssh/known_hosts:1
  remove with:
  ssh-keygen -f "/home/u/.ssh/known_hosts" -R "[10.0.0.5]:2299"
Host key for [10.0.0.5]:2299 has changed and you have requested strict checking.
Host key verification failed.
"""
DENIED = """\
Warning: Permanently added '[10.0.0.5]:2299' (ED25519) to the list of known hosts.
*** Unauthorized access is forbidden ***
u@denied: Permission denied (publickey).
"""
JUMP = """\
ssh: connect to host 10.0.0.1 port 22: Connection refused
kex_exchange_identification: Connection closed by remote host
Connection closed by UNKNOWN port 65535
"""
NO_SHELL = """\
OCI runtime exec failed: exec failed: unable to start container process: exec: "sh": executable file not found in \
$PATH: unknown
command terminated with exit code 126
"""
NO_SERVER = """\
E1130 10:34:25.954397   30041 memcache.go:265] "Unhandled Error" err="couldn't get current server API group list: \
Get \\"http://10.0.0.5/api?timeout=32s\\": dial tcp 10.0.0.5: connect: connection refused"
The connection to the server 10.0.0.5 was refused - did you specify the right host or port?
"""
FORBIDDEN = """\
Error from server (Forbidden): pods "tool" is forbidden: User "u" cannot create resource "pods/exec" in API group "" \
in the namespace "default"
"""

REASONS = {
    "unknown": "Could not resolve hostname unknown: Name or service not known (check the name",
    "denied": "u@denied: Permission denied (publickey). (it must work without a password: ssh-copy-id denied)",
    "strange": "kex_exchange: gone (try it by hand)",
    "silent": "no answer, and no reason given",
    "empty": "the course was not found there: looked in the folder that a shell starts in, ~ and /workspace",
    "pythonless": "no Python there that starts: pyenv: python3: command not found; run `make run` there",
    "old": "too old to have `attnlab doctor --json`: update it (git pull)",
    "broken": "doctor: JAX found no device",
    "cpu": "computes on the CPU: nvidia-smi sees a GPU but JAX does not use it; unset JAX_PLATFORMS",
    "taken": "60.0 GiB of the GPU's 140 GiB are held by python, jupyter (pid 7, 60.0 GiB): shut them down",
    "dialect": "it answers in another form (KeyError: 'jax'): bring that checkout and this one to the same",
    "unready": "modules: not there: flax (add it)",
    "chatty": "it answers in another form (ValueError",
    "failing": "notebook 00 failed in cell 3 of 20: ValueError: why",
    "nothing": "notebook 00 did not run: [1/1] 00_start_here …",
    "stopped": "notebook 00 stopped in cell 3 of 20: run it there by hand",
    "newer": "it answers in another form (TypeError",
    "recordless": "none of its 0 records decides a claim of 00_start_here",
    "schema": "it answers in another form (ValueError: a record of schema 2: this attnlab reads schema 1.",
    "false": "a claim fails: Each row of the weights sums to 1: a query spreads one unit of attention. Measured:",
    "renamed": f"none of its {len(SAVED)} records decides a claim of 00_other",
    "fallen": "the notebook computed on the CPU, though doctor found the GPU",
    "cut": "the connection broke off during `attnlab doctor`: client_loop: send disconnect: Broken pipe; try",
}


@pytest.fixture(scope="module")
def asked(machines):
    """Every machine asked at once: (what was printed, the report of each)."""
    complaints = {
        "unknown": "Banner\nssh: Could not resolve hostname unknown: Name or service not known",
        "denied": "u@denied: Permission denied (publickey).",
        "strange": "kex_exchange: gone",
        "silent": "",
        "cut": "client_loop: send disconnect: Broken pipe",
    }
    for name, words in complaints.items():
        (machines / name).mkdir()
        (machines / name / "complaint").write_text(f"{words}\n")
    (machines / "cut" / "greeting").write_text("\n@attnlab begin\n\n@attnlab doctor\n")
    (machines / "empty").mkdir()
    shim = "#!/bin/sh\necho 'pyenv: python3: command not found' >&2\nexit 127\n"
    program(checkout(machines / "pythonless" / "course").parent / "bin" / "python3", shim)
    wrong = changed(SAVED[0], value=0.5)
    no_gpu = {
        "key": "gpu", "ok": False, "reason": "nvidia-smi sees a GPU but JAX does not use it",
        "todo": "unset JAX_PLATFORMS",
    }  # fmt: skip
    held = DOCTOR["memory"] | {
        "held": 60 * GIB, "holders": [{"pid": 7, "name": "python, jupyter", "bytes": 60 * GIB, "mine": False}]
    }  # fmt: skip
    on_cpu = [json.dumps((r := json.loads(line)) | {"env": r["env"] | {"kind": "cpu"}}) for line in SAVED]
    plays = {
        "green": {},
        "greener": {"doctor": DOCTOR | {"driver": "999.9"}},
        "old": {"status": 2, "errors": "attnlab: unrecognized arguments: --json. Help: attnlab --help"},
        "broken": {"status": 1, "errors": "attnlab: JAX found no device"},
        "cpu": {"doctor": DOCTOR | {"kind": "cpu", "features": [no_gpu]}},
        "taken": {"doctor": DOCTOR | {"memory": held}},
        "dialect": {"doctor": {k: v for k, v in DOCTOR.items() if k != "jax"}},
        "unready": {
            "doctor": DOCTOR
            | {"checks": [{"name": "modules", "ok": False, "reason": "not there: flax", "todo": "add it"}]}
        },
        "chatty": {"doctor": "no JSON at all"},
        "failing": {"outcome": DONE | {"status": "failed", "cell": 3, "problem": "ValueError: why"}},
        "stopped": {"outcome": DONE | {"status": "stopped", "cell": 3}, "lines": []},
        "nothing": {"outcome": None},
        "newer": {"outcome": DONE | {"mood": "good"}},
        "recordless": {"lines": []},
        "schema": {"lines": [changed(SAVED[0], schema=2)]},
        "false": {"lines": [wrong, *SAVED[1:]]},
        "renamed": {"outcome": DONE | {"notebook": "00_other"}},
        "fallen": {"lines": on_cpu},
    }
    for name, play in plays.items():
        actor(machines / name / "attention course", **play)
    (machines / "green" / "greeting").write_text("Welcome! No newline at the end")
    done = ask(machines, *REASONS, "green", "greener", "green")
    table = done.stdout.split("\n\n")[1]
    rows, name = {}, ""
    for line in table.splitlines()[2:]:
        name = line.split()[0] if line[0] != " " else name
        rows.setdefault(name, []).append(line)
    return done, {name: " ".join(" ".join(lines).split()) for name, lines in rows.items()}


@pytest.mark.parametrize("name", REASONS)
def test_a_red_machine_says_why(asked, name):
    done, rows = asked
    assert rows[name].split()[1] == "red" and f"{name}  red after" in done.stdout
    # The table wraps; the line of progress has the first reason whole.
    (line,) = [x for x in done.stdout.splitlines() if f"] {name}  red" in x]
    assert REASONS[name] in line


def test_a_green_machine(asked):
    row = asked[1]["green"]
    assert row.split()[1] == "green"
    mine = [c.judge_recorded(records.saved()) for c in LEDGER.values() if c.notebook == "00_start_here"]
    holds = sum(verdict.state == HOLDS for verdict in mine)
    assert f"NVIDIA H200 580.1 0.11.2 139 GiB of 140 GiB done, 12 s; {holds} claims hold, 0 fail –" in row


@pytest.mark.parametrize(
    "errors, reason",
    [
        (CHANGED, "make sure that it is the right machine, then: ssh-keygen -R '[10.0.0.5]:2299')"),
        ("Host key verification failed.\n", "failed. (connect once by hand to accept its key: ssh u@tool)"),
        (DENIED, "u@denied: Permission denied (publickey). (it must work without a password: ssh-copy-id u@tool)"),
        (JUMP, "ssh: connect to host 10.0.0.1 port 22: Connection refused (is sshd running there?)"),
        (NO_SHELL, "not found in $PATH: unknown (its container has no sh: use an image that has one)"),
        (NO_SERVER, "specify the right host or port? (is the cluster reachable? kubectl get pods)"),
        (FORBIDDEN, "(ask the cluster's administrator for the right to exec into pods)"),
        ('Error from server (NotFound): pods "tool" not found\n', "not found (is it still there? kubectl get pods)"),
    ],
)  # fmt: skip
def test_the_most_telling_line_of_a_tool_decides(errors, reason):
    (found,) = preclass._judge("u@tool", "", errors).reasons
    assert reason in found


def test_a_login_that_refuses_on_its_standard_output_is_quoted():
    report = preclass._judge("tool", "This account is currently not available.\n", "")
    assert report.reasons == ["This account is currently not available. (try it by hand)"]


def test_the_class_as_a_whole(asked):
    done, rows = asked
    assert done.returncode == 1 and done.stderr == ""
    assert list(rows) == [*REASONS, "green", "greener"]  # each once, in the order given
    assert f"green: 2 of {len(rows)}" in done.stdout and "\x1b" not in done.stdout
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("driver differs: ")]
    assert "999.9 on greener" in line and "580.1 on " in line
    assert "JAX differs" not in done.stdout and "GPU differs" not in done.stdout


def test_ssh_asks_no_question_and_takes_the_host_as_a_host(asked, machines):
    lines = (machines / "ssh.log").read_text().splitlines()
    assert "-o BatchMode=yes -o ConnectTimeout=10" in lines[0]
    assert sum(line.endswith(" -- green sh -s") for line in lines) == 1


def test_nothing_stays_on_a_machine(asked, machines):
    assert list(machines.glob("*/tmp/*")) == []
    assert (machines / "green" / "tmp").is_dir()


@pytest.mark.parametrize("shell", [s for s in SHELLS if shutil.which(s.split()[0])])
def test_any_shell_runs_it(machines, shell):
    name = shell.split()[0]
    actor(machines / name / "it's the course")
    done = ask(machines, name, "--folder", "~/it's the course", env={"SHELL_THERE": shell})
    assert done.returncode == 0 and done.stderr == "" and "green: 1 of 1" in done.stdout, done.stdout


def test_two_checkouts_are_named(machines, asked):
    actor(machines / "two" / "a")
    actor(machines / "two" / "b", doctor="broken")
    done = ask(machines, "two")
    assert done.returncode == 0, done.stdout
    a, b = machines / "two" / "a", machines / "two" / "b"
    assert f"two: the course in {a}; also in {b} (choose: --folder)" in done.stdout
    assert ask(machines, "two", "--folder", "b").returncode == 1
    assert "looked in nowhere; give --folder" in ask(machines, "two", "--folder", "nowhere").stdout


def test_a_machine_of_this_kind_is_red_only_for_its_cpu(machines):
    """The real thing: the real notebook, found and run by the script."""
    python_there(checkout(machines / "here" / "course") / ".venv" / "bin" / "python", f"PYTHONPATH='{ROOT / 'src'}'")
    done = ask(machines, "here", env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 1 and done.stderr == ""
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("[1/1] here  red")]
    assert ": computes on the CPU: " in line
    (row,) = [x for x in done.stdout.splitlines() if x.startswith("here ")]
    assert "claims hold, 0 fail" in row and "done, " in row and row.split()[2] == "none", done.stdout
    assert done.stdout.count("computes on the CPU") == 2  # no reason beside it
    assert list((machines / "here" / "tmp").iterdir()) == []


def test_a_real_failure_names_its_cell_and_python3_does_where_no_venv_is(machines):
    notebook = toys.notebook(toys.parameters(), toys.code("raise ValueError('why\\nlast line')"))
    toys.write(machines / "toys" / "00_toy.ipynb", notebook)
    python_there(checkout(machines / "toy", machines / "toys") / "bin" / "python3")
    done = ask(machines, "toy", env={"JAX_PLATFORMS": "cpu"})
    table = " ".join(done.stdout.split("\n\n")[1].split())
    assert "notebook 00 failed in cell 2 of 2: ValueError: why last line" in table, done.stdout


def test_a_pod_brings_its_own_environment(machines):
    notebook = toys.notebook(toys.parameters(), toys.code("raise ValueError('ran in the pod')"))
    toys.write(machines / "in_pod" / "00_toy.ipynb", notebook)
    checkout(machines / "pod" / "attention", machines / "in_pod")
    program(machines / "pod" / "bin" / "python3", "#!/bin/sh\necho 'the wrong Python' >&2\nexit 1\n")
    python_there(machines / "pod" / "opt" / "python3")
    (machines / "pod" / "env.sh").write_text(f"PATH={machines / 'pod' / 'opt'}:$PATH\n")
    done = ask(machines, "pod", env={"JAX_PLATFORMS": "cpu", "BASH_ENV": str(machines / "pod" / "env.sh")})
    assert "ran in the pod" in done.stdout, done.stdout


def test_a_python_without_jax_says_what_to_do(machines):
    bare = f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'  # without what is installed for it
    program(checkout(machines / "bare") / "bin" / "python3", bare)
    done = ask(machines, "bare")
    assert "doctor: No module named" in done.stdout and "run `make run` there" in done.stdout


def test_a_hang_ends_with_the_limit(machines, monkeypatch, capsys):
    (machines / "hang").mkdir()
    (machines / "hang" / "hangs").touch()
    actor(machines / "slow" / "course", then="sleep 60")
    monkeypatch.setattr(preclass, "LIMIT", 1.5)
    began = time.monotonic()
    assert preclass.main(["hang", "slow"], None, None, "") == 1
    said = capsys.readouterr().out
    assert time.monotonic() - began < 30
    assert "hang  red after" in said and "no answer within 0.025 minutes: log in by hand" in said
    assert "not ready within 0.025 minutes, during `attnlab doctor`" in said
    assert gone((machines / "hang" / "hangs").read_text())


def gone(pid: str) -> bool:
    try:
        return pathlib.Path(f"/proc/{int(pid)}/stat").read_text().split(") ")[1][0] == "Z"
    except FileNotFoundError:
        return True


def test_ctrl_c_ends_every_child(machines):
    names = [f"hang{n}" for n in range(preclass.AT_ONCE + 1)]
    folders = [machines / name for name in names]
    for folder in folders:
        folder.mkdir()
        (folder / "hangs").touch()
    running = subprocess.Popen(
        [sys.executable, "-m", "attnlab", "preclass", *names], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while sum(bool((f / "hangs").read_text()) for f in folders) < preclass.AT_ONCE:
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert (running.returncode, errors) == (130, "attnlab: stopped\n")
    started = [pid for f in folders if (pid := (f / "hangs").read_text())]
    assert len(started) == preclass.AT_ONCE  # the one that waited for its turn was not started
    assert all(map(gone, started))


# --- pods


def pod(name, phase="Running", state=("running", {}), **status):
    containers = [{"state": {state[0]: state[1]}}] if state else []
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": containers} | status}


def test_the_pods_of_a_class(machines):
    actor(machines / "pod-green" / "course")
    (machines / "pod-lost").mkdir()
    (machines / "pod-lost" / "complaint").write_text('error: unable to upgrade connection: container not found ("x")\n')
    unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have a GPU"}
    pulling = ("waiting", {"reason": "ImagePullBackOff", "message": "Back-off pulling image"})
    pods = [
        pod("pod-green"), pod("pod-lost"), pod("pod-pending", "Pending", None, conditions=[unmet]),
        pod("pod-image", "Pending", pulling), pod("pod-crash", state=("waiting", {"reason": "CrashLoopBackOff"})),
    ]  # fmt: skip
    (machines / "pods.json").write_text(json.dumps({"items": pods}))
    (machines / "kubectl.log").unlink(missing_ok=True)
    done = ask(machines, "--pods", "app=course,tier!=x", "--namespace", "class")
    assert done.returncode == 1 and done.stderr == "" and "green: 1 of 5" in done.stdout
    for words in (
        "pod-green  green after",
        'pod-lost  red after 0 s: error: unable to upgrade connection: container not found ("x") (its container is not',
        "its pod is Pending: Unschedulable: 0/3 nodes have a GPU; see: kubectl describe pod pod-pending",
        "its pod is Pending: ImagePullBackOff: Back-off pulling image;",
        "its pod is Running: CrashLoopBackOff;",
    ):
        assert words in done.stdout, done.stdout
    calls = (machines / "kubectl.log").read_text().splitlines()
    assert calls[0] == "get pods --selector=app=course,tier!=x --namespace=class --output=json"
    assert sorted(calls[1:]) == [  # none into a pod that can't run it
        f"exec --stdin --namespace=class {name} -- sh -s" for name in ("pod-green", "pod-lost")
    ]


def test_pods_that_can_not_be_listed(machines, capsys):
    (machines / "pods.json").unlink(missing_ok=True)
    assert cli.main(["preclass", "--pods", "app=course"]) == 1
    assert "kubectl can't list the pods: Unable to connect to the server: dial tcp: i/o timeout" in refusal(capsys)
    (machines / "pods.json").write_text('{"items": []}')
    assert cli.main(["preclass", "--pods", "app=course"]) == 2
    assert "no pods with the label app=course in kubectl's namespace" in refusal(capsys)


def refusal(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "no machines: name hosts, or a label of pods. Examples: attnlab preclass student@host1"),
        (["--pods", ""], "no machines"),
        (["a", "--pods", "x=y"], "hosts and --pods together: give one of them"),
        (["a", "--namespace", "n"], "--namespace n is for pods"),
        (["a", ""], "'' is no host"),
        (["--", "-oProxyCommand=touch"], "'-oProxyCommand=touch' is no host"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, words):
    assert cli.main(["preclass", *arguments]) == 2
    assert words in refusal(capsys)


@pytest.mark.parametrize(
    "arguments, words",
    [(["a"], "no ssh here: install it (sudo apt install openssh-client)"), (["--pods", "x"], "no kubectl")],
)
def test_a_tool_that_is_missing_here(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["preclass", *arguments]) == 1
    assert words in refusal(capsys)


# --- the line of doctor, and colours


def test_the_line_of_doctor_is_json_in_one_line(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    known = json.loads(line)
    assert known["python"].startswith("3.") and known["kind"] == device.current().kind
    assert {"key", "name", "ok", "reason", "todo"} == set(known["features"][0])
    assert 0 < known["memory"]["free"] <= known["memory"]["total"]


def test_what_others_hold_is_not_what_doctor_itself_holds(monkeypatch):
    gpu = device.Device("NVIDIA Test", "gpu", (9, 0), 80 * GIB, live=False)
    monkeypatch.setattr(device, "current", lambda: gpu)
    monkeypatch.setattr(device, "free_memory", lambda: 1)
    monkeypatch.setattr(device, "environment", lambda: {"kind": "gpu"})
    monkeypatch.setattr(device, "own_memory", lambda: 60 * GIB)
    monkeypatch.setattr(device, "gpu_memory", lambda: (71 * GIB, 80 * GIB))
    holders = [device.Holder(1, "me", 61 * GIB, True), device.Holder(2, "other", 10 * GIB, False)]
    monkeypatch.setattr(device, "memory_holders", lambda: holders)
    memory = json.loads(doctor.line())["memory"]
    assert (memory["held"], memory["free"]) == (10 * GIB, 70 * GIB)
    assert [h["name"] for h in memory["holders"]] == ["other"]
    monkeypatch.setattr(device, "gpu_memory", lambda: None)  # some boards do not tell
    memory = json.loads(doctor.line())["memory"]
    assert memory == {"total": 80 * GIB, "free": 1, "held": 0, "holders": []}


def test_colours_on_a_terminal_only(machines, monkeypatch):
    def shown():
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        preclass._show([preclass.Report("green-1"), preclass.Report("red-2", ["its red lamp"])])
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown()
    assert coloured.count("\x1b[32mgreen\x1b[0m") == coloured.count("\x1b[31mred\x1b[0m") == 1
    monkeypatch.setenv("NO_COLOR", "1")
    plain = shown()
    assert "\x1b" not in plain
    assert coloured.replace("\x1b[32m", "").replace("\x1b[31m", "").replace("\x1b[0m", "") == plain
