"""The executed notebooks as a static site: a course map, a page a notebook, and the ledger of claims.

Nothing is executed: the outputs are those that the notebooks carry. The pages hold no script and fetch nothing;
links are relative, so that the folder works from a disk and below any address of a web server.

nbconvert makes the pages, and the shell around them stands here. The course needs nbconvert anyway, Jupyter's own
project keeps it, and its templates let every script and remote style go. The alternatives cost more for eight
pages: Jupyter Book (mystmd) runs on Node; Quarto is a program of its own to install; Sphinx with myst-nb and MkDocs
with mkdocs-jupyter (which calls nbconvert too) add a tree of packages, and themes whose pages have scripts. The
stylesheet is short, instead of the quarter of a megabyte of JupyterLab's own that a page of a run carries.
"""

import html
import pathlib
import re
import tempfile

from attnlab import notebook_files, records
from attnlab.course import BadRequest
from attnlab.notebook_files import CourseNotebook, NotebookError
from attnlab.pages import COURSE, cells_html, environment_words

ABOUT = "A course in notebooks. Every number is measured by the machine it runs on, and every claim is checked there."
GENERATOR = '<meta name="generator" content="attnlab site">'  # how a later build knows its own folder
CSS = (pathlib.Path(__file__).parent / "data" / "course.css").read_text(encoding="utf-8")
OURS = re.compile(rf"index\.html|claims\.html|course\.css|{notebook_files.FILE_NAME.pattern}\.html")


def main(notebooks: list[CourseNotebook], out) -> int:
    """Write the site of `notebooks` into the folder `out`, in place of an earlier one, and say where it is.

    Returns:
      0.

    Raises:
      BadRequest: `out` holds something that this command did not make.
      NotebookError: a notebook that was never executed, or that no page can be made of. The old site stays.
    """
    target = pathlib.Path(out).resolve()
    _refuse_what_is_not_ours(target, out)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        new, old = pathlib.Path(work, "new"), pathlib.Path(work, "old")
        new.mkdir()
        for name, text in _pages(notebooks).items():
            (new / name).write_text(text, encoding="utf-8")
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
    print(f"{len(notebooks)} notebooks and the claims as a site: {pathlib.Path(out) / 'index.html'}")
    return 0


def _refuse_what_is_not_ours(target: pathlib.Path, out) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise BadRequest(f"{out} is a file: give another folder with --out DIR")
    inside = sorted(p.name for p in target.iterdir())
    strange = [name for name in inside if not OURS.fullmatch(name)]
    index = target / "index.html"
    if inside and not strange and not (index.is_file() and GENERATOR in index.read_text("utf-8", "replace")):
        strange = ["index.html"] if index.exists() else inside
    if strange:
        some = ", ".join(strange[:3]) + (", …" if len(strange) > 3 else "")
        raise BadRequest(
            f"{out} holds what this command did not make ({some}), and a new site would replace it: "
            "give another folder with --out DIR, or empty it yourself"
        )


# --- the pages


def _pages(notebooks: list[CourseNotebook]) -> dict[str, str]:
    """Name and text of every file of the site."""
    sources = {nb.name: _executed(nb) for nb in notebooks}
    files, code_css = {}, ""
    for before, nb, after in zip([None, *notebooks], notebooks, [*notebooks[1:], None], strict=False):
        try:
            body, code_css = cells_html(nb.path)
        except Exception as e:  # whatever nbformat or a template meets in it, the person must know in which file
            raise NotebookError(f"{nb.path}: no page could be made of it: {type(e).__name__}: {e}") from e
        files[f"{nb.name}.html"] = _notebook_page(nb, body, before, after)
    claims, held = _claims_page(sources)
    return files | {
        "claims.html": claims,
        "index.html": _index_page(notebooks, sources, held),
        "course.css": code_css + CSS,
    }


def _executed(nb: CourseNotebook) -> dict:
    source = notebook_files.read(nb.path)
    code = notebook_files.code_cells(source)
    missing = sum(c.get("execution_count") is None for c in code)
    if missing or not code:
        raise NotebookError(
            f"{nb.path}: {missing} of its {len(code)} code cells were never executed, and the site shows outputs: "
            "execute it first (make regenerate)"
        )
    return source


def _page(title: str, main: str, links: str = "", contents: str = "", foot: str = "") -> str:
    """A whole page. The parts are HTML, the title is text; `contents` is the list of the page's sections."""
    title = html.escape(title if title == COURSE else f"{title} · {COURSE}")
    contents = contents and f'<nav class="contents" aria-label="On this page">\n<ol>\n{contents}\n</ol>\n</nav>'
    foot = foot and f'<footer>\n<nav aria-label="Neighbours">{foot}</nav>\n</footer>'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="course.css">
</head>
<body{' class="wide"' if contents else ""}>
<a class="skip" href="#content">Skip to the content</a>
<header>
<nav aria-label="Course">
<a href="index.html">Course map</a>
<a href="claims.html">Claims</a>
{links}</nav>
</header>
<div class="columns">
{contents}
<main id="content" tabindex="-1">
{main}
</main>
</div>
{foot}
</body>
</html>
"""


def _notebook_page(nb: CourseNotebook, body: str, before, after) -> str:
    links, foot = "", ""
    for other, word in ((before, "Previous"), (after, "Next")):
        if other:
            links += f'<a href="{other.name}.html">{word}: {other.number}</a>\n'
            foot += f'<a href="{other.name}.html">{word}: {other.number} {html.escape(other.title)}</a>\n'
    sections = re.findall(r'<h2 id="[^"]*">(.*?)<a class="anchor-link" href="(#[^"]*)">', body, re.DOTALL)
    contents = "\n".join(f'<li><a href="{anchor}">{words}</a></li>' for words, anchor in sections)
    return _page(f"{nb.number} {nb.title}", body, links, contents, foot)


def _index_page(notebooks: list[CourseNotebook], sources: dict[str, dict], held: str) -> str:
    from nbconvert.filters import markdown2html

    course = ""
    for nb in notebooks:
        first = notebook_files.source(sources[nb.name]["cells"][0])
        able = "\n".join(re.findall(r"^- .*", first, re.MULTILINE))
        needs = f" Needs: {html.escape(nb.needs)}." if nb.needs else ""
        course += (
            f'<li>\n<h3><a href="{nb.name}.html">{nb.number} {html.escape(nb.title)}</a></h3>\n'
            f'<p class="quiet">{nb.minutes} minutes.{needs}</p>\n'
            f"{f'<p>After it you can</p>{chr(10)}{markdown2html(able)}' if able else ''}</li>\n"
        )
    main = f"""<h1>{COURSE}</h1>
<p>{ABOUT}</p>
<h2 id="course">The course</h2>
<ol class="course">
{course}</ol>
<h2 id="claims">The claims</h2>
<p>A claim is a sentence that a number can contradict. Judged over the saved results, {held}:
<a href="claims.html">all claims, with what was measured</a>.</p>
<h2 id="outputs">Where the outputs come from</h2>
<p>These pages show the outputs that the notebooks carry. They were recorded on:</p>
<ul>
{_recorded_on(sources)}
</ul>
<h2 id="run">Run it yourself</h2>
<p>The numbers of your machine will differ. In the course's folder, with git, make and Python 3.11 or newer:</p>
<pre><code>make run     # sets up .venv, executes the whole course; pages in build/index.html
make lab     # opens JupyterLab on the notebooks</code></pre>
<p>An NVIDIA GPU is not needed: what can run on a CPU does, and the saved results stand beside.</p>"""
    return _page(COURSE, main)


def _recorded_on(sources: dict[str, dict]) -> str:
    """A list item a device: as the notebooks' own outputs name it, with the versions that its records name."""
    known = {r.env.get("device"): r.env for path in records.RESULTS.glob("*.jsonl") for r in records.Records.read(path)}
    made: dict[str, list] = {}
    for name, source in sources.items():
        made.setdefault(notebook_files.device_of(source) or "a device that the notebook does not name", []).append(name)
    items = []
    for device, names in made.items():
        words = environment_words(known.get(device, {"device": device}))
        which = f": {', '.join(names)}" if len(made) > 1 else ""
        items.append(f"<li>{html.escape(words)}{which}</li>")
    return "\n".join(items)


def _claims_page(sources: dict[str, dict]) -> tuple[str, str]:
    """The page of all claims, and in words how many hold."""
    from attnlab.claims import FAILS, HOLDS
    from attnlab.ledger import LEDGER

    results = records.saved()
    on = html.escape(environment_words(results[0].env) if results else "no saved results")
    verdicts = {name: claim.judge(results) for name, claim in LEDGER.items()}
    states = [verdict.state for verdict in verdicts.values()]
    held = f"{states.count(HOLDS)} of {len(states)} hold" + (f", {states.count(FAILS)} fail" if FAILS in states else "")
    tables = ""
    for notebook in sorted({claim.notebook for claim in LEDGER.values()}):
        rows = ""
        for claim in (c for c in LEDGER.values() if c.notebook == notebook):
            state, measured = verdicts[claim.name]
            others = f'<br><span class="quiet">{html.escape(claim.others)}.</span>' if claim.others else ""
            name = claim.name
            if cell := _where_claimed(sources.get(notebook), name):
                name = f'<a href="{notebook}.html#{cell}">{name}</a>'
            rows += (
                f'<tr id="{claim.name}"><th scope="row">{html.escape(claim.sentence)}{others}<br>{name}</th>'
                f'<td class="{"bad" if state == FAILS else "verdict"}">{html.escape(state)}</td>'
                f"<td>{html.escape(measured)}</td></tr>\n"
            )
        name = f'<a href="{notebook}.html">{notebook}</a>' if notebook in sources else notebook
        tables += (
            f'<h2 id="{notebook}">{name}</h2>\n<div class="box"><table>\n<thead><tr><th scope="col">Claim</th>'
            f'<th scope="col">Verdict</th><th scope="col">Measured</th></tr></thead>\n<tbody>\n{rows}</tbody>\n'
            "</table></div>\n"
        )
    main = f"""<h1>The claims</h1>
<p>Every sentence of the course that a number can contradict. Judged over the saved results, {held}.
They were recorded on {on}.</p>
<p>Below the sentence stands what others say, if they differ. The name of a claim leads to the cell that shows it.</p>
{tables}"""
    return _page("The claims", main), held


def _where_claimed(source: dict | None, name: str) -> str:
    """The id that nbconvert gives the cell which shows the claim; "" where there is none."""
    for cell in notebook_files.code_cells(source) if source else []:
        text = notebook_files.source(cell)
        if "lab.claim(" in text and re.search(rf"""["']{name}["']""", text):
            return f"cell-id={cell['id']}"
    return ""
