"""Variants side by side on the same inputs: correctness first, then the clock, or the refusal in its own words."""

from attnlab import device as _device
from attnlab.attention import TOLERANCE, relative_error
from attnlab.display import Progress
from attnlab.inputs import check_qkv
from attnlab.records import LOG, Finding, Records
from attnlab.timing import benchmark, work_of


def refusal(e: Exception) -> str:
    """The library's own words: the exception's class and the first line of its message."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:200]}" if lines else type(e).__name__


def compare(variants: dict, q, k, v, *, table: str, is_causal=False, local_window_size=None, **options) -> Records:
    """Check and time each of `variants` (label → function of q, k, v) on the same inputs.

    A variant that raises, runs out of memory, or misses the reference by more than
    `attnlab.attention.TOLERANCE` of its dtype is not timed: its row is a `Finding` named "refused".

    Args:
      variants: functions that apply the mask described by `is_causal` and `local_window_size` themselves.
      q, k, v: (B, T, N, H), (B, S, K, H), (B, S, K, H).
      table: the name of the comparison, under which saved rows are found.
      options: of `benchmark`.

    Returns:
      One record a variant, in order.
    """
    check_qkv(q, k, v)
    allowed = {"flops", "nbytes", "seconds", "device"}
    if wrong := options.keys() - allowed:  # else every row would be refused for the caller's slip
        raise TypeError(f"compare takes no {', '.join(sorted(wrong))}: its options are {', '.join(sorted(allowed))}")
    work = work_of((q, k, v), is_causal=is_causal, local_window_size=local_window_size)

    def check(out) -> float:
        error = relative_error(out, q, k, v, is_causal=is_causal, local_window_size=local_window_size)
        if not error <= TOLERANCE[work.dtype]:  # so that NaN fails too
            raise ArithmeticError(
                f"relative error {error:.2g} against float64, and {work.dtype} is allowed {TOLERANCE[work.dtype]:.2g}"
            )
        return error

    rows = Records()
    with Progress(len(variants), table) as progress:
        for label, fn in variants.items():
            progress.step(label)
            try:
                row = benchmark(
                    fn, q, k, v, label=label, table=table, is_causal=is_causal,
                    local_window_size=local_window_size, check=check, **options,
                )  # fmt: skip
            except Exception as e:
                row = LOG.add(
                    Finding(
                        name="refused",
                        value=refusal(e),
                        label=label,
                        shape=work.shape,
                        dtype=work.dtype,
                        mask=work.mask,
                        table=table,
                        env=_device.environment(),
                    )  # fmt: skip
                )
            rows.append(row)
    return rows
