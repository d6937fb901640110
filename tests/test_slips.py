"""Sweeps, tables, curves, claims and checks where callers slip, rows mislead or values are odd."""

import dataclasses
import io
import math

import jax.numpy as jnp
import numpy as np
import pytest

import attnlab as lab
from attnlab import curves, plots, records, tables
from attnlab.attention import naive_attention
from attnlab.records import Finding, Records, Shape, Timing
from crafted import gathered, row
from test_sweeps import FAST, timed


@pytest.fixture
def log():
    records.LOG.open("05_sweeps")
    return records.LOG


def test_the_crossover_is_of_the_clock_and_axis_asked_for():
    rows = timed("a", {64: 1, 256: 4}) + timed("b", {64: 2, 256: 2})
    rows = [dataclasses.replace(r, wall_ms=1.0 + (r.label == "b")) for r in rows]
    assert lab.crossover(rows, "a", "b") == pytest.approx(128)
    assert lab.crossover(rows, "a", "b", by="wall_ms") is None
    rows = [row(x, ms, shape=Shape.square(B, 64, 8, 64)) for x, by_B in (("a", (1, 4)), ("b", (2, 2)))
            for B, ms in zip((1, 4), by_B, strict=True)]  # fmt: skip
    assert lab.crossover(rows, "a", "b", axis="B") == pytest.approx(2)


@pytest.mark.parametrize(
    "b, at", [((1, 2, 4), None), ((1, 3, 5), None), ((2, 2, 3), 128), ((2, 3, 4), None), ((0.5, 2, 3), None)]
)
def test_lines_that_only_touch_do_not_cross(b, at):
    rows = timed("a", dict(zip((64, 128, 256), (1, 2, 4), strict=True)))
    rows += timed("b", dict(zip((64, 128, 256), b, strict=True)))
    assert lab.crossover(rows, "a", "b") == (at and pytest.approx(at))


def test_a_crossover_of_unequal_sizes_or_with_itself_is_refused():
    rows = timed("a", {64: 1, 128: 2}) + timed("b", {64: 2, 128: 1})
    with pytest.raises(ValueError, match="several shapes"):
        lab.crossover([*rows, row("b", 9.0, shape=Shape.square(1, 64, 8, 64))], "a", "b")
    with pytest.raises(ValueError, match="itself"):
        lab.crossover(rows, "a", "a")


def test_a_row_without_inputs_has_its_mask_and_the_progress_its_sizes(log, monkeypatch):
    said = []
    monkeypatch.setattr("attnlab.display.Progress.step", lambda self, what: said.append(what))
    rows = lab.sweep({"naive": naive_attention}, table="t", T=(8, 10**11), is_causal=True,
                     local_window_size=(3, 0), **FAST)  # fmt: skip
    assert [r.mask for r in rows] == ["window (3, 0) causal"] * 2 and isinstance(rows[1], Finding)
    assert said == ["T 8 naive"]


@pytest.mark.parametrize("window", [(1, 2, 3), "x", 1.5, ((3, 0), (7, 0))])
def test_a_window_that_is_none_is_found_before_anything_is_measured(log, window):
    with pytest.raises(ValueError, match="local_window_size"):
        lab.sweep({"naive": naive_attention}, table="t", T=8, local_window_size=[(3, 0), window], **FAST)
    assert not log.records


def test_numpy_axes_and_windows_are_taken(log):
    rows = lab.sweep({"naive": naive_attention}, table="t", T=2 ** np.arange(3, 5), is_causal=True,
                     local_window_size=[(np.int64(3), 0)], **FAST)  # fmt: skip
    assert [r.shape.T for r in rows] == [8, 16] and rows[0].mask == "window (3, 0) causal"
    assert all(type(r.shape.T) is int for r in rows)
    for wrong in (dict(T=()), dict(T=8, is_causal=[True, False])):
        with pytest.raises((ValueError, TypeError)):
            lab.sweep({"naive": naive_attention}, table="t", **FAST | wrong)


def test_how_many_keys_a_query_sees():
    shape = Shape(1, 64, 512, 8, 8, 64)
    seen = {"full": 512, "causal": 512, "window (15, 0) causal": 16, "window (16, 16)": 33,
            "window (16, 16) causal": 17, "window (600, 0)": 512}  # fmt: skip
    assert {m: curves._size(row("a", 1.0, shape=shape, mask=m), "window") for m in seen} == seen


def test_lines_are_drawn_in_order_of_size_and_temporaries_in_mebibytes(log, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "lines", lambda series, *more, **kw: drawn.append((series, *more)))
    monkeypatch.setattr(curves, "saved_elsewhere", Records)
    shapes = [Shape(4, T, T, 8, 2, 64) for T in (128, 64)]
    rows = [row("xla", 1.0, shape=s, dtype=d, temp_bytes=s.T * 2**20) for d in ("bfloat16", "float32") for s in shapes]
    lab.show_lines(rows, "T", "Memory", "temp_bytes")
    ((series, axis, ylabel, title),) = drawn
    assert series == {("xla", d): [(64, 64.0), (128, 128.0)] for d in ("bfloat16", "float32")}
    assert "MiB" in ylabel and "K2" in title and title.startswith("Memory, B4 N8 K2 H64")


def test_the_saved_side_has_its_own_peak_and_a_cpu_none(log, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "lines", lambda *a, reference: drawn.append(reference))
    mine = Records([row("xla", 1.0, shape=Shape.square(4, 64, 8, 64), flops=1e9, table="t", dtype="float32")])
    monkeypatch.setattr(curves, "saved_elsewhere", lambda: Records(records.LOG.add(r) for r in mine))
    monkeypatch.setattr(curves._device, "current", lambda: lab.device.Device("A CPU", "cpu", ceilings=REAL))
    lab.show_lines(mine, "T", "Rates", "tflops")
    assert drawn == [{}, {"peak, float32": lab.device.CEILINGS["NVIDIA H200"].tflops["float32"]}]


REAL = lab.device.current().ceilings


@pytest.mark.parametrize("show", [lab.show_sweep, lab.show_lines])
def test_a_wrong_axis_or_value_and_rows_that_hide_each_other_are_refused(log, show):
    rows = timed("a", {64: 1})
    for args, words in (
        (("t", "x"), "no axis 't'"),
        (("count", "x"), "no axis"),
        (("T", "x", "time"), "no value 'time'"),
    ):
        with pytest.raises(ValueError, match=words):
            show(rows, *args)
    with pytest.raises(ValueError, match="two rows of a, bfloat16, at T 64"):
        show([*rows, dataclasses.replace(rows[0], mask="causal")], "T", "x")


def test_a_timed_row_without_the_value_is_not_called_refused(log, capsys):
    lab.show_sweep(timed("a", {64: 1}), "T", "x", "tflops")
    assert "refused" not in capsys.readouterr().out


def test_the_roof_meets_the_peak_at_the_ridge(log, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, f=Axes.plot, **kw: (drawn.append((list(x), list(y))), f(self, x, y, **kw))[1]
    )
    monkeypatch.setattr(plots, "_show", lambda *_: None)
    plots.roofline({"xla": [(100.0, 50.0, "T 1"), (200.0, None, "T 2")]}, 4800, {"peak": 960.0}, "Roof")
    (x, y), points = drawn
    assert (x[1], y[1]) == (200.0, 960.0) and y[0] / x[0] == pytest.approx(4.8) and points == ([100.0], [50.0])


def test_the_palette_keeps_the_colours_of_all_variants():
    from PIL import Image

    series = {name: [(1, i), (2, i)] for i, name in enumerate(plots.STYLE, 1)}
    picture = Image.open(io.BytesIO(plots.png(*plots.draw_lines(series, "x", "y", "t")))).convert("RGB")
    found = np.asarray(picture).reshape(-1, 3).astype(int)
    for style in plots.STYLE.values():
        want = [int(style["color"][i : i + 2], 16) for i in (1, 3, 5)]
        assert np.abs(found - want).sum(axis=1).min() < 12, style


def test_saved_rows_stand_beside_rows_of_their_own_table(log, monkeypatch):
    shape = Shape.square(1, 8, 1, 8)
    theirs = Records(
        records.LOG.add(row("a", ms, table=t, shape=shape)) for t, ms in (("x", 1.0), ("y", 2.0), ("z", 3.0))
    )
    monkeypatch.setattr(tables, "saved_elsewhere", lambda: theirs)
    mine = [row("a", 9.0, table=t, shape=shape) for t in ("x", "y")]
    assert [(m and m.table, s.table) for m, s in tables._merged(mine, "z")] == [("x", "x"), ("y", "y"), (None, "z")]


def test_a_refusal_that_ran_when_tried_again_is_forgotten():
    x = dict(label="a", shape=Shape.square(1, 8, 1, 8), dtype="bfloat16", table="t")
    no, yes = Finding(name="refused", value="no", **x), row(x.pop("label"), 1.0, **x)
    assert Records([no, yes]).latest(label="a") == [yes] and Records([yes, no]).latest(label="a") == [no]
    assert Records([no, yes]).latest(name="refused", label="a") == [no]


@pytest.mark.parametrize("name, finding", [
    ("decode_without_the_flag", "decode error"), ("window_error_is_large", "window error"),
    ("cudnn_as_accurate", "error"),
    ("te_follows_the_rule", "scale of the input"), ("delayed_scaling_lags", "error where inputs grow"),
])  # fmt: skip
def test_one_nan_anywhere_fails_a_claim_about_errors(name, finding):
    from test_claims import judged

    good = gathered("CRAFTED")[name][0]
    for i, r in enumerate(good):
        if getattr(r, "name", "") == finding and r.label != "cudnn, is_causal=False":
            assert judged(name, [*good[:i], dataclasses.replace(r, value=math.nan), *good[i + 1 :]]).state == "fails", r


def test_a_check_that_stops_says_so_and_stops_no_summary():
    from attnlab.claims import Claim

    verdict = Claim("x", "", "A sentence.", lambda r: (1 / 0, "")).judge(Records())
    assert verdict == ("not testable here", "its check stopped with ZeroDivisionError: division by zero")


def test_measure_refuses_options_that_are_none(log):
    with pytest.raises(TypeError, match="measure takes no second"):
        lab.measure(lambda x: x, jnp.ones(3), label="a", table="t", error=lambda out: 0.0, allowed=1, second=0.1)
    assert not log.records


def test_zeros_where_zeros_are_due_are_no_error():
    q, k, v = lab.qkv(1, 4, 2, 8)
    assert (lab.error_by_head(jnp.zeros_like(q), q, k, 0 * v) == 0).all()


def test_the_guard_takes_one_key_to_the_right(monkeypatch):
    import jax

    seen = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **kw: seen.append(kw))
    lab.variant("cudnn")(*lab.qkv(1, 8, 2, 8), local_window_size=(8, 1))
    assert seen


def first_taken(rows):
    ms = {}
    for r in rows:
        if isinstance(r, Timing):
            ms.setdefault((r.label, r.shape.T), r.ms)
    return {T: ms["naive", T] / ms["cudnn", T] for x, T in ms if x == "cudnn" and ("naive", T) in ms}


def sweeping(**more):
    return lambda sweep, variants: sweep(variants, **dict(table="head dim", T=256, H=(32, 64, 128)) | more)


MORE = {
    "speedups": [first_taken, lambda rows: {T: None for T in first_taken(rows)}],
    "head_dim_sweep": [
        sweeping(is_causal=True), sweeping(local_window_size=[(3, 0)]), sweeping(sed=1), sweeping(N=4), sweeping(S=64),
        sweeping(K=1), lambda sweep, variants: (sweep(variants, table="x"), sweeping()(sweep, variants))[1],
        lambda sweep, variants: [sweeping(H=h)(sweep, variants) for h in (32, 64, 128)][0],
        lambda sweep, variants: (sweeping()(sweep, variants), sweeping()(sweep, variants))[0],
    ],
    "next_scale": [
        lambda h, s, m: s if h[-1] == 0 else 448 / max(h) / 2**m if max(h) < math.inf else s,
        lambda h, s, m: 448 / max(h) / (2 * m or 1) if 0 < max(h) < math.inf else s,
        lambda h, s, m: 448 / max(h) / (m * m or 1) if 0 < max(h) < math.inf else s,
        lambda h, s, m: 448 // max(h) / 2**m if 0 < max(h) < math.inf else s,
        lambda h, s, m: 448 / max(max(h), 1e-12) / 2**m if max(h) < math.inf else s,
    ],
    "chunk_mask": [lambda start, T, S: jnp.tril(jnp.ones((1, 1, T, S), bool), start or 1)],
    "window_pairs": [lambda T, W: min(W, T) * (min(W, T) + 1) // 2 + max(0, T - W) * W * (T < 100)],
    "zero_blind": [lambda out, mask: out.at[0].multiply(mask[0].any(axis=-1).T[..., None])],  # of the first sequence
    "repeat_kv": [lambda x, N: np.repeat(x, 4 if N == 8 else 1, axis=2),
                  lambda x, N: np.repeat(x, max(2, N // x.shape[2]), axis=2)[:, :, : max(N, 2 * x.shape[2])]],
    "runs_in_fp8": [lambda what, c: c in {"matmul": ((8, 9), (9, 0)), "attention": ((9, 0),)}.get(what, ()),
                    lambda what, c: c >= {"matmul": (8, 6), "attention": (9, 0), "mxfp8 matmul": (10, 0)}[what]],
}  # fmt: skip


@pytest.mark.parametrize("name, i", [(n, i) for n in MORE for i in range(len(MORE[n]))])
def test_more_mistakes(name, i):
    answer = getattr(lab, f"check_{name}")(MORE[name][i])
    assert answer.state == "wrong" and answer.rows, answer
