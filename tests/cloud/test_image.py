"""The class image without Docker: what its files say, and its one shell step run on a Python that plays the image."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import venv
import zipfile

import pytest
import yaml

REPO = pathlib.Path(__file__).parents[2]
IMAGE = REPO / "deploy" / "image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text(encoding="utf-8")
BUILD = yaml.safe_load((IMAGE / "cloudbuild.yaml").read_text(encoding="utf-8"))
MANIFEST = (REPO / "deploy" / "base" / "jupyter.yaml").read_text(encoding="utf-8")
BASE = list(yaml.safe_load_all(MANIFEST))
POD = next(x for x in BASE if x["kind"] == "Deployment")["spec"]["template"]["spec"]
PACKAGES_SH = next(x for x in BASE if x["kind"] == "ConfigMap")["data"]["packages.sh"]
# What `make image` gives: these have no default, so that a build without one is refused.
GIVEN = {"_IMAGE", "_TAG", "_SERVICE_ACCOUNT"}
# Fields of https://cloud.google.com/build/docs/build-config-file-schema and of the API's BuildStep and BuildOptions.
FIELDS = set(
    "steps timeout queueTtl logsBucket options substitutions tags serviceAccount secrets availableSecrets artifacts "
    "images dependencies".split()
)
STEP_FIELDS = set(
    "name args env allowFailure allowExitCodes dir id waitFor entrypoint secretEnv volumes timeout script "
    "automapSubstitutions".split()
)
OPTION_FIELDS = set(
    "sourceProvenanceHash machineType diskSizeGb substitutionOption dynamicSubstitutions logStreamingOption logging "
    "env secretEnv volumes pool requestedVerifyOption automapSubstitutions defaultLogsBucketBehavior".split()
)
MACHINES = {"E2_MEDIUM", "E2_HIGHCPU_8", "E2_HIGHCPU_32", "N1_HIGHCPU_8", "N1_HIGHCPU_32"}


def instructions(text: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, each as its name and the rest, comments and line breaks gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def of(name: str, text: str = DOCKERFILE) -> list[str]:
    return [rest for instruction, rest in instructions(text) if instruction == name]


def arguments(text: str = DOCKERFILE) -> dict[str, str]:
    """The declared build arguments and their defaults."""
    pairs = (rest.split("=", 1) for rest in of("ARG", text))
    return {name: value.strip('"') for name, value in pairs}


def copied(text: str = DOCKERFILE) -> list[str]:
    """What COPY takes from the repository."""
    return [source for rest in of("COPY", text) for source in rest.split()[:-1]]


def breaches(text: str) -> set[str]:
    """The names of the rules that a Dockerfile breaks."""
    [start], user = of("FROM", text), of("USER", text)[-1]
    base = arguments(text).get("BASE", "")
    ours, theirs = arguments(text).get("PACKAGES", "").split(), POD["initContainers"][0]["env"]
    pod = POD["securityContext"]
    settings = " ".join(of("ENV", text) + of("ARG", text))
    broken = {
        "the base is declared, with a tag": start != "${BASE}"
        or not re.search(r":\d[\w.-]+(@sha256:[0-9a-f]{64})?$", base),
        "it is the base of the pod": not POD["containers"][0]["image"].startswith(base.split("@")[0]),
        "it runs as the pod's user": user != f"{pod['runAsUser']}:{pod['runAsGroup']}",
        "nothing comes from elsewhere": bool(of("ADD", text)) or "://" in " ".join(of("RUN", text)),
        "no secret": re.search(r"(?i)token|secret|password|api_?key", settings) is not None,
        "what is copied is here": not all((REPO / source).exists() for source in copied(text)),
        "only the course is copied": "." in copied(text),
        "the packages are the pod's": ours != next(x["value"] for x in theirs if x["name"] == "PACKAGES").split(),
        "the hub's half has a version": not re.fullmatch(r"\d+\.\d+\.\d+", arguments(text).get("JUPYTERHUB", "")),
        "no layer is empty": bool(of("WORKDIR", text)),
        "LD_LIBRARY_PATH is appended to": "LD_LIBRARY_PATH=${LD_LIBRARY_PATH" not in settings,
    }
    return {name for name, is_broken in broken.items() if is_broken}


def test_the_dockerfile_keeps_the_rules():
    assert breaches(DOCKERFILE) == set()


@pytest.mark.parametrize(
    "old, new, caught",
    [
        ("USER 10001:10001", "USER root", "it runs as the pod's user"),
        ("USER 10001:10001", "", "it runs as the pod's user"),
        ("jax:26.06-py3\nFROM", "jax:latest\nFROM", "the base is declared, with a tag"),
        ("jax:26.06-py3\nFROM", "jax:26.01-py3\nFROM", "it is the base of the pod"),
        ("COPY src ", "ADD https://example.org/src.tar.gz ", "nothing comes from elsewhere"),
        ("ENV HOME", "ENV JUPYTER_TOKEN=letmein HOME", "no secret"),
        ("COPY notebooks ", "COPY notebook ", "what is copied is here"),
        ("COPY src ", "COPY . ", "only the course is copied"),
        (" papermill ", " ", "the packages are the pod's"),
        ("JUPYTERHUB=5.5.0", "JUPYTERHUB=5", "the hub's half has a version"),
        ("USER 10001:10001", "WORKDIR /workspace\nUSER 10001:10001", "no layer is empty"),
        ("${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}", "", "LD_LIBRARY_PATH is appended to"),
    ],
)
def test_a_planted_fault_is_caught(old, new, caught):
    assert old in DOCKERFILE
    assert caught in breaches(DOCKERFILE.replace(old, new))


def test_the_hub_looks_for_the_course_where_the_image_has_it():
    values = yaml.safe_load((REPO / "deploy" / "hub" / "values.yaml").read_text(encoding="utf-8"))
    folders = {rest.split()[-1] for rest in of("COPY")}
    command = values["singleuser"]["lifecycleHooks"]["postStart"]["exec"]["command"][-1]
    script, source = command.split()[1:3]
    assert script == "/opt/attention/deploy/cloud/receive.py"
    assert {source + "/", f"{source}/deploy"} <= folders


# The shell step, on a Python that plays the image.


def make_wheel(folder: pathlib.Path, name: str, version: str, needs: str = "") -> None:
    """A wheel with one module, which also runs with `python -m`."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        needs = f"Requires-Dist: {needs}\n" if needs else ""
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A folder that plays the image after its shell step; `bin/python3` in it is the image's own Python."""
    root = tmp_path_factory.mktemp("image")
    wheels, locks, stubs = root / "wheels", root / "etc", root / "stubs"
    for folder in (wheels, locks, stubs, root / "tmp"):
        folder.mkdir()
    # The image holds an old tornado and a JAX of its own; the index has newer ones, which the newest JupyterLab wants.
    for name, version, needs in [
        ("tornado", "6.1", ""),
        ("tornado", "6.9", ""),
        ("jax", "0.9.2", ""),
        ("jax", "0.99", ""),
        ("jupyterlab", "4.1", "tornado>=6.0"),
        ("jupyterlab", "4.9", "tornado>=6.5"),
        ("papermill", "2.1", "jax"),
        ("papermill", "2.9", "jax"),
        ("ipykernel", "7.0", ""),
        ("jupyterhub", arguments()["JUPYTERHUB"], "tornado"),
        ("jupyterhub", "99.0", "tornado"),
    ]:
        make_wheel(wheels, name, version, needs)
    venv.create(root / "python", with_pip=True)
    environment = {
        "PATH": f"{root}/python/bin:{stubs}:{os.environ['PATH']}",
        "HOME": str(root),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }
    python = root / "python" / "bin" / "python3"
    subprocess.run([python, "-m", "pip", "install", "-q", "tornado==6.1", "jax==0.9.2"], env=environment, check=True)
    for name in ("groupadd", "useradd"):
        (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {root}/users\n')
        (stubs / name).chmod(0o755)
    # A pin of something new holds; one that the image contradicts gives way to the image.
    (locks / "pod.txt").write_text("papermill==2.1\ntornado==6.9\n")
    moved = {"/tmp/": f"{root}/tmp/", "/etc/jax-jupyter-locks/": f"{locks}/"}
    moved |= {"/workspace/": f"{root}/workspace/", "/opt/attention/": f"{root}/opt/attention/"}

    def move(text: str) -> str:
        for old, new in moved.items():
            text = text.replace(old, new)
        return text

    (locks / "jupyter.yaml").write_text(move(MANIFEST))
    [command] = of("RUN")
    packages = {"PACKAGES": "ipykernel jupyterlab papermill", "JUPYTERHUB": arguments()["JUPYTERHUB"]}
    done = subprocess.run(["sh", "-c", move(command)], env=environment | packages, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def versions(image: pathlib.Path) -> dict[str, str]:
    done = subprocess.run(
        [image / "python" / "bin" / "python3", "-Em", "pip", "list", "--format=freeze"],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("==") for line in done.stdout.split())


def test_the_images_versions_stay(image):
    found = versions(image)
    assert (found["tornado"], found["jax"]) == ("6.1", "0.9.2")
    assert found["jupyterlab"] == "4.1", "a JupyterLab was chosen that wants a newer tornado than the image's"


def test_the_pins_hold_for_what_is_new(image):
    assert versions(image)["papermill"] == "2.1"


def test_the_hubs_half_has_the_hubs_version(image):
    assert versions(image)["jupyterhub"] == arguments()["JUPYTERHUB"]


def test_the_step_cleans_up_and_makes_the_user(image):
    assert list((image / "tmp").iterdir()) == []
    pod = POD["securityContext"]
    users = (image / "users").read_text()
    assert f"groupadd --gid {pod['runAsGroup']} " in users
    assert f"useradd --uid {pod['runAsUser']} --gid {pod['runAsGroup']} " in users


def test_python_takes_the_students_course_and_else_the_images(image):
    def where() -> str:
        python = [image / "python" / "bin" / "python3", "-Ec", "import attnlab; print(attnlab.__file__)"]
        return subprocess.run(python, capture_output=True, text=True, check=True, cwd=image).stdout.strip()

    for folder in ("opt", "workspace"):
        module = image / folder / "attention" / "src" / "attnlab.py"
        module.parent.mkdir(parents=True)
        module.write_text("")
        assert where() == str(module)


def test_the_step_runs_the_manifests_own_script(tmp_path):
    [command] = of("RUN")
    (tmp_path / "jupyter.yaml").write_text(MANIFEST)
    extract = re.match(r"(sed -n .*?) *>", command)[1].replace("/etc/jax-jupyter-locks/", f"{tmp_path}/")
    assert subprocess.run(["sh", "-c", extract], capture_output=True, text=True, check=True).stdout == PACKAGES_SH
    assert re.search(r"\bCOURSE= .*\bbash /tmp/packages.sh", command), "without COURSE= it fills a venv, not the image"


# The build.


def test_cloud_build_knows_every_field():
    assert set(BUILD) <= FIELDS
    assert set(BUILD["options"]) <= OPTION_FIELDS
    assert all(set(step) <= STEP_FIELDS for step in BUILD["steps"])
    assert BUILD["options"]["machineType"] in MACHINES
    assert BUILD["options"]["logging"] == "CLOUD_LOGGING_ONLY"
    assert re.fullmatch(r"\d+s", BUILD["timeout"])


def test_every_substitution_is_declared_and_used():
    used = set(re.findall(r"\$\{(_\w+)\}", (IMAGE / "cloudbuild.yaml").read_text(encoding="utf-8")))
    assert used == set(BUILD["substitutions"]) | GIVEN
    assert not GIVEN & set(BUILD["substitutions"])


def test_what_is_built_is_tried_and_pushed():
    build, attempt = BUILD["steps"]
    [tag] = BUILD["images"]
    assert build["args"][build["args"].index("--tag") + 1] == tag
    assert build["args"][build["args"].index("--file") + 1] == "deploy/image/Dockerfile"
    assert build["args"][-1] == "."
    assert f'"{tag}"' in attempt["args"][-1]
    assert BUILD["substitutions"]["_BASE"] == arguments()["BASE"]


EMPTY = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


@pytest.mark.parametrize(
    "layers, says",
    [
        (["sha256:aa", "sha256:bb"], "GKE can stream this image"),
        (["sha256:aa", EMPTY], "does not stream it"),
        (["sha256:aa", "sha256:bb", "sha256:aa"], "does not stream it"),
    ],
)
def test_the_build_says_whether_the_image_can_be_streamed(tmp_path, layers, says):
    docker = tmp_path / "docker"
    answer = "printf '%s\\n' " + " ".join(map(shlex.quote, [*layers, ""]))
    docker.write_text(f'#!/bin/sh\ncase $1 in inspect) {answer} ;; run) echo "$@" ;; *) exit 9 ;; esac\n')
    docker.chmod(0o755)
    script = BUILD["steps"][1]["args"][-1].replace("/tmp/layers", f"{tmp_path}/layers")
    script = re.sub(r"\$\{_\w+\}", "x", script).replace("$$", "$")
    done = subprocess.run(
        ["bash", "-euc", script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(says)


# What is sent.


@pytest.fixture(scope="module")
def working_tree(tmp_path_factory):
    """A tree with one file of each kind that may lie in a checkout, and the rules that decide what is sent."""
    root = tmp_path_factory.mktemp("tree")
    wanted = [f"{x}/kept/file.txt" if (REPO / x).is_dir() else x for x in copied()]
    kept_out = """.venv/bin/python .venv-cloud/bin/checkov build/run/index.html .git/config .ci/run
        terraform/main.tf terraform/terraform.tfvars terraform/terraform.tfstate terraform/.terraform/provider
        deploy/class.tfvars deploy/terraform.tfstate.backup src/attnlab/__pycache__/cli.cpython-312.pyc
        src/attnlab.egg-info/PKG-INFO notebooks/.ipynb_checkpoints/00.ipynb notebooks/.env deploy/tls.key deploy/tls.pem
        deploy/google.env deploy/kubeconfig-class .pytest_cache/x .hypothesis/x""".split()
    for name in [*wanted, *kept_out]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name in (".gcloudignore", ".gitignore"):
        shutil.copy(REPO / name, root / name)
    return root, sorted(wanted)


def test_what_copy_needs_is_sent_and_nothing_else(working_tree, tmp_path):
    root, wanted = working_tree
    rules = (root / ".gcloudignore").read_text()
    assert "#!include:.gitignore" in rules
    # The rules are those of git, but for the line that takes in another file.
    (tmp_path / "rules").write_text(rules.replace("#!include:.gitignore", (root / ".gitignore").read_text()))
    git = ["git", "-C", tmp_path, "--git-dir", tmp_path / "git", "--work-tree", root]
    subprocess.run([*git, "init", "--quiet"], check=True)
    done = subprocess.run(
        [*git, "-C", root, "ls-files", "--others", f"--exclude-from={tmp_path}/rules"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == wanted


def test_gcloud_itself_sends_the_same(working_tree):
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not here: https://cloud.google.com/sdk/docs/install")
    root, wanted = working_tree
    done = subprocess.run(["gcloud", "meta", "list-files-for-upload", root], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == wanted
