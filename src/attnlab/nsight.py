"""Hardware counters of a kernel, read by Nsight Compute in a process of its own.

python -m attnlab.nsight B T N H CAUSAL NAME...    runs each variant once, for the profiler to look at
"""

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys

# Counter of Nsight Compute → what the course calls it. Percentages are of what the unit could do.
COUNTERS = {
    "gpu__time_duration.sum": "time, ms",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "matrix units busy, %",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exponential unit busy, %",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "instruction slots used, %",
    "dram__bytes.sum": "memory traffic, MB",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "memory busy, %",
    "launch__registers_per_thread": "registers a thread",
    "sm__warps_active.avg.per_cycle_active": "warps at once",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_UNITS = {
    "ms": {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3, "nsecond": 1e-6, "usecond": 1e-3, "msecond": 1, "second": 1e3},
    "MB": {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1, "Gbyte": 1e3, "Tbyte": 1e6},
}
SECONDS = 180  # for ncu
_NO_STALL = ("selected", "not_selected")  # the warp that issues, and those that could have


class NoCounters(RuntimeError):
    """Nsight Compute is missing, was refused the counters, or saw no kernel; the message says which."""


def counters(names, B: int, T: int, N: int, H: int, *, is_causal: bool = False) -> dict[str, dict]:
    """Counters of the main kernel of each of `names` (see `functions`), in bfloat16.

    Returns:
      {name: {what: number}}, with `COUNTERS`' names, and "most waits for": the reason for which warps most often
      could not issue.

    Raises:
      NoCounters: ncu is missing, refused, silent or strange; the message says which.
      ValueError: a name that `functions` does not have.
    """
    names = [names] if isinstance(names, str) else list(names)
    if wrong := [name for name in names if name not in functions()]:
        raise ValueError(f"unknown {wrong[0]!r}: what can be profiled are {', '.join(functions())}")
    if not shutil.which("ncu"):
        raise NoCounters("ncu is not on PATH: it comes with the CUDA toolkit and with NVIDIA's containers")
    command = [
        "ncu", "--clock-control", "none", "--csv", "--page", "raw", "--section", "WarpStateStats",
        "--metrics", ",".join(COUNTERS), "--kernel-name", "regex:flash|hopper|fmha|sdpa",
        sys.executable, "-m", "attnlab.nsight", *map(str, (B, T, N, H, int(is_causal))), *names,
    ]  # fmt: skip
    said, errors = _run(command)
    if "ERR_NVGPUCTRPERM" in said + errors:
        raise NoCounters("this user may not read the counters: see NVIDIA's page on ERR_NVGPUCTRPERM")
    rows = parse(said)
    if len(rows) != len(names):
        last = " ".join((errors.strip() or said.strip() or "it said nothing").splitlines()[-1:])[:200]
        raise NoCounters(f"ncu saw {len(rows)} kernels of {len(names)}; its last words: {last}")
    return dict(zip(names, rows, strict=True))


def _run(command) -> tuple[str, str]:
    # The profiled process must not take what this one preallocated, and must end with ncu.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    try:
        process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
    except OSError as e:
        raise NoCounters(f"ncu does not start: {e}") from None
    try:
        return process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoCounters(f"ncu did not end within {SECONDS} seconds: is another profiler attached?") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def parse(text: str) -> list[dict]:
    """The rows of `ncu --csv --page raw`, a dict a kernel in order of their launch; see `counters`.

    Raises `NoCounters` for a time or a size in a unit that is not known.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    header, *rest = csv.reader(io.StringIO("\n".join(lines[start:])))
    units, *body = [line for line in rest if len(line) == len(header)] or [[]]
    found = []
    for line in body:
        values = {}
        for name, value in zip(header, line, strict=True):
            try:
                values[name] = float(value.replace(",", ""))
            except ValueError:
                continue  # text
        stalls = {m[1]: v for name, v in values.items() if (m := _STALL.fullmatch(name)) and m[1] not in _NO_STALL}
        row = {}
        for name, what in COUNTERS.items():
            if name in values:
                row[what] = values[name] * _factor(name, units[header.index(name)], what)
        if stalls:
            row["most waits for"] = max(stalls, key=stalls.get).replace("_", " ")
        if row:
            found.append(row)
    return found


def _factor(name: str, unit: str, what: str) -> float:
    known = _UNITS.get(what.rsplit(", ", 1)[-1])
    if known and unit not in known:
        raise NoCounters(f"ncu gave {name} in {unit!r}: add that unit to attnlab.nsight")
    return known[unit] if known else 1


def functions() -> dict:
    """{name: function of q, k, v and is_causal} of what can be profiled."""
    from attnlab.attention import cudnn_attention
    from attnlab.flash import flash_attention, hopper_attention

    return {
        "flash": flash_attention,
        "hopper": lambda q, k, v, is_causal: hopper_attention(q, k, v, is_causal=is_causal)[0],
        "cudnn": cudnn_attention,
    }


def main(arguments: list[str]) -> None:
    import jax

    from attnlab.inputs import qkv

    B, T, N, H, causal, *names = arguments  # a missing one raises
    sizes = map(int, (B, T, N, H))
    q, k, v = qkv(*sizes, dtype="bfloat16")
    for name in names:
        attend = jax.jit(functions()[name], static_argnames="is_causal")
        jax.block_until_ready(attend(q, k, v, is_causal=causal == "1"))


if __name__ == "__main__":
    main(sys.argv[1:])
