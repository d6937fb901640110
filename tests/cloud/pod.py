"""A pod run on this machine as its manifest says, for tests: kubelet and container runtime in one small file.

Each container gets a root file system of its own (this machine's programs, read-only, and the manifest's volumes at
the manifest's paths), its own processes and a network with nothing in it but itself. User, groups, privileges,
capabilities, command, environment, working folder and probes are the manifest's. The image is stood in for by the
Python that runs the tests, with all packages of it. What is not tried here: seccomp, limits, the GPU, the
NetworkPolicy, and what the API server refuses. A mount, a kind of volume or a right that this file does not know is an
error, not passed over.
"""

import base64
import contextlib
import ctypes
import os
import pathlib
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from http.client import HTTPConnection, HTTPException

import psutil

TOOLS = ("unshare", "nsenter", "setpriv", "chroot", "mount", "ip", "bash", "env")
os.environ["PATH"] += os.pathsep + "/usr/sbin:/sbin"  # chroot's and ip's place, which some PATHs lack
NAMESPACES = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
DIE_WITH_PARENT = ["--pdeathsig", "SIGKILL"]  # for setpriv
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
CLONE_NEWNET = 0x40000000
STARTUP_SECONDS = 60  # it takes three

# What the image's own environment would give: its Python first, its CUDA, and no package index (it has everything).
IMAGE_ENV = {
    "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": sysconfig.get_path("purelib"),
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "PIP_NO_INDEX": "1",
    "LANG": "C.UTF-8",
}


def why_not() -> str:
    """Why no pod can be run on this machine; "" when one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a pod is run here only by root on Linux, who may change users and mounts (try: sudo make test-cloud)"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"not here: {', '.join(missing)} (sudo apt install util-linux iproute2)"
    try_mounts = "mount --bind /usr /usr && mount -t proc proc /proc"
    tried = subprocess.run([*NAMESPACES, "bash", "-c", try_mounts], capture_output=True, text=True)
    return f"root can't make namespaces and mounts here: {tried.stderr.strip()}" if tried.returncode else ""


class PodError(Exception):
    """A pod that kubelet would not bring up; the message says why, with the container's last words."""


class Pod:
    """The pod of the one Deployment among `objects`.

    objects: parsed manifests: the rendered ones and what else is in the cluster, such as a Secret.
    folder: where volumes of the pod, root folders and logs go.
    disks: a folder that outlives the pod: claims lie in it.
    env: what the machine sets beside the image.

    Use it as a context: it starts, waits until the startup probe passes, and ends every process when left.
    """

    def __init__(self, objects, folder, disks, env=None):
        self.objects, self.folder, self.disks = objects, pathlib.Path(folder), pathlib.Path(disks)
        (deployment,) = [o for o in objects if o["kind"] == "Deployment"]
        self.spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.image_env = IMAGE_ENV | (env or {})
        self.log_file = self.folder / "container.log"
        self.process = None

    # --- its life

    def __enter__(self):
        self.folder.mkdir(parents=True)
        self.volumes = {volume["name"]: self._volume(volume) for volume in self.spec["volumes"]}
        try:
            for container in self.spec.get("initContainers", []):
                log = self.folder / f"{container['name']}.log"
                self.process = self._start(container, log)
                if _wait(self.process, 120):
                    raise PodError(f"the init container {container['name']} failed:\n{log.read_text()}")
            self.process = self._start(self.container, self.log_file)
            self._wait_for_startup()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process:
            with contextlib.suppress(psutil.Error, IndexError):
                self.main().terminate()  # as kubelet does; then it waits
            _wait(self.process, self.spec.get("terminationGracePeriodSeconds", 30))
            self.process = None

    def _wait_for_startup(self):
        probe = self.container["startupProbe"]
        end = time.monotonic() + min(STARTUP_SECONDS, probe["periodSeconds"] * probe["failureThreshold"])
        while not self.probe("startupProbe"):
            if self.process.poll() is not None or time.monotonic() > end:
                raise PodError(f"the startup probe never passed:\n{self.log()}")
            time.sleep(0.2)

    # --- what one can do with it

    def main(self) -> psutil.Process:
        """The container's first process."""
        return psutil.Process(self.process.pid).children()[0]

    def log(self) -> str:
        """What the container printed."""
        return self.log_file.read_text()

    def probe(self, name) -> bool:
        """Ask once, as kubelet does, which checks no certificate and takes any answer from 200 to 399."""
        get = self.container[name]["httpGet"]
        with contextlib.suppress(OSError, HTTPException, psutil.Error, IndexError):
            connection = HTTPConnection("pod")
            connection.sock = self.connect(get["port"])
            if get.get("scheme") == "HTTPS":
                connection.sock = ssl._create_unverified_context().wrap_socket(connection.sock)
            connection.request("GET", get["path"])
            return 200 <= connection.getresponse().status < 400
        return False

    def connect(self, port) -> socket.socket:
        """A connection to a port of the pod, by number or name, as `kubectl port-forward` makes one."""
        named = {p["name"]: p["containerPort"] for p in self.container["ports"]}
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as here, open(f"/proc/{self.main().pid}/ns/net") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the pod's network can't be entered")
            try:
                return socket.create_connection(("127.0.0.1", named.get(port, port)), timeout=60)
            finally:
                libc.setns(here.fileno(), CLONE_NEWNET)

    def exec(self, *command, **options) -> subprocess.CompletedProcess:
        """Run a command in the container, as `kubectl exec` does."""
        return subprocess.run([*self.enter(), *command], **({"capture_output": True, "timeout": 120} | options))

    def enter(self) -> list:
        """What to put before a command, so that it runs in the container."""
        namespaces = ["nsenter", f"--target={self.main().pid}", "--mount", "--net", "--pid", "--root"]
        return [*namespaces, *self._as_user(self.container), "--"]

    # --- how a container starts

    def _start(self, container, log) -> subprocess.Popen:
        context = self._security(container)
        root = _root_folder(self.folder / f"root-{container['name']}")
        mounts = {path: (path, True) for path in _programs()}
        mounts |= {f"/dev/{name}": (f"/dev/{name}", False) for name in DEVICES}
        for mount in container["volumeMounts"]:
            _known(mount, "name", "mountPath", "readOnly")
            source, read_only = self.volumes[mount["name"]]
            mounts[mount["mountPath"]] = (source, read_only or mount.get("readOnly", False))
        script = ["ip link set lo up", f"mount --bind {root} {root}"]
        for path, (source, read_only) in sorted(mounts.items()):  # a folder comes before what lies in it
            target = shlex.quote(f"{root}{path}")
            script.append(f"mkdir -p {target}" if os.path.isdir(source) else f"touch {target}")
            script.append(f"mount -o bind,{'ro' if read_only else 'rw'} {shlex.quote(str(source))} {target}")
        script.append(f"mount -t proc proc {root}/proc")
        if context.get("readOnlyRootFilesystem"):
            script.append(f"mount -o remount,bind,ro {root}")
        # The whole pod dies with this process, however that ends. (A change of user takes such a wish back.)
        start = ["chroot", str(root), *self._as_user(container), *DIE_WITH_PARENT, "--", *container["command"]]
        script.append(f"exec {shlex.join([*start, *container.get('args', [])])}")
        command = ["setpriv", *DIE_WITH_PARENT, *NAMESPACES, "bash", "-euc", "\n".join(script)]
        with log.open("w") as out:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def _security(self, container) -> dict:
        context = {k: v for k, v in self.spec["securityContext"].items() if not k.startswith("fsGroup")}
        context |= container.get("securityContext", {})
        _known(
            context, "runAsNonRoot", "runAsUser", "runAsGroup", "seccompProfile",
            "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities",
        )  # fmt: skip
        _known(context.get("capabilities", {}), "drop")
        if context.get("runAsNonRoot") and not context.get("runAsUser"):
            raise PodError(f"{container['name']}: runAsNonRoot, and the image runs as root")
        return context

    def _as_user(self, container) -> list:
        """The start of a command that runs with the container's environment, user and rights."""
        context = self._security(container)
        env = self.image_env | {e["name"]: e["value"] for e in container.get("env", [])}
        start = [shutil.which("env"), "-i", "-C", container.get("workingDir", "/")]
        start += [f"{name}={value}" for name, value in env.items()]
        start += [shutil.which("setpriv"), f"--reuid={context.get('runAsUser', 0)}"]
        start += [f"--regid={context.get('runAsGroup', 0)}"]
        start.append("--clear-groups" if self._group() is None else f"--groups={self._group()}")
        if not context.get("allowPrivilegeEscalation", True):
            start.append("--no-new-privs")
        if context.get("capabilities", {}).get("drop") == ["ALL"]:
            start += ["--inh-caps=-all", "--bounding-set=-all"]
        return start

    # --- volumes: a folder of this machine, and whether it can't be written

    def _group(self) -> int | None:
        return self.spec["securityContext"].get("fsGroup")

    def _volume(self, volume) -> tuple:
        kinds = {
            "persistentVolumeClaim": self._claim,
            "emptyDir": self._empty,
            "configMap": self._files,
            "secret": self._files,
        }
        ((kind, about),) = [(key, value) for key, value in volume.items() if key != "name"]
        return kinds[kind](volume["name"], about)

    def _claim(self, _, claim):
        self._object("PersistentVolumeClaim", claim["claimName"])
        return self._folder(self.disks / claim["claimName"], 0o755), False

    def _empty(self, name, _):
        return self._folder(self.folder / "volumes" / name, 0o777), False

    def _files(self, name, about):
        _known(about, "name", "secretName", "optional", "defaultMode")
        folder = self._folder(self.folder / "volumes" / name, 0o755)
        kind, of = ("Secret", about["secretName"]) if "secretName" in about else ("ConfigMap", about["name"])
        found = self._object(kind, of, about.get("optional", False)) or {}
        data = {key: base64.b64decode(value) for key, value in found.get("data", {}).items() if kind == "Secret"}
        text = found.get("stringData", {}) if kind == "Secret" else found.get("data", {})
        for key, value in (data | {key: value.encode() for key, value in text.items()}).items():
            file = folder / key
            file.write_bytes(value)
            file.chmod(about.get("defaultMode", 0o644))
            os.chown(file, 0, self._group() or 0)
        return folder, True

    def _folder(self, path, mode):
        """A folder of root's, and of the pod's group if the pod has one: kubelet lets it write then."""
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, 0, self._group() or 0)
        path.chmod(mode if self._group() is None else mode | 0o2070)
        return path

    def _object(self, kind, name, optional=False):
        found = [o for o in self.objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
        if not found and not optional:
            raise PodError(f"the pod waits: there is no {kind} {name}")
        return found[0] if found else None


def _known(about, *keys):
    """Refuse what a manifest says and this file does not do."""
    if unknown := set(about) - set(keys):
        raise NotImplementedError(f"tests/cloud/pod.py does not know {sorted(unknown)}: teach it")


def _wait(process, seconds) -> int:
    """The exit status of a container that may take so many seconds to end; then it is killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _root_folder(root) -> pathlib.Path:
    """The root of an image: empty folders, and the few files that programs look up."""
    for name in ("dev", "etc", "proc", "run", "var/tmp"):
        (root / name).mkdir(parents=True)
    for name, place in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd{place}")
    for name in ("passwd", "group", "hosts", "nsswitch.conf", "ld.so.cache", "localtime"):
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(f"/etc/{name}", root / "etc" / name)
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree("/etc/alternatives", root / "etc/alternatives", symlinks=True)
    for path in map(pathlib.Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            (root / path.name).symlink_to(os.readlink(path))
    return root


def _programs() -> list:
    """The folders that make up the image: this machine's programs, and the Python that runs the tests."""
    system = [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64") if os.path.isdir(path)]
    system = [path for path in system if not os.path.islink(path)]
    base = pathlib.Path(os.path.realpath(sys.executable)).parent.parent
    python = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix), str(base)}
    inside = tuple(f"{path}/" for path in system)
    return [*system, "/sys", *(path for path in sorted(python) if not f"{path}/".startswith(inside))]
