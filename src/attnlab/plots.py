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

import numpy as np

from attnlab import display


def _look(color: str, marker: str, linestyle, **more) -> dict:
    return {"color": color, "marker": marker, "linestyle": linestyle, **more}


# One look a variant, in every figure of the course. A series can be a (variant, dtype): float32 is drawn hollow.
STYLE = {
    "naive": _look("#d55e00", "o", "-", label="naive, by hand"),
    "xla": _look("#000000", "s", "--", label="dot_product_attention, XLA"),
    "cudnn": _look("#0072b2", "D", "-", label="dot_product_attention, cuDNN"),
    "te": _look("#009e73", "^", "-.", label="TransformerEngine"),
    "flash": _look("#b4558d", "v", (0, (1, 1)), label="the course's kernel, Pallas"),
    "hopper": _look("#5b3fa0", "X", (0, (4, 1)), label="the course's Hopper kernel, Pallas"),
    "fa3": _look("#8a6100", "P", (0, (5, 1, 1, 1, 1, 1)), label="FlashAttention-3"),
}
_OTHERS = (  # series that are no variant, in turn
    _look("#0072b2", "o", "-"),
    _look("#d55e00", "s", "--"),
    _look("#009e73", "^", "-."),
    _look("#b4558d", "D", ":"),
    _look("#000000", "v", (0, (5, 1))),
)
_REFERENCE = "#595959"  # 7:1 on white
_REFERENCE_DASHES = ((0, (2, 2)), (0, (6, 2)), (0, (8, 2, 1, 2)), (0, (1, 2)))
_NOT_FINITE = "#bdbdbd"
_SMALL = 144  # a matrix of at most so many elements has its values written in


_LINE = dict(linewidth=1.8, markersize=6, markeredgecolor="white", markeredgewidth=0.7)


def _style(name) -> dict:
    """The look of a variant, or of a (variant, dtype); empty for what is neither."""
    if name in STYLE:
        return dict(STYLE[name])
    if not (isinstance(name, tuple) and len(name) == 2 and name[0] in STYLE):
        return {}
    style = dict(STYLE[name[0]], label=f"{STYLE[name[0]]['label']}, {name[1]}")
    if name[1] == "float32":
        style |= dict(markerfacecolor="white", markeredgecolor=style["color"], markeredgewidth=1.3, linewidth=1.1)
    return style


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
    """Show measurements as lines. Arguments and errors are those of `draw_lines`."""
    _show(*draw_lines(series, xlabel, ylabel, title, loglog, reference))


def draw_lines(series, xlabel, ylabel, title, loglog=True, reference=None):
    """Measurements as lines: the figure, and what it shows in words.

    Args:
      series: {name: [(x, y), ...]}. A name in STYLE, or a pair (name in STYLE, dtype), is drawn in that variant's
        look. A point whose y is None or NaN was not measured: it leaves a gap; a series without any point is named
        as not measured.
      loglog: both axes logarithmic; "y" for that axis alone.
      reference: {label: what}, drawn thin and dashed; `what` is a number (a level), ("slope", p) (y grows
        as x to the p, through the last point of the first measured series) or a list of points.

    Raises:
      ValueError: a point that is not finite, or has no place on a logarithmic axis.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    data = {name: _points(name, points, loglog) for name, points in series.items()}
    xs = sorted({x for points in data.values() for x, _ in points})
    guides = _guides(reference or {}, data, xs)
    figure = _figure(7.6, 4.6)
    axes = figure.subplots()
    taken = {_style(name).get("color") for name in data}
    others = iter([look for look in _OTHERS if look["color"] not in taken] * len(data) or _OTHERS * len(data))
    for name, points in data.items():
        style = _style(name) or {**next(others), "label": name}
        if not _measured(points):
            style["label"] += " (not measured)"
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, **{**_LINE, **style})
    for i, (label, points) in enumerate(guides.items()):
        dashes = _REFERENCE_DASHES[i % len(_REFERENCE_DASHES)]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=_REFERENCE, linewidth=1.3, zorder=1, label=label, linestyle=dashes)
    measured = [y for points in data.values() for _, y in _measured(points)]
    if loglog and measured:  # a logarithmic axis needs values
        axes.set(xscale="linear" if loglog == "y" else "log", yscale="log")
        # A short axis needs labels between the powers of ten too; on a long one they would crowd.
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if max(measured) < 3e4 * min(measured) else (1.0,))
        )
        axes.yaxis.set_major_formatter(_number_label)
        axes.yaxis.set_minor_formatter("")
    if 0 < len(xs) <= 12:  # the sizes that were measured, not powers of ten between them
        axes.set_xticks(xs, [_number_label(x) for x in xs])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(True, color="#d9d9d9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9 if len(data) + len(guides) < 5 else 8, framealpha=0.8, edgecolor="none")
    words = [f"Line chart: {title}. {ylabel} against {xlabel}."]
    for name, points in data.items():
        words.append(f"{_style(name).get('label', name)}: {_told(_measured(points))}")
    if guides:
        words.append(f"For reference: {', '.join(guides)}")
    return figure, "\n".join(words)


def ladder(rungs, ceilings, xlabel, title) -> None:
    """Show what each change bought, a bar a rung. Arguments are those of `draw_ladder`."""
    _show(*draw_ladder(rungs, ceilings, xlabel, title))


def draw_ladder(rungs: dict, ceilings: dict, xlabel: str, title: str):
    """Bars from the first rung at the top to the last, each with its gain over the one before it.

    Args:
      rungs: {name: value}, more is better; None was not measured. A name in STYLE has that variant's colour.
      ceilings: {label: value}, vertical lines.
      xlabel, title: what is shown.

    Returns:
      The figure, and what it shows in words.
    """
    names, told, before = list(rungs), [], None
    figure = _figure(7.6, 1.3 + 0.42 * len(names))
    axes = figure.subplots()
    for y, (name, value) in enumerate(rungs.items()):
        if value is None:
            words = "not measured"
        else:
            words = _number_label(value) + (f"   ×{value / before:.2f}" if before else "")
            before = value
            axes.barh(y, value, height=0.62, color=_style(name).get("color", "#7a7a7a"), zorder=2)
        axes.annotate(
            words, (value or 0, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, zorder=3
        )
        told.append(f"{name}: {words}")
    for i, (label, value) in enumerate(ceilings.items()):
        axes.axvline(value, color=_REFERENCE, linewidth=1.3, linestyle=_REFERENCE_DASHES[i], label=label, zorder=1)
    right = max([*(v for v in rungs.values() if v), *ceilings.values()], default=1)
    axes.set(title=title, xlabel=xlabel, xlim=(0, right * 1.16), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", color="#d9d9d9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if ceilings:
        axes.legend(fontsize=9, framealpha=0.8, edgecolor="none", loc="upper right")
        told += [f"{label}: {_number_label(value)}" for label, value in ceilings.items()]
    return figure, "\n".join([f"Bar chart: {title}. {xlabel}, and the gain over the rung before.", *told])


def roofline(points, bandwidth, peaks, title) -> None:
    """Show what was achieved against what the device allows.

    Args:
      points: {name: [(FLOP per byte, TFLOP/s, label), ...]}, names as for `lines`.
      bandwidth: of the memory, in 10^9 bytes/s.
      peaks: {label: TFLOP/s}, the ceilings of arithmetic.
      title: what is shown.
    """
    data = {name: [p for p in series if p[1]] for name, series in points.items()}
    found = [p for series in data.values() for p in series]
    ridges = [1e3 * peak / bandwidth for peak in peaks.values()]
    xs = [p[0] for p in found] + ridges
    low, high = min(xs) / 2, max(xs) * 2
    figure = _figure(7.6, 4.8)
    axes = figure.subplots()
    for (label, peak), ridge, dashes in zip(peaks.items(), ridges, _REFERENCE_DASHES, strict=False):
        roof = [(low, low * bandwidth / 1e3), (ridge, peak), (high, peak)]
        axes.plot(*zip(*roof, strict=True), color=_REFERENCE, linewidth=1.5, linestyle=dashes, zorder=1)
        axes.annotate(label, (high, peak), xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=8)
    words = [f"Roofline: {title}. TFLOP/s against FLOP per byte."]
    words += [f"{label}: {display.format_number(peak)} TFLOP/s" for label, peak in peaks.items()]
    others = iter(_OTHERS * len(data))
    for name, series in data.items():
        style = {**_LINE, **(_style(name) or {**next(others), "label": name}), "linestyle": "none"}
        axes.plot([p[0] for p in series], [p[1] for p in series], **style)
        values = ", ".join(f"{label}: {display.format_number(y)}" for _, y, label in series)
        words.append(f"{style['label']}: {values or 'not measured'}")
    for end in {min(found), max(found)} if found else ():  # the first and the last tell which way it goes
        highest = max((p for p in found if p[0] == end[0]), key=lambda p: p[1])
        axes.annotate(highest[2], highest[:2], xytext=(0, 8), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xscale="log", yscale="log", title=title, xlabel="FLOP per byte that must move", ylabel="TFLOP/s")
    axes.grid(True, which="major", color="#d9d9d9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, framealpha=0.9, edgecolor="none", loc="lower right")
    _show(figure, "\n".join(words))


def four_steps(q, k, v) -> None:
    """Show attention on q (T, H), k (S, H), v (S, H) as four matrices: scores, scaled, weights, output.

    Raises:
      ValueError: sizes that do not fit, or above 12 (too small to read).
    """
    q, k, v = (_matrix(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    if q.shape[1] != k.shape[1] or len(k) != len(v) or max(*q.shape, *k.shape, *v.shape) > 12:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} must be (T, H), (S, H), (S, H) with sizes up to 12")
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
    figure = _figure(9.8, 1.3 + 2.4 * max(0.6, min(1.3, q.shape[0] / k.shape[0])))
    ratios = [array.shape[1] for _, array, _, _ in steps]
    for axes, (title, array, xlabel, limit) in zip(figure.subplots(1, 4, width_ratios=ratios), steps, strict=True):
        _draw_matrix(axes, array, limit)
        axes.set_title(title, fontsize=11)
        axes.set(xlabel=xlabel, ylabel="query")
    words = "\n".join(f"{title}\n{_words(array)}" for title, array, _, _ in steps)
    _show(figure, f"The four steps of attention for Q {q.shape}, K {k.shape}, V {v.shape}.\n{words}")


# ---- figures -----------------------------------------------------------------------------------------------


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # inches: a margin, seen on dark pages
    return figure


def png(figure, words: str) -> bytes:
    """The figure as PNG, with what it shows in words as its Description."""
    from PIL import Image, PngImagePlugin  # Pillow comes with matplotlib

    drawn, buffer, about = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    about.add_itxt("Description", words)
    # No Software entry: the file depends on what was drawn, not on who drew it.
    figure.savefig(drawn, format="png", facecolor="white", metadata={"Software": None})
    # A palette of 256 colours shows the same at a third of the size: notebooks have to stay small.
    palette = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    palette.save(buffer, "png", optimize=True, pnginfo=about)
    return buffer.getvalue()


def _show(figure, words: str) -> None:
    picture = base64.b64encode(png(figure, words)).decode("ascii")
    width = round(figure.get_figwidth() * 84)  # drawn finer than shown, for sharp text on dense screens
    display.show({"image/png": picture, "text/plain": words}, {"image/png": {"alt": words, "width": width}})


# ---- matrices ----------------------------------------------------------------------------------------------


def _matrix(name, value):
    array = np.asarray(value, np.float64)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name} must be a matrix with elements; given shape {array.shape}")
    return array


def _draw_matrix(axes, array, limit=None):
    """A matrix as an image: 0 to 1 from white to blue; signed from orange to purple; grey if not finite."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    masked = np.ma.masked_invalid(array)
    low, high = (float(masked.min()), float(masked.max())) if masked.count() else (0.0, 1.0)
    if low >= 0 and high <= 1 and limit is None:
        low, high, colours = 0.0, high or 1.0, "Blues"
    else:
        high = limit or max(abs(low), abs(high)) or 1.0
        low, colours = -high, "PuOr"
    colours = colormaps[colours].with_extremes(bad=_NOT_FINITE)
    image = axes.imshow(masked, cmap=colours, vmin=low, vmax=high, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    if array.size <= _SMALL:
        size = 9 if max(array.shape) <= 8 else 7
        luminance = image.to_rgba(masked)[..., :3] ** 2.2 @ [0.2126, 0.7152, 0.0722]
        for (i, j), value in np.ndenumerate(array):
            ink = "white" if luminance[i, j] < 0.18 else "black"  # equal contrast to both
            axes.text(j, i, _short(value), ha="center", va="center", fontsize=size, color=ink)
    return image


def _words(array) -> str:
    if array.size <= _SMALL:
        cells = [[_short(value) for value in row] for row in array]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)
    finite = array[np.isfinite(array)]
    if not finite.size:
        return "No finite values."
    masked = f"; {array.size - finite.size:,} not finite" if finite.size < array.size else ""
    return f"Values from {display.format_number(finite.min())} to {display.format_number(finite.max())}{masked}."


def _short(value) -> str:
    """A number that fits into a cell of a matrix."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else display.format_number(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"


# ---- lines -------------------------------------------------------------------------------------------------


def _points(name, points, loglog) -> list:
    """Points (x, y) as floats, y NaN where nothing was measured."""
    points = [(float(x), math.nan if y is None else float(y)) for x, y in points]
    for x, y in points:
        if not math.isfinite(x) or math.isinf(y) or (loglog and y <= 0) or (loglog is True and x <= 0):
            rule = "above 0, or use loglog=False" if loglog else "finite"
            raise ValueError(f"series {name!r}: the point {(x, y)} can't be drawn; x and y must be {rule}")
    return points


def _measured(points) -> list:
    return [(x, y) for x, y in points if not math.isnan(y)]


def _told(points) -> str:
    """Points in words: each of them, or their range where a list would tell nobody anything."""
    number = display.format_number
    if len(points) > 24:
        (first, _), (last, _), ys = points[0], points[-1], [y for _, y in points]
        low, high = number(min(ys)), number(max(ys))
        return f"{len(points)} points from {number(first)} to {number(last)}, between {low} and {high}"
    return ", ".join(f"{_number_label(x)}: {number(y)}" for x, y in points) or "not measured"


def _guides(reference, data, xs) -> dict:
    """Every reference as a list of points over the range of x, none where nothing was measured."""
    measured = [point for points in data.values() for point in _measured(points)[-1:]]
    guides = {}
    for label, what in reference.items():
        if isinstance(what, list):
            guides[label] = what
        elif not measured:
            continue
        elif isinstance(what, tuple):
            (x0, y0), power = measured[0], what[1]
            curve = np.geomspace(xs[0], xs[-1], 33).tolist()  # a power is a curve on linear axes
            guides[label] = [(x, y0 * (x / x0) ** power) for x in curve]
        else:
            guides[label] = [(xs[0], what), (xs[-1], what)]
    return guides


def _number_label(value, _position=None) -> str:
    value = float(value)
    return f"{value:.0f}" if value.is_integer() and value < 1e6 else display.format_number(value)
