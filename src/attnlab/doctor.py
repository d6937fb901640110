"""What a machine must have before a class: the modules, a driver that fits, a clock, and places to write.

`attnlab doctor` shows it beside what the device can do, and `attnlab preclass` asks for it on every machine. It is
for what nobody can know before the real container runs on a real node.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import re
import tempfile
from importlib import metadata

from attnlab import device, tables
from attnlab.display import format_bytes, show_table
from attnlab.features import Feature, feature, features

# What `attnlab run` and its notebooks import.
MODULES = (
    "jax", "numpy", "flax", "matplotlib", "ipykernel", "IPython", "nbconvert", "nbformat", "papermill", "psutil",
    "tqdm",
)  # fmt: skip
ROOM = 64 * 2**20  # bytes; what a place must have free to be of use


def main() -> int:
    """Print what can run here and whether the machine is ready; 0, or 1 if it is not."""
    tables.show_device()
    tables.show_features()
    found = checks()
    rows = [(check.name, check.ok, check.reason, check.todo or None) for check in found]
    show_table(["what", "ready", "why", "what to do"], rows, title=f"Is this machine ready, for {_user()}?")
    return 0 if all(check.ok for check in found) else 1


def line() -> str:
    """What `attnlab doctor` knows, as one line of JSON: what runs on the machine itself.

    Raises `attnlab.device.DeviceNotFound`.
    """
    known = [{"key": key, **dataclasses.asdict(f)} for key, f in features().items()]
    memory = {"total": device.current().memory, "free": device.free_memory(), "held": 0, "holders": []}
    if others := device.held_by_others():
        held, total = others
        holders = [dataclasses.asdict(h) for h in device.memory_holders() or [] if not h.mine]
        # Free is what the next process can have: what this one took for itself goes with it.
        memory = {"total": total, "free": total - held, "held": held, "holders": holders}
    ready = [dataclasses.asdict(check) for check in checks()]
    return json.dumps(device.environment() | {"memory": memory, "features": known, "checks": ready})


def checks() -> list[Feature]:
    """One `Feature` for each thing that the course needs of a machine; `ok` says whether it is there."""
    found = [_modules(), _gpu(), _driver()]
    if device.current().kind == "gpu":
        clock = feature("cupti")
        found.append(dataclasses.replace(clock, reason=f"{clock.reason}, as {_user()}"))
    return [*found, _places()]


def _user() -> str:
    return f"user {os.getuid()}"


def _modules() -> Feature:
    name, absent, broken = "modules", [], []
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as e:
            (absent if e.name == module else broken).append(f"{module} ({e})" if e.name != module else module)
        except Exception as e:
            broken.append(f"{module} ({type(e).__name__}: {e})")
    if absent or broken:
        said = [f"not there: {', '.join(absent)}"] if absent else []
        said += [f"import fails: {', '.join(broken)}"] if broken else []
        return Feature(name, False, "; ".join(said), "in a pod: see the log of its init container; else `make run`")
    return Feature(name, True, f"all {len(MODULES)} import")


def _cuda_of_jax() -> int | None:
    """The CUDA that JAX was built for, by the plugin that is installed; None for a JAX without one."""
    names = [(d.name or "").replace("_", "-") for d in metadata.distributions()]
    return max((int(found[1]) for n in names if (found := re.fullmatch(r"jax-cuda(\d+)-plugin", n))), default=None)


def _gpu() -> Feature:
    """Whether JAX uses the GPU that is here. Without a driver and without a CUDA plugin none is expected."""
    found = dataclasses.replace(feature("gpu"), name="JAX uses the GPU")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return dataclasses.replace(found, ok=True, reason="not asked to: JAX_PLATFORMS=cpu", todo="")
    if found.ok or device.nvidia_smi("-L"):
        return found
    if cuda := _cuda_of_jax():
        why = f"JAX is built for CUDA {cuda}, and nvidia-smi finds no GPU: JAX runs on the CPU"
        return Feature(found.name, False, why, "start the container with a GPU (a pod: nvidia.com/gpu in its limits)")
    return dataclasses.replace(found, ok=True, reason="no NVIDIA GPU here, none is expected", todo="")


def _driver() -> Feature:
    """Whether the driver is new enough for the CUDA that JAX was built with. Their major versions decide."""
    name, wanted, said = "driver against CUDA", _cuda_of_jax(), device.nvidia_smi()
    # Drivers from 610 on say "CUDA UMD Version", older ones "CUDA Version".
    offered = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", "\n".join(said or []))
    if said is None:
        return Feature(name, True, "no NVIDIA driver here, none to compare")
    if wanted is None:
        return Feature(
            name, False, "a driver is here, but JAX has no CUDA plugin", "`make run`, or NVIDIA's JAX container"
        )
    if not offered:
        return Feature(name, False, "nvidia-smi gives no CUDA version", "mend the driver: nvidia-smi")
    have = f"the driver offers CUDA {offered[1]}.{offered[2]}, JAX is built for CUDA {wanted}"
    if int(offered[1]) < wanted:
        todo = "a newer driver (GKE: gpu_driver_version LATEST and a new node), or a JAX for an older CUDA"
        return Feature(name, False, have, todo)
    return Feature(name, True, have)


def _places() -> Feature:
    """Whether this user can write where the course and Jupyter do."""
    from jupyter_core.paths import jupyter_runtime_dir

    name = "places to write"
    places = {
        "home": os.path.expanduser("~"), "this folder": os.getcwd(), "temporary": tempfile.gettempdir(),
        "Jupyter's runtime": jupyter_runtime_dir(), "shared memory": "/dev/shm",
    }  # fmt: skip
    problems = [f"{what} ({path}): {why}" for what, path in places.items() if (why := _unwritable(path))]
    if problems:
        return Feature(name, False, "; ".join(problems), "mount a volume there that this user can write, or free space")
    return Feature(name, True, ", ".join(places.values()))


def _unwritable(path: str) -> str:
    """Why nothing can be written there, or ""."""
    folder = next(p for p in (pathlib.Path(path), *pathlib.Path(path).parents) if p.is_dir())  # it may be made later
    try:
        with tempfile.TemporaryFile(dir=folder):
            room = os.statvfs(folder)
    except OSError as e:
        return (e.strerror or str(e)).lower()
    free = room.f_bavail * room.f_frsize
    return "" if free >= ROOM else f"only {format_bytes(free)} free"
