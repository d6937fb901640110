"""Made up for the tests of 03_cudnn; see `crafted`."""

import attnlab as lab
from crafted import DEFAULT, fact, row, temporaries


def first_timing(naive=0.0123, cudnn=0.004, walls=(0.08, 0.08, 0.08), kernels=1, clock="cupti"):
    names = tuple((f"cudnn_sdpa_{i}", cudnn) for i in range(kernels))
    common = dict(table="first timing", shape=DEFAULT)
    return [
        row("naive", naive, wall_ms=walls[0], clock=clock, **common),
        row("xla", 0.0133, wall_ms=walls[1], clock=clock, **common),
        row("cudnn", cudnn, wall_ms=walls[2], kernels=names, clock=clock, **common),
        fact("cuDNN calls", 1),
    ]


def twenty(naive, cudnn):
    return [
        *first_timing(),
        *(fact("host ms a call, twenty in one program", x, y) for x, y in ((naive, "naive"), (cudnn, "cudnn"))),
    ]


def windows(wrong, right):
    return [
        fact("cudnn call", wrong, "window (16, 0), not causal"),
        fact("cudnn call", right, "window (16, 0), causal"),
    ]


def head_dims(**runs):
    return [fact("cudnn call", "runs" if ok else "ValueError: no", f"head dim {H[1:]}") for H, ok in runs.items()]


def row_mask(mask, lengths):
    return [fact("cudnn call", mask, "mask (B, 1, 1, S)"), fact("cudnn call", lengths, "key_value_seq_lengths alone")]


def takes(dtypes, step, longest):
    return lambda dtype, H, c: c >= (8, 0) and dtypes(dtype) and H % step == 0 and H <= longest(c)


def half(dtype):
    return dtype in ("bfloat16", "float16")


def hopper(c):
    return 256 if c >= (9, 0) else 128


def gradients(even, exact, odd, forward="runs"):
    words = {"T = 128, gradient with a bfloat16 bias": even, "T = 128, gradient with a float32 bias": exact}
    words |= {"T = 127, gradient with a bfloat16 bias": odd, "T = 127": forward}
    return [fact("cudnn call", value, label) for label, value in words.items()]


ODD = "NotImplementedError: Unsupported sequence length Q 127, KV 127."

CRAFTED = {
    "cudnn_is_visible": (
        first_timing(), [[*first_timing(kernels=0)], [*first_timing(), fact("cuDNN calls", 0)]],
    ),
    "cudnn_one_kernel": (first_timing(), [first_timing(kernels=2)]),
    "cudnn_writes_no_weights": (
        temporaries({512: 0, 1024: 0}, "cudnn"), [temporaries({512: 0, 1024: 2**20}, "cudnn")],
    ),
    "cudnn_beats_naive": (first_timing(), [first_timing(naive=0.007), first_timing(naive=0.001)]),
    "host_clock_shows_dispatch": (
        first_timing(), [first_timing(walls=(0.08, 0.08, 0.005)), first_timing(walls=(0.013, 0.08, 0.08))],
    ),
    "dispatch_hides_behind_work": (twenty(0.02, 0.01), [twenty(0.02, 0.06), twenty(0.06, 0.01)]),
    "dtype_share": (
        [*first_timing(), row("naive", 0.0165, table="two steps", dtype="float32")],
        [[*first_timing(), row("naive", 0.0110, table="two steps", dtype="float32")]],
    ),
    "window_without_causal": (
        windows("runs, but its relative error is 3.6", "runs"),
        [windows("runs", "runs"), windows("ValueError: no", "runs"), windows("runs, but wrong", "ValueError")],
    ),
    "cudnn_as_accurate": (
        [fact("error", 2e-3, x, dtype=d) for x in ("xla", "cudnn") for d in ("bfloat16", "float16")],
        [[fact("error", e, x, dtype=d) for x, e in (("xla", 2e-3), ("cudnn", 4e-3)) for d in ("bfloat16", "float16")]],
    ),
    "cudnn_refuses_float32": (
        [fact("cudnn call", "NotImplementedError: not float32", "float32")],
        [[fact("cudnn call", "runs", "float32")], [fact("cudnn call", "XlaRuntimeError: out of memory", "float32")]],
    ),
    "head_dim_multiple_of_eight": (
        head_dims(H36=False, H40=True, H128=True),
        [head_dims(H36=True, H40=True, H128=True), head_dims(H36=False, H40=False, H128=True)],
    ),
    "head_dim_256_on_hopper": (
        head_dims(H256=True, H512=False), [head_dims(H256=True, H512=True), head_dims(H256=False, H512=False)],
    ),
    "bias_gradient_needs_even_lengths": (
        gradients("runs", "runs", ODD),
        [gradients("runs", "runs", "runs"), gradients("runs", "runs, but its gradient holds NaN", ODD),
         gradients(ODD, "runs", ODD), gradients("runs", "runs", ODD, forward=ODD)],
    ),
    "row_mask_is_refused": (
        row_mask("ValueError: no", "runs"), [row_mask("runs", "runs"), row_mask("ValueError: no", "ValueError: no")],
    ),
}  # fmt: skip

MISTAKES = {
    "fair_speedup": [
        lambda rows: (lambda ms: ms["naive"] / ms["cudnn"])({r.label: r.ms for r in rows}),  # the last dtype wins
        lambda rows: rows[1].ms / rows[2].ms,
        lambda rows: 3.0,
    ],
    "cudnn_takes": [
        takes(lambda d: d != "float32", 8, hopper),
        takes(lambda d: d == "bfloat16", 8, hopper),
        takes(half, 16, hopper),
        takes(half, 8, lambda c: 256 if c[0] == 9 else 128),
    ],
    "pad_head_dim": [lambda attend, q, k, v: lab.naive_attention(q, k, v)],
}
