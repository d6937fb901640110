"""Counters by Nsight Compute: what is read from its table, and what is said where there are none."""

import os
import stat
import subprocess
import sys

import pytest

from attnlab import nsight

NAMES = ["ID", "Kernel Name", *nsight.COUNTERS]
STALLS = [f"smsp__average_warps_issue_stalled_{x}_per_issue_active.ratio" for x in ("barrier", "selected", "wait")]
UNITS = ["", "", "ns", "%", "%", "%", "Kbyte", "%", "register/thread", "warp", "inst", "inst", "inst"]


def table(*rows) -> str:
    lines = [NAMES + STALLS, UNITS, *rows]
    text = "\n".join(",".join(f'"{x}"' for x in line) for line in lines)
    return f"==PROF== Connected to process 1\n{text}\n"


FLASH = ["0", "flash_forward", "2,178,656", "54.3", "28.9", "45.8", "268,435.5", "2.6", "255", "8", "1.18", "5", "0.3"]
CUDNN = ["1", "sdpa", "1,623,040", "77.2", "39.9", "42.8", "270,000", "3.3", "168", "9", "0.2", "5", "0.9"]


def test_numbers_are_read_in_their_units_and_the_longest_wait_is_named():
    one, two = nsight.parse(table(FLASH, CUDNN))
    assert one["time, ms"] == pytest.approx(2.178656) and one["memory traffic, MB"] == pytest.approx(268.4355)
    assert one["matrix units busy, %"] == 54.3 and one["registers a thread"] == 255
    assert one["most waits for"] == "barrier"  # not "selected": that is no wait
    assert two["most waits for"] == "wait"


def test_no_table_is_no_rows():
    assert nsight.parse("==ERROR== something\n") == []


def fake(folder, monkeypatch, script: str):
    """An `ncu` on PATH that runs `script`."""
    path = folder / "ncu"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_ncu_it_says_where_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nsight.NoCounters, match="ncu is not on PATH: it comes with the CUDA toolkit"):
        nsight.counters(["flash"], 1, 64, 1, 64)


def test_a_refusal_of_the_counters_is_named(monkeypatch, tmp_path):
    fake(tmp_path, monkeypatch, 'echo "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"; exit 1\n')
    with pytest.raises(nsight.NoCounters, match="may not read the counters"):
        nsight.counters(["flash"], 1, 64, 1, 64)


def test_a_kernel_that_was_not_seen_is_no_row_of_another(monkeypatch, tmp_path):
    (tmp_path / "out").write_text(table(FLASH))
    fake(tmp_path, monkeypatch, f"cat {tmp_path / 'out'}\n")
    assert set(nsight.counters(["flash"], 1, 64, 1, 64)) == {"flash"}
    with pytest.raises(nsight.NoCounters, match="saw 1 kernels of 2"):
        nsight.counters(["flash", "cudnn"], 1, 64, 1, 64)


def test_what_is_profiled_runs_by_itself():
    command = [sys.executable, "-m", "attnlab.nsight", "1", "32", "1", "16", "1", "flash"]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    assert subprocess.run([*command, "nobody"], capture_output=True, timeout=120).returncode


@pytest.mark.parametrize("unit, ms", [("ns", 2.178656), ("usecond", 2178.656), ("second", 2178656000.0)])
def test_a_time_is_read_in_its_unit(unit, ms):
    (row,) = nsight.parse(table(FLASH).replace('"ns"', f'"{unit}"'))
    assert row["time, ms"] == pytest.approx(ms)


def test_an_unknown_unit_is_no_factor_of_one():
    with pytest.raises(nsight.NoCounters, match="in 'fortnights'"):
        nsight.parse(table(FLASH).replace('"ns"', '"fortnights"'))


@pytest.mark.parametrize(
    "text", ['"ID","a"\n', table(), table() + "==PROF== Disconnected\n", '"ID","a"\n"",""\n"0","1"\n']
)
def test_a_table_without_a_counted_kernel_is_no_rows(text):
    assert nsight.parse(text) == []


def test_a_name_that_can_not_be_profiled_is_refused_before_the_profiler_runs():
    with pytest.raises(ValueError, match="unknown 'nobody': what can be profiled are flash, hopper, cudnn"):
        nsight.counters(["nobody"], 1, 64, 1, 64)


def test_a_profiler_that_does_not_end_is_stopped_with_what_it_started(monkeypatch, tmp_path):
    fake(tmp_path, monkeypatch, f"sleep 60 & echo $! > {tmp_path}/child; wait\n")
    monkeypatch.setattr(nsight, "SECONDS", 1)
    with pytest.raises(nsight.NoCounters, match="did not end within 1 seconds"):
        nsight.counters("flash", 1, 64, 1, 64)
    child = int((tmp_path / "child").read_text())
    stat = f"/proc/{child}/stat"
    assert not os.path.exists(stat) or open(stat).read().split()[2] == "Z"


def test_a_broken_profiler_is_named(monkeypatch, tmp_path):
    path = tmp_path / "ncu"
    path.write_bytes(b"\x00broken")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(nsight.NoCounters, match="ncu does not start"):
        nsight.counters(["flash"], 1, 64, 1, 64)
