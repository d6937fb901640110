"""The arrays of the course: q (B, T, N, H), k and v (B, S, K, H), and the checks that they really are."""

import contextlib
import math
import operator
import re

import jax
import jax.numpy as jnp

from attnlab import device as _device
from attnlab.records import Shape

DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(dtype) -> str:
    """The name of a supported dtype. Raises `TypeError` for float64, integers and all else."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise TypeError(f"attention here takes {', '.join(DTYPES)}, got {name}: cast with .astype(jnp.bfloat16), say")
    return name


def shape_of(B: int, T: int, N: int, H: int, *, S=None, K=None) -> Shape:
    """The checked `Shape` of these sizes, S defaulting to T and K to N. Raises as `qkv`."""
    sizes = dict(B=B, T=T, S=T if S is None else S, N=N, K=N if K is None else K, H=H)
    for name, size in sizes.items():
        try:
            sizes[name] = operator.index(size)
        except TypeError:
            raise TypeError(f"{name} must be a whole number, got {size!r}") from None
        if sizes[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    shape = Shape(**sizes)
    if shape.N % shape.K:
        raise ValueError(f"K must divide N: {shape.N} query heads can't share {shape.K} KV heads evenly")
    return shape


def qkv(B: int = 4, T: int = 128, N: int = 8, H: int = 64, *, S=None, K=None, dtype="float32", seed: int = 0):
    """Random normal q (B, T, N, H), k and v (B, S, K, H) on the default device.

    Args:
      B, T, N, H: batch, query length, heads, head dim.
      S: key/value length; T if not given.
      K: KV heads; N if not given. Must divide N.
      dtype: float32, bfloat16 or float16. Drawn in float32 and rounded, so that all dtypes see the same draw.
      seed: of `jax.random.key`.

    Raises:
      ValueError: a size below 1, or K that does not divide N.
      TypeError: a size that is no integer, or an unsupported dtype.
      MemoryError: more than the device has free; the message says how much.
    """
    shape = shape_of(B, T, N, H, S=S, K=K)
    name = dtype_name(dtype)
    # The float32 draw and its rounded copy are both alive for a moment.
    need = 4 * 2 * (shape.B * shape.T * shape.N * shape.H + 2 * shape.B * shape.S * shape.K * shape.H)
    require_memory(need, f"q, k and v at {shape}")
    keys = jax.random.split(jax.random.key(seed), 3)
    dims = [(shape.B, shape.T, shape.N, shape.H)] + [(shape.B, shape.S, shape.K, shape.H)] * 2
    with memory_errors(f"q, k and v at {shape}"):
        return tuple(jax.random.normal(key, d, jnp.float32).astype(name) for key, d in zip(keys, dims, strict=True))


def require_memory(need: float, what: str) -> None:
    """Raise `MemoryError` if `need` bytes are more than the device has free."""
    free = _device.free_memory()
    if free is not None and need > free:
        raise MemoryError(
            f"{what} needs {need / 2**30:,.1f} GiB and {free / 2**30:,.1f} GiB are free on {_device.current().name}: "
            "lower B, T or N, or close what else holds the memory"
        )


@contextlib.contextmanager
def memory_errors(what: str, device: _device.Device | None = None):
    """Turn the runtime's RESOURCE_EXHAUSTED into a `MemoryError` that says what did not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" in str(e):
            asked = re.search(r"allocat\w*\s+([\d.]+ ?[KMGT]i?B|\d+ bytes)", str(e))
            more = f" (it asked for {asked[1]})" if asked else ""
            raise MemoryError(f"{what} ran out of memory on {(device or _device.current()).name}{more}") from e
        raise


def scale_of(scale, H: int) -> float:
    """The scale of the scores as a number, 1/√H for None. Raises `TypeError` for what is no number yet."""
    try:
        return 1 / math.sqrt(H) if scale is None else float(scale)
    except (TypeError, ValueError):  # JAX's error on a traced value is a TypeError
        raise TypeError(
            f"scale must be a Python number, known when the kernel is compiled, got {scale!r}: "
            "to learn it or trace it, multiply q by it and pass scale=1"
        ) from None


def check_qkv(q, k, v) -> Shape:
    """The `Shape` of q, k, v.

    Raises:
      ValueError: wrong rank, mismatched sizes, an empty axis, or K that does not divide N.
      TypeError: unsupported or mixed dtypes.
    """
    for name, x, axes in (("q", q, "(B, T, N, H)"), ("k", k, "(B, S, K, H)"), ("v", v, "(B, S, K, H)")):
        if getattr(x, "ndim", None) != 4:
            raise ValueError(f"{name} must have rank 4, {axes}, got shape {getattr(x, 'shape', type(x).__name__)}")
        if 0 in x.shape:
            raise ValueError(f"{name} has an empty axis: shape {x.shape}, {axes}. Every size must be at least 1")
        dtype_name(x.dtype)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape (B, S, K, H), got {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in B and H, got q {q.shape} (B, T, N, H) and k {k.shape} (B, S, K, H)")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"K must divide N: {q.shape[2]} query heads can't share {k.shape[2]} KV heads evenly")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    return Shape.of(q, k)
