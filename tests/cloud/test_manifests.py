"""The manifests as kubectl renders them: Kubernetes' own schemas, then our policies, then checkov."""

import contextlib
import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import threading

import pytest
import yaml

import network
import policies
from conftest import REPO, render, render_text
from manifests import containers, leaves

# The minor versions of GKE's REGULAR channel, end of 2026. What it has now:
#   gcloud container get-server-config --location=us-central1 --flatten=channels --filter=channels.channel=REGULAR
KUBERNETES = ["1.34", "1.35", "1.36"]
DIGEST = "sha256:" + "0123456789abcdef" * 4
RULES = [(name, policy) for name in ("base", "public") for policy in getattr(policies, name.upper())]
CHECKOV_YAML = REPO / "tests" / "cloud" / "checkov.yaml"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("what", ["base", "public", "jupyter.yaml"])
def test_kubernetes_knows_every_field(what, version, cloud_tool, tmp_path):
    file = REPO / "deploy" / "jupyter.yaml"
    if what != "jupyter.yaml":
        file = tmp_path / "rendered.yaml"
        file.write_text(render_text(REPO / "deploy" / {"base": "base", "public": "overlays/public"}[what]))
    done = subprocess.run(
        [cloud_tool("kubernetes-validate"), "--strict", "-k", version, str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(" passed ") == len([*yaml.safe_load_all(file.read_text())])


@pytest.mark.parametrize(("name", "policy"), RULES, ids=[f"{name}-{policy.__name__}" for name, policy in RULES])
def test_policy_holds(name, policy, manifests):
    assert policy(manifests[name]) == []


def test_every_policy_is_used():
    ours = {
        name
        for name, value in inspect.getmembers(policies, inspect.isfunction)
        if value.__module__ == "policies" and [*inspect.signature(value).parameters][:1] == ["docs"]
    }
    assert ours == {policy.__name__ for _, policy in RULES}


def test_every_enumeration_is_met(manifests):
    """A path of the table that names nothing would allow everything."""
    paths = {f".{path}" for docs in manifests.values() for d in docs for path, _ in leaves(d, d["kind"])}
    assert [s for s in policies.ALLOWED if not any(path.endswith(f".{s}") for path in paths)] == []


def test_jupyter_yaml_is_base(manifests):
    alone = REPO / "deploy" / "jupyter.yaml"
    assert alone.resolve() == REPO / "deploy" / "base" / "jupyter.yaml"
    applied = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(alone.read_text(encoding="utf-8"))}
    assert applied == {(d["kind"], d["metadata"]["name"]): d for d in manifests["base"]}


@pytest.mark.parametrize("overlay", ["base", "overlays/public"])
def test_a_digest_reaches_every_container(overlay, deploy_copy):
    image = "nvcr.io/nvidia/jax"
    pinned = deploy_copy / "pinned"
    pinned.mkdir()
    (pinned / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [f"../{overlay}"], "images": [{"name": image, "digest": DIGEST}]})
    )
    docs = render(pinned)
    assert {c["image"] for c in containers(docs)} == {f"{image}@{DIGEST}"}
    assert policies.images_are_pinned(docs) == []


@pytest.mark.parametrize(
    ("rule", "peer", "port", "way", "answer"),
    [
        ({}, "8.8.8.8", 1, "UDP", True),
        ({"to": [{"ipBlock": {"cidr": "8.0.0.0/8", "except": ["8.8.0.0/16"]}}]}, "8.8.8.8", 1, "TCP", False),
        ({"to": [{"ipBlock": {"cidr": "8.0.0.0/8", "except": ["8.8.0.0/16"]}}]}, "8.9.8.8", 1, "TCP", True),
        ({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}, {"namespace": "here"}, 1, "TCP", False),
        ({"to": [{"podSelector": {}}]}, {"namespace": "here"}, 1, "TCP", True),
        ({"to": [{"podSelector": {}}]}, {"namespace": "there"}, 1, "TCP", False),
        ({"to": [{"namespaceSelector": {}}]}, {"namespace": "there"}, 1, "TCP", True),
        ({"to": [{"podSelector": {"matchLabels": {"a": "b"}}}]}, {"namespace": "here"}, 1, "TCP", False),
        ({"ports": [{"port": 53}]}, "8.8.8.8", 53, "UDP", False),
        ({"ports": [{"port": 53}]}, "8.8.8.8", 53, "TCP", True),
        ({"ports": [{"protocol": "UDP"}]}, "8.8.8.8", 7, "UDP", True),
        (None, "8.8.8.8", 53, "TCP", False),
    ],
)  # fmt: skip
def test_simulated_network_answers_as_kubernetes_does(rule, peer, port, way, answer):
    spec = {"policyTypes": ["Egress"], "egress": [] if rule is None else [rule]}
    docs = [{"kind": "NetworkPolicy", "metadata": {"namespace": "here"}, "spec": spec}]
    assert network.passes(docs, "egress", peer, port, way) is answer
    assert network.passes(docs, "ingress", peer, port, way), "no policy speaks of this direction"


# checkov


@pytest.fixture(scope="module")
def checked_files(tmp_path_factory):
    """Everything that checkov looks at, in one folder: the rendered manifests, the image and the Terraform."""
    folder = tmp_path_factory.mktemp("checked")
    for name in ("base", "overlays/public"):
        (folder / f"{name.rpartition('/')[2]}.yaml").write_text(render_text(REPO / "deploy" / name))
    for file in [*(REPO / "terraform").glob("*.tf"), REPO / "deploy" / "image" / "Dockerfile"]:
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def checkov(cloud_tool, checked_files):
    """Runs checkov over the files, behind a proxy that answers nobody and notes who asked."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            with contextlib.suppress(OSError):  # closed, in the end
                while True:
                    client, _ = server.accept()
                    with client:
                        asked.append(client.recv(200))

        threading.Thread(target=listen, daemon=True).start()
        proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
        # The variable: without it checkov asks PyPI whether there is a newer one.
        variables = {"PATH": os.defpath, "HOME": str(checked_files), "CKV_SKIP_PACKAGE_UPDATE_CHECK": "true"}
        variables |= {"https_proxy": proxy, "HTTPS_PROXY": proxy, "http_proxy": proxy, "HTTP_PROXY": proxy}

        def run(config, *more):
            return subprocess.run(
                [cloud_tool("checkov"), "-d", str(checked_files), "--config-file", str(config), *more],
                capture_output=True, text=True, env=variables, cwd=checked_files,
            )  # fmt: skip

        run.asked = asked
        yield run
        server.shutdown(socket.SHUT_RDWR)


def test_checkov_finds_nothing_and_asks_nobody(checkov, checked_files):
    done = checkov(CHECKOV_YAML)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for kind in ("kubernetes", "terraform", "dockerfile"):
        assert re.search(rf"^{kind} scan results:\s+Passed checks: [1-9]\d*, Failed checks: 0", done.stdout, re.M)
    assert checkov.asked == []
    assert not [*checked_files.rglob(".external_modules")]


def test_every_skipped_check_has_its_reason():
    lines = CHECKOV_YAML.read_text(encoding="utf-8").partition("skip-check:\n")[2].splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(r"  - CKV2?_[A-Z0-9]+_\d+ # .{20,}", line)] == []


def test_no_skip_is_stale(checkov, tmp_path):
    """Without the list, exactly the checks of the list fail."""
    config = yaml.safe_load(CHECKOV_YAML.read_text(encoding="utf-8"))
    skipped = config.pop("skip-check")
    (tmp_path / "checkov.yaml").write_text(yaml.safe_dump(config | {"quiet": False, "output": ["json"]}))
    results = [found["results"] for found in json.loads(checkov(tmp_path / "checkov.yaml").stdout)]
    assert [file for found in results for file in found["parsing_errors"]] == []
    assert sorted({c["check_id"] for found in results for c in found["failed_checks"]}) == sorted(skipped)
