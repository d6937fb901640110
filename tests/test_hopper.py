"""The Hopper kernel against float64: compiled on such a GPU, interpreted on a CPU, lowered for CUDA anywhere."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import device
from attnlab.attention import TOLERANCE, relative_error, visible
from attnlab.features import feature, has
from attnlab.flash.hopper import KEYS, hopper_attention
from attnlab.inputs import qkv


def why_not() -> str:
    """Why the kernel can't run here, or nothing."""
    try:
        here = device.current()
    except device.DeviceNotFound as e:
        return str(e)
    if here.kind == "gpu":
        return "" if has("wgmma") else feature("wgmma").reason
    return "" if INTERPRETER else f"JAX {jax.__version__} can't interpret Mosaic GPU kernels"


INTERPRETER = importlib.util.find_spec("jax._src.pallas.mosaic_gpu.interpret.params")
WHY_NOT = why_not()
COMPILED = not WHY_NOT and device.current().kind == "gpu"
runs = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "never")


def run(q, k, v, **options):
    return jax.jit(functools.partial(hopper_attention, interpret=not COMPILED, **options))(q, k, v)


def log_sum_exp(q, k, *, is_causal=False, scale=None) -> np.ndarray:
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    k = np.repeat(np.asarray(k, np.float64), N // K, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", np.asarray(q, np.float64), k) * (1 / math.sqrt(H) if scale is None else scale)
    scores = np.where(visible(T, S, is_causal=is_causal), scores, -np.inf)
    top = scores.max(axis=-1)
    return top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))


# (T, S, N, K, H), dtype, options. The interpreter of JAX 0.10 compiles every tile of every head anew: few of them.
SMALL = [
    ((1, 1, 1, 1, 64), "bfloat16", {"is_causal": True}),
    ((70, 300, 2, 1, 128), "bfloat16", {}),  # more blocks than slots, a tail, two heads on one KV head
    ((130, 200, 1, 1, 64), "float16", {"is_causal": True}),  # T < S: two tiles, the keys after 130 unseen
    ((129, 70, 1, 1, 64), "bfloat16", {"is_causal": True, "scale": -0.5}),  # T > S: the last row sees all keys
    ((3, 5, 1, 1, 64), "float16", {"scale": 0}),
]
LARGE = [
    ((T, S, 4, 2, H), dtype, {"is_causal": is_causal})
    for T, S in ((1, 1), (1, 300), (300, 1), (257, 130), (640, 1000), (1024, 1024))
    for H, dtype in ((64, "float16"), (128, "bfloat16"))
    for is_causal in (False, True)
]


@runs
@pytest.mark.parametrize(("sizes", "dtype", "options"), SMALL + LARGE * COMPILED)
def test_output_and_log_sum_exp_are_those_of_float64(sizes, dtype, options):
    T, S, N, K, H = sizes
    q, k, v = qkv(1 + COMPILED, T, N, H, S=S, K=K, dtype=dtype)
    out, lse = run(q, k, v, **options)
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    assert relative_error(out, q, k, v, **options) < TOLERANCE[dtype]
    np.testing.assert_allclose(lse, log_sum_exp(q, k, **options), rtol=1e-4, atol=1e-4)


@runs
def test_a_poisoned_neighbour_in_the_batch_is_never_read():
    # What lies behind the last row of batch element 0 is the first row of element 1.
    q, k, v = (x.at[1].set(jnp.nan) for x in qkv(2, 9, 1, 64, S=16, dtype="bfloat16"))
    out, lse = run(q, k, v)
    alone = [x[:1] for x in (q, k, v)]
    assert relative_error(out[:1], *alone) < TOLERANCE["bfloat16"]
    np.testing.assert_allclose(lse[:1], log_sum_exp(*alone[:2]), rtol=1e-4, atol=1e-4)
    assert jnp.isnan(out[1]).all()


@runs
def test_blocks_behind_the_causal_mask_are_never_fetched():
    q, k, v = qkv(1, 7, 1, 64, S=2 * KEYS + 1, dtype="bfloat16")
    k, v = (x.at[:, KEYS:].set(jnp.nan) for x in (k, v))  # a weight of 0 would still make NaN of v
    out, _ = run(q, k, v, is_causal=True)
    assert relative_error(out, q, k[:, :KEYS], v[:, :KEYS], is_causal=True) < TOLERANCE["bfloat16"]


@pytest.mark.skipif(not COMPILED, reason=WHY_NOT or "for a Hopper GPU")
@pytest.mark.parametrize("is_causal", [False, True])
def test_repeated_runs_give_the_same_bits(is_causal):
    q, k, v = qkv(2, 2000, 8, 128, K=4, dtype="bfloat16")
    fn = jax.jit(functools.partial(hopper_attention, is_causal=is_causal))
    first = fn(q, k, v)
    for _ in range(20):
        assert all(map(jnp.array_equal, fn(q, k, v), first))


@pytest.mark.skipif("compute capability" in WHY_NOT, reason=WHY_NOT or "never")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("H", "dtype"), [(64, "bfloat16"), (64, "float16"), (128, "bfloat16"), (128, "float16")])
def test_it_lowers_for_cuda_and_fits_shared_memory(H, dtype, is_causal):
    # Lowering counts the bytes and refuses what does not fit.
    q, k, v = qkv(1, 300, 2, H, S=70, K=1, dtype=dtype)
    traced = jax.jit(functools.partial(hopper_attention, is_causal=is_causal)).trace(q, k, v)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ((1, 8, 1, 64), "float32", r"bfloat16 or float16, got float32: cast with"),
        ((1, 8, 1, 96), "bfloat16", r"head dim 64 or 128, got 96: pad it with zeros"),
    ],
)
def test_it_refuses_in_one_line_that_says_what_to_do(sizes, dtype, words):
    with pytest.raises((TypeError, ValueError), match=words) as e:
        hopper_attention(*qkv(*sizes, dtype=dtype))
    assert "\n" not in str(e.value)


@pytest.mark.skipif(bool(INTERPRETER), reason="this JAX has the interpreter")
def test_a_jax_without_the_interpreter_says_so():
    with pytest.raises(NotImplementedError, match=r"needs JAX 0\.10 or newer"):
        hopper_attention(*qkv(1, 8, 1, 64, dtype="bfloat16"), interpret=True)


def test_its_gradient_is_refused_with_what_to_use():
    q, k, v = qkv(1, 64, 1, 64, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="no gradient: use attnlab.flash_attention"):
        jax.grad(lambda q: hopper_attention(q, k, v, interpret=not COMPILED)[0].astype(jnp.float32).sum())(q)


@pytest.mark.skipif(COMPILED, reason="it runs here")
def test_where_it_can_not_run_it_says_what_to_use():
    with pytest.raises(ValueError, match="can't run .*attnlab.flash_attention"):
        hopper_attention(*qkv(1, 64, 1, 64, dtype="bfloat16"))
