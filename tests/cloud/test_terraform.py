"""terraform/: its own tests pass, its values are ones that Google's APIs take, and mistakes in it are caught.

Everything runs in copies: a lock file or a state beside the real files would meet the next person there.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import terraform_enums

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "terraform"
NO_NETWORK = re.compile(
    r"could not connect to|failed to (query|request|retrieve)|dial tcp|no such host|timed? ?out", re.I
)


def terraform(*args, cwd):
    """Run terraform in cwd: its exit status and all its words, unwrapped and without colours."""
    if not shutil.which("terraform"):
        pytest.fail("terraform is not here, and terraform/ can't be tested without it: put 1.7 or newer on PATH")
    env = {**os.environ, "TF_IN_AUTOMATION": "1", "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(["terraform", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    words = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    return done.returncode, re.sub(r"\s+", " ", re.sub(r"[│╷╵]", " ", words))


def copy_of(folder, source=SOURCE):
    """A copy of the `.tf` files and their tests, without what a person's own runs left beside them."""
    folder.mkdir()
    shutil.copytree(source / "tests", folder / "tests")
    for path in source.glob("*.tf"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="session")
def initialised(tmp_path_factory):
    """A copy in which `terraform init` has found the provider; the session's other copies take it from here."""
    folder = copy_of(tmp_path_factory.mktemp("terraform") / "initialised")
    status, words = terraform("init", "-input=false", "-no-color", cwd=folder)
    given = os.environ.get("TF_CLI_CONFIG_FILE", "")
    if status and not os.path.isfile(given) and NO_NETWORK.search(words):
        pytest.skip(
            "no network to get the google provider from, and TF_CLI_CONFIG_FILE names no file that says where else"
        )
    assert status == 0, words
    return folder


@pytest.fixture
def copy(initialised, tmp_path):
    """A copy to plant a mistake in, initialised already."""
    folder = copy_of(tmp_path / "copy")
    (folder / ".terraform").symlink_to(initialised / ".terraform")
    shutil.copy(initialised / ".terraform.lock.hcl", folder)
    return folder


def only(folder, name):
    """Leave in folder's tests the one run of this name, under its file's own beginning."""
    for path in sorted((folder / "tests").glob("*.tftest.hcl")):
        beginning, *runs = re.split(r"(?m)^(?=run \")", path.read_text())
        kept = [run for run in runs if run.startswith(f'run "{name}"')]
        path.write_text(beginning + kept[0]) if kept else path.unlink()
    assert len(list((folder / "tests").iterdir())) == 1, f"terraform/tests has no single run named {name}"


# ---- as they stand


def test_files_are_formatted():
    status, words = terraform("fmt", "-check", "-recursive", "-diff", cwd=SOURCE)
    assert status == 0, words


def test_the_configuration_is_valid(initialised):
    status, words = terraform("validate", "-no-color", cwd=initialised)
    assert status == 0, words


@pytest.mark.parametrize("name", sorted(path.name for path in (SOURCE / "tests").iterdir()))
def test_terraforms_own_tests_pass(initialised, name):
    status, words = terraform("test", "-no-color", f"-filter=tests/{name}", cwd=initialised)
    assert status == 0 and re.search(r"[1-9]\d* passed, 0 failed", words), words


def test_values_are_ones_that_googles_apis_take():
    assert terraform_enums.misspelt(SOURCE) == []


def test_every_table_of_values_is_used():
    text = "\n".join(path.read_text() for path in SOURCE.glob("*.tf"))
    assert [name for name in terraform_enums.ENUMS if not re.search(rf"\b{name}\b", text)] == []


def test_the_example_sets_variables_that_exist():
    names = re.findall(r'(?m)^variable "(\w+)"', (SOURCE / "variables.tf").read_text())
    example = (SOURCE / "terraform.tfvars.example").read_text()
    shown = re.findall(r"(?m)^(?:# )?(\w+) +=", example)
    assert shown and set(shown) <= set(names)
    assert re.findall(r"(?m)^(\w+) +=", example) == ["project_id"]  # as in the codelab: one line to edit


def test_the_examples_placeholder_is_one_that_is_refused():
    placeholder = re.search(r'project_id = ("your.*")', (SOURCE / "terraform.tfvars.example").read_text())[1]
    assert f"project_id = {placeholder}" in (SOURCE / "tests" / "refusals.tftest.hcl").read_text()


def test_the_default_machine_asks_for_no_more_than_the_codelabs_quota():
    text = (SOURCE / "variables.tf").read_text()
    default = re.search(r'variable "max_gpu_nodes".*?default\s+= (\d+)', text, re.S)
    machine = re.search(r'variable "machine_type".*?default\s+= "(.*?)"', text, re.S)[1]
    per_node = re.search(rf"\b{machine}\s+= (\d+)", (SOURCE / "cluster.tf").read_text())
    assert int(default[1]) * int(per_node[1]) <= 2


# ---- what a refusal says


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("the_placeholder_project", ['"your-gcp-project-id"', "terraform.tfvars"]),
        ("a_name_too_long_for_a_service_account", ["attention-on-gpus-spring-1", "30 characters", "at most 24"]),
        ("a_zone_without_l4", ["us-central1-f", "us-central1-[abc]"]),
        ("a_machine_without_l4", ["n1-standard-8", "no L4", "g2-standard-8"]),
        ("max_below_min", ["max_gpu_nodes is 2", "min_gpu_nodes 3"]),
        ("a_reservation_without_a_name", ['provisioning is "reservation"', "a name"]),
        ("flex_start_with_nodes_kept", ["min_gpu_nodes is 1", "set it to 0"]),
        ("the_whole_internet_as_admin", ["0.0.0.0/0", "A.B.C.D/32"]),
    ],
)
def test_a_refusal_names_the_mistake(copy, name, words):
    only(copy, name)
    path = copy / "tests" / "refusals.tftest.hcl"
    path.write_text(re.sub(r"\n *expect_failures.*", "", path.read_text()))
    status, said = terraform("test", "-no-color", cwd=copy)
    assert status != 0
    assert [each for each in words if each not in said] == [], said


# ---- mistakes that a person makes, each in a copy; the last word is the run of terraform/tests that catches it

MISTAKES = {
    "the driver is left to a DaemonSet that nobody installs": (
        "cluster.tf",
        'gpu_driver_version = "LATEST"',
        'gpu_driver_version = "INSTALLATION_DISABLED"',
        "gpu_nodes_come_when_asked_for_and_are_guarded",
    ),
    "the taint is dropped, since GKE adds one by itself": (
        "cluster.tf",
        re.compile(r"    taint \{.*?\n    \}\n", re.S),
        "",
        "gpu_nodes_come_when_asked_for_and_are_guarded",
    ),
    "secure boot is off, because a blog said so": (
        "cluster.tf",
        re.compile(r"enable_secure_boot( +)= true(?=[^\n]*\n[^\n]*\n    \}\n    workload_metadata_config \{\n)"),
        r"enable_secure_boot\1= false",
        "gpu_nodes_come_when_asked_for_and_are_guarded",
    ),
    "an upgrade wants a spare L4": (
        "cluster.tf",
        re.compile(r"max_surge +=.*\n +max_unavailable.*"),
        "max_surge = 1\n      max_unavailable = 0",
        "gpu_nodes_come_when_asked_for_and_are_guarded",
    ),
    "the GPU nodes run as the default account": (
        "cluster.tf",
        re.compile(r"(image_type[^\n]*\n)    service_account = [^\n]*\n"),
        r'\1    service_account = "default"' + "\n",
        "nodes_have_an_account_of_their_own_that_may_do_little",
    ),
    "nodes may also write images": (
        "registry.tf",
        "roles/artifactregistry.reader",
        "roles/artifactregistry.writer",
        "nodes_have_an_account_of_their_own_that_may_do_little",
    ),
    "everybody may be an administrator": (
        "variables.tf",
        "[1]), 32) >= 8",
        "[1]), 32) >= 0",
        "the_whole_internet_as_admin",
    ),
    "the IP endpoint is on for everybody": (
        "cluster.tf",
        "enabled = length(var.admin_cidrs) > 0",
        "enabled = true",
        "a_cluster_that_is_closed_by_default",
    ),
    "nodes get public addresses": (
        "cluster.tf",
        "enable_private_nodes = true",
        "enable_private_nodes = false",
        "a_cluster_that_is_closed_by_default",
    ),
    "g2-standard-24 is thought to have one GPU": (
        "cluster.tf",
        re.compile(r"g2-standard-24 += 2"),
        "g2-standard-24 = 1",
        "g2_standard_24_has_2",
    ),
    "destroy switches APIs off": (
        "network.tf",
        "disable_on_destroy = false",
        "disable_on_destroy = true",
        "apis_are_enabled_and_stay",
    ),
    "flex-start nodes are repaired": (
        "cluster.tf",
        re.compile(r"auto_repair +=(?= !local)[^\n#]*"),
        "auto_repair = true ",
        "flex_start",
    ),
    "flex-start gets a first size": (
        "cluster.tf",
        "local.flex_start ? null : var.min_gpu_nodes",
        "var.min_gpu_nodes",
        "flex_start",
    ),
    "the placeholder project is let through": (
        "variables.tf",
        re.compile(r" && !contains\(.*?var\.project_id\)"),
        "",
        "the_placeholder_project",
    ),
}
MISSPELT = {
    "Dataplane V2": ("cluster.tf", '"ADVANCED_DATAPATH"', '"ADVANCED_DATAPTH"'),
    "the taint's effect as Kubernetes spells it": ("cluster.tf", '"NO_SCHEDULE"', '"NoSchedule"'),
    "the metadata of the other cloud product": ("cluster.tf", '{ mode = "GKE_METADATA" }', '{ mode = "GKE" }'),
    "a role": ("registry.tf", "roles/container.defaultNodeServiceAccount", "roles/container.nodeServiceAccount"),
    "a reservation's kind": ("cluster.tf", '"SPECIFIC_RESERVATION"', '"SPECIFIC"'),
    "a channel": ("cluster.tf", '"REGULAR"', '"REGULER"'),
    "a component, in a list": ("cluster.tf", '["SYSTEM_COMPONENTS"]', '["SYSTEM"]'),
    "an attribute that nobody has a table for": (
        "cluster.tf",
        'name       = "system"',
        'networking_mode = "VPC_NATIVE"',
    ),
}


def plant(folder, name, old, new):
    """Put one edit into a file of folder, at the first place that old fits."""
    path = folder / name
    text = path.read_text()
    edited = old.sub(new, text, count=1) if isinstance(old, re.Pattern) else text.replace(old, new, 1)
    assert edited != text, f"{name} no longer has what this mistake changes"
    path.write_text(edited)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(copy, mistake):
    name, old, new, run = MISTAKES[mistake]
    only(copy, run)
    plant(copy, name, old, new)
    status, words = terraform("test", "-no-color", cwd=copy)
    # Caught by the assertion or the missing refusal, not by broken syntax.
    assert status != 0 and re.search(r"Test assertion failed|Missing expected failure", words), words


@pytest.mark.parametrize("mistake", MISSPELT)
def test_a_misspelt_value_is_caught(tmp_path, mistake):
    folder = copy_of(tmp_path / "copy")
    plant(folder, *MISSPELT[mistake])
    assert len(terraform_enums.misspelt(folder)) == 1
