"""`start`: the first line of every notebook."""

import os
import pathlib
import platform

import jax

from attnlab import device as _device
from attnlab.display import format_bytes
from attnlab.records import LOG
from attnlab.tables import show_device

TAKEN = 0.1  # the share of the GPU's memory that others may hold: a desktop's window system holds less


def start(notebook: str) -> None:
    """Begin a notebook: an empty log of records, and the device on show.

    Warns if another process holds much of the GPU's memory, which JAX otherwise reports as errors of cuDNN.

    Args:
      notebook: the file's name without its ending, such as "01_naive_attention".

    Raises:
      attnlab.device.DeviceNotFound: `JAX_PLATFORMS` asks for a device that is not there.
    """
    LOG.open(notebook, os.environ.get("ATTNLAB_RESULTS"))
    if folder := os.environ.get("ATTNLAB_CACHE"):
        keep_compiled(folder)
    show_device()
    warn_of_others()


def keep_compiled(folder) -> None:
    """Let JAX keep what it compiles in `folder`, and find it there in the next run.

    A program that was found there has no compile time (`attnlab.timing.compile_timed`).
    """
    # XLA's older loader for CPUs prints an alarm about the machine's features for every program that it finds.
    if _device.current().kind == "cpu" and jax.__version_info__ < (0, 10):
        return
    # A folder a machine: code for one CPU may not run on another that sees the same files. And one a driver and a
    # cuDNN, which JAX's own key leaves out: what an older one chose by trial would be timed as the new one's.
    env = _device.environment()
    name = "-".join(str(x) for x in (platform.node(), env["driver"], env["cudnn"]) if x)
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(folder) / name))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # XLA would keep its choices by trial there too, and a compilation that finds them counts as one that made them.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def warn_of_others() -> None:
    """Print who else holds the GPU's memory, if more than a tenth of it is taken by others."""
    held, total = _device.held_by_others() or (0, 0)
    if held > TAKEN * total:
        others = [h for h in _device.memory_holders() or [] if not h.mine]
        names = ", ".join(f"{h.name} (pid {h.pid}, {format_bytes(h.bytes)})" for h in others)
        print(
            f"Careful: {format_bytes(held)} of {format_bytes(total)} are held by "
            f"{names or 'processes that can not be seen from here'}. Often that is another notebook's kernel: shut it "
            "down (Kernel > Shut Down), or this one may fail with errors that name cuDNN."
        )
