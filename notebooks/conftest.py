"""What nbval compares in the course's notebooks, and what it leaves alone.

The committed outputs are of a GPU. nbval runs on machines without one too, so cells tagged `nbval-gpu`
are compared on a GPU only. Warnings on stderr and the size of figures differ between machines and
versions, and say nothing about the course.

With ATTNLAB_NBVAL_OUTPUTS=FILE, what each cell gave is written there as JSON lines: tests use it to
show a failed cell beside what was expected.
"""

import functools
import json
import os
import subprocess

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
        if "nbval-gpu" in item.cell.metadata.get("tags", []):
            item.options["check"] = gpu_here()
        notebook = item.parent
        if "stderr" not in notebook.skip_compare:
            notebook.skip_compare += ("stderr", "image/png", "image/jpeg")
            # matplotlib's own words for a figure, beside the picture itself.
            notebook.sanitize_patterns[r"<Figure size [\d.]+x[\d.]+ with \d+ Axes>"] = "<Figure>"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    to = os.environ.get("ATTNLAB_NBVAL_OUTPUTS")
    if to and call.when == "call" and _is_cell(item):
        line = {
            "cell": item.cell_num,  # code cells from 0, as nbval counts
            "failed": report.failed,
            "message": report.longreprtext if report.failed else "",
            "outputs": item.test_outputs or [],
        }
        with open(to, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    return report
