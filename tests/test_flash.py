"""The hand-written kernels against float64: shapes, masks, extreme values, gradients, and faults that must be caught.

Interpreted on a CPU; on a GPU the same tests run compiled.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import attnlab.flash
from attnlab import attention, device
from attnlab.flash import flash_attention, tiles
from attnlab.inputs import qkv


def on_gpu() -> bool:
    try:
        return device.current().kind == "gpu"
    except device.DeviceNotFound:
        return False  # the tests themselves say it better than a failed import


INTERPRET = not on_gpu()


def examples(number: int):
    return settings(max_examples=number if INTERPRET else 2 * number, deadline=None, derandomize=True, database=None)


def jit(fn):
    # Interpreted kernels spend their time in LLVM; nothing here needs its optimisations.
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0} if INTERPRET else None)


def f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


# ---- cases -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    T: int
    S: int
    B: int = 1
    K: int = 1
    group: int = 1
    H: int = 16
    dtype: str = "float32"
    is_causal: bool = False
    window: tuple[int, int] | None = None
    scale: float = 0.25
    tile: tuple[int, int] = (16, 16)

    @property
    def mask(self) -> dict:
        return {"is_causal": self.is_causal, "local_window_size": self.window}

    @property
    def options(self) -> dict:
        return {**self.mask, "scale": self.scale}

    def arrays(self, seed: int = 0):
        """q, k, v and a gradient of the output. Drawn by NumPy: JAX would compile the draw for every shape."""
        rng = np.random.default_rng(seed)
        queries, keys = (self.B, self.T, self.K * self.group, self.H), (self.B, self.S, self.K, self.H)
        return tuple(jnp.asarray(rng.normal(size=s).astype(self.dtype)) for s in (queries, keys, keys, queries))

    def of_rows(self, seed: int | None = None):
        """A gradient of the log-sum-exp, (B, N, T): zeros, or drawn."""
        shape = (self.B, self.K * self.group, self.T)
        draw = np.zeros(shape) if seed is None else np.random.default_rng(seed).normal(size=shape)
        return jnp.asarray(draw, np.float32)


LENGTHS = st.integers(1, 300)
WINDOWS = st.none() | st.tuples(st.integers(-20, 320), st.integers(-20, 320)) | st.tuples(*2 * [st.integers(0, 40)])
BLOCKS = st.sampled_from([16, 32, 64])
CASES = st.builds(
    lambda heads, **others: Case(**dict(zip(("B", "K", "group"), heads, strict=True)), **others),
    T=LENGTHS,
    S=LENGTHS,
    heads=st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 4), (1, 2, 3), (2, 3, 2)]),
    H=st.sampled_from([16, 32]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    is_causal=st.booleans(),
    window=WINDOWS,
    scale=st.sampled_from([0.0, 0.1, 1.0, -0.5]),
    tile=st.tuples(BLOCKS, BLOCKS),
)

# ---- the truth ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weights:
    """In float64, for each query head and its key head: the softmax (B, K, N/K, T, S), 0 where nothing is seen."""

    p: np.ndarray
    lse: np.ndarray  # (B, N, T)
    blind: np.ndarray  # (T,) queries that see no key
    scores: float  # the largest score, or what it was summed from: a score is rounded by this size


def weights_of(case: Case, q, k) -> Weights:
    B, T, N, H = q.shape
    seen = attention.visible(T, k.shape[1], **case.mask)
    q, k = f64(q).reshape(B, T, case.K, case.group, H), f64(k)
    s = np.einsum("btkgh,bskh->bkgts", q, k, optimize=True) * case.scale
    terms = np.sqrt(np.einsum("btkgh,bskh->bkgts", q**2, k**2, optimize=True)) * abs(case.scale)
    size = float(np.where(seen, np.maximum(terms, np.abs(s)), 0.0).max())
    top = np.where(seen.any(1), np.where(seen, s, -np.inf).max(-1), 0.0)
    p = np.where(seen, np.exp(np.minimum(s - top[..., None], 0.0)), 0.0)
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total)).reshape(B, N, T)
    return Weights(p / np.where(total == 0, 1.0, total)[..., None], lse, ~seen.any(1), size)


def gradients_of(case: Case, want: Weights, q, k, v, do, dlse):
    """dq, dk, dv, where a blind query's output is the constant 0; and for each the size of what is rounded for it."""
    p, shape = want.p, (case.B, case.T, case.K, case.group, case.H)
    q, do = f64(q).reshape(shape), f64(do).reshape(shape)
    k, v = f64(k), f64(v)

    def to_queries(a, x):
        return np.einsum("bkgts,bskh->btkgh", a, x, optimize=True)

    def to_keys(a, x):
        return np.einsum("bkgts,btkgh->bskh", a, x, optimize=True)

    dp = np.einsum("btkgh,bskh->bkgts", do, v, optimize=True)
    delta = ((p * dp).sum(-1) - f64(dlse).reshape(p.shape[:-1]))[..., None]
    ds = case.scale * p * (dp - delta)
    gradients = to_queries(ds, k), to_keys(ds, q), to_keys(p, do)
    # p, dp − delta and their product are rounded each by its own chance, so squares add. delta is made from the
    # rounded output, and is one number for a row: its error goes the way of the whole row.
    each = (case.scale * p * (np.abs(dp) + np.abs(delta))) ** 2
    row = np.sqrt((to_queries(p, v) ** 2 * do**2).sum(-1)).transpose(0, 2, 3, 1)[..., None] * abs(case.scale) * p
    rounded = (
        np.sqrt(to_queries(each, k**2)) + np.abs(to_queries(row, k)),
        np.sqrt(to_keys(each + row**2, q**2)),
        np.sqrt(to_keys(p**2, do**2)),
    )
    flat = lambda three: (three[0].reshape(case.B, case.T, -1, case.H), *three[1:])  # noqa: E731
    return flat(gradients), flat(rounded)


# Half a unit in the last place: bfloat16 keeps 7 bits of mantissa, float16 and TF32 (float32 on a GPU's matrix units)
# keep 10. Interpreted float32 rounds at 2^-24, but sums of up to 300 terms and exp2 add some: 16 of them.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20 if INTERPRET else 2.0**-11}


def score_unit(dtype: str) -> float:
    """The rounding of a score: products of 16-bit numbers are exact in float32, those of float32 are not in TF32."""
    return 2.0**-11 if dtype == "float32" and not INTERPRET else 2.0**-24


def allowed(case: Case, want: Weights) -> float:
    """Relative error. Weights and results are rounded once or twice: 4 units, as `attention.TOLERANCE` has it.

    An error of a score is a relative error of its weight, and the score is rounded by its own size.
    """
    return 4 * UNIT[case.dtype] + 8 * score_unit(case.dtype) * want.scores


def norm(x):
    """Of every batch element and head: one wrong head would hardly show in an error over everything."""
    return np.linalg.norm(f64(x), axis=(1, 3))


def assert_output(case: Case, want: Weights, out, right):
    error, size = norm(f64(out) - right), norm(right)
    assert np.isfinite(f64(out)).all(), "elements of the output are not finite"
    worst = (error / np.where(size > 0, size, 1.0)).max()
    assert worst <= allowed(case, want), f"output off by {worst:.2g}, allowed {allowed(case, want):.2g}"


def assert_log_sum_exp(case: Case, want: Weights, lse):
    got, blind = f64(lse), np.broadcast_to(want.blind, lse.shape)
    assert (np.isneginf(got) == blind).all(), "the log-sum-exp must be −inf where no key is seen, and only there"
    # The sum and the logarithm in float32, the scores' own errors, and the result rounded at its own size.
    right = want.lse[~blind]
    bound = 2.0**-18 + 2.0**-22 * np.abs(right) + 8 * score_unit(case.dtype) * want.scores
    off = np.abs(got[~blind] - right)
    assert (off <= bound).all(), f"log-sum-exp off by {off.max():.2g}"


def assert_gradients(case: Case, want: Weights, got, gradients, rounded):
    for name, g, right, made_from in zip("qkv", got, gradients, rounded, strict=True):
        assert np.isfinite(f64(g)).all(), f"elements of d{name} are not finite"
        error, bound = norm(f64(g) - right), allowed(case, want) * (norm(right) + norm(made_from))
        assert (error <= bound).all(), f"d{name} off by {error.max():.2g}, allowed {bound[error > bound].min():.2g}"


# ---- the kernels, real and mutated -------------------------------------------------------------------------

SOURCES = [sys.modules[f"attnlab.flash.{name}"] for name in ("tiles", "forward", "backward")]


class Kernels:
    """What the checks call, out of the three modules."""

    def __init__(self, tiles, forward, backward):
        self.Band, self.Tile = tiles.Band, tiles.Tile
        self.forward, self.backward = forward.forward, backward.backward


REAL = Kernels(*SOURCES)


def mutated(old: str, new: str):
    """The three modules anew from their sources, with `old` become `new` wherever it stands."""
    texts = [inspect.getsource(module) for module in SOURCES]
    assert any(old in text for text in texts), f"the kernels no longer read {old!r}: write this fault anew"
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for module, text in zip(SOURCES, texts, strict=True):
            copy = types.ModuleType(module.__name__)
            patch.setitem(sys.modules, module.__name__, copy)
            patch.setattr(attnlab.flash, module.__name__.rsplit(".", 1)[1], copy)
            exec(compile(text.replace(old, new), f"<mutated {module.__name__}>", "exec"), copy.__dict__)
            made.append(copy)
    return Kernels(*made)


@functools.cache
def compiled(case: Case, kernels: Kernels = REAL):
    """forward and backward of a case, jitted."""
    band, tile = kernels.Band.of(case.T, case.S, **case.mask), kernels.Tile(*case.tile)
    fixed = dict(scale=case.scale, band=band, tile=tile, interpret=INTERPRET)
    return jit(functools.partial(kernels.forward, **fixed)), jit(functools.partial(kernels.backward, **fixed))


def same_bits(a, b) -> bool:
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def check_forward(case: Case, q, k, v, kernels: Kernels = REAL):
    """Output and log-sum-exp are right, every element, and the same bits the second time."""
    run, _ = compiled(case, kernels)
    out, lse = run(q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (case.B, q.shape[2], case.T), np.float32)
    want = weights_of(case, q, k)
    right = np.where(want.blind[:, None, None], 0.0, attention.reference(q, k, v, **case.options))
    assert_output(case, want, out, right)
    assert_log_sum_exp(case, want, lse)
    assert same_bits((out, lse), run(q, k, v)), "other bits the second time"


def check_gradients(case: Case, q, k, v, do, dlse, kernels: Kernels = REAL):
    """dq, dk and dv are right, every element, and the same bits the second time."""
    (run, _), (_, back) = compiled(case), compiled(case, kernels)
    out, lse = run(q, k, v)
    got = back(q, k, v, out, lse, do, dlse)
    assert [(g.shape, g.dtype) for g in got] == [(x.shape, x.dtype) for x in (q, k, v)]
    want = weights_of(case, q, k)
    assert_gradients(case, want, got, *gradients_of(case, want, q, k, v, do, dlse))
    assert same_bits(got, back(q, k, v, out, lse, do, dlse)), "other bits the second time"


# ---- properties --------------------------------------------------------------------------------------------


def causal(case: Case) -> Case:
    """As most attention is: without it few of the drawn masks are plainly causal."""
    return dataclasses.replace(case, is_causal=True, window=None, scale=0.25)


@examples(16)
@given(CASES)
def test_the_forward_kernel_is_right_at_every_shape_mask_and_tile(case):
    check_forward(case, *case.arrays()[:3])


@examples(9)
@given(CASES.map(causal))
def test_the_forward_kernel_is_right_under_a_causal_mask(case):
    check_forward(case, *case.arrays()[:3])


@examples(7)
@given(CASES)
def test_the_gradients_are_right_at_every_shape_mask_and_tile(case):
    check_gradients(case, *case.arrays(), case.of_rows(7))


@examples(4)
@given(CASES.map(causal))
def test_the_gradients_are_right_under_a_causal_mask(case):
    check_gradients(case, *case.arrays(), case.of_rows())


@pytest.mark.parametrize("H, dtype", [(64, "bfloat16"), (128, "float16")])
def test_head_dims_64_and_128_are_right_forward_and_backward(H, dtype):
    case = Case(T=75, S=101, K=2, group=2, H=H, dtype=dtype, is_causal=True, scale=1 / math.sqrt(H), tile=(32, 64))
    q, k, v, do = case.arrays()
    check_forward(case, q, k, v)
    check_gradients(case, q, k, v, do, case.of_rows())


@pytest.mark.parametrize("T, S", [(1, 1), (1, 300), (300, 1), (32, 16)])
def test_the_smallest_and_the_most_lopsided_shapes_are_right(T, S):
    case = Case(T=T, S=S, K=1, group=2, dtype="float32")
    q, k, v, do = case.arrays()
    check_forward(case, q, k, v)
    check_gradients(case, q, k, v, do, case.of_rows(7))


@pytest.mark.parametrize(
    "options",
    [dict(), dict(is_causal=True), dict(window=(5, 3)), dict(window=(30, 40), is_causal=True), dict(scale=-1.0)],
    ids=str,
)
def test_the_truth_of_these_tests_is_the_reference_and_its_gradients(options):
    case = Case(T=40, S=43, B=2, K=2, group=3, **options)
    q, k, v, do = case.arrays()
    gradients, _ = gradients_of(case, weights_of(case, q, k), q, k, v, do, case.of_rows())
    for mine, theirs in zip(gradients, attention.reference_gradients(q, k, v, do, **case.options), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


# ---- flash_attention, which chooses its own tiles ----------------------------------------------------------


def check_flash_attention(case: Case):
    """Output, log-sum-exp, and the gradients of a loss that uses both; a blind query gets the mean of v."""
    q, k, v, do = case.arrays()
    want = weights_of(case, q, k)
    dlse = jnp.where(want.blind, 0.0, case.of_rows(7))

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, **case.options, return_residual=True)
        used = jnp.where(want.blind[:, None], 0.0, lse)  # −inf · 0 is NaN
        return (out.astype(jnp.float32) * do).sum() + (used * dlse.transpose(0, 2, 1)).sum(), (out, lse)

    (_, (out, lse)), got = jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    assert (lse.shape, lse.dtype) == ((case.B, case.T, q.shape[2]), np.float32)
    assert_output(case, want, out, attention.reference(q, k, v, **case.options))
    assert_log_sum_exp(case, want, lse.transpose(0, 2, 1))
    (dq, dk, dv), rounded = gradients_of(case, want, q, k, v, do, dlse)
    through_mean = f64(do)[:, want.blind].sum(1).reshape(case.B, case.K, case.group, case.H).sum(2) / case.S
    assert_gradients(case, want, got, (dq, dk, dv + through_mean[:, None]), rounded)


@examples(3)
@given(CASES)
def test_flash_attention_is_right_with_the_gradients_of_its_output_and_its_log_sum_exp(case):
    check_flash_attention(case)


@pytest.mark.parametrize("window", [(-2, 5), (40, -5), (3, -4)], ids=str)
def test_queries_that_see_no_key_get_the_mean_of_v_and_their_gradients_are_right(window):
    case = Case(T=45, S=43, K=2, group=2, window=window, dtype="float16")
    blind = ~attention.visible(45, 43, **case.mask).any(axis=1)
    assert blind.any() and blind.all() == (window == (3, -4))
    check_flash_attention(case)


def test_the_gradient_of_the_log_sum_exp_alone_is_that_of_jax():
    q, k, v, _ = Case(T=23, S=41, K=2, group=2).arrays()

    def by_hand(q, k, v):
        return flash_attention(q, k, v, is_causal=True, return_residual=True)[1].sum()

    def by_jax(q, k, v):
        k = jnp.repeat(k, 2, axis=2)
        s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / math.sqrt(16)
        return jax.nn.logsumexp(jnp.where(attention.visible(23, 41, is_causal=True), s, -jnp.inf), axis=-1).sum()

    got, want = (jit(jax.grad(fn, (0, 1, 2)))(q, k, v) for fn in (by_hand, by_jax))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(f64(g), f64(w), atol=8 * UNIT["float32"] * np.abs(f64(w)).max())


def test_a_head_dim_that_no_block_takes_is_refused():
    with pytest.raises(ValueError, match="got 48: pad it with zeros and pass scale=1/√48"):
        flash_attention(*qkv(1, 4, 1, 48))


# ---- extreme values ----------------------------------------------------------------------------------------
# One shape with tails, several blocks, both edges of a window and GQA, so that each dtype compiles once, in one worker.

EXTREME = {dtype: Case(T=37, S=53, K=2, group=2, dtype=dtype, window=(20, 25)) for dtype in UNIT}
DTYPES = [pytest.param(dtype, marks=pytest.mark.xdist_group(f"flash in {dtype}")) for dtype in UNIT]
LARGEST = {"float32": 2.0**60, "bfloat16": 2.0**60, "float16": 65504.0}  # their products and sums stay finite
SMALLEST = {
    "float32": 2.0**-100,
    "bfloat16": 2.0**-100,
    "float16": 2.0**-14,
}  # of float16, numbers below its normal ones


def all_equal(x, seed):
    return jnp.full_like(x, 3.0)


def one_huge(x, seed):
    return x.at[:, seed % x.shape[1]].multiply(100)


def ends_of_the_range(x, seed):
    """Every vector is ± the largest: scores are one huge number or its negative."""
    sign = np.where(np.random.default_rng(seed).random(x.shape[:3] + (1,)) < 0.5, -1.0, 1.0)
    return jnp.broadcast_to(jnp.asarray(sign * LARGEST[x.dtype.name], x.dtype), x.shape)


def tiny(x, seed):
    return x * SMALLEST[x.dtype.name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [all_equal, one_huge, ends_of_the_range, tiny], ids=lambda f: f.__name__)
def test_extreme_scores_are_right_forward_and_backward(change, dtype):
    # Scores beyond 10⁸ are rounded by whole units, and a weight is only as right as its score.
    case = EXTREME[dtype] if change is not ends_of_the_range else dataclasses.replace(EXTREME[dtype], scale=2.0**-10)
    for seed in range(3):
        q, k, v, do = case.arrays(seed)
        q, k = change(q, seed), change(k, seed + 1)
        check_forward(case, q, k, v)
        if change is not ends_of_the_range:  # there the gradients are beyond float16
            check_gradients(case, q, k, v, do, case.of_rows(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand_are_right(dtype):
    case = EXTREME[dtype]
    q, k, v, do = case.arrays()
    q, k = 64 * q, 64 * k
    assert weights_of(case, q, k).scores > 1e4
    check_forward(case, q, k, v)
    check_gradients(case, q, k, v, do, case.of_rows(7))


def check_far_below_zero(dtype, kernels: Kernels = REAL):
    """Every score is about −100: keys beyond the end read as zeros, and exp(0 + 100) is no float32."""
    case = EXTREME[dtype]
    q, k, v, do = case.arrays()
    q, k = q.at[..., 0].set(20), k.at[..., 0].set(-20)
    assert weights_of(case, q, k).lse.max() < -89
    check_forward(case, q, k, v)
    check_gradients(case, q, k, v, do, case.of_rows(7), kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_below_zero_overflow_no_weight(dtype):
    check_far_below_zero(dtype)


def test_gradients_without_a_mask_at_the_tail_are_caught():
    with pytest.raises(AssertionError, match="dq are not finite"):
        check_far_below_zero("bfloat16", mutated("col < end, scores.shape", "col >= 0, scores.shape"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spreads_no_further_than_in_the_reference(bad, dtype):
    case = EXTREME[dtype]
    q, k, v, _ = case.arrays()
    clean = f64(compiled(case)[0](q, k, v)[0])
    for key in (0, 20, 36, 52):
        v_bad = v.at[0, key, 1, 5].set(bad)
        out, lse = compiled(case)[0](q, k, v_bad)
        with np.errstate(invalid="ignore"):
            want = attention.reference(q, k, v_bad, **case.options)
        assert not (np.isnan(f64(out)) & ~np.isnan(want)).any()
        sees = attention.visible(case.T, case.S, **case.mask)[:, key]
        assert (~np.isfinite(f64(out)[:, sees, 2:, 5])).all(), "a key that is seen must show"
        untouched = np.isfinite(want)
        np.testing.assert_array_equal(f64(out)[untouched], clean[untouched])
        assert np.isfinite(f64(lse)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_query_poisons_that_row_of_that_head_and_nothing_else(dtype):
    case = EXTREME[dtype]
    q, k, v, _ = case.arrays()
    out, lse = compiled(case)[0](q, k, v)
    for row in (0, 15, 36):
        bad, bad_lse = compiled(case)[0](q.at[0, row, 1, 3].set(math.nan), k, v)
        assert np.isnan(f64(bad)[0, row, 1]).all() and math.isnan(bad_lse[0, 1, row])
        assert same_bits(bad.at[0, row, 1].set(out[0, row, 1]), out)
        assert same_bits(bad_lse.at[0, 1, row].set(lse[0, 1, row]), lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [{"is_causal": True, "window": None}, {"window": (4, 9)}], ids=["causal", "window"])
def test_nan_in_a_key_that_nobody_sees_changes_no_bit(dtype, mask):
    case = dataclasses.replace(EXTREME[dtype], **mask)
    q, k, v, _ = case.arrays()
    unseen = ~attention.visible(case.T, case.S, **case.mask).any(axis=0)
    assert unseen.any() and not unseen.all()
    run, _ = compiled(case)
    assert same_bits(run(q, jnp.where(unseen[:, None, None], math.nan, k).astype(k.dtype), v), run(q, k, v))


# ---- every element is written ------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_outputs():
    """Every `pallas_call` writes over arrays full of NaN that it was handed, so that what it leaves out stays NaN."""
    real = pl.pallas_call

    def pallas_call(kernel, *, in_specs, out_specs, out_shape, **options):
        shapes = out_shape if isinstance(out_shape, list) else [out_shape]
        specs = out_specs if isinstance(out_shape, list) and isinstance(out_specs, list) else [out_specs]
        inputs, outputs = len(in_specs), len(shapes)
        call = real(
            lambda *refs: kernel(*refs[:inputs], *refs[inputs + outputs :]),
            in_specs=[*in_specs, *specs],
            out_specs=out_specs,
            out_shape=out_shape,
            input_output_aliases={inputs + i: i for i in range(outputs)},
            **options,
        )
        return lambda *args: call(*args, *(jnp.full(s.shape, math.nan, s.dtype) for s in shapes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", pallas_call)
        yield


POISONED = Case(T=70, S=90, K=2, group=2, dtype="float16", window=(20, 30), tile=(32, 16))


def check_written(case: Case, kernels: Kernels = REAL):
    q, k, v, do = case.arrays()
    with poisoned_outputs():
        run, back = compiled(case, kernels)
        out, lse = run(q, k, v)
        assert np.isfinite(f64(out)).all(), "elements of the output are not written"
        assert np.isfinite(f64(lse)).all(), "elements of the log-sum-exp are not written"
        for name, g in zip("qkv", back(q, k, v, out, lse, do, jnp.zeros_like(lse)), strict=True):
            assert np.isfinite(f64(g)).all(), f"elements of d{name} are not written"


@pytest.mark.parametrize("case", [POISONED, Case(T=64, S=64, is_causal=True, tile=(16, 32)), Case(T=1, S=1)], ids=str)
def test_every_element_of_every_output_is_written(case):
    check_written(case, Kernels(*SOURCES))  # new ones: what is compiled already is not poisoned


@pytest.mark.parametrize(
    "old, new, found",
    [
        ("grid=(pl.cdiv(T, tile.q), N, B)", "grid=(T // tile.q, N, B)", "the output"),
        ("store(lse_ref, i * tile.q, T,", "store(lse_ref, i * tile.q, T - T % tile.q - 1,", "the log-sum-exp"),
        ("store(dq_ref, start, T,", "store(dq_ref, start, T - 1,", "dq"),
        ("grid=(pl.cdiv(S, tile.k), K, B)", "grid=(S // tile.k, K, B)", "dk"),
        ("store(dv_ref, start, S,", "store(dv_ref, start, S - 1,", "dv"),
    ],
)
def test_a_store_left_out_is_caught(old, new, found):
    with pytest.raises(AssertionError, match=f"of {found} are not written"):
        check_written(POISONED, mutated(old, new))


# ---- faults ------------------------------------------------------------------------------------------------

FORWARD_FAULTS = {
    "tail mask dropped": ("col < end, scores.shape", "col >= 0, scores.shape"),
    "diagonal off by one": ("(col <= row + self.right)", "(col < row + self.right)"),
    "window off by one": ("col >= row - self.left", "col > row - self.left"),
    "a block too many skipped": ("return first, inner, outer, last", "return first, inner, outer, last - 1"),
    "first block skipped": ("return first, inner, outer, last", "return first + 1, inner, outer, last"),
    "a block too many without a mask": (
        "return first, inner, outer, last",
        "return first, inner, _between(inner, outer + 1, last), last",
    ),
    "output not rescaled": ("acc * shrink[:, None]", "acc"),
    "sum not rescaled": ("total * shrink", "total"),
    "wrong head": ("(b, 0, n // group, 0)", "(b, 0, n % (N // group), 0)"),
    "log-sum-exp in base 2": ("(top + jnp.log2(total)) / LOG2E", "top + jnp.log2(total)"),
    "exp for exp2": ("LOG2E = math.log2(math.e)", "LOG2E = 1.0"),
    "scale forgotten": ("(scale * LOG2E)", "LOG2E"),
}
BACKWARD_FAULTS = {
    "diagonal off by one": ("s = hide(s, band.transposed, col,", "s = hide(s, band.transposed, col + 1,"),
    "delta forgotten": ("ds = p * (dot(v, do, (1, 1)) - delta[None, :])", "ds = p * dot(v, do, (1, 1))"),
    "gradient of the log-sum-exp forgotten": ("float32) - dlse", "float32)"),
    "dq not scaled": ("(dq * scale)", "dq"),
    "dk not scaled": ("(dk * scale)", "dk"),
    "a head of the group left out": ("lax.fori_loop(0, group,", "lax.fori_loop(0, group - 1,"),
    "wrong keys": ("band.transposed.blocks(j, tile.k, tile.q, T)", "band.blocks(j, tile.k, tile.q, T)"),
    "log-sum-exp in base 2": ("lse[None, :] * LOG2E", "lse[None, :]"),
}  # fmt: skip
FAULTY = Case(T=77, S=81, K=2, group=3, window=(40, 9), dtype="bfloat16", tile=(16, 32))


def as_mutants(faults):
    return pytest.mark.parametrize("old, new", faults.values(), ids=faults)


@as_mutants(FORWARD_FAULTS)
def test_a_fault_in_the_forward_kernel_is_caught(old, new):
    q, k, v, _ = FAULTY.arrays()
    with pytest.raises(AssertionError, match="off by|not finite|−inf"):
        check_forward(FAULTY, 2 * q, 2 * k, v, mutated(old, new))


@as_mutants(BACKWARD_FAULTS)
def test_a_fault_in_the_backward_kernels_is_caught(old, new):
    q, k, v, do = FAULTY.arrays()
    with pytest.raises(AssertionError, match="d[qkv] off by|not finite"):
        check_gradients(FAULTY, q, k, v, do, FAULTY.of_rows(7), mutated(old, new))


def test_the_case_that_shows_the_faults_passes_without_them():
    q, k, v, do = FAULTY.arrays()
    same = mutated("LOG2E", "LOG2E")
    check_forward(FAULTY, 2 * q, 2 * k, v, same)
    check_gradients(FAULTY, q, k, v, do, FAULTY.of_rows(7), same)


# ---- lowering ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_if_on(name: str):
    """Lower for the GPU called `name`: JAX 0.12 asks which one it is, older ones take compute capability 9.0."""
    if not hasattr(jax.sharding, "AbstractDevice") or tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12):
        yield
        return
    gpu = jax.sharding.AbstractDevice(device_kind=name, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)):
        yield


@pytest.mark.parametrize("T, is_causal", [(300, False), (512, True)], ids=["full, tails", "causal"])
@pytest.mark.parametrize("H, dtype", [(64, "bfloat16"), (128, "float16"), (32, "float32")])
@pytest.mark.parametrize("name, capability", [("NVIDIA A100", (8, 0)), ("NVIDIA L4", (8, 9)), ("NVIDIA H200", (9, 0))])
def test_the_kernels_lower_for_every_card_with_the_tiles_chosen_for_it(name, capability, H, dtype, T, is_causal):
    case = Case(T=T, S=T, K=2, group=2, H=H, dtype=dtype, is_causal=is_causal)
    shared = tiles.shared_memory(device.Device(name, "gpu", capability))
    band = tiles.Band.of(T, T, **case.mask)
    q, k = (jax.ShapeDtypeStruct((1, T, n, H), dtype) for n in (4, 2))
    sums = jax.ShapeDtypeStruct((1, 4, T), np.float32)
    for kernel, arguments, calls in ((REAL.forward, (q, k, k), 1), (REAL.backward, (q, k, k, q, sums, q, sums), 2)):
        tile = tiles.choose(
            H, np.dtype(jnp.dtype(dtype)).itemsize, shared, is_causal=is_causal, backward=kernel is REAL.backward
        )
        fn = functools.partial(kernel, scale=0.1, band=band, tile=tiles.clip(tile, T, T), interpret=False)
        with as_if_on(name):
            text = jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @__gpu$xla.gpu.triton") == calls
        assert text.count(f"num_warps = {tile.warps} : i32") == calls


# ---- what a user may do wrong, and what a caller's settings must not change --------------------------------


@pytest.fixture(scope="module")
def few():
    return qkv(1, 20, 2, 16)


@pytest.mark.parametrize("window", [(-(2**31 - 1), 2**31), (0, -(2**40)), (-(2**40), 0), (2**40, 2**40)], ids=str)
def test_a_window_of_any_size_is_counted_right(few, window):
    out = jit(functools.partial(flash_attention, local_window_size=window))(*few)
    assert attention.relative_error(out, *few, local_window_size=window) <= attention.TOLERANCE["float32"]


def test_64_bit_mode_changes_nothing(few):
    def gradients(q, k, v):
        return jax.grad(lambda *x: (flash_attention(*x, is_causal=True) ** 2).sum(), (0, 1, 2))(q, k, v)

    want = gradients(*few)
    with jax.enable_x64(True):
        again = gradients(*few)
    assert all(a.dtype == jnp.float32 and (a == b).all() for a, b in zip(again, want, strict=True))


def test_a_second_derivative_is_refused_with_what_to_do(few):
    q, k, v = few
    first = jax.grad(lambda q: (flash_attention(q, k, v) ** 2).sum())
    with pytest.raises(NotImplementedError, match="first derivatives only: for second ones use jax.nn"):
        jax.grad(lambda q: first(q).sum())(q)


@pytest.mark.parametrize("scale", ["a", np.ones(3)], ids=["text", "array"])
def test_a_scale_that_is_no_number_is_refused(few, scale):
    with pytest.raises(TypeError, match="scale must be a Python number"):
        flash_attention(*few, scale=scale)


def test_a_traced_scale_is_told_how_to_be_learnt(few):
    with pytest.raises(TypeError, match="multiply q by it and pass scale=1"):
        jax.jit(lambda scale: flash_attention(*few, scale=scale))(0.1)


@pytest.mark.parametrize("H, todo", [(8, "pad it with zeros and pass scale=1/√8"), (256, "use jax.nn")])
def test_another_head_dim_is_refused_with_what_to_do(H, todo):
    with pytest.raises(ValueError, match=f"got {H}: {todo}"):
        flash_attention(*qkv(1, 16, 1, H))
