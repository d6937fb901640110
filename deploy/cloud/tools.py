"""What the cloud commands share: tools that are called, what Terraform and the cluster say, and waiting.

Standard library only, in the syntax of Python 3.8, like all of deploy/cloud/.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

DEPLOY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOT = os.path.dirname(DEPLOY)
TERRAFORM = os.path.join(ROOT, "terraform")
NAMESPACE, APP = "jax-course", "jax-jupyter"
POLL = 5  # seconds between two looks at what is waited for
PATIENCE = 3600  # seconds for a node from zero and the first pull of many gigabytes
CONNECT = "$(terraform -chdir=terraform output -raw get_credentials_command)"
INSTALL = {
    "gcloud": "install it: https://cloud.google.com/sdk/docs/install",
    "terraform": "install it: https://developer.hashicorp.com/terraform/install",
    "kubectl": "install it: gcloud components install kubectl, or https://kubernetes.io/docs/tasks/tools/",
    "gke-gcloud-auth-plugin": "install it: gcloud components install gke-gcloud-auth-plugin",
    "openssl": "install it (apt install openssl), or give a certificate of your own: CERT=FILE KEY=FILE",
}


class Problem(Exception):
    """What is wrong, what was found and what to do, in one line."""


def say(text, end="\n"):
    print(text, end=end, flush=True)


def fault_in(text):
    """The line that tells what went wrong: gcloud's own, which more may follow, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no words"]
    first = next((n for n, line in enumerate(lines) if line.startswith("ERROR:")), len(lines) - 1)
    return " ".join(lines[first : first + 2]) if lines[first].endswith(":") else lines[first]


# ---- tools


def need(*tools):
    for tool in tools:
        if not shutil.which(tool):
            raise Problem(f"{tool} is not here: {INSTALL[tool]}")


def call(command, send=b"", seconds=300):
    """Run a command with bytes for its standard input; return (exit status, output, errors)."""
    if not shutil.which(command[0]):
        need(command[0])
    try:
        done = subprocess.run(command, input=send, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer in {seconds} s"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def ask(command, to_do, send=b"", seconds=300):
    """The output of a command. Raises `Problem` with what went wrong and what to do when it fails."""
    status, out, err = call(command, send, seconds)
    if status:
        raise Problem(f"`{' '.join(command[:6])} …` failed: {fault_in(err or out)} ({to_do})")
    return out


def show(command, to_do):
    """Run a command whose output is for the person. Raises `Problem` when it fails."""
    need(command[0])
    with subprocess.Popen(command) as child:
        try:
            child.wait()
        except KeyboardInterrupt:  # it heard Ctrl-C too: Terraform must write its state before it ends
            child.wait()
            raise
    if child.returncode:
        raise Problem(f"`{' '.join(command[:4])} …` failed, see above: {to_do}")


# ---- the cluster


def kubectl(*words, to_do="is the cluster there, and may you use it?", send=b"", seconds=300):
    return ask(["kubectl", "-n", NAMESPACE, *words], to_do, send, seconds)


def look(kind, *words):
    """An object of the cluster, or a list of them, as a dict; {} when there is none."""
    return json.loads(kubectl("get", kind, *words, "--ignore-not-found", "-o", "json") or "{}")


def context():
    """The name of kubectl's current context, "" when there is none."""
    status, out, _ = call(["kubectl", "config", "current-context"])
    return "" if status else out.strip()


def connected():
    """The name of kubectl's current context. Raises `Problem` for none, and for another cluster than Terraform's."""
    name, given = context(), terraform_outputs()
    if not name:
        first = "make the cluster first (terraform apply in terraform/), then connect with the command that it prints"
        raise Problem(f"kubectl knows no cluster: {f'connect it first with {CONNECT}' if given else first}")
    if given and name != context_of(given):
        raise Problem(f"kubectl works on {name}, and Terraform made {context_of(given)}: connect with {CONNECT}")
    return name


# ---- what Terraform knows


def terraform_outputs():
    """Terraform's outputs as {name: value}; {} before apply, and where Terraform is not used."""
    if not shutil.which("terraform") or not os.path.isdir(TERRAFORM):
        return {}
    status, out, _ = call(["terraform", f"-chdir={TERRAFORM}", "output", "-json"])
    return {} if status else {name: output["value"] for name, output in json.loads(out or "{}").items()}


def setting(name):
    """A variable of terraform/: what terraform.tfvars says, else the environment, else its default, else ""."""
    value = r'\s*=\s*"?([^"#\n]*)'
    found = in_terraform("terraform.tfvars", rf"^\s*{name}{value}")
    found = found or os.environ.get(f"TF_VAR_{name}", "")
    return found or in_terraform("variables.tf", rf'^variable "{name}" {{[^}}]*?^\s*default{value}')


def in_terraform(file, pattern):
    with contextlib.suppress(OSError), open(os.path.join(TERRAFORM, file), encoding="utf-8") as opened:
        found = re.search(pattern, opened.read(), re.MULTILINE)
        return found[1].strip() if found else ""
    return ""


def project_of(outputs):
    """The Google Cloud project's id. Raises `Problem` when nothing names one."""
    project = outputs.get("project_id") or setting("project_id")
    project = project or call(["gcloud", "config", "get", "project"])[1].strip()
    if not project:
        raise Problem('no project is named: put project_id = "YOUR-PROJECT\'S-ID" into terraform/terraform.tfvars')
    return project


def context_of(outputs):
    """What `gcloud container clusters get-credentials` calls the course's cluster."""
    named = [outputs.get(name) or setting(name) for name in ("zone", "cluster_name")]
    return "_".join(["gke", project_of(outputs), *named])


# ---- waiting


class Wait:
    """One line that moves in a terminal; elsewhere a line for each new word."""

    def __init__(self):
        self.started, self.last, self.live = time.monotonic(), None, sys.stdout.isatty()

    def passed(self):
        return int(time.monotonic() - self.started)

    def show(self, text):
        """Say what is waited for, and wait a little. Raises `Problem` when it has been too long."""
        if self.live:
            line = f"  {self.passed() // 60}:{self.passed() % 60:02} {text}"
            say("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="")
        elif text != self.last:
            say(f"  {text}")
        self.last = text
        if self.passed() > PATIENCE:
            raise Problem(f"gave up after {self.passed() // 60} minutes of: {text}. The same command waits on")
        time.sleep(POLL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.live:
            say("\r\x1b[K", end="")
