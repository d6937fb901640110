"""The claims of 00_start_here."""

from attnlab.claims import claims_of, on_device, times
from attnlab.display import format_number
from attnlab.records import MissingRecord

claim = claims_of("00_start_here")


@claim("rows_sum_to_one", "Each row of the weights sums to 1: a query spreads one unit of attention.")
def _(r):
    off = r.finding("largest distance of a row sum from 1")
    return off < 1e-5, f"furthest from 1: {format_number(off, 2)}"


@claim(
    "undivided_saturates",
    "At H = 256, without the division by √H one key takes nearly all of the weight, and the slope of the softmax "
    "falls.",
)  # fmt: skip
def _(r):
    divided, undivided = (r.finding("mean largest weight", label=x) for x in ("divided", "undivided"))
    fall = r.finding("mean slope", label="divided") / r.finding("mean slope", label="undivided")
    ok = undivided > 0.8 and divided < 0.5 and fall > 2
    weights = f"{format_number(undivided, 2)} against {format_number(divided, 2)}"
    return ok, f"largest weight {weights}; slope down {times(fall)}"


@claim(
    "unblocked_is_impossible",
    "A clock that does not wait for the device shows a time that the device can't reach.",
)  # fmt: skip
def _(r):
    ratio = r.finding("bound over unblocked time")
    return r.finding("unblocked time refused"), f"the bound is {times(ratio)} that time"


@claim(
    "dispatch_hides_the_device",
    "For cuDNN at the default shape the host's clock shows more than five times what the device needs.",
    needs="cudnn_attention", others="Older material says: time a call on the host, and compare variants by that",
)  # fmt: skip
def _(r):
    row = on_device(r.timing("cudnn", table="two clocks"))
    return row.wall_ms > 5 * row.ms, times(row.wall_ms / row.ms)


@claim(
    "late_library_path",
    "Setting LD_LIBRARY_PATH inside a running process does not change where that process looks for libraries.",
    others='Older material says: os.environ["LD_LIBRARY_PATH"] = … in the first cell',
)  # fmt: skip
def _(r):
    here, child = r.finding("library found after os.environ"), r.finding("library found by a new process")
    return not here and child, f"found in this process: {here}; in a new one: {child}"


@claim("three_quarters", "Unless told otherwise, JAX may take three quarters of the GPU's memory.", needs="gpu")
def _(r):
    share = r.finding("share of the memory that JAX may take")
    return abs(share - 0.75) < 0.02, f"{share:.1%} of what nvidia-smi reports"


@claim(
    "preallocation",
    "XLA_PYTHON_CLIENT_MEM_FRACTION is the share of the GPU that JAX takes at once; without preallocation it "
    "takes what it needs.",
    needs="gpu",
)  # fmt: skip
def _(r):
    held = [r.finding("memory held", label=x) for x in ("fraction .10", "fraction .20", "no preallocation")]
    if None in held:
        raise MissingRecord("a program found too little memory free")
    tenth, fifth, none = (x / r.finding("memory of the GPU") for x in held)
    # A tenth more asked for is a tenth more taken; the rest is the CUDA context, the same each time.
    return abs(fifth - tenth - 0.1) < 0.01 and none < 0.05, f"held: {tenth:.1%}, {fifth:.1%}, {none:.1%}"


@claim("one_cudnn", "This process has loaded exactly one cuDNN.", needs="cudnn_attention")
def _(r):
    count = r.finding("cuDNN libraries loaded")
    return count == 1, f"{count} loaded"
