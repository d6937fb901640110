"""Made up for the tests of 08_flash_attention_from_scratch; see `crafted`."""

import numpy as np

from attnlab.records import Shape
from crafted import LONG, fact, row

NAN = float("nan")


def errors(*values):
    return [fact("online softmax error", x, f"row {i}") for i, x in enumerate(values)]


def memory(tiled, xla):
    return [
        fact("temporaries", size, label, shape=Shape.square(2, T, 8, 64))
        for label, sizes in (("tiled", tiled), ("xla", xla))
        for T, size in zip((1024, 2048, 4096), sizes, strict=True)
    ]


def moved(times):
    return [fact("bytes through memory", times * 2**27, "tiled"), fact("bytes at least", 2**27, "any")]


def cases(error=3e-3, lse=1e-6, same=True):
    found = []
    for i, last in enumerate((2e-3, 2e-3, 2e-3, error)):
        where = dict(label="causal False", shape=Shape.square(1, 64 + i, 2, 64), dtype="bfloat16")
        found.append(fact("kernel error", last, **where))
        found.append(fact("log-sum-exp error", lse if i == 3 else 1e-6, **where))
        found.append(fact("same bits as the package", same or i < 3, **where))
    return found


def timed(mask="full", **ms):
    """A row a label: start, kernel, tiles and final tables by the label."""
    tables = {"tiled": "start", "plain": "kernel", "skipping": "kernel", "flash": "final", "hopper": "final"}
    return [
        row(label.replace("_", " "), t, table=tables.get(label, "tiles"), shape=LONG, mask=mask)
        for label, t in ms.items()
    ]


def shares(label, *values):
    return [
        fact("share of cuDNN", x, label, shape=Shape.square(2, T, 16, 128))
        for T, x in zip((2048, 4096, 8192, 16384), values, strict=True)
    ]


def chosen(full, causal):
    """Times of three tiles, those chosen on a Hopper card among them."""
    first, second = "256 × 64, 8 warps, 3 stages", "128 × 64, 4 warps, 2 stages"
    where = dict(table="tiles", shape=LONG, env={"capability": "9.0"})
    return [
        row(label, ms, mask=mask, **where)
        for mask, times in (("full", {first: full, second: 1.0}), ("causal", {first: 0.6, second: causal}))
        for label, ms in ({"64 × 64, 4 warps, 2 stages": 1.4} | times).items()
    ]


def counted(what, flash, hopper, cudnn):
    return [fact(what, x, label) for label, x in (("flash", flash), ("hopper", hopper), ("cudnn", cudnn))]


def warned(words, call="__gpu$xla.gpu.triton"):
    return [fact("JAX warns", words, "flash"), fact("custom call", call, "flash")]


def triton(full, causal):
    return [*shares("flash, causal False", *full), *shares("flash, causal True", *causal)]


CRAFTED = {
    "online_is_exact": (errors(0.0, 1e-16, 1e-13, 2e-12), [errors(0.0, 0.0, 0.0, 1e-9), errors(NAN, 0.0, 0.0, 0.0)]),
    "maximum_is_needed": (
        [fact("overflows without the maximum", True)], [[fact("overflows without the maximum", False)]],
    ),
    "tiled_memory_is_linear": (
        memory((1, 2, 4.7), (1, 4, 16)), [memory((1, 4, 16), (1, 4, 16)), memory((1, 2, 4), (1, 2, 4))],
    ),
    "scan_moves_everything": (moved(70), [moved(3)]),
    "kernel_is_right": (cases(), [cases(error=0.05), cases(error=NAN), cases(lse=0.1), cases(lse=NAN)]),
    "package_is_this_kernel": (cases(), [cases(same=False)]),
    "kernel_goes_through_triton": (
        [fact("custom call", "__gpu$xla.gpu.triton", "flash")],
        [[fact("custom call", "mosaic_gpu_v2", "flash")], [fact("custom call", "", "flash")]],
    ),
    "triton_is_deprecated": (
        warned("The Pallas Triton backend is deprecated"),
        [warned("nothing"), warned("The Pallas Triton backend is deprecated", "mosaic_gpu_v2")],
    ),
    "kernel_writes_no_scores": (
        [fact("T×S array written", False, "flash")], [[fact("T×S array written", True, "flash")]],
    ),
    "kernel_beats_the_scan": (timed(tiled=9.0, plain=3.0), [timed(tiled=9.0, plain=5.0)]),
    "skipping_pays": (
        timed("causal", plain=3.0, skipping=1.6), [timed("causal", plain=3.0, skipping=x) for x in (3.0, 2.5)],
    ),
    "l4_tile_fits": (
        [fact("bytes of the L4's tile", 98304, f"causal {c}") for c in (False, True)],
        [[fact("bytes of the L4's tile", size, f"causal {size}") for size in (98304, 131072)]],
    ),
    "tile_matters": (timed(one=1.0, two=1.6), [timed(one=1.0, two=1.1)]),
    "chosen_tile_is_good": (chosen(1.0, 0.62), [chosen(1.2, 0.6), chosen(1.0, 0.9)]),
    "hopper_beats_triton": (timed(flash=2.2, hopper=1.7), [timed(flash=2.2, hopper=2.1), timed(flash=1.0, hopper=2.0)]),
    "hopper_reaches_cudnn": (
        shares("hopper, causal False", 0.9, 0.92, 0.95, 0.95),
        [shares("hopper, causal False", *x) for x in ((0.7, 0.9, 0.9, 0.9), (0.9, 0.9, 0.9, 0.74))],
    ),
    "hopper_reaches_cudnn_causal": (
        shares("hopper, causal True", 0.75, 0.8, 0.9, 0.95),
        [shares("hopper, causal True", *x) for x in ((0.65, 0.9, 0.9, 0.9), (0.9, 0.9, NAN, 0.9))],
    ),
    "triton_share_of_cudnn": (
        triton((0.69, 0.7, 0.73, 0.75), (0.67, 0.68, 0.68, 0.75)),
        [
            triton((0.55, 0.7, 0.7, 0.7), (0.67, 0.68, 0.68, 0.75)),
            triton((0.69, 0.7, 0.73, 0.75), (0.5, 0.6, 0.6, 0.6)),
        ],
    ),
    "matrix_units_wait": (
        counted("matrix units busy, %", 54, 72, 77),
        [counted("matrix units busy, %", *x) for x in ((70, 72, 77), (54, 60, 77), (54, NAN, 77))],
    ),
    "memory_is_not_the_limit": (
        counted("memory busy, %", 2.6, 3.2, 3.3),
        [counted("memory busy, %", *x) for x in ((50, 3, 3), (2, 3, NAN))],
    ),
    "kernel_repeats_itself": (
        [fact("same bits twice", True, x) for x in ("flash", "hopper")],
        [[fact("same bits twice", True, "flash"), fact("same bits twice", False, "hopper")]],
    ),
}  # fmt: skip


def joined(weigh=True, shrink=True, top=True):
    def join_halves(top1, total1, out1, top2, total2, out2):
        new = max(top1, top2) if top else top1
        a, b = (t * np.exp(x - new) if shrink else t for t, x in ((total1, top1), (total2, top2)))
        return new, a + b, (a * out1 + b * out2) / (a + b) if weigh else (out1 + out2) / 2

    return join_halves


MISTAKES = {
    "join_halves": [
        joined(weigh=False),
        joined(shrink=False),
        joined(top=False),
        lambda *args: joined()(*args)[2],  # the output alone
        lambda top1, total1, out1, top2, total2, out2: (max(top1, top2), total1 + total2, out1 + out2),
    ],
    "window_blocks": [
        lambda start, bq, bk, left, S: (0, (start + bq - 1) // bk + 1),  # the window forgotten
        lambda start, bq, bk, left, S: (max(0, start - left) // bk, S // bk),  # the diagonal forgotten
        lambda start, bq, bk, left, S: ((start - left) // bk, (start + bq - 1) // bk + 1),  # negative
        lambda start, bq, bk, left, S: (max(0, start - left) // bk, (start + bq - 1) // bk),
        lambda start, bq, bk, left, S: (max(0, start + bq - 1 - left) // bk, (start + bq - 1) // bk + 1),
        lambda start, bq, bk, left, S: (max(0, start - left), start + bq),  # keys, not blocks
    ],
    "largest_block": [
        lambda shared, H, itemsize, bq, stages: (shared // (itemsize * H) - bq) // (2 * stages),  # no power of two
        lambda shared, H, itemsize, bq, stages: 64,
        lambda shared, H, itemsize, bq, stages: 2 ** (((shared // (itemsize * H)) // (2 * stages)).bit_length() - 1),
        lambda shared, H, itemsize, bq, stages: (
            2 ** max(0, ((shared // (itemsize * H) - bq) // stages).bit_length() - 1)
        ),  # k or v forgotten
        lambda shared, H, itemsize, bq, stages: (
            2 ** max(0, ((shared // (itemsize * H) - bq) // (2 * stages)).bit_length() - 1)
        ),  # below 16
    ],
}
