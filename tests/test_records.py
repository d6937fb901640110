"""The records: one JSON line each, read back unchanged; lists that can be asked; a log that writes as it goes."""

import json
import math

import numpy as np
import pytest

from attnlab import records
from attnlab.records import Finding, Log, MissingRecord, Records, Shape, Timing

SHAPE = Shape(4, 128, 256, 8, 2, 64)
ENV = {"device": "NVIDIA H200", "driver": None, "jax": "0.11.2"}


def timing(label="xla", ms=1.5, **fields):
    required = dict(p20=1.0, p80=2.0, samples=20, clock="cupti", wall_ms=3.0, compile_s=0.25)
    return Timing(label=label, ms=ms, **{**required, **fields})


FULL = timing(
    shape=SHAPE, dtype="bfloat16", mask="causal", temp_bytes=0, kernels=(("gemm µ", 0.5), ("softmax", 1.0)),
    flops=1e12, bytes=2.5e6, bound_ms=0.1, error=1e-3, note='a "quoted" line\nand another', table="t", env=ENV,
)  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        FULL,
        timing(),
        timing(ms=math.inf, p80=-math.inf, kernels=(("k", math.inf),)),
        *(Finding(name="x", value=value) for value in (None, True, 0, -1.5, "words\u2028", math.inf, -math.inf)),
        Finding(name="x", value=1, label="l", shape=SHAPE, dtype="float32", mask="window (1, 0)", env=ENV),
    ],
    ids=lambda r: f"{type(r).__name__} {getattr(r, 'value', '')!r}",
)
def test_a_record_survives_its_json_line(record):
    line = records.to_json(record)
    assert "\n" not in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    again = records.from_json(line)
    assert again == record and type(again) is type(record)
    assert again.shape is None or type(again.shape) is Shape
    if isinstance(record, Timing):
        assert isinstance(again.kernels, tuple) and hash(again.kernels) == hash(record.kernels)
    else:
        assert type(again.value) is type(record.value)


@pytest.mark.parametrize("nan", [math.nan, np.float64("nan")], ids=["Python's", "NumPy's"])
def test_nan_survives_too(nan):
    assert math.isnan(records.from_json(records.to_json(Finding(name="x", value=nan))).value)
    assert math.isnan(records.from_json(records.to_json(timing(error=nan))).error)


def test_a_timing_knows_its_tflops_and_says_none_where_nobody_counted():
    assert timing(flops=2e12, ms=2.0).tflops == pytest.approx(1000.0)
    assert timing(flops=None).tflops is None and timing(flops=1e9, ms=0.0).tflops is None


@pytest.mark.parametrize(
    "shape, text",
    [
        (Shape.square(4, 128, 8, 64), "B4 T128 N8 H64"),
        (SHAPE, "B4 T128 S256 N8 K2 H64"),
        (Shape(1, 1, 9, 8, 8, 64), "B1 T1 S9 N8 H64"),
    ],
)
def test_a_shape_reads_as_its_letters(shape, text):
    assert str(shape) == text


def edited(record=FULL, **fields):
    return json.dumps(json.loads(records.to_json(record)) | fields)


BAD_LINES = {
    "broken JSON": ('{"schema": 1, "kind": "Tim', "JSON"),
    "no object": ("[1, 2]", "schema None"),
    "a newer schema": (edited(schema=2), "schema 2"),
    "no schema": ('{"kind": "Timing"}', "schema None"),
    "an unknown kind": (edited(kind="Guess"), "Guess"),
    "no kind": ('{"schema": 1}', "Timing, Finding"),
    "an unknown field": (edited(colour="red"), "colour"),
    "a missing field": ('{"schema": 1, "kind": "Finding", "name": "x"}', "value"),
    "a shape of three": (edited(shape=[1, 2, 3]), "shape"),
    "a kernel without time": (edited(kernels=[["gemm"]]), ""),
    "kernels that are a number": (edited(kernels=3), ""),
    "a shape of lists": (edited(shape=[[1]] * 6), "shape"),
    "brackets without end": ("[" * 100_000, "JSON"),
    "a time that is none": (edited(p20=None), "p20 is None"),
    "a clock that is none": (edited(clock=None), "clock is None"),
    "no environment": (edited(env=None), "env is None"),
}


@pytest.mark.parametrize("line, word", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_is_refused_with_file_and_line(tmp_path, line, word):
    path = tmp_path / "results.jsonl"
    path.write_text(records.to_json(FULL) + "\n\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        Records.read(path)
    assert f"{path}, line 3: " in str(error.value) and word in str(error.value)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="results.jsonl: not a file of records"):
        Records.read(path)


def test_results_are_found_as_a_file_a_folder_or_a_saved_device(tmp_path):
    for name in ("a", "b"):
        Records([records.Finding(name=name, value=1)]).write(tmp_path / f"{name}.jsonl")
    assert [r.name for r in records.load(tmp_path)] == ["a", "b"]
    assert [r.name for r in records.load(tmp_path / "b.jsonl")] == ["b"]
    assert records.load("nvidia-h200") == records.saved()
    with pytest.raises(records.BadRecords, match="no results at nvidia-h100: give a file .* nvidia-h200"):
        records.load("nvidia-h100")
    (tmp_path / "empty").mkdir()
    with pytest.raises(records.BadRecords, match="no records in .*empty: run the course first"):
        records.load(tmp_path / "empty")


def test_a_file_is_written_and_read_back(tmp_path):
    rows = Records([FULL, Finding(name="x", value=math.inf), timing()])
    rows.write(tmp_path / "r.jsonl")
    again = Records.read(tmp_path / "r.jsonl")
    assert again == rows and isinstance(again, Records)
    assert len((tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_records_are_found_by_their_fields_and_the_latest_wins():
    rows = Records([
        timing("xla", 1.0, dtype="float32"), timing("xla", 2.0, dtype="bfloat16"),
        Finding(name="error", value=1, label="xla"),
        timing("xla", 3.0, dtype="bfloat16"), Finding(name="error", value=2, label="naive"), timing("naive", 4.0),
    ])  # fmt: skip
    assert [r.ms for r in rows.find(label="xla", dtype="bfloat16")] == [2.0, 3.0]
    assert rows.timing("xla").ms == 3.0 and rows.timing("xla", dtype="float32").ms == 1.0
    assert rows.finding("error") == 2 and rows.finding("error", label="xla") == 1
    assert isinstance(rows.find(label="xla"), Records) and rows.find(label="cudnn") == []


@pytest.mark.parametrize(
    "ask, text",
    [
        (lambda r: r.timing("cudnn", table="first", shape=SHAPE),
         "no timing with label cudnn, table first, shape B4 T128 S256 N8 K2 H64"),
        (lambda r: r.finding("error", dtype="float16"), "no finding with name error, dtype float16"),
        (lambda r: r.timing("error"), "no timing with label error"),
    ],
    ids=["timing", "finding", "a finding is no timing"],
)  # fmt: skip
def test_a_missing_record_says_what_was_looked_for(ask, text):
    with pytest.raises(MissingRecord) as error:
        ask(Records([timing(), Finding(name="error", value=1, label="error")]))
    assert str(error.value) == text


def test_the_log_writes_each_record_as_it_comes(tmp_path):
    log = Log()
    log.open("01_x", tmp_path / "new" / "folder")
    path = tmp_path / "new" / "folder" / "01_x.jsonl"
    assert Records.read(path) == []
    for count in (1, 2, 3):
        kept = log.add(timing(ms=float(count)))
        assert kept.notebook == "01_x" and Records.read(path) == log.records and len(log.records) == count


def test_beginning_a_notebook_again_forgets_the_last_run(tmp_path):
    log = Log()
    for ms in (1.0, 2.0):
        log.open("01_x", tmp_path)
        log.add(timing(ms=ms))
    assert [r.ms for r in Records.read(tmp_path / "01_x.jsonl")] == [2.0] == [r.ms for r in log.records]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = Log()
    log.open("01_x")
    log.add(timing())
    assert len(log.records) == 1 and not list(tmp_path.iterdir())


def test_a_log_without_a_folder_refuses_what_a_log_with_one_could_not_write(tmp_path):
    outcomes = []
    for folder in (None, tmp_path):
        log = Log()
        log.open("01_x", folder)
        try:
            log.add(Finding(name="same bits", value=np.bool_(True)))
            outcomes.append("kept")
        except TypeError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1], f"without a folder {outcomes[0]}, with one {outcomes[1]}"


def test_saved_results_of_a_device_that_nobody_measured_are_empty():
    assert records.saved("no-such-device") == []
