"""The cloud commands, with stand-ins for kubectl, gcloud and terraform that record what they are given.

A stand-in answers from a list that the test writes; of `kubectl exec … python3` it runs the very command here, so what
is sent arrives.
"""

import ast
import base64
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time

import pytest

REPO = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "deploy" / "cloud"))
import commands as cloud  # noqa: E402
import preflight as cloud_preflight  # noqa: E402
import public as cloud_public  # noqa: E402
import rollout as cloud_rollout  # noqa: E402
import teardown as cloud_teardown  # noqa: E402
import tools as cloud_tools  # noqa: E402

CLUSTER = "gke_my-project_us-central1-a_jax-gpu-cluster"
REAL = {tool: shutil.which(tool) for tool in ("git", "kubectl", "openssl")}
DIGEST = "sha256:" + "0123456789abcdef" * 4
OUTPUTS = {
    "project_id": "my-project", "zone": "us-central1-a", "cluster_name": "jax-gpu-cluster",
    "image_repository": "us-central1-docker.pkg.dev/my-project/jax-gpu-cluster",
    "build_service_account": "build@my-project.iam.gserviceaccount.com",
    "get_credentials_command": "gcloud container clusters get-credentials jax-gpu-cluster --dns-endpoint",
}  # fmt: skip

# Looks for the newest answer whose words are all among its arguments, and does what it says.
STAND_IN = """#!{python} -IS
import json, os, subprocess, sys, time
here, tool, words = {folder!r}, os.path.basename(sys.argv[0]), sys.argv[1:]
send = "" if "port-forward" in words or tool == "terraform" else sys.stdin.buffer.read()
answers = json.load(open(here + "/answers.json"))
answer = {{}}
for n, a in reversed(list(enumerate(answers))):
    if a["tool"] == tool and all(word in words for word in a["words"]) and a.get("times", 1):
        answer = a
        if "times" in a:
            a["times"] -= 1
            json.dump(answers, open(here + "/answers.json", "w"))
        break
text = send.decode(errors="replace") if send and len(send) < 100000 else ""
with open(here + "/calls.jsonl", "a") as log:
    log.write(json.dumps(dict(tool=tool, words=words, send=text, env=dict(os.environ), pid=os.getpid())) + "\\n")
if answer.get("run"):
    at = here + "/pod"
    command = [w.replace("/workspace", at) for w in words[words.index("--") + 1:]]
    command[0] = {python!r}
    done = subprocess.run(command, input=send[:answer.get("cut")], capture_output=True, cwd=at)
    sys.stdout.write(done.stdout.decode().replace(at, "/workspace")); sys.stderr.write(done.stderr.decode())
    if done.returncode:
        sys.stderr.write("command terminated with exit code %d\\n" % done.returncode)
    sys.exit(done.returncode)
try:
    sys.stdout.write(answer.get("out", "")); sys.stderr.write(answer.get("err", "")); sys.stdout.flush()
    time.sleep(answer.get("sleep", 0))
except KeyboardInterrupt:
    time.sleep(1)
    open(here + "/ended-well", "w")
sys.exit(answer.get("status", 0))
"""


class StandIns:
    """Tools on PATH, and nothing else: `answers` is what they say, `calls` what they were given."""

    def __init__(self, folder):
        self.folder, self.bin, self.pod = folder, folder / "bin", folder / "pod"
        for made in (self.bin, self.pod):
            made.mkdir()
        (folder / "answers.json").write_text("[]")
        (folder / "calls.jsonl").touch()

    def have(self, *tools):
        for tool in tools:
            (self.bin / tool).write_text(STAND_IN.format(python=sys.executable, folder=str(self.folder)))
            (self.bin / tool).chmod(0o755)

    def answer(self, words, out="", **how):
        tool, *words = words.split()
        out = out if isinstance(out, str) else json.dumps(out)
        answers = json.loads((self.folder / "answers.json").read_text())
        answers.append(dict(how, tool=tool, words=words, out=out))
        (self.folder / "answers.json").write_text(json.dumps(answers))

    def calls(self, words=""):
        made = [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]
        return [call for call in made if set(words.split()) <= {call["tool"], *call["words"]}]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    tools = StandIns(tmp_path)
    monkeypatch.setenv("PATH", str(tools.bin))
    for name in [name for name in os.environ if name.startswith("TF_VAR_")]:
        monkeypatch.delenv(name)
    terraform = tmp_path / "terraform"
    terraform.mkdir()
    for name in ("variables.tf", "network.tf", "versions.tf"):
        shutil.copy(REPO / "terraform" / name, terraform)
    (terraform / "terraform.tfvars").write_text('# the class\nproject_id = "my-project" # ours\nmax_gpu_nodes = 2\n')
    monkeypatch.setattr(cloud_tools, "TERRAFORM", str(terraform))
    monkeypatch.setattr(cloud_teardown, "TERRAFORM", str(terraform))
    monkeypatch.setattr(cloud_tools, "POLL", 0)
    monkeypatch.setattr(cloud, "WORK", str(tmp_path / "build" / "cloud"))
    tools.terraform = terraform
    return tools


@pytest.fixture
def course(tools, monkeypatch):
    """A small course in place of this one."""
    root = tools.folder / "course"
    (root / "notebooks").mkdir(parents=True)
    (root / "notebooks/00_start.ipynb").write_text("{}")
    (root / "pyproject.toml").write_text('version = "1.2"\n')
    monkeypatch.setattr(cloud, "ROOT", str(root))
    return root


def pod(state="running", part="jupyter", scheduled="True", **how):
    restarts = how.pop("restarts", 0)
    status = {"name": part, "image": "img:1", "imageID": f"img@{DIGEST}", "restartCount": restarts}
    status["state"] = {state: how}
    kind = "containerStatuses" if part == "jupyter" else "initContainerStatuses"
    conditions = [{"type": "PodScheduled", "status": scheduled, "message": "0/1 nodes: Insufficient nvidia.com/gpu."}]
    meta = {"name": "jax-jupyter-1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"kind": "Pod", "metadata": meta, "status": {kind: [status], "conditions": conditions}}


def pods(*given, ready=False):
    counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 1) if ready else {}
    owner = {"kind": "Deployment", "metadata": {"generation": 2}, "status": {"observedGeneration": 2, **counts}}
    return {"items": [owner, *given]}


def event(reason, message):
    return {"reason": reason, "message": message}


@pytest.fixture
def cluster(tools, course):
    """A cluster in which nothing is deployed yet, and in which all goes well."""
    tools.have("kubectl")
    tools.answer("kubectl config current-context", CLUSTER)
    tools.answer("kubectl get deployments,pods", pods(pod(), ready=True))
    tools.answer("kubectl apply", "configmap/jax-jupyter created\ndeployment.apps/jax-jupyter created\n")
    tools.answer("kubectl exec python3", run=True)
    tools.answer("kubectl exec bash", "what the device can do\nIs this machine ready, for user 10001?\nall well\n")
    return tools


IMAGE = "nvcr.io/nvidia/jax:26.06-py3"


def deployed(cluster):
    """The answers of a cluster in which it runs already."""
    cluster.answer("kubectl get namespace", {"kind": "Namespace"})
    cluster.answer("kubectl get secret jax-jupyter-token", {"data": {"token": base64.b64encode(b"t" * 40).decode()}})
    cluster.answer("kubectl get deployment jax-jupyter", deployment("workspace"))
    cluster.answer("kubectl apply", "configmap/jax-jupyter unchanged\ndeployment.apps/jax-jupyter unchanged\n")


def deployment(volume):
    pod = {"volumes": [{"name": volume}], "containers": [{"name": "jupyter", "image": IMAGE}]}
    return {"spec": {"template": {"spec": pod}}}


def applied(cluster):
    return json.loads(pathlib.Path(cloud.WORK, "kustomization.yaml").read_text())


def refusal(capfd, *words) -> str:
    """The one line of a command that must be refused."""
    assert cloud.main(list(words)) == 1
    line = capfd.readouterr().err
    assert line.startswith(f"{words[0]}: ") and line.count("\n") == 1, line
    return line


# ---- deploy


def test_deploy_brings_token_manifests_and_course_and_says_what_is_next(cluster, capfd):
    assert cloud.main(["deploy"]) == 0
    out = capfd.readouterr().out
    assert (cluster.pod / "attention/notebooks/00_start.ipynb").read_text() == "{}"
    order = [next(w for w in call["words"] if w in ("create", "apply", "exec")) for call in cluster.calls()
             if {"create", "apply", "exec"} & set(call["words"])]  # fmt: skip
    assert order == ["create", "create", "apply", "exec", "exec"]
    assert f"cluster: {CLUSTER}" in out and "all well" in out and "make forward" in out
    assert f"image: img:1, {DIGEST}" in out and f"make deploy DIGEST={DIGEST}" in out


def test_the_token_is_only_in_what_kubectl_reads(cluster, capfd):
    cloud.main(["deploy"])
    made = cluster.calls("kubectl create -f -")
    assert len(made) == 1
    token = json.loads(made[0]["send"])["stringData"]["token"]
    assert len(token) >= 40
    said = capfd.readouterr()
    elsewhere = [json.dumps({**call, "send": ""}) for call in cluster.calls()]
    elsewhere += [call["send"] for call in cluster.calls() if call["words"] != made[0]["words"]]
    elsewhere += [said.out, said.err, *(p.read_text() for p in pathlib.Path(cloud.WORK).iterdir())]
    assert not [text for text in elsewhere if token in text]


def test_a_second_deploy_changes_nothing(cluster, capfd):
    deployed(cluster)
    assert cloud.main(["deploy"]) == 0
    assert not cluster.calls("create") and not cluster.calls("restart")
    assert "the manifests are applied already" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["jax-jupyter", "jax-jupyter-locks"])
def test_what_a_pod_reads_at_its_start_restarts_it_when_it_changed(name, cluster):
    deployed(cluster)
    cluster.answer("kubectl apply", f"configmap/{name} configured\ndeployment.apps/jax-jupyter unchanged\n")
    cloud.main(["deploy"])
    assert cluster.calls("kubectl rollout restart deployment/jax-jupyter")


def test_a_pod_that_made_its_own_token_restarts_for_the_new_one(cluster):
    deployed(cluster)
    cluster.answer("kubectl get secret jax-jupyter-token", "")
    cloud.main(["deploy"])
    assert cluster.calls("kubectl rollout restart deployment/jax-jupyter")


CONNECTED = ["deploy", "send", "token", "forward"]


def terraform_made(tools, **other):
    tools.have("terraform")
    tools.answer("terraform output", {name: {"value": value} for name, value in (OUTPUTS | other).items()})


@pytest.mark.parametrize("command", CONNECTED)
def test_without_a_context_the_command_that_connects_is_named(command, cluster, capfd):
    terraform_made(cluster)
    cluster.answer("kubectl config current-context", status=1, err="error: current-context is not set\n")
    line = refusal(capfd, command)
    assert "knows no cluster" in line and "$(terraform -chdir=terraform output -raw get_credentials_command)" in line
    assert len(cluster.calls("kubectl")) == 1


@pytest.mark.parametrize("command", CONNECTED)
def test_before_terraform_apply_no_output_of_terraform_is_advised(command, cluster, capfd):
    cluster.answer("kubectl config current-context", status=1)
    line = refusal(capfd, command)
    assert "make the cluster first (terraform apply in terraform/), then connect" in line and "$(" not in line


@pytest.mark.parametrize("command", CONNECTED)
def test_another_cluster_than_terraforms_is_refused(command, cluster, capfd):
    terraform_made(cluster, cluster_name="other")
    line = refusal(capfd, command)
    assert f"kubectl works on {CLUSTER}, and Terraform made gke_my-project_us-central1-a_other: connect with $(" in line
    assert len(cluster.calls("kubectl")) == 1


def test_a_cluster_that_refuses_is_told_in_its_own_words(cluster, capfd):
    cluster.answer("kubectl get namespace", status=1, err="noise\nUnable to connect to the server: timeout\n")
    assert "Unable to connect to the server: timeout" in refusal(capfd, "deploy")


def will_be(image=IMAGE, kind="ClusterIP"):
    deployment = f"kind: Deployment\nspec:\n  type: Recreate\n      containers:\n      - image: {image}\n"
    return f"apiVersion: v1\nkind: Service\nspec:\n  type: {kind}\n---\n{deployment}"


@pytest.mark.parametrize("new, note", [
    (will_be(), ""),
    (will_be(image="a/b:1"), f"note: the image changes from {IMAGE} to a/b:1 (give IMAGE= and DIGEST= as before"),
    (will_be(kind="LoadBalancer"), "note: the Service's type changes from ClusterIP to LoadBalancer (give OVERLAY="),
])  # fmt: skip
def test_deploy_notes_before_it_applies_what_changes_by_words_left_out(new, note, cluster, capfd):
    deployed(cluster)
    cluster.answer("kubectl get service", {"spec": {"type": "ClusterIP"}})
    cluster.answer("kubectl kustomize", new)
    assert cloud.main(["deploy"]) == 0
    notes = [line for line in capfd.readouterr().out.splitlines() if line.startswith("note:")]
    assert len(notes) == bool(note) and note in "".join(notes)
    words = [word for call in cluster.calls("kubectl") for word in call["words"]]
    assert words.index("kustomize") < words.index("apply")


def test_when_all_is_well_only_doctors_last_table_is_shown(cluster, capfd):
    assert cloud.main(["deploy"]) == 0
    out = capfd.readouterr().out
    assert "\nIs this machine ready, for user 10001?\nall well\n" in out and "what the device can do" not in out


@pytest.mark.parametrize("tool, command", [("kubectl", "deploy"), ("kubectl", "token"), ("gcloud", "image")])
def test_a_tool_that_is_not_there_is_named_with_its_place(tool, command, tools, course, capfd):
    line = refusal(capfd, command)
    assert f"{tool} is not here: install it" in line and "https://" in line


def test_doctors_finding_is_the_status_of_deploy(cluster, capfd):
    cluster.answer("kubectl exec bash", "no GPU\nIs this machine ready, for user 10001?\nno\n", status=1)
    assert cloud.main(["deploy"]) == 1
    said = capfd.readouterr()
    assert "doctor found something" in said.err and "no GPU\nIs this machine ready" in said.out


@pytest.mark.parametrize("given, entry", [
    ({}, []),
    ({"digest": DIGEST}, [{"digest": DIGEST}]),
    ({"image": "reg:5000/a/b:1.2"}, [{"newName": "reg:5000/a/b", "newTag": "1.2"}]),
    ({"image": "a/b:1", "digest": DIGEST}, [{"newName": "a/b", "newTag": "1", "digest": DIGEST}]),
    ({"image": f"a/b@{DIGEST}"}, [{"newName": "a/b", "digest": DIGEST}]),
])  # fmt: skip
def test_image_and_digest_reach_the_manifests(given, entry, cluster):
    assert cloud.main(["deploy", *(f"--{name}={value}" for name, value in given.items())]) == 0
    assert applied(cluster)["images"] == [{"name": "nvcr.io/nvidia/jax"} | e for e in entry]
    assert "nvcr.io/nvidia/jax:" in (REPO / "deploy/base/jupyter.yaml").read_text()


@pytest.mark.parametrize("words, fault", [
    (["--image=a/b"], "names no fixed image"),
    (["--image=a/b:latest"], "names no fixed image"),
    (["--digest=sha256:12"], "is no digest"),
    (["--overlay=privat"], "OVERLAY=privat is not there: give one of base, public"),
    (["--sources=8.8.8.8/32"], "does nothing with OVERLAY=base"),
    (["--cert=a"], "CERT and KEY go together"),
    (["--cert=a", "--key=b"], "CERT does nothing with OVERLAY=base"),
    (["--overlay=public"], "name them in SOURCES"),
])  # fmt: skip
def test_a_mistake_is_refused_before_anything_is_touched(words, fault, cluster, capfd):
    assert fault in refusal(capfd, "deploy", *words)
    assert not cluster.calls()


@pytest.mark.parametrize("source, fault", [
    ("0.0.0.0/0", "the whole internet"), ("128.0.0.0/1", "the whole internet"), ("::/0", "the whole internet"),
    ("203.0.113.0/24", "kept for examples"), ("198.51.100.7/32", "kept for examples"), ("10.1.0.0/16", "private"),
    ("192.168.1.5/32", "private"), ("100.64.0.0/10", "private"), ("8.8.8.1/24", "host bits set"),
    ("campus", "does not appear to be"), ("2a00:1450::/32", "IPv6"), ("8.8.8.0/24 0.0.0.0/0", "the whole internet"),
])  # fmt: skip
def test_a_source_range_that_lets_in_too_many_or_nobody_is_refused(source, fault):
    with pytest.raises(cloud_tools.Problem, match=fault):
        cloud_public.ranges(source)


@pytest.fixture
def public(cluster):
    if not REAL["openssl"]:
        pytest.skip("openssl is not here: it makes the certificate")
    (cluster.bin / "openssl").symlink_to(REAL["openssl"])
    cluster.answer("kubectl get service", {"status": {"loadBalancer": {"ingress": [{"ip": "34.1.2.3"}]}}})
    cluster.answer("kubectl get service", {"status": {"loadBalancer": {}}}, times=1)
    return cluster


def deploy_public(*more):
    return cloud.main(["deploy", "--overlay=public", "--sources=8.8.8.0/24,9.9.9.9/32", *more])


def tls_secret(public):
    made = [json.loads(call["send"]) for call in public.calls("-f -") if "tls.crt" in call["send"]]
    return made[-1] if made else None


def test_the_ranges_are_equal_in_service_and_network_policy(public):
    assert deploy_public() == 0
    changes = {p["target"]["kind"]: json.loads(p["patch"])[0] for p in applied(public)["patches"]}
    assert changes["Service"]["value"] == ["8.8.8.0/24", "9.9.9.9/32"]
    assert [block["ipBlock"]["cidr"] for block in changes["NetworkPolicy"]["value"]] == ["8.8.8.0/24", "9.9.9.9/32"]


@pytest.mark.skipif(not REAL["kubectl"], reason="kubectl is not here: it renders what deploy applies")
def test_kubectl_renders_what_deploy_applies(public):
    assert deploy_public(f"--image=a/b:1@{DIGEST}") == 0
    done = subprocess.run([REAL["kubectl"], "kustomize", cloud.WORK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"image: a/b:1@{DIGEST}") == 2 and "image: nvcr.io" not in done.stdout
    assert cloud.rendered(done.stdout) == [f"a/b:1@{DIGEST}", "LoadBalancer"]
    assert done.stdout.count("8.8.8.0/24") == 2 and "203.0.113.0/24" not in done.stdout


def test_the_certificate_is_for_the_address_and_its_fingerprint_is_said(public, capfd, tmp_path):
    deploy_public()
    secret = tls_secret(public)
    assert secret["type"] == "kubernetes.io/tls" and secret["metadata"]["name"] == "jax-jupyter-tls"
    pem = secret["stringData"]["tls.crt"]
    shown = subprocess.run(["openssl", "x509", "-noout", "-text"], input=pem, capture_output=True, text=True).stdout
    assert "IP Address:34.1.2.3" in shown
    said = capfd.readouterr().out
    fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest().upper()
    assert fingerprint in said.replace(":", "") and "https://34.1.2.3:8884" in said
    private = secret["stringData"]["tls.key"]
    assert private not in said and not [call for call in public.calls() if private in json.dumps(call["words"])]
    for name, text in (("a.crt", pem), ("a.key", private)):
        (tmp_path / name).write_text(text)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "a.crt", tmp_path / "a.key")  # they fit


def as_stored(secret):
    data = {key: base64.b64encode(value.encode()).decode() for key, value in secret["stringData"].items()}
    return {"metadata": secret["metadata"], "data": data}


def test_a_certificate_that_still_fits_is_kept(public):
    deploy_public()
    deployed(public)
    public.answer("kubectl get secret jax-jupyter-tls", as_stored(tls_secret(public)))
    before = len(public.calls("-f -"))
    assert deploy_public() == 0
    assert len(public.calls("-f -")) == before and not public.calls("restart")


def test_another_address_gets_another_certificate_and_the_pod_restarts(public):
    deploy_public()
    deployed(public)
    public.answer("kubectl get secret jax-jupyter-tls", as_stored(tls_secret(public)))
    public.answer("kubectl get service", {"status": {"loadBalancer": {"ingress": [{"ip": "34.9.9.9"}]}}})
    assert deploy_public() == 0
    assert public.calls("kubectl replace -f -") and public.calls("restart")


def test_an_own_certificate_is_taken_as_it_is(public, tmp_path, capfd):
    pair = {}
    for address in ("34.1.2.3", "34.5.6.7"):
        pair[address] = cloud_public.self_signed(address)
    for name, text in zip(("crt", "key", "wrong"), (*pair["34.1.2.3"], pair["34.5.6.7"][1]), strict=True):
        (tmp_path / name).write_text(text)
    assert deploy_public(f"--cert={tmp_path / 'crt'}", f"--key={tmp_path / 'key'}") == 0
    assert tls_secret(public)["stringData"]["tls.crt"] == pair["34.1.2.3"][0]
    pin = re.search("^pin it: .*", capfd.readouterr().out, re.MULTILINE)[0]
    assert f"SOURCES=8.8.8.0/24,9.9.9.9/32 CERT={tmp_path}/crt KEY={tmp_path}/key DIGEST=" in pin
    with pytest.raises(cloud_tools.Problem, match="CERT=.* KEY=.*without password"):
        cloud_public.own(tmp_path / "crt", tmp_path / "wrong")
    with pytest.raises(cloud_tools.Problem, match="No such file"):
        cloud_public.own(tmp_path / "crt", tmp_path / "nowhere")


def test_a_secret_that_was_not_made_here_is_kept(public, capfd):
    deployed(public)
    values = dict(zip(("tls.crt", "tls.key"), cloud_public.self_signed("class.example"), strict=True))
    public.answer("kubectl get secret jax-jupyter-tls", as_stored({"metadata": {}, "stringData": values}))
    assert deploy_public() == 0
    assert not public.calls("-f -") and not public.calls("restart")
    out = capfd.readouterr().out
    assert "keeping your own certificate" in out and "30 days" not in out


def test_the_certificates_last_day_stands_beside_the_fingerprint(public, capfd):
    deploy_public()
    out = capfd.readouterr().out
    last = re.search(r"^certificate, valid until (.*); SHA-256 fingerprint: [0-9A-F:]{95}$", out, re.MULTILINE)[1]
    days = (ssl.cert_time_to_seconds(last) - time.time()) / 86400
    assert 29 < days <= 30 and "30 days" in out and "restarts the pod" in out


# ---- waiting for the pod


def test_deploy_says_what_it_waits_for(cluster, capfd):
    for state in reversed([
        pods(), pods(pod("waiting", "packages", "False")), pods(pod("waiting", "packages", reason="PodInitializing")),
        pods(pod("running", "packages")), pods(pod()),
    ]):  # fmt: skip
        cluster.answer("kubectl get deployments,pods", state, times=1)
    assert cloud.main(["deploy"]) == 0
    lines = capfd.readouterr().out.splitlines()
    waits = [
        "the last pod to go",
        "a node with a GPU, from zero",
        "pulling the image",
        "adding Jupyter's packages",
        "JupyterLab starts",
    ]
    assert [any(wait in line for line in lines) for wait in waits] == [True] * 5
    assert re.search(r"^the pod is ready, after 0 minutes and \d+ seconds$", "\n".join(lines), re.MULTILINE)


def test_a_pod_that_goes_is_not_the_one_that_came(cluster):
    gone = pod()
    gone["metadata"] |= {"deletionTimestamp": "now", "creationTimestamp": "2027"}
    cluster.answer("kubectl get deployments,pods", pods(gone, pod(), ready=True))
    assert cloud_rollout.wait_for_pod()["metadata"]["creationTimestamp"].startswith("2026")


NO_NODE = pod(scheduled="False", state="waiting")
NO_IMAGE = pod("waiting", "packages", reason="ImagePullBackOff", message="not\nfound")


@pytest.mark.parametrize("state, events, fault", [
    (NO_IMAGE, [], "ImagePullBackOff of img:1: not found"),
    (pod("waiting", reason="ErrImagePull", message="401 Unauthorized"), [], "ErrImagePull of img:1: 401 Unauthorized"),
    (pod("waiting", reason="InvalidImageName", message="a b"), [], "InvalidImageName of img:1"),
    (pod("waiting", "packages", reason="CrashLoopBackOff", restarts=2), [], "container packages ends with an error"),
    (pod("terminated", "packages", exitCode=1, restarts=2), [], "the container packages ends with an error"),
    (NO_NODE, [event("FailedScaleUp", "GCE quota exceeded")], "quota exceeded .make preflight"),
    (NO_NODE, [event("FailedScaleUp", "GCE out of resources")], "zones run out of L4"),
    (NO_NODE, [event("NotTriggerScaleUp", "max size reached")], "none will come: .*nvidia.com/gpu.*max size"),
])  # fmt: skip
def test_a_pod_that_will_not_come_is_explained(state, events, fault, cluster, capfd, monkeypatch):
    monkeypatch.setattr(cloud_rollout, "GRACE", 0)
    cluster.answer("kubectl get deployments,pods", pods(state))
    cluster.answer("kubectl get events", {"items": events})
    cluster.answer("kubectl logs", "pip: no such package\n")
    with pytest.raises(cloud_tools.Problem, match=fault):
        cloud_rollout.wait_for_pod()
    if "ends with an error" in fault:
        assert "pip: no such package" in capfd.readouterr().out


TRIED_AGAIN = [
    pod("waiting", "packages", reason="ImagePullBackOff", message="Back-off: registry answered 503"),
    pod("terminated", "packages", exitCode=1),
    pod("waiting", "packages", reason="CrashLoopBackOff", restarts=1),
]


@pytest.mark.parametrize("state", TRIED_AGAIN)
def test_what_the_kubelet_tries_again_is_waited_for(state, cluster, capfd):
    cluster.answer("kubectl get deployments,pods", pods(state), times=2)
    assert cloud_rollout.wait_for_pod()
    assert "the container packages is tried again" in capfd.readouterr().out


@pytest.mark.parametrize("state", TRIED_AGAIN)
def test_but_not_for_ever(state, cluster, monkeypatch):
    monkeypatch.setattr(cloud_rollout, "STUBBORN", 0)
    cluster.answer("kubectl get deployments,pods", pods(state))
    with pytest.raises(cloud_tools.Problem, match="503|ends with an error"):
        cloud_rollout.wait_for_pod()


@pytest.mark.parametrize("patience", [3600, -1])
def test_who_gives_up_waiting_reads_how_the_pod_is_withdrawn(patience, cluster, capfd, monkeypatch):
    monkeypatch.setattr(cloud_tools, "PATIENCE", patience)
    cluster.answer("kubectl get deployments,pods", pods(NO_IMAGE))
    assert cloud.main(["deploy"]) == 1
    said = capfd.readouterr()
    assert said.out.count("the pod still waits, and a GPU node may still come and cost") == 1
    assert "kubectl -n jax-course scale deployment/jax-jupyter --replicas=0" in said.out
    assert len(said.err.splitlines()) == 1


def test_an_old_event_is_given_time(cluster):
    cluster.answer("kubectl get deployments,pods", pods(pod(scheduled="False", state="waiting")), times=1)
    cluster.answer("kubectl get events", {"items": [event("NotTriggerScaleUp", "in backoff")]})
    assert cloud_rollout.wait_for_pod()["status"]["containerStatuses"]


def test_in_a_terminal_one_line_moves(monkeypatch, capfd):
    monkeypatch.setattr(cloud_tools, "POLL", 0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with cloud_tools.Wait() as wait:
        wait.show("a node")
        wait.show("the image")
    assert capfd.readouterr().out == "\r\x1b[K  0:00 a node\r\x1b[K  0:00 the image\r\x1b[K"


def test_waiting_ends(cluster, monkeypatch):
    monkeypatch.setattr(cloud_tools, "PATIENCE", -1)
    cluster.answer("kubectl get deployments,pods", pods())
    with pytest.raises(cloud_tools.Problem, match="gave up after 0 minutes"):
        cloud_rollout.wait_for_pod()


# ---- send


def test_more_than_five_megabytes_arrive(cluster, course, capfd):
    data = os.urandom(6_000_000)
    (course / "notebooks/big.bin").write_bytes(data)
    assert cloud.main(["send"]) == 0
    assert (cluster.pod / "attention/notebooks/big.bin").read_bytes() == data
    assert "3 new, 0 updated" in capfd.readouterr().out


@pytest.mark.parametrize("cut", [0, 500, 100_000])
def test_a_broken_stream_is_sent_once_more(cut, cluster, course, capfd):
    (course / "notebooks/big.bin").write_bytes(os.urandom(200_000))
    cluster.answer("kubectl exec python3", run=True, cut=cut, times=1)
    assert cloud.main(["send"]) == 0
    assert "the stream broke" in capfd.readouterr().out
    assert (cluster.pod / "attention/notebooks/big.bin").exists()


def test_a_stream_that_breaks_twice_is_said(cluster, course, capfd):
    (course / "notebooks/big.bin").write_bytes(os.urandom(200_000))
    cluster.answer("kubectl exec python3", run=True, cut=100_000)
    assert "the course did not arrive: receive: the stream broke" in refusal(capfd, "send")
    assert len(cluster.calls("kubectl exec python3")) == 2 and not (cluster.pod / "attention").exists()


def test_a_kubectl_that_ends_well_without_the_course_is_not_believed(cluster, capfd):
    cluster.answer("kubectl exec python3", "")
    assert "the course did not arrive" in refusal(capfd, "send")


def test_a_refusal_in_the_pod_is_not_sent_again(cluster, capfd):
    (cluster.pod / "attention").write_text("a file")
    assert "the course was not brought" in refusal(capfd, "send")
    assert len(cluster.calls("kubectl exec python3")) == 1


def test_a_students_json_py_is_not_pythons(cluster):
    (cluster.pod / "json.py").write_text("raise SystemExit('mine')")
    assert cloud.main(["send"]) == 0


def test_an_edit_stays_when_the_course_is_sent_again(cluster, course):
    cloud.main(["send"])
    (cluster.pod / "attention/notebooks/00_start.ipynb").write_text("mine")
    (course / "notebooks/00_start.ipynb").write_text("[]")
    assert cloud.main(["send"]) == 0
    found = {p.read_text() for p in (cluster.pod / "attention/notebooks").iterdir()}
    assert found == {"mine", "[]"}


@pytest.mark.skipif(not REAL["git"], reason="git is not here")
def test_all_travels_that_git_does_not_ignore(cluster, course):
    (cluster.bin / "git").symlink_to(git := REAL["git"])
    (course / "terraform").mkdir()
    (course / "terraform/main.tf").write_text("")
    (course / ".gitignore").write_text("scratch*\n")
    (course / "notebooks/01_gone.ipynb").write_text("{}")
    subprocess.run([git, "init", "-q", str(course)], check=True)
    subprocess.run([git, "-C", str(course), "add", "."], check=True)
    (course / "notebooks/01_gone.ipynb").unlink()
    (course / "notebooks/02_new.ipynb").write_text("{}")
    (course / "notebooks/scratch.ipynb").write_text("my own")
    assert cloud.main(["send"]) == 0
    assert {p.name for p in (cluster.pod / "attention").rglob("*")} == {
        ".course.json", "notebooks", "00_start.ipynb", "02_new.ipynb", "pyproject.toml",
    }  # fmt: skip


# ---- token, forward


def test_the_token_stands_alone_on_standard_output(cluster, capfd):
    deployed(cluster)
    assert cloud.main(["token"]) == 0
    assert capfd.readouterr().out == "t" * 40 + "\n"


def test_without_a_secret_token_says_where_jupyter_printed_its_own(cluster, capfd):
    assert "kubectl -n jax-course logs deploy/jax-jupyter -c jupyter" in refusal(capfd, "token")


def test_a_taken_port_is_refused_before_anything_is_opened(cluster, capfd):
    deployed(cluster)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "make forward PORT=" in refusal(capfd, "forward", f"--port={taken.getsockname()[1]}")
    assert not cluster.calls("port-forward")


def test_forward_without_a_deployment_says_so(cluster, capfd):
    assert "make deploy" in refusal(capfd, "forward")


@pytest.mark.parametrize("port", ["", "lab", "0", "65536", "-1", "8.5"])
def test_a_port_that_is_none_is_a_wrong_call(port, cluster, capfd):
    with pytest.raises(SystemExit) as end:
        cloud.main(["forward", f"--port={port}"])
    line = capfd.readouterr().err
    assert end.value.code == 2 and not cluster.calls()
    assert line.startswith(f"forward: PORT={port} is no port") and line.endswith(". Help: make help\n")


def test_in_cloud_shell_forward_says_whose_localhost_it_is(cluster, capfd, monkeypatch):
    monkeypatch.setenv("CLOUD_SHELL", "true")
    deployed(cluster)
    terraform_made(cluster)
    assert cloud.main(["forward", f"--port={free_port()}"]) == 1  # no way to a pod
    out = capfd.readouterr().out
    assert "whose localhost is not your browser's" in out and OUTPUTS["get_credentials_command"] in out
    assert "OVERLAY=public" in out


def test_a_way_that_never_opened_is_no_broken_one(cluster, capfd):
    deployed(cluster)
    cluster.answer("kubectl port-forward", "error: unable to forward port because pod is not running\n", status=1)
    assert "pod is not running" in refusal(capfd, "forward", f"--port={free_port()}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*words, **how):
    """A command in a process of its own, to be interrupted."""
    lines = f"import sys; sys.path.insert(0, {str(REPO / 'deploy' / 'cloud')!r}); import tools; tools.POLL = 0.05; "
    lines += f"import commands as cloud; cloud.WORK = {cloud.WORK!r}; sys.exit(cloud.main({list(words)!r}))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", lines], **pipes, **how)


def gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("tls", [False, True])
def test_forward_opens_again_when_the_pod_restarts_and_ends_with_ctrl_c(tls, cluster):
    deployed(cluster)
    if tls:
        cluster.answer("kubectl get deployment", deployment("tls"))
    port = free_port()
    opened = f"Forwarding from 127.0.0.1:{port} -> 8884\n"
    cluster.answer("kubectl port-forward", opened, sleep=60)
    cluster.answer("kubectl port-forward", "error: no pod\n", status=1, times=1)
    cluster.answer("kubectl port-forward", opened + "error: lost connection to pod\n", status=1, times=1)
    with start("forward", f"--port={port}") as process:
        said = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    url = f"{'https' if tls else 'http'}://localhost:{port}"
    assert (
        said[0].startswith(f"open: {url}  ")
        and "lost connection" in said[1]
        and said[2].startswith(f"open again: {url}")
    )
    assert (process.returncode, rest) == (0, "\nstopped\n")
    assert gone(cluster.calls("port-forward")[-1]["pid"])


def test_ctrl_c_stops_a_deploy_that_waits(cluster):
    cluster.answer("kubectl get deployments,pods", pods())
    with start("deploy") as process:
        while "waiting for" not in (line := process.stdout.readline()):
            assert line, "it ended before it waited"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert (process.returncode, rest.strip().splitlines()[-1]) == (130, "deploy: stopped")
    assert rest.count("kubectl -n jax-course scale deployment/jax-jupyter --replicas=0") == 1


# ---- preflight


@pytest.fixture
def project(tools):
    """A project that has all that is needed."""
    tools.have("gcloud", "terraform", "kubectl", "gke-gcloud-auth-plugin")
    text = (tools.terraform / "network.tf").read_text()
    apis = re.findall(r'"(\w+)"', re.search(r"apis = \[(.*?)\]", text, re.DOTALL)[1])
    assert {"container", "compute", "iam", "cloudresourcemanager", "logging", "monitoring"} < set(apis)
    tools.answer("gcloud auth list", [{"account": "me"}])
    tools.answer("gcloud projects describe", {"projectId": "my-project"})
    tools.answer("gcloud billing", {"billingEnabled": True})
    tools.answer("gcloud services list", [{"config": {"name": f"{api}.googleapis.com"}} for api in apis])
    tools.answer("gcloud accelerator-types", [{"name": "nvidia-l4"}])
    l4 = {"guestAcceleratorCount": 1, "guestAcceleratorType": "nvidia-l4"}
    tools.answer("gcloud machine-types", {"accelerators": [l4], "guestCpus": 8})
    tools.answer("gcloud regions", {"quotas": [quota("NVIDIA_L4_GPUS", 2), *ROOM]})
    tools.answer("terraform version", {"terraform_version": "1.11.4"})
    tools.answer("kubectl version", {"clientVersion": {"gitVersion": "v1.32.4-dispatcher"}})
    tools.answer("gcloud project-info", {"quotas": [quota("GPUS_ALL_REGIONS", 2)]})
    return tools


def quota(metric, limit, usage=0):
    return {"metric": metric, "limit": float(limit), "usage": float(usage)}


ROOM = [quota("CPUS", 18), quota("SSD_TOTAL_GB", 270)]


def red(capfd):
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith("RED")]


def test_a_project_that_has_all_is_green(project, capfd):
    assert cloud.main(["preflight"]) == 0
    out = capfd.readouterr().out
    assert "RED" not in out
    for line in (
        "ok   quota NVIDIA_L4_GPUS, us-central1: 2, of which 0 used; 2 wanted, 2 nodes with 1 GPU each",
        "ok   quota CPUS, us-central1: 18, of which 0 used; 18 wanted, 2 nodes with 8 vCPUs each and 2 beside",
        "ok   quota SSD_TOTAL_GB, us-central1: 270, of which 0 used; 270 wanted, 2 nodes with 100 GB each"
        " and 70 beside",
    ):
        assert line in out.splitlines()
    assert project.calls("gcloud regions describe us-central1 --project=my-project")
    assert project.calls("gcloud machine-types describe g2-standard-8 --zone=us-central1-a")


@pytest.mark.parametrize("words, answer, to_do", [
    ("auth list", [], "gcloud auth login"),
    ("print-access-token", None, "gcloud auth application-default login"),
    ("projects describe", None, "terraform/terraform.tfvars"),
    ("billing", {"billingEnabled": False}, "/billing/linkedaccount?project=my-project"),
    ("services list", [], "gcloud services enable container.googleapis.com compute.googleapis.com"),
    ("accelerator-types", [], "gcloud compute accelerator-types list --filter=name=nvidia-l4"),
    ("machine-types", {}, "give a g2-standard machine_type"),
    ("regions", {"quotas": [quota("NVIDIA_L4_GPUS", 2, 1), *ROOM]}, "/iam-admin/quotas?project=my-project"),
    ("regions", {"quotas": [quota("NVIDIA_L4_GPUS", 2, 1), *ROOM]}, "this course's own running nodes count as used"),
    ("regions", {"quotas": ROOM}, "not listed; 2 wanted"),
    ("regions", {"quotas": [quota("NVIDIA_L4_GPUS", 2), ROOM[0], quota("SSD_TOTAL_GB", 269)]}, "quota SSD_TOTAL_GB"),
    ("regions", None, "quota, us-central1: ERROR: no"),
    ("terraform version", {"terraform_version": "1.6.9"}, "terraform 1.6.9: 1.7 or newer is wanted"),
    ("kubectl version", {"clientVersion": {"gitVersion": "v1.30.1"}}, "SPDY, which the cluster's DNS endpoint may not"),
    ("project-info", {"quotas": [quota("GPUS_ALL_REGIONS", 0)]}, "/iam-admin/quotas?project=my-project"),
])  # fmt: skip
def test_what_lacks_is_red_with_what_to_do(words, answer, to_do, project, capfd):
    how = {"status": 1, "err": "ERROR: no\n- '@type': more\n"} if answer is None else {"out": answer}
    project.answer(words if words.endswith("version") else f"gcloud {words}", **how)
    assert cloud.main(["preflight"]) == 1
    lines = red(capfd)
    assert len(lines) == 1 and to_do in lines[0]


def test_too_few_vcpus_are_said_and_not_red(project, capfd):
    quotas = {"quotas": [quota("NVIDIA_L4_GPUS", 2), quota("CPUS", 17), ROOM[1]]}
    project.answer("gcloud compute regions", out=quotas)
    assert cloud.main(["preflight"]) == 0
    assert "--   quota CPUS, us-central1: 17, of which 0 used; 18 wanted" in capfd.readouterr().out


@pytest.mark.parametrize("provisioning, known, good", [
    ("spot", [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 2), quota("NVIDIA_L4_GPUS", 0)], True),
    ("spot", [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 1), quota("NVIDIA_L4_GPUS", 9)], False),
    ("flex_start", [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 0), quota("NVIDIA_L4_GPUS", 2)], True),
    ("reservation", [quota("NVIDIA_L4_GPUS", 2, 2)], True),
    ("on_demand", [quota("PREEMPTIBLE_NVIDIA_L4_GPUS", 9), quota("NVIDIA_L4_GPUS", 2, 2)], False),
])  # fmt: skip
def test_each_way_of_getting_nodes_has_its_quota(provisioning, known, good, project):
    with open(project.terraform / "terraform.tfvars", "a") as file:
        file.write(f'provisioning = "{provisioning}"\n')
    project.answer("gcloud regions", {"quotas": [*known, *ROOM]})
    assert cloud.main(["preflight"]) == (0 if good else 1)


def test_one_node_is_no_plural(project, capfd):
    (project.terraform / "terraform.tfvars").write_text('project_id = "my-project"\n')
    assert cloud.main(["preflight"]) == 0
    assert "1 wanted, 1 node with 1 GPU\n" in capfd.readouterr().out


def test_a_reservations_nodes_still_want_disks(project):
    with open(project.terraform / "terraform.tfvars", "a") as file:
        file.write('provisioning = "reservation"\n')
    project.answer(
        "gcloud regions", {"quotas": [quota("NVIDIA_L4_GPUS", 2, 2), ROOM[0], quota("SSD_TOTAL_GB", 270, 9)]}
    )
    assert cloud.main(["preflight"]) == 1


def test_without_the_compute_api_nothing_more_is_asked(project, capfd):
    project.answer("gcloud services list", [{"config": {"name": "container.googleapis.com"}}])
    assert cloud.main(["preflight"]) == 1
    out = capfd.readouterr().out
    assert out.count("RED") == 1 and "enable these, then make preflight again" in out
    assert not project.calls("gcloud compute")


def test_billing_that_cannot_be_read_is_not_red(project, capfd):
    project.answer("gcloud billing", status=1, err="ERROR: (gcloud.billing) PERMISSION_DENIED\nmore\n")
    assert cloud.main(["preflight"]) == 0
    assert "--   billing is not known (ERROR: (gcloud.billing) PERMISSION_DENIED): look at" in capfd.readouterr().out


def test_another_project_in_gclouds_settings_is_said(project, capfd):
    project.answer("gcloud config get project", "my-old-project\n")
    assert cloud.main(["preflight"]) == 0
    out = capfd.readouterr().out
    assert "gcloud's own project is my-old-project: all commands here use my-project" in out


def test_the_disks_and_vcpus_wanted_are_terraforms():
    text = (REPO / "terraform/cluster.tf").read_text()
    assert re.findall(r"disk_size_gb\s*=\s*(\d+)", text) == ["50", "100"] and '"e2-standard-2"' in text
    assert "storage: 20Gi" in (REPO / "deploy/base/jupyter.yaml").read_text()
    assert (cloud_preflight.SYSTEM_VCPUS, cloud_preflight.GPU_DISK, cloud_preflight.OTHER_DISKS) == (2, 100, 50 + 20)


def test_without_gcloud_preflight_says_what_to_install(tools, capfd):
    assert cloud.main(["preflight"]) == 1
    lines = red(capfd)
    assert len(lines) == 4 and "https://cloud.google.com/sdk/docs/install" in lines[0]


def test_a_secret_that_gcloud_prints_is_not_shown(project, capfd):
    project.answer("gcloud print-access-token", "ya29.secret\n")
    cloud.main(["preflight"])
    assert "ya29" not in capfd.readouterr().out


def test_settings_come_from_tfvars_then_the_environment_then_the_default(tools, monkeypatch):
    monkeypatch.setenv("TF_VAR_zone", "europe-west4-a")
    monkeypatch.setenv("TF_VAR_max_gpu_nodes", "9")
    found = [cloud_tools.setting(name) for name in ("project_id", "max_gpu_nodes", "zone", "machine_type", "no_such")]
    assert found == ["my-project", "2", "europe-west4-a", "g2-standard-8", ""]


# ---- image


def test_image_builds_where_terraform_says_and_gives_the_deploy_line(tools, course, capfd):
    tools.have("gcloud", "terraform")
    tools.answer("terraform output", {name: {"value": value} for name, value in OUTPUTS.items()})
    tools.answer("gcloud artifacts docker images describe", DIGEST)
    assert cloud.main(["image"]) == 0
    name = "us-central1-docker.pkg.dev/my-project/jax-gpu-cluster/attention"
    built = tools.calls("gcloud builds submit --project=my-project")[0]["words"]
    account = "projects/my-project/serviceAccounts/build@my-project.iam.gserviceaccount.com"
    assert f"--substitutions=_IMAGE={name},_TAG=1.2,_SERVICE_ACCOUNT={account}" in built
    assert capfd.readouterr().out.endswith(f"make deploy IMAGE={name}:1.2 DIGEST={DIGEST}\n")


def test_a_build_that_fails_says_where_its_log_is(tools, course, capfd):
    tools.have("gcloud", "terraform")
    tools.answer("terraform output", {name: {"value": value} for name, value in OUTPUTS.items()})
    tools.answer("gcloud builds", status=1)
    assert "cloud-build/builds?project=my-project says why" in refusal(capfd, "image")


def test_without_terraforms_repository_there_is_no_image(tools, course, capfd):
    tools.have("gcloud", "terraform")
    tools.answer("terraform output", "{}")
    assert "terraform apply" in refusal(capfd, "image")


# ---- teardown


@pytest.fixture
def made(tools):
    """A project in which Terraform made the cluster."""
    tools.have("gcloud", "terraform", "kubectl")
    tools.answer("terraform output", {name: {"value": value} for name, value in OUTPUTS.items()})
    tools.answer("terraform state", "google_container_cluster.main\n")
    tools.answer("kubectl config current-context", CLUSTER)
    tools.answer("kubectl get pvc,service", {"items": []})
    tools.answer("gcloud buckets", status=1)
    return tools


LISTS = ["list"] * len(cloud_teardown.KINDS)


def deeds(made):
    """What was deleted and listed, in order."""
    words = [word for call in made.calls() if "state" not in call["words"] for word in call["words"]]
    return [word for word in words if word in ("delete", "destroy", "list")]


def test_teardown_deletes_volumes_then_the_cluster_then_lists(made, capfd):
    claim = {"spec": {"claimRef": {"namespace": "jax-course"}}}
    made.answer("kubectl get pv", {"items": [claim]}, times=2)
    assert cloud.main(["teardown", "--yes"]) == 0
    assert deeds(made) == ["delete", "destroy", *LISTS]
    assert len(made.calls("kubectl get pv")) == 3
    assert capfd.readouterr().out.endswith("nothing of the course is left\n")


@pytest.mark.parametrize("typed, goes_on", [("jax-gpu-cluster\n", True), ("yes\n", False), ("", False)])
def test_teardown_asks_once_for_the_clusters_name(typed, goes_on, made, capfd, monkeypatch, tmp_path):
    (tmp_path / "typed").write_text(typed)
    with open(tmp_path / "typed") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cloud.main(["teardown"]) == (0 if goes_on else 1)
    assert ("destroy" in deeds(made)) == goes_on and ("delete" in deeds(made)) == goes_on
    assert "every notebook that students have" in capfd.readouterr().out


def held(space, name, kind="PersistentVolumeClaim", **spec):
    return {"kind": kind, "metadata": {"namespace": space, "name": name}, "spec": spec}


@pytest.mark.parametrize("name, helm", [("claim-ann", False), ("hub-db-dir", True)])
def test_what_others_have_in_the_cluster_stops_teardown_before_it_begins(name, helm, made, capfd):
    others = [held("jh", name), held("jh", "address", "Service", type="LoadBalancer"), held("web", "inside", "Service")]
    made.answer("kubectl get pvc,service", {"items": [held("jax-course", "jax-workspace"), *others]})
    line = refusal(capfd, "teardown", "--yes")
    assert f"PersistentVolumeClaim jh/{name}, Service jh/address." in line
    assert "kubectl delete namespace jh; then make teardown again" in line
    assert ("helm -n jh uninstall hub; " in line) == helm
    assert "web" not in line and "jax-workspace" not in line  # a ClusterIP costs nothing
    assert deeds(made) == []


def test_disks_of_a_namespace_that_went_just_before_are_waited_for(made):
    going, kept = ({"spec": {"claimRef": {"namespace": "jh"}, "persistentVolumeReclaimPolicy": policy}}
                   for policy in ("Delete", "Retain"))  # fmt: skip
    made.answer("kubectl get pv", {"items": [kept]})
    made.answer("kubectl get pv", {"items": [going, kept]}, times=1)
    assert cloud.main(["teardown", "--yes"]) == 0
    assert len(made.calls("kubectl get pv")) == 2


def does_not_answer(how, made):
    if how == "gone":
        made.answer("gcloud get-credentials", status=1, err="ERROR: not found\n")
    elif how == "other cluster":
        made.answer("kubectl config current-context", "gke_work_x_production")
    else:
        made.answer("kubectl get pvc,service", status=1, err="Unable to connect\n")


SILENT = pytest.mark.parametrize("how", ["gone", "other cluster", "no answer"])


@SILENT
def test_without_the_cluster_teardown_goes_on_to_terraform(how, made, capfd):
    does_not_answer(how, made)
    made.answer("gcloud clusters list", [{"name": "jax-gpu-cluster", "location": "europe-west4-a"}], times=1)
    assert cloud.main(["teardown", "--yes"]) == 0
    assert deeds(made) == ["list", "destroy", *LISTS]
    assert "is gone already" in capfd.readouterr().out


@SILENT
def test_a_cluster_that_is_there_and_silent_stops_teardown(how, made, capfd):
    does_not_answer(how, made)
    made.answer("gcloud clusters list", [{"name": "jax-gpu-cluster", "location": "us-central1-a"}])
    line = refusal(capfd, "teardown", "--yes")
    at = "jax-gpu-cluster --location=us-central1-a --project=my-project"
    assert f"get-credentials {at} --dns-endpoint" in line and f"clusters delete {at}" in line
    assert deeds(made) == ["list"]


def test_when_nobody_answers_nothing_is_deleted(made, capfd):
    does_not_answer("no answer", made)
    made.answer("gcloud clusters list", status=1, err="ERROR: no network\n")
    assert "nothing was deleted" in refusal(capfd, "teardown", "--yes")
    assert deeds(made) == ["list"]


def test_terraform_without_state_destroys_nothing_and_lists(made, capfd):
    made.answer("terraform state", status=1, err="No state file was found!\n")
    assert cloud.main(["teardown", "--yes"]) == 0
    assert deeds(made) == ["delete", *LISTS]
    out = capfd.readouterr().out
    assert "no state here" in out and "the clone that made the cluster" in out and "goes by names" in out
    assert "nothing of the course is left" not in out


def test_a_destroy_that_fails_lists_what_is_left_all_the_same(made, capfd):
    made.answer("terraform destroy", status=1)
    made.answer("gcloud disks list", [{"name": "pvc-1", "labels": {"goog-k8s-cluster-name": "jax-gpu-cluster"}}])
    assert cloud.main(["teardown", "--yes"]) == 1
    said = capfd.readouterr()
    assert "left: disk pvc-1" in said.out and "mend that, then make teardown again" in said.err
    assert deeds(made)[2:] == LISTS


def test_ctrl_c_lets_terraform_write_its_state(made):
    made.answer("terraform destroy", "destroying\n", sleep=60)
    with start("teardown", "--yes", start_new_session=True) as process:
        while "destroying" not in (line := process.stdout.readline()):
            assert line, "it ended before it destroyed"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the command hears it
        rest = process.stdout.read()
    assert (process.returncode, rest.strip()) == (130, "teardown: stopped")
    assert (made.folder / "ended-well").exists()


ZONE = "https://www.googleapis.com/compute/v1/projects/p/zones/us-central1-a"
SERVICE = json.dumps({"kubernetes.io/service-name": "jax-course/jax-jupyter-svc"})


@pytest.mark.parametrize("kind, item, command", [
    ("disks", {"name": "pvc-1", "zone": ZONE, "labels": {"goog-k8s-cluster-name": "jax-gpu-cluster"}},
     "disk pvc-1: gcloud compute disks delete pvc-1 --zone=us-central1-a --project=my-project"),
    ("disks", {"name": "pvc-2", "zone": ZONE}, "disk pvc-2 (of this cluster or another)"),
    ("forwarding-rules", {"name": "a1", "region": "r/us-central1", "description": SERVICE},
     "compute forwarding-rules delete a1 --region=us-central1 "),
    ("addresses", {"name": "a2", "description": SERVICE}, "compute addresses delete a2 --global "),
    ("clusters", {"name": "jax-gpu-cluster", "location": "us-central1-a"}, "jax-gpu-cluster --location=us-central1-a "),
    ("addresses", {"name": "nat-auto-ip-1", "region": "r/us-central1", "users": ["r/routers/jax-gpu-cluster"]},
     "compute addresses delete nat-auto-ip-1 --region=us-central1 "),
    ("firewall-rules", {"name": "k8s-fw-1", "network": "n/jax-gpu-cluster"}, "-rules delete k8s-fw-1 --project"),
    ("routers", {"name": "jax-gpu-cluster", "region": "r/us-central1"}, "delete jax-gpu-cluster --region=us-central1 "),
    ("networks", {"name": "jax-gpu-cluster"}, "compute networks delete jax-gpu-cluster --project"),
    ("repositories", {"name": "projects/p/locations/us-central1/repositories/jax-gpu-cluster"},
     "artifacts repositories delete jax-gpu-cluster --location=us-central1 --project"),
    ("service-accounts", {"name": "projects/p/serviceAccounts/1", "email": "jax-gpu-cluster-nodes@p.iam"},
     "iam service-accounts delete jax-gpu-cluster-nodes@p.iam --project"),
    ("instances", {"name": "gke-jax-gpu-cluster-gpu-1", "zone": ZONE}, "delete gke-jax-gpu-cluster-gpu-1 --zone="),
])  # fmt: skip
def test_what_is_left_is_named_with_the_command_that_deletes_it(kind, item, command, made, capfd):
    made.answer(f"gcloud {kind} list", [item])
    if kind == "networks":  # whose words are among those of the subnets too
        made.answer("gcloud subnets list", [])
    assert cloud.main(["teardown", "--yes"]) == 1
    out = capfd.readouterr().out
    assert command in out and "gcloud projects delete my-project" in out


def test_the_bucket_of_all_builds_is_named_and_not_counted(made, capfd):
    made.answer("gcloud buckets", "{}")
    assert cloud.main(["teardown", "--yes"]) == 0
    assert "gcloud storage rm --recursive gs://my-project_cloudbuild" in capfd.readouterr().out


@pytest.mark.parametrize("item", [
    {"name": "jax-gpu-cluster-2"},
    {"name": "gke-other-1", "zone": ZONE},
    {"name": "pvc-3", "labels": {"goog-k8s-cluster-name": "production"}},
])  # fmt: skip
def test_what_belongs_to_others_is_counted_and_no_failure(item, made, capfd):
    made.answer("gcloud disks list", [item])
    assert cloud.main(["teardown", "--yes"]) == 0
    assert "1 of kind disk belong to something else: gcloud compute disks list" in capfd.readouterr().out


# ---- the files themselves


def test_an_old_python_can_read_them():
    for path in (REPO / "deploy" / "cloud").glob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_a_wrong_call_is_status_2(capfd):
    with pytest.raises(SystemExit) as end:
        cloud.main(["undeploy"])
    line = capfd.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1 and line.endswith("Help: make help\n")
