"""Pages of a run: one a notebook, made by nbconvert, and an index with the course map.

They follow the reader's light or dark theme, and the index has no script.
"""

import contextlib
import dataclasses
import html
import json
import pathlib
import re

from attnlab.notebook_files import CourseNotebook

_PAGE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js_requirejs -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- if resources.formulas -%}{{ super() }}{%- endif -%}{%- endblock -%}
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


def write_page(notebook, page, title: str) -> pathlib.Path:
    """Write the executed `notebook` as one HTML file that follows the reader's light or dark theme.

    Scripts are left out, except the one that sets formulas, and that only where there are some.
    """
    import warnings

    import nbformat
    from nbconvert import HTMLExporter

    nb = nbformat.read(notebook, as_version=4)
    nb.metadata["title"] = title
    formulas = any(c.cell_type == "markdown" and re.search(r"\$[^$]+\$", c.source) for c in nb.cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pictures without a text are the notebook's matter, and tested there
        body, _ = HTMLExporter(raw_template=_PAGE).from_notebook_node(nb, resources={"formulas": formulas})
    page = pathlib.Path(page)
    page.write_text(body, encoding="utf-8")
    return page


_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Attention on NVIDIA GPUs with JAX: course map</title>
<style>
:root {{ color-scheme: light dark; --line: #767676; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem; }}
tr {{ border-bottom: 1px solid var(--line); }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
body {{ color: #1b1b1b; background: #fff; }}
a {{ color: #0b57d0; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e8e8e8; background: #161616; }}
  a {{ color: #8ab4f8; }}
}}
</style>
</head>
<body>
<main>
<h1>Attention on NVIDIA GPUs with JAX</h1>
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


def write_index(course: list[CourseNotebook], out, outcomes: list) -> pathlib.Path:
    """Write out/index.html, the course map with the `attnlab.course.Outcome` of each notebook.

    Those that this run left out keep what the last run said of them.
    """
    out = pathlib.Path(out)
    state_file = out / "run.json"
    try:
        state = json.loads(state_file.read_text(encoding="utf-8"))
        state = state if isinstance(state, dict) else {}
    except (OSError, ValueError):
        state = {}
    state |= {o.notebook: dataclasses.asdict(o) for o in outcomes}
    state_file.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    rows = []
    for nb in course:
        page = f"{nb.name}.html"
        name = html.escape(nb.name)
        name = f'<a href="{name}.html">{name}</a>' if (out / page).exists() else name
        o = state.get(nb.name)
        status, seconds = (o["status"], f"{o['seconds']:.1f}") if o else ("not run", "")
        if o and status != "done":
            status += f" in cell {o['cell']} of {o['cells']}" if o["cell"] else " before its first cell"
            status += f": {o['problem']}" if o["problem"] else ""
        rows.append(
            f'<tr><th scope="row">{name}</th><td>{html.escape(nb.title)}</td>'
            f'<td class="number">{nb.minutes or ""}</td><td>{html.escape(nb.needs)}</td>'
            f'<td>{html.escape(status)}</td><td class="number">{seconds}</td></tr>'
        )
    index = out / "index.html"
    device = html.escape(_device_line(out / "results"))
    index.write_text(_INDEX.format(device=device, rows="\n".join(rows)), encoding="utf-8")
    return index


def environment_of(results: pathlib.Path) -> dict:
    """The environment in the newest record of the results folder, {} without records.

    Asked of the records and not of JAX: a runner that opened the GPU would hold memory that the
    notebooks need.
    """
    newest = {}
    for path in sorted(results.glob("*.jsonl"), key=lambda p: p.stat().st_mtime):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                newest = json.loads(line).get("env") or newest
    return newest


def _device_line(results: pathlib.Path) -> str:
    env = environment_of(results)
    return f"Run on {device_line(env)}." if env else "Device: not recorded in this run."


def device_line(env: dict) -> str:
    """The environment of a record in one line."""
    return ", ".join(str(value) if key == "device" else f"{key} {value}" for key, value in env.items() if value)
