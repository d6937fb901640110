"""`attnlab clock`: what `benchmark` itself costs, and its clock beside Nsight Compute's where that exists.

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
from attnlab.evidence import program
from attnlab.features import has
from attnlab.inputs import qkv
from attnlab.timing import _chain, benchmark

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


COST = ["variant", "shape", "time", "clock", "by chain", "wall", "samples", "compile (s)", "benchmark in all (s)"]


def cost() -> list[tuple]:
    """Rows as COST names them: the row's clock beside the other clocks, and what `benchmark` took in all."""
    here = _device.current()
    cases = [(name, shape) for shape in SHAPES for name in VARIANTS if name != "cudnn" or has("cudnn_attention")]
    if here.kind == "cpu":
        cases = [(name, (2, 64, 4, 32)) for name in ("naive", "xla")]
    rows = []
    for name, shape in cases:
        fn, args = VARIANTS[name], qkv(*shape, dtype="bfloat16" if here.kind == "gpu" else "float32")
        start = time.perf_counter()
        row = benchmark(fn, *args, label=name, table="bench")
        took = time.perf_counter() - start
        chained = statistics.median(_chain(fn, args, program(fn, *args), seconds=0.3))
        rows.append(
            (name, str(row.shape), format_ms(row.ms), row.clock, format_ms(chained), format_ms(row.wall_ms),
             row.samples, f"{row.compile_s:.2f}" if row.compile_s else "found", f"{took:.2f}")
        )  # fmt: skip
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


def against_ncu(shape) -> tuple[list, float]:
    """One row (shape, clock, median, samples, Nsight Compute's median, samples, difference), and the difference."""
    q, k, v = qkv(*shape, dtype="bfloat16")
    mine = benchmark(VARIANTS["cudnn"], q, k, v, label="cudnn", table="bench ncu", seconds=2.0)
    theirs = ncu_times(shape)
    apart = mine.ms / statistics.median(theirs) - 1
    row = [str(mine.shape), mine.clock, format_ms(mine.ms), mine.samples, format_ms(statistics.median(theirs)),
           len(theirs), f"{apart:+.1%}"]  # fmt: skip
    return row, apart


def main() -> int:
    """Print both tables. 1 if the clocks disagree at the larger shape, else 0."""
    here = _device.current()
    show_table(COST, cost(), title=f"The clocks, and what benchmark costs, on {here.name}")
    if here.kind != "gpu" or not has("cudnn_attention"):
        print("Nsight Compute is not asked: no GPU that runs cuDNN attention here.")
        return 0
    if not shutil.which("ncu"):
        print("Nsight Compute is not asked: no `ncu` on the PATH.")
        return 0
    rows = [against_ncu(shape) for shape in SHAPES]
    show_table(
        ["shape", "clock", "benchmark", "samples", "Nsight Compute", "samples", "apart"],
        [row for row, _ in rows],
        title=f"The clock against Nsight Compute, cuDNN attention in bfloat16 on {here.name}",
    )
    # A kernel of a few microseconds is as short as a profiler's own overhead: shown, and not judged.
    apart = abs(rows[-1][1])
    print(f"At {rows[-1][0][0]} they are {apart:.1%} apart; {AGREE:.0%} are allowed.")
    return 0 if apart <= AGREE else 1
