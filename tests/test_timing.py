"""Clocks: no time without waiting, none below the bound, none of calls that the compiler merged."""

import dataclasses
import os
import platform
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import device, evidence, timing
from attnlab.attention import naive_attention, variant
from attnlab.device import CEILINGS, Device
from attnlab.inputs import qkv
from attnlab.records import LOG, Records, Shape
from attnlab.timing import ImpossibleTime, MergedCalls, Work, benchmark, chained, check_time, work_of

L4 = Device("NVIDIA L4", "gpu", (8, 9), ceilings=CEILINGS["NVIDIA L4"])
H200 = Device("NVIDIA H200", "gpu", (9, 0), ceilings=CEILINGS["NVIDIA H200"])
UNKNOWN = Device("NVIDIA X1", "gpu", (9, 0))
CPU = Device("a CPU", "cpu")


@pytest.fixture(autouse=True)
def log():
    LOG.open("00_timing")
    return LOG


def spec(shape: Shape, dtype="bfloat16"):
    """q, k, v as shapes only."""
    q, k = (shape.B, shape.T, shape.N, shape.H), (shape.B, shape.S, shape.K, shape.H)
    return [jax.ShapeDtypeStruct(x, dtype) for x in (q, k, k)]


# ---- the bound ---------------------------------------------------------------------------------------------

DEFAULT = work_of(spec(Shape.square(4, 128, 8, 64)))
LONG = work_of(spec(Shape.square(4, 2048, 16, 128)))
DECODE = work_of(spec(Shape(16, 1, 8192, 16, 16, 128)))


@pytest.mark.parametrize(
    "work, bound",
    [
        # 4·4·8·64·128² = 134 MFLOP at 121 TFLOP/s. 2 MiB fit in 48 MiB of cache: at 300 GB/s they would take 7 µs.
        (DEFAULT, 0.0011092),
        # 137.4 GFLOP at 121 TFLOP/s; (134.2 − 50.3) MB at 300 GB/s are 0.28 ms.
        (LONG, 1.13586),
        # 2·16·8192·16·128 numbers of 2 bytes and a little, less the cache, at 300 GB/s.
        (DECODE, 3.41181),
    ],
    ids=["default", "long", "decode"],
)
def test_the_bound_of_an_l4(work, bound):
    assert work.bound_ms(L4) == pytest.approx(bound, rel=1e-4)
    assert check_time(bound * 1.001, work, L4) == pytest.approx(bound, rel=1e-4)
    with pytest.raises(ImpossibleTime):
        check_time(bound * 0.999, work, L4)


def test_inputs_in_the_cache_may_be_faster_than_the_memory():
    assert 2e-3 < DEFAULT.bytes / 300e6  # 2 µs is less than DRAM would need
    check_time(2e-3, DEFAULT, L4)


def test_an_impossible_time_comes_with_its_arithmetic():
    with pytest.raises(ImpossibleTime) as error:
        check_time(0.05, LONG, L4)
    text = str(error.value)
    for part in ("0.05 ms", "NVIDIA L4", "B4 T2048 N16 H128", "137.439 GFLOP", "121 TFLOP/s", "1.136 ms", "134.22 MB",
                 "48 MiB", "300 GB/s", "L4 datasheet", "block_until_ready"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize(
    "work, d",
    [
        (LONG, UNKNOWN),
        (Work(None, "bfloat16", "full", None, None), H200),
        (work_of(spec(Shape.square(1, 8, 1, 8), "int8")), L4),
        (work_of([jax.ShapeDtypeStruct((8, 8), "float32")]), H200),
    ],
    ids=["unknown device", "unknown work", "unknown dtype", "not attention"],
)  # fmt: skip
@pytest.mark.parametrize("ms", [0.0, 1e-9, 1.0])
def test_where_something_is_unknown_there_is_no_bound(work, d, ms):
    assert work.bound_ms(d) is None and check_time(ms, work, d) is None


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan")])
def test_zero_negative_and_undefined_times_are_impossible(ms):
    with pytest.raises(ImpossibleTime):
        check_time(ms, DEFAULT, L4)


def test_work_given_by_hand_has_a_bound_too():
    work = work_of([jax.ShapeDtypeStruct((8192, 8192), "bfloat16")], flops=2 * 8192**3, nbytes=6 * 8192**2)
    assert work.bound_ms(H200) == pytest.approx(1.11173, rel=1e-3)
    with pytest.raises(ImpossibleTime, match="this call"):
        check_time(1.0, work, H200)


@pytest.mark.parametrize(
    "options, mask, pairs",
    [({}, "full", 64), (dict(is_causal=True), "causal", 36), (dict(local_window_size=(1, 0)), "window (1, 0)", 15),
     (dict(local_window_size=2), "window (2, 2)", 34),
     (dict(local_window_size=(2, 0), is_causal=True), "window (2, 0) causal", 21)],
    ids=str,
)  # fmt: skip
def test_hidden_pairs_earn_no_flops(options, mask, pairs):
    work = work_of(spec(Shape.square(1, 8, 2, 4)), **options)
    assert (work.mask, work.flops) == (mask, 4 * 2 * 4 * pairs)
    row = benchmark(naive_attention, *qkv(1, 8, 2, 4), label="x", seconds=0.01, device=CPU, **options)
    assert row.mask == mask and row.tflops == pytest.approx(4 * 2 * 4 * pairs / row.ms / 1e9)


# ---- on the CPU, for real ----------------------------------------------------------------------------------


def sleeper(seconds: float):
    """A function whose result takes `seconds` to come, however soon its call returns."""

    def slow(x):
        time.sleep(seconds)
        return np.asarray(x)

    return lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


X = jnp.ones((4, 4))


def test_a_clock_waits_for_what_a_call_only_queues(monkeypatch):
    """A call of many products returns at once on a CPU too, and its result comes later."""
    x = jnp.ones((256, 256)) / 256
    many = jax.jit(lambda x: jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=100)[0])
    blocked = []
    for _ in range(5):
        start = time.perf_counter()
        pending = many(x)
        queued = time.perf_counter() - start
        jax.block_until_ready(pending)
        blocked.append((time.perf_counter() - start) * 1e3)
    assert queued * 1e3 < min(blocked) / 4  # or this test could not tell
    row = benchmark(many, x, label="many", seconds=0.2, device=CPU)
    assert row.p20 > min(blocked) / 3 and row.wall_ms > min(blocked) / 3
    fake_cupti(monkeypatch, RuntimeError("no"))
    assert benchmark(lambda x: many(x) @ x, x, label="many", seconds=0.1, device=UNKNOWN).ms > min(blocked) / 3


def test_a_time_is_one_of_work_that_was_waited_for():
    row = benchmark(sleeper(0.02), X, label="slow", seconds=0.2, device=CPU)
    assert 20 <= row.p20 <= row.ms <= row.p80 and row.ms < 200
    assert row.clock == "wall" and row.wall_ms == row.ms and row.kernels == () and row.note == ""
    assert (row.flops, row.bytes, row.bound_ms, row.tflops, row.shape) == (None,) * 5


@pytest.mark.parametrize("sleep, seconds, least, most", [(0.02, 0.2, 3, 10), (0.2, 0.1, 3, 3), (0, 0.2, 10, 1000)])
def test_the_time_spent_is_bounded_and_the_samples_counted(sleep, seconds, least, most):
    start = time.perf_counter()
    row = benchmark(sleeper(sleep), X, label="x", seconds=seconds, device=CPU)
    spent = time.perf_counter() - start - row.compile_s
    assert least <= row.samples <= most
    assert spent < seconds + 5 * sleep + 1


def test_compiling_is_kept_apart():
    def slow_to_trace(x):
        time.sleep(0.3)
        return x * 2

    first, second = (benchmark(slow_to_trace, X, label="x", seconds=0.02, device=CPU) for _ in range(2))
    assert min(first.compile_s, second.compile_s) >= 0.3
    assert max(first.ms, first.wall_ms, second.ms) < 100


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted before"])
def test_measuring_again_still_compiles(wrap):
    fn = wrap(lambda q, k, v: jax.nn.dot_product_attention(q, k, v))
    args = qkv(1, 16, 2, 8)
    fn(*args)
    seconds = [benchmark(fn, *args, label="x", seconds=0.01).compile_s for _ in range(3)]
    assert min(seconds) > 0.1 * max(seconds) and min(seconds) > 5e-3


def test_the_spread_is_that_of_the_samples(monkeypatch):
    monkeypatch.setattr(timing, "_wall", lambda *_: [7.0, 1, 11, 3, 9, 5, 2, 10, 4, 8, 6])
    row = benchmark(lambda x: x + 1, X, label="x", device=CPU)
    assert (row.p20, row.ms, row.p80, row.samples) == (3, 6, 9, 11)


def test_a_row_says_what_ran_and_is_kept(log):
    args = qkv(2, 32, 4, 16, K=2, dtype="bfloat16")
    row = benchmark(variant("xla"), *args, label="xla", table="t", seconds=0.01, check=lambda out: 0.25)
    assert list(log.records) == [row] and Records(log.records).timing("xla", table="t") is row
    assert (str(row.shape), row.dtype, row.error, row.notebook) == ("B2 T32 N4 K2 H16", "bfloat16", 0.25, "00_timing")
    assert row.bytes == 2 * (2 * 2 * 32 * 4 * 16 + 2 * 2 * 32 * 2 * 16) and row.flops == 4 * 2 * 4 * 16 * 32 * 32
    assert row.temp_bytes is not None and row.env == device.environment()


def test_the_check_sees_the_output_before_any_clock_and_can_refuse(monkeypatch, log):
    seen = []

    def check(out):
        seen.append(out)
        raise ArithmeticError("wrong")

    monkeypatch.setattr(timing, "_wall", lambda *_: pytest.fail("a clock ran"))
    with pytest.raises(ArithmeticError, match="wrong"):
        benchmark(lambda x: x + 1, X, label="x", check=check)
    assert (seen[0] == 2).all() and not log.records


def test_running_out_of_memory_on_the_way_is_said_so(log):
    def burst(x):
        def fail(_):
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(MemoryError, match="burst.*out of memory on a CPU"):
        benchmark(burst, X, label="burst", device=CPU)
    assert not log.records


def test_a_clock_that_did_not_wait_is_caught_here_too(monkeypatch):
    monkeypatch.setattr(timing, "_wall_once", lambda *_: 1e-7)
    with pytest.raises(ImpossibleTime, match="is impossible on"):
        benchmark(naive_attention, *qkv(1, 64, 2, 32), label="x", seconds=0.01)


def test_honest_cpu_times_are_well_above_the_loose_cpu_bound():
    row = benchmark(naive_attention, *qkv(2, 256, 4, 64), label="x", seconds=0.05)
    assert row.bound_ms and row.ms > 1.5 * row.bound_ms


# ---- a faked GPU -------------------------------------------------------------------------------------------

RUNS = [[("gemm", 1.0), ("softmax", 5.0)], [("gemm", 2.0), ("softmax", 1.0)], [("gemm", 4.0), ("softmax", 4.0)]]
SMALL = dict(B=1, T=64, N=2, H=16)


def fake_cupti(monkeypatch, runs):
    def cupti(*_):
        if isinstance(runs, Exception):
            raise runs
        return runs

    monkeypatch.setattr(timing, "_cupti", cupti)


def test_with_cupti_the_time_is_the_sum_of_the_kernels(monkeypatch):
    fake_cupti(monkeypatch, RUNS)
    row = benchmark(naive_attention, *qkv(**SMALL), label="x", seconds=0.05, device=H200)
    assert (row.clock, row.ms, row.samples, row.note) == ("cupti", 6.0, 3, "")  # of 6, 3 and 8
    assert row.kernels == (("gemm", 2.0), ("softmax", 4.0))
    assert row.p20 == pytest.approx(4.2) and row.p80 == pytest.approx(7.2)
    assert row.wall_ms != row.ms and row.bound_ms == pytest.approx(work_of(qkv(**SMALL)).bound_ms(H200))


def test_cupti_is_asked_for_five_to_twenty_calls(monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "_cupti", lambda fn, args, count: asked.append(count) or RUNS)
    for sleep, seconds in ((0.0, 5.0), (0.02, 0.2), (0.05, 0.05)):
        benchmark(sleeper(sleep), X, label="x", seconds=seconds, device=UNKNOWN)
    assert asked[0] == 20 and 5 <= asked[1] <= 10 and asked[2] == 5


@pytest.mark.parametrize("ms", [0.0, 1e-6])
def test_a_device_time_below_the_bound_is_refused_and_not_kept(monkeypatch, log, ms):
    fake_cupti(monkeypatch, [[("gemm", ms)]] * 5)
    with pytest.raises(ImpossibleTime):
        benchmark(naive_attention, *qkv(1, 128, 8, 64), label="x", seconds=0.02, device=L4)
    assert not log.records


def test_an_unknown_gpu_is_timed_without_bound(monkeypatch):
    fake_cupti(monkeypatch, [[("gemm", 1e-6)]] * 5)
    row = benchmark(naive_attention, *qkv(**SMALL), label="x", seconds=0.02, device=UNKNOWN)
    assert row.bound_ms is None and row.ms == 1e-6


def test_two_kernels_of_one_name_stay_two(monkeypatch):
    fake_cupti(monkeypatch, [[("copy", 1.0), ("gemm", 2.0), ("copy", 3.0)]] * 5)
    row = benchmark(naive_attention, *qkv(**SMALL), label="x", seconds=0.02, device=UNKNOWN)
    assert row.kernels == (("copy", 1.0), ("gemm", 2.0), ("copy", 3.0)) and row.ms == 6.0


REFUSALS = {
    "no privilege": RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES: ask\nthe administrator"),
    "runs that differ": [[("a", 1.0)], [("a", 1.0), ("b", 1.0)]],
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_cupti_falls_back_to_a_chain_and_says_so(monkeypatch, refusal):
    fake_cupti(monkeypatch, refusal)
    sleep = sleeper(0.005)
    row = benchmark(lambda x: sleep(x) @ x, jnp.eye(16), label="x", seconds=0.1, device=UNKNOWN)
    assert row.clock == "chain" and row.kernels == ()
    assert row.note.startswith("no CUPTI (") and "chain" in row.note and "\n" not in row.note
    if isinstance(refusal, Exception):
        assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in row.note
    assert row.p20 <= row.ms <= row.p80 and row.samples >= 3
    assert 3 < row.ms < 30  # the slope of 5 ms calls


def test_attention_can_be_chained(monkeypatch):
    args = qkv(2, 256, 4, 64)
    single = evidence.program(naive_attention, *args)
    assert len(timing._chain(naive_attention, args, single, 0.1)) >= 3


UNCHAINABLE = {
    "another shape": (lambda x: x[:2] @ x, "take the place"),
    "another dtype": (lambda x: (x @ x).astype(jnp.bfloat16), "take the place"),
    "two outputs": (lambda x: (x @ x, x), "take the place"),
    "nothing to count": (lambda x: x + 1, "matrix products"),
}


@pytest.mark.parametrize("fn, why", UNCHAINABLE.values(), ids=UNCHAINABLE)
def test_what_cannot_be_chained_is_timed_by_the_host_and_says_so(monkeypatch, fn, why):
    fake_cupti(monkeypatch, RuntimeError("CUPTI is busy"))
    row = benchmark(fn, X, label="x", seconds=0.02, device=UNKNOWN)
    assert row.clock == "wall" and row.ms == row.wall_ms
    assert "CUPTI is busy" in row.note and why in row.note and "dispatch included" in row.note


def test_a_chain_too_short_for_the_clock_is_not_believed(monkeypatch):
    fake_cupti(monkeypatch, RuntimeError("no"))
    monkeypatch.setattr(timing, "_wall_once", lambda *_: 1.0)
    row = benchmark(naive_attention, *qkv(**SMALL), label="x", seconds=0.01, device=UNKNOWN)
    assert (row.clock, row.ms) == ("wall", 1.0) and "too short" in row.note


def test_cupti_that_reports_no_kernel_is_a_refusal(monkeypatch):
    from jax.experimental.mosaic.gpu import profiler

    for reported in (None, []):
        monkeypatch.setattr(profiler, "measure", lambda *_, _r=reported, **__: lambda *a: (a, _r))
        with pytest.raises(RuntimeError, match="no kernel"):
            timing._cupti(naive_attention, (X,), 5)


# ---- calls that the compiler merges or hoists --------------------------------------------------------------


def ten_times(fn, q, k, v):
    return sum(fn(q, k, v) for _ in range(10))


def ten_in_a_loop(fn, q, k, v):
    return jax.lax.fori_loop(0, 10, lambda _, total: total + fn(q, k, v), jnp.zeros_like(q))


def ten_in_a_scan(fn, q, k, v):
    return jax.lax.scan(lambda total, _: (total + fn(q, k, v), None), jnp.zeros_like(q), None, length=10)[0]


def only_the_last(fn, q, k, v):
    return [fn(q * (i + 1), k, v) for i in range(10)][-1]


@pytest.mark.parametrize("repeat", [ten_times, ten_in_a_loop, ten_in_a_scan, only_the_last], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["naive", "xla"])
def test_repeated_calls_that_run_once_are_refused(name, repeat):
    args = qkv(1, 16, 2, 8)
    single = evidence.program(variant(name), *args)
    repeated = evidence.program(lambda *a: repeat(variant(name), *a), *args)
    assert repeated.matmuls == single.matmuls == 2
    with pytest.raises(MergedCalls, match="20 matrix products.*2"):
        timing.require_repeated(single, repeated, 10)


@pytest.mark.parametrize("name", ["naive", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chained_calls_all_run(name, dtype):
    args = qkv(1, 16, 2, 8, dtype=dtype)
    single = evidence.program(variant(name), *args)
    chain = evidence.program(chained(variant(name), 10), *args)
    assert chain.matmuls == 20
    timing.require_repeated(single, chain, 10)


def test_a_chain_feeds_each_call_with_the_last_output():
    assert chained(lambda x, y: 2 * x + y, 3)(1, 10) == 2 * (2 * (2 * 1 + 10) + 10) + 10


def test_a_program_without_products_proves_nothing():
    nothing = dataclasses.replace(evidence.parse(""), matmuls=0)
    with pytest.raises(MergedCalls):
        timing.require_repeated(nothing, nothing, 4)


def test_the_host_clock_runs_at_least_three_times():
    calls = []
    samples = timing._wall(lambda x: calls.append(x) or X, (X,), 0.0)
    assert len(samples) == 3 and len(calls) == 4 and statistics.median(samples) >= 0


# ---- what JAX finds in its persistent cache ----------------------------------------------------------------

TWICE = """
import os, sys
import jax, jax.numpy as jnp
import attnlab as lab
from attnlab import session, timing
session.keep_compiled(sys.argv[1])
if sys.argv[2:]:  # what keep_compiled leaves alone on an old JAX: its words on stderr, and not its result
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
q = jnp.ones((1, 16, 2, 8))
row = lab.benchmark(lambda q, k, v: q * 2 + k + v, q, q, q, label="sum", flops=1, nbytes=1, seconds=0.01)
print(row.compile_s, timing.compile_timed(lambda x: jnp.sin(x) + 2, q)[1])
"""


def test_what_was_found_in_the_cache_has_no_compile_time(tmp_path):
    def run():
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", TWICE, str(tmp_path), "all"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()[-2:]

    assert all(float(seconds) > 0 for seconds in run())
    assert run() == ["None", "None"]


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older JAX keeps no programs of a CPU: its loader is noisy")
def test_a_machine_keeps_its_programs_in_a_folder_of_its_own(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", TWICE, str(tmp_path)], env=env, capture_output=True, check=True)
    assert [p.name for p in tmp_path.iterdir()] == [platform.node()] and any((tmp_path / platform.node()).iterdir())
