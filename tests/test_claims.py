"""The ledger of claims against crafted and saved records, the exercises' checks, and the package's public names."""

import ast
import inspect
import json
import math
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab as lab
from attnlab import checks, claims, records
from attnlab.claims import FAILS, HOLDS, LEDGER, UNTESTABLE
from attnlab.exercises import RIGHT, UNTRIED, WRONG
from attnlab.records import Finding, Records, Shape, Timing

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
DEFAULT, LONG = Shape.square(4, 128, 8, 64), Shape.square(2, 8192, 16, 128)


def fact(name, value, label="", **fields):
    return Finding(name=name, value=value, label=label, **fields)


def row(label, ms, **fields):
    fields = {**dict(p20=ms, p80=ms, samples=5, clock="cupti", wall_ms=0.08, compile_s=1.0, dtype="bfloat16"), **fields}
    return Timing(label=label, ms=ms, **fields)


def temporaries(sizes: dict, label="naive", weights=None, written=True):
    """Temporaries by length, and the weights' bytes beside them."""
    out = [fact("temporaries", size, label, shape=Shape.square(2, T, 8, 64)) for T, size in sizes.items()]
    for T in weights or ():
        out.append(fact("weight bytes", weights[T], "weights", shape=Shape.square(2, T, 8, 64)))
        out.append(fact("T×S array written", written, label, shape=Shape.square(2, T, 8, 64)))
    return out


def first_timing(naive=0.0123, cudnn=0.004, walls=(0.08, 0.08, 0.08), kernels=1, clock="cupti"):
    names = tuple((f"cudnn_sdpa_{i}", cudnn) for i in range(kernels))
    common = dict(table="first timing", shape=DEFAULT)
    return [
        row("naive", naive, wall_ms=walls[0], clock=clock, **common),
        row("xla", 0.0133, wall_ms=walls[1], clock=clock, **common),
        row("cudnn", cudnn, wall_ms=walls[2], kernels=names, clock=clock, **common),
        fact("cuDNN calls", 1),
    ]


def held(tenth, fifth, none):
    sizes = {"fraction .10": tenth, "fraction .20": fifth, "no preallocation": none}
    return [fact("memory of the GPU", 140 * 2**30), *(fact("memory held", x * 2**30, y) for y, x in sizes.items())]


def spread(divided, undivided, slope, slope_undivided):
    largest = {"divided": divided, "undivided": undivided}
    slopes = {"divided": slope, "undivided": slope_undivided}
    return [fact("mean largest weight", x, y) for y, x in largest.items()] + [
        fact("mean slope", x, y) for y, x in slopes.items()
    ]


def options(worst, count=6):
    errors = [fact("option error", 1e-4, f"option {i}") for i in range(count - 1)]
    return [fact("error allowed", 2e-3), *errors, fact("option error", worst, "the last")]


def written(**dtypes):
    return [fact("float32 T×S array written", value, dtype=dtype) for dtype, value in dtypes.items()]


def precisions(default, tf32, highest):
    return [
        fact("precision error", x, y) for x, y in ((default, "default"), (tf32, "tensorfloat32"), (highest, "highest"))
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


def long(xla, naive, errors=(1e-3, 2e-3)):
    common = dict(table="long bf16", shape=LONG)
    return [row("xla", xla, error=errors[0], **common), row("naive", naive, error=errors[1], **common)]


# claim: (records with which it holds, several with which it fails)
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
    "row_mask_is_refused": (
        row_mask("ValueError: no", "runs"), [row_mask("runs", "runs"), row_mask("ValueError: no", "ValueError: no")],
    ),
}  # fmt: skip


def judged(name, rows):
    """The verdict with the claim's notebook written into every record."""
    c = LEDGER[name]
    log = records.Log()
    log.open(c.notebook)
    for r in rows:
        log.add(r)
    return c.judge(log.records)


def test_the_verdict_is_read_from_the_claims_own_notebook_alone():
    holding, _ = CRAFTED["rows_sum_to_one"]
    assert LEDGER["rows_sum_to_one"].judge(Records(holding)).state == UNTESTABLE  # no notebook named


@pytest.mark.parametrize("name", CRAFTED)
def test_a_claim_holds_on_records_that_bear_it_out(name):
    verdict = judged(name, CRAFTED[name][0])
    assert verdict.state == HOLDS and verdict.measured and isinstance(verdict.measured, str)


@pytest.mark.parametrize(
    "name, rows",
    [(name, rows) for name, (_, bad) in CRAFTED.items() for rows in bad],
    ids=lambda x: x if type(x) is str else "",
)
def test_a_claim_fails_on_records_that_contradict_it(name, rows):
    verdict = judged(name, rows)
    assert verdict.state == FAILS and verdict.measured


@pytest.mark.parametrize("name", CRAFTED)
def test_running_a_cell_again_changes_no_verdict(name):
    holding, failing = CRAFTED[name]
    assert judged(name, holding * 2).state == HOLDS
    assert judged(name, failing[0] * 2).state == FAILS


@pytest.mark.parametrize("name", ["weights_grow_with_T2", "cudnn_writes_no_weights"])
def test_one_length_measured_twice_says_nothing_about_growth(name):
    label = "cudnn" if "cudnn" in name else "naive"
    assert judged(name, temporaries({1024: 100}, label) * 2).state == UNTESTABLE


def test_every_claim_is_tried_both_ways():
    assert set(CRAFTED) == set(LEDGER)


def test_fewer_options_than_there_are_prove_nothing():
    assert judged("options_agree", options(1e-4, count=5)).state == UNTESTABLE


@pytest.mark.parametrize(
    "name", ["cudnn_is_visible", "cudnn_one_kernel", "cudnn_beats_naive", "host_clock_shows_dispatch", "dtype_share"]
)
def test_without_the_devices_own_clock_nothing_is_said_of_its_times(name):
    rows = [*first_timing(clock="chain"), row("naive", 0.0165, table="two steps", dtype="float32", clock="chain")]
    assert judged(name, rows).state == UNTESTABLE


@pytest.mark.parametrize("name", LEDGER)
def test_without_records_nothing_is_testable_and_the_verdict_says_what_is_missing(name):
    verdict = LEDGER[name].judge(Records())
    assert verdict.state == UNTESTABLE and len(verdict.measured) > 10


@pytest.mark.parametrize("name", [n for n, c in LEDGER.items() if c.needs])
def test_where_a_feature_is_missing_its_reason_is_the_verdict(name, monkeypatch):
    monkeypatch.setattr(claims, "has", lambda key: False)
    monkeypatch.setattr(claims, "feature", lambda key: type("F", (), {"reason": f"no {key} here"}))
    verdict = LEDGER[name].judge_here()
    assert verdict == (UNTESTABLE, f"no {LEDGER[name].needs} here")


def test_a_claim_needs_a_name_of_its_own_and_a_known_feature():
    with pytest.raises(ValueError, match="none_is_xla"):
        claims._claim("none_is_xla", "02_sdpa", "again")(lambda r: (True, ""))
    with pytest.raises(ValueError, match="warp_drive"):
        claims._claim("brand_new", "02_sdpa", "a sentence", needs="warp_drive")(lambda r: (True, ""))
    assert "brand_new" not in LEDGER


def sources(path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]


@pytest.mark.parametrize("name", LEDGER)
def test_a_claim_stands_in_its_notebook(name):
    c = LEDGER[name]
    path = NOTEBOOKS / f"{c.notebook}.ipynb"
    assert path.exists(), f"claim {name!r} belongs to {path.name}, which is not there"
    assert any("lab.claim(" in s and re.search(rf"""["']{name}["']""", s) for s in sources(path)), (
        f"{path.name} never calls lab.claim({name!r})"
    )
    assert c.name == name and c.sentence.strip().endswith(".") and "\n" not in c.sentence


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_states_only_claims_of_its_own(path):
    for source in sources(path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.claim":
                for name in [a.value for a in node.args if isinstance(a, ast.Constant)]:
                    assert name in LEDGER and LEDGER[name].notebook == path.stem


# ---- the saved results -------------------------------------------------------------------------------------


@pytest.fixture
def saved():
    rows = records.saved()
    assert rows, "src/attnlab/data/results/nvidia-h200.jsonl is missing: run the course on an H200, commit its records"
    return rows


@pytest.mark.parametrize("name", LEDGER)
def test_a_claim_holds_on_the_saved_results(saved, name):
    verdict = LEDGER[name].judge(saved)
    assert verdict.state == HOLDS, f"{LEDGER[name].sentence} {verdict.state}: {verdict.measured}"


def test_saved_results_name_the_device_and_its_software(saved):
    for r in saved:
        assert r.env["device"] == "NVIDIA H200" and r.env["capability"] == "9.0", r
        assert r.env["driver"] and r.env["jax"] and r.env["cudnn"], r
    assert {r.notebook for r in saved} >= {c.notebook for c in LEDGER.values()}
    assert len({json.dumps(r.env, sort_keys=True) for r in saved}) == 1, "records of more than one run or machine"


def test_no_saved_time_is_below_its_bound(saved):
    timed = [r for r in saved if isinstance(r, Timing)]
    assert timed
    for r in timed:
        assert r.clock == "cupti" and r.bound_ms is not None and r.bound_ms <= r.ms <= 1.1 * r.wall_ms, r
        slack = 1 + 1e-9  # the percentiles are interpolated, each with its own rounding
        assert r.p20 <= r.ms * slack and r.ms <= r.p80 * slack and r.samples >= 5 and r.compile_s > 0, r
        again = lab.device.CEILINGS["NVIDIA H200"].bound_ms(r.flops, r.bytes, r.dtype)
        assert r.ms >= again, r
        assert sum(ms for _, ms in r.kernels) == pytest.approx(r.ms, rel=0.25), r


# ---- the exercises' checks ---------------------------------------------------------------------------------

EXERCISES = sorted(p.stem for p in (NOTEBOOKS / "solutions").glob("*.py"))


def answered(name, path):
    """The check's answer to the function that the file defines."""
    namespace = {"jax": jax, "jnp": jnp, "np": np, "math": math, "time": time}
    exec(compile(path.read_text(encoding="utf-8"), path.name, "exec"), namespace)
    return getattr(checks, f"check_{name}")(namespace[name])


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right(name):
    answer = answered(name, NOTEBOOKS / "solutions" / f"{name}.py")
    assert (answer.name, answer.state) == (name, RIGHT), str(answer)


@pytest.mark.parametrize("name", EXERCISES)
def test_a_wrong_answer_is_wrong_and_gets_help(name):
    answer = answered(name, ROOT / "tests" / "wrong_answers" / f"{name}.py")
    assert (answer.name, answer.state) == (name, WRONG), str(answer)
    assert answer.rows and len(answer.hint) > 20


@pytest.mark.parametrize("name", EXERCISES)
def test_what_was_not_touched_is_not_tried_yet_and_nonsense_is_wrong(name):
    check = getattr(checks, f"check_{name}")

    def stub(*_): ...

    assert [check(x).state for x in (None, ..., stub)] == [UNTRIED] * 3

    def raises(*args):
        raise RuntimeError("by the reader")

    answer = check(raises)
    assert answer.state == WRONG and "by the reader" in str(answer)
    assert check(lambda *args: "nonsense").state == WRONG


def test_every_check_has_an_exercise():
    defined = {name.removeprefix("check_") for name in vars(checks) if name.startswith("check_")}
    assert defined == set(EXERCISES)


# ---- the package -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", lab.__all__)
def test_a_public_name_is_there_and_documented(name):
    value = getattr(lab, name)
    assert callable(value) or isinstance(value, dict)
    assert isinstance(value, dict) or (inspect.getdoc(value) and not inspect.ismodule(value))


def test_no_public_name_is_a_modules():
    modules = {m.name for m in pkgutil.iter_modules(lab.__path__)}
    assert {"records", "timing"} < modules and not modules & set(lab.__all__)
    assert all(inspect.ismodule(getattr(lab, name)) for name in ("device", "evidence", "features", "timing"))


def in_a_new_process(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(lab.__path__[0]).parent)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_importing_costs_next_to_nothing_and_draws_in_no_notebook_tool():
    code = (
        "import sys, time, jax, jax.numpy; had = set(sys.modules); t = time.perf_counter(); import attnlab as lab; "
        "t1 = time.perf_counter() - t; lab.start, lab.benchmark, lab.claim, lab.compare, lab.qkv, lab.show_table; "
        "print(t1, time.perf_counter() - t, *sorted({m.split('.')[0] for m in set(sys.modules) - had}))"
    )
    runs = [in_a_new_process(code).split() for _ in range(3)]
    assert min(float(r[0]) for r in runs) < 0.15
    assert min(float(r[1]) for r in runs) < 0.15  # with what a notebook uses at once
    heavy = {
        "matplotlib",
        "IPython",
        "papermill",
        "nbconvert",
        "nbformat",
        "nbval",
        "tqdm",
        "flax",
        "transformer_engine",
    }
    assert not heavy & set(runs[0][2:])
