"""What the reader sees as text: tables, bars, a line of progress; the one place where numbers become words.

Everything is drawn twice, as HTML and as plain text, so that JupyterLab, nbconvert and a terminal show the
same. The HTML needs no script and no stylesheet. Text inherits the theme's colour, and lines and bars use
mid-tones that stand out on white and on near-black. Inline styles keep to what JupyterLab's sanitizer lets
through (no CSS variables, no currentColor), because the outputs of a notebook that was just cloned are not
trusted and pass through it.
"""

import html
import itertools
import math
import re
import sys
import textwrap

NOTHING = "–"  # stands for "no value" everywhere
BAR_COLOUR = "#0072b2"  # 5.2:1 on white, 3.6:1 on JupyterLab's dark #111111
LINE = "rgba(128,128,128,0.5)"
TEXT_BAR = 32  # columns of a full bar in plain text
WRAP = 72  # longest line of one cell in plain text

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PAD = {"left": str.ljust, "right": str.rjust, "center": str.center}
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
    """Milliseconds in the unit that reads best: "4.0 µs", "830 µs", "1.2 s"."""
    return _scaled(ms, (("ns", 1e-6), ("µs", 1e-3), ("ms", 1.0), ("s", 1e3)), zero="ms")


def format_bytes(count) -> str:
    """Bytes in powers of 1024: "512 B", "12.0 GiB"."""
    if isinstance(count, int) and abs(count) < 1024:
        return f"{count} B"
    units = tuple((name, 1024.0**i) for i, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB")))
    return _scaled(count, units, zero="B")


def format_count(count) -> str:
    """A count with every digit: "8,388,608"."""
    return NOTHING if count is None else f"{count:,.0f}"


def _scaled(value, units, zero: str) -> str:
    """`value` in the largest of `units` (name, size) in which it is at least 1."""
    value = _number(value)
    if value is None:
        return NOTHING
    if value == 0 or math.isinf(value):
        return f"{format_number(value)} {zero}"
    name, size = units[0]
    for candidate, at in units[1:]:
        # 0.9995: what rounds up to the next unit is written in it (1024 KiB is 1.0 MiB)
        if abs(value) >= at * 0.9995:
            name, size = candidate, at
    return f"{format_number(value / size)} {name}"


def plain(value):
    """An array of no dimensions as the Python value in it; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _number(value):
    """`value` as int or float, None for None and NaN."""
    value = plain(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(f"not a number: {value!r} ({type(value).__name__}); give an int, a float or None")
    return None if value != value else value  # only NaN differs from itself


def cell_text(value) -> str:
    """One table cell as text. Integers carry no separators: most are sizes, and code writes T = 2048."""
    value = plain(value)
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_number(value) if isinstance(value, float) else str(value)


# ---- showing -----------------------------------------------------------------------------------------------


def block_tree(tree):
    """Wait until every array of a PyTree is ready on its device, and return the PyTree."""
    import jax

    return jax.block_until_ready(tree)


def shell():
    """The running IPython shell, or None in plain Python. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def show(bundle: dict, metadata: dict | None = None) -> None:
    """Display a mimebundle once; in plain Python print its text/plain form."""
    if shell() is None:
        print(bundle["text/plain"])
        return
    from IPython.display import display

    display(bundle, raw=True, metadata=metadata or {})


def to_html(text: str) -> str:
    """`text` escaped, with its line breaks kept."""
    return html.escape(text).replace("\n", "<br>")


# JupyterLab's stylesheet fixes column widths and aligns cells right; inline styles undo that.
_TABLE = "border-collapse:collapse;table-layout:auto;margin:0;font-size:13px"
_CELL = f"padding:4px 10px;border:none;border-bottom:1px solid {LINE};vertical-align:top"
_HEAD = f"padding:4px 10px;border:none;border-bottom:2px solid {LINE};font-weight:bold;vertical-align:bottom"
_CAPTION = "caption-side:top;text-align:left;white-space:nowrap;padding:0 10px 6px 10px;font-size:14px;font-weight:bold"


def _html_table(title, head: str, body: str, style: str = "") -> str:
    """A wide table scrolls in its own box and leaves the page alone."""
    caption = f'<caption style="{_CAPTION}">{to_html(title)}</caption>' if title else ""
    return (
        '<div style="overflow-x:auto;max-width:100%;margin:8px 0">'
        f'<table style="{_TABLE}{style}">{caption}{head}<tbody>{body}</tbody></table></div>'
    )


def _columns(rows, aligns) -> list:
    """Rows of one-line cells as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(_PAD[align](cell, width) for cell, width, align in zip(row, widths, aligns, strict=True)).rstrip()
        for row in rows
    ]


# ---- tables ------------------------------------------------------------------------------------------------


def show_table(headers, rows, title=None, aligns=None) -> None:
    """Show rows as a table.

    Args:
      headers: the column names.
      rows: sequences of str, number, bool (yes/no) or None ("–"), one cell a header;
        of other objects str() is shown.
      title: the caption.
      aligns: "left", "right" or "center" per column; without it, columns of numbers go right.

    Raises:
      ValueError: a row with more or fewer cells than headers (rows count from 1).
    """
    show(table_bundle(headers, rows, title, aligns))


def table_bundle(headers, rows, title=None, aligns=None) -> dict:
    """The mimebundle of `show_table`."""
    headers, cells = [cell_text(name) for name in headers], [[cell_text(value) for value in row] for row in rows]
    for number, row in enumerate(cells, 1):
        if len(row) != len(headers):
            raise ValueError(f"row {number} has {len(row)} cells for {len(headers)} headers {headers}: {row}")
    if aligns is None:
        columns = zip(*cells, strict=True) if cells else [()] * len(headers)
        aligns = ["right" if _is_numeric(column) else "left" for column in columns]
    head = "".join(
        f'<th scope="col" style="{_HEAD};text-align:{align}">{to_html(name)}</th>'
        for name, align in zip(headers, aligns, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_td, row, aligns))}</tr>" for row in cells)
    nothing = f'<tr><td colspan="{len(headers)}" style="{_CELL};text-align:left"><i>no rows</i></td></tr>'
    above, below = _lines(headers), [line for row in cells for line in _lines(row)]
    rule = ["─" * max(map(len, column)) for column in zip(*above, *below, strict=True)]
    text = _columns([*above, rule, *below], aligns) + ([] if cells else ["no rows"])
    return {
        "text/html": _html_table(title, f"<thead><tr>{head}</tr></thead>", body or nothing),
        "text/plain": "\n".join([title, *text] if title else text),
    }


def _is_numeric(column) -> bool:
    values = [cell for cell in column if cell not in (NOTHING, "∞", "−∞")]
    return bool(values) and all(_NUMERIC.fullmatch(cell) for cell in values)


def _td(text: str, align: str) -> str:
    """Short cells stay on one line. Sentences wrap, and so does a word that would push all else aside."""
    style = ";white-space:nowrap" if len(text) <= 32 else ";min-width:180px"
    if any(len(word) > WRAP for word in text.split()):
        style += ";word-break:break-all"
    return f'<td style="{_CELL};text-align:{align}{style}">{to_html(text)}</td>'


def _lines(row) -> list:
    """A row as the rows of one-line cells that it takes."""
    cells = ([part for line in cell.split("\n") for part in textwrap.wrap(line, WRAP) or [""]] for cell in row)
    return list(itertools.zip_longest(*cells, fillvalue=""))


# ---- bars --------------------------------------------------------------------------------------------------


def show_bars(rows, title, unit="", lower_is_better=False) -> None:
    """Show (label, value) pairs as horizontal bars whose lengths are proportional to the values.

    Every bar carries its value as text. None and NaN say "not measured" and have no bar; infinity fills the
    row and says so; a value too small to see is a hairline.

    Raises:
      ValueError: a value that is negative or not a number.
    """
    values = [(cell_text(label), _number(value)) for label, value in rows]
    title = f"{title} ({'lower' if lower_is_better else 'higher'} is better)"
    longest = max((value for _, value in values if value is not None and value < math.inf), default=0)
    page, text = "", []
    for label, value in values:
        words = "not measured" if value is None else format_value(value, unit)
        drawn, style = "", ""
        if value == math.inf:  # a hollow bar: it has no end
            words += " (infinite)"
            drawn, style = "█" * TEXT_BAR + "▶", f"width:100%;box-sizing:border-box;border:2px dashed {BAR_COLOUR}"
        elif value:
            if value < 0:
                raise ValueError(f"the bar {label!r} is {value}: a bar shows a size, which is never negative")
            eighths = round(value / longest * TEXT_BAR * 8) or 1
            drawn = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
            style = f"width:{100 * value / longest:.3f}%;min-width:1px;background-color:{BAR_COLOUR}"
        bar = f'<div role="presentation" style="height:16px;{style}"></div>' if style else ""
        page += (
            f'<tr><th scope="row" style="{_CELL};text-align:left;font-weight:normal">{to_html(label)}</th>'
            f'<td style="{_CELL};text-align:right;white-space:nowrap">{to_html(words)}</td>'
            f'<td style="{_CELL};padding:4px 0;border-left:1px solid {LINE};width:60%">{bar}</td></tr>'
        )
        text.append((label, words, drawn))
    page = page or f'<tr><td colspan="3" style="{_CELL};text-align:left"><i>nothing to show</i></td></tr>'
    text = _columns(text, ("left", "right", "left")) or ["nothing to show"]
    page = _html_table(title, "", page, ";width:100%;max-width:760px")
    show({"text/html": page, "text/plain": "\n".join([title, *text])})


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
        self.total, self.what, self.done = total, what, 0
        self._handle = None

    def __enter__(self):
        if getattr(shell(), "kernel", None) is not None:  # IPython in a terminal has a shell without a kernel
            from IPython.display import display

            self._handle = display({}, raw=True, display_id=True)
        return self

    def step(self, label: str = "") -> None:
        """Say that the next step begins."""
        self.done += 1
        head = f"{self.what} {self.done}/{max(self.total, self.done)}".strip()
        self._write(f"{head}: {' '.join(label.split())}" if label else head)

    def __exit__(self, *exception):
        self._write("")

    def _write(self, line: str) -> None:
        if self._handle is not None:
            page = f'<div style="font-size:13px">{to_html(line)}</div>'
            self._handle.update({"text/html": page, "text/plain": line} if line else {}, raw=True)
        elif sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K" + line[:100])
            sys.stderr.flush()
