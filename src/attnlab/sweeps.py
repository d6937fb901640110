"""One comparison over many sizes: variants times axes, every row checked, and no row lost."""

import itertools
import math

import numpy as np

from attnlab.comparison import compared, refused
from attnlab.display import Progress
from attnlab.inputs import dtype_name, qkv, shape_of
from attnlab.records import Records, Timing
from attnlab.timing import work_of


def sweep(
    variants: dict, *, table: str, B=4, T=128, N=8, H=64, S=None, K=None, dtype="bfloat16",
    is_causal=False, local_window_size=None, **options,
) -> Records:  # fmt: skip
    """Run `compare` at every combination of sizes, on fresh random inputs each time.

    Where memory does not suffice, the row is refused and the sweep goes on. Interrupted (Kernel > Interrupt,
    Ctrl-C), it returns the rows measured so far and says how many are missing.

    Args:
      variants: label → function, as for `compare`.
      table: the name of the sweep, under which saved rows are found.
      B, T, N, H, S, K, dtype: sizes as for `attnlab.qkv`; a tuple, list or range of them is an axis.
      is_causal: of every row.
      local_window_size: of every row; a list of windows is an axis.
      options: of `compare`, such as `seconds` a row.

    Returns:
      One record a variant and combination, the first axis (in the order B, T, N, H, S, K, dtype, window)
      varying slowest.

    Raises:
      ValueError, TypeError: as `attnlab.qkv`, before anything is measured.
    """
    sizes = dict(B=B, T=T, N=N, H=H, S=S, K=K, dtype=dtype)
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal must be True or False, for every row, got {is_causal!r}")
    sizes = {name: value.tolist() if getattr(value, "ndim", 0) == 1 else value for name, value in sizes.items()}
    axes = {name: value if isinstance(value, (tuple, list, range)) else (value,) for name, value in sizes.items()}
    axes["local_window_size"] = local_window_size if isinstance(local_window_size, list) else (local_window_size,)
    if empty := [name for name, values in axes.items() if not len(values)]:
        raise ValueError(f"no values on the axis {empty[0]}")
    for window in axes["local_window_size"]:
        work_of((), local_window_size=window)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    shapes = [shape_of(*(p[name] for name in "BTNH"), S=p["S"], K=p["K"]) for p in points]
    dtypes = [dtype_name(p["dtype"]) for p in points]
    rows, total = Records(), len(points) * len(variants)
    with Progress(total, table) as progress:
        try:
            for seed, (point, shape, kind) in enumerate(zip(points, shapes, dtypes, strict=True)):
                mask = {"is_causal": is_causal, "local_window_size": point.pop("local_window_size")}
                where = ", ".join(f"{name} {size}" for name, size in point.items() if len(axes[name]) > 1)
                try:
                    q, k, v = qkv(**point, seed=seed)
                except MemoryError as e:
                    known = dict(shape=shape, dtype=kind, mask=work_of((), **mask).mask)
                    rows += [refused(e, label=label, table=table, **known) for label in variants]
                    continue
                for row in compared(
                    variants, q, k, v, table=table, **mask, **options,
                    before=lambda label, where=where: progress.step(f"{where} {label}"),
                ):  # fmt: skip
                    rows.append(row)
                del q, k, v
        except KeyboardInterrupt:
            print(f"Interrupted: {len(rows)} of {total} rows of {table!r} are measured and kept.")
    return rows


def crossover(rows, first: str, second: str, axis: str = "T", by: str = "ms") -> float | None:
    """Where `second` overtakes `first` (or falls behind it) along an axis of the shape, or None if it never does.

    Between the two measured sizes where their order changes, the ratio of their times is taken to be straight
    on logarithmic axes. With several changes the last counts: beyond it the order stays.

    Args:
      rows: of one sweep; timings of both labels at the same sizes and dtype.
      axis: a field of `Shape`.
      by: a field of `Timing`: "ms" or "wall_ms".

    Raises:
      ValueError: rows of several dtypes, shapes or masks, which would compare unequal things; one label twice; or
        fewer than two common sizes.
    """
    timed = [r for r in rows if isinstance(r, Timing) and r.label in (first, second)]
    if len({r.dtype for r in timed}) > 1:
        raise ValueError(
            f"rows of {', '.join(sorted({r.dtype for r in timed}))}: compare equal dtypes, rows.find(dtype=…)"
        )
    if first == second:
        raise ValueError(f"{first!r} against itself: give the two variants labels of their own")
    at, shapes = {first: {}, second: {}}, {}
    for r in timed:
        x = getattr(r.shape, axis)
        if shapes.setdefault(x, r.shape) != r.shape or shapes.setdefault((r.label, x), r.mask) != r.mask:
            raise ValueError(f"several shapes or masks at {axis} = {x}: give the rows of one sweep along {axis}")
        at[r.label][x] = getattr(r, by)
    common = sorted(at[first].keys() & at[second].keys())
    if len(common) < 2:
        raise ValueError(f"{first} and {second} were timed together at {len(common)} sizes of {axis}; it takes two")
    ratios = [math.log(at[first][x] / at[second][x]) for x in common]
    found, order = None, 0.0
    for (a, ra), (b, rb) in itertools.pairwise(zip(common, ratios, strict=True)):
        order = ra or order  # of the last sizes that differ: lines that only touch do not cross
        if order * rb < 0:
            found = math.exp(math.log(a) + (math.log(b) - math.log(a)) * ra / (ra - rb))
    return found
