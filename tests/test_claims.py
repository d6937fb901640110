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
from attnlab import checks, claims, ledger, records  # noqa: F401, the ledger fills LEDGER
from attnlab.claims import FAILS, HOLDS, LEDGER, UNTESTABLE
from attnlab.exercises import RIGHT, UNTRIED, WRONG
from attnlab.records import Records, Timing
from crafted import gathered, row, temporaries
from crafted.cudnn import first_timing
from crafted.sdpa import options

CRAFTED = gathered("CRAFTED")
ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"


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
        claims.claims_of("02_sdpa")("none_is_xla", "again")(lambda r: (True, ""))
    with pytest.raises(ValueError, match="warp_drive"):
        claims.claims_of("02_sdpa")("brand_new", "a sentence", needs="warp_drive")(lambda r: (True, ""))
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


# Claims of cells that were changed since the recorded run, and that have not run on an H200 since.
NOT_RECORDED = {
    "checkpoint_saves_over_layers": "its layers had a residual, and rounding grew with it: the row was refused",
    "tril_gradient_is_nan": "its check went up to a standard deviation of 8, and the fault is seen at 10 (04)",
}


@pytest.mark.parametrize("name", LEDGER)
def test_a_claim_holds_on_the_saved_results(saved, name):
    verdict = LEDGER[name].judge(saved)
    if name in NOT_RECORDED:
        assert verdict.state == UNTESTABLE, f"{name} is recorded now: take it off NOT_RECORDED"
        return
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
