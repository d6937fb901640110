"""Pages of a run: one a notebook, made by nbconvert, and an index with the course map.

They follow the reader's light or dark theme, and the index has no script.
"""

import html
import pathlib

from attnlab.notebook_files import CourseNotebook
from attnlab.records import Records

COURSE = "Attention on NVIDIA GPUs with JAX"

# nbconvert leaves out the text that a notebook keeps for its picture.
_ALT = """
{%- block data_png scoped -%}
{%- set words = output.metadata.get("image/png", {}).get("alt", "a figure") | escape_html -%}
{{ super() | replace("<img ", '<img alt="' ~ words ~ '" ') }}
{%- endblock -%}
"""
_BODY = "{%- extends 'lab/base.html.j2' -%}" + _ALT
_PAGE = (
    "{%- extends 'lab/index.html.j2' -%}"
    + _ALT
    + """
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_css -%}
{{ resources.include_css("static/theme-dark.css")
   | replace('<style type="text/css">', '<style media="(prefers-color-scheme: dark)">') }}
<style>
:root { color-scheme: light dark; }
nav.course { padding: 12px; font-family: var(--jp-content-font-family); }
nav.course a { color: var(--jp-content-link-color); }
</style>
{%- endblock -%}
{%- block body_header -%}
{{ super() }}
<nav class="course" aria-label="Course"><a href="index.html">Course map</a></nav>
{%- endblock -%}
"""
)


def write_page(notebook, page, title: str) -> None:
    """Write the executed `notebook` as one HTML file that follows the reader's light or dark theme.

    There are no scripts, and nothing is fetched when the page is read: formulas stand as plain text.
    Pictures get their alternative text from the notebook.
    """
    body, _ = _convert(notebook, _PAGE, title=title)
    pathlib.Path(page).write_text(body, encoding="utf-8")


def cells_html(notebook) -> tuple[str, str]:
    """The cells of the executed `notebook` as HTML without head, prompts or styles, and the CSS of its code."""
    body, resources = _convert(notebook, _BODY, exclude_input_prompt=True, exclude_output_prompt=True)
    return body, "\n".join(resources["inlining"]["css"])


def _convert(notebook, template: str, title: str = "", **options) -> tuple[str, dict]:
    import nbformat
    from nbconvert import HTMLExporter

    nb = nbformat.read(notebook, as_version=4)
    nb.metadata["title"] = title
    for cell in nb.cells:  # a progress line that was cleared leaves an output of nothing, which nbconvert warns of
        if "outputs" in cell:
            cell.outputs = [o for o in cell.outputs if o.output_type != "display_data" or o.data]
    return HTMLExporter(raw_template=template, **options).from_notebook_node(nb)


_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{course}: course map</title>
<style>
:root {{ color-scheme: light dark; --line: #767676; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem; }}
tr {{ border-bottom: 1px solid var(--line); }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<main>
<h1>{course}</h1>
<p>{device}</p>
<table>
<caption>The course map</caption>
<thead><tr><th scope="col">Notebook</th><th scope="col">What it is about</th>
<th scope="col">Minutes to read</th><th scope="col">What it needs</th><th scope="col">This run</th>
<th scope="col">Seconds</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</main>
</body>
</html>
"""


def write_index(course: list[CourseNotebook], out, outcomes: dict) -> pathlib.Path:
    """Write out/index.html: the course map, with the `attnlab.course.Outcome` of each notebook by name."""
    out = pathlib.Path(out)
    rows = []
    for nb in course:
        name = f'<a href="{nb.name}.html">{nb.name}</a>' if (out / f"{nb.name}.html").exists() else nb.name
        status, seconds = "not run", ""
        if o := outcomes.get(nb.name):
            status, seconds = o.status, f"{o.seconds:.1f}"
            status += f" {o.where}" if status != "done" else ""
            status += f": {o.problem}" if o.problem else ""
        rows.append(
            f'<tr><th scope="row">{name}</th><td>{html.escape(nb.title)}</td>'
            f'<td class="number">{nb.minutes or ""}</td><td>{html.escape(nb.needs)}</td>'
            f'<td>{html.escape(status)}</td><td class="number">{seconds}</td></tr>'
        )
    index = out / "index.html"
    device = html.escape(_device_line(out / "results"))
    index.write_text(_INDEX.format(course=COURSE, device=device, rows="\n".join(rows)), encoding="utf-8")
    return index


def _device_line(results: pathlib.Path) -> str:
    # Asked of the records and not of JAX: a runner that opened the GPU would hold memory that the notebooks need.
    try:
        paths = sorted(results.glob("*.jsonl"), key=lambda p: p.stat().st_mtime)
        found = [record for path in paths for record in Records.read(path)]
    except ValueError as e:
        return f"Device: unknown, {e}"
    if not found:
        return "Device: not recorded in this run."
    return f"Run on {environment_words(found[-1].env)}."


_WORDS = {
    "device": "",
    "capability": "compute capability ",
    "jax": "JAX ",
    "cudnn": "cuDNN ",
    "te": "TransformerEngine ",
    "python": "Python ",
}


def environment_words(env: dict) -> str:
    """The environment of a record in one line: the device, and each version that is known."""
    known = {k: v for k, v in env.items() if v and k != "kind" and v != "none"}  # a CPU has no compute capability
    return ", ".join(f"{_WORDS.get(k, f'{k} ')}{v}" for k, v in known.items())
