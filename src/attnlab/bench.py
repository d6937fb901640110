"""`attnlab bench`: what `benchmark` itself costs, and its clock beside Nsight Compute's where that exists.

CUPTI and Nsight Compute are both profiler clients and can't share a process, so each measures in a
process of its own, one after the other on the same device.
"""

import csv
import io
import shutil
import statistics
import subprocess
import sys
import time

from attnlab import device as _device
from attnlab.attention import VARIANTS
from attnlab.display import format_ms, show_table
from attnlab.features import has
from attnlab.inputs import qkv
from attnlab.timing import benchmark

SHAPES = [(4, 128, 8, 64), (4, 2048, 16, 128)]
SAMPLES = 20
AGREE = 0.08  # how far the two clocks' medians may be apart

# What Nsight Compute runs: one warm-up, then SAMPLES calls, in a process without CUPTI.
PROBE = """
import jax
from attnlab.attention import variant
from attnlab.inputs import qkv
q, k, v = qkv({B}, {T}, {N}, {H}, dtype="bfloat16")
call = jax.jit(variant("cudnn"))
for _ in range({samples} + 1):
    jax.block_until_ready(call(q, k, v))
"""


def cost() -> list[tuple]:
    """Rows (variant, shape, time, clock, compile s, seconds that `benchmark` took in all) on this device."""
    here = _device.current()
    cases = [(name, shape) for shape in SHAPES for name in VARIANTS] if here.kind == "gpu" else [
        (name, (2, 64, 4, 32)) for name in ("naive", "xla")
    ]  # fmt: skip
    rows = []
    for name, shape in cases:
        if name == "cudnn" and not has("cudnn_attention"):
            continue
        q, k, v = qkv(*shape, dtype="bfloat16" if here.kind == "gpu" else "float32")
        start = time.perf_counter()
        row = benchmark(VARIANTS[name], q, k, v, label=name, table="bench")
        took = time.perf_counter() - start
        rows.append((name, str(row.shape), format_ms(row.ms), row.clock, format_ms(row.wall_ms), row.samples,
                     f"{row.compile_s:.2f}", f"{took:.2f}"))  # fmt: skip
    return rows


def ncu_times(shape: tuple[int, int, int, int]) -> list[float]:
    """Milliseconds of the cuDNN attention kernel of SAMPLES calls by Nsight Compute, clocks and caches left alone.

    Raises:
      RuntimeError: ncu failed; the message holds its last lines.
    """
    B, T, N, H = shape
    probe = PROBE.format(B=B, T=T, N=N, H=H, samples=SAMPLES)
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--metrics", "gpu__time_duration.sum",
               "--kernel-name", "regex:(sdpa|fmha|flash)", "--csv", "--print-units", "base",
               sys.executable, "-c", probe]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        raise RuntimeError("ncu failed: " + " / ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))
    rows = [r for r in csv.DictReader(io.StringIO(done.stdout[start:])) if "gpu__time_duration" in r["Metric Name"]]
    return [float(r["Metric Value"].replace(",", "")) / 1e6 for r in rows][1:]  # ns; the first call was the warm-up


def against_ncu(shape) -> tuple:
    """One row: shape, CUPTI median, Nsight Compute median, samples of each, difference, verdict."""
    q, k, v = qkv(*shape, dtype="bfloat16")
    mine = benchmark(VARIANTS["cudnn"], q, k, v, label="cudnn", table="bench ncu", seconds=2.0)
    theirs = ncu_times(shape)
    apart = mine.ms / statistics.median(theirs) - 1
    return (str(mine.shape), mine.clock, format_ms(mine.ms), mine.samples, format_ms(statistics.median(theirs)),
            len(theirs), f"{apart:+.1%}", abs(apart) <= AGREE)  # fmt: skip


def main() -> int:
    """Print both tables. 1 if the clocks disagree at the larger shape, else 0."""
    here = _device.current()
    show_table(
        ["variant", "shape", "time", "clock", "wall", "samples", "compile (s)", "benchmark in all (s)"],
        cost(),
        title=f"What benchmark costs on {here.name}",
    )
    if here.kind != "gpu" or not has("cudnn_attention"):
        print("Nsight Compute is not asked: no GPU that runs cuDNN attention here.")
        return 0
    if not shutil.which("ncu"):
        print("Nsight Compute is not asked: no `ncu` on the PATH.")
        return 0
    rows = [against_ncu(shape) for shape in SHAPES]
    show_table(
        [
            "shape",
            "clock",
            "benchmark",
            "samples",
            "Nsight Compute",
            "samples",
            "apart",
            f"within {AGREE:.0%}",
        ],
        rows,
        title=f"The clock against Nsight Compute on {here.name}",
    )
    # The small kernel is a few microseconds, where a profiler's own granularity shows: reported, not judged.
    return 0 if rows[-1][-1] else 1
