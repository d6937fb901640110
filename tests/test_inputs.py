"""q, k and v: what is drawn, and what the checks let through."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import inputs
from attnlab.records import Shape


@pytest.mark.parametrize(
    "sizes, dtype",
    [({}, "float32"), (dict(S=9), "bfloat16"), (dict(K=2), "float16"), (dict(S=3, K=1), "float32")],
    ids=str,
)
def test_the_arrays_have_the_sizes_and_dtype_asked_for(sizes, dtype):
    q, k, v = inputs.qkv(2, 5, 4, 8, dtype=dtype, **sizes)
    S, K = sizes.get("S", 5), sizes.get("K", 4)
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 8), (2, S, K, 8), (2, S, K, 8))
    assert {x.dtype.name for x in (q, k, v)} == {dtype}
    assert inputs.check_qkv(q, k, v) == Shape(2, 5, S, 4, K, 8)


def test_without_arguments_they_have_the_course_default_shape():
    q, k, v = inputs.qkv()
    assert str(inputs.check_qkv(q, k, v)) == "B4 T128 N8 H64" and q.dtype == jnp.float32


def test_they_are_standard_normal_independent_and_repeatable():
    q, k, v = inputs.qkv(2, 64, 4, 64)
    for x in (q, k, v):
        assert abs(float(x.mean())) < 0.03 and 0.97 < float(x.std()) < 1.03
    assert abs(np.corrcoef(np.ravel(q), np.ravel(k))[0, 1]) < 0.05
    assert (inputs.qkv(2, 64, 4, 64)[0] == q).all()
    assert not (inputs.qkv(2, 64, 4, 64, seed=1)[0] == q).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_dtype_sees_the_same_draw_rounded(dtype):
    for exact, rounded in zip(inputs.qkv(1, 8, 2, 8), inputs.qkv(1, 8, 2, 8, dtype=dtype), strict=True):
        assert (exact.astype(dtype) == rounded).all()


@pytest.mark.parametrize("size", [np.int64(3), np.int8(3), jnp.array(3), True], ids=repr)
def test_any_whole_number_is_a_size(size):
    assert inputs.qkv(1, size, 1, 8)[0].shape == (1, int(size), 1, 8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")], ids=repr)
def test_a_dtype_may_be_given_in_any_way(dtype):
    assert inputs.dtype_name(dtype) == "bfloat16"


def test_numpy_arrays_are_as_good_as_jax_ones():
    q, k, v = (np.asarray(x) for x in inputs.qkv(1, 4, 2, 8))
    assert inputs.check_qkv(q, k, v) == Shape.square(1, 4, 2, 8)


@pytest.mark.parametrize("free, fits", [(None, True), (100, True), (99, False)], ids=["nobody tells", "just", "short"])
def test_memory_is_compared_with_what_is_free(monkeypatch, free, fits):
    monkeypatch.setattr(inputs._device, "free_memory", lambda: free)
    if fits:
        inputs.require_memory(100, "it")
    else:
        with pytest.raises(MemoryError):
            inputs.require_memory(100, "it")
