"""Made up for the tests of 00_start_here; see `crafted`."""

import math
import time

import jax

from crafted import fact, row


def held(tenth, fifth, none):
    sizes = {"fraction .10": tenth, "fraction .20": fifth, "no preallocation": none}
    return [fact("memory of the GPU", 140 * 2**30), *(fact("memory held", x * 2**30, y) for y, x in sizes.items())]


def spread(divided, undivided, slope, slope_undivided):
    largest = {"divided": divided, "undivided": undivided}
    slopes = {"divided": slope, "undivided": slope_undivided}
    return [fact("mean largest weight", x, y) for y, x in largest.items()] + [
        fact("mean slope", x, y) for y, x in slopes.items()
    ]


def late_clock(fn, x):
    result = fn(x)
    start = time.perf_counter()
    result.block_until_ready()
    return 1e3 * (time.perf_counter() - start)


CRAFTED = {
    "rows_sum_to_one": (
        [fact("largest distance of a row sum from 1", 1e-7)],
        [[fact("largest distance of a row sum from 1", 0.1)], [fact("largest distance of a row sum from 1", math.nan)]],
    ),
    "unblocked_is_impossible": (
        [fact("unblocked time refused", True), fact("bound over unblocked time", 9.0)],
        [[fact("unblocked time refused", False), fact("bound over unblocked time", 0.5)]],
    ),
    "dispatch_hides_the_device": (
        [row("cudnn", 0.004, table="two clocks")],
        [[row("cudnn", 0.004, table="two clocks", wall_ms=0.01)]],
    ),
    "late_library_path": (
        [fact("library found after os.environ", False), fact("library found by a new process", True)],
        [[fact("library found after os.environ", True), fact("library found by a new process", True)],
         [fact("library found after os.environ", False), fact("library found by a new process", False)]],
    ),
    "preallocation": (held(15, 29, 1), [held(15, 15, 1), held(15, 20, 1), held(15, 29, 20)]),
    "three_quarters": (
        [fact("share of the memory that JAX may take", 0.747)], [[fact("share of the memory that JAX may take", 0.9)]],
    ),
    "one_cudnn": ([fact("cuDNN libraries loaded", 1)], [[fact("cuDNN libraries loaded", x)] for x in (0, 2)]),
    "undivided_saturates": (
        spread(0.11, 0.9, 0.015, 0.002), [spread(0.11, 0.5, 0.015, 0.002), spread(0.11, 0.9, 0.01, 0.01)],
    ),
}  # fmt: skip

MISTAKES = {
    "honest_ms": [lambda fn, x: 42.0, late_clock],
    "bound_ms": [lambda flops, nbytes, tflops, gbps: flops / tflops / 1e9],
    "softmax_rows": [lambda x: jax.nn.softmax(x, axis=0)],
}
