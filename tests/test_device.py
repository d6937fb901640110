"""What the hardware is and what it can do: fake devices, a fake nvidia-smi, and the reasons given."""

import os
import types

import pytest

from attnlab import device, features, session
from attnlab.device import CEILINGS, Ceilings, Device, Holder

GIB = 2**30


def card(capability, name="a card", cudnn=91900, **fields):
    return Device(name, "gpu", capability, memory=24 * GIB, cudnn=cudnn, **fields)


CPU = Device("some CPU", "cpu", memory=8 * GIB)

# ---- features ----------------------------------------------------------------------------------------------

BY_CAPABILITY = {
    (7, 5): set(),
    (8, 0): {"tf32_matmul", "bf16_matmul", "cudnn_attention", "pallas_triton"},
    (8, 9): {"tf32_matmul", "bf16_matmul", "cudnn_attention", "pallas_triton", "fp8_matmul"},
    (9, 0): set(features.RULES) - {"mxfp8_matmul"},
    (10, 0): set(features.RULES) - {"wgmma"},
    (12, 0): set(features.RULES) - {"wgmma"},
}
NEEDS = {
    "tf32_matmul": "8.0", "bf16_matmul": "8.0", "cudnn_attention": "8.0", "pallas_triton": "8.0", "fp8_matmul": "8.9",
    "fp8_attention": "9.0", "cudnn_head_dim_256": "9.0", "wgmma": "9.0", "mxfp8_matmul": "10.0",
}  # fmt: skip
CUDNN = {"cudnn_attention", "fp8_attention", "cudnn_head_dim_256"}


@pytest.mark.parametrize("key", NEEDS)
@pytest.mark.parametrize("capability", BY_CAPABILITY, ids=str)
def test_the_capability_decides_and_the_reason_names_it(capability, key):
    f = features.feature(key, card(capability))
    mine = ".".join(map(str, capability))
    assert f.ok is (key in BY_CAPABILITY[capability]) is features.has(key, card(capability))
    assert f"compute capability {mine}" in f.reason and NEEDS[key] in f.reason
    assert f.ok == (not f.todo) and (f.ok or NEEDS[key] in f.todo)


@pytest.mark.parametrize("key", NEEDS)
def test_the_name_never_decides(key):
    for name, capability in (("NVIDIA H200", (7, 5)), ("Tesla T4", (10, 0)), ("NVIDIA L4", (9, 0))):
        f = features.feature(key, card(capability, name))
        assert f == features.feature(key, card(capability, "nobody knows this one"))
        assert f.ok is (capability != (7, 5) and key in BY_CAPABILITY[capability])


@pytest.mark.parametrize("key", NEEDS)
def test_without_cudnn_only_what_needs_it_is_missing(key):
    newest = max(c for c, keys in BY_CAPABILITY.items() if key in keys)
    f = features.feature(key, card(newest, cudnn=None))
    assert f.ok is (key not in CUDNN)
    if key in CUDNN:
        assert "no cuDNN" in f.reason and "make run" in f.todo
    with_it = features.feature(key, card(newest, cudnn=91801))
    assert ("9.18.1" in with_it.reason) is (key in CUDNN)


def test_an_l4_has_fp8_matrix_products_and_no_fp8_attention():
    l4 = card((8, 9), "NVIDIA L4")
    assert features.has("fp8_matmul", l4) and not features.has("fp8_attention", l4)
    assert "Hopper" in features.feature("fp8_attention", l4).reason


def test_the_table_of_these_tests_has_every_rule():
    assert set(NEEDS) == set(features.RULES)


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=str)
def test_hopper_alone_has_wgmma_and_a_newer_card_is_told_that_it_is_too_new(capability):
    assert [c for c, keys in BY_CAPABILITY.items() if "wgmma" in keys] == [(9, 0)]
    f = features.feature("wgmma", card(capability))
    assert "only Hopper (9.0) has it" in f.reason and "or newer" not in f.todo


@pytest.mark.parametrize("key", [*NEEDS, "gpu", "cupti"])
def test_a_cpu_has_none_and_says_so(key, monkeypatch):
    monkeypatch.setattr(device, "nvidia_smi", lambda *_: None)
    f = features.feature(key, CPU)
    assert not f.ok and ("GPU" in f.reason or "CPU" in f.reason) and f.todo


def test_the_table_has_every_feature_with_a_reason_and_a_remedy_for_each_no(monkeypatch):
    for d in (CPU, card((7, 5)), card((9, 0), "NVIDIA H200", ceilings=CEILINGS["NVIDIA H200"])):
        table = features.features(d)
        # What this process has (CUPTI, TransformerEngine) says nothing of a card that is not its own.
        assert set(table) == set(features.RULES) | {"gpu", "ceilings"} | (set(features.OTHERS) if d.live else set())
        assert all(f.name and f.reason for f in table.values())
        assert all(not f.todo for f in table.values() if f.ok)
    assert len({f.name for f in table.values()}) == len(table)


def test_a_gpu_that_jax_does_not_use_is_pointed_out(monkeypatch):
    monkeypatch.setattr(device, "nvidia_smi", lambda *_: ["GPU 0: NVIDIA L4"])
    f = features.feature("gpu", Device("some CPU", "cpu", live=True))
    assert not f.ok and "JAX does not use it" in f.reason and "JAX_PLATFORMS" in f.todo


def test_unknown_ceilings_are_said_and_where_to_add_them():
    f = features.feature("ceilings", card((9, 0), "NVIDIA X1"))
    assert not f.ok and "'NVIDIA X1'" in f.reason and "datasheet" in f.todo
    assert features.feature("ceilings", card((8, 9), ceilings=CEILINGS["NVIDIA L4"])).reason == "L4 datasheet"


def test_another_process_device_is_not_asked_for_cupti():
    assert "not asked" in features.feature("cupti", card((9, 0))).reason


@pytest.mark.parametrize("refusal", [RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS\nmore"), RuntimeError()], ids=repr)
def test_a_refused_cupti_is_told_in_its_own_words(monkeypatch, refusal):
    from jax.experimental.mosaic.gpu import profiler

    def refuse(*_, **__):
        raise refusal

    monkeypatch.setattr(profiler, "measure", refuse)
    f = features.feature("cupti", card((9, 0), live=True))
    assert not f.ok and f.reason.startswith(
        f"RuntimeError: {str(refusal).splitlines()[0]}" if str(refusal) else "RuntimeError"
    )
    assert "\n" not in f.reason and "chain" in f.todo


# ---- ceilings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flops, nbytes, dtype, ms",
    [
        (2e12, 0, "f", 20.0),  # 100 TFLOP/s
        (0, 11e6, "f", 0.1),  # 1 MB in the cache, 10 at 100 GB/s
        (0, 1e6, "f", 0.0),  # all in the cache
        (2e9, 11e6, "f", 0.1),
        (1e11, 11e6, "f", 1.0),
        (1e11, 11e6, "int4", None),
    ],
)
def test_the_bound_is_the_larger_of_arithmetic_and_memory_beyond_the_cache(flops, nbytes, dtype, ms):
    bound = Ceilings({"f": 100}, 100, 1_000_000, "a test").bound_ms(flops, nbytes, dtype)
    assert bound == (ms if ms is None else pytest.approx(ms))


def test_without_a_bandwidth_only_arithmetic_bounds():
    assert Ceilings({"f": 100}, None, 0, "a test").bound_ms(1e11, 1e12, "f") == pytest.approx(1.0)


@pytest.mark.parametrize("name", CEILINGS)
def test_published_ceilings_are_plausible_and_have_a_source(name):
    c = CEILINGS[name]
    assert "datasheet" in c.source and 1e6 < c.l2 < 2e8 and 100 < c.gbps < 1e4
    rates = {**c.tflops, "bfloat16": c.tflops.get("bfloat16", c.tflops["float16"])}
    assert rates["bfloat16"] == rates["float16"] and 1.9 < rates["float16"] / rates["float32"] < 8.1
    if "float8_e4m3fn" in rates:
        assert rates["float8_e4m3fn"] == pytest.approx(2 * rates["float16"], rel=0.02)


def test_the_ceilings_of_the_course_figures_are_the_published_ones():
    h200, l4 = CEILINGS["NVIDIA H200"], CEILINGS["NVIDIA L4"]
    assert (h200.tflops["bfloat16"], h200.gbps) == (989, 4800)
    assert (l4.tflops["bfloat16"], l4.tflops["float8_e4m3fn"], l4.gbps, l4.l2) == (121, 242, 300, 48 * 2**20)
    assert "bfloat16" not in CEILINGS["Tesla T4"].tflops and "float8_e4m3fn" not in CEILINGS["NVIDIA A10"].tflops


# ---- nvidia-smi --------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A function that puts a fake nvidia-smi on the PATH, the only thing there: answers by what is asked."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(answers=None, code=0):
        cases = "".join(f"*{asked}*) echo '{answer}';;\n" for asked, answer in (answers or {}).items())
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\nexit {code}\n')
        path.chmod(0o755)

    return install


APPS = f"""{os.getpid()}, /usr/bin/python3, 1500
77, /opt/a b/python3.12, 20480
78, [Insufficient Permissions], [N/A]"""


def test_holders_of_memory_are_named_and_this_process_is_known(smi):
    smi({"query-compute-apps": APPS})
    assert device.memory_holders() == [
        Holder(os.getpid(), "python3", 1500 * 2**20, True),
        Holder(77, "python3.12", 20480 * 2**20, False),
        Holder(78, "[Insufficient Permissions]", 0, False),
    ]


def test_a_process_name_may_hold_a_comma(smi):
    smi({"query-compute-apps": "9, /usr/bin/tool --set=a,b, 300"})
    (holder,) = device.memory_holders()
    assert (holder.pid, holder.bytes) == (9, 300 * 2**20)


def test_nobody_holding_memory_is_another_answer_than_nobody_to_ask(smi):
    assert device.memory_holders() is None and device.gpu_memory() is None  # no nvidia-smi at all
    smi({"memory.used": "0"})
    assert device.memory_holders() == []
    smi({"query-compute-apps": APPS, "memory.used": "3", "memory.total": "4"}, code=9)
    assert device.memory_holders() is None and device.gpu_memory() is None and device.nvidia_smi("-L") is None


@pytest.mark.parametrize(
    "used, total, expected",
    [
        ("512", "143771", (512 * 2**20, 143771 * 2**20)),
        ("[N/A]", "24576", None),
        ("", "", None),
        ("512", "[N/A]", None),
    ],
)
def test_memory_of_the_gpu_in_bytes(smi, used, total, expected):
    smi({"memory.used": used, "memory.total": total})
    assert device.gpu_memory() == expected


def fake_gpu(name="NVIDIA H200", capability="9.0"):
    return types.SimpleNamespace(
        platform="gpu", device_kind=name, compute_capability=capability, memory_stats=lambda: {"bytes_limit": 7 * GIB}
    )


@pytest.fixture
def gpu_process(monkeypatch):
    """A function that gives `current()` as it would be in a process with that GPU."""

    def make(*args):
        monkeypatch.setattr(device.jax, "devices", lambda: [fake_gpu(*args)])
        return device.current.__wrapped__()

    return make


def test_the_device_of_a_gpu_process(smi, gpu_process):
    smi({"memory.total": "143771", "driver_version": "580.159"})
    d = gpu_process()
    assert (d.name, d.kind, d.compute_capability, d.capability) == ("NVIDIA H200", "gpu", (9, 0), "9.0")
    assert (d.memory, d.driver, d.live) == (143771 * 2**20, "580.159", True)
    assert d.ceilings.tflops == CEILINGS["NVIDIA H200"].tflops and d.ceilings.l2 >= CEILINGS["NVIDIA H200"].l2


@pytest.mark.parametrize("total", [None, "[N/A]", "[Not Supported]"], ids=str)
def test_memory_that_nvidia_smi_does_not_tell_is_taken_from_jax(smi, gpu_process, total):
    if total:
        smi({"memory.total": total, "driver_version": "580.1"})
    assert gpu_process("NVIDIA GB10", "12.1").memory == 7 * GIB


def test_an_unknown_gpu_has_no_ceilings(smi, gpu_process):
    d = gpu_process("NVIDIA GB10", "12.1")
    assert d.ceilings is None and d.driver is None and features.has("mxfp8_matmul", Device(d.name, "gpu", (12, 1)))


def test_the_environment_of_this_process_names_what_a_record_needs():
    here, env = device.current(), device.environment()
    assert set(env) >= {"device", "driver", "jax", "cudnn", "te", "python"}
    assert env["device"] == here.name != "" and env["kind"] == here.kind
    assert env["jax"].count(".") >= 2 and env["python"].startswith("3.")


@pytest.mark.parametrize("version, text", [(91900, "9.19.0"), (90201, "9.2.1"), (101500, "10.15.0"), (None, None)])
def test_cudnn_versions_as_text(version, text):
    assert device.cudnn_text(version) == text


def test_a_cudnn_on_the_library_path_is_listed_as_the_systems(tmp_path, monkeypatch):
    (tmp_path / "libcudnn.so.9.1.0").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:")
    assert ("the system's", "libcudnn.so.9.1.0", False) in device.cudnn_copies()


# ---- others on the same GPU --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mine, listed, warned",
    [
        (13, [], False),  # what is used is this process's own
        (13, [12], False),  # … though the list knows it by another number, as in a container
        (2, [12], True),
        (2, [4, 8], True),
        (2, [], True),  # a container, whose list is empty
        (2, None, True),
    ],
)
def test_others_who_hold_much_memory_are_named(monkeypatch, capsys, mine, listed, warned):
    holders = listed and [Holder(100 + i, f"kernel{i}", size * GIB, False) for i, size in enumerate(listed)]
    monkeypatch.setattr(session._device, "current", lambda: card((9, 0)))
    monkeypatch.setattr(session._device, "gpu_memory", lambda: (15 * GIB, 24 * GIB))
    monkeypatch.setattr(session._device, "own_memory", lambda: mine * GIB)
    monkeypatch.setattr(session._device, "memory_holders", lambda: holders)
    session.warn_of_others()
    said = capsys.readouterr().out
    if not warned:
        assert said == ""
        return
    assert said.count("\n") == 1 and "12.0 GiB of 24.0 GiB" in said and "Shut Down" in said
    assert all(f"kernel{i} (pid {100 + i}" in said for i in range(len(listed or [])))
    assert listed or "can not be seen" in said


def test_no_warning_where_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(session._device, "current", lambda: CPU)
    monkeypatch.setattr(session._device, "gpu_memory", lambda: pytest.fail("asked for the memory of no GPU"))
    session.warn_of_others()
    assert capsys.readouterr().out == ""
