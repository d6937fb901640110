"""On a real GPU: the clocks agree with each other, and what ran is seen."""

import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from attnlab import device, evidence, nsight, timing
from attnlab.attention import TOLERANCE, naive_attention, relative_error, variant
from attnlab.features import feature, has
from attnlab.flash import tiles
from attnlab.flash.backward import backward as flash_backward
from attnlab.flash.forward import forward as flash_forward
from attnlab.inputs import qkv
from attnlab.sweeps import sweep
from attnlab.timing import benchmark


def missing() -> str:
    """Why these tests can't run here, or nothing."""
    try:
        here = device.current()
    except device.DeviceNotFound as e:
        return str(e)
    if here.kind != "gpu":
        return f"no NVIDIA GPU: JAX computes on {here.name}"
    return "" if has("cudnn_attention") else feature("cudnn_attention").reason


WHY_NOT = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "never")]


@pytest.fixture(scope="module")
def default():
    return qkv(4, 128, 8, 64, dtype="bfloat16")


@pytest.fixture(scope="module")
def large():
    return qkv(4, 2048, 16, 128, dtype="bfloat16")


def test_cupti_works():
    assert feature("cupti").ok, feature("cupti").reason


def test_the_device_is_known_with_its_ceilings():
    here = device.current()
    assert here.live and here.driver and here.memory > 2**30 and here.cudnn > 90000
    assert here.ceilings, f"add {here.name!r} to attnlab.device.CEILINGS"


def test_cudnn_is_twice_as_fast_as_naive_on_the_device_and_the_host_does_not_see_it(default):
    naive, cudnn = (benchmark(variant(x), *default, label=x) for x in ("naive", "cudnn"))
    assert naive.clock == cudnn.clock == "cupti" and naive.samples >= 5
    assert naive.ms > 2 * cudnn.ms
    assert cudnn.wall_ms > 5 * cudnn.ms and 0.5 < naive.wall_ms / cudnn.wall_ms < 2


@pytest.mark.parametrize("name", ["naive", "xla", "cudnn"])
def test_every_variant_is_right_and_above_its_bound(large, name):
    row = benchmark(variant(name), *large, label=name, check=lambda out: relative_error(out, *large))
    assert row.error < TOLERANCE["bfloat16"] and row.bound_ms < row.p20 <= row.ms <= row.p80
    assert sum(ms for _, ms in row.kernels) == pytest.approx(row.ms, rel=0.2)


def test_the_chain_is_within_a_quarter_of_cupti_where_a_call_is_long(large, monkeypatch):
    cupti = benchmark(variant("cudnn"), *large, label="cudnn")

    def refuse(*_):
        raise RuntimeError("refused for a test")

    monkeypatch.setattr(timing, "_cupti", refuse)
    chain = benchmark(variant("cudnn"), *large, label="cudnn")
    assert (cupti.clock, chain.clock) == ("cupti", "chain") and "refused for a test" in chain.note
    assert chain.ms == pytest.approx(cupti.ms, rel=0.25)


def test_cudnn_is_seen_in_the_program_and_by_the_profiler(default):
    p = evidence.program(variant("cudnn"), *default)
    assert p.calls("__cudnn$fmhaSoftmax") == 1 and p.matmuls == 1 and not p.writes(128, 128)
    row = benchmark(variant("cudnn"), *default, label="cudnn")
    assert any("cudnn" in name.lower() or "sdpa" in name.lower() for name, _ in row.kernels), row.kernels
    naive = benchmark(naive_attention, *default, label="naive")
    assert len(naive.kernels) > 3 and not any("sdpa" in name for name, _ in naive.kernels)


def test_causal_cudnn_is_another_program_than_full(default):
    full = evidence.program(variant("cudnn"), *default)
    causal = evidence.program(lambda *a: variant("cudnn")(*a, is_causal=True), *default)
    assert full.fingerprint != causal.fingerprint
    assert evidence.program(variant("cudnn"), *default).fingerprint == full.fingerprint


@pytest.mark.parametrize("name", ["xla", "cudnn"])
def test_chained_calls_all_run_on_the_gpu(default, name):
    single = evidence.program(variant(name), *default)
    timing.require_repeated(single, evidence.program(timing.chained(variant(name), 8), *default), 8)


def test_the_program_promises_as_many_calls_as_the_profiler_sees(default):
    attend = variant("cudnn")
    for fn in (attend, timing.chained(attend, 4), lambda *a: sum(attend(*a) for _ in range(4))):
        row = benchmark(fn, *default, label="cudnn", flops=1.0, nbytes=0.0)
        seen = [name for name, _ in row.kernels if "sdpa" in name.lower()]
        assert len(seen) == evidence.program(fn, *default).calls("fmha"), row.kernels


def test_another_process_on_the_gpu_is_seen():
    """Where nvidia-smi shows processes at all, which in a container it may not."""
    code = "import jax.numpy as jnp, time; x = jnp.ones(8).block_until_ready(); print('up', flush=True); time.sleep(60)"
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert other.stdout.readline().strip() == "up"
        holders = device.memory_holders()
        if not holders:
            pytest.skip("nvidia-smi shows no processes here")
        assert any(h.bytes > 0 and not h.mine for h in holders)
        used, total = device.gpu_memory()
        assert 0 < used <= total
    finally:
        other.kill()
        other.wait()


def test_out_of_memory_is_a_row_and_the_sweep_goes_on():
    free = device.free_memory()
    T = 1024
    while 4 * 8 * T * T * 4 < free:  # bytes of float32 logits at B4 N8
        T *= 2
    rows = sweep({"xla": variant("xla")}, table="too long", T=(T, 256), seconds=0.05)
    assert rows[0].name == "refused" and rows[0].value.startswith("MemoryError"), rows[0]
    assert rows[1].ms > 0 and rows[1].error < TOLERANCE["bfloat16"]


def test_eager_calls_launch_more_kernels_than_the_compiled_one(default):
    eager = timing.eager_kernels(naive_attention, *default)
    assert len(eager) > len(benchmark(naive_attention, *default, label="naive").kernels)


def test_the_window_that_cudnn_gets_wrong_is_refused_by_the_course_and_wrong_in_jax(default):
    q, k, v = default
    wrong = jax.nn.dot_product_attention(q, k, v, local_window_size=(16, 0), implementation="cudnn")
    assert relative_error(wrong, q, k, v, local_window_size=(16, 0)) > 0.1
    with pytest.raises(ValueError, match="Pass is_causal=True"):
        variant("cudnn")(q, k, v, local_window_size=(16, 0))
    right = variant("cudnn")(q, k, v, local_window_size=(16, 0), is_causal=True)
    assert relative_error(right, q, k, v, local_window_size=(16, 0)) < TOLERANCE["bfloat16"]


# What XLA needs to know of a card to compile for it where there is none. Figures from NVIDIA's datasheets and the CUDA
# programming guide.
CARD = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {per_core} shared_memory_per_block_optin: {optin}
  core_count: {cores} fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""
CARDS = {
    (8, 9): dict(name="NVIDIA L4", threads=1536, per_core=100 * 2**10, optin=99 * 2**10, cores=58, clock=2.04,
                 bandwidth=300 * 10**9, l2=48 * 2**20, memory=24 * 10**9),
    (8, 0): dict(name="NVIDIA A100-SXM4-80GB", threads=2048, per_core=164 * 2**10, optin=163 * 2**10, cores=108,
                 clock=1.41, bandwidth=2039 * 10**9, l2=40 * 2**20, memory=80 * 10**9),
}  # fmt: skip


def compile_for(capability, H: int, *, is_causal: bool, backward: bool = False, tile=None):
    """Compile a kernel of `attnlab.flash` for another card, down to its machine code. Nothing runs."""
    topology = topologies.get_topology_desc(
        "", "cuda", target_config=CARD.format(capability=capability, **CARDS[capability]), topology="1x1x1"
    )
    at = jax.sharding.SingleDeviceSharding(topology.devices[0])
    x = jax.ShapeDtypeStruct((1, 1024, 2, H), jnp.bfloat16, sharding=at)
    rows = jax.ShapeDtypeStruct((1, 2, 1024), jnp.float32, sharding=at)
    shared = tiles.SHARED_KIB[capability] * 2**10
    options = dict(
        scale=0.1, interpret=False, band=tiles.Band.of(1024, 1024, is_causal=is_causal),
        tile=tile or tiles.choose(H, 2, shared, is_causal=is_causal, backward=backward),
    )  # fmt: skip
    fn, args = (flash_backward, (x, x, x, x, rows, x, rows)) if backward else (flash_forward, (x, x, x))
    return jax.jit(lambda *a: fn(*a, **options)).trace(*args).lower().compile()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("capability", CARDS, ids=lambda c: CARDS[c]["name"])
def test_the_chosen_tile_compiles_for_ampere_and_ada(capability, H, is_causal, backward):
    assert "triton" in compile_for(capability, H, is_causal=is_causal, backward=backward).as_text()


def test_a_tile_that_does_not_fit_an_l4_is_refused_by_the_compiler():
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)shared memory"):
        compile_for((8, 9), 128, is_causal=False, tile=tiles.FULL[0])


def test_nsight_compute_sees_the_kernels_it_was_asked_for():
    if not shutil.which("ncu"):
        pytest.skip("ncu is not on PATH")
    found = nsight.counters(["flash", "cudnn"], 1, 1024, 4, 64)
    assert set(found) == {"flash", "cudnn"}
    for row in found.values():
        assert 0 < row["matrix units busy, %"] <= 100 and row["time, ms"] < 10 and row["most waits for"]
