"""The exercises of 03_cudnn."""

import jax

from attnlab.attention import reference
from attnlab.exercises import RIGHT, Answer, compare, over_cases, together
from attnlab.inputs import qkv
from attnlab.records import Shape, Timing


def check_cudnn_takes(yours) -> Answer:
    """Exercise: whether cuDNN attention takes a dtype and head dim at a compute capability."""
    hint = (
        "three rules: capability 8.0 or newer; bfloat16 or float16; H a multiple of 8, up to 128, from 9.0 up to 256."
    )
    cases = (
        ("bfloat16", 64, (9, 0)), ("float32", 64, (9, 0)), ("float16", 36, (9, 0)), ("bfloat16", 256, (9, 0)),
        ("bfloat16", 256, (8, 9)), ("bfloat16", 128, (8, 9)), ("float16", 64, (7, 5)), ("float16", 512, (10, 0)),
        ("float16", 64, (9, 0)), ("bfloat16", 40, (8, 0)), ("float64", 64, (9, 0)), ("bfloat16", 256, (10, 0)),
        ("bfloat16", 136, (8, 9)),
    )  # fmt: skip

    def right(dtype, H, capability):
        most = 256 if capability >= (9, 0) else 128
        return capability >= (8, 0) and dtype in ("bfloat16", "float16") and H % 8 == 0 and H <= most

    return over_cases("cudnn_takes", yours, right, hint, cases, "{}, H {}, {}")


def check_fair_speedup(yours) -> Answer:
    """Exercise: the speed-up of cuDNN over naive from rows of one shape, device time, equal dtypes."""
    shape = Shape.square(4, 2048, 16, 128)

    def row(label, dtype, ms, wall):
        return Timing(label=label, shape=shape, dtype=dtype, ms=ms, p20=ms, p80=ms, samples=1, clock="cupti",
                      wall_ms=wall, compile_s=0.0)  # fmt: skip

    hint = "compare equal dtypes (bfloat16 with bfloat16), and the device's time, row.ms, not row.wall_ms."
    answers = []
    for order, (exact, half, fused) in (((0, 1, 2), (12.0, 6.0, 2.0)), ((2, 1, 0), (9.0, 5.0, 2.0))):
        times = (("naive", "float32", exact), ("naive", "bfloat16", half), ("cudnn", "bfloat16", fused))
        rows = [row(*times[i], wall=times[i][2] + 0.5) for i in order]
        answers.append(
            compare("fair_speedup", yours, half / fused, hint, args=(rows,), what="naive over cuDNN", unit="×")
        )
    return together("fair_speedup", answers)


def check_pad_head_dim(yours) -> Answer:
    """Exercise: attention at a head dim that is no multiple of 8 through a kernel that needs one, by padding."""
    hint = (
        "zeros change no dot product, but 1/√H would now use the padded H: pass scale=1/√H of the true H, and cut the "
        "output back to it."
    )
    calls = []

    def attend(q, k, v, **options):
        calls.append(q.shape)
        if q.shape[-1] % 8:
            raise ValueError(f"The head dim must be a multiple of 8, but got {q.shape[-1]}.")
        return jax.nn.dot_product_attention(q, k, v, **options)

    answers = []
    for H in (36, 20):
        calls.clear()
        q, k, v = (2 * x for x in qkv(1, 8, 2, H, seed=3))
        what = f"output (B, T, N, {H})"
        answer = compare(
            "pad_head_dim", yours, reference(q, k, v), hint, args=(attend, q, k, v), what=what, rtol=1e-2, atol=1e-2
        )
        if answer.state == RIGHT and not calls:
            answer = compare(
                "pad_head_dim", False, True, "the output must come from `attend`.", what="attend was called"
            )
        answers.append(answer)
    return together("pad_head_dim", answers)
