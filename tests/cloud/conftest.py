"""What the tests of the cloud side share: the tools they need, and the manifests as kubectl renders them."""

import pathlib
import shutil
import subprocess

import pytest
import yaml

REPO = pathlib.Path(__file__).parents[2]
HOW_TO_GET = {
    "kubectl": "install it: https://kubernetes.io/docs/tasks/tools/",
    "kubernetes-validate": "`make test-cloud` makes .venv-cloud, which holds it",
    "checkov": "`make test-cloud` makes .venv-cloud, which holds it",
}


def find_tool(name: str) -> str:
    """The path of a tool that these tests can't do without; fails the test where it is absent."""
    path = shutil.which(name, path=REPO / ".venv-cloud" / "bin") or shutil.which(name)
    return path or pytest.fail(f"{name} is not here, and the tests of the cloud side need it: {HOW_TO_GET[name]}")


def render_text(folder: pathlib.Path) -> str:
    """What `kubectl apply -k FOLDER` would send."""
    done = subprocess.run([find_tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    return done.stdout


def render(folder: pathlib.Path) -> list[dict]:
    return list(yaml.safe_load_all(render_text(folder)))


@pytest.fixture(scope="session")
def cloud_tool():
    return find_tool


@pytest.fixture(scope="session")
def manifests():
    """The rendered objects of `base` and of the overlay `public`, by name."""
    return {"base": render(REPO / "deploy" / "base"), "public": render(REPO / "deploy" / "overlays" / "public")}


@pytest.fixture
def deploy_copy(tmp_path):
    """A copy of base and overlays, to edit."""
    for name in ("base", "overlays"):
        shutil.copytree(REPO / "deploy" / name, tmp_path / "deploy" / name)
    return tmp_path / "deploy"
