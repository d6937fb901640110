"""What the reader sees: numbers as words, tables, bars, progress, pictures, in HTML and in plain text."""

import base64
import html.parser
import io
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from attnlab import display, plots


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a piece of HTML; fails on tags that do not nest."""

    VOID = {"br"}

    def __init__(self, source):
        super().__init__()
        self.tags, self.words, self._open = [], [], []
        self.feed(source)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def styles(self):
        return [attrs["style"] for _, attrs in self.tags if "style" in attrs]

    def widths(self):
        """Bar widths in percent, None for a hollow bar, in the order of the rows that have one."""
        bars = [attrs["style"] for _, attrs in self.tags if attrs.get("role") == "presentation"]
        return [None if "dashed" in s else float(re.search(r"width:([\d.]+)%", s)[1]) for s in bars]


@pytest.fixture
def shown(monkeypatch):
    """Every bundle (and its metadata) that is displayed."""
    seen = []
    monkeypatch.setattr(display, "show", lambda bundle, metadata=None: seen.append((bundle, metadata)))
    return seen


# ---- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "–"), (math.nan, "–"), (0, "0"), (0.0, "0"), (3.14159, "3.14"), (4.0, "4.0"), (0.83, "0.83"),
        (0.004, "0.004"), (0.00394, "0.00394"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1,234"),
        (1.2e-7, "1.20e-07"), (-0.5, "-0.5"), (math.inf, "∞"), (-math.inf, "−∞"), (8388608, "8,388,608"),
        (np.float32(0.25), "0.25"), (np.int64(7), "7"), (np.array(2.5), "2.5"),
    ],
)  # fmt: skip
def test_numbers(value, text):
    assert display.format_number(value) == text


@pytest.mark.parametrize("value", ["4", True, [1.0], 1j, np.ones(2)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="not a number"):
        display.format_number(value)


@pytest.mark.parametrize(
    "ms, text",
    [
        (0.004, "4.0 µs"), (0.00394, "3.94 µs"), (0.0999, "99.9 µs"), (0.09999, "0.1 ms"), (0.83, "0.83 ms"),
        (999.9, "1.0 s"), (1200.0, "1.2 s"), (0.00005, "50.0 ns"), (0, "0 ms"), (None, "–"), (math.nan, "–"),
        (-0.004, "-4.0 µs"), (math.inf, "∞ ms"), (12.34, "12.3 ms"),
    ],
)  # fmt: skip
def test_milliseconds(ms, text):
    assert display.format_ms(ms) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"), (512, "512 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12 * 2**30, "12.0 GiB"),
        (2**20 - 1, "1.0 MiB"), (None, "–"), (143771 * 2**20, "140 GiB"),
    ],
)  # fmt: skip
def test_bytes(count, text):
    assert display.format_bytes(count) == text


def test_other_units():
    assert display.format_si(1.37e11, "FLOP") == "137 GFLOP"
    assert display.format_si(4.8e12, "B/s") == "4.8 TB/s"
    assert display.format_si(None, "FLOP/s") == "–"
    assert display.format_count(8388608.0) == "8,388,608"
    assert display.format_value(3.1, "×") == "3.1×"
    assert display.format_value(0.004, "ms") == "0.004 ms"
    assert display.format_value(None, "ms") == "–"


# ---- tables ------------------------------------------------------------------------------------------------


def test_table_html_is_escaped_and_semantic():
    evil = "<script>alert('&')</script>"
    bundle = display.table_bundle([evil, "b"], [(evil, 1)], title=evil)
    page = Page(bundle["text/html"])
    assert "<script" not in bundle["text/html"]
    assert "".join(page.words).count(evil) == 3
    assert [tag for tag, _ in page.tags][:3] == ["div", "table", "caption"]
    assert all(attrs["scope"] == "col" for tag, attrs in page.tags if tag == "th")
    assert "overflow-x:auto" in page.tags[0][1]["style"]


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
    page = Page(display.table_bundle(["a", "b"], [("4.0 µs", "8.9 or newer"), ("0.83 ms", "9")])["text/html"])
    aligns = [re.search("text-align:(\\w+)", attrs["style"])[1] for tag, attrs in page.tags if tag == "th"]
    assert aligns == ["right", "left"]


def test_wide_characters_and_long_cells_keep_the_columns():
    lines = display.table_bundle(["a", "b"], [("注意", "x"), ("é", "w " * 80)])["text/plain"].split("\n")
    assert lines[2] == "注意  x"
    assert lines[3].startswith("é     w w")
    assert max(map(len, lines)) <= 6 + display.WRAP


def test_terminal_colours_and_control_characters_are_dropped_and_line_breaks_kept():
    bundle = display.table_bundle(["a"], [("\x1b[31mred\x1b[0m\x07\nnext",)])
    assert bundle["text/plain"] == "a\n────\nred\nnext"
    assert "red<br>next" in bundle["text/html"]


def test_only_words_that_are_too_long_are_broken():
    page = Page(display.table_bundle(["a"], [("short",), ("some words " * 9,), ("x" * 99,)])["text/html"])
    cells = [attrs["style"] for tag, attrs in page.tags if tag == "td"]
    assert ["nowrap" in cell for cell in cells] == [True, False, False]
    assert ["break-all" in cell for cell in cells] == [False, False, True]


def test_empty_table_says_so():
    bundle = display.table_bundle(["a", "b"], [])
    assert bundle["text/plain"].endswith("no rows")
    assert "no rows" in Page(bundle["text/html"]).words


@pytest.mark.parametrize(
    "headers, rows, aligns, words",
    [
        (["a", "b"], [(1, 2), (1, 2, 3)], None, r"row 2 has 3 cells.*2 headers"),
        (["a", "b"], [(1,)], None, r"row 1 has 1 cells.*2 headers"),
        (["a"], ["x"], None, "row 1 is 'x'"),
        (["a"], [3], None, "row 1 is 3"),
        ([], [], None, "at least one header"),
        (["a", "b"], [], ["left"], "1 entries and the table 2 columns"),
        (["a"], [], ["middle"], "'middle'.*left, right, center"),
    ],
)
def test_bad_tables_are_named(headers, rows, aligns, words):
    with pytest.raises(ValueError, match=words):
        display.show_table(headers, rows, aligns=aligns)


# ---- bars --------------------------------------------------------------------------------------------------


def test_bars_are_proportional_and_carry_their_values():
    bundle = display.bars_bundle([("naive", 0.016), ("cuDNN", 0.004), ("tiny", 1e-6)], "Time", "ms", True)
    page = Page(bundle["text/html"])
    assert page.widths() == [100.0, 25.0, pytest.approx(0.00625, abs=1e-3)]  # nothing is lengthened
    for words in ("0.016 ms", "0.004 ms", "1.00e-06 ms", "Time (lower is better)"):
        assert words in page.words
    first, naive, cudnn, tiny = bundle["text/plain"].split("\n")
    assert first == "Time (lower is better)"
    assert (naive.count("█"), cudnn.count("█"), tiny.count("█")) == (32, 8, 0)
    assert "0.004 ms" in cudnn and tiny.endswith("▏")


def test_zero_nan_and_infinite_bars():
    rows = [("one", 1), ("zero", 0.0), ("nan", math.nan), ("none", None), ("inf", math.inf)]
    bundle = display.bars_bundle(rows, "Rate", "TFLOP/s")
    page = Page(bundle["text/html"])
    assert page.widths() == [100.0, None]  # no bar for zero, NaN and None; a hollow one for infinity
    assert page.words.count("not measured") == 2
    lines = {line.split()[0]: line for line in bundle["text/plain"].split("\n")}
    assert lines["one"].endswith("█" * 32)
    assert lines["zero"].endswith("0 TFLOP/s")
    assert lines["nan"].endswith("not measured")
    assert "infinite" in lines["inf"] and lines["inf"].endswith("▶")


@pytest.mark.parametrize("values", [[0, 0.0], [None, math.nan], [math.inf]])
def test_bars_without_a_finite_length(values):
    bundle = display.bars_bundle([(str(v), v) for v in values], "t")
    assert all(width is None for width in Page(bundle["text/html"]).widths())


def test_no_bars_say_so():
    bundle = display.bars_bundle([], "t")
    assert "nothing to show" in bundle["text/plain"] and "nothing to show" in bundle["text/html"]


def test_bar_labels_are_escaped():
    bundle = display.bars_bundle([("<b>", 1)], "<i>", "<u>")
    assert not re.search("<(b|i|u)>", bundle["text/html"])


@pytest.mark.parametrize(
    "row, words",
    [(("cuDNN", -1.5), "'cuDNN'.*-1.5"), (("x", "fast"), "'x'.*'fast'"), (("x",), "pair"), ("ab", "pair")],
)
def test_bad_bars_are_named(row, words):
    with pytest.raises(ValueError, match=words):
        display.show_bars([("fine", 1), row], "t")


# ---- themes ------------------------------------------------------------------------------------------------


def contrast(one, two):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_html_sets_no_text_colour_and_survives_jupyterlabs_sanitizer():
    sources = [
        display.table_bundle(["a", "b"], [(1, "x" * 99)], "t")["text/html"],
        display.bars_bundle([("a", 1), ("b", math.inf)], "t")["text/html"],
        display.box_html(["a"]),
    ]
    for source in sources:
        page = Page(source)
        assert not {tag for tag, _ in page.tags} & {"script", "style", "svg", "link"}
        for style in page.styles():
            assert not re.search(r"(^|;)(color|background):", style)  # text takes the theme's colour
            # Its patterns know neither variables nor currentColor, and want a digit before the point.
            assert not re.search(r"var\(|currentColor|[,\s:]\.\d", style)


def test_bars_stand_out_on_light_and_dark():
    for ground in ("#ffffff", "#111111"):
        assert contrast(display.BAR_COLOUR, ground) >= 3


# ---- plain Python and notebooks ----------------------------------------------------------------------------


def test_plain_python_prints_text_and_progress_is_silent():
    code = (
        "import sys; from attnlab import display as d\n"
        "d.show_table(['a'], [(1,)]); d.show_bars([('b', 2)], 't')\n"
        "with d.Progress(2, 'timing') as p: p.step('x')\n"
        "assert not {'IPython', 'matplotlib', 'jax'} & set(sys.modules)"
    )
    run = _python(code, "utf-8")
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode() == f"a\n─\n1\nt (higher is better)\nb  2  {'█' * 32}\n"


def test_a_terminal_that_knows_ascii_only_gets_question_marks_not_an_error():
    run = _python("from attnlab import display as d; d.show_table(['µs'], [(1,)])", "ascii")
    assert (run.returncode, run.stdout) == (0, b"?s\n??\n 1\n")


def _python(code, encoding):
    environment = _environment(PYTHONIOENCODING=encoding)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)


def _environment(**more):
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, "PYTHONPATH": path, **more}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal_is_one_line_and_is_cleared(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), display.Progress(3, "timing") as progress:
        progress.step("cuDNN\nT=2048")
        progress.step()
        raise KeyError  # an error passes through, and the line goes all the same
    written = sys.stderr.getvalue()
    assert written == "\r\x1b[Ktiming 1/3: cuDNN T=2048\r\x1b[Ktiming 2/3\r\x1b[K"


@pytest.mark.parametrize("total", [-1, 2.5, "3", True])
def test_progress_wants_a_number_of_steps(total):
    with pytest.raises(ValueError, match="total"):
        display.Progress(total)


@pytest.fixture(scope="module")
def outputs():
    """The outputs of a notebook's cells, as saved."""
    nbclient = pytest.importorskip("nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    cells = [
        "from attnlab import display, exercises, plots",
        "with display.Progress(2, 'timing') as p:\n    p.step('a'); p.step('b')\nprint('done')",
        "display.show_table(['a'], [(1,)])\ndisplay.show_bars([('a', 1)], 't')",
        "plots.heatmap([[0.5, 0.5]], 'weights')",
        "plots.lines({'cudnn': [(1, 2), (2, 4)]}, 'T', 'ms', 'time')",
        "plots.four_steps([[1., 0.]], [[1., 0.]], [[2.]])\n"
        "import matplotlib.pyplot; assert matplotlib.pyplot.get_fignums() == []",
        "exercises.predict('How much?', 5, '×')",
        "guess = exercises.predict('How much?', None)",
        "guess",
        "exercises.predict('How much?', 5, '×').score(3.1)",
        "exercises.Answer('scale', 'not tried yet', 'Replace the `...`.')",
    ]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _environment()["PYTHONPATH"]
    try:
        nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return [cell.outputs for cell in notebook.cells]


def test_progress_leaves_nothing_in_a_notebook(outputs):
    left = [output for output in outputs[1] if output.output_type != "stream"]
    assert [dict(output.data) for output in left] == [{}]  # no data: nothing is drawn
    assert [output.text for output in outputs[1] if output.output_type == "stream"] == ["done\n"]


def test_tables_and_bars_are_saved_as_html_and_text(outputs):
    assert [set(output.data) for output in outputs[2]] == [{"text/html", "text/plain"}] * 2


def test_each_plot_is_saved_as_exactly_one_described_picture(outputs):
    for cell, words in zip(outputs[3:6], ("Heat map: weights", "Line chart: time", "four steps"), strict=True):
        (output,) = cell
        assert set(output.data) == {"image/png", "text/plain"}
        assert words in output.data["text/plain"]
        assert output.metadata["image/png"]["alt"] == output.data["text/plain"]


def test_predictions_and_answers_are_shown_once(outputs):
    for cell, count in zip(outputs[6:], (1, 1, 1, 2, 1), strict=True):
        assert [set(output.data) for output in cell] == [{"text/html", "text/plain"}] * count


# ---- pictures ----------------------------------------------------------------------------------------------


def picture(shown):
    ((bundle, metadata),) = shown
    data = base64.b64decode(bundle["image/png"])
    assert data.startswith(b"\x89PNG")
    assert metadata["image/png"]["width"] > 100
    return data, bundle["text/plain"]


def test_heatmap_describes_its_values(shown):
    plots.heatmap(np.array([[1.0, 0.0], [0.25, 0.75]]), "Causal weights")
    _, words = picture(shown)
    assert words.endswith("1.00 0.00\n0.25 0.75") and "2 rows" in words


def test_heatmap_takes_masked_scores_and_large_matrices(shown):
    plots.heatmap(np.where(np.tri(40) > 0, 0.5, -np.inf), "Masked")
    _, words = picture(shown)
    assert "Values from 0.5 to 0.5; 780 not finite." in words


@pytest.mark.parametrize("bad", [np.ones(3), np.ones((0, 2)), np.ones((1, 2, 3)), "x"])
def test_heatmap_wants_a_matrix(bad):
    with pytest.raises(ValueError, match="weights must be a matrix"):
        plots.heatmap(bad, "t")


def test_lines_describe_points_gaps_and_references(shown):
    series = {"cudnn": [(128, 0.004), (256, None)], "mine": [(128, 1.0)], "fa3": [(128, math.nan)]}
    plots.lines(series, "T", "ms", "Time", reference={"grows as T²": ("slope", 2), "bound": 0.002})
    _, words = picture(shown)
    assert words.split("\n") == [
        "Line chart: Time. ms against T.",
        "dot_product_attention, cuDNN: 128: 0.004",
        "mine: 128: 1.0",
        "FlashAttention-3: not measured",
        "For reference: grows as T², bound",
    ]


def test_a_slope_goes_through_the_last_measured_point():
    data = {"xla": [(1.0, 3.0), (2.0, 12.0), (4.0, math.nan)]}
    drawn = plots._references({"T²": ("slope", 2)}, data, True)["T²"]
    assert drawn[0] == (1.0, pytest.approx(3.0)) and drawn[-1] == (pytest.approx(4.0), pytest.approx(48.0))


@pytest.mark.parametrize(
    "series, options, words",
    [
        ({}, {}, "empty"),
        ({"xla": [(1, 2), (2, 0)]}, {}, "'xla'.*logarithmic"),
        ({"xla": [(1, math.inf)]}, {}, "finite"),
        ({"xla": [5]}, {}, "pair"),
        ({"xla": [(1, None)]}, {"reference": {"T²": ("slope", 2)}}, "'T²'"),
        ({"xla": [(1, 2)]}, {"reference": {"T²": "steep"}}, "'steep'"),
    ],
)
def test_bad_lines_are_named(series, options, words):
    with pytest.raises(ValueError, match=words):
        plots.lines(series, "x", "y", "t", **options)


def test_linear_axes_take_zero(shown):
    plots.lines({"xla": [(0, 0), (1, 2)]}, "x", "y", "t", loglog=False)
    picture(shown)


def test_four_steps_compute_attention(shown):
    q, k, v = np.array([[2.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [3.0]])
    plots.four_steps(q, k, v)
    _, words = picture(shown)
    weight = 1 / (1 + math.exp(-math.sqrt(2)))
    assert words.split("\n")[1:] == [
        "1. scores = Q Kᵀ", "2.00 0.00", "2. scaled = scores / √H", "1.41 0.00",
        "3. weights = softmax by row", f"{weight:.2f} {1 - weight:.2f}",
        "4. output = weights V", f"{weight + 3 * (1 - weight):.2f}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((2, 3), (2, 4), (2, 3)), "head dim"),
        (((2, 3), (4, 3), (5, 3)), "key length"),
        (((13, 3), (4, 3), (4, 3)), "12"),
    ],
)
def test_four_steps_name_what_does_not_fit(shapes, words):
    with pytest.raises(ValueError, match=words):
        plots.four_steps(*(np.ones(shape) for shape in shapes))


def test_a_picture_is_the_same_every_time_and_opens_no_figure(shown):
    for _ in range(2):
        plots.heatmap([[0.5, 0.5]], "t")
    assert shown[0] == shown[1]
    import matplotlib.pyplot

    assert matplotlib.pyplot.get_fignums() == []


def test_every_variant_has_its_own_look_that_stands_out_on_white():
    assert set(plots.STYLE) == {"naive", "xla", "cudnn", "te", "pallas", "fa3"}
    for part in ("color", "marker", "label"):
        assert len({str(style[part]) for style in plots.STYLE.values()}) == 6
    assert all(contrast(style["color"], "#ffffff") >= 3 for style in plots.STYLE.values())


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
