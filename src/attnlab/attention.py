"""Attention as the course writes it, the float64 reference it is checked against, and what it costs.

Conventions are JAX's: a boolean mask is True where a query sees a key; causal masks align top-left;
a query that sees no key gets the mean of v; queries beyond `query_seq_lengths` get zeros.
"""

import difflib
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.inputs import check_qkv
from attnlab.records import Shape

SAMPLE_ABOVE = 2**26  # logits; above it the reference checks sampled query rows


def naive_attention(q, k, v, *, is_causal: bool = False, local_window_size=None):
    """softmax(QKᵀ/√H)·V by hand, in the dtype of the inputs. q (B, T, N, H), k and v (B, S, K, H) → (B, T, N, H).

    The masks are those of `visible`. Raises as `attnlab.inputs.check_qkv`.
    """
    shape = check_qkv(q, k, v)
    if shape.K != shape.N:
        k, v = (jnp.repeat(x, shape.N // shape.K, axis=2) for x in (k, v))
    q, k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    scores = jnp.matmul(q, jnp.transpose(k, (0, 1, 3, 2))) / math.sqrt(shape.H)
    if is_causal or local_window_size is not None:
        row, col = jnp.arange(shape.T)[:, None], jnp.arange(shape.S)[None, :]
        left, right = window((shape.T, shape.S) if local_window_size is None else local_window_size)
        seen = (col >= row - left) & (col <= row + (0 if is_causal else right))
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.transpose(jnp.matmul(weights, v), (0, 2, 1, 3))


def cudnn_attention(q, k, v, *, is_causal: bool = False, local_window_size=None, **options):
    """`jax.nn.dot_product_attention` on cuDNN, but for the window that it computes wrongly without a word.

    Raises:
      ValueError: a window without keys to the right, and no `is_causal` (jax-ml/jax#39576: the whole future is
        seen); with `is_causal=True` it is the same pattern, and right.
      Whatever cuDNN refuses.
    """
    if local_window_size is not None and not is_causal and window(local_window_size)[1] == 0:
        raise ValueError(
            f"local_window_size={local_window_size} without is_causal is wrong through cuDNN: every query would see "
            "the whole future. Pass is_causal=True as well: it is the same pattern, and cuDNN computes that one right"
        )
    mask = {"is_causal": is_causal, "local_window_size": local_window_size}
    return jax.nn.dot_product_attention(q, k, v, **mask, **options, implementation="cudnn")


VARIANTS = {
    "naive": naive_attention,
    "xla": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": cudnn_attention,
}


def variant(name: str):
    """The attention function called `name`. Raises `ValueError` with the nearest right name."""
    if name in VARIANTS:
        return VARIANTS[name]
    near = difflib.get_close_matches(str(name).casefold(), VARIANTS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown variant {name!r}: {hint}Known are {', '.join(VARIANTS)}")


def visible(T: int, S: int, rows=None, *, is_causal: bool = False, local_window_size=None) -> np.ndarray:
    """Which keys each query sees: bool (rows, S), rows defaulting to all T queries.

    `local_window_size` is (left, right): a query sees `left` keys before itself and `right` after.
    An int means both.
    """
    row = np.arange(T)[:, None] if rows is None else np.asarray(rows)[:, None]
    col = np.arange(S)[None, :]
    seen = np.ones((row.shape[0], S), bool)
    if is_causal:
        seen &= col <= row
    if local_window_size is not None:
        left, right = window(local_window_size)
        seen &= (col >= row - left) & (col <= row + right)
    return seen


def window(size) -> tuple[int, int]:
    """JAX's `local_window_size` as (left, right): keys that a query sees before itself and after.

    Raises `ValueError` for anything but one or two whole numbers.
    """
    try:
        left, right = (size, size) if np.ndim(size) == 0 else size
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(f"local_window_size must be a number of keys or (left, right), got {size!r}") from None


def visible_pairs(T: int, S: int, *, is_causal: bool = False, local_window_size=None) -> int:
    """How many (query, key) pairs are visible: T·S without a mask. Counted by rows, in O(T)."""
    row = np.arange(T)
    last = np.full(T, S - 1)
    first = np.zeros(T, int)
    if is_causal:
        last = np.minimum(last, row)
    if local_window_size is not None:
        left, right = window(local_window_size)
        first, last = np.maximum(first, row - left), np.minimum(last, row + right)
    return int(np.maximum(0, last - first + 1).sum())


def flops(shape: Shape, *, is_causal: bool = False, local_window_size=None) -> int:
    """FLOPs of the forward pass: 4·B·N·H for each visible pair (two matrix products, two FLOPs a multiply-add).

    Pairs that the mask hides are not counted, so that a kernel that skips them gains no false TFLOP/s.
    """
    pairs = visible_pairs(shape.T, shape.S, is_causal=is_causal, local_window_size=local_window_size)
    return 4 * shape.B * shape.N * shape.H * pairs


def min_bytes(shape: Shape, itemsize: int) -> int:
    """The fewest bytes that must move: q, k and v read once, the output written once."""
    return itemsize * (2 * shape.B * shape.T * shape.N * shape.H + 2 * shape.B * shape.S * shape.K * shape.H)


def weight_bytes(shape: Shape, itemsize: int) -> int:
    """Bytes of the (B, N, T, S) weight matrix."""
    return itemsize * shape.B * shape.N * shape.T * shape.S


def reference(
    q, k, v, *, bias=None, mask=None, scale=None, is_causal=False, local_window_size=None,
    query_seq_lengths=None, key_value_seq_lengths=None, rows=None,
) -> np.ndarray:  # fmt: skip
    """float64 attention in NumPy: the truth that everything is checked against.

    Args:
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H); any supported dtype.
      bias, mask: broadcastable to (B, N, T, S); the mask is True where a query sees a key.
      scale: of the scores; 1/√H if not given.
      query_seq_lengths, key_value_seq_lengths: (B,) valid lengths.
      rows: query positions to compute; all if not given.

    Returns:
      (B, len(rows), N, H) float64.

    Raises as `attnlab.inputs.check_qkv`.
    """
    B, T, S, N, K, H = check_qkv(q, k, v)
    rows = np.arange(T) if rows is None else np.asarray(rows)
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    q, k, v = q[:, :, rows], np.repeat(k, N // K, axis=1), np.repeat(v, N // K, axis=1)

    def pick(x):  # the chosen rows of something broadcastable to (B, N, T, S)
        x = np.asarray(x)
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        return x if x.shape[2] == 1 else x[:, :, rows]

    logits = np.matmul(q, k.transpose(0, 1, 3, 2))
    logits *= 1 / math.sqrt(H) if scale is None else float(scale)
    if bias is not None:
        logits += pick(bias).astype(np.float64)
    seen = visible(T, S, rows, is_causal=is_causal, local_window_size=local_window_size)[None, None]
    if mask is not None:
        seen = seen & pick(mask)
    if query_seq_lengths is not None:
        seen = seen & (rows[None] < np.asarray(query_seq_lengths)[:, None])[:, None, :, None]
    if key_value_seq_lengths is not None:
        seen = seen & (np.arange(S)[None] < np.asarray(key_value_seq_lengths)[:, None])[:, None, None, :]
    if not seen.all():
        logits = np.where(seen, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    logits -= np.where(np.isfinite(top), top, 0.0)
    np.exp(logits, out=logits)
    total = logits.sum(axis=-1, keepdims=True)
    blind = total == 0  # sees no key: uniform weights, so the mean of v
    if blind.any():
        logits = np.where(blind, 1.0, logits)
        total = np.where(blind, float(S), total)
    logits /= total
    out = np.matmul(logits, v).transpose(0, 2, 1, 3)
    if query_seq_lengths is not None:
        out = out * (rows[None] < np.asarray(query_seq_lengths)[:, None])[:, :, None, None]
    return out


def reference_gradients(q, k, v, dout, *, scale=None, is_causal=False, local_window_size=None):
    """float64 gradients of Σ out·dout: the truth for dq, dk and dv. Written out by hand, without autodiff.

    Args:
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H).
      dout: (B, T, N, H), the gradient of the output.
      scale, is_causal, local_window_size: as for `reference`; every query must see a key.

    Returns:
      dq, dk, dv in float64 NumPy, in the shapes of q, k, v.

    Raises as `attnlab.inputs.check_qkv`, and `ValueError` where a query sees no key or `dout` has not q's shape.
    """
    B, T, S, N, K, H = check_qkv(q, k, v)
    if np.shape(dout) != q.shape:
        raise ValueError(f"dout must have the shape of q, {q.shape}, got {np.shape(dout)}")
    seen = visible(T, S, is_causal=is_causal, local_window_size=local_window_size)
    if not seen.any(axis=1).all():
        raise ValueError(f"query {int(np.argmin(seen.any(axis=1)))} sees no key: its gradient is not defined here")
    scale = 1 / math.sqrt(H) if scale is None else float(scale)
    group = N // K
    q, dout = (np.asarray(x, np.float64).reshape(B, T, K, group, H) for x in (q, dout))
    k, v = (np.asarray(x, np.float64) for x in (k, v))
    logits = np.einsum("btkgh,bskh->bkgts", q, k, optimize=True) * scale
    logits = np.where(seen, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dv = np.einsum("bkgts,btkgh->bskh", weights, dout, optimize=True)
    dweights = np.einsum("btkgh,bskh->bkgts", dout, v, optimize=True)
    dlogits = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))  # softmax's Jacobian
    dq = np.einsum("bkgts,bskh->btkgh", dlogits, k, optimize=True) * scale
    dk = np.einsum("bkgts,btkgh->bskh", dlogits, q, optimize=True) * scale
    return dq.reshape(B, T, N, H), dk, dv


def sampled_rows(shape: Shape) -> np.ndarray | None:
    """Query rows to check: None for all of them, else some of every batch and head, first and last among them."""
    if shape.B * shape.N * shape.T * shape.S <= SAMPLE_ABOVE:
        return None
    count = max(2, 2**23 // (shape.B * shape.N * shape.S))
    inside = np.random.default_rng(shape.T).integers(0, shape.T, count - 2)
    return np.unique(np.concatenate([[0, shape.T - 1], inside]))


def error_by_head(out, q, k, v, *, want=None, **options) -> np.ndarray:
    """‖out − reference‖ / ‖reference‖ of every batch element and head, (B, N), in float64.

    `options` are those of `reference`, `want` its result where it is at hand. NaN in `out` gives NaN. Above
    2^26 logits it looks at sampled query rows of every batch and head.

    Raises:
      TypeError: `out` is not one array of floats.
      ValueError: `out` does not have the shape of q.
    """
    shape = check_qkv(q, k, v)
    if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.floating):
        got = getattr(out, "dtype", type(out).__name__)
        raise TypeError(f"the output must be one array of floats with the shape of q, got {got}")
    if out.shape != q.shape:
        raise ValueError(f"the output must have the shape of q, {q.shape}, got {out.shape}")
    rows = sampled_rows(shape)
    want = reference(q, k, v, rows=rows, **options) if want is None else want
    got = np.asarray(out if rows is None else out[:, rows], np.float64)
    missed = np.linalg.norm(got - want, axis=(1, 3))
    size = np.linalg.norm(want, axis=(1, 3))
    missed[np.asarray(jnp.isnan(out).any(axis=(1, 3)))] = math.nan  # in rows that are not sampled too
    return missed / np.where(size > 0, size, 1.0)


def relative_error(out, q, k, v, **options) -> float:
    """The worst head's error: the largest of `error_by_head`, NaN if `out` holds one.

    The worst, because one wrong head among thousands would hardly show in an error over everything.
    Options and errors are those of `error_by_head`.
    """
    return float(error_by_head(out, q, k, v, **options).max())


# What a correct implementation stays under, relative to float64. Inputs in these dtypes are exact in the
# reference, so only rounding inside counts: TF32 keeps 10 mantissa bits (2^-11 = 4.9e-4), bfloat16 7 (2^-8 =
# 3.9e-3), float16 10. Weights and outputs are rounded once or twice; the factor of four is for that.
TOLERANCE = {"float32": 4 * 2.0**-11, "float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8}
