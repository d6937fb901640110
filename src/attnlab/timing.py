"""Clocks. `benchmark` measures one call and refuses a time that physics does not allow.

On a GPU the clock is CUPTI: the device's own record of when each kernel began and ended. Where CUPTI is
refused, a chain of dependent calls gives the slope, and the row says so. On a CPU, and as a last resort,
it is the host's clock around a blocked call.
"""

import dataclasses
import gc
import statistics
import time

import jax
from jax import monitoring

from attnlab import device as _device
from attnlab import evidence
from attnlab.attention import flops as count_flops
from attnlab.attention import min_bytes, window
from attnlab.inputs import memory_errors, require_memory
from attnlab.records import LOG, Shape, Timing

CHAIN = 8  # calls in the shorter chain; the longer has twice as many


class ImpossibleTime(ValueError):
    """A time below what the device's arithmetic and memory allow: the clock did not wait for the work."""


class MergedCalls(RuntimeError):
    """A repeated call that the compiler merged or hoisted, so that timing it would count work that never ran."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must do: shape, dtype, mask, FLOPs and the fewest bytes; None where unknown."""

    shape: Shape | None
    dtype: str
    mask: str
    flops: float | None
    bytes: float | None

    def bound_ms(self, device: _device.Device) -> float | None:
        """The time in ms that `device` cannot beat, or None if its rates or the work are unknown."""
        if device.ceilings is None or self.flops is None or self.bytes is None:
            return None
        return device.ceilings.bound_ms(self.flops, self.bytes, self.dtype)


def work_of(args, *, is_causal=False, local_window_size=None, flops=None, nbytes=None, dtype=None) -> Work:
    """The `Work` of attention on `args` = (q, k, v); for other arguments only what is given is known."""
    dtype = str(dtype or getattr(args[0], "dtype", "")) if args else ""
    mask = "causal" if is_causal else "full"
    if local_window_size is not None:
        mask = f"window {window(local_window_size)}" + (" causal" if is_causal else "")
    shape = None
    if len(args) >= 3 and all(getattr(a, "ndim", 0) == 4 for a in args[:3]):
        shape = Shape.of(args[0], args[1])
        if flops is None:
            flops = count_flops(shape, is_causal=is_causal, local_window_size=local_window_size)
        if nbytes is None:
            nbytes = min_bytes(shape, args[0].dtype.itemsize)
    return Work(shape, dtype, mask, flops, nbytes)


def check_time(ms: float, work: Work, device: _device.Device | None = None) -> float | None:
    """Hold `ms` against the bound of `work` on `device` (default: this one) and return the bound in ms.

    Returns None, and checks nothing, where the device's ceilings are unknown.

    Raises:
      ImpossibleTime: with the arithmetic in the message.
    """
    device = device or _device.current()
    bound = work.bound_ms(device)
    if bound is not None and not ms >= bound:  # so that NaN does not pass
        c = device.ceilings
        peak = c.tflops[work.dtype]
        memory = f", and at least {work.bytes / 1e6:,.2f} MB must move" + (
            f" ({c.l2 / 2**20:.0f} MiB of cache, then {c.gbps:,.0f} GB/s)" if c.gbps else ""
        )
        raise ImpossibleTime(
            f"{ms:.4g} ms is impossible on {device.name}: {work.shape or 'this call'} takes {work.flops / 1e9:,.3f} "
            f"GFLOP, which at {peak:,.3g} TFLOP/s ({work.dtype}; {c.source}) is {work.flops / peak / 1e9:.4g} ms"
            f"{memory}. No clock can show less than {bound:.4g} ms. Either the clock stopped before the work did "
            "(call jax.block_until_ready on the result inside the timed region), or the work did not run as counted."
        )
    return bound


def _spread(samples) -> tuple[float, float, float]:
    """20th percentile, median, 80th percentile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return cuts[0], statistics.median(samples), cuts[3]


def _wall_once(fn, args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return (time.perf_counter() - start) * 1e3


def _wall(fn, args, seconds: float) -> list[float]:
    """Milliseconds of blocked calls, 3 to 1000 of them within `seconds`, after a tenth of that to settle.

    Threads that compiled a program or multiplied the reference's matrices spin for some 30 ms after their
    work, and slow the host down for calls of a few microseconds.
    """
    settled = time.perf_counter() + 0.1 * seconds
    first = _wall_once(fn, args)
    while time.perf_counter() < settled:
        first = _wall_once(fn, args)
    count = max(3, min(1000, int(0.9 * seconds * 1e3 / max(first, 1e-3))))
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection takes longer than many a call
    try:
        return [_wall_once(fn, args) for _ in range(count)]
    finally:
        if collecting:
            gc.enable()


def _cupti(fn, args, count: int) -> list[list[tuple[str, float]]]:
    """Kernels (name, ms) of each of `count` calls, by CUPTI. Raises if CUPTI can't be had."""
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.measure(fn, aggregate=False, iterations=count)(*args)
    if not runs:
        raise RuntimeError("CUPTI reported no kernel")
    return runs if count > 1 else [runs]


_LOOKED = []  # "hits" or "misses" for each program that JAX looked for in its persistent cache


def _hear(event: str, **_) -> None:
    _, _, what = event.partition("/compilation_cache/cache_")
    if what in ("hits", "misses"):
        _LOOKED.append(what)


monitoring.register_event_listener(_hear)


def compile_timed(fn, *args) -> tuple[jax.stages.Compiled, float | None]:
    """The program of `fn(*args)` for the current device, and the seconds that tracing and compiling took.

    The seconds are None where JAX found the program in its persistent cache: reading a file is not compiling.
    """
    before, start = len(_LOOKED), time.perf_counter()
    # A function object that jit has not seen, so that an earlier compilation is not found and called free.
    program = jax.jit(lambda *a: fn(*a)).lower(*args).compile()
    seconds = time.perf_counter() - start
    return program, None if _LOOKED[before:][-1:] == ["hits"] else seconds  # the last one is the whole program


def eager_kernels(fn, *args) -> list[tuple[str, float]] | None:
    """Kernels (name, ms) that `fn(*args)` launches as it stands, one operation after the other, without jit.

    None where CUPTI can't be had.
    """
    if _device.current().kind != "gpu":
        return None
    try:
        # No public call profiles what is not compiled as one: `profiler.measure` puts it under jit.
        from jax._src.lib import mosaic_gpu

        cupti = mosaic_gpu._mosaic_gpu_ext
        jax.block_until_ready(fn(*args))  # compiles each operation
        cupti._cupti_init()
        try:
            jax.block_until_ready(fn(*args))
        finally:
            kernels = cupti._cupti_get_timings(True)
    except Exception:
        return None
    return list(kernels) or None


def chained(fn, count: int):
    """`fn` applied `count` times in one program, each call fed by the last one's output.

    A loop that repeats a call with the same inputs runs once: the compiler merges the copies. Only a true
    dependence survives, so the output takes the place of the first argument and must have its shape.
    """

    def run(x, *rest):
        for _ in range(count):
            x = fn(x, *rest)
        return x

    return run


def require_repeated(single: evidence.Program, repeated: evidence.Program, count: int) -> None:
    """Raise `MergedCalls` unless `repeated` does `count` times the matrix products of `single`."""
    if not single.matmuls or repeated.matmuls != count * single.matmuls:
        raise MergedCalls(
            f"{count} calls should run {count * single.matmuls} matrix products, the compiled program has "
            f"{repeated.matmuls}: feed each call with the output of the one before"
        )


def _chain(fn, args, single: evidence.Program, seconds: float) -> list[float]:
    """Milliseconds a call as the slope between chains of CHAIN and 2·CHAIN dependent calls."""
    out = jax.eval_shape(fn, *args)
    if (getattr(out, "shape", None), getattr(out, "dtype", None)) != (args[0].shape, args[0].dtype):
        raise MergedCalls("the output can't take the place of the first argument, so calls can't be chained")
    programs = []
    for count in (CHAIN, 2 * CHAIN):
        compiled = jax.jit(chained(fn, count)).lower(*args).compile()
        require_repeated(single, evidence.of_compiled(compiled), count)
        programs.append(compiled)
    short, long = programs
    first = _wall_once(short, args) + _wall_once(long, args)
    pairs = max(3, min(30, int(seconds * 1e3 / max(first, 1e-3))))
    slopes = [(_wall_once(long, args) - _wall_once(short, args)) / CHAIN for _ in range(pairs)]
    if statistics.median(slopes) <= 0:
        raise MergedCalls("the longer chain took no longer than the shorter: a call is too short for this clock")
    return slopes


def _first_line(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:160]}" if lines else type(e).__name__


def benchmark(
    fn, *args, label: str, table: str = "", is_causal: bool = False, local_window_size=None,
    flops: float | None = None, nbytes: float | None = None, dtype: str | None = None, check=None,
    seconds: float = 0.5, device: _device.Device | None = None,
) -> Timing:  # fmt: skip
    """Compile `fn(*args)` and time one call of it.

    Args:
      fn: a function that `jax.jit` can compile.
      args: its arguments; for attention q (B, T, N, H), k and v (B, S, K, H).
      label: the variant, as tables and claims name it.
      table: the comparison that this row belongs to.
      is_causal, local_window_size: the mask that `fn` applies, for counting FLOPs. Not passed to `fn`.
      flops, nbytes: of one call, where `args` are not q, k, v.
      dtype: in which the FLOPs are done, where that is not the dtype of the first argument.
      check: called with the first output before any clock runs; returns its relative error for the record,
        or raises to refuse the row.
      seconds: about how long to measure with each clock, after compiling.
      device: whose bound to hold the time against; default the device of this process.

    Returns:
      A `Timing` in ms, also added to the log. Its `clock` says where the time came from, its `note` why a
      better clock was not used. The caches are warm: the same inputs are used in every call.

    Raises:
      ImpossibleTime: the time is below the physical bound.
      MemoryError: the program needs more memory than is free.
      Whatever `fn`, the compiler or `check` raises: a refusal in the library's own words.
    """
    device = device or _device.current()
    work = work_of(
        args, is_causal=is_causal, local_window_size=local_window_size, flops=flops, nbytes=nbytes, dtype=dtype
    )  # fmt: skip
    what = f"{label} at {work.shape or 'this size'}"
    with memory_errors(what, device):  # autotuning runs candidates
        compiled, compile_s = compile_timed(fn, *args)
    single = evidence.of_compiled(compiled)
    memory = compiled.memory_analysis()
    require_memory(
        (single.temp_bytes or 0) + getattr(memory, "output_size_in_bytes", 0),
        what,
    )
    with memory_errors(what, device):
        out = jax.block_until_ready(compiled(*args))
    error = check(out) if check else None
    del out
    wall = _wall(compiled, args, seconds)
    samples, clock, kernels, note = wall, "wall", (), ""
    if device.kind == "gpu":
        count = max(5, min(20, int(seconds * 1e3 / max(statistics.median(wall), 1e-3))))
        try:
            runs = _cupti(compiled, args, count)
            samples, clock = [sum(ms for _, ms in run) for run in runs], "cupti"
            # The median of each kernel over the runs; profiler.measure has checked that their names agree.
            kernels = tuple(
                (column[0][0], statistics.median(ms for _, ms in column)) for column in zip(*runs, strict=True)
            )
        except Exception as refused:
            note = f"no CUPTI ({_first_line(refused)})"
            try:
                samples, clock = _chain(fn, args, single, seconds), "chain"
                note += ": slope of chained calls"
            except Exception as e:
                note += f"; no chain ({_first_line(e)}): host clock, dispatch included"
    p20, ms, p80 = _spread(samples)
    check_time(statistics.median(wall), work, device)
    return LOG.add(
        Timing(
            label=label,
            shape=work.shape,
            dtype=work.dtype,
            mask=work.mask,
            ms=ms,
            p20=p20,
            p80=p80,
            samples=len(samples),
            clock=clock,
            wall_ms=statistics.median(wall),
            compile_s=compile_s,
            temp_bytes=single.temp_bytes,
            kernels=kernels,
            flops=work.flops,
            bytes=work.bytes,
            bound_ms=check_time(ms, work, device),
            error=error,
            note=note,
            table=table,
            env=_device.environment(),
        )  # fmt: skip
    )
