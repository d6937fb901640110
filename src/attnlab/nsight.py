"""Hardware counters of a kernel, read by Nsight Compute in a process of its own.

python -m attnlab.nsight B T N H CAUSAL NAME...    runs each variant once, for the profiler to look at
"""

import csv
import io
import re
import shutil
import subprocess
import sys

# Counter of Nsight Compute → what the course calls it. Percentages are of what the unit could do while it was on.
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
_UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1e3, "byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1, "Gbyte": 1e3}
_NO_STALL = ("selected", "not_selected")  # the warp that issues, and those that could have


class NoCounters(RuntimeError):
    """Nsight Compute is missing, was refused the counters, or saw no kernel; the message says which."""


def counters(names, B: int, T: int, N: int, H: int, *, is_causal: bool = False) -> dict[str, dict]:
    """Counters of the main kernel of each of `names` (see `functions`), in bfloat16.

    Returns:
      {name: {what: number}}, with `COUNTERS`' names, and "most waits for": the reason for which warps most often
      could not issue.

    Raises:
      NoCounters: with what to do about it.
    """
    if not shutil.which("ncu"):
        raise NoCounters("ncu is not on PATH: it comes with the CUDA toolkit and with NVIDIA's containers")
    command = [
        "ncu", "--clock-control", "none", "--csv", "--page", "raw", "--section", "WarpStateStats",
        "--metrics", ",".join(COUNTERS), "--kernel-name", "regex:flash|hopper|fmha|sdpa",
        sys.executable, "-m", "attnlab.nsight", *map(str, (B, T, N, H, int(is_causal))), *names,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        raise NoCounters("ncu did not end within three minutes: is another profiler attached?") from None
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise NoCounters("this user may not read the counters: see NVIDIA's page on ERR_NVGPUCTRPERM")
    rows = parse(done.stdout)
    if len(rows) != len(names):
        last = " ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])[:200]
        raise NoCounters(f"ncu saw {len(rows)} kernels of {len(names)}: {last}")
    return dict(zip(names, rows, strict=True))


def parse(text: str) -> list[dict]:
    """The rows of `ncu --csv --page raw`, a dict a kernel in order of their launch; see `counters`."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    header, units, *body = csv.reader(io.StringIO("\n".join(lines[start:])))
    found = []
    for line in body:
        values = {}
        for name, unit, value in zip(header, units, line, strict=False):
            try:
                values[name] = float(value.replace(",", "")) * _UNITS.get(unit, 1)
            except ValueError:
                continue  # text
        stalls = {m[1]: v for name, v in values.items() if (m := _STALL.fullmatch(name)) and m[1] not in _NO_STALL}
        row = {what: values[name] for name, what in COUNTERS.items() if name in values}
        if stalls:
            row["most waits for"] = max(stalls, key=stalls.get).replace("_", " ")
        found.append(row)
    return found


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

    *sizes, causal = map(int, arguments[:5])
    q, k, v = qkv(*sizes, dtype="bfloat16")
    for name in arguments[5:]:
        jax.block_until_ready(jax.jit(functions()[name], static_argnames="is_causal")(q, k, v, is_causal=bool(causal)))


if __name__ == "__main__":
    main(sys.argv[1:])
