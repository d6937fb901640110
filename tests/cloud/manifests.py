"""Reading what the manifests and terraform/ say, and running the pod's env.sh."""

import pathlib
import re
import subprocess


def values(thing, path: str):
    """All values at a dotted path; `*` stands for any letters of a key or any item, `~` for a dot within a key."""
    key, _, rest = path.partition(".")
    pattern = re.escape(key.replace("~", ".")).replace(r"\*", ".*")
    if isinstance(thing, dict):
        found = [v for k, v in thing.items() if re.fullmatch(pattern, k)]
    else:
        found = thing if isinstance(thing, list) and key == "*" else []
    for value in found:
        if rest:
            yield from values(value, rest)
        else:
            yield value


def at(thing, path: str):
    """The value at a dotted path, or None."""
    return next(values(thing, path), None)


def leaves(thing, path: str):
    """Every single value with its dotted path, in which lists leave no trace."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(thing, list):
        for value in thing:
            yield from leaves(value, path)
    else:
        yield path, thing


def of_kind(docs: list[dict], *kinds: str) -> list[dict]:
    return [d for d in docs if d["kind"] in kinds]


def name_of(doc: dict) -> str:
    return doc["metadata"]["name"]


def controller(docs: list[dict]) -> dict:
    """The one object that makes the pod."""
    (found,) = of_kind(docs, "Deployment", "StatefulSet")
    return found


def pod(docs: list[dict]) -> dict:
    return controller(docs)["spec"]["template"]["spec"]


def containers(docs: list[dict]) -> list[dict]:
    return [*pod(docs).get("initContainers", []), *pod(docs)["containers"]]


def jupyter(docs: list[dict]) -> dict:
    return next(c for c in containers(docs) if c["name"] == "jupyter")


def security(docs: list[dict], container: dict) -> dict:
    """A container's security settings: the pod's, with its own over them."""
    return pod(docs).get("securityContext", {}) | container.get("securityContext", {})


def env(container: dict) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in container.get("env", [])}


def texts(docs: list[dict]) -> dict[str, str]:
    """The files of all ConfigMaps, by name."""
    return {name: text for d in of_kind(docs, "ConfigMap") for name, text in d["data"].items()}


def mount_at(container: dict, path: str) -> dict:
    """The volume mount that a path lies on, or {}."""
    above = [m for m in container["volumeMounts"] if pathlib.PurePath(path).is_relative_to(m["mountPath"])]
    return max(above, key=lambda m: len(m["mountPath"]), default={})


def volume_at(docs: list[dict], container: dict, path: str) -> dict:
    """The volume that a path of a container lies on, or {}."""
    name = mount_at(container, path).get("name")
    return next((v for v in pod(docs)["volumes"] if v["name"] == name), {})


def after_env_sh(docs: list[dict], library_path: str | None, times: int) -> dict[str, str]:
    """The environment of a program after bash, at its strictest, reads env.sh that many times; empty if it fails."""
    given = {"PATH": "/usr/bin:/bin"} | ({} if library_path is None else {"LD_LIBRARY_PATH": library_path})
    script = "set -eu\n" + texts(docs)["env.sh"] * times + "\nenv -0"
    done = subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def commands_text(folder: pathlib.Path) -> str:
    """The source of the deploy commands."""
    return "\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.py")))


def terraform_facts(folder: pathlib.Path) -> dict:
    """What a GPU node of the default machine has, as terraform/ says: GPUs, the accelerator's name, the taint.

    `vcpus` is that of the smallest machine that Terraform takes.
    """
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.tf")))
    machine = re.search(r'variable "machine_type" \{.*?default\s*=\s*"([^"]+)"', text, re.S)[1]
    taint = re.search(r"\btaint \{(.*?)\}", text, re.S)[1]
    return {
        "machine": machine,
        "vcpus": min(int(n) for n in re.findall(r"\bg2-standard-(\d+)\s*=", text)),
        "gpus": int(re.search(rf"\b{re.escape(machine)}\"?\s*=\s*(\d+)", text)[1]),
        "accelerator": re.search(r'guest_accelerator \{\s*type\s*=\s*"([^"]+)"', text)[1],
        "taint": {k: re.search(rf'\b{k}\s*=\s*"([^"]+)"', taint)[1] for k in ("key", "value", "effect")},
    }
