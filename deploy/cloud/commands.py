"""The course on Google Kubernetes Engine, from a laptop or Cloud Shell: look first, deploy, use, tear down.

`make preflight`, `deploy`, `send`, `token`, `forward`, `image` and `teardown` start it. It calls gcloud, terraform,
kubectl, openssl and git, and works on the cluster that kubectl's current context names. A refusal is one line: what is
wrong, what was given, what to do. Exit status: 0 done, 1 refused or something is left to mend, 2 a wrong call, 130
stopped with Ctrl-C.

Standard library only, in the syntax of Python 3.8: it runs with the Python that is there, without `.venv`.
"""

import argparse
import base64
import io
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time

import receive
import tools
from preflight import preflight
from public import certificate, make_secret, ranges
from rollout import pod_may_wait, wait_for_address, wait_for_pod
from teardown import teardown
from tools import APP, DEPLOY, NAMESPACE, ROOT, Problem, ask, call, fault_in, kubectl, look, need, say, show

PORT = 8884
COURSE = "/workspace/attention"
WORK = os.path.join(ROOT, "build", "cloud")  # what is applied stays there, to be read
READY = "Is this machine ready"  # the title of doctor's last table
BASE_IMAGE = "nvcr.io/nvidia/jax"  # the name that deploy/base has
EXEC = ["kubectl", "-n", NAMESPACE, "exec", "-i", f"deploy/{APP}", "-c", "jupyter", "--"]


# ---- deploy


def image_of(name, digest):
    """kustomize's `images` entries for IMAGE and DIGEST, none when neither is given. Raises `Problem`."""
    name, _, inside = name.partition("@")
    digest = digest or inside
    if digest and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise Problem(f"DIGEST={digest} is no digest: give sha256: and 64 hexadecimal digits, as make image prints it")
    repository, _, tag = name.rpartition(":") if ":" in name.split("/")[-1] else (name, "", "")
    if name and not digest and tag in ("", "latest"):
        raise Problem(f"IMAGE={name} names no fixed image: give a tag other than latest, or DIGEST=sha256:…")
    given = {"newName": repository, "newTag": tag, "digest": digest}
    given = {key: value for key, value in given.items() if value}
    return [dict(given, name=BASE_IMAGE)] if given else []


def kustomization(overlay, sources, images):
    """Write the folder that is applied: the overlay, with what was given. Raises `Problem`."""
    folder = os.path.join(DEPLOY, "base" if overlay == "base" else os.path.join("overlays", overlay))
    if not os.path.isfile(os.path.join(folder, "kustomization.yaml")):
        known = ", ".join(sorted(os.listdir(os.path.join(DEPLOY, "overlays"))))
        raise Problem(f"OVERLAY={overlay} is not there: give one of base, {known}")
    if sources and overlay != "public":
        raise Problem(f"SOURCES={sources} does nothing with OVERLAY={overlay}: leave it out, or give OVERLAY=public")
    patches, generated = [], []
    if overlay == "public":
        allowed = ranges(sources)
        blocks = [{"ipBlock": {"cidr": net}} for net in allowed]
        for kind, path, value in (
            ("Service", "/spec/loadBalancerSourceRanges", allowed),
            ("NetworkPolicy", "/spec/ingress/0/from", blocks),
        ):
            change = json.dumps([{"op": "replace", "path": path, "value": value}])
            patches.append({"target": {"kind": kind}, "patch": change})
    os.makedirs(WORK, exist_ok=True)
    lock = os.path.join(DEPLOY, "locks", "pod.txt")
    if os.path.exists(lock):
        shutil.copy(lock, WORK)  # kustomize takes no file from outside its folder
        locks = {"name": f"{APP}-locks", "namespace": NAMESPACE, "files": ["pod.txt"]}
        generated = [dict(locks, options={"disableNameSuffixHash": True})]
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(os.path.realpath(folder), os.path.realpath(WORK))],  # no absolute ones
        "images": images,
        "patches": patches,
        "configMapGenerator": generated,
    }
    with open(os.path.join(WORK, "kustomization.yaml"), "w", encoding="utf-8") as file:
        json.dump(whole, file, indent=2)  # JSON is YAML


def deploy(options):
    """Bring JupyterLab and the course into the cluster, and check them there. What is there and right stays."""
    if bool(options.cert) != bool(options.key):
        raise Problem("CERT and KEY go together: give both files, or neither for a certificate made here")
    if options.cert and options.overlay != "public":
        raise Problem(f"CERT does nothing with OVERLAY={options.overlay}: leave it out, or give OVERLAY=public")
    kustomization(options.overlay, options.sources, image_of(options.image, options.digest))
    say(f"cluster: {tools.connected()}")
    if not look("namespace", NAMESPACE):
        kubectl("create", "namespace", NAMESPACE, "--save-config")
    running = look("deployment", APP)
    if running:
        say_changes(running)
    fresh = not look("secret", f"{APP}-token")
    if fresh:  # before the pod, which else makes a token of its own
        make_secret(f"{APP}-token", {"token": secrets.token_urlsafe(32)})
        say("made a token: make token shows it")
    applied = kubectl("apply", "-k", WORK, to_do="what was applied is in build/cloud")
    changes = [f"  {line}" for line in applied.splitlines() if not line.endswith(" unchanged")]
    say("\n".join(changes) or "  the manifests are applied already")
    # A running pod has read these and does not look again.
    fresh |= bool(re.search(rf"^configmap/{APP}\S* (configured|created)", applied, re.MULTILINE))
    address = ""
    with pod_may_wait():
        if options.overlay == "public":
            address = wait_for_address()
            fresh |= certificate(address, options.cert, options.key)
        if running and fresh:
            kubectl("rollout", "restart", f"deployment/{APP}")
        pod = wait_for_pod()
    bring_course()
    say("asking attnlab doctor in the pod")
    unwell, out, err = call([*EXEC, "bash", "-c", f"cd {COURSE} && python -m attnlab doctor"], seconds=900)
    say((out + err if unwell else out[max(0, out.find(READY)) :]).rstrip())
    say_image(pod, options)
    where = f"https://{address}:{PORT} in the browser" if address else "make forward, in a terminal of its own"
    say(f"next: {where}; make token shows what it asks for")
    if unwell:
        raise Problem("JupyterLab runs, but doctor found something in the pod, see above: mend it, or go on without")
    return 0


def say_changes(running):
    """Say where what will be applied changes the image, or whether there is a public address."""
    image, kind = rendered(kubectl("kustomize", WORK, to_do="what should be applied is in build/cloud"))
    containers = running["spec"]["template"]["spec"]["containers"]
    has_image = next((part["image"] for part in containers if part["name"] == "jupyter"), "")
    has_kind = look("service", f"{APP}-svc").get("spec", {}).get("type")
    for what, old, new, words in (
        ("image", has_image, image, "IMAGE= and DIGEST="),
        ("Service's type", has_kind, kind, "OVERLAY= and SOURCES="),
    ):
        if old and new and old != new:
            say(f"note: the {what} changes from {old} to {new} (give {words} as before to keep it)")


def rendered(manifests):
    """[the Deployment's image, the Service's type] in what kustomize writes; "" for what is not there."""
    found = []
    for kind, line in (("Deployment", "image"), ("Service", "type")):
        parts = [part for part in manifests.split("\n---\n") if re.search(rf"^kind: {kind}$", part, re.MULTILINE)]
        value = re.search(rf"^ +(?:- )?{line}: (\S+)$", "\n".join(parts), re.MULTILINE)
        found.append(value[1] if value else "")
    return found


def say_image(pod, options):
    runs = next(part for part in pod["status"]["containerStatuses"] if part["name"] == "jupyter")
    digest = re.search(r"sha256:[0-9a-f]{64}", runs.get("imageID", ""))
    say(f"image: {runs['image']}, {digest[0] if digest else 'digest unknown'}")
    if digest and not options.digest and "@" not in options.image:
        given = {name: getattr(options, name) for name in ("overlay", "sources", "image", "cert", "key")}
        given["overlay"] = options.overlay.replace("base", "")
        given = "".join(f" {name.upper()}={shlex.quote(value)}" for name, value in given.items() if value)
        say(f"pin it: make deploy{given} DIGEST={digest[0]}")


# ---- send


def pack():
    """(the course as the bytes of a tar, how many files). With git: all that git does not ignore, as it is here now."""
    wanted = None
    if os.path.exists(os.path.join(ROOT, ".git")) and shutil.which("git"):
        status, out, _ = call(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        wanted = None if status else set(out.split("\0"))
    files, whole = receive.read_folder(ROOT, wanted), io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for path, (data, executable) in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), 0o755 if executable else 0o644
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue(), len(files)


def send(_):
    """Bring the course into the pod, beside what the student changed."""
    tools.connected()
    return bring_course()


def bring_course():
    """Send the course, which is counted and hashed in the pod before a byte of it is written. Raises `Problem`."""
    data, count = pack()
    with open(os.path.join(DEPLOY, "cloud", "receive.py"), "rb") as file:
        program = file.read()
    # -I: a student's json.py in the working folder is not the library's. The program goes first, then the course.
    start = (
        f"import sys, hashlib; p = sys.stdin.buffer.read({len(program)}); h = hashlib.sha256(p).hexdigest(); "
        f"h == '{receive.digest(program)}' or sys.exit(3); exec(compile(p, 'receive', 'exec'))"
    )
    command = [*EXEC, "python3", "-I", "-c", start, "-", COURSE, str(len(data)), receive.digest(data)]
    say(f"sending the course: {count} files, {len(data) / 1e6:.1f} MB")
    for last in (False, True):
        status, out, err = call(command, program + data, seconds=900)
        if not status and f"the course is in {COURSE}" in out:
            say(out.rstrip())
            return 0
        refused = re.search(r"^receive: (.*)", err, re.MULTILINE)
        if refused and status == 1:
            raise Problem(f"the course was not brought: {refused[1]}")
        why = fault_in(err.replace("command terminated with exit code 3", ""))
        if last:
            raise Problem(f"the course did not arrive: {why} (is the pod ready? make deploy waits for it; make send)")
        say(f"  the stream broke ({why}); once more")


# ---- token, forward


def token(_):
    """Show the token, alone on standard output."""
    tools.connected()
    secret = look("secret", f"{APP}-token")
    if not secret:
        logs = f"kubectl -n {NAMESPACE} logs deploy/{APP} -c jupyter"
        raise Problem(f"there is no Secret {APP}-token. Applied by hand, Jupyter printed a token of its own: {logs}")
    print("for the page that make forward opens:", file=sys.stderr, flush=True)
    say(base64.b64decode(secret["data"]["token"]).decode())
    return 0


def forward(options):
    """Hold a way to JupyterLab open until Ctrl-C, also when the pod starts anew."""
    tools.connected()
    there = look("deployment", APP)
    if not there:
        raise Problem("JupyterLab is not in this cluster: make deploy")
    if os.environ.get("CLOUD_SHELL") == "true":
        connect = tools.terraform_outputs().get("get_credentials_command", "connecting kubectl there")
        say("note: this is Cloud Shell, whose localhost is not your browser's. Run make forward on your own machine,")
        say(f"  after {connect}; or make deploy OVERLAY=public SOURCES=…")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was closed just now is free
        try:
            probe.bind(("127.0.0.1", options.port))
        except OSError as error:
            raise Problem(f"PORT={options.port} is not free: {error}. Give another: make forward PORT=9000") from None
    tls = any(volume["name"] == "tls" for volume in there["spec"]["template"]["spec"]["volumes"])
    url = f"{'https' if tls else 'http'}://localhost:{options.port}"
    command = ["kubectl", "-n", NAMESPACE, "port-forward", f"svc/{APP}-svc", f"{options.port}:{PORT}"]
    opened, tries = False, 0
    try:
        while True:
            words = ""
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8") as child:
                try:
                    for line in child.stdout:
                        words = line.strip() or words
                        if line.startswith("Forwarding from 127.0.0.1"):
                            say(f"{'open again' if opened else 'open'}: {url}  (make token; Ctrl-C ends it)")
                            opened, tries = True, 0
                finally:
                    child.kill()
            tries += 1
            if not opened or tries > 60:
                raise Problem(f"no way to the pod: {words or 'no words'} (is it ready? make deploy waits for it)")
            if tries == 1:
                say(f"the connection broke ({words}); trying again")
            time.sleep(tools.POLL)
    except KeyboardInterrupt:
        say("\nstopped")
    return 0


# ---- image


def image(_):
    """Build the class image with Cloud Build, into the repository that Terraform made."""
    need("gcloud", "terraform")
    given = tools.terraform_outputs()
    if "image_repository" not in given or "build_service_account" not in given:
        raise Problem("Terraform knows no image repository: make the cluster first, with terraform apply in terraform/")
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        tag = re.search(r'^version = "(.+)"', file.read(), re.MULTILINE)[1]
    if shutil.which("git"):
        commit = call(["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"])[1].strip()
        tag += f"-{commit}" if commit else ""
    project, name = tools.project_of(given), f"{given['image_repository']}/attention"
    account = f"projects/{project}/serviceAccounts/{given['build_service_account']}"
    values = f"--substitutions=_IMAGE={name},_TAG={tag},_SERVICE_ACCOUNT={account}"
    log = f"https://console.cloud.google.com/cloud-build/builds?project={project}"
    say(f"building {name}:{tag}; its log: {log}")
    config = os.path.join(DEPLOY, "image", "cloudbuild.yaml")
    command = ["gcloud", "builds", "submit", ROOT, f"--config={config}", values, f"--project={project}"]
    show(command, f"{log} says why; make preflight looks at APIs and account")
    words = ["artifacts", "docker", "images", "describe", f"{name}:{tag}", "--format=value(image_summary.digest)"]
    digest = ask(["gcloud", *words], "the image is built; its digest stands in the Artifact Registry").strip()
    say(f"deploy it: make deploy IMAGE={name}:{tag} DIGEST={digest}")
    return 0


# ---- the command

COMMANDS = (preflight, deploy, send, token, forward, image, teardown)


class Parser(argparse.ArgumentParser):
    """Refuses a wrong call in one line, as all the rest is refused."""

    def error(self, message):
        message = re.sub(r"^argument --\w+: ", "", message)
        self.exit(2, f"{self.prog.split()[-1]}: {message}. Help: make help\n")


def port_number(text):
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"PORT={text} is no port: give a number up to 65535, as in PORT=9000")
    return int(text)


def main(argv=None):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the shell that started it ignores it
    parser = Parser(prog="cloud", description="The course on Google Kubernetes Engine.")
    known = parser.add_subparsers(dest="command", required=True)
    made = {f.__name__: known.add_parser(f.__name__, help=f.__doc__.splitlines()[0]) for f in COMMANDS}
    for name, words in (
        ("overlay", "base, or public: a public address over TLS"),
        ("sources", "public: the ranges that may reach it"),
        ("image", "another image, NAME:TAG"),
        ("digest", "the image's digest, sha256:…"),
        ("cert", "public: a certificate of your own, a PEM file"),
        ("key", "its key, a PEM file"),
    ):
        default = "base" if name == "overlay" else ""
        made["deploy"].add_argument(f"--{name}", default=default, help=f"{words} ({name.upper()})")
    made["forward"].add_argument("--port", type=port_number, default=PORT, help="the port on this machine (PORT)")
    made["teardown"].add_argument("--yes", action="store_true", help="ask nothing (YES)")
    options = parser.parse_args(argv)
    try:
        return next(f for f in COMMANDS if f.__name__ == options.command)(options)
    except (Problem, receive.Problem) as problem:
        print(f"{options.command}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{options.command}: stopped", file=sys.stderr)
        return 130
