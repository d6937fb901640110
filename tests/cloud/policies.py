"""What must hold for the manifests: each function takes the rendered objects and returns what is wrong, in words.

`BASE` and `PUBLIC` list the functions for either rendering. test_manifests.py runs them on the real manifests,
test_faults.py on manifests with a mistake in them.
"""

import ast
import pathlib
import re
import tomllib

from manifests import (
    after_env_sh,
    at,
    commands_text,
    containers,
    controller,
    env,
    jupyter,
    leaves,
    mount_at,
    name_of,
    of_kind,
    pod,
    security,
    terraform_facts,
    texts,
    values,
    volume_at,
)  # fmt: skip
from network import passes

REPO = pathlib.Path(__file__).parents[2]
NAMESPACE, USER, PORT = "jax-course", 10001, 8884
IN_FRONT, NVIDIA = "/opt/course/bin:/usr/bin:/bin", "/usr/local/nvidia/lib64"
CONFIG = "jupyter_server_config.py"
# Objects that the deploy command makes: not in the manifests.
MADE_AT_DEPLOY = {"jax-jupyter-token", "jax-jupyter-locks", "jax-jupyter-tls"}

# What the API server takes at these paths (the API reference), and of GKE's storage classes those that delete the disk
# with its claim. The schemas list no values, so a misspelled one would be met only in the cluster.
ALLOWED = {
    "Deployment.spec.strategy.type": {"Recreate", "RollingUpdate"},
    "PersistentVolumeClaim.spec.accessModes": {"ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany", "ReadWriteMany"},
    "PersistentVolumeClaim.spec.storageClassName": {"standard-rwo", "premium-rwo"},
    "Service.spec.type": {"ClusterIP", "NodePort", "LoadBalancer", "ExternalName"},
    "externalTrafficPolicy": {"Cluster", "Local"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "policyTypes": {"Ingress", "Egress"},
    "matchExpressions.operator": {"In", "NotIn", "Exists", "DoesNotExist"},
    "tolerations.operator": {"Exists", "Equal"},
    "tolerations.effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "seccompProfile.type": {"RuntimeDefault", "Localhost", "Unconfined"},
    "httpGet.scheme": {"HTTP", "HTTPS"},
    "emptyDir.medium": {"", "Memory"},
    "pod-security.kubernetes.io/enforce": {"privileged", "baseline", "restricted"},
}

# Places that a container writes, beside those that its environment names.
WRITTEN = {"packages": ["/tmp", "/opt/course"], "jupyter": ["/tmp", "/dev/shm"]}
WRITTEN_BY_NAME = re.compile(r"HOME|TMPDIR|JUPYTER_\w+_DIR|\w+_CACHE_DIR")

KUBE_DNS = {"namespace": "kube-system", "k8s-app": "kube-dns"}
NODE_DNS = {"namespace": "kube-system", "k8s-app": "node-local-dns"}
METADATA, OLD_METADATA, DNS_ON_NODE = "169.254.169.254", "169.254.169.252", "169.254.20.10"
MAY_LEAVE = [
    *((peer, 53, way) for peer in (KUBE_DNS, NODE_DNS, DNS_ON_NODE, METADATA) for way in ("UDP", "TCP")),
    *(("8.8.8.8", port, "TCP") for port in (80, 443)),
]
MAY_NOT_LEAVE = [
    *((peer, port, "TCP") for peer in (METADATA, OLD_METADATA) for port in (80, 987, 988, 8080)),
    *((peer, 443, "TCP") for peer in ("10.0.0.1", "10.255.3.4", "172.16.0.2", "172.31.9.9", "192.168.1.1")),
    *((peer, 443, "TCP") for peer in ("100.64.0.1", "100.127.0.1", "240.0.0.1", DNS_ON_NODE, KUBE_DNS)),
    *(({"namespace": name, "app": "other"}, 443, "TCP") for name in ("kube-system", "default", NAMESPACE)),
    ({"namespace": "default", "k8s-app": "kube-dns"}, 53, "UDP"),
]


def unless(*held: tuple[bool, str]) -> list[str]:
    """The words of each pair whose condition doesn't hold."""
    return [words for condition, words in held if not condition]


# The pod


def images_are_pinned(docs):
    images = sorted({c["image"] for c in containers(docs)})
    found = unless((len(images) == 1, f"the containers' images differ: {images}"))
    for image in images:
        name, _, digest = image.partition("@")
        tag = name.rpartition("/")[2].partition(":")[2]
        pinned = re.fullmatch("sha256:[0-9a-f]{64}", digest) or tag not in ("", "latest")
        found += unless((pinned, f"{image} has neither a release's tag nor a digest"))
    return found


def nobody_is_root(docs):
    wanted = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    return [
        f"{c['name']}: {key} is not {value}"
        for c in containers(docs)
        for key, value in wanted.items()
        if security(docs, c).get(key) != value
    ]


def nobody_gains_privileges(docs):
    found = []
    for container in containers(docs):
        name, given = container["name"], security(docs, container)
        found += unless(
            (given.get("allowPrivilegeEscalation") is False, f"{name}: privilege escalation is allowed"),
            (not given.get("privileged"), f"{name}: privileged"),
            (given.get("capabilities") == {"drop": ["ALL"]}, f"{name}: keeps capabilities"),
            (at(given, "seccompProfile.type") == "RuntimeDefault", f"{name}: no seccomp profile"),
        )
    return found


def root_is_read_only(docs):
    return [
        f"{c['name']}: its root file system is writable"
        for c in containers(docs)
        if security(docs, c).get("readOnlyRootFilesystem") is not True
    ]


def pod_has_no_identity(docs):
    name = pod(docs).get("serviceAccountName")
    accounts = [d for d in of_kind(docs, "ServiceAccount") if name_of(d) == name]
    projected = [*values(pod(docs), "volumes.*.projected.sources.*.serviceAccountToken")]
    return unless(
        (accounts, f"the service account {name} is not among the manifests"),
        (all(d.get("automountServiceAccountToken") is False for d in accounts), "the account mounts its token"),
        (pod(docs).get("automountServiceAccountToken") is False and not projected, "the pod mounts the token"),
        (not of_kind(docs, "RoleBinding", "ClusterRoleBinding"), "a role is bound"),
    )


def pod_sees_no_node(docs):
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod(docs).get(key)]
    found += [f"volume {v['name']} is a folder of the node" for v in pod(docs)["volumes"] if "hostPath" in v]
    return found + [f"hostPort {port}" for port in values(pod(docs), "*ontainers.*.ports.*.hostPort")]


def namespace_refuses_the_privileged(docs):
    labels = [*values(of_kind(docs, "Namespace"), "*.metadata.labels.pod-security~kubernetes~io/enforce")]
    return unless((labels == ["restricted"], f"the namespace enforces {labels}, not `restricted`"))


def one_pod_at_a_time(docs):
    spec = controller(docs)["spec"]
    recreated = controller(docs)["kind"] == "StatefulSet" or spec.get("strategy") == {"type": "Recreate"}
    return unless(
        (not of_kind(docs, "Pod"), "a bare Pod dies with its node"),
        (spec.get("replicas") == 1, "several replicas, one disk"),
        (recreated, "not Recreate: the new pod would wait for the GPU and the disk of the old one"),
    )


def probes_ask_the_api(docs):
    probes = {name: jupyter(docs).get(name, {}) for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    found = [f"{name} does not ask /api" for name, probe in probes.items() if at(probe, "httpGet.path") != "/api"]
    start = probes["startupProbe"]
    seconds = start.get("periodSeconds", 10) * start.get("failureThreshold", 3)
    return found + unless((seconds >= 300, f"{seconds} s to start: a node that streams the image needs minutes"))


def mounts_and_volumes_agree(docs):
    mounted = {m["name"] for c in containers(docs) for m in c["volumeMounts"]}
    given = {v["name"] for v in pod(docs)["volumes"]}
    named = [("PersistentVolumeClaim", name) for name in values(pod(docs), "volumes.*.persistentVolumeClaim.claimName")]
    named += [
        ("ConfigMap", source["name"])
        for source in values(pod(docs), "volumes.*.configMap")
        if not source.get("optional")
    ]
    return (
        [f"no volume {name}" for name in sorted(mounted - given)]
        + [f"volume {name} is not mounted" for name in sorted(given - mounted)]
        + [f"no {kind} {name}" for kind, name in named if name not in map(name_of, of_kind(docs, kind))]
    )


def setup_files_exist(docs):
    """Whatever a command or a variable names below /etc/jax-jupyter is a file of the ConfigMap mounted there."""
    found = unless((env(jupyter(docs)).get("BASH_ENV", "").endswith("/env.sh"), "BASH_ENV does not name env.sh"))
    for container in containers(docs):
        words = " ".join([*container["command"], *container.get("args", []), *env(container).values()])
        for path, name in re.findall(r"(/etc/jax-jupyter/([\w.]+))", words):
            source = at(volume_at(docs, container, path), "configMap.name")
            files = [f for d in of_kind(docs, "ConfigMap") if name_of(d) == source for f in d["data"]]
            found += unless((name in files, f"{container['name']}: {path} is no file of a mounted ConfigMap"))
    return found


def written_places_are_writable(docs):
    found = unless(
        (mount_at(jupyter(docs), "/opt/course").get("readOnly"), "jupyter may change its packages in /opt/course"),
        (at(volume_at(docs, jupyter(docs), "/dev/shm"), "emptyDir.medium") == "Memory", "/dev/shm is not in memory"),
    )
    for container in containers(docs):
        places = [*WRITTEN[container["name"]], container.get("workingDir", "/tmp")]
        places += [value for name, value in env(container).items() if WRITTEN_BY_NAME.fullmatch(name)]
        for place in places:
            kinds = volume_at(docs, container, place).keys() & {"emptyDir", "persistentVolumeClaim"}
            writable = kinds and not mount_at(container, place).get("readOnly")
            found += unless((writable, f"{container['name']} can't write {place}"))
    return found


def work_outlives_the_pod(docs):
    roots = re.findall(r'root_dir\b.*"(/\S*)"', texts(docs)[CONFIG])
    places = [env(jupyter(docs)).get("HOME", "/"), jupyter(docs).get("workingDir", "/"), *(roots or "/")]
    return [
        f"{place} is lost with the pod"
        for place in places
        if "persistentVolumeClaim" not in volume_at(docs, jupyter(docs), place)
    ]


def library_path_is_appended(docs):
    """env.sh alone sets LD_LIBRARY_PATH; it really runs here, and what the image set stays in front."""
    found = [f"{c['name']}: LD_LIBRARY_PATH in `env`" for c in containers(docs) if "LD_LIBRARY_PATH" in env(c)]
    for before in ("/image/lib", "/image/lib:/image/lib64", "", None):
        once, twice = (after_env_sh(docs, before, times) for times in (1, 2))
        after = once.get("LD_LIBRARY_PATH")
        found += unless(
            (after == (f"{before}:{NVIDIA}" if before else NVIDIA), f"LD_LIBRARY_PATH {before!r} becomes {after!r}"),
            (once.get("PATH") == IN_FRONT, f"PATH becomes {once.get('PATH')!r}"),
            (once == twice, f"read again, env.sh changes {once} to {twice}"),
        )
    return found


def packages_are_the_projects(docs, pyproject: pathlib.Path = REPO / "pyproject.toml"):
    """The init container installs what the course needs, but nothing of JAX, which the image brings."""
    needed = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    needed = {re.match(r"[\w-]+", line)[0] for line in needed} - {"jax", "numpy", "flax"}
    given = {name for c in containers(docs) for name in env(c).get("PACKAGES", "").split()}
    return [f"PACKAGES and pyproject.toml differ in {name}" for name in sorted(needed ^ given)]


# Secrets


def token_is_nowhere(docs):
    found = [f"Secret {name_of(d)} is in the manifests" for d in of_kind(docs, "Secret")]
    for container in containers(docs):
        words = [*container["command"], *container.get("args", []), *(f"{k}={v}" for k, v in env(container).items())]
        found += [f"{container['name']}: {word}" for word in words if re.search("token|passw", word, re.I)]
        taken = [*values(container, "env.*.valueFrom"), *container.get("envFrom", [])]
        found += unless((not taken, f"{container['name']}: variables from elsewhere: {taken}"))
    for name, text in texts(docs).items():
        problems = secrets_in(text) if name.endswith(".py") else re.findall("token|passw", text, re.I)
        found += [f"{name}: {problem}" for problem in problems]
    return found


def secrets_in(source: str) -> list[str]:
    """Where a configuration file of Jupyter prints, or sets a token or a password to anything but the file's text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            found.append(ast.unparse(node))
        if isinstance(node, ast.Assign) and re.search("token|passw", ast.unparse(node.targets), re.I):
            if ast.unparse(node.value) not in ("token.read_text().strip()", "pathlib.Path('/etc/jupyter-token/token')"):
                found.append(ast.unparse(node))
    return found


def secrets_are_files_for_the_group(docs):
    secrets = {v["name"]: v["secret"] for v in pod(docs)["volumes"] if "secret" in v}
    token = volume_at(docs, jupyter(docs), "/etc/jupyter-token/token").get("secret", {})
    found = [f"Secret {name}: not mode 0440" for name, given in secrets.items() if given.get("defaultMode") != 0o440]
    found += [
        f"{c['name']}: {mount['mountPath']} is writable"
        for c in containers(docs)
        for mount in c["volumeMounts"]
        if mount["name"] in secrets and not mount.get("readOnly")
    ]
    return found + unless(
        ('"/etc/jupyter-token/token"' in texts(docs)[CONFIG], "Jupyter does not read /etc/jupyter-token/token"),
        (token.get("secretName") == "jax-jupyter-token", "/etc/jupyter-token is not the Secret jax-jupyter-token"),
        (token.get("optional") is True, "applied by hand, without the Secret, the pod does not start"),
    )


def speaks_http(docs):
    schemes = {probe.get("scheme", "HTTP") for probe in values(jupyter(docs), "*Probe.httpGet")}
    return unless(
        (schemes == {"HTTP"}, f"the probes speak {schemes}, Jupyter HTTP"),
        (not mount_at(jupyter(docs), "/etc/jupyter-tls"), "a certificate is mounted"),
    )


def speaks_tls(docs):
    schemes = {probe.get("scheme", "HTTP") for probe in values(jupyter(docs), "*Probe.httpGet")}
    secret = volume_at(docs, jupyter(docs), "/etc/jupyter-tls/tls.key").get("secret", {})
    read = set(re.findall(r'"(/etc/jupyter-tls/\S+)"', texts(docs)[CONFIG]))
    return unless(
        (schemes == {"HTTPS"}, f"the probes speak {schemes}, Jupyter HTTPS"),
        (secret.get("secretName") == "jax-jupyter-tls", "the certificate is not mounted"),
        (not secret.get("optional"), "without its certificate the pod starts, and speaks HTTP"),
        (read == {"/etc/jupyter-tls/tls.crt", "/etc/jupyter-tls/tls.key"}, f"Jupyter reads {read}"),
    )


# The cluster


def gpu_is_terraforms(docs, terraform: pathlib.Path = REPO / "terraform"):
    node = terraform_facts(terraform)
    limits = [int(n) for n in values(containers(docs), "*.resources.limits.nvidia~com/gpu")]
    requests = [int(n) for n in values(containers(docs), "*.resources.requests.nvidia~com/gpu")]
    key, value = node["taint"]["key"], node["taint"]["value"]
    effect = {"NO_SCHEDULE": "NoSchedule", "NO_EXECUTE": "NoExecute"}[node["taint"]["effect"]]
    toleration = {"key": key, "operator": "Equal", "value": value, "effect": effect}
    label = at(pod(docs), "nodeSelector.cloud~google~com/gke-accelerator")
    return unless(
        (limits == [node["gpus"]], f"the pod asks for {limits} GPUs, a {node['machine']} has {node['gpus']}"),
        (requests in ([], limits), f"the pod requests {requests} GPUs, and its limit is {limits}"),
        (toleration in pod(docs).get("tolerations", []), f"the pod does not tolerate {node['taint']}"),
        (label == node["accelerator"], f"the pod wants a node with {label}, Terraform makes {node['accelerator']}"),
    )


def requests_fit_every_machine(docs, terraform: pathlib.Path = REPO / "terraform"):
    """Of a g2 machine, with 4 GB a vCPU, GKE's system and its pods take about a core and a third of 16 GB."""
    vcpus = terraform_facts(terraform)["vcpus"]
    asked = [c.get("resources", {}).get("requests", {}) for c in containers(docs)]
    cpu, memory = (max(float(str(r.get(k, 0)).removesuffix("Gi")) for r in asked) for k in ("cpu", "memory"))
    return unless(
        (cpu <= vcpus - 1, f"the pod requests {cpu} CPUs, the smallest machine has {vcpus}"),
        (memory <= vcpus * 4 * 2 / 3, f"the pod requests {memory} Gi, the smallest machine has {vcpus * 4} GB"),
    )


def selectors_match(docs):
    labels = at(controller(docs), "spec.template.metadata.labels") or {}
    found = []
    for kind in (controller(docs)["kind"], "Service", "NetworkPolicy"):
        path = {"Service": "spec.selector", "NetworkPolicy": "spec.podSelector.matchLabels"}
        for selector in [at(d, path.get(kind, "spec.selector.matchLabels")) for d in of_kind(docs, kind)]:
            matches = selector and selector.items() <= labels.items()
            found += unless((matches, f"{kind} selects {selector}, the pod is {labels}"))
    spaces = {name_of(d) if d["kind"] == "Namespace" else d["metadata"].get("namespace") for d in docs}
    return found + unless((spaces == {NAMESPACE}, f"namespaces: {spaces}"))


def ports_agree(docs, commands: pathlib.Path = REPO / "deploy" / "cloud"):
    """The notebook's port is the same everywhere."""
    named = {p["name"]: p["containerPort"] for p in jupyter(docs)["ports"]}
    services, policies = of_kind(docs, "Service"), of_kind(docs, "NetworkPolicy")
    ports = {
        "containerPort": named.values(),
        "probes": values(jupyter(docs), "*Probe.httpGet.port"),
        "Service": values(services, "*.spec.ports.*.port"),
        "targetPort": values(services, "*.spec.ports.*.targetPort"),
        "NetworkPolicy": values(policies, "*.spec.ingress.*.ports.*.port"),
        "Jupyter": map(int, re.findall(r'= "0\.0\.0\.0", (\d+)', texts(docs)[CONFIG])),
        "port-forward": map(int, re.findall(r"\bPORT = .*?(\d+)", commands_text(commands))),
    }
    found = {where: {named.get(port, port) for port in given} for where, given in ports.items()}
    return [f"{where}: {given or 'none'}, not {PORT}" for where, given in found.items() if given != {PORT}]


def commands_know_the_names(docs, commands: pathlib.Path = REPO / "deploy" / "cloud"):
    text = commands_text(commands).replace("{APP}", "jax-jupyter")
    used = re.findall(r"\bjax-(?:jupyter|course|workspace)[a-z-]*", text)
    known = {name_of(d) for d in docs} | MADE_AT_DEPLOY
    return [f"the commands name {name}, which is no object" for name in sorted(set(used) - known)]


def enumerations_are_known(docs):
    return [
        f"{path} is {value!r}"
        for d in docs
        for path, value in leaves(d, d["kind"])
        for suffix, allowed in ALLOWED.items()
        if f".{path}".endswith(f".{suffix}") and value not in allowed
    ]


def disk_goes_with_its_claim(docs):
    classes = {at(d, "spec.storageClassName") for d in of_kind(docs, "PersistentVolumeClaim")}
    unknown = classes - ALLOWED["PersistentVolumeClaim.spec.storageClassName"]
    return unless(
        (classes and not unknown, f"storage classes {classes}: the disk may outlive its claim"),
        (not of_kind(docs, "PersistentVolume"), "a PersistentVolume of its own outlives its claim"),
    )


# The network


def what_may_leave(docs):
    closed = [f"closed: {to} {port}/{way}" for to, port, way in MAY_LEAVE if not passes(docs, "egress", to, port, way)]
    return closed + [
        f"open: {to} {port}/{way}" for to, port, way in MAY_NOT_LEAVE if passes(docs, "egress", to, port, way)
    ]


def only_the_namespace_comes_in(docs):
    mine, other = {"namespace": NAMESPACE, "app": "x"}, {"namespace": "default", "app": "jax-jupyter"}
    found = [f"open: {port} to {mine}" for port in (22, 80, 8888) if passes(docs, "ingress", mine, port)]
    return found + [f"open to {peer}" for peer in (other, "8.8.8.8", "10.0.0.1") if passes(docs, "ingress", peer, PORT)]


def nothing_is_public(docs):
    services = {name_of(d): d["spec"].get("type", "ClusterIP") for d in of_kind(docs, "Service")}
    return unless(
        (set(services.values()) == {"ClusterIP"}, f"a Service has an address outside: {services}"),
        (not [*values(docs, "*.spec.externalIPs")], "a Service has external addresses"),
        (not of_kind(docs, "Ingress", "Gateway", "HTTPRoute"), "an Ingress or a Gateway"),
    )


def public_for_its_ranges_only(docs):
    (service,) = of_kind(docs, "Service")
    ranges = service["spec"].get("loadBalancerSourceRanges", [])
    rules = [*values(of_kind(docs, "NetworkPolicy"), "*.spec.ingress.*")]
    inside = [*values(rules, "*.from.*.ipBlock.cidr")]
    ranges_alone = all(rule.get("from") for rule in rules) and len(inside) == len([*values(rules, "*.from.*")])
    return unless(
        (service["spec"].get("type") == "LoadBalancer", "the Service is no LoadBalancer"),
        (ranges and not {"0.0.0.0/0", "::/0"} & {*ranges}, f"the Service is open to {ranges or 'everybody'}"),
        (ranges_alone and sorted(inside) == sorted(ranges), f"the NetworkPolicy lets in {inside}, not {ranges}"),
        (service["spec"].get("externalTrafficPolicy") == "Local", "the client's address is lost on the way"),
    )


BOTH = [
    images_are_pinned, nobody_is_root, nobody_gains_privileges, root_is_read_only, pod_has_no_identity,
    pod_sees_no_node, namespace_refuses_the_privileged, one_pod_at_a_time, probes_ask_the_api,
    mounts_and_volumes_agree, setup_files_exist, written_places_are_writable, work_outlives_the_pod,
    library_path_is_appended, packages_are_the_projects, token_is_nowhere, secrets_are_files_for_the_group,
    gpu_is_terraforms, requests_fit_every_machine, selectors_match, ports_agree, commands_know_the_names,
    enumerations_are_known, disk_goes_with_its_claim, what_may_leave,
]  # fmt: skip
BASE = [*BOTH, nothing_is_public, only_the_namespace_comes_in, speaks_http]
PUBLIC = [*BOTH, public_for_its_ranges_only, speaks_tls]
