"""Pictures: a heat map, lines of measurements, the four steps of attention.

Each function shows exactly one image with a description in words, and returns nothing. Figures have their own
white ground, on dark pages too: no grey reaches a contrast of 4.5:1 on white and on JupyterLab's dark #111111
at once, so a transparent figure is hard to read on one of them. They are made without pyplot, so that no
figure stays open and nothing is shown twice.

Colours are Okabe and Ito's, made for colour-blind readers (https://jfly.uni-koeln.de/color/); marker and dash
tell the variants apart without colour.
"""

import base64
import io
import math

from attnlab import display

# One look a variant, in every figure of the course.
STYLE = {
    "naive": {"color": "#d55e00", "marker": "o", "linestyle": "-", "label": "naive, by hand"},
    "xla": {"color": "#000000", "marker": "s", "linestyle": "--", "label": "dot_product_attention, XLA"},
    "cudnn": {"color": "#0072b2", "marker": "D", "linestyle": "-", "label": "dot_product_attention, cuDNN"},
    "te": {"color": "#009e73", "marker": "^", "linestyle": "-.", "label": "TransformerEngine"},
    "pallas": {"color": "#b4558d", "marker": "v", "linestyle": (0, (1, 1)), "label": "Pallas"},
    "fa3": {
        "color": "#8a6100",
        "marker": "P",
        "linestyle": (0, (5, 1, 1, 1, 1, 1)),
        "label": "FlashAttention-3",
    },
}
_OTHERS = (  # series that are no variant, in turn
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#b4558d", "marker": "D", "linestyle": ":"},
    {"color": "#000000", "marker": "v", "linestyle": (0, (5, 1))},
)
_REFERENCE = "#595959"  # 7:1 on white
_REFERENCE_DASHES = ((0, (2, 2)), (0, (6, 2)), (0, (8, 2, 1, 2)), (0, (1, 2)))
_DPI = 130
_SMALL = 144  # a matrix of at most so many elements has its values written in


def heatmap(weights, title, xlabel="key position", ylabel="query position") -> None:
    """Show a matrix of attention weights (T, S), or of masked scores; values are written in when it is small.

    Raises:
      ValueError: `weights` is not a matrix with elements.
    """
    array = _matrix("weights", weights)
    rows, columns = array.shape
    cell = min(0.55, 6.0 / columns, 5.5 / rows)  # inches
    figure = _figure(max(3.2, 2.4 + cell * columns), max(2.0, 1.2 + cell * rows))
    axes = figure.subplots()
    image = _draw_matrix(axes, array)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(image, ax=axes, shrink=0.9)
    size = f"{rows} rows ({ylabel}) by {columns} columns ({xlabel})"
    _show(figure, f"Heat map: {title}. {size}.\n{_words(array)}")


def lines(series, xlabel, ylabel, title, loglog=True, reference=None) -> None:
    """Show measurements as lines.

    Args:
      series: {name: [(x, y), ...]}. A name in STYLE is drawn in that variant's look. A point whose y is
        None or NaN was not measured: it leaves a gap; a series without any point is named as not measured.
      loglog: both axes logarithmic.
      reference: {label: what}, drawn thin and dashed; `what` is a number (a level), ("slope", p) (y grows
        as x to the p, through the last point of the first measured series) or a list of points.

    Raises:
      ValueError: no series, a point that is no pair of finite numbers, values of zero or less on a log
        axis, a slope without a series to hang it on.
    """
    if not series:
        raise ValueError("series is empty: give at least one list of (x, y) points")
    from matplotlib.ticker import LogLocator, NullLocator

    data = {name: _points(name, points, loglog) for name, points in series.items()}
    guides = _references(reference or {}, data, loglog)
    figure = _figure(7.6, 4.6)
    axes = figure.subplots()
    others = iter(_OTHERS * len(data))
    for name, points in data.items():
        style = dict(STYLE[name]) if name in STYLE else {**next(others), "label": str(name)}
        if not _measured(points):
            style["label"] += " (not measured)"
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linewidth=1.8,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.7,
            **style,
        )
    for i, (label, points) in enumerate(guides.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=_REFERENCE,
            linewidth=1.3,
            zorder=1,
            label=label,
            linestyle=_REFERENCE_DASHES[i % len(_REFERENCE_DASHES)],
        )
    if loglog:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))  # a short axis needs labels too
        axes.yaxis.set_major_formatter(_number_label)
        axes.yaxis.set_minor_formatter("")
    xs = sorted({x for points in data.values() for x, _ in points})
    if 0 < len(xs) <= 12:  # the sizes that were measured, not powers of ten between them
        axes.set_xticks(xs, [_number_label(x) for x in xs], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(True, color="#d9d9d9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, framealpha=0.9, edgecolor="none")
    _show(figure, _lines_words(data, guides, xlabel, ylabel, title))


def four_steps(q, k, v) -> None:
    """Show attention on q (T, H), k (S, H), v (S, H) as four matrices: scores, scaled, weights, output.

    Raises:
      ValueError: ranks or sizes that do not fit, or more than 12 rows or columns (too small to read).
    """
    import numpy as np

    q, k, v = (_matrix(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in their last size, the head dim H")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k {k.shape} and v {v.shape} must agree in their first size, the key length S")
    if max(*q.shape, *k.shape, *v.shape) > 12:
        raise ValueError(f"four_steps draws sizes up to 12; given q {q.shape}, k {k.shape}, v {v.shape}")
    scores = q @ k.T
    scaled = scores / math.sqrt(q.shape[1])
    powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    weights = powers / powers.sum(axis=1, keepdims=True)
    limit = float(np.abs(scores).max()) or 1.0
    steps = (
        ("1. scores = Q Kᵀ", scores, "key", limit),
        ("2. scaled = scores / √H", scaled, "key", limit),  # the same colours: scaling shrinks
        ("3. weights = softmax by row", weights, "key", None),
        ("4. output = weights V", weights @ v, "head dim", None),
    )
    figure = _figure(12.0, 1.3 + 2.4 * max(0.6, min(1.3, q.shape[0] / k.shape[0])))
    for axes, (title, array, xlabel, limit) in zip(
        figure.subplots(1, 4, width_ratios=[a.shape[1] for _, a, _, _ in steps]), steps, strict=True
    ):
        _draw_matrix(axes, array, limit)
        axes.set_title(title, fontsize=11)
        axes.set(xlabel=xlabel, ylabel="query")
    words = "\n".join(f"{title}\n{_words(array)}" for title, array, _, _ in steps)
    _show(figure, f"The four steps of attention for Q {q.shape}, K {k.shape}, V {v.shape}.\n{words}")


# ---- drawing -----------------------------------------------------------------------------------------------


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # inches: a margin, seen on dark pages
    return figure


def _show(figure, words: str) -> None:
    buffer = io.BytesIO()
    # No Software entry: the file depends on what was drawn, not on who drew it.
    figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    picture = base64.b64encode(buffer.getvalue()).decode("ascii")
    width = round(figure.get_figwidth() * 84)  # drawn finer than shown, for sharp text on dense screens
    display.show({"image/png": picture, "text/plain": words}, {"image/png": {"alt": words, "width": width}})


def _matrix(name, value):
    import numpy as np

    try:
        array = np.asarray(value).astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a matrix of numbers; given {type(value).__name__}") from None
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{name} must be a matrix with elements; given shape {array.shape}")
    return array


def _draw_matrix(axes, array, limit=None):
    """A matrix as an image: 0 to 1 from white to blue; signed from orange to purple; grey if not finite."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if low >= 0 and high <= 1 and limit is None:
        low, high, colours = 0.0, high or 1.0, colormaps["Blues"]
    else:
        limit = limit or max(abs(low), abs(high)) or 1.0
        low, high, colours = -limit, limit, colormaps["PuOr"]
    axes.set_facecolor("#bdbdbd")  # shows through where a value is not finite
    image = axes.imshow(np.ma.masked_invalid(array), cmap=colours, vmin=low, vmax=high, aspect="equal")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    if array.size <= _SMALL:
        size = 9 if max(array.shape) <= 8 else 7
        for (i, j), value in np.ndenumerate(array):
            red, green, blue, _ = image.cmap(image.norm(value)) if math.isfinite(value) else (0.74, 0.74, 0.74, 1.0)
            dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18  # equal contrast to both
            axes.text(
                j,
                i,
                _short(value),
                ha="center",
                va="center",
                fontsize=size,
                color="white" if dark else "black",
            )
    return image


def _short(value) -> str:
    """A number that fits into a cell of a matrix."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return display.format_number(float(value))
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


def _number_label(value, _position=None) -> str:
    value = float(value)
    return f"{value:.0f}" if value.is_integer() and value < 1e6 else display.format_number(value)


# ---- checking and describing -------------------------------------------------------------------------------


def _points(name, points, loglog) -> list:
    checked = []
    for point in points:
        try:
            x, y = (None if value is None else float(value) for value in point)
        except (TypeError, ValueError):
            raise ValueError(f"series {name!r}: {point!r} is no point; give a pair (x, y) of numbers") from None
        y = math.nan if y is None else y
        if x is None or not math.isfinite(x) or math.isinf(y):
            raise ValueError(f"series {name!r}: the point {point!r} can't be drawn; x and y must be finite")
        if loglog and (x <= 0 or y <= 0):
            raise ValueError(
                f"series {name!r}: the point {point!r} has no place on a logarithmic axis; "
                "leave it out or use loglog=False"
            )
        checked.append((x, y))
    return checked


def _measured(points) -> list:
    return [(x, y) for x, y in points if not math.isnan(y)]


def _references(reference, data, loglog) -> dict:
    """Every reference as a list of points over the range of x."""
    xs = sorted({x for points in data.values() for x, _ in points})
    drawn = {}
    for label, what in reference.items():
        if isinstance(what, tuple) and len(what) == 2 and what[0] == "slope":
            anchor = next((measured[-1] for points in data.values() if (measured := _measured(points))), None)
            if anchor is None or not all(x > 0 for x in xs):
                raise ValueError(f"reference {label!r}: a slope goes through a measured series with x above 0")
            steps = _between(xs[0], xs[-1])
            drawn[label] = [(x, anchor[1] * (x / anchor[0]) ** what[1]) for x in steps]
        elif isinstance(what, (int, float)) and not isinstance(what, bool):
            ends = (xs[0], xs[-1]) if xs else (1.0, 2.0)
            drawn[label] = _points(label, [(x, what) for x in ends], loglog)
        elif isinstance(what, list) and what:
            drawn[label] = _points(label, what, loglog)
        else:
            raise ValueError(f'reference {label!r} is {what!r}: give a number, ("slope", power) or a list of points')
    return drawn


def _between(low, high, count=33) -> list:
    """Points spaced evenly by ratio: a power is a curve on linear axes."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def _words(array) -> str:
    if array.size <= _SMALL:
        cells = [[_short(value) for value in row] for row in array]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)
    import numpy as np

    finite = array[np.isfinite(array)]
    if not finite.size:
        return "No finite values."
    masked = f"; {display.format_count(array.size - finite.size)} not finite" if finite.size < array.size else ""
    low, high = (display.format_number(float(value)) for value in (finite.min(), finite.max()))
    return f"Values from {low} to {high}{masked}."


def _lines_words(data, guides, xlabel, ylabel, title) -> str:
    parts = [f"Line chart: {title}. {ylabel} against {xlabel}."]
    for name, points in data.items():
        label = STYLE[name]["label"] if name in STYLE else str(name)
        values = ", ".join(f"{_number_label(x)}: {display.format_number(y)}" for x, y in _measured(points))
        parts.append(f"{label}: {values or 'not measured'}")
    if guides:
        parts.append(f"For reference: {', '.join(map(str, guides))}")
    return "\n".join(parts)
