"""Heads over several devices: 06_mha_gqa_mqa's cells on two virtual CPU devices, and on layouts that must be seen."""

import os
import pathlib
import subprocess
import sys

import pytest

import attnlab as lab
from attnlab import notebook_files
from attnlab.notebook_files import source
from attnlab.records import Records

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "06_mha_gqa_mqa.ipynb"
BY_HEADS = 'P(None, None, "heads", None)'


def cells() -> str:
    """The notebook's code before its first section, and that of the section on several devices."""
    heading, taken = "", []
    for cell in notebook_files.read(NOTEBOOK)["cells"]:
        if cell["cell_type"] == "markdown":
            heading = ([line for line in source(cell).splitlines() if line.startswith("## ")] or [heading])[-1]
        elif not heading or "several devices" in heading:
            taken.append(source(cell))
    return "\n\n".join(taken)


def found(code: str, devices: int, folder) -> dict:
    """The findings on the sharding by label, of `code` run with that many CPU devices."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(lab.__path__[0]).parent),
        "ATTNLAB_RESULTS": str(folder),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return {f.label: f.value for f in Records.read(folder / f"{NOTEBOOK.stem}.jsonl").find(name="sharded heads")}


@pytest.mark.parametrize("devices, used", [(2, 2), (6, 2)])  # of six, two divide the eight KV heads
def test_heads_over_devices_need_no_communication(tmp_path, devices, used):
    assert found(cells(), devices, tmp_path) == {
        "devices": used,
        "same answer": True,
        "output cut by heads": True,
        "communication in the program": "none",
    }


def test_skipped_where_the_devices_do_not_divide_the_heads(tmp_path):
    assert found(cells(), 3, tmp_path) == {"devices": 1}


def test_communication_is_seen_where_there_is_some(tmp_path):
    code = cells()
    assert code.count(BY_HEADS) == 1
    values = found(code.replace(BY_HEADS, 'P(None, "heads", None, None)'), 2, tmp_path)  # positions, not heads
    assert values["communication in the program"] != "none" and values["same answer"] is True
