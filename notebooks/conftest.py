"""What nbval compares in the course's notebooks, and what it leaves alone.

The committed outputs are of a GPU. nbval runs on machines without one too, so cells tagged `nbval-gpu`
are compared on a GPU only. Warnings on stderr and the size of figures differ between machines and
versions, and say nothing about the course.

A kernel that dies is seen within seconds: nbval alone would wait for its answer until the cell's time is up.

With ATTNLAB_NBVAL_OUTPUTS=FILE, what each cell gave is written there as JSON lines: `make validate` and the
tests use it to show a failed cell beside what was expected.
"""

import functools
import json
import os
import queue
import subprocess
import time

import pytest


@functools.cache
def gpu_here() -> bool:
    """Whether the kernels compute on an NVIDIA GPU. JAX is not asked: it would take the GPU's memory."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0].lower() not in ("", "cuda", "gpu"):
        return False
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU 0" in done.stdout


def _is_cell(item) -> bool:
    return hasattr(item, "cell") and hasattr(item, "cell_num")


def pytest_collection_modifyitems(config, items):
    for item in filter(_is_cell, items):
        item.output_timeout = 20  # nbval waits 5 s for the next output of a cell: too little on a busy machine
        if "nbval-gpu" in item.cell.metadata.get("tags", []):
            item.options["check"] = gpu_here()
        notebook = item.parent
        if "stderr" not in notebook.skip_compare:
            notebook.skip_compare += ("stderr", "image/png", "image/jpeg")
            # matplotlib's own words for a figure, beside the picture itself.
            notebook.sanitize_patterns[r"<Figure size [\d.]+x[\d.]+ with \d+ Axes>"] = "<Figure>"


def _await_reply(kernel):
    """`kernel.await_reply`, which also ends when the kernel does."""
    wait = type(kernel).await_reply

    def await_reply(msg_id, timeout=None):
        end = time.monotonic() + (timeout or float("inf"))
        while True:
            try:
                return wait(kernel, msg_id, timeout=1)
            except queue.Empty:
                if not kernel.is_alive():
                    raise RuntimeError("the kernel died in this cell: killed, or out of memory") from None
                if time.monotonic() > end:
                    raise

    return await_reply


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    kernel = getattr(item.parent, "kernel", None)
    if _is_cell(item) and kernel and "await_reply" not in vars(kernel):
        kernel.await_reply = _await_reply(kernel)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when != "call" or not _is_cell(item):
        return report
    if report.failed and not item.parent.kernel.is_alive():
        item.parent.timed_out = True  # nbval's word for: the cells after it can only fail too, and are not counted
    if to := os.environ.get("ATTNLAB_NBVAL_OUTPUTS"):
        line = {
            "cell": item.cell_num,  # code cells from 0, as nbval counts
            "compared": bool(item.options["check"] and item.cell.outputs) and report.outcome != "skipped",
            "failed": report.failed,
            "message": report.longreprtext if report.failed else "",
            "outputs": item.test_outputs or [],
        }
        with open(to, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    return report
