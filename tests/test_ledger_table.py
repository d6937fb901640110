"""The whole ledger over recorded results as a table, and what rows without a time do to a claim: nothing."""

import dataclasses
import math

import pytest

from attnlab import cli, features, records
from attnlab.claims import FAILS, HOLDS, UNTESTABLE
from attnlab.ledger import LEDGER
from attnlab.records import Records, Timing
from crafted import gathered
from test_claims import NOT_RECORDED

SAVED = records.saved()
CRAFTED = gathered("CRAFTED")


def own(name, rows) -> Records:
    return Records(dataclasses.replace(r, notebook=LEDGER[name].notebook) for r in rows)


def spoilt(rows, **fields):
    return [dataclasses.replace(r, **fields) for r in rows if isinstance(r, Timing)]


TIMED = [name for name, (holding, _) in CRAFTED.items() if any(isinstance(r, Timing) for r in holding)]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("name", TIMED)
def test_rows_without_a_time_decide_no_claim(name, value):
    holding, failing = CRAFTED[name]
    for rows in (holding, *failing):
        facts = [r for r in rows if not isinstance(r, Timing)]
        want = LEDGER[name].judge(own(name, facts)).state
        for clock in ("ms", "wall_ms"):
            lost = spoilt(rows, **{clock: value})
            assert LEDGER[name].judge(own(name, facts + lost)).state == want
            # An earlier time of a cell that ran again does not stand in.
            assert LEDGER[name].judge(own(name, rows + lost)).state == want


def test_the_verdict_says_which_row_has_no_time():
    rows = CRAFTED["cudnn_beats_naive"][0]
    verdict = LEDGER["cudnn_beats_naive"].judge(own("cudnn_beats_naive", spoilt(rows, ms=math.nan)))
    assert verdict.state == UNTESTABLE and "without a time: cudnn, naive" in verdict.measured


def test_one_row_without_a_time_takes_no_other_with_it():
    rows = CRAFTED["cudnn_beats_naive"][0]
    extra = spoilt(rows, ms=math.nan, label="another")
    assert LEDGER["cudnn_beats_naive"].judge(own("cudnn_beats_naive", [*rows, *extra])).state == HOLDS


NO_GPU = {"device": "AMD EPYC", "kind": "cpu", "capability": "none", "cudnn": None}
L4 = {"device": "NVIDIA L4", "kind": "gpu", "capability": "8.9", "cudnn": "9.19.0"}


@pytest.mark.parametrize(
    "name, env, state",
    [
        ("tf32_by_default", NO_GPU, "no NVIDIA GPU but of AMD EPYC"),
        ("three_quarters", NO_GPU, "no NVIDIA GPU but of AMD EPYC"),
        ("head_dim_256_on_hopper", L4, "compute capability 8.9, and it needs 9.0"),
        ("cudnn_refuses_float32", L4 | {"cudnn": None}, "JAX finds no cuDNN"),
        ("cudnn_refuses_float32", L4, FAILS),
        ("tf32_by_default", L4, FAILS),
        ("tf32_by_default", {}, FAILS),
    ],
)
def test_what_the_recorded_device_can_not_run_fails_no_claim(name, env, state):
    rows = Records(dataclasses.replace(r, env=env) for r in own(name, CRAFTED[name][1][0]))
    verdict = LEDGER[name].judge_recorded(rows)
    assert state in (verdict.state if state == FAILS else verdict.measured)


@pytest.mark.parametrize("name", LEDGER)
def test_the_recorded_h200_can_run_what_every_claim_needs(name):
    assert LEDGER[name].judge_recorded(SAVED) == LEDGER[name].judge(SAVED)


def claims(capsys, *results):
    status = cli.main(["claims", *map(str, results)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_table_holds_every_claim_with_its_verdict(capsys):
    status, out, _ = claims(capsys)
    hold = f"{len(LEDGER)} claims over nvidia-h200 (NVIDIA H200): {len(LEDGER) - len(NOT_RECORDED)} hold, 0 fail"
    assert status == 0 and hold in out
    words = " ".join(out.split())
    for c in LEDGER.values():
        assert f"{c.notebook}, claims" in out
        assert c.sentence.split()[0] in words and c.judge(SAVED).measured.split()[0] in words
        if c.needs in features.RULES:
            assert features.RULES[c.needs].name in out
    assert out.count(f"  {HOLDS}  ") == len(LEDGER) - len(NOT_RECORDED) and "NVIDIA GPU" in out and "everywhere" in out


def test_a_claim_that_fails_makes_the_command_fail(capsys, tmp_path):
    wrong = CRAFTED["cudnn_refuses_float32"][1][0]
    own("cudnn_refuses_float32", wrong).write(tmp_path / "r.jsonl")
    status, out, _ = claims(capsys, tmp_path)
    assert status == 1 and " 1 fail, " in out and f"{len(LEDGER) - 1} not testable there" in out


@pytest.mark.parametrize("text", [None, "", "{}", "no record"], ids=["missing", "empty", "no schema", "no JSON"])
def test_results_that_can_not_be_read_are_one_line(capsys, tmp_path, text):
    path = tmp_path / "r.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    status, out, err = claims(capsys, path)
    assert status == 2 and not out and len(err.splitlines()) == 1 and str(path) in err
