"""JupyterLab as the manifests start it, run here: who gets in, what a student can do, what outlives the pod."""

import json
import os
import pathlib
import secrets
import shlex
import shutil
import ssl
import subprocess
import sys
import uuid
from http.client import HTTPConnection

import pytest
import websocket

from pod import Pod, PodError, why_not

REPO = pathlib.Path(__file__).parents[2]
LOCK = REPO / "deploy" / "locks" / "pod.txt"
PORT = 8884  # what README tells a student to forward
FIRST = "attention/notebooks/00_start_here.ipynb"

WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.xdist_group("pod")]


def secret(name, **data):
    return {"kind": "Secret", "metadata": {"name": name}, "stringData": data}


@pytest.fixture(scope="module")
def start(manifests, tmp_path_factory):
    """A function that gives the pod of an overlay, with these Secrets in the cluster and these disks."""

    def give(*made, overlay="base", disks=None) -> Pod:
        folder = tmp_path_factory.mktemp("pod")
        return Pod([*manifests[overlay], *made], folder / "pod", disks or folder / "disks", {"JAX_PLATFORMS": "cpu"})

    return give


@pytest.fixture(scope="module")
def token():
    return secrets.token_hex(32)


@pytest.fixture(scope="module")
def pod(start, token):
    """The pod of `base` with its token and the course, for tests that leave it as it is."""
    locks = {"kind": "ConfigMap", "metadata": {"name": "jax-jupyter-locks"}, "data": {"pod.txt": LOCK.read_text()}}
    with start(secret("jax-jupyter-token", token=token), locks) as pod:
        send(pod)
        yield pod


@pytest.fixture(scope="module")
def student(pod, token):
    return Student(pod, token)


def send(pod):
    """`make send`, with a kubectl that leads into this pod."""
    kubectl = pod.folder / "bin" / "kubectl"
    kubectl.parent.mkdir(exist_ok=True)
    context = '[ "$1" != config ] || { echo here; exit; }'
    only_the_command = 'until [ "$1" = -- ]; do shift || exit; done; shift'
    kubectl.write_text(f'#!/bin/bash\n{context}\n{only_the_command}\nexec {shlex.join(pod.enter())} "$@"\n')
    kubectl.chmod(0o755)
    env = os.environ | {"PATH": f"{kubectl.parent}:{os.environ['PATH']}"}
    command = [sys.executable, str(REPO / "deploy" / "cloud"), "send"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Student:
    """Somebody at the other end of `kubectl port-forward`, with a token or without."""

    def __init__(self, pod, token=None, tls=None):
        self.pod, self.tls = pod, tls
        self.headers = {"Authorization": f"token {token}"} if token else {}

    def _socket(self):
        plain = self.pod.connect(PORT)
        return self.tls.wrap_socket(plain, server_hostname="127.0.0.1") if self.tls else plain

    def ask(self, path, method="GET", body=None) -> tuple:
        """The status and the text of an answer."""
        connection = HTTPConnection(f"127.0.0.1:{PORT}")
        connection.sock = self._socket()
        connection.request(method, path, json.dumps(body) if body else None, self.headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def get(self, path, method="GET", body=None) -> dict:
        """The JSON of an answer that must be a good one."""
        status, text = self.ask(path, method, body)
        assert status < 300, f"{method} {path}: {status} {text}"
        return json.loads(text)

    def open(self, notebook) -> "Kernel":
        """A kernel for a notebook, as JupyterLab opens one."""
        about = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
        kernel = self.get("/api/sessions", "POST", about)["kernel"]["id"]
        address = f"ws://127.0.0.1:{PORT}/api/kernels/{kernel}/channels"
        return Kernel(websocket.create_connection(address, socket=self._socket(), header=self.headers))


class Kernel:
    """A kernel at the other end of a websocket."""

    def __init__(self, connection):
        self.connection = connection
        self.connection.settimeout(120)

    def run(self, code) -> list:
        """Run a cell; its outputs in the form of a notebook's. An error in the cell fails the test."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "username": "", "session": "", "date": ""}
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        message = {"header": header | {"version": "5.3"}, "parent_header": {}, "metadata": {}, "content": content}
        self.connection.send(json.dumps(message | {"channel": "shell", "buffers": []}))
        outputs = []
        while True:
            heard = json.loads(self.connection.recv())
            kind, content = heard["msg_type"], heard["content"]
            if heard["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            assert kind != "error", "\n".join(content["traceback"])
            if kind in ("stream", "display_data", "execute_result"):
                outputs.append({"output_type": kind} | {k: v for k, v in content.items() if k != "transient"})
            if kind == "status" and content["execution_state"] == "idle":
                return outputs

    def printed(self, code) -> str:
        return "".join(output["text"] for output in self.run(code) if output["output_type"] == "stream").strip()


# --- who gets in


@pytest.mark.parametrize("name", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_every_probe_passes_without_a_token(pod, name):
    assert pod.probe(name)


def test_the_token_opens_and_nothing_else_does(pod, student):
    assert Student(pod).ask("/api/contents")[0] == 403
    assert Student(pod, "0" * 64).ask("/api/contents")[0] == 403
    assert student.ask("/api/contents")[0] == 200


def test_the_page_that_a_student_opens_is_there(pod, token):
    status, page = Student(pod).ask(f"/lab?token={token}")
    assert status == 200
    assert "jupyter-config-data" in page


def test_without_its_secret_jupyter_makes_a_token_and_prints_it(start):
    with start() as pod:
        assert Student(pod).ask("/api/contents")[0] == 403
        printed = pod.log().split("/lab?token=")[1].split()[0]
        assert Student(pod, printed).ask("/api/contents")[0] == 200


def test_an_empty_token_starts_nothing(start):
    with (
        pytest.raises(PodError, match="holds no token of 20 characters or more"),
        start(secret("jax-jupyter-token", token="\n")),
    ):
        pass


def test_the_public_overlay_speaks_tls_with_the_mounted_certificate(start, token, tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("openssl is not here, to make a certificate with")
    made = {"tls.key": tmp_path / "key", "tls.crt": tmp_path / "crt"}
    names = ["-subj", "/CN=jax-jupyter", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(made["tls.key"]), "-out", str(made["tls.crt"])]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *names, *files], check=True)
    tls = ssl.create_default_context(cafile=made["tls.crt"])
    certificate = secret("jax-jupyter-tls", **{name: path.read_text() for name, path in made.items()})
    with start(secret("jax-jupyter-token", token=token), certificate, overlay="public") as pod:
        assert Student(pod, token, tls).ask("/api/contents")[0] == 200
        assert Student(pod, None, tls).ask("/api/contents")[0] == 403
        assert pod.probe("readinessProbe") and pod.probe("livenessProbe")


def test_the_public_overlay_waits_for_its_certificate(start, token):
    with pytest.raises(PodError, match="no Secret jax-jupyter-tls"), start(overlay="public"):
        pass


# --- what the process may do


def test_the_process_has_the_user_and_the_rights_of_the_manifest(pod):
    lines = pathlib.Path(f"/proc/{pod.main().pid}/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"] == status["Gid"] == ["10001"] * 4
    assert status["Groups"] == ["10001"]
    assert status["NoNewPrivs"] == ["1"]
    assert {int(status[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}


def test_only_the_volumes_can_be_written(pod):
    # As root of the pod: what refuses here is the mount, not a file's owner.
    places = ["/", "/usr", "/etc", "/opt/course", "/etc/jax-jupyter", "/etc/jupyter-token"]
    places += ["/workspace", "/tmp", "/dev/shm"]
    tried = "for place; do { : > $place/written; } 2> /dev/null && rm $place/written && echo $place; done; true"
    enter = ["nsenter", f"--target={pod.main().pid}", "--mount", "--root", "bash", "-c", tried, "bash", *places]
    done = subprocess.run(enter, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/workspace", "/tmp", "/dev/shm"]


# --- what a student finds


def test_a_kernel_imports_the_course_from_the_volume(student):
    found = student.open(FIRST).printed("import attnlab, sys; print(attnlab.__file__, sys.prefix)")
    assert found == "/workspace/attention/src/attnlab/__init__.py /opt/course"


def test_a_kernel_keeps_the_images_libraries_in_front(student):
    found = student.open(FIRST).printed("import os; print(os.environ['LD_LIBRARY_PATH'])")
    assert found == "/usr/local/cuda/lib64:/usr/local/nvidia/lib64"


def test_the_doctor_runs_in_the_pod(pod):
    done = pod.exec("bash", "-c", "cd attention && python -m attnlab doctor --json", text=True)
    assert done.returncode == 0, done.stderr
    checks = {check["key"] if "key" in check else check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["modules"]["ok"], checks["modules"]
    assert checks["places to write"]["ok"], checks["places to write"]


def test_a_run_notebook_outlives_the_pod_and_the_token_is_nowhere(start, token, tmp_path):
    disks, logs = tmp_path / "disks", []
    made = secret("jax-jupyter-token", token=token)
    with start(made, disks=disks) as pod:
        send(pod)
        student = Student(pod, token)
        notebook = student.get(f"/api/contents/{FIRST}")
        kernel = student.open(FIRST)
        cells = [cell for cell in notebook["content"]["cells"] if cell["cell_type"] == "code"]
        for cell in cells:
            cell["outputs"] = kernel.run(cell["source"])
        assert "holds" in json.dumps(cells[-1]["outputs"])  # the notebook's last cell sums its claims up
        notebook["content"]["cells"].append({"cell_type": "markdown", "metadata": {}, "source": "my own words"})
        student.get(f"/api/contents/{FIRST}", "PUT", {"type": "notebook", "content": notebook["content"]})
        # A student's modules with names of the library's: the next start must take none of them.
        write = "for name in calendar mimetypes random queue; do echo 'raise SystemExit(1)' > /workspace/$name.py; done"
        assert pod.exec("bash", "-c", write).returncode == 0
        for process in [pod.main(), *pod.main().children(recursive=True)]:
            assert token not in json.dumps([process.cmdline(), process.environ()])
        files = [path for path in disks.rglob("*") if path.is_file()]
        assert not [path for path in files if token in path.read_text(errors="replace")]
        logs.append(pod.log())

    with start(made, disks=disks) as pod:  # a new pod on the same disk
        send(pod)
        student = Student(pod, token)
        kept = student.get(f"/api/contents/{FIRST}")["content"]["cells"]
        assert kept[-1]["source"] == "my own words"
        assert [c["outputs"] for c in kept if c["cell_type"] == "code"] == [c["outputs"] for c in cells]
        student.ask(f"/lab?token={token}")  # as the address that `make forward` prints
        logs.append(pod.log())

    assert all("Jupyter Server" in log and token not in log for log in logs)
