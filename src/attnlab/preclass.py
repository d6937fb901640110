"""Check the machines of a class: `attnlab doctor` and notebook 00 on each, then a green and red table with reasons.

A machine is a host that ssh reaches without a password, or a pod that kubectl reaches. Both run SCRIPT, a POSIX
shell script on standard input, so that nothing is installed there and nothing stays. Its answer is text and is judged
here; so are the claims, over the notebook's records.

A machine is green if it computes on a GPU, nobody else holds much of that GPU's memory, the notebook was done,
and none of the notebook's claims fails there.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from attnlab.course import BadRequest, Outcome
from attnlab.display import format_bytes, table_bundle

NUMBER = "00"  # the notebook that runs on each machine
LIMIT = 15 * 60  # seconds for one machine, all in all
AT_ONCE = 16  # machines
# No question may wait for an answer, a dead machine is noticed, and no connection is left in the background, where it
# would hold our pipes open.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=30 -o ControlMaster=no --".split()
INSTALL = {"ssh": "sudo apt install openssh-client", "kubectl": "https://kubernetes.io/docs/tasks/tools/ says how"}

SCRIPT = (pathlib.Path(__file__).parent / "data" / "preclass.sh").read_text(encoding="utf-8")

# What ssh and kubectl say, as patterns of a line, and what to do about it. They say several things at once: the first
# pattern here that is found decides, so the more telling ones stand first. HOST is what the pattern's group caught, or
# else the machine.
REMEDIES = {
    r"host key for (\S+) has changed": "make sure that it is the right machine, then: ssh-keygen -R HOST",
    r"host key verification failed": "connect once by hand to accept its key: ssh HOST",
    r"could not resolve hostname": "check the name, or give it a Host entry in ~/.ssh/config",
    r"permission denied \(": "it must work without a password: ssh-copy-id HOST",
    r"connect\w* to the server": "is the cluster reachable? kubectl get pods",
    r"connection refused": "is sshd running there?",
    r"timed out|no route to host": "is it on, and is its network reachable from here?",
    r"executable file not found": "its container has no sh: use an image that has one",
    r"^error.*forbidden": "ask the cluster's administrator for the right to exec into pods",
    r"unable to upgrade connection": "its container is not ready: kubectl describe pod HOST",
    r"^error.*not found": "is it still there? kubectl get pods",
}
# What the script's own problems mean.
PROBLEMS = {
    "folder": "the course was not found there: looked in {}; give --folder DIR",
    "python": "no Python there that starts: {}; run `make run` there",
    "temporary": "no temporary folder there: {}; is its disk full?",
}
ONE_VERSION = "bring that checkout and this one to the same version (git pull)"

# `command` runs a shell there; `away` is why there is no use in asking.
Machine = collections.namedtuple("Machine", ["name", "command", "away"], defaults=[""])


@dataclasses.dataclass
class Report:
    """What is known of one machine. It is green without `reasons`; `seen` has cells of the table by column."""

    name: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    note: str = ""
    seen: dict = dataclasses.field(default_factory=dict)
    notebook: str | None = None

    @property
    def verdict(self) -> str:
        return "red" if self.reasons else "green"


def main(hosts: list[str], pods: str | None, namespace: str | None, folder: str) -> int:
    """Ask every machine at once, say how each is as it answers, and print the table.

    Args:
      hosts: what ssh takes, each once.
      pods: a label selector, in place of hosts.
      namespace: of the pods; None for kubectl's own.
      folder: where the course lies on the machines; "" to look for it.

    Returns:
      0 when all are green, 1 otherwise.

    Raises:
      BadRequest: no machines, hosts and pods together, a host that is none, no pod with that label.
      OSError: ssh or kubectl is not here or does not start, or kubectl can't list the pods.
    """
    machines = _machines(hosts, pods, namespace)
    print(f"asking {', '.join(m.name for m in machines)}; at most {LIMIT / 60:g} minutes each …", flush=True)
    reports = _ask_all(machines, folder)
    _show(reports)
    green = sum(report.verdict == "green" for report in reports)
    print(f"\ngreen: {green} of {len(reports)}")
    return 0 if green == len(reports) else 1


def _machines(hosts: list[str], pods: str | None, namespace: str | None) -> list[Machine]:
    if bool(hosts) == bool(pods):
        wrong = "hosts and --pods together: give one of them" if pods else "no machines: name hosts, or a label of pods"
        raise BadRequest(f"{wrong}. Examples: attnlab preclass student@host1 host2; attnlab preclass --pods app=course")
    if namespace and not pods:
        raise BadRequest(f"--namespace {namespace} is for pods: add --pods SELECTOR, or leave it out")
    for host in hosts:
        if not host.strip() or host.startswith("-"):
            raise BadRequest(f"{host!r} is no host: give what ssh takes, such as student@host1")
    tool = "kubectl" if pods else "ssh"
    if not shutil.which(tool):
        raise OSError(f"no {tool} here: install it ({INSTALL[tool]})")
    return _pods(pods, namespace) if pods else [Machine(x, (*SSH, x, "sh", "-s")) for x in dict.fromkeys(hosts)]


def _pods(selector: str, namespace: str | None) -> list[Machine]:
    of = [f"--namespace={namespace}"] if namespace else []
    command = ["kubectl", "get", "pods", f"--selector={selector}", *of, "--output=json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as e:
        raise OSError(f"kubectl gave no list of pods within {e.timeout:g} s: is the cluster reachable?") from e
    if done.returncode:
        raise OSError(f"kubectl can't list the pods: {_last_line(done.stderr)}; try it: {shlex.join(command[:-1])}")
    pods = {pod["metadata"]["name"]: pod for pod in json.loads(done.stdout)["items"]}
    if not pods:
        where = f"namespace {namespace}" if namespace else "kubectl's namespace"
        raise BadRequest(f"no pods with the label {selector} in {where}: kubectl get pods --show-labels lists them")
    run = ("kubectl", "exec", "--stdin", *of)
    return [Machine(name, (*run, name, "--", "sh", "-s"), _away(pod)) for name, pod in pods.items()]


def _away(pod: dict) -> str:
    """Why nothing can run in the pod, or ""."""
    status = pod.get("status", {})
    states = [c.get("state", {}) for c in status.get("containerStatuses", [])]
    phase = "being deleted" if pod["metadata"].get("deletionTimestamp") else status.get("phase", "Unknown")
    if phase == "Running" and any("running" in state for state in states):
        return ""
    stopped = [state.get("waiting") or state.get("terminated") or {} for state in states]
    unmet = [c for c in status.get("conditions", []) if c.get("status") == "False" and c.get("message")]
    said = [": ".join(filter(None, (x.get("reason"), x.get("message")))) for x in (status, *stopped, *unmet)]
    why = next((f": {_short(words)}" for words in said if words), "")
    return f"its pod is {phase}{why}; see: kubectl describe pod {pod['metadata']['name']}"


# --- asking


def _ask_all(machines: list[Machine], folder: str) -> list[Report]:
    script = f"wanted={shlex.quote(folder)} limit={LIMIT} number={NUMBER}\n{SCRIPT}"
    children, began = [], time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    asked = [pool.submit(_ask, machine, script, children) for machine in machines]
    try:
        for number, done in enumerate(concurrent.futures.as_completed(asked), 1):
            report = done.result()
            verdict = f"{report.name}  {report.verdict} after {time.monotonic() - began:.0f} s"
            print(f"[{number}/{len(machines)}] {': '.join([verdict, *report.reasons[:1]])}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # first, or as one is ended the next would start
        while not all(one.done() for one in asked):  # one may be just starting
            for child in children:
                _end(child)
            time.sleep(0.02)
    return [done.result() for done in asked]


def _ask(machine: Machine, script: str, children: list) -> Report:
    if machine.away:
        return Report(machine.name, [machine.away])
    # In a session of its own: Ctrl-C is ours to handle, and what the child starts is ended with it.
    child = subprocess.Popen(
        machine.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", errors="replace", start_new_session=True,
    )  # fmt: skip
    children.append(child)
    try:
        return _judge(machine.name, *child.communicate(script, timeout=LIMIT))
    except subprocess.TimeoutExpired:
        _end(child)
        return _judge(machine.name, *child.communicate(), late=True)


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


# --- what the answers mean


def _judge(name: str, said: str, errors: str, late: bool = False) -> Report:
    """The report of a machine, from what SCRIPT said there and what the tool that ran it complained of."""
    chunks = [chunk.partition("\n") for chunk in f"\n{said}".split("\n@attnlab ")[1:]]
    # What a broken connection cut off reads as "".
    report, parts = Report(name), collections.defaultdict(str, {part: body.strip("\n") for part, _, body in chunks})
    found, *others = dict.fromkeys(parts["folders"].splitlines()) or [""]
    if others:
        report.note = f"{name}: the course in {found}; also in {', '.join(others)} (choose: --folder)"
    try:
        for reason in _why_red(report, parts, said, errors, late):
            report.reasons.append(reason)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        report.reasons.append(f"it answers in another form ({_short(f'{type(e).__name__}: {e}')}): {ONE_VERSION}")
    return report


def _why_red(report: Report, parts: dict, said: str, errors: str, late: bool) -> Iterator[str]:
    limit, status = f"{LIMIT / 60:g} minutes", parts.get("doctor-status")
    problem = next((key for key in PROBLEMS if f"problem {key}" in parts), None)
    if "begin" not in parts:
        words = f"{said}\n{errors}"  # some refusals come from the login there, on its standard output
        yield f"no answer within {limit}: log in by hand and see" if late else _unreached(report.name, words)
    elif problem:
        yield PROBLEMS[problem].format(_last_line(parts[f"problem {problem}"]))
    elif status == "2":  # the command line does not know the words
        yield "its checkout is too old to have `attnlab doctor --json`: update it (git pull)"
    elif status in ("124", "130", "137"):
        yield f"`attnlab doctor` was ended there after {limit}, or for memory: run it there by hand"
    elif status not in (None, "0"):
        yield f"doctor: {_complaint(parts, 'doctor')}"
    else:
        yield from _judge_doctor(report, parts) if status else ()
        command = f"`attnlab run {NUMBER}`" if status else "`attnlab doctor`"
        if "end" in parts:
            yield from _judge_notebook(report, parts)
        elif late:
            yield f"not ready within {limit}, during {command}: run it there by hand"
        else:
            yield f"the connection broke off during {command}: {_last_line(errors) or 'no reason given'}; try again"


def _unreached(name: str, words: str) -> str:
    """Why the script was not even started there."""
    for sign, remedy in REMEDIES.items():
        for line in words.splitlines():
            if found := re.search(sign, line, re.IGNORECASE):
                return f"{_short(line)} ({remedy.replace('HOST', shlex.quote((*found.groups(), name)[0]))})"
    return f"{_last_line(words) or 'no answer, and no reason given'} (try it by hand)"


def _judge_doctor(report: Report, parts: dict) -> Iterator[str]:
    from attnlab.session import TAKEN

    (line,) = [x for x in parts["doctor"].splitlines() if x.startswith("{")]
    known = json.loads(line)
    memory, total, held = known["memory"], known["memory"]["total"], known["memory"]["held"]
    report.seen = {"GPU": "none", "driver": known["driver"], "JAX": known["jax"]}
    for check in known["checks"]:
        if not check["ok"] and check["name"] != "JAX uses the GPU":  # that comes next, in other words
            yield f"{check['name']}: {check['reason']} ({check['todo']})"
    if known["kind"] != "gpu":
        (gpu,) = [f for f in known["features"] if f["key"] == "gpu"]
        yield f"computes on the CPU: {'; '.join(filter(None, (gpu['reason'], gpu['todo'])))}"
        return
    report.seen |= {"GPU": known["device"], "free memory": f"{format_bytes(memory['free'])} of {format_bytes(total)}"}
    if total and held > TAKEN * total:
        names = ", ".join(f"{h['name']} (pid {h['pid']}, {format_bytes(h['bytes'])})" for h in memory["holders"])
        names = names or "processes that can not be seen from there"
        share = f"{format_bytes(held)} of the GPU's {format_bytes(total)}"
        yield f"{share} are held by {names}: shut them down (Kernel > Shut Down)"


def _judge_notebook(report: Report, parts: dict) -> Iterator[str]:
    from attnlab.claims import FAILS, HOLDS
    from attnlab.ledger import LEDGER
    from attnlab.records import Records, from_json

    if not parts["outcome"]:
        yield f"notebook {NUMBER} did not run: {_complaint(parts, 'run')}"
        return
    ((notebook, fields),) = json.loads(parts["outcome"]).items()
    outcome = Outcome(**fields)
    report.notebook = f"{outcome.status}, {outcome.seconds:.0f} s"
    if outcome.status != "done":
        yield f"notebook {NUMBER} {outcome.status} {outcome.where}: {_short(outcome.problem) or 'run it there by hand'}"
    records = Records(from_json(line) for line in parts["records"].splitlines() if line.strip())
    verdicts = [(c.sentence, *c.judge_recorded(records)) for c in LEDGER.values() if c.notebook == notebook]
    fails = [f"a claim fails: {said} Measured: {measured}" for said, state, measured in verdicts if state == FAILS]
    holds = sum(state == HOLDS for _, state, _ in verdicts)
    report.notebook += f"; {holds} claims hold, {len(fails)} fail"
    yield from fails
    if report.seen["GPU"] != "none" and any(r.env.get("kind") != "gpu" for r in records):
        yield "the notebook computed on the CPU, though doctor found the GPU: was its memory taken meanwhile?"
    if outcome.status == "done" and not holds and not fails:
        yield f"none of its {len(records)} records decides a claim of {notebook}: {ONE_VERSION}"


def _complaint(parts: dict, command: str) -> str:
    """Why a command failed, in its own words."""
    words = _last_line(parts[f"{command}-errors"]) or _last_line(parts[command])
    if "this Python is incomplete" in words and parts["python"] == "python3":  # what follows is about a .venv
        words = words.split(": this Python")[0]
        return f"{words}; it has no .venv, and its python3 is incomplete: run `make run` there"
    return words or f"exit status {parts[f'{command}-status']}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _short(lines[-1].removeprefix("attnlab: ")) if lines else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


# --- what the instructor sees


def _show(reports: list[Report]) -> None:
    seen = ["GPU", "driver", "JAX", "free memory"]
    headers = ["machine", "verdict", *seen, f"notebook {NUMBER}", "reasons"]
    rows = [[r.name, r.verdict, *map(r.seen.get, seen), r.notebook, "\n".join(r.reasons) or None] for r in reports]
    print("\n" + _coloured(table_bundle(headers, rows, aligns=["left"] * len(headers))["text/plain"]))
    lines = [report.note for report in reports if report.note]
    for what in seen[:3]:
        having = collections.defaultdict(list)
        for report in reports:
            having[report.seen.get(what) or "none"].append(report.name)
        having.pop("none", None)
        if len(having) > 1:
            lines.append(f"{what} differs: " + "; ".join(f"{value} on {', '.join(n)}" for value, n in having.items()))
    if lines:
        print("\n" + "\n".join(lines))


def _coloured(table: str) -> str:
    """Green and red words on a terminal. After the layout, because colour codes have a length but no width."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return table
    at = table.index("verdict")
    for word, colour in {"green": 32, "red": 31}.items():
        table = re.sub(rf"(?m)^(.{{{at}}}){word}\b", f"\\1\x1b[{colour}m{word}\x1b[0m", table)
    return table
