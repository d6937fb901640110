"""A row is checked before it is timed, or it is the refusal in words; memory that does not suffice is said so."""

import math

import jax
import jax.numpy as jnp
import pytest

import attnlab as lab
from attnlab import inputs, records, timing
from attnlab.records import Finding, Timing

X = jnp.ones((8, 8))


@pytest.fixture(autouse=True)
def log():
    records.LOG.open("07_transformer_engine_fp8")
    return records.LOG


def test_a_row_within_its_error_is_timed_and_carries_it(log):
    row = lab.measure(lambda x: 2 * x, X, label="double", table="t", error=lambda out: float(abs(out - 2).max()),
                      allowed=1e-3, flops=64, nbytes=512, seconds=0.005)  # fmt: skip
    assert isinstance(row, Timing) and row.error == 0 and row.table == "t" and row.dtype == "float32"
    assert log.records == [row]


@pytest.mark.parametrize("off", [0.2, math.nan, math.inf])
def test_a_row_beyond_it_is_refused_and_no_clock_runs(log, monkeypatch, off):
    monkeypatch.setattr(timing, "_wall", lambda *_: pytest.fail("a clock ran"))
    row = lab.measure(lambda x: x, X, label="wrong", table="t", error=lambda out: off, allowed=0.1, flops=1, nbytes=1)
    assert isinstance(row, Finding) and row.name == "refused" and row.table == "t"
    assert row.value == f"ArithmeticError: relative error {off:.2g}, and 0.1 is allowed"
    assert log.records == [row]


def test_what_the_function_raises_is_the_refusal_in_its_own_words(log):
    def attend(q, k, v):
        raise NotImplementedError("H must be even\nand more")

    q, k, v = lab.qkv(1, 8, 2, 8, dtype="bfloat16")
    row = lab.measure(attend, q, k, v, label="x", table="t", error=float, allowed=1, is_causal=True)
    assert row.value == "NotImplementedError: H must be even"
    assert (row.shape, row.dtype, row.mask) == (lab.Shape.of(q, k), "bfloat16", "causal")


def test_the_arithmetic_can_be_of_another_dtype_than_the_first_argument(log):
    row = lab.benchmark(lambda x: x @ x, X, label="x", dtype="float8_e4m3fn", flops=1024, nbytes=0, seconds=0.005)
    assert row.dtype == "float8_e4m3fn"
    h200 = lab.device.Device("NVIDIA H200", "gpu", (9, 0), ceilings=lab.device.CEILINGS["NVIDIA H200"])
    half, eight = (timing.work_of((X,), flops=1e12, nbytes=0, dtype=d).bound_ms(h200) for d in ("bfloat16", row.dtype))
    assert half == pytest.approx(2 * eight, rel=0.01)


@pytest.mark.parametrize(
    "words, more",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 48.00GiB.", " (it asked for 48.00GiB)"),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 123456 bytes.", " (it asked for 123456 bytes)"),
        ("RESOURCE_EXHAUSTED: no room", ""),
    ],
)
def test_exhausted_memory_says_what_and_where(words, more):
    h200 = lab.device.Device("NVIDIA H200", "gpu")
    with pytest.raises(MemoryError) as caught, inputs.memory_errors("xla at B4", h200):
        raise jax.errors.JaxRuntimeError(words)
    assert str(caught.value) == f"xla at B4 ran out of memory on NVIDIA H200{more}"


def test_other_runtime_errors_pass_unchanged():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), inputs.memory_errors("x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")


def test_memory_that_runs_out_while_compiling_is_a_memory_error_too(monkeypatch):
    def lower(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: autotuning failed")

    monkeypatch.setattr(timing.jax, "jit", lambda fn: type("J", (), {"lower": staticmethod(lower)}))
    with pytest.raises(MemoryError, match="x at this size ran out of memory"):
        lab.benchmark(lambda x: x, X, label="x")


def test_without_a_gpu_there_are_no_eager_kernels():
    assert lab.eager_kernels(lambda x: x + 1, X) is None
