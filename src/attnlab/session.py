"""`start`: the first line of every notebook."""

import os
import pathlib
import platform

import jax

from attnlab import device as _device
from attnlab.display import format_bytes
from attnlab.records import LOG
from attnlab.tables import show_device

CONTEXT = 2**30  # what a process holds beside its arrays: the CUDA context and the libraries, generously


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
    # A folder a machine: code for one CPU may not run on another that sees the same files.
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(folder) / platform.node()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def warn_of_others() -> None:
    """Print who else holds the GPU's memory, if more than a tenth of it is taken by others."""
    memory = _device.gpu_memory() if _device.current().kind == "gpu" else None
    if not memory:
        return
    used, total = memory
    # Not the sum of nvidia-smi's list: in a container it is short, or knows this process by another number.
    held = used - _device.own_memory() - CONTEXT
    if held > 0.1 * total:
        others = [h for h in _device.memory_holders() or [] if not h.mine]
        names = ", ".join(f"{h.name} (pid {h.pid}, {format_bytes(h.bytes)})" for h in others)
        print(
            f"Careful: {format_bytes(held)} of {format_bytes(total)} are held by "
            f"{names or 'processes that can not be seen from here'}. Often that is another notebook's kernel: shut it "
            "down (Kernel > Shut Down), or this one may fail with errors that name cuDNN."
        )
