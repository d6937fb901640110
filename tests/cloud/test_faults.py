"""Mistakes that people make, planted in copies of the manifests: the functions that pass on the real ones see them."""

import subprocess

import pytest

import policies
from conftest import REPO, render, render_text

LIMIT = 'limits: {memory: 24Gi, nvidia.com/gpu: "1"}'
IMAGE = "image: nvcr.io/nvidia/jax:26.06-py3"
SERVER = "exec python -P -m jupyterlab --config=/etc/jax-jupyter/jupyter_server_config.py"
EXCEPT = "except: [10.0.0.0/8, 100.64.0.0/10, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16, 240.0.0.0/4]"
CLAIM = "persistentVolumeClaim: {claimName: jax-workspace}"
TOKEN = "secretName: jax-jupyter-token, optional: true, defaultMode: 0440"
RANGES = "loadBalancerSourceRanges: [203.0.113.0/24]"

# By the policy that must see them: what is replaced, wherever it stands, and by what.
BASE = {
    "images_are_pinned": [(IMAGE, "image: nvcr.io/nvidia/jax:latest"), (IMAGE, "image: nvcr.io/nvidia/jax")],
    "nobody_is_root": [("runAsUser: 10001", "runAsUser: 0"), ("runAsNonRoot: true", ""), ("fsGroup: 10001", "")],
    "nobody_gains_privileges": [
        ("allowPrivilegeEscalation: false", "privileged: true"),
        ("capabilities: {drop: [ALL]}", "capabilities: {drop: [ALL], add: [NET_ADMIN]}"),
        ("seccompProfile: {type: RuntimeDefault}", "seccompProfile: {type: Unconfined}"),
    ],
    "root_is_read_only": [("readOnlyRootFilesystem: true", ""), ("securityContext: *confined", "")],
    "pod_has_no_identity": [
        ("automountServiceAccountToken: false\n      enable", "enable"),
        ("serviceAccountName: jax-jupyter", "serviceAccountName: default"),
    ],
    "pod_sees_no_node": [
        (CLAIM, "hostPath: {path: /home}"),
        ("enableServiceLinks: false", "hostNetwork: true"),
    ],
    "namespace_refuses_the_privileged": [("enforce: restricted", "enforce: baseline"), ("enforce:", "warn:")],
    "one_pod_at_a_time": [("type: Recreate", "type: RollingUpdate"), ("replicas: 1", "replicas: 2")],
    "probes_ask_the_api": [("path: /api", "path: /"), ("path: /api", "path: /lab"), ("failureThreshold: 120", "")],
    "mounts_and_volumes_agree": [
        ("{name: shm, mountPath", "{name: shn, mountPath"),
        ("{name: jax-jupyter-locks, optional: true}", "{name: jax-jupyter-locks}"),
        ("claimName: jax-workspace", "claimName: workspace"),
    ],
    "setup_files_exist": [("value: /etc/jax-jupyter/env.sh", "value: /etc/jax-jupyter/environment.sh")],
    "written_places_are_writable": [
        ("value: /tmp/jupyter", "value: /run/jupyter"),
        ("            - {name: packages, mountPath: /opt/course, readOnly: true}\n", ""),
        ("medium: Memory, ", ""),
    ],
    "work_outlives_the_pod": [(CLAIM, "emptyDir: {}"), ("value: /workspace}", "value: /home/student}")],
    "library_path_is_appended": [
        ("{name: BASH_ENV,", "{name: LD_LIBRARY_PATH, value: /x}\n            - {name: BASH_ENV,"),
        ("${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr", "/usr"),
        ("${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr", "$LD_LIBRARY_PATH:/usr"),
        ("*:/opt/course/bin:*) ;;", "none) ;;"),
    ],
    "packages_are_the_projects": [(" papermill", ""), ("value: ipykernel", "value: jax ipykernel")],
    "token_is_nowhere": [
        (SERVER, f"{SERVER} --IdentityProvider.token=letmein"),
        ("{name: BASH_ENV,", "{name: JUPYTER_TOKEN, value: letmein}\n            - {name: BASH_ENV,"),
        ("token.read_text().strip()", '""'),
        ("token = pathlib.Path", "print(c)\n    token = pathlib.Path"),
    ],
    "secrets_are_files_for_the_group": [
        (TOKEN, TOKEN.replace("0440", "0444")),
        (TOKEN, TOKEN.replace(", defaultMode: 0440", "")),
        (TOKEN, TOKEN.replace("optional: true, ", "")),
    ],
    "gpu_is_terraforms": [
        (LIMIT, LIMIT.replace('"1"', '"2"')),
        (LIMIT, "limits: {memory: 24Gi}"),
        ("gke-accelerator: nvidia-l4", "gke-accelerator: nvidia-tesla-t4"),
        ("key: nvidia.com/gpu, operator", "key: nvidia.com/gpus, operator"),
    ],
    "requests_fit_every_machine": [
        ('requests: {cpu: "3", memory: 10Gi', 'requests: {cpu: "4", memory: 10Gi'),
        ('requests: {cpu: "3", memory: 10Gi', 'requests: {cpu: "3", memory: 16Gi'),
    ],
    "selectors_match": [
        ("selector: {app: jax-jupyter}", "selector: {app: jax-jupiter}"),
        ("  podSelector:\n    matchLabels: {app: jax-jupyter}", "  podSelector:\n    matchLabels: {app: jupyter}"),
        ("name: jax-jupyter-svc\n  namespace: jax-course", "name: jax-jupyter-svc\n  namespace: default"),
    ],
    "ports_agree": [
        ("containerPort: 8884", "containerPort: 8888"),
        ("ports: [{port: 8884}]", "ports: [{port: 8888}]"),
        ('"0.0.0.0", 8884', '"0.0.0.0", 8888'),
        ("port: 8884, targetPort: notebook", "port: 80, targetPort: notebook"),
        ("port: 8884, targetPort: notebook", "port: 8884, targetPort: notebooks"),
    ],
    "commands_know_the_names": [("name: jax-jupyter-svc", "name: jax-jupyter-service")],
    "enumerations_are_known": [
        ("[ReadWriteOncePod]", "[ReadWriteOncePods]"),
        ("effect: NoSchedule", "effect: NO_SCHEDULE"),
        ("type: ClusterIP", "type: ClusterIp"),
        ("operator: Equal", "operator: Equals"),
    ],
    "disk_goes_with_its_claim": [
        ("storageClassName: standard-rwo", "volumeMode: Block"),
        ("standard-rwo", "my-retained-disks"),
    ],
    "what_may_leave": [
        (EXCEPT, EXCEPT.replace("169.254.0.0/16, ", "")),
        (EXCEPT, EXCEPT.replace("10.0.0.0/8, ", "")),
        (f"\n            {EXCEPT}", ""),
        ("policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]"),
        (", {port: 53, protocol: TCP}", ""),
        ("values: [kube-dns, node-local-dns]", "values: [kubedns]"),
        ("cidr: 0.0.0.0/0", "cidr: 8.8.4.4/32"),
    ],
    "nothing_is_public": [("type: ClusterIP", "type: LoadBalancer"), ("type: ClusterIP", "type: NodePort")],
    "only_the_namespace_comes_in": [
        ("- from: [{podSelector: {}}]\n      ports: [{port: 8884}]", "- from: [{ipBlock: {cidr: 0.0.0.0/0}}]"),
        ("- from: [{podSelector: {}}]", "- from: [{namespaceSelector: {}}]"),
        ("\n      ports: [{port: 8884}]", ""),
    ],
    "speaks_http": [("scheme: HTTP}", "scheme: HTTPS}")],
}
PUBLIC = {
    "public_for_its_ranges_only": [
        (RANGES, "loadBalancerSourceRanges: [0.0.0.0/0]"),
        (RANGES, ""),
        ("from: [{ipBlock: {cidr: 203.0.113.0/24}}]", "from: [{ipBlock: {cidr: 0.0.0.0/0}}]"),
        ("- from: [{ipBlock: {cidr: 203.0.113.0/24}}]\n            ports", "- ports"),
        ("externalTrafficPolicy: Local", "externalTrafficPolicy: Cluster"),
    ],
    "speaks_tls": [
        ("livenessProbe: {httpGet: {scheme: HTTPS}}", ""),
        ("mountPath: /etc/jupyter-tls", "mountPath: /etc/tls"),
        ("secretName: jax-jupyter-tls,", "secretName: jax-jupyter-tls, optional: true,"),
    ],
}
# Slips that Kubernetes' schemas see: a field misspelled, at a wrong place or of a wrong type.
FIELDS = [
    ("readOnlyRootFilesystem: true", "readOnlyRootFileSystem: true"),
    ("      tolerations:", "      toleration:"),
    ("  progressDeadlineSeconds: 3600", "  strategy.rollingUpdate: {}"),
    ("          securityContext: *confined", "          env2: *confined"),
    ("replicas: 1", 'replicas: "1"'),
    ("            periodSeconds: 30\n", "            httpGet: {path: /api, port: notebook, periodSeconds: 30}\n"),
    ("ports:\n    - {name: notebook, port: 8884", "ports:\n    - {name: notebook, Port: 8884"),
]
# Changes elsewhere that the manifests did not follow: the policy, and the file or folder that it also reads.
ELSEWHERE = [
    ("gpu_is_terraforms", "terraform", '"g2-standard-8"', '"g2-standard-24"'),
    ("gpu_is_terraforms", "terraform", '"nvidia-l4"', '"nvidia-tesla-t4"'),
    ("gpu_is_terraforms", "terraform", '= "present"', '= "true"'),
    ("ports_agree", "deploy/cloud", "8884", "8888"),
    ("commands_know_the_names", "deploy/cloud", "{APP}-svc", "{APP}-service"),
    ("packages_are_the_projects", "pyproject.toml", '    "tqdm",', '    "tqdm",\n    "scipy",'),
]
FILES = {"base": "base/jupyter.yaml", "public": "overlays/public/kustomization.yaml"}
CASES = [
    pytest.param(which, policy, *edit, id=f"{policy}-{number}")
    for which, faults in {"base": BASE, "public": PUBLIC}.items()
    for policy, edits in faults.items()
    for number, edit in enumerate(edits, 1)
]


def plant(deploy, which, old, new):
    """The folder to render, after the mistake."""
    file = deploy / FILES[which]
    text = file.read_text(encoding="utf-8")
    assert old in text, f"{FILES[which]} no longer has {old!r}: bring this fault up to date"
    file.write_text(text.replace(old, new), encoding="utf-8")
    return file.parent


@pytest.mark.parametrize(("which", "policy", "old", "new"), CASES)
def test_mistake_is_seen(which, policy, old, new, deploy_copy):
    assert getattr(policies, policy)(render(plant(deploy_copy, which, old, new))) != []


@pytest.mark.parametrize(("policy", "name", "old", "new"), ELSEWHERE, ids=[f"{e[0]}-{e[3]}" for e in ELSEWHERE])
def test_change_elsewhere_is_seen(policy, name, old, new, manifests, tmp_path):
    place = REPO / name
    files = [place] if place.is_file() else [*place.glob("*.tf"), *place.glob("*.py")]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert old in "".join(texts.values()), f"{name} no longer has {old!r}: bring this fault up to date"
    for file, text in texts.items():
        (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    assert getattr(policies, policy)(manifests["base"], tmp_path / name if place.is_file() else tmp_path) != []


@pytest.mark.parametrize(("old", "new"), FIELDS, ids=[f"field-{n}" for n, _ in enumerate(FIELDS, 1)])
def test_wrong_field_is_seen(old, new, deploy_copy, cloud_tool, tmp_path):
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render_text(plant(deploy_copy, "base", old, new)))
    done = subprocess.run([cloud_tool("kubernetes-validate"), "--strict", rendered], capture_output=True, text=True)
    assert done.returncode == 1 and "jax-jupyter" in done.stdout + done.stderr


def test_every_policy_sees_a_mistake():
    assert BASE.keys() == {policy.__name__ for policy in policies.BASE}
    assert PUBLIC.keys() == {policy.__name__ for policy in policies.PUBLIC} - BASE.keys()
