"""Variants side by side on the same inputs: correctness first, then the clock, or the refusal in its own words."""

from attnlab import device as _device
from attnlab.attention import TOLERANCE, reference, relative_error, sampled_rows
from attnlab.display import Progress
from attnlab.inputs import check_qkv
from attnlab.records import LOG, Finding, Records
from attnlab.timing import benchmark, work_of


def refusal(e: Exception) -> str:
    """The library's own words: the exception's class and the first line of its message."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200]}" if lines else type(e).__name__


def refused(e: Exception, **fields) -> Finding:
    """The row of a variant that could not be timed, entered into the log."""
    return LOG.add(Finding(name="refused", value=refusal(e), env=_device.environment(), **fields))


def compare(variants: dict, q, k, v, *, table: str, is_causal=False, local_window_size=None, **options) -> Records:
    """Check and time each of `variants` (label → function) on the same inputs.

    A variant that raises, runs out of memory, or misses the reference by more than
    `attnlab.attention.TOLERANCE` of its dtype is not timed: its row is a `Finding` named "refused".

    Args:
      variants: functions of (q, k, v); called with `is_causal` and `local_window_size` too where these are given.
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H).
      table: the name of the comparison, under which saved rows are found.
      options: of `benchmark`.

    Returns:
      One record a variant, in order.
    """
    rows = Records()
    with Progress(len(variants), table) as progress:
        for row in compared(
            variants, q, k, v, table=table, is_causal=is_causal, local_window_size=local_window_size,
            before=progress.step, **options,
        ):  # fmt: skip
            rows.append(row)
    return rows


def compared(
    variants: dict, q, k, v, *, table, is_causal=False, local_window_size=None, before=lambda label: None, **options
):
    """Yield the row of each variant as `compare` makes it, with `before(label)` called ahead of each."""
    shape = check_qkv(q, k, v)
    allowed = {"flops", "nbytes", "seconds", "device"}
    if wrong := options.keys() - allowed:  # else every row would be refused for the caller's slip
        raise TypeError(f"compare takes no {', '.join(sorted(wrong))}: its options are {', '.join(sorted(allowed))}")
    mask = {"is_causal": True} if is_causal else {}
    if local_window_size is not None:
        mask["local_window_size"] = local_window_size
    work = work_of((q, k, v), **mask)
    want = None

    def check(out) -> float:
        nonlocal want  # one reference for all variants: it takes longer than most of them
        if want is None:
            want = reference(q, k, v, rows=sampled_rows(shape), **mask)
        error = relative_error(out, q, k, v, want=want)
        if not error <= TOLERANCE[work.dtype]:  # so that NaN fails too
            raise ArithmeticError(
                f"relative error {error:.2g} against float64, and {work.dtype} is allowed {TOLERANCE[work.dtype]:.2g}"
            )
        return error

    for label, fn in variants.items():
        before(label)
        try:
            row = benchmark(
                lambda q, k, v, fn=fn: fn(q, k, v, **mask), q, k, v, label=label, table=table, check=check,
                **mask, **options,
            )  # fmt: skip
        except Exception as e:
            row = refused(e, label=label, shape=work.shape, dtype=work.dtype, mask=work.mask, table=table)
        yield row
