"""Check the machines of a class: `attnlab doctor` and notebook 00 on each, then a green and red table with reasons.

A machine is a host that ssh reaches without a password, or a pod that kubectl reaches. Both run SCRIPT, a POSIX
shell script on standard input, so that nothing is installed there and nothing stays. Its answers come back as
text: the line of `attnlab doctor --json`, what became of the notebook, and the notebook's records. The claims
are judged here, over those records.

A machine is green if it computes on a GPU, nobody else holds much of that GPU's memory, the notebook was done,
and none of the notebook's claims fails there.
"""

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
import threading
import time

from attnlab.course import BadRequest, Outcome
from attnlab.display import format_bytes, table_bundle

NUMBER = "00"  # the notebook that runs on each machine
LIMIT = 15 * 60  # seconds for one machine, all in all
AT_ONCE = 16  # machines
TAKEN = 0.1  # the share of the GPU's memory that others may hold: a desktop's window system holds less

SCRIPT = (pathlib.Path(__file__).parent / "data" / "preclass.sh").read_text(encoding="utf-8")
LOOKED_IN = "the folder that a shell starts in, ~ and /workspace, and one level below each"

ONE_VERSION = "bring that checkout and this one to the same version (git pull)"

# What ssh and kubectl say, and what to do about it.
REMEDIES = {
    "could not resolve hostname": "check the name, or give it a Host entry in ~/.ssh/config",
    "permission denied": "it must work without a password: ssh-copy-id HOST",
    "host key verification failed": "connect once by hand to accept its key: ssh HOST",
    "identification has changed": "make sure that it is the right machine, then: ssh-keygen -R HOST",
    "connection refused": "is sshd running there?",
    "timed out": "is it on, and is its network reachable from here?",
    "no route to host": "is it on, and is its network reachable from here?",
    "forbidden": "ask the cluster's administrator for the right to exec into pods",
    "executable file not found": "its container has no sh: use an image that has one",
    "unable to upgrade connection": "its container is not ready: kubectl describe pod HOST",
    "not found": "is it still there? kubectl get pods",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine: the command that runs a shell there, or why there is no use in asking."""

    name: str
    command: tuple[str, ...] = ()
    away: str = ""


@dataclasses.dataclass
class Report:
    """What is known of one machine. It is green without `reasons`."""

    name: str
    reasons: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    doctor: dict = dataclasses.field(default_factory=dict)
    notebook: str | None = None  # the table's cell

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
      OSError: ssh or kubectl is not here, or kubectl can't list the pods.
    """
    if bool(hosts) == bool(pods):
        wrong = "hosts and --pods together: give one of them" if pods else "no machines: name hosts, or a label of pods"
        raise BadRequest(f"{wrong}. Examples: attnlab preclass student@host1 host2; attnlab preclass --pods app=course")
    if namespace and not pods:
        raise BadRequest(f"--namespace {namespace} is for pods: add --pods SELECTOR, or leave it out")
    machines = _pods(pods, namespace) if pods else _hosts(hosts)
    print(f"asking {', '.join(m.name for m in machines)}; at most {LIMIT / 60:g} minutes each …", flush=True)
    reports = _ask_all(machines, folder)
    _show([reports[machine.name] for machine in machines])
    green = sum(report.verdict == "green" for report in reports.values())
    print(f"\ngreen: {green} of {len(reports)}")
    return 0 if green == len(reports) else 1


# --- on the machine itself


def doctor_line() -> str:
    """What `attnlab doctor` knows, as one line of JSON. Raises `attnlab.device.DeviceNotFound`."""
    from attnlab import device
    from attnlab.features import features

    known = [{"key": key, **dataclasses.asdict(f)} for key, f in features().items()]
    memory = {"total": device.current().memory, "free": device.free_memory(), "held": 0, "holders": []}
    if others := device.held_by_others():
        held, total = others
        holders = [dataclasses.asdict(h) for h in device.memory_holders() or [] if not h.mine]
        # Free is what the next process can have: what this one took for itself goes with it.
        memory = {"total": total, "free": total - held, "held": held, "holders": holders}
    return json.dumps(device.environment() | {"memory": memory, "features": known})


# --- which machines


def _hosts(hosts: list[str]) -> list[Machine]:
    for host in hosts:
        if not host.strip() or host.startswith("-"):
            raise BadRequest(f"{host!r} is no host: give what ssh takes, such as student@host1")
    _need("ssh", "sudo apt install openssh-client")
    # No question may wait for an answer, a dead machine is noticed, and no connection is left in the background,
    # where it would hold our pipes open.
    options = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=30", "ControlMaster=no")
    words = [word for option in options for word in ("-o", option)]
    return [Machine(host, ("ssh", *words, "--", host, "sh", "-s")) for host in dict.fromkeys(hosts)]


def _pods(selector: str, namespace: str | None) -> list[Machine]:
    _need("kubectl", "https://kubernetes.io/docs/tasks/tools/ says how")
    of = [f"--namespace={namespace}"] if namespace else []
    command = ["kubectl", "get", "pods", f"--selector={selector}", *of, "--output=json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as e:
        raise OSError(f"kubectl gave no list of pods within {e.timeout:g} s: is the cluster reachable?") from e
    if done.returncode:
        raise OSError(f"kubectl can't list the pods: {_last_line(done.stderr)}; try it: {shlex.join(command[:-1])}")
    pods = json.loads(done.stdout)["items"]
    if not pods:
        where = f"namespace {namespace}" if namespace else "kubectl's namespace"
        raise BadRequest(f"no pods with the label {selector} in {where}: kubectl get pods --show-labels lists them")
    machines = []
    for pod in pods:
        name = pod["metadata"]["name"]
        exec = ("kubectl", "exec", "--stdin", *of, name, "--", "sh", "-s")
        machines.append(Machine(name, exec, _away(pod)))
    return machines


def _away(pod: dict) -> str:
    """Why nothing can run in the pod, or ""."""
    status = pod.get("status", {})
    states = [c.get("state", {}) for c in status.get("containerStatuses", [])]
    phase = "being deleted" if pod["metadata"].get("deletionTimestamp") else status.get("phase", "Unknown")
    if phase == "Running" and any("running" in state for state in states):
        return ""
    stopped = [state.get("waiting") or state.get("terminated") or {} for state in states]
    unmet = [c for c in status.get("conditions", []) if c.get("status") == "False" and c.get("message")]
    for why in [status, *stopped, *unmet]:
        if why.get("reason") or why.get("message"):
            words = ": ".join(filter(None, (why.get("reason"), why.get("message"))))
            return f"its pod is {phase}: {_short(words)}; see: kubectl describe pod {pod['metadata']['name']}"
    return f"its pod is {phase}; see: kubectl describe pod {pod['metadata']['name']}"


def _need(tool: str, how: str) -> None:
    if not shutil.which(tool):
        raise OSError(f"no {tool} here: install it ({how})")


# --- asking


class _Children:
    """The processes that run, so that Ctrl-C ends them all and starts no other."""

    def __init__(self):
        self.lock, self.started, self.stopped = threading.Lock(), [], False

    def start(self, command) -> subprocess.Popen:
        with self.lock:
            if self.stopped:
                raise OSError("stopped")
            # In a session of its own: Ctrl-C is ours to handle, and what it starts is ended with it.
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
            self.started.append(child)
            return child

    def end_all(self) -> None:
        with self.lock:
            self.stopped = True
        for child in self.started:
            _end(child)


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)


def _ask_all(machines: list[Machine], folder: str) -> dict[str, Report]:
    script = f"wanted={shlex.quote(folder)} limit={LIMIT} number={NUMBER}\n{SCRIPT}"
    children, reports = _Children(), {}
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    began = time.monotonic()
    try:
        asked = [pool.submit(_ask, machine, script, children) for machine in machines]
        for done in concurrent.futures.as_completed(asked):
            report = done.result()
            reports[report.name] = report
            words = f": {report.reasons[0]}" if report.reasons else ""
            seconds = time.monotonic() - began
            print(
                f"[{len(reports)}/{len(machines)}] {report.name}  {report.verdict} after {seconds:.0f} s{words}",
                flush=True,
            )
    finally:
        children.end_all()
        pool.shutdown(cancel_futures=True)
    return reports


def _ask(machine: Machine, script: str, children: _Children) -> Report:
    if machine.away:
        return Report(machine.name, [machine.away])
    try:
        child = children.start(machine.command)
    except OSError as e:
        return Report(machine.name, [f"{machine.command[0]} does not start: {e.strerror or e}"])
    late = False
    try:
        said, errors = child.communicate(script, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        late = True
        _end(child)
        said, errors = child.communicate()
    return judge(machine.name, said, errors, late)


# --- what the answers mean


def judge(name: str, said: str, errors: str = "", late: bool = False) -> Report:
    """The report of one machine.

    Args:
      name: the machine's name.
      said: the standard output of SCRIPT there.
      errors: what the tool that ran it complained of.
      late: whether the time limit ended it.
    """
    report, parts = Report(name), _parts(said)
    folders = list(dict.fromkeys(parts.get("folder", [])))
    if len(folders) > 1:
        report.notes.append(f"{name}: the course in {folders[0]}; also in {', '.join(folders[1:])} (choose: --folder)")
    report.reasons += _not_asked(name, parts, errors, late)
    if report.reasons:
        return report
    if "doctor-status" not in parts:
        report.reasons.append(_broken_off("doctor", errors, late))
        return report
    report.reasons += _judge_doctor(report, parts)
    if report.doctor and "end" in parts:
        report.reasons += _judge_notebook(report, parts)
    elif report.doctor:
        report.reasons.append(_broken_off(f"run {NUMBER}", errors, late))
    return report


def _parts(said: str) -> dict[str, list[str]]:
    """The parts of an answer by name; several where a part came several times."""
    parts = {}
    for chunk in f"\n{said}".split("\n@attnlab ")[1:]:
        name, _, body = chunk.partition("\n")
        parts.setdefault(name, []).append(body.strip("\n"))
    return parts


def _last(parts: dict, name: str) -> str:
    return parts.get(name, [""])[-1]


def _not_asked(name: str, parts: dict, errors: str, late: bool) -> list[str]:
    """Why `attnlab` was not even started there."""
    if "begin" not in parts:
        if late:
            return [f"no answer within {LIMIT / 60:g} minutes: log in by hand and see"]
        words = _last_line(errors)
        found = (remedy for sign, remedy in REMEDIES.items() if sign in words.lower())
        remedy = next(found, "try it by hand")
        return [f"{words or 'no answer, and no reason given'} ({remedy.replace('HOST', name)})"]
    if "problem folder" in parts:
        where = _last(parts, "problem folder") or LOOKED_IN
        return [f"the course was not found there: looked in {where}; give --folder DIR"]
    if "problem python" in parts:
        return [f"no Python there that starts: {_last_line(_last(parts, 'problem python'))}; run `make run` there"]
    if "problem temporary" in parts:
        return [f"no temporary folder there: {_last_line(_last(parts, 'problem temporary'))}; is its disk full?"]
    return []


def _broken_off(command: str, errors: str, late: bool) -> str:
    if late:
        return f"not ready within {LIMIT / 60:g} minutes, during `attnlab {command}`: run it there by hand"
    return f"the connection broke off during `attnlab {command}`: {_last_line(errors) or 'no reason given'}; try again"


def _judge_doctor(report: Report, parts: dict) -> list[str]:
    status = _last(parts, "doctor-status")
    if status == "2":  # the command line does not know the words
        return ["its checkout is too old to have `attnlab doctor --json`: update it (git pull)"]
    if status in ("124", "130", "137"):
        return [f"`attnlab doctor` was ended there after {LIMIT / 60:g} minutes, or for memory: run it there by hand"]
    if status != "0":
        return [f"doctor: {_complaint(parts, 'doctor')}"]
    try:
        (line,) = [x for x in _last(parts, "doctor").splitlines() if x.startswith("{")]
        known = json.loads(line)
        features = {f["key"]: f for f in known["features"]}
        memory, kind = known["memory"], known["kind"]
        held, total = memory["held"], memory["total"]
    except (ValueError, KeyError, TypeError) as e:
        return [f"its doctor speaks another form ({_short(f'{type(e).__name__}: {e}')}): {ONE_VERSION}"]
    report.doctor = known
    if kind != "gpu":
        gpu = features.get("gpu", {})
        why = "; ".join(filter(None, (gpu.get("reason"), gpu.get("todo"))))
        return [f"computes on the CPU: {why}"]
    if total and held > TAKEN * total:
        names = ", ".join(f"{h['name']} (pid {h['pid']}, {format_bytes(h['bytes'])})" for h in memory["holders"])
        return [
            f"{format_bytes(held)} of the GPU's {format_bytes(total)} are held by "
            f"{names or 'processes that can not be seen from there'}: shut them down (Kernel > Shut Down)"
        ]
    return []


def _judge_notebook(report: Report, parts: dict) -> list[str]:
    if not _last(parts, "outcome"):
        return [f"notebook {NUMBER} did not run: {_complaint(parts, 'run')}"]
    try:
        ((name, fields),) = json.loads(_last(parts, "outcome")).items()
        outcome = Outcome(**fields)
    except (ValueError, AttributeError, TypeError) as e:
        return [f"its run.json has another form ({_short(f'{type(e).__name__}: {e}')}): {ONE_VERSION}"]
    report.notebook = f"{outcome.status}, {outcome.seconds:.0f} s"
    if outcome.status == "stopped":
        return [f"notebook {NUMBER} was stopped {outcome.where} after {outcome.seconds:.0f} s: run it there by hand"]
    found = [f"notebook {NUMBER} failed {outcome.where}: {_short(outcome.problem)}"] if outcome.problem else []
    return found + _judge_claims(report, name, _last(parts, "records"))


def _complaint(parts: dict, command: str) -> str:
    """Why a command failed, in its own words."""
    words = _last_line(_last(parts, f"{command}-errors")) or _last_line(_last(parts, command))
    if "this Python is incomplete" in words and _last(parts, "python") == "python3":
        # What follows is about a .venv.
        words = (
            words.split(": this Python")[0] + "; it has no .venv, and its python3 is incomplete: run `make run` there"
        )
    return words or f"exit status {_last(parts, f'{command}-status')}"


def _judge_claims(report: Report, notebook: str, lines: str) -> list[str]:
    from attnlab.claims import FAILS, HOLDS
    from attnlab.ledger import LEDGER
    from attnlab.records import Records, from_json

    try:
        records = Records(from_json(line) for line in lines.splitlines() if line.strip())
    except ValueError as e:
        return [f"its records can't be judged here: {e} So {ONE_VERSION}"]
    if not records:
        return ["the notebook made no records, so no claim can be judged"]
    missing = {f["key"] for f in report.doctor["features"] if not f["ok"]}
    claims = [c for c in LEDGER.values() if c.notebook == notebook and c.needs not in missing]
    verdicts = [(c, c.judge(records)) for c in claims]
    fails = [(c, v) for c, v in verdicts if v.state == FAILS]
    holds = sum(v.state == HOLDS for _, v in verdicts)
    report.notebook += f"; {holds} claims hold, {len(fails)} fail"
    found = [f"a claim fails: {c.sentence} Measured: {v.measured}" for c, v in fails]
    if report.doctor["kind"] == "gpu" and any(r.env.get("kind") != "gpu" for r in records):
        found.append("the notebook computed on the CPU, though doctor found the GPU: was its memory taken meanwhile?")
    if not holds and not fails:
        found.append(f"none of its records decides a claim of {notebook}: {ONE_VERSION}")
    return found


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _short(lines[-1].removeprefix("attnlab: ")) if lines else ""


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


# --- what the instructor sees


def _show(reports: list[Report]) -> None:
    rows = []
    for report in reports:
        known, gpu, free = report.doctor, None, None
        if known.get("kind") == "gpu":
            memory = known["memory"]
            gpu, free = known["device"], f"{format_bytes(memory['free'])} of {format_bytes(memory['total'])}"
        elif known:
            gpu = "none"
        said = [report.notebook, "\n".join(report.reasons) or None]
        rows.append([report.name, report.verdict, gpu, known.get("driver"), known.get("jax"), free, *said])
    headers = ["machine", "verdict", "GPU", "driver", "JAX", "free memory", f"notebook {NUMBER}", "reasons"]
    print("\n" + _coloured(table_bundle(headers, rows, aligns=["left"] * len(headers))["text/plain"]))
    lines = [*(note for report in reports for note in report.notes), *_differences(reports)]
    if lines:
        print("\n" + "\n".join(lines))


def _coloured(table: str) -> str:
    """Green and red words on a terminal. After the layout, because colour codes have a length but no width."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return table
    at = table.index("verdict")

    def paint(line):
        head, word, rest = line[:at], line[at : at + 7], line[at + 7 :]
        return head + re.sub("green", "\x1b[32mgreen\x1b[0m", re.sub("red", "\x1b[31mred\x1b[0m", word)) + rest

    return "\n".join(map(paint, table.split("\n")))


def _differences(reports: list[Report]) -> list[str]:
    """A line for each of GPU, driver and JAX in which the machines differ."""
    lines = []
    for what, key in {"GPU": "device", "driver": "driver", "JAX": "jax"}.items():
        having = {}
        for report in reports:
            if report.doctor and (key == "jax" or report.doctor["kind"] == "gpu"):
                having.setdefault(report.doctor.get(key), []).append(report.name)
        if len(having) > 1:
            lines.append(f"{what} differs: " + "; ".join(f"{value} on {', '.join(n)}" for value, n in having.items()))
    return lines
