"""The claims of 05_sweeps."""

from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_bytes, format_number
from attnlab.records import Finding, MissingRecord, Shape, Timing
from attnlab.sweeps import crossover

claim = claims_of("05_sweeps")
DEFAULT = Shape.square(4, 128, 8, 64)
HIDDEN = 1.25  # a gain by the host's clock that is smaller goes unnoticed
MEGABYTE = 2**20


def _by(r, axis: str, label: str, table: str, dtype: str = "bfloat16") -> dict[int, Timing]:
    """The timings of one variant of a sweep, by their size on an axis. Raises `MissingRecord` if there are none."""
    rows = [x for x in r.latest(label=label, table=table, dtype=dtype) if isinstance(x, Timing)]
    if not rows:
        raise MissingRecord(f"no timing of {label}, {dtype}, in {table!r}")
    return {getattr(x.shape, axis): x for x in sorted(rows, key=lambda x: getattr(x.shape, axis))}


def _lengths(r, *labels: str, least: int = 1) -> list[tuple]:
    """(T, row of each label) of the bfloat16 sweep, at the lengths from `least` on at which all were timed."""
    found = [_by(r, "T", label, "length, bfloat16") for label in labels]
    common = [T for T in found[0] if T >= least and all(T in rows for rows in found)]
    if not common:
        raise MissingRecord(f"{' and '.join(labels)} were not timed together at T = {least} or more")
    return [(T, *(on_device(rows[T]) for rows in found)) for T in common]


def _at(rows: dict, *sizes: int) -> list[Timing]:
    """The rows at these sizes. Raises `MissingRecord`."""
    for size in sizes:
        if size not in rows:
            raise MissingRecord(f"no row at {size} in {next(iter(rows.values())).table!r}")
    return [on_device(rows[size]) for size in sizes]


@claim(
    "short_gain_is_hidden",
    "At B4 T128 N8 H64 in bfloat16 cuDNN is at least twice as fast as the naive version on the device's clock; by the "
    "host's clock no gain of a half is left, and there may be a loss.",
    needs="cudnn_attention", others="Older material says: FlashAttention gains little below 512 tokens",
)  # fmt: skip
def _(r):
    naive, cudnn = (
        on_device(r.timing(x, table="default shape", dtype="bfloat16", shape=DEFAULT)) for x in ("naive", "cudnn")
    )
    device, host = naive.ms / cudnn.ms, naive.wall_ms / cudnn.wall_ms
    return device >= 2 and host < 1.5, f"naive over cuDNN: device {times(device)}, host {times(host)}"


@claim(
    "out_of_memory_is_survived",
    "Where the T×S arrays of XLA's version do not fit into memory, its row is refused, and cuDNN's row of that size is "
    "there.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    cudnn = {x.shape: x for x in r.latest(label="cudnn", table="length, bfloat16", dtype="bfloat16")}
    xla = r.latest(label="xla", table="length, bfloat16", dtype="bfloat16")
    refused = [x for x in xla if isinstance(x, Finding)]
    if not refused:
        raise MissingRecord("no row of XLA's was refused: every length that ran fitted into memory")
    memory = all("MemoryError" in str(x.value) for x in refused)
    there = all(isinstance(cudnn.get(x.shape), Timing) for x in refused)
    where = ", ".join(f"T {x.shape.T}" for x in refused)
    return memory and there, f"XLA refused at {where}, for memory: {memory}; cuDNN's rows there: {there}"


@claim(
    "gain_at_long_lengths",
    "At every length from 2048 on, in bfloat16, cuDNN is between 3 and 6 times as fast as the naive version.",
    needs="cudnn_attention", others="Older material says: FlashAttention is 2 to 4× faster",
)  # fmt: skip
def _(r):
    ratios = {T: naive.ms / cudnn.ms for T, naive, cudnn in _lengths(r, "naive", "cudnn", least=2048)}
    return all(3 <= x <= 6 for x in ratios.values()), ", ".join(f"T {T}: {times(x)}" for T, x in ratios.items())


@claim(
    "length_fills_the_device",
    "Length fills the device: at every length from 4096 on cuDNN reaches at least a third of the published peak.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    rows = [row for _, row in _lengths(r, "cudnn", least=4096)]
    if any(row.bound_ms is None for row in rows):
        raise MissingRecord("no published peak of this device")
    # At these lengths the bound is the arithmetic's: FLOPs over the peak.
    shares = [row.bound_ms / row.ms for row in rows]
    least = format_number(min(row.tflops for row in rows))
    return min(shares) >= 1 / 3, f"at least {min(shares):.0%} of the peak, {least} TFLOP/s"


@claim(
    "temporaries_by_length",
    "From 1024 on XLA's temporaries in bfloat16 grow fourfold with each doubling of T; cuDNN's stay below a megabyte "
    "at every length.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    xla, cudnn = (_by(r, "T", label, "length, bfloat16") for label in ("xla", "cudnn"))
    growth = [xla[2 * T].temp_bytes / xla[T].temp_bytes for T in xla if T >= 1024 and 2 * T in xla]
    if not growth:
        raise MissingRecord("XLA was not timed at a length from 1024 on together with its double")
    most = max(row.temp_bytes for row in cudnn.values())
    return all(3.5 <= x <= 4.5 for x in growth) and most < MEGABYTE, (
        f"XLA at each doubling: {', '.join(times(x) for x in growth)}; cuDNN at most {format_bytes(most)}"
    )


@claim(
    "memory_ratio_grows",
    "There is no one ratio of memory: with q, k, v and the output counted, XLA's over cuDNN's grows at least one and a "
    "half times with each doubling of T from 1024 on.",
    needs="cudnn_attention", others="Older material says: FlashAttention takes 10 to 20× less memory",
)  # fmt: skip
def _(r):
    found = {f.shape.T: f.value for f in r.latest(name="memory", label="xla over cudnn") if f.shape.T >= 1024}
    growth = [found[2 * T] / found[T] for T in found if 2 * T in found]
    if not growth:
        raise MissingRecord("XLA and cuDNN were not both timed at a length from 1024 on and at its double")
    return min(growth) >= 1.5, ", ".join(f"T {T}: {times(x)}" for T, x in sorted(found.items()))


@claim(
    "xla_falls_behind",
    "In bfloat16 XLA's version is at least a tenth slower than the naive one at every length from 2048 on; if they "
    "cross, it is below that.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    pairs = _lengths(r, "naive", "xla")
    long = [xla.ms / naive.ms for T, naive, xla in pairs if T >= 2048]
    if not long or len(pairs) < 2:
        raise MissingRecord("naive and XLA were not timed together at 2048 and below")
    at = crossover([row for _, *both in pairs for row in both], "naive", "xla")
    where = "no crossover" if at is None else f"crossover at T = {at:.0f}"
    return min(long) > 1.1 and (at is None or at < 2048), f"XLA over naive at least {times(min(long))}; {where}"


@claim(
    "cudnn_leads_everywhere",
    "On the device's clock in bfloat16 there is no crossover: cuDNN is ahead of the naive version at every length.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    pairs = _lengths(r, "naive", "cudnn")
    if len(pairs) < 2:
        raise MissingRecord("naive and cuDNN were timed together at one length only")
    ratios = {T: naive.ms / cudnn.ms for T, naive, cudnn in pairs}
    T = min(ratios, key=ratios.get)
    return ratios[T] > 1, f"naive over cuDNN at {len(pairs)} lengths: at least {times(ratios[T])}, at T = {T}"


@claim(
    "hidden_behind_dispatch",
    "By the host's clock a gain of a quarter goes unnoticed at short lengths: at T = 128 it is hidden behind the "
    "dispatch, from 4096 on it is seen.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    ratios = {T: naive.wall_ms / cudnn.wall_ms for T, naive, cudnn in _lengths(r, "naive", "cudnn")}
    long = [x for T, x in ratios.items() if T >= 4096]
    if 128 not in ratios or not long:
        raise MissingRecord("naive and cuDNN were not timed together at T = 128 and at 4096 or more")
    hidden = max((T for T, x in ratios.items() if x < HIDDEN), default=0)
    return ratios[128] < HIDDEN <= min(long), (
        f"{times(ratios[128])} at T = 128, at least {times(min(long))} from 4096 on; hidden up to T = {hidden}"
    )


@claim(
    "two_steps_two_causes",
    "At T = 128 and at T = 4096 the dtype and the kernel each make attention faster, and the kernel the more.",
    needs="cudnn_attention", others="Older material says: bfloat16 on cuDNN over float32 by hand is the speed-up",
)  # fmt: skip
def _(r):
    half = {T: (naive, cudnn) for T, naive, cudnn in _lengths(r, "naive", "cudnn")}
    exact = _by(r, "T", "naive", "length, float32", "float32")
    words, ok = [], True
    for T, row in zip((128, 4096), _at(exact, 128, 4096), strict=True):
        if T not in half:
            raise MissingRecord(f"naive and cuDNN were not timed together at T = {T}")
        naive, cudnn = half[T]
        dtype, kernel = row.ms / naive.ms, naive.ms / cudnn.ms
        ok &= kernel > dtype > 1
        words.append(f"T {T}: dtype {times(dtype)}, kernel {times(kernel)}")
    return ok, "; ".join(words)


@claim(
    "batch_fills_the_device",
    "At T = 256 sixteen sequences take cuDNN less than half of sixteen times the time of one.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    one, sixteen = _at(_by(r, "B", "cudnn", "batch, bfloat16"), 1, 16)
    return sixteen.ms < 8 * one.ms, (
        f"{times(sixteen.ms / one.ms)} the time, from {format_number(one.tflops)} to {format_number(sixteen.tflops)} "
        "TFLOP/s"
    )


@claim(
    "large_heads_are_faster",
    "cuDNN takes head dims 32, 64 and 128; at equal FLOPs, N·H = 512, it is at least a fifth faster at 128 than at 32.",
    needs="cudnn_attention",
)  # fmt: skip
def _(r):
    refused = [x for x in r.latest(label="cudnn", table="heads of one width") if isinstance(x, Finding)]
    if refused:
        return False, f"refused at {', '.join(str(x.shape) for x in refused)}"
    rows = _at(_by(r, "H", "cudnn", "heads of one width"), 32, 64, 128)
    words = ", ".join(f"H {x.shape.H}: {format_number(x.tflops)}" for x in rows)
    return rows[0].ms >= 1.2 * rows[2].ms, f"TFLOP/s at {words}"
