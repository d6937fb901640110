"""Variants side by side on the same inputs: correctness first, then the clock, or the refusal in its own words."""

import inspect

from attnlab import device as _device
from attnlab.attention import TOLERANCE, reference, relative_error, sampled_rows
from attnlab.display import Progress
from attnlab.inputs import check_qkv
from attnlab.records import LOG, Finding, Records, Timing
from attnlab.timing import benchmark, work_of


def refusal(e: Exception) -> str:
    """The library's own words: the exception's class and the first line of its message."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200]}" if lines else type(e).__name__


def refused(e: Exception, **fields) -> Finding:
    """The row of a variant that could not be timed, entered into the log."""
    return LOG.add(Finding(name="refused", value=refusal(e), env=_device.environment(), **fields))


def measure(fn, *args, label: str, table: str, error, allowed: float, **options) -> Timing | Finding:
    """One row of a comparison: checked first, then timed; or the refusal.

    Args:
      fn, args, label, table: as for `attnlab.benchmark`.
      error: called with the first output; returns its relative error.
      allowed: the largest error with which the row is timed.
      options: of `attnlab.benchmark`, but for `check`.

    Returns:
      A `Timing`, or a `Finding` named "refused" with the reason: what was raised, out of memory, or too large
      an error.

    Raises:
      TypeError: an option that `attnlab.benchmark` does not have.
    """
    wrong = options.keys() - inspect.signature(benchmark).parameters.keys() | options.keys() & {"check"}
    if wrong:  # else the row would be refused for the caller's slip
        raise TypeError(f"measure takes no {', '.join(sorted(wrong))}")

    def check(out) -> float:
        found = error(out)
        if not found <= allowed:  # so that NaN fails too
            raise ArithmeticError(f"relative error {found:.2g}, and {allowed:.2g} is allowed")
        return found

    try:
        return benchmark(fn, *args, label=label, table=table, check=check, **options)
    except Exception as e:
        what = {name: options[name] for name in ("is_causal", "local_window_size", "dtype") if name in options}
        work = work_of(args, **what)
        return refused(e, label=label, table=table, shape=work.shape, dtype=work.dtype, mask=work.mask)


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
    want = None

    def error(out) -> float:
        nonlocal want  # one reference for all variants: it takes longer than most of them
        if want is None:
            want = reference(q, k, v, rows=sampled_rows(shape), **mask)
        return relative_error(out, q, k, v, want=want)

    for label, fn in variants.items():
        before(label)
        yield measure(
            lambda q, k, v, fn=fn: fn(q, k, v, **mask), q, k, v, label=label, table=table, error=error,
            allowed=TOLERANCE[str(q.dtype)], **mask, **options,
        )  # fmt: skip
