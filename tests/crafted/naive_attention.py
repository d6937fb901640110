"""Made up for the tests of 01_naive_attention; see `crafted`."""

import math

import jax

from crafted import fact, row, temporaries


def written(**dtypes):
    return [fact("float32 T×S array written", value, dtype=dtype) for dtype, value in dtypes.items()]


CRAFTED = {
    "eager_launches_more": (
        [fact("kernels", 14, "eager"), fact("kernels", 7, "compiled")],
        [[fact("kernels", x, "eager"), fact("kernels", 7, "compiled")] for x in (7, 5)],
    ),
    "naive_is_right": (
        [fact("error by hand", 1e-4), fact("error allowed", 2e-3)],
        [[fact("error by hand", 1e-2), fact("error allowed", 2e-3)],
         [fact("error by hand", math.nan), fact("error allowed", 2e-3)]],
    ),
    "more_than_three_kernels": (
        [row("naive", 1.0, table="naive kernels", kernels=(("k", 0.1),) * 7)],
        [[row("naive", 1.0, table="naive kernels", kernels=(("k", 0.1),) * 3)]],
    ),
    "weights_grow_with_T2": (
        temporaries({512: 390, 1024: 400, 2048: 1601, 4096: 6400}),
        [temporaries({1024: 200, 2048: 400, 4096: 1600}), temporaries({1024: 400, 2048: 400})],
    ),
    "weights_are_written": (
        temporaries({512: 100, 1024: 400}, weights={512: 99, 1024: 400}),
        [temporaries({512: 100, 1024: 0}, weights={512: 99, 1024: 400}),
         temporaries({512: 100, 1024: 400}, weights={512: 99, 1024: 400}, written=False)],
    ),
}  # fmt: skip

MISTAKES = {
    "one_head": [lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v],
    "longest_T": [lambda B, N, itemsize, budget: round((budget / (B * N * itemsize)) ** 0.5) + 1],
    "matrix_bytes": [lambda B, T, S, N, itemsize: B * N * T * T * itemsize],
}
