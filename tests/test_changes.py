"""Two sets of results side by side: what is a change, what is noise, and what can't be compared."""

import dataclasses
import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab import changes, cli, records
from attnlab.records import Finding, Records, Shape, Timing, to_json
from crafted import fact, row

SHAPE = Shape.square(4, 128, 8, 64)
ENV = {"device": "NVIDIA H200", "driver": "1", "jax": "0.11.2", "cudnn": "9.19.0", "te": None, "python": "3.12.3"}
SAVED = records.saved()
TIMED = [r for r in SAVED if isinstance(r, Timing)]


def scaled(r, factor: float):
    return dataclasses.replace(r, ms=r.ms * factor, p20=r.p20 * factor, p80=r.p80 * factor)


def rerun(r, rng, factor=1.0, spread=0.02):
    """`r` measured anew, `factor` times as long: its samples scatter by `spread`, and its median with them."""
    samples = [r.ms * factor * rng.lognormvariate(0, spread) for _ in range(r.samples)]
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return dataclasses.replace(r, ms=statistics.median(samples), p20=cuts[0], p80=cuts[3])


def mine(*rows, notebook="03_cudnn", **env) -> Records:
    """Records of one notebook and one environment."""
    return Records(dataclasses.replace(r, notebook=notebook, env=ENV | env) for r in rows)


def timed(label="cudnn", ms=1.0, **fields):
    return row(label, ms, shape=SHAPE, table="t", **fields)


def refusal(words, label="cudnn"):
    return fact("refused", words, label, shape=SHAPE, dtype="bfloat16", table="t")


@pytest.fixture
def compare(tmp_path, capsys):
    """(exit status, what was printed) of `attnlab compare` over sets of records; what is no such set is passed on."""

    def call(*sets):
        places = []
        for n, rows in enumerate(sets):
            if isinstance(rows, Records):
                rows.write(tmp_path / f"{n}.jsonl")
                rows = tmp_path / f"{n}.jsonl"
            places.append(str(rows))
        capsys.readouterr()
        status = cli.main(["compare", *places])
        out, err = capsys.readouterr()
        return status, out + err

    return call


# ---- times -------------------------------------------------------------------------------------------------


def test_the_saved_results_have_not_changed_against_themselves(compare):
    status, text = compare("nvidia-h200", "nvidia-h200")
    assert status == 0 and "\nRows\n" not in text and "\nFindings\n" not in text and "\nClaims\n" not in text


@pytest.mark.parametrize("factor, kind", [(1.2, "slower"), (1 / 1.2, "faster")])
@pytest.mark.parametrize("seed", range(5))
def test_every_saved_row_that_is_a_fifth_slower_is_flagged(factor, kind, seed):
    rng = random.Random(seed)
    assert {r.clock for r in TIMED} == {"cupti"}
    # A row of few samples that scatter by a tenth says less: hardly any may be so.
    steady = [r for r in TIMED if r.p80 - r.p20 < 0.1 * r.ms]
    assert len(steady) >= 0.99 * len(TIMED)
    for change in (lambda r: scaled(r, factor), lambda r: rerun(r, rng, factor)):
        assert not [r for r in steady if getattr(changes.row_change(r, change(r)), "kind", None) != kind]


@pytest.mark.parametrize("seed", range(10))
def test_two_percent_of_noise_is_no_change_in_any_saved_row(seed):
    rng = random.Random(seed)
    again = [rerun(scaled(r, rng.lognormvariate(0, 0.02)), rng) for r in TIMED]
    assert not [r for r, new in zip(TIMED, again, strict=True) if changes.row_change(r, new)]


def test_samples_that_scatter_widely_seldom_look_like_a_change():
    rng, old = random.Random(0), timed(samples=20)
    pairs = [(rerun(old, rng, spread=0.3), rerun(old, rng, spread=0.3)) for _ in range(2000)]
    flagged = sum(changes.row_change(*pair) is not None for pair in pairs) / len(pairs)
    beyond_the_floor = sum(abs(math.log(a.ms / b.ms)) > math.log(1 + changes.DEVICE_FLOOR) for a, b in pairs)
    assert flagged < 0.01 and beyond_the_floor > 100


def test_floor_and_errors_add_in_quadrature():
    def spread(x):
        return timed(p20=1 - x, p80=1 + x, samples=100)

    error = 1.2533 * 0.2 / 0.8416 / 10
    parts = (math.log(1 + changes.DEVICE_FLOOR), 3 * error, 3 * error / 2)
    assert math.log(changes.noise(spread(0.2), spread(0.1))) == pytest.approx(math.hypot(*parts))


@given(st.lists(st.floats(0.98, 1.02), min_size=5, max_size=20), st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_samples_within_two_percent_of_each_other_are_no_change(noise, ms):
    noise = sorted(noise)
    new = timed(ms=ms * noise[len(noise) // 2], p20=ms * noise[0], p80=ms * noise[-1], samples=len(noise))
    assert changes.row_change(timed(ms=ms), new) is None


@given(st.floats(1.2, 50), st.floats(1e-3, 1e3), st.floats(0, 0.02))
@settings(deadline=None)
def test_a_slowdown_of_a_fifth_or_more_is_flagged_and_back_is_faster(factor, ms, spread):
    old = timed(ms=ms, p20=ms * (1 - spread), p80=ms * (1 + spread), samples=5)
    there, back = changes.row_change(old, scaled(old, factor)), changes.row_change(scaled(old, factor), old)
    assert (there.kind, back.kind) == ("slower", "faster") and there.weight == pytest.approx(back.weight)


def test_a_wide_spread_of_few_samples_leaves_more_room():
    old, new = timed(ms=1.0), timed(ms=1.17)
    wide = dataclasses.replace(new, p20=0.9, p80=1.4)
    assert changes.row_change(old, new).kind == "slower" and changes.row_change(old, wide) is None
    assert changes.row_change(old, dataclasses.replace(wide, samples=500)).kind == "slower"


def test_percentiles_that_are_no_numbers_leave_the_floor():
    new = timed(ms=1.2, p20=math.nan, p80=math.inf)
    assert changes.noise(timed(), new) == pytest.approx(1 + changes.DEVICE_FLOOR)


def test_what_a_cpu_times_is_shown_and_not_counted_and_its_errors_are(compare):
    def cpu(**values):
        found = [fact(name, value) for name, value in values.items()]
        return Records(dataclasses.replace(r, env=ENV | {"device": "a CPU", "kind": "cpu"}) for r in mine(*found))

    old = cpu(factor=1.0, crossover="T = 93; beyond it naive is ahead", error=0.1, kernels=7)
    status, text = compare(old, cpu(factor=3.0, crossover="T = 387; beyond it naive is ahead", error=0.1, kernels=7))
    assert status == 0 and "2 moved by the host's clock, not counted" in text
    assert compare(old, cpu(factor=1.0, crossover="T = 93; beyond it naive is ahead", error=0.3, kernels=7))[0] == 1
    assert compare(old, cpu(factor=1.0, crossover="T = 93; beyond it naive is ahead", error=0.1, kernels=9))[0] == 1


def test_a_notebook_that_was_stopped_is_not_compared_and_named(compare, tmp_path):
    from attnlab.course import Outcome

    folder = tmp_path / "build" / "results"
    folder.mkdir(parents=True)
    two = [dataclasses.replace(r, notebook=n) for n in ("00_a", "01_b") for r in mine(timed())]
    Records(two).write(tmp_path / "old.jsonl")
    Records([two[0], dataclasses.replace(two[1], ms=9.0)]).write(folder / "all.jsonl")
    state = {"01_b": dataclasses.asdict(Outcome("01_b", "stopped", 1.0, 13, 25))}
    (folder.parent / "run.json").write_text(json.dumps(state))
    status, text = compare(tmp_path / "old.jsonl", folder)
    assert status == 0 and "01_b stopped in cell 13 of 25: not compared. Run it again: make run ARGS=01" in text


def test_chained_calls_are_held_to_what_the_device_is():
    old = timed(clock="chain")
    assert changes.row_change(old, timed(ms=1.02, clock="chain")) is None
    assert changes.row_change(old, timed(ms=1.2, clock="chain")).kind == "slower"


def test_the_hosts_clock_tells_only_a_factor_of_three(compare):
    old = timed(clock="wall")
    assert changes.row_change(old, timed(ms=2.9, clock="wall")) is None
    assert changes.row_change(old, timed(ms=3.1, clock="wall")).kind == "slower"
    assert "1 rows are timed by the host's clock, where less than 3× is noise" in compare(mine(old), mine(old))[1]


def test_a_slowdown_is_told_with_its_noise_the_biggest_first(compare):
    old = mine(timed("naive"), timed("xla"), timed("cudnn"))
    status, text = compare(old, mine(timed("naive", 1.5), timed("xla", 1.02), timed("cudnn", 3.0)))
    assert status == 1 and "2 slower, 1 within noise" in text
    lines = [line for line in text.splitlines() if "slower: " in line]
    assert ["3.0×" in lines[0], "1.5×" in lines[1]] == [True, True] and "noise to 1.14×" in lines[0]
    assert " xla " not in text


def test_other_kernels_under_a_changed_time_are_said(compare):
    old, new = mine(timed(kernels=(("a", 1.0),))), mine(timed(ms=2.0, kernels=(("b", 2.0),)))
    assert "other kernels" in compare(old, new)[1]


def test_only_the_latest_of_a_cell_that_ran_twice_counts(compare):
    assert compare(mine(timed()), mine(timed(ms=9.0), timed()))[0] == 0


# ---- rows that are not two times ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new, words",
    [
        ([timed()], [refusal("ValueError: no more")], ["refused now: ValueError: no more", "1 refused"]),
        ([refusal("ValueError: not yet")], [timed()], ["runs now, before: ValueError: not yet", "1 run now"]),
        ([timed(), timed("xla")], [timed("xla")], ["gone", "1 gone"]),
        ([timed("xla")], [timed(), timed("xla")], ["new", "1 new"]),
        ([timed()], [timed(clock="wall")], ["not compared: clock cupti before, wall now", "1 by another clock"]),
        ([timed()], [timed(ms=math.nan)], ["no time now", "nan ms", "1 without a time"]),
        ([timed(ms=math.inf)], [timed()], ["no time before", "inf ms", "1 without a time"]),
        ([timed()], [timed(wall_ms=math.nan)], ["no time now", "host nan", "1 without a time"]),
        ([timed(ms=math.nan)], [timed(ms=math.nan)], ["no time now", "1 without a time"]),
    ],
    ids=["refused", "runs", "gone", "new", "clock", "NaN", "infinite before", "host NaN", "NaN twice"],
)
def test_a_row_that_is_no_time_on_one_side_is_said_and_the_others_are_compared(compare, old, new, words):
    status, text = compare(mine(*old, timed("naive")), mine(*new, timed("naive", 2.0)))
    assert status == 1 and "1 slower" in text
    assert not [w for w in words if w not in text]


def test_refusals_in_other_words_are_shortened_to_what_differs(compare):
    words = "NotImplementedError: this kernel of the library takes only head dims that are {} of eight on this card"
    status, text = compare(mine(refusal(words.format("multiples"))), mine(refusal(words.format("powers"))))
    assert status == 1 and "…" in text and "multiples" in text and "powers" in text
    assert "NotImplementedError" not in text


MEMORY = "MemoryError: q, k and v at B4 T16384 needs 34.4 GiB and {} are free on NVIDIA H200"


@pytest.mark.parametrize(
    "words, old, new, changed",
    [
        (MEMORY, "20.1 GiB", "19.8 GiB", False),
        (MEMORY, "20.1GiB", "10.1GiB", True),
        (MEMORY, "21,582,206,566 bytes", "20582206566 bytes", False),
        (MEMORY, "21.5 GB", "21.5 GiB", True),
        (MEMORY, "512 B", "500 B", False),
        ("ValueError: head_dim must be at most {}", "128", "192", True),
        ("ValueError: head_dim must be at most {}, 20 GiB are free", "128", "129", True),
        ("RuntimeError: it needs compute capability {}", "8.0", "10.0", True),
        ("RuntimeError: it needs cuDNN {}", "9.14.0", "9.19.0", True),
        ("ValueError: got shape {}", "(4, 100)", "(4, 101)", True),
        ("ValueError: a {} block", "128-byte", "129-byte", True),
        ("ValueError: at most {} Blocks", "8", "9", True),
        ("NotImplementedError: Q must be {}", "fp16", "fp8", True),
    ],
)
def test_of_a_refusals_numbers_only_memory_may_drift(compare, words, old, new, changed):
    status, text = compare(mine(refusal(words.format(old))), mine(refusal(words.format(new))))
    assert status == changed and f"findings: {int(changed)} changed" in text


# ---- findings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new, changed",
    [
        (True, True, False), (True, False, True), (1, True, True), (None, None, False), (None, 1, True),
        (7, 7, False), (7, 8, True), (402653200, 402653456, False), (1 << 30, 1 << 31, True),
        (2.0, 2.6, False), (2.0, 3.1, True), (3.1, 2.0, True), (1.0, -1.0, True), (0.0, 0.0, False), (0.0, 1e-9, True),
        (math.nan, math.nan, False), (1.0, math.nan, True), (1.0, math.inf, True), (2, 2.0, False),
        ("runs", "runs", False), ("runs", "ValueError: no", True), ("cuDNN 9.14.0", "cuDNN 9.19.0", True),
    ],
)  # fmt: skip
def test_a_finding_changed(old, new, changed):
    assert changes.differs("x", old, new) is changed


HEADS = "{} heads, {} to 6.4%; {} calls agree: True"


@pytest.mark.parametrize(
    "name, old, new, changed",
    [
        ("crossover", "T = 233; beyond it naive is ahead", "T = 251; beyond it naive is ahead", False),
        ("crossover", "T = 233; beyond it naive is ahead", "T = 1,024; beyond it naive is ahead", True),
        ("crossover", "T = 1,024; beyond it naive is ahead", "T = 1,124; beyond it naive is ahead", False),
        ("crossover", "T = 233; beyond it naive is ahead", "T = 233; beyond it cudnn is ahead", True),
        ("crossover", "T = 233; beyond it naive is ahead", "none: naive is always ahead", True),
        ("heads", HEADS.format(32, "5.7%", 3), HEADS.format(32, "5.5%", 3), False),
        ("heads", HEADS.format(32, "5.7%", 3), HEADS.format(32, "2.5%", 3), True),
        ("heads", HEADS.format(32, "5.7%", 3), HEADS.format(33, "5.7%", 3), True),
        ("heads", HEADS.format(32, "5.7%", 3), HEADS.format(32, "5.7%", 2), True),
        ("cudnn call", "head dim 128, 20.1 GiB", "head dim 128, 19.8 GiB", True),
    ],
)
def test_a_measured_number_in_a_text_may_drift_and_its_words_may_not(name, old, new, changed):
    assert changes.differs(name, old, new) is changed


@pytest.mark.parametrize("name", changes.MEASURED_TEXTS)
def test_texts_that_may_drift_are_findings_of_the_course_and_hold_measured_numbers(name):
    texts = [r.value for r in SAVED if isinstance(r, Finding) and r.name == name and isinstance(r.value, str)]
    assert [t for t in texts if changes.MEASURED_TEXTS[name].search(t)]


def host_facts(ratio=2.0, crossover="T = 610; beyond it naive is ahead", refused=True):
    """One finding of each kind that the host's clock makes, and the verdict over one of them."""
    return (
        fact("bound over unblocked time", ratio),
        fact("host ms a call, twenty in one program", ratio, "xla"),
        fact("gain", ratio, "by the host's clock"),
        fact("crossover", crossover, "naive and xla, host's clock"),
        fact("unblocked time refused", refused),
    )


def test_findings_by_the_hosts_clock_are_shown_and_not_counted(compare):
    status, text = compare(mine(*host_facts()), mine(*host_facts(4.0, "none: xla is always ahead")))
    assert status == 0 and "findings: 0 changed, 1 did not, 4 moved by the host's clock, not counted" in text
    shown = text.split("\nFindings\n")[1]
    assert "always ahead" in shown and "bound over" in shown and "host ms" in shown and "gain" in shown


def test_the_same_findings_by_the_devices_clock_are_counted(compare):
    def facts(ratio, words):
        return mine(fact("gain", ratio, "by the device's clock"), fact("crossover", words, "naive, device's clock"))

    status, text = compare(facts(2.0, "T = 610; naive"), facts(4.0, "none"))
    assert status == 1 and "findings: 2 changed, 0 did not;" in text


@pytest.mark.parametrize(
    "new",
    [host_facts(refused=False), host_facts(math.nan), host_facts(math.inf), host_facts()[1:]],
    ids=["verdict", "NaN", "infinite", "gone"],
)
def test_a_verdict_over_the_hosts_clock_and_a_value_that_is_none_are_counted(compare, new):
    status, text = compare(mine(*host_facts()), mine(*new))
    assert status == 1 and "not counted" not in text


def test_the_course_has_findings_by_the_hosts_clock_and_they_are_these():
    found = {r.name for r in SAVED if isinstance(r, Finding) and changes.HOSTS.search(f"{r.name} {r.label}")}
    assert found == {r.name for r in host_facts()}


def test_what_a_row_found_besides_its_time_is_compared(compare):
    old, new = mine(timed(temp_bytes=0, error=1e-3)), mine(timed(temp_bytes=1 << 30, error=9e-3))
    status, text = compare(old, new)
    assert status == 1 and "temporaries of a row" in text and "error of a row" in text and "1073741824" in text


def test_findings_that_came_and_went_are_said(compare):
    status, text = compare(mine(fact("a", 1), fact("b", 1)), mine(fact("b", 1), fact("c", 1)))
    assert status == 1 and "findings: 2 changed, 1 did not" in text


# ---- claims ------------------------------------------------------------------------------------------------


def test_claims_that_changed_their_verdict_are_told_with_both_measurements(compare):
    naive = next(r for r in TIMED if (r.notebook, r.table, r.label) == ("03_cudnn", "first timing", "naive"))
    fast = dataclasses.replace(naive, ms=naive.ms / 10, p20=naive.p20 / 10, p80=naive.p80 / 10)
    status, text = compare("nvidia-h200", Records([*SAVED, fast]))
    assert status == 1 and "cudnn_beats_naive holds → fails" in text
    (line,) = [line for line in text.splitlines() if line.startswith("03  cudnn_beats_naive:")]
    assert "holds: naive takes" in line and "fails: naive takes" in line


def test_notebooks_that_one_side_did_not_run_are_one_line(compare):
    status, text = compare("nvidia-h200", Records(r for r in SAVED if r.notebook < "04"))
    assert status == 0 and "only nvidia-h200 has 04 05 06 07 08 09, with " in text
    assert "\nClaims\n" not in text and "\nRows\n" not in text and " 0 claims" not in text


# ---- several devices ---------------------------------------------------------------------------------------


def elsewhere(rows, factor=3.0):
    env = ENV | {"device": "NVIDIA L4"}
    return Records(dataclasses.replace(scaled(r, factor) if isinstance(r, Timing) else r, env=env) for r in rows)


def test_another_devices_times_stand_beside_and_are_not_counted(compare):
    status, text = compare(mine(timed(), fact("kind", "a")), elsewhere(mine(timed(), fact("kind", "b"))))
    assert status == 0 and "3.0×" in text and "1 side by side" in text
    assert "another device (NVIDIA L4 against NVIDIA H200)" in text and "not counted" in text


def test_another_devices_verdicts_are_counted(compare):
    status, text = compare("nvidia-h200", elsewhere(SAVED, 100.0))
    assert status == 1 and "host_clock_shows_dispatch holds → fails" in text


def test_what_another_device_can_not_test_is_no_change_and_on_the_same_device_is_one(compare):
    cut = Records(r for r in SAVED if r.table != "first timing")  # what cudnn_beats_naive is about
    status, text = compare("nvidia-h200", elsewhere(cut, 1.0))
    assert status == 0 and "can be tested on one of the two devices only" in text and "cudnn_beats_naive" not in text
    status, text = compare("nvidia-h200", cut)
    assert status == 1 and "cudnn_beats_naive holds → not testable here" in text


def test_several_sets_stand_side_by_side(compare):
    status, text = compare(mine(timed()), elsewhere(mine(timed())), mine(timed(ms=2.0), jax="0.12"))
    assert status == 1
    (line,) = [line for line in text.splitlines() if "slower: " in line]
    assert "3.0×" in line and "slower: 2.0×" in line
    assert next(line for line in text.splitlines() if line.startswith("JAX")).split()[1:] == [
        "0.11.2", "0.11.2", "0.12", "differs",
    ]  # fmt: skip


def test_without_an_old_set_the_saved_one_is_it(compare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare(Records(SAVED))[0] == 0
    (tmp_path / "build" / "results").mkdir(parents=True)
    Records(scaled(r, 2) if isinstance(r, Timing) else r for r in SAVED).write(tmp_path / "build/results/all.jsonl")
    status, text = compare()
    assert status == 1 and "build/results against nvidia-h200" in text


# ---- what can't be compared --------------------------------------------------------------------------------


def bad(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    "text, words",
    [
        (json.dumps(json.loads(to_json(timed())) | {"schema": 99}), ["line 1", "schema 99", "Run the course again"]),
        (to_json(timed()) + '\n{"schema": 1, "kind"', ["line 2", "not JSON"]),
        ("", ["no records", "make run"]),
        (b"\xff\xfe\x00", ["bad.jsonl"]),
    ],
    ids=["schema", "cut off", "empty", "no text"],
)
def test_what_can_not_be_read_is_one_line_and_status_two(compare, tmp_path, text, words):
    path = bad(tmp_path, text)
    for places in ((path,), ("nvidia-h200", path), (path, "nvidia-h200")):
        status, said = compare(*places)
        assert status == 2 and len(said.splitlines()) == 1 and not [w for w in (*words, path.name) if w not in said]


def test_a_missing_place_is_named(compare):
    status, text = compare("nvidia-h200", "no/such/place")
    assert status == 2 and "no/such/place" in text and len(text.splitlines()) == 1


def test_sets_of_several_devices_or_without_a_common_notebook_are_refused(compare):
    status, text = compare(Records([*mine(timed()), *elsewhere(mine(timed("xla")))]), "nvidia-h200")
    assert status == 2 and "NVIDIA H200, NVIDIA L4" in text
    status, text = compare(mine(timed()), mine(timed(), notebook="02_sdpa"))
    assert status == 2 and "no notebook in common (03 against 02)" in text
