"""The hub's values: what the chart knows, what a class needs, and one truth with deploy/base."""

import copy
import os
import pathlib
import re

import jsonschema
import pytest
import yaml

REPO = pathlib.Path(__file__).parents[2]
VALUES = yaml.safe_load((REPO / "deploy" / "hub" / "values.yaml").read_text(encoding="utf-8"))
BASE = list(yaml.safe_load_all((REPO / "deploy" / "base" / "jupyter.yaml").read_text(encoding="utf-8")))
GPU = "nvidia.com/gpu"
# JupyterHub counts a G as 1024**3, Kubernetes writes that as Gi.
HUB_TO_KUBERNETES = {"K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}


def of_kind(kind: str) -> dict:
    """The one object of that kind in deploy/base."""
    return next(x for x in BASE if x["kind"] == kind)


POD = of_kind("Deployment")["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


@pytest.fixture(scope="module")
def schema():
    path = os.environ.get("Z2JH_SCHEMA")
    if not path:
        pytest.skip(
            "Z2JH_SCHEMA names no file: take jupyterhub/values.schema.yaml from the repository "
            "jupyterhub/zero-to-jupyterhub-k8s, and set the variable to its path"
        )
    return yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))


def refused(values: dict, schema: dict) -> list[str]:
    """What the chart's schema refuses. What is only missing comes from the chart's own values."""
    errors = jsonschema.Draft7Validator(schema).iter_errors(values)
    return [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in errors if e.validator != "required"]


def policy_breaches(values: dict) -> set[str]:
    """The names of the rules that these values break."""
    user, config = values["singleuser"], values["hub"]["config"]
    spawner = config["KubeSpawner"]
    confined = spawner["container_security_context"]
    settings = [config.get(name, {}) for name in config]
    # Kubernetes needs no request beside a limit of a GPU, but the chart's placeholders read both.
    gpus = [user["extraResource"][x].get(GPU) for x in ("guarantees", "limits")]
    egress = user["networkPolicy"]
    placeholders = values["scheduling"]["userPlaceholder"]
    breaches = {
        "nobody gets in by default": config["JupyterHub"]["authenticator_class"] != "null"
        or any(x.get("allow_all") or x.get("allow_existing_users") for x in settings),
        "no secret stands in the file": re.search(
            r"(?i)(password|client_?secret|api_?token|cookie_?secret|secret_?token)'?: ", str(values)
        )
        is not None,
        "nothing is public": values["proxy"]["service"]["type"] != "ClusterIP",
        "the tag is declared": user["image"]["tag"] in ("", "latest"),
        "one GPU each": gpus != ["1", "1"] or values["hub"]["allowNamedServers"],
        "not root": not user["uid"]
        or not spawner["gid"]
        or not spawner["pod_security_context"].get("runAsNonRoot")
        or user["extraPodConfig"].get("securityContext") is not None,
        "confined": user["allowPrivilegeEscalation"] is not False
        or confined.get("privileged") is not False
        or confined.get("capabilities") != {"drop": ["ALL"]}
        or confined.get("readOnlyRootFilesystem") is not True
        or spawner["pod_security_context"].get("seccompProfile") != {"type": "RuntimeDefault"}
        or user["cloudMetadata"]["blockWithIptables"],
        "no account of the cluster": bool(user["serviceAccountName"]),
        "egress is closed": not egress["enabled"] or any(egress["egressAllowRules"].values()),
        "idle servers stop": not values["cull"]["enabled"] or not 0 < values["cull"]["timeout"] <= 3600,
        "servers have an end": not values["cull"]["maxAge"],
        "no node runs for nobody": placeholders["replicas"] != 0,
        "placeholders give way": placeholders["enabled"] and not values["scheduling"]["podPriority"]["enabled"],
        "the image is there early": not values["prePuller"]["continuous"]["enabled"],
        "helm waits for no node": values["prePuller"]["hook"]["enabled"],
        "a cold node is in time": user["startTimeout"] < 900 or spawner["http_timeout"] < 120,
        "a failing hook spares the pod": not user["lifecycleHooks"]["postStart"]["exec"]["command"][-1].endswith(
            "|| true"
        ),
    }
    return {name for name, broken in breaches.items() if broken}


def edited(path: str, value) -> dict:
    """A copy of the values with one entry set."""
    values = copy.deepcopy(VALUES)
    *folders, last = path.split("/")
    at = values
    for name in folders:
        at = at.setdefault(name, {})
    at[last] = value
    return values


def test_the_chart_knows_every_setting(schema):
    assert refused(VALUES, schema) == []


@pytest.mark.parametrize(
    "path, value",
    [
        ("singleuser/storage/capacty", "10Gi"),
        ("singleuser/storage/type", "dynamc"),
        ("singleuser/extraResources", {"limits": {GPU: "1"}}),
        ("singleuser/uid", "10001"),
        ("cull/timeOut", 3600),
        ("proxy/service/type", "clusterIP"),
        ("auth", {"type": "google"}),
    ],
)
def test_a_misspelled_setting_is_caught(schema, path, value):
    assert refused(edited(path, value), schema)


def test_the_policies_hold():
    assert policy_breaches(VALUES) == set()


@pytest.mark.parametrize(
    "path, value, caught",
    [
        ("hub/config/Authenticator", {"allow_all": True}, "nobody gets in by default"),
        ("hub/config/GoogleOAuthenticator", {"allow_all": True}, "nobody gets in by default"),
        ("hub/config/JupyterHub/authenticator_class", "dummy", "nobody gets in by default"),
        ("hub/config/DummyAuthenticator", {"password": "attention"}, "no secret stands in the file"),
        ("proxy/secretToken", "0123456789abcdef", "no secret stands in the file"),
        ("proxy/service/type", "LoadBalancer", "nothing is public"),
        ("singleuser/image/tag", "latest", "the tag is declared"),
        ("singleuser/extraResource/limits", {GPU: "2"}, "one GPU each"),
        ("singleuser/extraResource/guarantees", {}, "one GPU each"),
        ("hub/allowNamedServers", True, "one GPU each"),
        ("singleuser/uid", 0, "not root"),
        ("singleuser/extraPodConfig", {"securityContext": {"runAsNonRoot": True}}, "not root"),
        ("hub/config/KubeSpawner/container_security_context/privileged", True, "confined"),
        ("singleuser/allowPrivilegeEscalation", None, "confined"),
        ("singleuser/cloudMetadata/blockWithIptables", True, "confined"),
        ("singleuser/serviceAccountName", "default", "no account of the cluster"),
        ("singleuser/networkPolicy/egressAllowRules/privateIPs", True, "egress is closed"),
        ("singleuser/networkPolicy/enabled", False, "egress is closed"),
        ("cull/timeout", 86400, "idle servers stop"),
        ("cull/maxAge", 0, "servers have an end"),
        ("scheduling/userPlaceholder/replicas", 3, "no node runs for nobody"),
        ("scheduling/podPriority/enabled", False, "placeholders give way"),
        ("prePuller/hook/enabled", True, "helm waits for no node"),
        ("singleuser/startTimeout", 300, "a cold node is in time"),
        (
            "singleuser/lifecycleHooks/postStart/exec/command",
            ["python3", "/opt/attention/deploy/cloud/receive.py"],
            "a failing hook spares the pod",
        ),
    ],
)
def test_a_planted_fault_is_caught(path, value, caught):
    assert policy_breaches(edited(path, value)) == {caught}


def test_the_student_is_the_same_user_as_in_the_base():
    user, spawner, pod = VALUES["singleuser"], VALUES["hub"]["config"]["KubeSpawner"], POD["securityContext"]
    assert (user["uid"], spawner["gid"], user["fsGid"]) == (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"])
    ours = {**spawner["pod_security_context"], "runAsUser": user["uid"], "runAsGroup": spawner["gid"]}
    assert ours | {"fsGroup": user["fsGid"]} == pod
    ours = {**spawner["container_security_context"], "allowPrivilegeEscalation": user["allowPrivilegeEscalation"]}
    assert ours.pop("privileged") is False
    assert ours == CONTAINER["securityContext"]


def test_the_student_gets_the_same_node_as_the_base():
    user = VALUES["singleuser"]
    assert user["nodeSelector"] == POD["nodeSelector"]
    assert user["extraTolerations"] == POD["tolerations"]
    requests, limits = CONTAINER["resources"]["requests"], CONTAINER["resources"]["limits"]
    assert user["extraResource"]["limits"][GPU] == limits[GPU]
    assert user["cpu"]["guarantee"] == float(requests["cpu"])
    for ours, theirs in (("guarantee", requests), ("limit", limits)):
        amount = user["memory"][ours]
        assert amount[:-1] + HUB_TO_KUBERNETES[amount[-1]] == theirs["memory"]


def test_the_student_finds_the_same_folders_as_in_the_base():
    storage = VALUES["singleuser"]["storage"]
    base = {m["name"]: m["mountPath"] for m in CONTAINER["volumeMounts"]}
    assert storage["homeMountPath"] == base["workspace"]
    assert VALUES["singleuser"]["extraEnv"]["HOME"] == base["workspace"]
    assert VALUES["hub"]["config"]["KubeSpawner"]["notebook_dir"] == base["workspace"]
    assert {m["name"]: m["mountPath"] for m in storage["extraVolumeMounts"]} == {x: base[x] for x in ("tmp", "shm")}
    volumes = {v["name"]: v for v in POD["volumes"]}
    assert storage["extraVolumes"] == [volumes["tmp"], volumes["shm"]]
    claim = of_kind("PersistentVolumeClaim")["spec"]
    assert storage["dynamic"]["storageClass"] == claim["storageClassName"]


def test_no_more_students_start_than_terraform_allows_nodes():
    text = (REPO / "terraform" / "variables.tf").read_text(encoding="utf-8")
    nodes = int(re.search(r'variable "max_gpu_nodes" \{[^}]*?default\s*=\s*(\d+)', text)[1])
    assert VALUES["hub"]["activeServerLimit"] == nodes * int(CONTAINER["resources"]["limits"][GPU])


def test_the_students_network_is_that_of_the_base():
    assert VALUES["singleuser"]["networkPolicy"]["egress"] == of_kind("NetworkPolicy")["spec"]["egress"]


def test_the_versions_of_chart_and_hub_are_written_down():
    text = (REPO / "deploy" / "hub" / "values.yaml").read_text(encoding="utf-8")
    chart, hub = re.search(r"chart (\d+\.\d+\.\d+), whose hub is JupyterHub (\d+\.\d+\.\d+)", text).groups()
    assert f"--version {chart}" in text
    dockerfile = (REPO / "deploy" / "image" / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG JUPYTERHUB=(\S+)", dockerfile, re.MULTILINE)[1] == hub
