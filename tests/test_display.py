"""What the reader sees: numbers as words, tables, bars, progress, pictures, in HTML and in plain text."""

import base64
import io
import math
import os
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from attnlab import display, plots


def parsed(source: str) -> ElementTree.Element:
    """A piece of HTML as a tree; fails on tags that do not nest."""
    return ElementTree.fromstring(source.replace("<br>", "<br/>"))


def styles(source: str, tag=None) -> list[str]:
    return [element.get("style") for element in parsed(source).iter(tag) if element.get("style")]


def widths(bundle) -> list:
    """Bar widths in percent, None for a hollow bar, in the order of the rows that have one."""
    bars = [e.get("style") for e in parsed(bundle["text/html"]).iter("div") if e.get("role") == "presentation"]
    return [None if "dashed" in bar else float(re.search(r"width:([\d.]+)%", bar)[1]) for bar in bars]


@pytest.fixture
def shown(monkeypatch):
    """Every bundle (and its metadata) that is displayed."""
    seen = []
    monkeypatch.setattr(display, "show", lambda bundle, metadata=None: seen.append((bundle, metadata)))
    return seen


# ---- numbers -----------------------------------------------------------------------------------------------

WORDS = {
    display.format_number: [
        (None, "–"), (math.nan, "–"), (0, "0"), (0.0, "0"), (3.14159, "3.14"), (4.0, "4.0"), (0.83, "0.83"),
        (0.00394, "0.00394"), (9.996, "10.0"), (1234.5, "1,234"), (1.2e-7, "1.20e-07"), (-0.5, "-0.5"),
        (math.inf, "∞"), (8388608, "8,388,608"), (np.float32(0.25), "0.25"), (np.int64(7), "7"),
    ],
    display.format_ms: [
        (0.004, "4.0 µs"), (0.00394, "3.94 µs"), (0.09999, "100 µs"), (0.83, "830 µs"), (999.9, "1.0 s"),
        (0.00005, "50.0 ns"), (0, "0 ms"), (None, "–"), (math.nan, "–"),
    ],
    display.format_bytes: [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12 * 2**30, "12.0 GiB"), (2**20 - 1, "1.0 MiB"), (None, "–"),
    ],
    display.format_count: [(8388608.0, "8,388,608")],
}  # fmt: skip


@pytest.mark.parametrize("form", WORDS)
def test_numbers(form):
    assert [form(value) for value, _ in WORDS[form]] == [text for _, text in WORDS[form]]


def test_units():
    assert [display.format_value(*v) for v in ((3.1, "×"), (0.004, "ms"), (None, "ms"))] == ["3.1×", "0.004 ms", "–"]


@pytest.mark.parametrize("value", ["4", True, [1.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="not a number"):
        display.format_number(value)


# ---- tables ------------------------------------------------------------------------------------------------


def test_table_html_is_escaped_and_semantic():
    evil = "<script>alert('&')</script>"
    bundle = display.table_bundle([evil, "b"], [(evil, 1)], title=evil)
    page = parsed(bundle["text/html"])
    assert list(page.itertext()) == [evil, evil, "b", evil, "1"]
    assert [element.tag for element in page.iter()][:3] == ["div", "table", "caption"]
    assert all(th.get("scope") == "col" for th in page.iter("th"))
    assert "overflow-x:auto" in page.get("style")


def test_table_text_is_aligned():
    rows = [("naive", 12.1, True, None, (4, 128)), ("cuDNN", 4, False, 2048, [1])]
    assert display.table_bundle(["variant", "µs", "fits", "T", "shape"], rows, "Times")["text/plain"] == (
        "Times\n"
        "variant    µs  fits     T  shape\n"
        "───────  ────  ────  ────  ────────\n"
        "naive    12.1  yes      –  (4, 128)\n"
        "cuDNN       4  no    2048  [1]"
    )


def test_columns_of_numbers_with_units_go_right_and_words_left():
    bundle = display.table_bundle(["a", "b"], [("4.0 µs", "8.9 or newer"), ("0.83 ms", "9")])
    number, words = styles(bundle["text/html"], "th")
    assert "text-align:right" in number and "text-align:left" in words


def test_long_cells_wrap_and_line_breaks_are_kept():
    bundle = display.table_bundle(["a", "b"], [("red\nnext", "w " * 80), ("short", "x" * 99)])
    lines = bundle["text/plain"].split("\n")
    assert lines[2].startswith("red    w w") and lines[3].startswith("next   w w")
    assert max(map(len, lines)) <= 7 + display.WRAP
    cells = styles(bundle["text/html"], "td")
    assert ["nowrap" in cell for cell in cells] == [True, False, True, False]
    assert ["break-all" in cell for cell in cells] == [False, False, False, True]  # only what is too long
    assert "red<br>next" in bundle["text/html"]


def test_empty_table_says_so():
    assert all("no rows" in text for text in display.table_bundle(["a", "b"], []).values())


@pytest.mark.parametrize("rows, words", [([(1, 2), (1, 2, 3)], "row 2 has 3 cells"), ([(1,)], "row 1 has 1 cells")])
def test_ragged_rows_are_named(rows, words):
    with pytest.raises(ValueError, match=words):
        display.show_table(["a", "b"], rows)


# ---- bars --------------------------------------------------------------------------------------------------


def test_bars_are_proportional_and_carry_their_values(shown):
    display.show_bars([("naive", 0.016), ("cuDNN", 0.004), ("tiny", 1e-6)], "Time", "ms", True)
    ((bundle, _),) = shown
    assert widths(bundle) == [100.0, 25.0, pytest.approx(0.00625, abs=1e-3)]  # nothing is lengthened
    for words in ("0.016 ms", "0.004 ms", "1.00e-06 ms", "Time (lower is better)"):
        assert words in parsed(bundle["text/html"]).itertext()
    first, naive, cudnn, tiny = bundle["text/plain"].split("\n")
    assert first == "Time (lower is better)"
    assert (naive.count("█"), cudnn.count("█"), tiny.count("█")) == (32, 8, 0)
    assert "0.004 ms" in cudnn and tiny.endswith("▏")


def test_zero_nan_and_infinite_bars(shown):
    rows = [("one", 1), ("zero", 0.0), ("nan", math.nan), ("none", None), ("inf", math.inf)]
    display.show_bars(rows, "Rate", "TFLOP/s")
    display.show_bars(rows[1:], "Rate")  # no finite length to measure by
    (bundle, _), (without, _) = shown
    assert widths(bundle) == [100.0, None]  # no bar for zero, NaN and None; a hollow one for infinity
    assert widths(without) == [None]
    assert list(parsed(bundle["text/html"]).itertext()).count("not measured") == 2
    lines = {line.split()[0]: line for line in bundle["text/plain"].split("\n")}
    assert lines["one"].endswith("█" * 32)
    assert lines["zero"].endswith("0 TFLOP/s")
    assert lines["nan"].endswith("not measured")
    assert "infinite" in lines["inf"] and lines["inf"].endswith("▶")


def test_no_bars_say_so_and_titles_and_labels_are_escaped(shown):
    display.show_bars([], "t")
    display.show_bars([("<b>", 1)], "<i>", "<u>")
    assert all("nothing to show" in text for text in shown[0][0].values())
    assert not re.search("<(b|i|u)>", shown[1][0]["text/html"])


@pytest.mark.parametrize("value, words", [(-1.5, "'cuDNN' is -1.5"), ("fast", "not a number: 'fast'")])
def test_bad_bars_are_named(value, words):
    with pytest.raises(ValueError, match=words):
        display.show_bars([("fine", 1), ("cuDNN", value)], "t")


# ---- themes ------------------------------------------------------------------------------------------------


def contrast(one, two):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_html_sets_no_text_colour_and_survives_jupyterlabs_sanitizer(shown):
    display.show_table(["a", "b"], [(1, "x" * 99)], "t")
    display.show_bars([("a", 1), ("b", math.inf)], "t")
    for source in [*(bundle["text/html"] for bundle, _ in shown), display.box_html(["a"])]:
        assert not {element.tag for element in parsed(source).iter()} & {"script", "style", "svg", "link"}
        for style in styles(source):
            assert not re.search(r"(^|;)(color|background):", style)  # text takes the theme's colour
            # Its patterns know neither variables nor currentColor, and want a digit before the point.
            assert not re.search(r"var\(|currentColor|[,\s:]\.\d", style)


def test_bars_stand_out_on_light_and_dark():
    for ground in ("#ffffff", "#111111"):
        assert contrast(display.BAR_COLOUR, ground) >= 3


# ---- plain Python and notebooks ----------------------------------------------------------------------------

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}


def test_plain_python_prints_text_and_progress_is_silent():
    code = (
        "import sys; from attnlab import display as d\n"
        "d.show_table(['a'], [(1,)]); d.show_bars([('b', 2)], 't')\n"
        "with d.Progress(2, 'timing') as p: p.step('x')\n"
        "assert not {'IPython', 'matplotlib', 'jax'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=ENVIRONMENT, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode() == f"a\n─\n1\nt (higher is better)\nb  2  {'█' * 32}\n"


def test_progress_in_a_terminal_is_one_line_and_is_cleared(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with pytest.raises(KeyError), display.Progress(3, "timing") as progress:
        progress.step("cuDNN\nT=2048")
        progress.step()
        raise KeyError  # an error passes through, and the line goes all the same
    assert sys.stderr.getvalue() == "\r\x1b[Ktiming 1/3: cuDNN T=2048\r\x1b[Ktiming 2/3\r\x1b[K"


def test_a_notebook_saves_each_thing_once_in_the_right_forms():
    nbclient = pytest.importorskip("nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [
        "from attnlab import display, exercises, plots",
        "with display.Progress(2, 'timing') as p:\n    p.step('a'); p.step('b')\nprint('done')",
        "display.show_table(['a'], [(1,)])\ndisplay.show_bars([('a', 1)], 't')",
        "plots.heatmap([[0.5, 0.5]], 'weights')",
        "plots.lines({'cudnn': [(1, 2), (2, 4)]}, 'T', 'ms', 'time')",
        "plots.four_steps([[1., 0.]], [[1., 0.]], [[2.]])",
        "exercises.predict('How much?', 5, '×')",
        "guess = exercises.predict('How much?', None)",
        "guess",
        "exercises.predict('How much?', 5, '×').score(3.1)",
        "exercises.Answer('scale', 'not tried yet', 'Replace the `...`.')",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).execute(env=ENVIRONMENT)
    outputs = [cell.outputs for cell in notebook.cells]
    progress, *printed = outputs[1]
    assert progress.data == {}  # nothing is drawn
    assert [output.text for output in printed] == ["done\n"]
    for cell, words in zip(outputs[3:6], ("Heat map: weights", "Line chart: time", "four steps"), strict=True):
        (output,) = cell
        assert set(output.data) == {"image/png", "text/plain"}
        assert words in output.data["text/plain"]
        assert output.metadata["image/png"]["alt"] == output.data["text/plain"]
    for cell, count in zip([outputs[2], *outputs[6:]], (2, 1, 1, 1, 2, 1), strict=True):
        assert [set(output.data) for output in cell] == [{"text/html", "text/plain"}] * count


# ---- pictures ----------------------------------------------------------------------------------------------


def picture(shown):
    """The words of the only picture shown."""
    ((bundle, metadata),) = shown
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert metadata["image/png"] == {"alt": bundle["text/plain"], "width": metadata["image/png"]["width"]}
    return bundle["text/plain"]


@pytest.mark.parametrize(
    "array, words",
    [
        ([[1.0, 0.0], [0.25, 0.75]], "2 rows (query position) by 2 columns (key position).\n1.00 0.00\n0.25 0.75"),
        (np.where(np.tri(40) > 0, 0.5, -np.inf), "Values from 0.5 to 0.5; 780 not finite."),
    ],
)
def test_heatmap_describes_its_values(shown, array, words):
    plots.heatmap(array, "Weights")
    assert picture(shown).endswith(words)


def test_heatmap_wants_a_matrix():
    with pytest.raises(ValueError, match="weights must be a matrix"):
        plots.heatmap(np.ones(3), "t")


def test_lines_describe_points_gaps_and_references(shown):
    series = {"cudnn": [(128, 0.004), (256, None)], "mine": [(128, 1.0)], "fa3": [(128, math.nan)]}
    plots.lines(series, "T", "ms", "Time", reference={"grows as T²": ("slope", 2), "bound": 0.002})
    assert picture(shown).split("\n") == [
        "Line chart: Time. ms against T.",
        "dot_product_attention, cuDNN: 128: 0.004",
        "mine: 128: 1.0",
        "FlashAttention-3: not measured",
        "For reference: grows as T², bound",
    ]


def test_a_slope_goes_through_the_last_measured_point():
    data = {"xla": [(1.0, 3.0), (2.0, 12.0), (4.0, math.nan)]}
    drawn = plots._guides({"T²": ("slope", 2)}, data, [1.0, 2.0, 4.0])["T²"]
    assert drawn[0] == (1.0, pytest.approx(3.0)) and drawn[-1] == (pytest.approx(4.0), pytest.approx(48.0))


def test_nothing_measured_draws_no_reference(shown):
    plots.lines({"xla": [(1, None)]}, "x", "y", "t", reference={"T²": ("slope", 2), "bound": 1})
    assert picture(shown).endswith("XLA: not measured")


@pytest.mark.parametrize("point, words", [((2, 0), "above 0"), ((2, math.inf), "'xla'.*inf"), ((math.nan, 1), "nan")])
def test_bad_points_are_named(point, words):
    with pytest.raises(ValueError, match=words):
        plots.lines({"xla": [(1, 2), point]}, "x", "y", "t")


def test_linear_axes_take_zero(shown):
    plots.lines({"xla": [(0, 0), (1, 2)]}, "x", "y", "t", loglog=False)
    picture(shown)


def test_four_steps_compute_attention(shown):
    q, k, v = np.array([[2.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [3.0]])
    plots.four_steps(q, k, v)
    weight = 1 / (1 + math.exp(-math.sqrt(2)))
    assert picture(shown).split("\n")[1:] == [
        "1. scores = Q Kᵀ", "2.00 0.00", "2. scaled = scores / √H", "1.41 0.00",
        "3. weights = softmax by row", f"{weight:.2f} {1 - weight:.2f}",
        "4. output = weights V", f"{weight + 3 * (1 - weight):.2f}",
    ]  # fmt: skip


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4), (2, 3)), ((2, 3), (4, 3), (5, 3)), ((13, 3), (4, 3), (4, 3))])
def test_four_steps_name_what_does_not_fit(shapes):
    with pytest.raises(ValueError, match=re.escape(f"q {shapes[0]}")):
        plots.four_steps(*map(np.ones, shapes))


def test_a_picture_is_the_same_every_time_and_opens_no_figure(shown):
    for _ in range(2):
        plots.heatmap([[0.5, 0.5]], "t")
    assert shown[0] == shown[1]
    import matplotlib.pyplot

    assert matplotlib.pyplot.get_fignums() == []


def test_every_variant_has_its_own_look_that_stands_out_on_white():
    assert set(plots.STYLE) == {"naive", "xla", "cudnn", "te", "flash", "hopper", "fa3"}
    for part in ("color", "marker", "label"):
        assert len({str(style[part]) for style in plots.STYLE.values()}) == 7
    assert all(contrast(style["color"], "#ffffff") >= 3 for style in plots.STYLE.values())


def test_a_series_that_is_no_variant_takes_no_variants_colour():
    names = ["naive", "cudnn", "tampered"]
    figure, _ = plots.draw_lines({name: [(1, 1.0), (2, 2.0)] for name in names}, "x", "y", "t")
    assert len({line.get_color() for line in figure.axes[0].get_lines()}) == len(names)


UNIT = re.compile(r"\{[^{}]*:[^{}]*\.\d+[fge]\}\s*(ms|µs|us|[KMGT]i?B|[MGT]FLOP)\b")
# These may not import display (arrows go one way) and word units in errors only.
LEFT = "records device features inputs attention evidence timing".split()


def test_one_source_of_number_formatting():
    """Milliseconds, bytes and rates become words in display.py, for every module that can import it."""
    assert UNIT.search('f"{x:.1f} ms"') and not UNIT.search('f"{x:.1f} times"')
    for path in pathlib.Path(display.__file__).parent.glob("*.py"):
        if path.stem not in ("display", *LEFT):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                assert not UNIT.search(line), f"{path.name}:{number} words a unit itself: {line.strip()}"
