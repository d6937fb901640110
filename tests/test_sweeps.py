"""The sweep keeps every row that it measured, whatever happens; the crossover is computed, of equal things."""

import math

import jax
import jax.numpy as jnp
import pytest

import attnlab as lab
from attnlab import curves, plots, records, tables
from attnlab.attention import naive_attention
from attnlab.records import Finding, Records, Shape, Timing
from crafted import row

FAST = dict(B=1, N=2, H=8, seconds=0.005)


@pytest.fixture
def log():
    records.LOG.open("05_sweeps")
    return records.LOG


def test_a_row_for_each_variant_and_combination_in_order(log):
    variants = {"naive": naive_attention, "xla": lab.variant("xla")}
    rows = lab.sweep(variants, table="t", T=(8, 16), dtype=["float32", "bfloat16"], **FAST)
    assert [(r.shape.T, r.dtype, r.label) for r in rows] == [
        (T, d, v) for T in (8, 16) for d in ("float32", "bfloat16") for v in variants
    ]
    assert all(isinstance(r, Timing) and r.table == "t" and r.error < 0.02 for r in rows)
    assert log.records == rows


@pytest.mark.parametrize(
    "axis, values", [("B", (1, 2)), ("N", range(2, 5, 2)), ("H", [8, 16]), ("S", (8, 24)), ("K", (1, 2))]
)
def test_any_size_can_be_the_axis(log, axis, values):
    rows = lab.sweep({"naive": naive_attention}, table="t", **(FAST | {"T": 8, axis: values}))
    assert [getattr(r.shape, axis) for r in rows] == list(values)
    assert all(isinstance(r, Timing) for r in rows), rows


def test_windows_are_an_axis_and_reach_the_variant(log):
    windows = [(0, 0), (3, 0), (7, 0)]
    variants = {"naive": naive_attention, "xla": lab.variant("xla")}
    rows = lab.sweep(variants, table="t", T=16, local_window_size=windows, is_causal=True, **FAST)
    # A variant that ignored its mask would miss the reference, and be refused.
    assert all(isinstance(r, Timing) for r in rows), rows
    assert [r.mask for r in rows[::2]] == [f"window {w} causal" for w in windows]
    assert rows[0].flops < rows[2].flops < rows[4].flops
    assert [curves._size(r, "window") for r in rows[::2]] == [1, 4, 8]


def test_inputs_differ_from_point_to_point(log):
    seen = []

    def spy(q, k, v):
        jax.debug.callback(lambda x: seen.append(float(x)), q[0, 0, 0, 0])
        return naive_attention(q, k, v)

    lab.sweep({"spy": spy}, table="t", T=(8, 16), **FAST)
    assert len(set(seen)) == 2


def greedy(limit):
    def attend(q, k, v):
        if q.shape[1] > limit:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 48.00GiB")
        return naive_attention(q, k, v)

    return attend


def test_out_of_memory_is_a_row_and_the_sweep_goes_on(log):
    rows = lab.sweep({"greedy": greedy(8), "naive": naive_attention}, table="t", T=(8, 16, 32), **FAST)
    assert [type(r) for r in rows] == [Timing, Timing, Finding, Timing, Finding, Timing]
    assert rows[2].name == "refused" and rows[2].shape.T == 16 and rows[2].mask == "full"
    assert rows[2].value.startswith("MemoryError: greedy at B1 T16 N2 H8 ran out of memory")
    assert "48.00GiB" in rows[2].value


def test_inputs_too_large_refuse_each_variant_at_that_size(log):
    rows = lab.sweep({"naive": naive_attention, "xla": lab.variant("xla")}, table="t", T=(8, 10**11, 16), **FAST)
    assert [isinstance(r, Timing) for r in rows] == [True, True, False, False, True, True]
    assert "GiB are free" in rows[2].value and rows[3].label == "xla" and rows[3].shape == Shape.square(1, 10**11, 2, 8)


def test_interrupted_it_keeps_what_it_has(log, capsys):
    def interrupt(q, k, v):
        if q.shape[1] == 16:
            raise KeyboardInterrupt
        return naive_attention(q, k, v)

    rows = lab.sweep({"naive": naive_attention, "stop": interrupt}, table="my sweep", T=(8, 16, 32), **FAST)
    assert [(r.label, r.shape.T) for r in rows] == [("naive", 8), ("stop", 8), ("naive", 16)]
    assert log.records == rows
    assert "Interrupted: 3 of 6 rows of 'my sweep'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong, error",
    [
        (dict(T=(8, 0)), "T must be at least 1, got 0"),
        (dict(T=(8, "long")), "T must be a whole number"),
        (dict(T=8, K=(1, 3)), "K must divide N"),
        (dict(T=8, dtype=("float32", "int8")), "int8"),
        (dict(T=8, speed="high"), "speed"),
    ],
)
def test_a_slip_is_found_before_anything_is_measured(log, wrong, error):
    with pytest.raises((ValueError, TypeError), match=error):
        lab.sweep({"naive": naive_attention}, table="t", **(FAST | wrong))
    assert not log.records


def test_a_wrong_variant_is_refused_and_not_timed(log):
    rows = lab.sweep({"wrong": lambda q, k, v: v, "naive": naive_attention}, table="t", T=(8, 16), **FAST)
    assert [isinstance(r, Timing) for r in rows] == [False, True, False, True]
    assert "relative error" in rows[0].value


def test_the_reference_is_computed_once_for_all_variants(log, monkeypatch):
    from attnlab import comparison

    calls = []
    monkeypatch.setattr(
        comparison, "reference", lambda *a, f=comparison.reference, **kw: calls.append(1) or f(*a, **kw)
    )
    variants = {"naive": naive_attention, "xla": lab.variant("xla"), "again": naive_attention}
    lab.sweep(variants, table="t", T=(8, 16), **FAST)
    assert len(calls) == 2


# ---- the crossover -----------------------------------------------------------------------------------------


def timed(label, times: dict, dtype="bfloat16"):
    return [row(label, ms, shape=Shape.square(4, T, 8, 64), dtype=dtype, wall_ms=10 * ms) for T, ms in times.items()]


def test_the_crossover_lies_where_the_lines_cross():
    # first = T, second = T²/256 in some unit: they meet at 256.
    rows = timed("first", {T: T for T in (64, 128, 512, 1024)})
    rows += timed("second", {T: T * T / 256 for T in (64, 128, 512, 1024)})
    assert lab.crossover(rows, "first", "second") == pytest.approx(256)
    assert lab.crossover(rows, "second", "first") == pytest.approx(256)
    assert lab.crossover(rows, "first", "second", by="wall_ms") == pytest.approx(256)


def test_without_a_change_of_order_there_is_none():
    rows = timed("a", {64: 1, 128: 2}) + timed("b", {64: 0.5, 128: 0.9, 256: 9})
    assert lab.crossover(rows, "a", "b") is None


def test_of_several_changes_the_last_counts():
    rows = timed("a", {64: 1, 128: 2, 256: 1, 512: 1}) + timed("b", {64: 2, 128: 1, 256: 2, 512: 2})
    assert 128 < lab.crossover(rows, "a", "b") < 256


def test_a_refused_row_is_no_point_of_it():
    rows = timed("a", {64: 1, 128: 2, 256: 4}) + timed("b", {64: 2, 256: 3})
    rows.append(Finding(name="refused", value="no", label="b", shape=Shape.square(4, 128, 8, 64), dtype="bfloat16"))
    assert 64 < lab.crossover(rows, "a", "b") < 256


def test_unequal_dtypes_have_no_crossover():
    rows = timed("a", {64: 1, 128: 2}, "float32") + timed("b", {64: 2, 128: 1})
    with pytest.raises(ValueError, match="bfloat16, float32: compare equal dtypes"):
        lab.crossover(rows, "a", "b")


def test_one_common_size_is_too_few():
    with pytest.raises(ValueError, match="at 1 sizes of T"):
        lab.crossover(timed("a", {64: 1, 128: 2}) + timed("b", {64: 1, 256: 1}), "a", "b")


# ---- what is shown -----------------------------------------------------------------------------------------


@pytest.fixture
def swept():
    rows = Records(timed("naive", {64: 0.1, 128: 0.2}) + timed("cudnn", {64: 0.05}))
    rows.append(
        Finding(
            name="refused", value="MemoryError: no", label="cudnn", shape=Shape.square(4, 128, 8, 64), dtype="bfloat16"
        )
    )
    return rows


def test_the_table_has_sizes_down_and_variants_across(swept, log, capsys):
    lab.show_sweep(swept, "T", "Lengths")
    said = capsys.readouterr().out
    assert "Lengths, bfloat16" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["T", "naive", "cudnn"] in lines
    assert ["64", "100", "µs", "50.0", "µs"] in lines and ["128", "200", "µs", "refused"] in lines
    assert "cudnn, bfloat16: MemoryError: no" in said


def test_the_picture_names_each_line_and_leaves_the_refused_out(swept, log, capsys):
    lab.show_lines(swept, "T", "Lengths")
    said = capsys.readouterr().out
    assert "naive, by hand: 64: 0.1, 128: 0.2" in said and "cuDNN: 64: 0.05" in said


def test_saved_rows_of_another_device_follow(swept, log, capsys, monkeypatch):
    saved = Records(timed("naive", {64: 0.01, 4096: 3.0}) + timed("te", {64: 0.01}))
    monkeypatch.setattr(curves, "saved_elsewhere", lambda: Records(records.LOG.add(r) for r in saved))
    lab.show_sweep(swept, "T", "Lengths")
    said = capsys.readouterr().out
    assert "H200, saved" in said and "4096" in said.split("H200, saved")[1]
    assert "te" not in said.split("H200, saved")[1].splitlines()[1].split()  # a variant that is not compared here


def test_float32_and_bfloat16_of_a_variant_share_colour_and_marker():
    half, full = plots._style(("xla", "bfloat16")), plots._style(("xla", "float32"))
    assert half["color"] == full["color"] == plots.STYLE["xla"]["color"] and half["marker"] == full["marker"]
    assert full["markerfacecolor"] == "white" and "markerfacecolor" not in half
    assert full["label"].endswith("XLA, float32")
    assert plots._style("something") == plots._style(("something", "float32")) == {}


def test_the_roofline_tells_every_point(log, capsys, monkeypatch):
    rows = [row("cudnn", 0.1, shape=Shape.square(4, T, 8, 64), flops=1e10 * T, bytes=1e8) for T in (64, 128)]
    monkeypatch.setattr(
        curves._device, "current", lambda: lab.device.Device("X", "gpu", ceilings=lab.device.CEILINGS["NVIDIA H200"])
    )
    monkeypatch.setattr(curves, "saved_elsewhere", Records)
    lab.show_roofline(rows, "T", "Roof")
    said = capsys.readouterr().out
    assert "peak, bfloat16: 989 TFLOP/s" in said and "T 64: 6,400" in said and "T 128: 12,800" in said


def test_without_a_published_bandwidth_there_is_no_roofline(log, capsys, monkeypatch):
    monkeypatch.setattr(curves, "saved_elsewhere", Records)
    monkeypatch.setattr(curves._device, "current", lambda: lab.device.Device("X", "gpu"))
    lab.show_roofline([row("cudnn", 0.1, shape=Shape.square(4, 64, 8, 64), flops=1e10, bytes=1e8)], "T", "Roof")
    assert "no published memory bandwidth, so no roofline" in capsys.readouterr().out


def test_timings_that_run_nowhere_here_still_show_the_saved_ones(log, capsys, monkeypatch):
    theirs = Records([records.LOG.add(row("FP8", 1.0, table="dense", flops=1e12))])
    monkeypatch.setattr(tables, "saved_elsewhere", lambda: theirs)
    tables.show_timings([], "Dense", table="dense")
    assert "not run here" in capsys.readouterr().out


# ---- the guard of cuDNN's wrong window, and windows by hand ------------------------------------------------


def test_cudnns_wrong_window_is_refused_before_cudnn_is_asked():
    x = lab.qkv(1, 32, 2, 16, dtype="bfloat16")
    for window in ((16, 0), (0, 0), 0):
        with pytest.raises(ValueError, match="Pass is_causal=True"):
            lab.variant("cudnn")(*x, local_window_size=window)


@pytest.mark.parametrize(
    "options", [dict(is_causal=True), dict(local_window_size=(8, 0), is_causal=True), dict(local_window_size=(8, 8))]
)
def test_the_guard_lets_everything_else_through(options, monkeypatch):
    seen = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **kw: seen.append(kw))
    lab.variant("cudnn")(*lab.qkv(1, 32, 2, 16), **options)
    assert seen[0]["implementation"] == "cudnn" and options.items() <= seen[0].items()


@pytest.mark.parametrize("T, S", [(16, 16), (8, 16), (16, 8), (1, 16)])
@pytest.mark.parametrize("options", [dict(is_causal=True), dict(local_window_size=(3, 0)), dict(local_window_size=2),
                                     dict(local_window_size=(3, 5), is_causal=True)], ids=str)  # fmt: skip
def test_windows_by_hand_are_the_references(T, S, options):
    x = lab.qkv(1, T, 4, 8, S=S, K=2, seed=3)
    assert lab.relative_error(naive_attention(*x, **options), *x, **options) < 1e-5


def test_one_wrong_head_and_one_nan_are_seen_by_head():
    q, k, v = lab.qkv(2, 8, 4, 8)
    out = naive_attention(q, k, v)
    errors = lab.error_by_head(out.at[1, :, 2].multiply(2).at[0, 3, 1, 0].set(jnp.nan), q, k, v)
    assert errors.shape == (2, 4) and errors[1, 2] == pytest.approx(1, rel=1e-3) and math.isnan(errors[0, 1])
    assert sum(e < 1e-3 for e in errors.ravel()) == 6


def test_a_finding_without_a_label_has_no_empty_column(log, capsys, monkeypatch):
    monkeypatch.setattr(tables, "saved_elsewhere", Records)
    lab.observe("memory", 105)
    lab.show_findings("memory", "The share")
    said = capsys.readouterr().out.split()
    assert "here" in said and "105" in said and "what" not in said


def test_the_ladder_tells_each_gain_over_the_rung_before_and_the_peak(log, capsys, monkeypatch):
    monkeypatch.setattr(
        curves._device, "current", lambda: lab.device.Device("X", "gpu", ceilings=lab.device.CEILINGS["NVIDIA H200"])
    )
    monkeypatch.setattr(curves, "saved_elsewhere", Records)
    where = dict(shape=Shape.square(2, 8192, 16, 128), flops=1e12)
    refused = records.Finding(name="refused", value="no", label="hopper", dtype="bfloat16", shape=where["shape"])
    lab.show_ladder(
        [row("naive", 8.0, **where), row("flash", 2.0, **where), refused, row("cudnn", 1.25, **where)], "Ladder"
    )
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "naive: 125",
        "flash: 500   ×4.00",
        "hopper: not measured",
        "cudnn: 800   ×1.60",
        "peak, bfloat16: 989",
    ]
    assert "Ladder, bfloat16, B2 T8192 N16 H128, X" in said[0]


def test_a_ladder_of_nothing_draws_nothing(log, capsys, monkeypatch):
    monkeypatch.setattr(curves, "saved_elsewhere", Records)
    lab.show_ladder([records.Finding(name="refused", value="no", label="hopper", shape=Shape.square(1, 8, 1, 8))], "L")
    assert capsys.readouterr().out == ""
