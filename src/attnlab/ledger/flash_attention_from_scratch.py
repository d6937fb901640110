"""The claims of 08_flash_attention_from_scratch."""

from attnlab.attention import TOLERANCE
from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_bytes, format_number
from attnlab.flash import tiles
from attnlab.records import MissingRecord, Timing

claim = claims_of("08_flash_attention_from_scratch")
L4_SHARED = 99 * 2**10  # bytes; CUDA programming guide, compute capability 8.9


def _found(r, name: str, count: int = 1, **fields) -> list:
    """The findings of that name, at least `count` of them."""
    rows = r.latest(name=name, **fields)
    if len(rows) < count:
        raise MissingRecord(f"{len(rows)} findings named {name!r}, and it takes {count}")
    return rows


def _ms(r, label: str, table: str, mask: str) -> float:
    return on_device(r.timing(label, table=table, mask=mask)).ms


@claim(
    "online_is_exact", "In float64 the one-pass softmax differs from the two-pass one by less than 1e-11, on every row."
)
def _(r):
    rows = _found(r, "online softmax error", 4)
    worst = max(rows, key=lambda f: (f.value != f.value, f.value))  # a NaN is the worst
    return all(f.value < 1e-11 for f in rows), f"at most {format_number(worst.value, 2)}, on the row {worst.label!r}"


@claim("maximum_is_needed", "Without a maximum the sum of exponentials overflows at logits of 1e4, even in float64.")
def _(r):
    over = r.finding("overflows without the maximum")
    return bool(over), "it is infinite" if over else "it is finite"


@claim(
    "tiled_memory_is_linear",
    "From T 1024 to 4096 the temporaries of tiled attention grow less than 6 times, those of XLA's more than 14 times.",
)
def _(r):
    growth = {}
    for label in ("tiled", "xla"):
        sizes = {f.shape.T: f.value for f in _found(r, "temporaries", 2, label=label)}
        if not sizes.get(1024) or 4096 not in sizes:
            raise MissingRecord(f"temporaries of {label} at T 1024 and 4096")
        growth[label] = sizes[4096] / sizes[1024]
    words = ", ".join(f"{label} {times(x)}" for label, x in growth.items())
    return growth["tiled"] < 6 and growth["xla"] > 14, words


@claim(
    "scan_moves_everything",
    "By arithmetic, at this shape the scan moves more than 20 times the bytes of q, k, v and the output through "
    "memory.",
    needs="pallas_triton",
)
def _(r):
    moved, least = r.finding("bytes through memory", label="tiled"), r.finding("bytes at least")
    return moved > 20 * least, f"{format_bytes(moved)}, {times(moved / least)} as much"


@claim(
    "kernel_is_right",
    "In every case of section 3 the kernel's error is within its dtype's tolerance, and its log-sum-exp within 1e-4.",
)
def _(r):
    rows, sums = _found(r, "kernel error", 4), _found(r, "log-sum-exp error", 4)
    ok = all(f.value <= TOLERANCE[f.dtype] for f in rows) and all(f.value < 1e-4 for f in sums)
    worst = max(f.value / TOLERANCE[f.dtype] for f in rows)
    return ok, f"{len(rows)} cases, the worst at {format_number(worst, 2)} of its tolerance"


@claim("package_is_this_kernel", "With the same tile the notebook's kernel and the package's give the same bits.")
def _(r):
    rows = _found(r, "same bits as the package", 3)
    return all(f.value for f in rows), f"{sum(map(bool, (f.value for f in rows)))} of {len(rows)} cases"


@claim(
    "kernel_goes_through_triton",
    "The compiled program holds the kernel as a custom call to Triton.",
    needs="pallas_triton",
)
def _(r):
    call = r.finding("custom call", label="flash")
    return "triton" in call.lower(), call or "no custom call"


@claim(
    "triton_is_deprecated",
    "JAX warns that Pallas's Triton backend is deprecated, and still compiles this kernel through it.",
    needs="pallas_triton", others="JAX before 0.11 says nothing",
)  # fmt: skip
def _(r):
    words = r.finding("JAX warns", label="flash")
    return "deprecated" in words and "triton" in r.finding("custom call", label="flash").lower(), words


@claim("kernel_writes_no_scores", "The program of the kernel writes no T×S array to memory.")
def _(r):
    written = r.finding("T×S array written", label="flash")
    return not written, "one is written" if written else "none is written"


@claim(
    "kernel_beats_the_scan",
    "The plainest kernel, every block masked, takes less than half the time of the same algorithm in JAX.",
    needs="pallas_triton",
)
def _(r):
    scan, kernel = _ms(r, "tiled", "start", "full"), _ms(r, "plain", "kernel", "full")
    return kernel < scan / 2, f"{times(kernel / scan)} the time"


@claim(
    "skipping_pays",
    "Causal: skipping blocks, and masking only those on the diagonal, takes less than 0.7 of the time.",
    needs="pallas_triton",
)
def _(r):
    plain, skipping = (_ms(r, label, "kernel", "causal") for label in ("plain", "skipping"))
    return skipping < 0.7 * plain, f"{times(skipping / plain)} the time"


@claim(
    "l4_tile_fits",
    "The tiles chosen for an L4 (bfloat16, H 128) fit into the 99 KiB it allows. By arithmetic: none ran there.",
)
def _(r):
    sizes = [f.value for f in _found(r, "bytes of the L4's tile", 2)]
    return max(sizes) <= L4_SHARED, f"{format_bytes(max(sizes))} of {format_bytes(L4_SHARED)}"


def _tiles(r, mask: str) -> dict:
    rows = [x for x in r.latest(table="tiles", mask=mask) if isinstance(x, Timing)]
    if len(rows) < 2:
        raise MissingRecord(f"{len(rows)} tiles were timed, and it takes two")
    return {x.label: on_device(x).ms for x in rows}


@claim(
    "tile_matters",
    "Of the tiles tried, the slowest takes more than 1.25 times the time of the fastest.",
    needs="pallas_triton",
)
def _(r):
    ms = _tiles(r, "full")
    slow, fast = max(ms, key=ms.get), min(ms, key=ms.get)
    return ms[slow] > 1.25 * ms[fast], f"{times(ms[slow] / ms[fast])}: {slow} against {fast}"


@claim(
    "chosen_tile_is_good",
    "The tile that the package chooses is within 8% of the fastest tried, without a mask and causal.",
    needs="pallas_triton",
)
def _(r):
    share = {}
    for mask in ("full", "causal"):
        ms, row = _tiles(r, mask), r.find(table="tiles", mask=mask)[-1]
        capability = tuple(int(x) for x in str(row.env.get("capability")).split(".") if x.isdigit())
        if capability not in tiles.SHARED_KIB:
            raise MissingRecord(f"the shared memory of compute capability {row.env.get('capability')}")
        shared = tiles.SHARED_KIB[capability] * 2**10
        label = "{} × {}, {} warps, {} stages".format(*tiles.choose(row.shape.H, 2, shared, is_causal=mask == "causal"))
        if label not in ms:
            raise MissingRecord(f"a time of the chosen tile, {label}")
        share[mask] = ms[label] / min(ms.values())
    return max(share.values()) <= 1.08, ", ".join(f"{mask} {times(x)} the fastest's time" for mask, x in share.items())


@claim(
    "hopper_beats_triton",
    "The Hopper kernel has more than 1.15 times the TFLOP/s of the tuned Triton kernel, without a mask.",
    needs="wgmma",
)
def _(r):
    triton, hopper = (_ms(r, label, "final", "full") for label in ("flash", "hopper"))
    return triton > 1.15 * hopper, times(triton / hopper)


def _shares(r, label: str) -> list[tuple[int, float]]:
    """(T, TFLOP/s over cuDNN's), by T."""
    return sorted((f.shape.T, f.value) for f in _found(r, "share of cuDNN", 3, label=label))


def _told(shares) -> str:
    return ", ".join(f"T {T}: {share:.0%}" for T, share in shares)


def _reaches(r, label: str, least: float):
    shares = _shares(r, label)
    return all(share >= least for _, share in shares), _told(shares)


@claim(
    "hopper_reaches_cudnn",
    "Without a mask the course's Hopper kernel reaches at least 75% of cuDNN's TFLOP/s at every T.",
    needs="wgmma",
)
def _(r):
    return _reaches(r, "hopper, causal False", 0.75)


@claim(
    "hopper_reaches_cudnn_causal",
    "Causal, the course's Hopper kernel reaches at least 70% of cuDNN's TFLOP/s at every T.",
    needs="wgmma",
)
def _(r):
    return _reaches(r, "hopper, causal True", 0.70)


@claim(
    "triton_share_of_cudnn",
    "The notebook's own kernel, through Triton, reaches more than 60% of cuDNN's TFLOP/s at every T, causal or not.",
    needs="wgmma",
)
def _(r):
    full, causal = (_shares(r, f"flash, causal {mask}") for mask in (False, True))
    ok = all(s > 0.60 for _, s in [*full, *causal])
    return ok, f"no mask: {_told(full)}; causal: {_told(causal)}"


def _counted(r, what: str) -> dict:
    """{label: number} of one of Nsight Compute's counters."""
    return {f.label: f.value for f in _found(r, what, 2)}


@claim(
    "matrix_units_wait",
    "In the Triton kernel the matrix units are busy for less than 65% of the time, in the Hopper kernel for more.",
    needs="wgmma",
)
def _(r):
    busy = _counted(r, "matrix units busy, %")
    if not {"flash", "hopper"} <= busy.keys():
        raise MissingRecord("the counters of both kernels")
    ok = busy["flash"] < 65 < busy["hopper"]
    return ok, ", ".join(f"{label} {value:.0f}%" for label, value in busy.items())


@claim(
    "memory_is_not_the_limit",
    "Memory is busy for less than 10% of what it could do, in every one of these kernels.",
    needs="wgmma",
)
def _(r):
    busy = _counted(r, "memory busy, %")
    return all(value < 10 for value in busy.values()), ", ".join(f"{x} {value:.1f}%" for x, value in busy.items())


@claim("kernel_repeats_itself", "The kernel gives the same bits in two runs.")
def _(r):
    rows = _found(r, "same bits twice")
    return all(f.value for f in rows), ", ".join(
        f"{f.label}: {'the same' if f.value else 'not the same'}" for f in rows
    )
