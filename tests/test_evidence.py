"""What a compiled program contains: HLO written by hand, programs compiled here, programs lowered for CUDA."""

import re

import jax
import jax.numpy as jnp
import pytest

from attnlab import evidence
from attnlab.attention import naive_attention, variant
from attnlab.features import has
from attnlab.inputs import qkv
from attnlab.records import LOG, Shape

CUDNN = (
    "  %fmha = (bf16[2,8,128,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), "
    'custom_call_target="__cudnn$fmhaSoftmax", '
    "operand_layout_constraints={bf16[2,8,128,64]{3,2,1,0}}, metadata={op_name=\"jit(f)/x\" stack_frame_id=3}, "
    'backend_config={"cudnn_fmha_backend_config":{"fmha_scale":0.125,"mask_type":"NO_MASK"}}\n'
)  # fmt: skip
GEMM = '  %g.{n} = (f32[8,8]{{1,0}}, s8[33554432]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$gemm"\n'

# A fusion that is called twice, each call with one dot; its inner [77] is never written.
FUSED_TWICE = """HloModule jit_f, is_scheduled=true

%fused_computation (p0: f32[4,8], p1: f32[8,4]) -> f32[4,4] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[8,4]{1,0} parameter(1)
  %inner = f32[77,4]{1,0} broadcast(%p0), dimensions={}
  ROOT %dot.1 = f32[4,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[4,8], b: f32[8,4]) -> f32[4,4] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %f.1 = f32[4,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_computation
  %f.2 = f32[4,4]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_computation
  ROOT %sum = f32[4,4]{1,0} add(%f.1, %f.2)
}
"""

# A loop whose state has more than five parts, which HLO then numbers with /*index=5*/.
LOOP = """HloModule jit_loop

%body (s: STATE) -> STATE {
  %s = STATE parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%s), index=1
  %d = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = STATE tuple(%i, %d, %e, %e, %e, %h)
}

%cond (s.1: STATE) -> pred[] {
  %s.1 = STATE parameter(0)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %w = STATE while(%init), condition=%cond, body=%body
  ROOT %out = f32[4,4]{1,0} get-tuple-element(%w), index=1
}
""".replace("STATE", "(s32[], f32[4,4], f32[4], f32[4], f32[4], /*index=5*/f32[6])")


def entry(*lines: str, name="jit_f") -> str:
    return f"HloModule {name}\n\nENTRY %main.1 (a: f32[8,8]) -> f32[8,8] {{\n{''.join(lines)}}}\n"


COMMAND_BUFFER = (
    "HloModule jit_f\n\n%command_buffer (a: f32[8,8]) -> f32[8,8] {\n" + CUDNN + GEMM.format(n=1) + "}\n\n"
    "ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n  ROOT %c = f32[8,8]{1,0} call(%a), to_apply=%command_buffer\n}\n"
)
BRANCHES = (
    "HloModule jit_f\n\n%yes (a: f32[8,8]) -> f32[8,8] {\n  ROOT %d = f32[8,8]{1,0} dot(%a, %a)\n}\n\n"
    "%no (b: f32[8,8]) -> f32[8,8] {\n  ROOT %e = f32[8,8]{1,0} dot(%b, %b)\n}\n\n"
    "ENTRY %main (a: f32[8,8]) -> f32[8,8] {\n  ROOT %c = f32[8,8]{1,0} conditional(%p, %a, %a), WHICH\n}\n"
)

# name: (text, custom calls, matrix products)
PROGRAMS = {
    "nothing": ("", {}, 0),
    "one cuDNN call": (entry(CUDNN), {"__cudnn$fmhaSoftmax": 1}, 1),
    "two gemms": (entry(GEMM.format(n=1), GEMM.format(n=2)), {"__cublas$gemm": 2}, 2),
    "a call that is no product": (
        entry('  %t = f32[8]{0} custom-call(%a), custom_call_target="TopK"\n'), {"TopK": 1}, 0,
    ),
    "a fusion called twice": (FUSED_TWICE, {}, 2),
    "a loop with a large state": (LOOP, {}, 1),
    "inside a command buffer": (COMMAND_BUFFER, {"__cudnn$fmhaSoftmax": 1, "__cublas$gemm": 1}, 2),
    "two numbered branches": (BRANCHES.replace("WHICH", "branch_computations={%yes, %no}"), {}, 2),
    "yes and no": (BRANCHES.replace("WHICH", "true_computation=%yes, false_computation=%no"), {}, 2),
    "a computation nobody calls": (FUSED_TWICE.replace("calls=%fused_computation\n", "calls=%other\n"), {}, 0),
}  # fmt: skip


@pytest.mark.parametrize("text, calls, matmuls", PROGRAMS.values(), ids=PROGRAMS)
def test_calls_and_products_are_counted_as_often_as_they_run(text, calls, matmuls):
    p = evidence.parse(text)
    assert (p.custom_calls, p.matmuls) == (calls, matmuls)


def test_calls_are_found_by_a_part_of_their_name():
    p = evidence.parse(COMMAND_BUFFER)
    assert (p.calls("fmha"), p.calls("cudnn"), p.calls("__"), p.calls("flash")) == (1, 1, 2, 0)


def test_what_stays_inside_a_fusion_is_not_written():
    p = evidence.parse(FUSED_TWICE)
    assert p.arrays == (("f32", (4, 4)),)
    assert not p.writes(77, 4)


def test_results_of_calls_and_loops_are_written_parameters_and_views_are_not():
    p = evidence.parse(COMMAND_BUFFER)
    assert p.writes(128, 64, dtype="bf16") and p.writes(33554432, dtype="s8") and not p.writes(128, 64, dtype="f32")
    assert p.largest == ("s8", (33554432,), 33554432)
    assert evidence.parse(entry("  %a = f32[9,9]{1,0} parameter(0)\n  %b = f32[81]{0} bitcast(%a)\n")).arrays == ()


@pytest.mark.parametrize(
    "dims, written",
    [((128, 64), True), ((8, 128, 64), True), ((2, 8, 128, 64), True), ((2, 1, 8, 128, 64), True),
     ((64, 128), False), ((2, 8), False), ((4, 8, 128, 64), False)],
    ids=str,
)  # fmt: skip
def test_an_array_is_found_by_its_last_axes(dims, written):
    assert evidence.parse(entry("  %x = bf16[2,8,128,1,64]{4,3,2,1,0} copy(%a)\n")).writes(*dims) is written


def test_the_largest_array_counts_bytes_not_elements():
    text = entry("  %x = bf16[100]{0} copy(%a)\n", "  %y = f32[60]{0} copy(%a)\n", "  %z = pred[150]{0} copy(%a)\n")
    assert evidence.parse(text).largest == ("f32", (60,), 240)


# ---- fingerprints ------------------------------------------------------------------------------------------

FRAMES = (
    '\nFileNames\n1 "a.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n1 {file_name_id=1 line=8}\n\n'
    "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n\n"
)
BASE = entry(CUDNN, GEMM.format(n=1), "  %c = f32[] constant(0.5)\n")
SAME = {
    "module name": BASE.replace("HloModule jit_f", "HloModule jit_other, is_scheduled=true"),
    "metadata": BASE.replace("jit(f)/x", "jit(other)/y").replace("stack_frame_id=3", "stack_frame_id=9"),
    "source locations": BASE.replace("\n\nENTRY", f"\n{FRAMES}\nENTRY", 1),
}
OTHER = {
    "a constant": BASE.replace("constant(0.5)", "constant(0.25)"),
    "a dtype": BASE.replace("bf16", "f16"),
    "a target": BASE.replace("fmhaSoftmax", "fmhaScaleBiasSoftmax"),
    "one call more": BASE.replace("  %c", GEMM.format(n=2) + "  %c"),
    "cuDNN's scale": BASE.replace('"fmha_scale":0.125', '"fmha_scale":1'),
    "cuDNN's mask": BASE.replace("NO_MASK", "CAUSAL"),
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_the_fingerprint_ignores_where_a_program_was_written(text):
    assert text != BASE
    squeezed = [re.sub("\n+", "\n", evidence.parse(x).fingerprint) for x in (text, BASE)]
    assert squeezed[0] == squeezed[1]


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_the_fingerprint_sees_what_is_computed(text):
    assert text != BASE
    assert evidence.parse(text).fingerprint != evidence.parse(BASE).fingerprint


# ---- compiled here -----------------------------------------------------------------------------------------


def sdpa(implementation, **options):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_none_and_xla_are_one_program_and_naive_and_causal_are_others(dtype):
    args = qkv(1, 16, 2, 8, dtype=dtype)
    fns = [sdpa(None), sdpa("xla"), naive_attention, sdpa("xla", is_causal=True), sdpa("xla", scale=0.5)]
    none, xla, *others = [evidence.program(fn, *args) for fn in fns]
    assert none.fingerprint == xla.fingerprint
    assert all(p.fingerprint != xla.fingerprint for p in others)
    assert none.calls("cudnn") == 0


@pytest.mark.parametrize("name", ["naive", "xla"])
def test_attention_is_two_products_that_write_the_logits(name):
    p = evidence.program(variant(name), *qkv(1, 48, 2, 8))
    assert p.matmuls == 2 and p.writes(48, 48) and not p.writes(49, 48)
    assert p.temp_bytes >= 2 * 48 * 48 * 4


def test_products_in_a_loop_with_a_large_state_and_in_a_branch_are_seen():
    q, k, v = qkv(1, 16, 2, 8)

    def loop(q, k, v):
        step = lambda _, s: (naive_attention(s[0], s[1], s[2]), *(x * 1.5 for x in s[1:]))  # noqa: E731
        return jax.lax.fori_loop(0, 50, step, (q, k, v, q, k, v, q))

    branch = lambda q, k, v: jax.lax.cond(q[0, 0, 0, 0] > 0, naive_attention, lambda q, k, v: q, q, k, v)  # noqa: E731
    assert evidence.program(loop, q, k, v).matmuls == 2
    assert evidence.program(branch, q, k, v).matmuls == 2


def test_shapes_are_enough_to_compile():
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
    p = evidence.program(naive_attention, x, x, x)
    # How much differs: from JAX 0.10 on, XLA takes both products to a CPU library at this size.
    assert p.matmuls == 2 and 2**20 < p.temp_bytes < 4 * 8 * 4096 * 4096 * 4


@pytest.mark.skipif(has("cudnn_attention"), reason="cuDNN refuses nothing here")
def test_a_refusal_comes_in_the_librarys_own_words():
    with pytest.raises(Exception, match="cuDNN|cudnn|GPU|gpu"):
        evidence.program(variant("cudnn"), *qkv(1, 16, 2, 8, dtype="bfloat16"))


def test_an_observation_is_kept_and_handed_back():
    LOG.open("02_x")
    assert evidence.observe("calls", 3, label="xla", shape=Shape.square(1, 2, 3, 4), dtype="float32") == 3
    (f,) = LOG.records
    assert (f.name, f.value, f.label, f.notebook, f.shape.T) == ("calls", 3, "xla", "02_x", 2)
    assert f.env["jax"] == jax.__version__


# ---- lowered for CUDA, without a GPU -----------------------------------------------------------------------


def lowered(fn, dtype="bfloat16", **sizes) -> str:
    args = qkv(**{**dict(B=2, T=128, N=4, H=64), **sizes}, dtype=dtype)
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("implementation", [None, "xla"], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_for_cuda_too_xla_is_two_products_and_no_library_call(implementation, is_causal):
    text = lowered(sdpa(implementation, is_causal=is_causal))
    assert len(re.findall(r"stablehlo\.dot_general", text)) == 2
    assert "custom_call" not in text and "cudnn" not in text
    assert re.search(r"tensor<(1x)?2x4x128x(1x)?128xf32>", text)  # the logits, in float32


@pytest.fixture
def cudnn_allowed(monkeypatch):
    """JAX believes that there is a cuDNN and a GPU for it; only the structure of the call can be looked at."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_compute_capability", lambda _: True)


@pytest.mark.parametrize("is_causal, mask", [(False, "NO_MASK"), (True, "CAUSAL")], ids=["full", "causal"])
def test_for_cuda_cudnn_is_one_library_call_and_no_product(cudnn_allowed, is_causal, mask):
    text = lowered(sdpa("cudnn", is_causal=is_causal))
    assert re.findall(r"custom_call @(\S+?)\(", text) == ["__cudnn$fmhaSoftmax"]
    assert "dot_general" not in text and mask in text and "128x128xf32" not in text


def test_for_cuda_cudnn_refuses_float32(cudnn_allowed):
    with pytest.raises(Exception, match="float32"):
        lowered(sdpa("cudnn"), dtype="float32")
