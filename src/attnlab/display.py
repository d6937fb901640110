"""What the reader sees as text: tables, bars, a line of progress; the one place where numbers become words.

Everything is drawn twice, as HTML and as plain text, so that JupyterLab, nbconvert and a terminal show the
same. The HTML needs no script and no stylesheet. Text inherits the theme's colour, and lines and bars use
mid-tones that stand out on white and on near-black. Inline styles keep to what JupyterLab's sanitizer lets
through (no CSS variables, no currentColor), because the outputs of a notebook that was just cloned are not
trusted and pass through it.
"""

import html
import math
import numbers
import re
import sys
import textwrap
import unicodedata

NOTHING = "–"  # stands for "no value" everywhere
BAR_COLOUR = "#0072b2"  # 5.2:1 on white, 3.6:1 on JupyterLab's dark #111111
LINE = "rgba(128,128,128,0.5)"
TEXT_BAR = 32  # columns of a full bar in plain text
WRAP = 72  # longest line of one cell in plain text

_ALIGNS = ("left", "right", "center")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NUMERIC = re.compile(r"[-−+~≈<>]?\s?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\s?(×|%|[a-zA-Zµ][\w/µ²³]{0,7})?")


# ---- numbers into text -------------------------------------------------------------------------------------


def format_number(value, digits: int = 3) -> str:
    """`value` with `digits` significant digits: 3.94, 0.83, 0.0041, 1,234, 1.20e-07.

    Integers keep every digit. None and NaN give "–". Raises ValueError for what is not a number.
    """
    value = _number(value)
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    power = int(f"{value:.{digits - 1}e}".split("e")[1])  # of the rounded value: 9.996 is 10.0
    if not -4 <= power < 9:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - 1 - power)
    text = f"{value:,.{decimals}f}"
    if decimals > 1:  # 4.00 says no more than 4.0; 0.830 no more than 0.83
        whole, fraction = text.split(".")
        text = f"{whole}.{fraction.rstrip('0') or '0'}"
    return text


def format_value(value, unit: str = "", digits: int = 3) -> str:
    """`value` in the unit given, never rescaled, so that rows can be compared: "0.004 ms", "3.1×"."""
    text = format_number(value, digits)
    if text == NOTHING or not unit:
        return text
    return text + unit if unit in ("×", "x", "%") else f"{text} {unit}"


def format_ms(ms) -> str:
    """Milliseconds in the unit that reads best: "4.0 µs", "0.83 ms", "1.2 s"."""
    return _scaled(ms, (("ns", 1e-6), ("µs", 1e-3), ("ms", 1.0), ("s", 1e3)), least=0.1, zero="ms")


def format_bytes(count) -> str:
    """Bytes in powers of 1024: "512 B", "12.0 GiB"."""
    value = _number(count)
    if isinstance(value, int) and abs(value) < 1024:
        return f"{value} B"
    units = tuple((name, 1024.0**i) for i, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB")))
    return _scaled(value, units, zero="B")


def format_count(count) -> str:
    """A count with every digit: "8,388,608"."""
    value = _number(count)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return format_number(value)


def format_si(value, unit: str) -> str:
    """`value` in powers of 1000: "137 GFLOP" for (1.37e11, "FLOP"), "4.8 TB/s" for (4.8e12, "B/s")."""
    return _scaled(value, tuple((p + unit, 1000.0**i) for i, p in enumerate(("", "k", "M", "G", "T", "P"))), zero=unit)


def _scaled(value, units, zero: str, least: float = 1.0) -> str:
    """`value` in the largest of `units` (name, size) in which it is at least `least`."""
    value = _number(value)
    if value is None:
        return NOTHING
    if value == 0 or math.isinf(value):
        return f"{format_number(value)} {zero}"
    name, size = units[0]
    for candidate, at in units[1:]:
        # 0.9995: what rounds up to the next unit is written in it (1024 KiB is 1.0 MiB)
        if abs(value) >= least * at * 0.9995:
            name, size = candidate, at
    return f"{format_number(value / size)} {name}"


def _number(value):
    """`value` as int or float, None for None and NaN. Scalar arrays count; booleans and text do not."""
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"not a number: {value!r} ({type(value).__name__}); give an int, a float or None")
    if isinstance(value, numbers.Integral):
        return int(value)
    value = float(value)
    return None if math.isnan(value) else value


def cell_text(value) -> str:
    """One table cell as text. Integers carry no separators: most are sizes, and code writes T = 2048."""
    if value is None:
        return NOTHING
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return format_number(value)
    # Control characters (a library's colour codes, say) have no place in a page or an aligned column.
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(value)).expandtabs(4)
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")


# ---- showing -----------------------------------------------------------------------------------------------


def block_tree(tree):
    """Wait until every array of a PyTree is ready on its device, and return the PyTree."""
    import jax

    return jax.block_until_ready(tree)


def shell():
    """The running IPython shell, or None in plain Python. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def in_kernel() -> bool:
    """Whether a notebook front end listens (a terminal running IPython does not count)."""
    return getattr(shell(), "kernel", None) is not None


def show(bundle: dict, metadata: dict | None = None) -> None:
    """Display a mimebundle once; in plain Python print its text/plain form."""
    if shell() is None:
        _print(bundle["text/plain"])
        return
    from IPython.display import display

    display(bundle, raw=True, metadata=metadata or {})


def _print(text: str, stream=None) -> None:
    """Print, also on a terminal that cannot show "µ" or a bar: "?" there beats an error."""
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=stream)


def show_table(headers, rows, title=None, aligns=None) -> None:
    """Show rows as a table.

    Args:
      headers: the column names.
      rows: sequences of str, number, bool (yes/no) or None ("–"), one cell a header;
        of other objects str() is shown.
      title: the caption.
      aligns: "left", "right" or "center" per column; without it, columns of numbers go right.

    Raises:
      ValueError: a row with more or fewer cells than headers (rows count from 1), or an unknown alignment.
    """
    show(table_bundle(headers, rows, title, aligns))


def table_bundle(headers, rows, title=None, aligns=None) -> dict:
    """The mimebundle of `show_table`."""
    headers, rows = _texts(headers), list(rows)
    if not headers:
        raise ValueError("a table needs at least one header, and headers is empty")
    cells = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, (str, dict)) or not hasattr(row, "__iter__"):
            raise ValueError(f"row {number} is {row!r}: give a list or tuple of {len(headers)} cells")
        cells.append(_texts(row))
        if len(cells[-1]) != len(headers):
            raise ValueError(
                f"row {number} has {len(cells[-1])} cells, and the table has {len(headers)} headers {headers}: {row!r}"
            )
    aligns = _checked_aligns(aligns, headers, cells)
    return {
        "text/html": _table_html(headers, cells, title, aligns),
        "text/plain": _table_text(headers, cells, title, aligns),
    }


def _texts(values) -> list:
    return [cell_text(value) for value in values]


def _checked_aligns(aligns, headers, cells) -> list:
    if aligns is None:
        columns = zip(*cells, strict=True) if cells else [()] * len(headers)
        return ["right" if _is_numeric(column) else "left" for column in columns]
    aligns = [aligns] * len(headers) if isinstance(aligns, str) else list(aligns)
    if len(aligns) != len(headers):
        raise ValueError(f"aligns has {len(aligns)} entries and the table {len(headers)} columns: {aligns}")
    for align in aligns:
        if align not in _ALIGNS:
            raise ValueError(f"unknown alignment {align!r}: choose from {', '.join(_ALIGNS)}")
    return aligns


def _is_numeric(column) -> bool:
    values = [cell for cell in column if cell not in (NOTHING, "∞", "−∞")]
    return bool(values) and all(_NUMERIC.fullmatch(cell) for cell in values)


def to_html(text: str) -> str:
    """`text` escaped, with its line breaks kept."""
    return html.escape(text).replace("\n", "<br>")


# JupyterLab's stylesheet fixes column widths and aligns cells right; inline styles undo that.
_TABLE = "border-collapse:collapse;table-layout:auto;margin:0;font-size:13px"
_CELL = f"padding:4px 10px;border:none;border-bottom:1px solid {LINE};vertical-align:top"
_HEAD = f"padding:4px 10px;border:none;border-bottom:2px solid {LINE};font-weight:bold;vertical-align:bottom"
_CAPTION = "caption-side:top;text-align:left;padding:0 10px 6px 10px;font-size:14px;font-weight:bold"


def _scroll(table: str) -> str:
    """A wide table scrolls in its own box and leaves the page alone."""
    return f'<div style="overflow-x:auto;max-width:100%;margin:8px 0">{table}</div>'


def _table_html(headers, cells, title, aligns) -> str:
    caption = f'<caption style="{_CAPTION}">{to_html(cell_text(title))}</caption>' if title else ""
    head = "".join(
        f'<th scope="col" style="{_HEAD};text-align:{align}">{to_html(name)}</th>'
        for name, align in zip(headers, aligns, strict=True)
    )
    body = (
        "".join(
            "<tr>"
            + "".join(
                f'<td style="{_CELL};text-align:{align}{_keep_together(cell)}">{to_html(cell)}</td>'
                for cell, align in zip(row, aligns, strict=True)
            )
            + "</tr>"
            for row in cells
        )
        or f'<tr><td colspan="{len(headers)}" style="{_CELL};text-align:left"><i>no rows</i></td></tr>'
    )
    return _scroll(f'<table style="{_TABLE}">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _keep_together(cell: str) -> str:
    """Short cells stay on one line. Sentences wrap, and so does a word that would push all else aside."""
    if len(cell) <= 32:
        return ";white-space:nowrap"
    broken = ";word-break:break-all" if max(map(len, cell.split()), default=0) > WRAP else ""
    return ";min-width:180px" + broken


def _table_text(headers, cells, title, aligns) -> str:
    wrapped = [[_wrap(cell) for cell in row] for row in [headers, *cells]]
    widths = [max(_width(line) for row in wrapped for line in row[i]) for i in range(len(headers))]
    lines = []
    for n, row in enumerate(wrapped):
        for i in range(max(len(cell) for cell in row)):
            parts = (
                _pad(cell[i] if i < len(cell) else "", width, align)
                for cell, width, align in zip(row, widths, aligns, strict=True)
            )
            lines.append("  ".join(parts).rstrip())
        if n == 0:
            lines.append("  ".join("─" * width for width in widths))
    if not cells:
        lines.append("no rows")
    return "\n".join([cell_text(title), *lines] if title else lines)


def _wrap(cell: str) -> list:
    return [part for line in cell.split("\n") for part in textwrap.wrap(line, WRAP) or [""]]


def _width(text: str) -> int:
    """Terminal columns of `text`: wide characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, align: str) -> str:
    gap = width - _width(text)
    left = {"left": 0, "right": gap, "center": gap // 2}[align]
    return " " * left + text + " " * (gap - left)


# ---- bars --------------------------------------------------------------------------------------------------


def show_bars(rows, title, unit="", lower_is_better=False) -> None:
    """Show (label, value) pairs as horizontal bars whose lengths are proportional to the values.

    Every bar carries its value as text. None and NaN say "not measured" and have no bar; infinity fills the
    row and says so; a value too small to see is a hairline.

    Raises:
      ValueError: a negative value, a value that is not a number, or a row that is not a pair.
    """
    show(bars_bundle(rows, title, unit, lower_is_better))


def bars_bundle(rows, title, unit="", lower_is_better=False) -> dict:
    """The mimebundle of `show_bars`."""
    pairs = []
    for number, row in enumerate(rows, 1):
        if isinstance(row, str) or not hasattr(row, "__len__") or len(row) != 2:
            raise ValueError(f"bar {number} is {row!r}: give a pair (label, value)")
        label = cell_text(row[0])
        try:
            value = _number(row[1])
        except ValueError as error:
            raise ValueError(f"bar {number} ({label!r}): {error}") from None
        if value is not None and value < 0:
            raise ValueError(f"bar {number} ({label!r}) is {row[1]}: a bar shows a size, which is never negative")
        pairs.append((label, value))
    finite = [value for _, value in pairs if value is not None and math.isfinite(value)]
    longest = max(finite, default=0)
    bars = [(label, _bar_words(value, unit), _share(value, longest)) for label, value in pairs]
    better = f"{'lower' if lower_is_better else 'higher'} is better"
    title = f"{cell_text(title)} ({better})" if title else better
    return {"text/html": _bars_html(bars, title), "text/plain": _bars_text(bars, title)}


def _bar_words(value, unit: str) -> str:
    if value is None:
        return "not measured"
    text = format_value(value, unit)
    return f"{text} (infinite)" if math.isinf(value) else text


def _share(value, longest) -> float | None:
    """The part of a full row that a bar takes, None for infinity."""
    if value is None or value == 0:
        return 0.0
    return None if math.isinf(value) else value / longest


def _bars_html(bars, title: str) -> str:
    body = []
    for label, words, share in bars:
        if share is None:  # a hollow bar: it has no end
            bar = f"width:100%;box-sizing:border-box;border:2px dashed {BAR_COLOUR}"
        elif share:
            bar = f"width:{100 * share:.3f}%;min-width:1px;background-color:{BAR_COLOUR}"
        else:
            bar = ""
        drawn = f'<div role="presentation" style="height:16px;{bar}"></div>' if bar else ""
        body.append(
            f'<tr><th scope="row" style="{_CELL};text-align:left;font-weight:normal">{to_html(label)}</th>'
            f'<td style="{_CELL};text-align:right;white-space:nowrap">{to_html(words)}</td>'
            f'<td style="{_CELL};padding:4px 0;border-left:1px solid {LINE};width:60%">{drawn}</td></tr>'
        )
    if not bars:
        body = [f'<tr><td colspan="3" style="{_CELL};text-align:left"><i>nothing to show</i></td></tr>']
    return _scroll(
        f'<table style="{_TABLE};width:100%;max-width:760px">'
        f'<caption style="{_CAPTION}">{to_html(title)}</caption>'
        f"<tbody>{''.join(body)}</tbody></table>"
    )


def _bars_text(bars, title: str) -> str:
    if not bars:
        return f"{title}\nnothing to show"
    labels = [" ".join(label.split("\n")) for label, _, _ in bars]
    label_width = max(map(_width, labels))
    words_width = max(_width(words) for _, words, _ in bars)
    return "\n".join(
        [
            title,
            *(
                "  ".join(
                    [_pad(label, label_width, "left"), _pad(words, words_width, "right"), _text_bar(share)]
                ).rstrip()
                for label, (_, words, share) in zip(labels, bars, strict=True)
            ),
        ]
    )


def _text_bar(share) -> str:
    if share is None:
        return "█" * TEXT_BAR + "▶"
    eighths = round(share * TEXT_BAR * 8) or (1 if share else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


# ---- boxes and progress ------------------------------------------------------------------------------------


def box_html(parts, colour: str = "#808080") -> str:
    """A box with a coloured edge around HTML parts, already escaped. Words carry the sense."""
    inside = "".join(f'<div style="margin:2px 0">{part}</div>' for part in parts if part)
    return (
        f'<div style="border:1px solid {LINE};border-left:5px solid {colour};padding:6px 12px;margin:8px 0;'
        f'max-width:860px;font-size:13px">{inside}</div>'
    )


class Progress:
    """One line that says what is being done, and is gone at the end.

        with Progress(12, "timing") as progress:
            progress.step("cuDNN T=2048")   # timing 1/12: cuDNN T=2048

    In a notebook the line is one output, updated in place. It is created and left without any data: front
    ends draw nothing for it, and nbval, which ignores updates, sees the same in every run. In a terminal the
    line is written to stderr; where stderr is no terminal nothing is written.
    """

    def __init__(self, total: int, what: str = ""):
        if isinstance(total, bool) or not isinstance(total, int) or total < 0:
            raise ValueError(f"total must be a whole number of steps, 0 or more; given {total!r}")
        self.total, self.what, self.done = total, what, 0
        self._line = ""
        self._handle = None
        self._terminal = False

    def __enter__(self):
        if in_kernel():
            from IPython.display import display

            self._handle = display({}, raw=True, display_id=True)
        else:
            self._terminal = sys.stderr is not None and sys.stderr.isatty()
        return self

    def step(self, label: str = "") -> None:
        """Say that the next step begins."""
        self.done += 1
        count = f"{self.done}/{max(self.total, self.done)}"
        head = f"{self.what} {count}".strip()
        self._write(" ".join(f"{head}: {cell_text(label)}".split()) if label else head)

    def __exit__(self, *exception):
        if self._line:
            self._write("")
        return False

    def _write(self, line: str) -> None:
        self._line = line
        if self._handle is not None:
            data = (
                {"text/html": f'<div style="font-size:13px">{to_html(line)}</div>', "text/plain": line} if line else {}
            )
            self._handle.update(data, raw=True)
        elif self._terminal:
            sys.stderr.write("\r\x1b[K" + line[:100])
            sys.stderr.flush()
