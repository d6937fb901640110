"""Attention: the float64 reference against scalar loops, the variants against the reference, and counts by hand."""

import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import attention
from attnlab.inputs import qkv
from attnlab.records import Shape

rng = np.random.default_rng(5)
B, T, S, N, K, H = 2, 5, 7, 4, 2, 3
BIAS = rng.normal(size=(1, N, T, S))
MASK = rng.random((B, 1, T, S)) < 0.6
MASK[0, 0, 2] = False  # one query sees nobody
ROW_MASK = rng.random((B, 1, 1, S)) < 0.6


def by_loops(q, k, v, bias=None, mask=None, scale=None, is_causal=False, window=None, q_lengths=None, kv_lengths=None):
    """Attention one scalar at a time, in Python floats."""
    q, k, v = (np.asarray(x, np.float64).tolist() for x in (q, k, v))
    b_, t_, n_, h_ = len(q), len(q[0]), len(q[0][0]), len(q[0][0][0])
    s_, group = len(k[0]), n_ // len(k[0][0])
    out = np.zeros((b_, t_, n_, h_))
    for b, t, n in itertools.product(range(b_), range(t_), range(n_)):
        if q_lengths is not None and t >= q_lengths[b]:
            continue
        head = n // group
        seen = []
        for s in range(s_):
            hidden = (is_causal and s > t) or (window and not t - window[0] <= s <= t + window[1])
            hidden = hidden or (kv_lengths is not None and s >= kv_lengths[b])
            if mask is not None and not np.broadcast_to(mask, (b_, n_, t_, s_))[b, n, t, s]:
                hidden = True
            if not hidden:
                seen.append(s)
        weights = {s: 1 / s_ for s in range(s_)}  # nobody is seen: everybody counts alike
        if seen:
            score = {}
            for s in seen:
                dot = sum(q[b][t][n][h] * k[b][s][head][h] for h in range(h_))
                score[s] = dot * (1 / math.sqrt(h_) if scale is None else scale)
                if bias is not None:
                    score[s] += float(np.broadcast_to(bias, (b_, n_, t_, s_))[b, n, t, s])
            total = sum(math.exp(x) for x in score.values())
            weights = {s: math.exp(x) / total for s, x in score.items()}
        for h in range(h_):
            out[b, t, n, h] = sum(w * v[b][s][head][h] for s, w in weights.items())
    return out


CASES = {
    "plain": {},
    "scale": dict(scale=0.3),
    "bias": dict(bias=BIAS),
    "bias of one row for all": dict(bias=BIAS[:, :1, :1]),
    "mask, one query blind": dict(mask=MASK),
    "mask of rank 2": dict(mask=MASK[1, 0]),
    "row mask": dict(mask=ROW_MASK),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(1, 2)),
    "window as one number": dict(local_window_size=1),
    "window, causal": dict(local_window_size=(2, 0), is_causal=True),
    "query lengths": dict(query_seq_lengths=[5, 2]),
    "key lengths": dict(key_value_seq_lengths=[3, 7]),
    "all at once": dict(
        bias=BIAS, mask=MASK, scale=2.0, is_causal=True, query_seq_lengths=[4, 5], key_value_seq_lengths=[2, 6]
    ),
}
LOOP_NAMES = {"query_seq_lengths": "q_lengths", "key_value_seq_lengths": "kv_lengths"}


def small(**sizes):
    return qkv(**{**dict(B=B, T=T, N=N, H=H, S=S, K=K), **sizes}, seed=3)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_reference_agrees_with_a_loop_over_scalars(options):
    q, k, v = small()
    loops = {LOOP_NAMES.get(name, name): value for name, value in options.items()}
    if (window := loops.pop("local_window_size", None)) is not None:
        loops["window"] = (window, window) if isinstance(window, int) else window
    want = by_loops(q, k, v, **loops)
    np.testing.assert_allclose(attention.reference(q, k, v, **options), want, rtol=1e-12, atol=1e-12)
    rows = [4, 0, 2]
    np.testing.assert_allclose(
        attention.reference(q, k, v, rows=rows, **options), want[:, rows], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_reference_agrees_with_jax(options):
    q, k, v = small(T=7)  # T = S, so that every option of JAX's applies
    grow = lambda x: np.concatenate([x, x[:, :, :2]], axis=2) if x.ndim == 4 and x.shape[2] == T else x  # noqa: E731
    options = {name: grow(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if getattr(options.get("mask"), "ndim", 4) == 2:
        options["mask"] = np.concatenate([options["mask"]] * 2)[:7]
    given = {n: jnp.array(x, jnp.int32) if "lengths" in n else x for n, x in options.items()}
    for name in {"bias", "mask"} & given.keys():
        given[name] = jnp.array(given[name], None if name == "mask" else jnp.float32)
    if getattr(given.get("mask"), "ndim", 4) == 2:
        given["mask"] = given["mask"][None, None]
    with jax.default_matmul_precision("highest"):  # or a GPU takes TF32
        out = jax.nn.dot_product_attention(q, k, v, implementation="xla", **given)
    assert attention.relative_error(out, q, k, v, **options) < 1e-5


def test_a_blind_query_gets_the_mean_of_v_and_rows_beyond_the_length_get_zeros():
    q, k, v = small(K=N)
    out = attention.reference(q, k, v, mask=np.zeros((1, 1, T, S), bool))
    np.testing.assert_allclose(out, np.broadcast_to(np.asarray(v).mean(1, keepdims=True), out.shape), rtol=1e-5)
    out = attention.reference(q, k, v, query_seq_lengths=[5, 2])
    assert (out[1, 2:] == 0).all() and (out[1, :2] != 0).all() and (out[0] != 0).all()


def test_the_reference_survives_scores_that_overflow_a_naive_exponential():
    q, k, v = small()
    out = attention.reference(q * 1e4, k, v)
    assert np.isfinite(out).all() and (np.abs(out) <= np.abs(np.asarray(v)).max() + 1e-6).all()


# ---- gradients of the reference -----------------------------------------------------------------------------

GRADIENT_CASES = {
    "plain": dict(),
    "scale": dict(scale=-0.7),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(3, 2)),
    "window, causal": dict(local_window_size=(2, 5), is_causal=True, scale=0.4),
}


@pytest.mark.parametrize("options", GRADIENT_CASES.values(), ids=GRADIENT_CASES)
def test_the_gradients_agree_with_finite_differences_of_the_reference(options, monkeypatch):
    monkeypatch.setattr(attention, "check_qkv", lambda q, k, v: Shape.of(q, k))  # float64 is not for users
    draw = np.random.default_rng(8)
    q, k, v = draw.normal(size=(B, T, N, H)), *draw.normal(size=(2, B, S, K, H))
    dout = draw.normal(size=q.shape)
    got = attention.reference_gradients(q, k, v, dout, **options)
    step = 1e-5  # the error of a central difference is of the order of its square
    for i, x in enumerate((q, k, v)):
        assert got[i].shape == x.shape and got[i].dtype == np.float64
        for _ in range(12):
            direction = draw.normal(size=x.shape)
            losses = []
            for sign in (1, -1):
                moved = [q, k, v]
                moved[i] = x + sign * step * direction
                losses.append((attention.reference(*moved, **options) * dout).sum())
            difference = (losses[0] - losses[1]) / (2 * step)
            assert difference == pytest.approx((got[i] * direction).sum(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("options", GRADIENT_CASES.values(), ids=GRADIENT_CASES)
def test_the_gradients_agree_with_jax(options):
    q, k, v = small()
    dout = jax.random.normal(jax.random.key(6), q.shape)
    seen = jnp.asarray(attention.visible(T, S, **{n: x for n, x in options.items() if n != "scale"}))

    def loss(q, k, v):
        mask = None if seen.all() else seen[None, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=options.get("scale"), implementation="xla")
        return (out * dout).sum()

    with jax.default_matmul_precision("highest"):
        want = jax.grad(loss, (0, 1, 2))(q, k, v)
    for mine, theirs in zip(attention.reference_gradients(q, k, v, dout, **options), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * np.abs(mine).max())


def test_the_gradients_survive_scores_that_overflow_a_naive_exponential():
    q, k, v = small()
    gradients = attention.reference_gradients(q * 1e4, k, v, q)
    assert all(np.isfinite(g).all() for g in gradients) and np.abs(gradients[2]).max() > 0.1


def test_gradients_where_a_query_sees_no_key_are_refused_with_the_query():
    q, k, v = small()
    with pytest.raises(ValueError, match="query 4 sees no key"):
        attention.reference_gradients(q, k, v, q, local_window_size=(-3, 5))


# ---- variants against the reference ------------------------------------------------------------------------


def no_scale(q, k, v, **options):
    return attention.naive_attention(q * math.sqrt(q.shape[-1]), k, v, **options)


def off_by_one(q, k, v, is_causal):
    """Causal, but a query also sees the key after its own."""
    mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool), 1)[None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("is_causal, kv_heads", [(False, 4), (True, 2)], ids=["full", "causal, GQA"])
def test_naive_and_xla_meet_the_tolerance_and_planted_faults_do_not(dtype, is_causal, kv_heads):
    q, k, v = qkv(2, 48, 4, 32, K=kv_heads, dtype=dtype, seed=1)
    error = lambda fn: attention.relative_error(fn(q, k, v, is_causal=is_causal), q, k, v, is_causal=is_causal)  # noqa: E731
    allowed = attention.TOLERANCE[dtype]
    assert error(attention.naive_attention) < allowed
    assert error(attention.variant("xla")) < allowed
    assert error(no_scale) > 4 * allowed
    if is_causal:
        assert error(off_by_one) > 4 * allowed


def test_naive_attention_takes_other_lengths_and_keeps_shape_and_dtype():
    q, k, v = qkv(1, 3, 4, 8, S=9, K=1, dtype="bfloat16")
    out = attention.naive_attention(q, k, v, is_causal=True)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert attention.relative_error(out, q, k, v, is_causal=True) < attention.TOLERANCE["bfloat16"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_output_that_is_not_finite_passes_no_tolerance(bad):
    q, k, v = small()
    out = attention.variant("xla")(q, k, v).at[1, 2, 3, 0].set(bad)
    assert not attention.relative_error(out, q, k, v) <= 1e3


def test_an_output_of_another_shape_is_refused_with_both_shapes():
    q, k, v = small()
    with pytest.raises(ValueError, match=r"\(2, 5, 4, 3\).*\(2, 5, 4, 2\)"):
        attention.relative_error(q[..., :2], q, k, v)


# ---- sampled rows ------------------------------------------------------------------------------------------


@functools.cache
def large():
    """2^27 logits, and the right output at the rows that are looked at; the other rows stay zero."""
    q, k, v = qkv(2, 2048, 16, 16, dtype="bfloat16")
    rows = attention.sampled_rows(Shape.of(q, k))
    right = np.zeros(q.shape, np.float32)
    right[:, rows] = attention.reference(q, k, v, rows=rows)
    return (q, k, v), rows, right


def test_small_problems_are_checked_in_full_and_large_ones_at_the_first_the_last_and_other_rows():
    assert attention.sampled_rows(Shape.square(1, 2**13, 1, 8)) is None  # exactly 2^26
    _, rows, _ = large()
    assert {0, 2047} < set(rows.tolist()) and 50 < len(rows) < 2048


@pytest.mark.parametrize("head", [(0, 0), (1, 7), (1, 15)])
def test_sampling_catches_an_error_in_one_head_of_one_batch(head):
    args, _, right = large()
    assert attention.relative_error(right, *args) < 1e-6
    wrong = right.copy()
    wrong[head[0], :, head[1]] = right[head[0], :, head[1] - 1]  # the neighbour's output
    assert attention.relative_error(wrong, *args) > 2 * attention.TOLERANCE["bfloat16"]


def test_sampling_misses_no_nan():
    args, rows, right = large()
    unseen = next(t for t in range(2048) if t not in set(rows.tolist()))
    wrong = right.copy()
    wrong[1, unseen, 3, 5] = math.nan
    assert math.isnan(attention.relative_error(jnp.asarray(wrong), *args))


def test_checking_a_large_problem_takes_about_a_second():
    args, _, right = large()
    spent = []
    for _ in range(2):
        start = time.process_time()
        attention.relative_error(right, *args)
        spent.append(time.process_time() - start)
    assert min(spent) < 3  # of both cores together


# ---- counts ------------------------------------------------------------------------------------------------

# Written out, not computed: (shape, bytes an element, FLOPs full, causal, window (2, 1), fewest bytes, weight bytes).
BY_HAND = [
    # 4·2·8·64 = 4096 a pair; 128² = 16,384 pairs, causal 8,256.
    (Shape.square(2, 128, 8, 64), 2, 67_108_864, 33_816_576, 4096 * 508, 1_048_576, 524_288),
    # T 4, S 6, four query heads on two KV heads: 4·1·4·8 = 128 a pair; 24 pairs; causal 1+2+3+4; window 2+3+4+4.
    (Shape(1, 4, 6, 4, 2, 8), 4, 3_072, 1_280, 1_664, 1_792, 384),
    # T 5, S 2: 4·3·1·16 = 192 a pair; 10 pairs; causal 1+2+2+2+2; window 2+2+2+1+0.
    (Shape(3, 5, 2, 1, 1, 16), 2, 1_920, 1_728, 1_344, 1_344, 60),
]  # fmt: skip


@pytest.mark.parametrize("shape, size, full, causal, window, moved, weights", BY_HAND, ids=lambda x: str(x))
def test_flops_and_bytes_are_those_counted_by_hand(shape, size, full, causal, window, moved, weights):
    assert attention.flops(shape) == full
    assert attention.flops(shape, is_causal=True) == causal
    assert attention.flops(shape, local_window_size=(2, 1)) == window
    assert attention.min_bytes(shape, size) == moved
    assert attention.weight_bytes(shape, size) == weights


@pytest.mark.parametrize("length", [(1, 1), (1, 9), (6, 6), (9, 4), (4, 9)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", [None, 0, 2, (3, 0), (0, 3), (20, 20)], ids=str)
def test_visible_pairs_are_those_that_one_can_count(length, is_causal, window):
    left, right = (99, 99) if window is None else (window, window) if isinstance(window, int) else window
    pairs = [
        (t, s)
        for t, s in itertools.product(*map(range, length))
        if t - left <= s <= t + right and (s <= t or not is_causal)
    ]
    options = dict(is_causal=is_causal, local_window_size=window)
    assert attention.visible_pairs(*length, **options) == len(pairs)
    seen = attention.visible(*length, **options)
    assert sorted(map(tuple, np.argwhere(seen).tolist())) == pairs


def test_an_unusual_integer_is_a_window_too():
    shape = Shape.square(1, 8, 1, 8)
    assert attention.flops(shape, local_window_size=np.int64(2)) == attention.flops(shape, local_window_size=2)


def test_a_gradient_of_another_shape_is_refused():
    q, k, v = qkv(1, 8, 8, 4)
    with pytest.raises(ValueError, match=r"dout must have the shape of q, \(1, 8, 8, 4\), got \(1, 8, 4, 8\)"):
        attention.reference_gradients(q, k, v, q.transpose(0, 2, 3, 1))
