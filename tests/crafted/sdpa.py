"""Made up for the tests of 02_sdpa; see `crafted`."""

import math

import jax.numpy as jnp
import numpy as np

from crafted import LONG, fact, row


def options(worst, count=6):
    errors = [fact("option error", 1e-4, f"option {i}") for i in range(count - 1)]
    return [fact("error allowed", 2e-3), *errors, fact("option error", worst, "the last")]


def written(**dtypes):
    return [fact("float32 T×S array written", value, dtype=dtype) for dtype, value in dtypes.items()]


def precisions(default, tf32, highest):
    return [
        fact("precision error", x, y) for x, y in ((default, "default"), (tf32, "tensorfloat32"), (highest, "highest"))
    ]


def long(xla, naive, errors=(1e-3, 2e-3)):
    common = dict(table="long bf16", shape=LONG)
    return [row("xla", xla, error=errors[0], **common), row("naive", naive, error=errors[1], **common)]


CRAFTED = {
    "none_is_xla": (
        [fact("None compiles to the XLA program", True), fact("cuDNN calls under None", 0)],
        [[fact("None compiles to the XLA program", False), fact("cuDNN calls under None", 0)],
         [fact("None compiles to the XLA program", True), fact("cuDNN calls under None", 1)]],
    ),
    "logits_are_written": (
        written(bfloat16=True, float16=True, float32=True), [written(bfloat16=True, float16=False, float32=True)],
    ),
    "xla_takes_more_memory": (
        [fact("temporaries", 3, "xla", dtype="bfloat16"), fact("temporaries", 1, "naive", dtype="bfloat16")],
        [[fact("temporaries", 1, "xla", dtype="bfloat16"), fact("temporaries", 1, "naive", dtype="bfloat16")]],
    ),
    "xla_slower_than_naive": (long(7.4, 5.1), [long(5.0, 5.1), long(7.4, 5.1, (2e-3, 1e-3))]),
    "options_agree": (options(1e-3), [options(1e-2), options(math.nan)]),
    "tf32_by_default": (
        precisions(4.2e-4, 4.2e-4, 3.3e-7), [precisions(3.3e-7, 3.3e-7, 3.3e-7), precisions(4e-3, 4.2e-4, 3.3e-7)],
    ),
}  # fmt: skip

MISTAKES = {
    "padding_mask": [lambda n, S: (jnp.arange(S)[None, None, None] < n[:, None, None, None]).astype(int)],
    "round_to_tf32": [lambda x: x.astype(np.float16).astype(np.float32)],
    "distance_bias": [lambda s, T, S: -s[None, :, None, None] * (jnp.arange(T)[:, None] - jnp.arange(S)[None])],
}
