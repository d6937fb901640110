"""The claims of 02_sdpa."""

from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_number
from attnlab.records import MissingRecord, Shape

claim = claims_of("02_sdpa")
LONG = Shape.square(2, 8192, 16, 128)


@claim(
    "none_is_xla",
    "implementation=None and implementation='xla' are one and the same compiled program.",
    others="Older material says: None picks the best backend, maybe cuDNN",
)  # fmt: skip
def _(r):
    same, calls = r.finding("None compiles to the XLA program"), r.finding("cuDNN calls under None")
    return same and calls == 0, f"same program: {same}, cuDNN calls: {calls}"


@claim(
    "logits_are_written",
    "On XLA the steps are not fused into one: at T 8192 a T×S array in float32 is written, for bfloat16, float16 "
    "and float32 inputs.",
    needs="gpu", others="Older material says: it fuses all steps and can avoid the weight matrix",
)  # fmt: skip
def _(r):
    written = {d: r.finding("float32 T×S array written", dtype=d) for d in ("bfloat16", "float16", "float32")}
    return all(written.values()), ", ".join(f"{d}: {'written' if w else 'not written'}" for d, w in written.items())


@claim(
    "xla_takes_more_memory",
    "In bfloat16 XLA's attention takes more temporary memory than the naive bfloat16 version.", needs="gpu",
)  # fmt: skip
def _(r):
    xla = r.finding("temporaries", label="xla", dtype="bfloat16")
    naive = r.finding("temporaries", label="naive", dtype="bfloat16")
    return xla > naive, f"{times(xla / naive)} the naive one's"


@claim(
    "xla_slower_than_naive",
    "At T 8192 in bfloat16 XLA's attention is slower than the naive version, and more accurate.",
    needs="gpu",
)  # fmt: skip
def _(r):
    xla, naive = (on_device(r.timing(x, table="long bf16", shape=LONG)) for x in ("xla", "naive"))
    ok = xla.ms > naive.ms and xla.error < naive.error
    return ok, f"{times(xla.ms / naive.ms)} the time, {times(naive.error / xla.error)} less error"


@claim("options_agree", "scale, mask, bias and both lengths do what the reference says.")
def _(r):
    found = r.latest(name="option error")
    if len(found) < 6:
        raise MissingRecord(f"{len(found)} of 6 options were tried")
    worst = max(found, key=lambda f: f.value)
    ok = all(f.value <= r.finding("error allowed") for f in found)
    return ok, f"{len(found)} options, worst {format_number(worst.value, 2)} ({worst.label})"


@claim(
    "tf32_by_default",
    "float32 attention is multiplied in TF32 by default; at 'highest' its error is over a hundred times smaller.",
    needs="tf32_matmul", others="Older material compares bfloat16 on cuDNN with float32 by hand, as if that were exact",
)  # fmt: skip
def _(r):
    default, tf32, highest = (r.finding("precision error", label=x) for x in ("default", "tensorfloat32", "highest"))
    same = abs(default / tf32 - 1) < 0.01
    words = f"default {format_number(default, 2)}, TF32 {format_number(tf32, 2)}, highest {format_number(highest, 2)}"
    return same and default > 100 * highest, words
