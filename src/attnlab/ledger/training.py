"""The claims of 09_training_and_memory."""

from attnlab.attention import TOLERANCE
from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_bytes, format_number
from attnlab.records import MissingRecord, Timing

claim = claims_of("09_training_and_memory")
AGREES = 0.01  # nats: what two curves of the loss may differ by, as the notebook sets it
FUSED = ("cudnn", "flash")


def _found(r, name: str, *labels: str, **fields) -> list:
    """The findings of that name, of each of `labels` at least one."""
    rows = r.latest(name=name, **fields)
    missing = set(labels) - {f.label for f in rows}
    if missing or not rows:
        raise MissingRecord(f"no finding named {name!r}" + (f" of {', '.join(sorted(missing))}" if missing else ""))
    return rows


def _both(r, label: str) -> Timing:
    """Forward and backward of that label."""
    return on_device(r.timing(label, table="forward and backward"))


def _listed(found, form) -> str:
    return ", ".join(f"{label} {form(value)}" for label, value in found.items())


@claim(
    "formula_is_right",
    "The gradient formula agrees with jax.grad in float32 within rounding, and with finite differences to 1e-4.",
)
def _(r):
    auto, differences = (
        r.finding("error of a gradient", label=label) for label in ("jax.grad, float32", "finite differences, float64")
    )
    words = f"relative error {format_number(auto, 2)} and {format_number(differences, 2)}"
    return auto <= TOLERANCE["float32"] and differences < 1e-4, words


@claim(
    "gradients_are_right", "dq, dk and dv of every implementation here agree with float64 within bfloat16's rounding."
)
def _(r):
    found = {f.label: f.value for f in _found(r, "error of dq, dk, dv", "naive", "xla", "flash")}
    return all(e <= TOLERANCE["bfloat16"] for e in found.values()), _listed(found, lambda e: format_number(e, 2))


@claim(
    "products_of_a_step",
    "Forward and backward, naive attention and XLA do 6 matrix products; the course's kernel makes scores again, and "
    "does 9.",
)
def _(r):
    found = {f.label: f.value for f in _found(r, "matrix products", "naive", "xla", "flash")}
    return found == {"naive": 6, "xla": 6, "flash": 9}, _listed(found, str)


@claim(
    "training_costs_more_than_three",
    "By cuDNN and by the course's kernel, forward and backward take more than 3 times as long as the forward alone.",
    needs="cudnn_attention", others="Older material says: the backward pass costs twice the forward, so 3 times in all",
)  # fmt: skip
def _(r):
    ratios = {}
    for label in FUSED:
        whole = _both(r, label)
        ratios[label] = whole.ms / on_device(r.timing(label, table="forward", shape=whole.shape)).ms
    return all(x > 3 for x in ratios.values()), _listed(ratios, times)


@claim(
    "fused_step_is_faster",
    "Forward and backward by cuDNN and by the course's kernel take less than half the time of XLA's.",
    needs="cudnn_attention",
)
def _(r):
    xla = _both(r, "xla").ms
    ratios = {label: _both(r, label).ms / xla for label in FUSED}
    return all(x < 0.5 for x in ratios.values()), f"over XLA's time: {_listed(ratios, times)}"


@claim(
    "kernels_keep_no_weights",
    "For the backward pass naive attention and XLA keep T×S arrays; the kernels keep none.",
)
def _(r):
    found = {}
    for f in _found(r, "T×S arrays kept", "naive", "xla", "flash"):
        found.setdefault(f.label, set()).add(f.value)
    right = all((counts == {0}) if label in FUSED else min(counts) > 0 for label, counts in found.items())
    return right, _listed(found, lambda counts: " or ".join(map(str, sorted(counts))))


@claim(
    "ratio_of_kept_grows",
    "What naive attention keeps over what the kernel keeps is no fixed factor: it grows with T, more than 4 times from "
    "the shortest length to the longest.",
    others="Older material says: 10 to 20 times less memory",
)
def _(r):
    naive, flash = ({f.shape.T: f.value for f in _found(r, "bytes kept", label=label)} for label in ("naive", "flash"))
    lengths = sorted(naive.keys() & flash.keys())
    if len(lengths) < 2:
        raise MissingRecord("bytes kept at two lengths or more")
    ratios = [naive[T] / flash[T] for T in (lengths[0], lengths[-1])]
    words = f"{times(ratios[0])} at T {lengths[0]:,}, {times(ratios[1])} at T {lengths[-1]:,}"
    return ratios[1] > 4 * ratios[0], words


@claim(
    "temporaries_follow_the_formula",
    "T doubled, the temporaries of forward and backward grow more than 2.5 times for naive attention and XLA, and less "
    "than 2.2 times for the kernels.",
)
def _(r):
    found = {}
    for f in _found(r, "temporaries", "naive", "xla", "flash"):
        found.setdefault(f.label, {})[f.shape.T] = f.value
    growth = {}
    for label, sizes in found.items():
        doubled = [T for T in sizes if T // 2 in sizes and sizes[T // 2]]
        if not doubled:
            raise MissingRecord(f"temporaries of {label} at T and 2·T")
        growth[label] = sizes[max(doubled)] / sizes[max(doubled) // 2]
    right = all(x < 2.2 if label in FUSED else x > 2.5 for label, x in growth.items())
    return right, _listed(growth, times)


@claim(
    "checkpoint_saves_over_layers",
    "With jax.checkpoint, one layer of naive attention still takes more than 0.7 of its temporaries; four layers take "
    "less than 0.6 of theirs.",
)
def _(r):
    ratios = []
    for count in ("one layer", "four layers"):
        plain, again = (
            r.finding("temporaries of layers", label=f"{count}, {label}") for label in ("naive", "naive, checkpoint")
        )
        if not plain:
            raise MissingRecord("temporaries of naive attention")
        ratios.append(again / plain)
    words = f"one layer {times(ratios[0])}, four {times(ratios[1])} the temporaries"
    return ratios[0] > 0.7 and ratios[1] < 0.6, words


@claim(
    "kernels_fit_longer",
    "In the same memory, the kernels take sequences more than 4 times as long as naive attention and XLA do.",
)
def _(r):
    found = {f.label: f.value for f in _found(r, "longest T", "naive", "xla", "flash") if f.value}
    if not {"naive", "xla", "flash"} <= found.keys():
        raise MissingRecord("a first length that fits, for naive, xla and flash")
    kernels = [found[label] for label in FUSED if label in found]
    return min(kernels) > 4 * max(found["naive"], found["xla"]), _listed(found, lambda T: f"{T:,}")


@claim(
    "analysis_predicts_the_limit",
    "The bytes that the compiled programs of naive attention and XLA name predict their longest T: none that ran is "
    "forbidden, and at most 1.5 times as long is allowed.",
    needs="gpu",
)
def _(r):
    words, right = [], True
    for label in ("naive", "xla"):
        ran = r.finding("longest T", label=label)
        fitting = [f.shape.T for f in _found(r, "fits by analysis", label=label) if f.value]
        said = max(fitting, default=0)
        if not ran:
            raise MissingRecord(f"a first length that fits, for {label}")
        right &= ran <= said <= 1.5 * ran
        words.append(f"{label}: {ran:,} ran, {said:,} by analysis")
    return right, "; ".join(words)


def _finite(r, *begin: str) -> dict:
    """{(label, S): what was not finite} of the labels that begin so."""
    return {(f.label, f.shape.S): f.value for f in _found(r, "not finite") if f.label.startswith(begin)}


@claim(
    "tril_gradient_is_nan",
    "On compute capability 9.0, with q and k of standard deviation 10, dQ by cuDNN through mask=tril is not finite at "
    "S 192; nothing else is, and at S 128 and 256, and at scale 1, all is finite.",
    needs="cudnn_attention", others="Older material says: gradients through a mask are as safe as through is_causal",
)  # fmt: skip
def _(r):
    found = _finite(r, "cudnn, mask=tril")
    if len(found) < 9:
        raise MissingRecord(f"{len(found)} lengths and scales through mask=tril, and it takes 9")
    capability = r.find(name="not finite")[-1].env.get("capability")
    if capability != "9.0":
        raise MissingRecord(f"this fault was seen on compute capability 9.0; here {capability}, with what stands above")
    bad = {key: names for key, names in found.items() if names != "none"}
    words = ", ".join(f"S {S}, {label.rsplit(', ', 1)[1]}: {names}" for (label, S), names in bad.items())
    must, may = ("cudnn, mask=tril, scale 10", 192), ("cudnn, mask=tril, scale 8", 192)
    ok = must in bad and bad.keys() <= {must, may} and set(bad.values()) == {"dq"}
    return ok, words or "all is finite"


@claim(
    "other_gradients_are_finite",
    "By the same check, with is_causal, nothing is anywhere not finite.",
)
def _(r):
    found = _finite(r, "naive", "xla", "flash", "cudnn, scale")
    if not {"naive", "xla", "flash"} <= {label.split(",")[0] for label, _ in found}:
        raise MissingRecord("the check of naive, xla and flash")
    bad = sorted({f"{label}, S {S}: {names}" for (label, S), names in found.items() if names != "none"})
    return not bad, "; ".join(bad) or f"{len(found)} lengths and scales, all finite"


@claim("flash_gives_the_same_bits", "The course's kernel gives the same bits in all of ten runs, backward too.")
def _(r):
    found = {f.label: f.value for f in _found(r, "runs with other bits", "flash")}
    return found["flash"] == 0, f"runs with other bits, of nine: {_listed(found, str)}"


def _training(r, name: str) -> dict:
    return {f.label: f.value for f in _found(r, name, "naive", "xla", "flash", "tampered")}


@claim("loss_falls", "In 200 steps the loss falls by more than 1.5 nats a character, whichever attention trains.")
def _(r):
    start, end = _training(r, "loss at the start"), _training(r, "loss at the end")
    falls = {label: start[label] - end[label] for label in start if label != "tampered"}
    return all(x > 1.5 for x in falls.values()), f"by {_listed(falls, lambda x: format_number(x, 3))}"


@claim(
    "curves_agree",
    "The loss is the same with every attention: at no step does it differ from naive's by more than 0.01 nats.",
)
def _(r):
    found = _training(r, "largest difference of the loss")
    differ = {label: x for label, x in found.items() if label not in ("naive", "tampered")}
    return all(x <= AGREES for x in differ.values()), f"at most {_listed(differ, lambda x: format_number(x, 2))}"


@claim(
    "tampering_is_found",
    "Attention that sees one key too many fails that check by far: it differs by more than 3 times the tolerance.",
)
def _(r):
    found = _training(r, "largest difference of the loss")["tampered"]
    return found > 3 * AGREES, f"{format_number(found, 2)} nats"


def _step(r, name: str) -> tuple[dict, float]:
    """What the kernels need of that name, and XLA's, on a GPU of which the host's clock says the truth."""
    found = _training(r, name)
    if "cudnn" not in found:
        raise MissingRecord(f"{name} of cudnn")
    return {label: found[label] for label in FUSED}, found["xla"]


@claim(
    "fused_training_is_faster",
    "A training step takes less time with cuDNN or the course's kernel in place of XLA's attention: under 0.97 of it.",
    needs="cudnn_attention",
)
def _(r):
    found, xla = _step(r, "ms a step")
    ratios = {label: ms / xla for label, ms in found.items()}
    return all(x < 0.97 for x in ratios.values()), f"over XLA's time: {_listed(ratios, times)}"


@claim(
    "fused_training_is_smaller",
    "And it takes less than half of the memory: temporaries of the training program, against XLA's.",
    needs="cudnn_attention",
)
def _(r):
    found, xla = _step(r, "temporaries of a step")
    return all(x < xla / 2 for x in found.values()), f"{_listed(found, format_bytes)}; xla {format_bytes(xla)}"
