"""The static site: its links, what it fetches, what people without a mouse or with other eyes need of it."""

import functools
import html.parser
import pathlib
import re
import urllib.parse

import pytest

import toy_notebooks as toys
from attnlab import cli, display, notebook_files, pages, records, site
from attnlab.claims import FAILS, UNTESTABLE, Claim
from attnlab.ledger import LEDGER
from attnlab.notebook_files import course_notebooks
from attnlab.records import Records
from test_claims import NOT_RECORDED

# One worker builds the real site once.
pytestmark = pytest.mark.xdist_group("site")

NOTEBOOKS = pathlib.Path(__file__).parents[1] / "notebooks"
COURSE = course_notebooks(NOTEBOOKS)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Every file of the site of the committed notebooks: {name: text}."""
    out = tmp_path_factory.mktemp("site") / "site"
    assert cli.main(["site", "--notebooks", str(NOTEBOOKS), "--out", str(out)]) == 0
    return contents(out)


def contents(folder) -> dict[str, str]:
    return {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir()}


# ---- what is checked ---------------------------------------------------------------------------------------

VOID = set("area base br col embed hr img input link meta source track wbr".split())
FETCHING = {"script", "iframe", "object", "embed", "video", "audio", "source", "base", "frame", "form"}
BY_ATTRIBUTE = {"srcset", "poster", "background", "data", "formaction", "action", "ping"}


class Page(html.parser.HTMLParser):
    """What a page consists of, and what is wrong with it alone."""

    def __init__(self, text):
        super().__init__()
        self.faults, self.open, self.tags = [], [], []
        self.ids, self.links, self.headings, self.styles, self.css, self.words = set(), [], [], [], "", {}
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is never closed" for tag in self.open]
        self._judge()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)
        if (name := given.get("id")) is not None:
            if name in self.ids or not name:
                self.faults.append(f"id {name!r} is there twice, or empty")
            self.ids.add(name)
            self.words[name] = ""
        self.links += [(tag, given[key]) for key in ("href", "src") if key in given]
        self.styles += [given["style"]] if "style" in given else []
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in FETCHING or given.keys() & BY_ATTRIBUTE or any(key.startswith("on") for key in given):
            self.faults.append(f"<{tag}> may run or fetch something")
        if tag == "link" and given.get("rel") not in ("stylesheet", "icon"):
            self.faults.append(f"a link of rel {given.get('rel')!r}")
        if tag == "img" and ((given.get("alt") or "").strip() in ("", "a figure") or "No desc" in given["alt"]):
            self.faults.append("a picture without a text")
        # In a thead, as prose makes it, a header cell belongs to its column anyway.
        if tag == "th" and given.get("scope") not in ("col", "row") and "thead" not in self.open:
            self.faults.append("a header cell without its scope")

    def handle_startendtag(self, tag, attrs):  # <img/>
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes what is not open")

    def handle_data(self, data):
        if self.open[-1:] == ["style"]:
            self.css += data
        elif self.words:  # the text that follows an id, up to the next one
            self.words[list(self.words)[-1]] += data

    def _judge(self):
        levels = [0, *self.headings]
        if levels[1:].count(1) != 1 or any(b > a + 1 for a, b in zip(levels, levels[1:], strict=False)):
            self.faults.append(f"headings out of order: {self.headings}")
        found = [tag for tag, _ in self.tags]
        if [found.count(tag) for tag in ("html", "head", "title", "body", "header", "main")] != [1] * 6:
            self.faults.append("not one each of html, head, title, body, header and main")
        if dict(self.tags[0][1]).get("lang") != "en":
            self.faults.append("no language")
        if not any(tag == "meta" and a.get("name") == "viewport" for tag, a in self.tags):
            self.faults.append("no viewport")
        first = next(a.get("href") for tag, a in self.tags if tag == "a")
        if first != "#content" or next(a.get("id") for tag, a in self.tags if tag == "main") != "content":
            self.faults.append("its first link does not skip to its main part")
        navs = [a.get("aria-label") for tag, a in self.tags if tag == "nav"]
        if None in navs or len(set(navs)) != len(navs):
            self.faults.append(f"navigation without a name of its own: {navs}")
        if found.count("table") > found.count("th"):
            self.faults.append("a table without header cells")


@functools.lru_cache
def parsed(text: str) -> Page:
    return Page(text)


@functools.lru_cache
def prose_links() -> frozenset:
    """The addresses elsewhere that the notebooks' prose names."""
    cells = [c for nb in COURSE for c in notebook_files.read(nb.path)["cells"] if c["cell_type"] == "markdown"]
    return frozenset(re.findall(r"https?://[^\s)>]+", "\n".join(map(notebook_files.source, cells))))


def wrong_link(files, name, tag, target) -> str:
    """What is wrong with one href or src; "" when nothing is."""
    if target.startswith("data:"):
        return "" if tag in ("img", "link") else "data instead of an address"
    if tag == "a" and target in prose_links():
        return ""
    if urllib.parse.urlsplit(target).scheme or target.startswith("/"):
        return "not relative"
    path, _, anchor = target.partition("#")
    if path and path not in files:
        return "no such file"
    # As browsers look: for the anchor as it is written, then decoded.
    if "#" in target and not {anchor, urllib.parse.unquote(anchor)} & parsed(files[path or name]).ids:
        return "no such anchor"
    return ""


def faults(files: dict[str, str]) -> list[str]:
    """One line for everything that is wrong with a site."""
    found = []
    for name, text in files.items():
        if name.endswith(".html"):
            page = parsed(text)
            found += [f"{name}: {fault}" for fault in page.faults]
            for tag, target in page.links:
                if problem := wrong_link(files, name, tag, target or ""):
                    found.append(f"{name}: {tag} {(target or '')[:80]}: {problem}")
            css = "\n".join([page.css, *page.styles])
        else:
            css = text
            found += [f"{name}: {fault}" for fault in too_faint(css)]
        if re.search(r"@import|url\(\s*[\"']?(?!data:)", css):
            found.append(f"{name}: a style fetches something")
    return found


# ---- contrast ----------------------------------------------------------------------------------------------


def rgba(colour: str, under=(255, 255, 255)) -> tuple:
    """A CSS colour as its parts from 0 to 255, drawn over `under`."""
    colour = {"white": "#ffffff", "black": "#000000"}.get(colour, colour)
    if colour.startswith("#"):
        digits = colour[1:] if len(colour) > 4 else "".join(2 * c for c in colour[1:])
        return tuple(int(digits[i : i + 2], 16) for i in (0, 2, 4))
    *parts, alpha = [float(x) for x in re.fullmatch(r"rgba?\(([^)]*)\)", colour)[1].split(",")]
    return tuple(alpha * part + (1 - alpha) * below for part, below in zip(parts, under, strict=True))


def contrast(text: str, ground: str, under: str = "#ffffff") -> float:
    """The contrast by WCAG of two CSS colours; what of the ground is transparent shows `under`."""

    def luminance(parts):
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in (x / 255 for x in parts))
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    behind = rgba(ground, rgba(under))
    high, low = sorted((luminance(rgba(text, behind)), luminance(behind)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def variables(css: str) -> dict[str, str]:
    return {name: value.strip() for name, value in re.findall(r"(--[\w-]+)\s*:\s*([^;}]+)", css)}


def resolve(value: str, known: dict[str, str]) -> str:
    while match := re.fullmatch(r"var\((--[\w-]+)\)", value.strip()):
        value = known[match[1]]
    return value.strip()


def themes(css: str) -> dict[str, dict[str, str]]:
    """The variables of both themes of the site's stylesheet."""
    dark = re.search(r"@media \(prefers-color-scheme: dark\) \{(.*?)\n\}", css, re.DOTALL)
    light = variables(css.replace(dark[0], ""))
    return {"light": light, "dark": light | variables(dark[1])}


def too_faint(css: str) -> list[str]:
    """Every colour of text in a stylesheet that does not reach 4.5:1 on its own ground, or else on all grounds."""
    found = []
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))
    for theme, known in themes(css).items():
        for selector, body in rules:
            said = {k: resolve(v, known) for k, v in re.findall(r"(?<![-\w])([a-z-]+)\s*:\s*([^;]+)", body)}
            text, own = said.get("color", "inherit"), said.get("background", said.get("background-color", ""))
            grounds = [own] if own.startswith("#") else [known["--ground"], known["--code"]]
            for ground in grounds if text != "inherit" else []:
                if contrast(text, ground) < 4.5:
                    found.append(f"{selector.strip()} in {theme}: {text} on {ground} is too faint")
    return found


# ---- the site ----------------------------------------------------------------------------------------------


def test_the_site_has_no_fault(built):
    assert faults(built) == []


def changed(pattern, new, count=1):
    def change(text):
        text, done = re.subn(pattern, new, text, count=count, flags=re.DOTALL)
        assert done, f"{pattern} is not there"
        return text

    return change


PLANTED = {
    "a dead link": ("index.html", changed('href="03_cudnn.html"', 'href="03_gone.html"'), "no such file"),
    "a dead anchor": ("claims.html", changed("#cell-id=", "#cell-id=no"), "no such anchor"),
    "a dead anchor of its own": ("05_sweeps.html", changed('href="#2.-Length"', 'href="#2"'), "no such anchor"),
    "a root": ("index.html", changed('href="claims.html"', 'href="/claims.html"'), "not relative"),
    "a link elsewhere": ("index.html", changed('href="claims.html"', 'href="https://a.example"'), "not relative"),
    "a skipped level": ("00_start_here.html", changed(r"(</?)h2\b", r"\1h4", 0), "headings out of order"),
    "two titles": ("02_sdpa.html", changed(r"(</?)h2\b", r"\1h1", 2), "headings out of order"),
    "no alt": ("01_naive_attention.html", changed(r'<img alt="[^"]*"', '<img alt=""'), "a picture without a text"),
    "an idle alt": ("05_sweeps.html", changed(r'<img alt="[^"]*"', '<img alt="a figure"'), "a picture without a text"),
    "a remote picture": (
        "05_sweeps.html",
        changed('src="data:[^"]*"', 'src="https://a.example/a.png"'),
        "not relative",
    ),
    "a remote style": ("index.html", changed('href="course.css"', 'href="https://a.example/a.css"'), "not relative"),
    "an import": ("course.css", changed("^", '@import "https://a.example/a.css";\n'), "a style fetches something"),
    "a font": ("course.css", changed("$", "@font-face { src: url(a.woff2); }"), "a style fetches something"),
    "a ground": ("03_cudnn.html", changed('style="', 'style="background:url(//a.example);'), "a style fetches"),
    "a script": ("index.html", changed("</main>", "<script>1</script></main>"), "may run or fetch something"),
    "a handler": ("index.html", changed("<main ", '<main onclick="1" '), "may run or fetch something"),
    "a double id": ("index.html", changed('id="run"', 'id="claims"'), "is there twice"),
    "an open element": ("index.html", changed("</main>", ""), "closes what is not open"),
    "no scope": ("claims.html", changed(' scope="row"', ""), "a header cell without its scope"),
    "faint text": ("course.css", changed("--quiet: #57606a", "--quiet: #8c959f"), "in light: #8c959f on #ffffff"),
    "faint code": ("course.css", changed("string-color: #7ee2a8", "string-color: #2e6b4a"), "in dark: #2e6b4a"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(built, fault):
    name, change, words = PLANTED[fault]
    found = faults(built | {name: change(built[name])})
    assert any(words in line and line.startswith(name) for line in found), found


def test_every_notebook_has_a_page_and_its_place_on_the_map(built):
    text = built["index.html"]
    for nb in COURSE:
        title = nb.title.replace("'", "&#x27;")
        assert f'href="{nb.name}.html">{nb.number} {title}</a>' in text
        assert f"{nb.minutes} minutes. Needs: {nb.needs}." in text
    assert {name for name in built if name[0].isdigit()} == {f"{nb.name}.html" for nb in COURSE}
    assert "say what attention computes, in four steps" in text and "<code>jax.nn.dot_product_attention</code>" in text


def test_the_index_says_where_the_outputs_come_from_and_how_to_make_ones_own(built):
    env = records.saved()[0].env
    line = f"{env['device']}, compute capability {env['capability']}, driver {env['driver']}, JAX {env['jax']}, "
    assert line + f"cuDNN {env['cudnn']}" in built["index.html"] and "make run" in built["index.html"]


def test_a_page_leads_to_its_neighbours_and_its_sections(built):
    before, middle, after = COURSE[2:5]
    links = [target for tag, target in parsed(built[f"{middle.name}.html"]).links if tag == "a"]
    assert links.count(f"{before.name}.html") == links.count(f"{after.name}.html") == 2
    assert {"index.html", "claims.html"} < set(links)
    assert not re.search(">Previous: ", built[f"{COURSE[0].name}.html"] + built["index.html"])
    assert not re.search(">Next: ", built[f"{COURSE[-1].name}.html"])
    for nb in COURSE:
        text = built[f"{nb.name}.html"]
        listed = text.partition('aria-label="On this page"')[2].partition("</nav>")[0]
        prose = [c for c in notebook_files.read(nb.path)["cells"] if c["cell_type"] == "markdown"]
        sections = re.findall("^## ", "\n".join(map(notebook_files.source, prose)), re.MULTILINE)
        assert listed.count("<a ") == len(sections) > 1


@pytest.mark.parametrize("name", LEDGER)
def test_a_claim_stands_with_its_verdict_and_leads_to_its_cell(built, name):
    claim, verdict = LEDGER[name], LEDGER[name].judge(records.saved())
    row = re.search(rf'<tr id="{name}">(.*?)</tr>', built["claims.html"], re.DOTALL)[1]
    plain = html.unescape(re.sub("<[^>]+>", " ", row))
    for words in (claim.sentence, claim.others, verdict.state, verdict.measured):
        assert words in plain
    page, cell = re.search(r'href="([^"#]+)#([^"]+)"', row).groups()
    assert page == f"{claim.notebook}.html"
    assert f'"{name}"' in parsed(built[page]).words[cell].replace("'", '"')


def test_a_claim_that_fails_is_called_so(monkeypatch):
    liar = Claim("liar", "00_start_here", "1 < 0 & more.", lambda r: (False, "1 > 0"), others="a <b> says so")
    monkeypatch.setitem(LEDGER, "liar", liar)
    page, held = site._claims_page({})
    for words in (f"{FAILS}</td><td>1 &gt; 0</td>", "1 &lt; 0 &amp; more.<br>", "a &lt;b&gt; says so"):
        assert words in page
    assert held == f"{len(LEDGER) - 1 - len(NOT_RECORDED)} of {len(LEDGER)} hold, 1 fail"
    monkeypatch.setattr(records, "saved", Records)
    page, held = site._claims_page({})
    assert held.startswith("0 of") and UNTESTABLE in page


def test_a_device_without_records_is_named_without_versions():
    table = display.table_bundle(["", "this machine"], [["device", "NVIDIA L4"]], "The device")
    cell = toys.code("lab.start()")
    cell["outputs"] = [{"output_type": "display_data", "metadata": {}, "data": table}]
    h200 = notebook_files.read(COURSE[0].path)
    assert site._recorded_on({"00_one": toys.notebook(cell)}) == "<li>NVIDIA L4</li>"
    both = site._recorded_on({"00_one": toys.notebook(cell), "01_two": h200})
    assert "<li>NVIDIA L4: 00_one</li>" in both and re.search("NVIDIA H200, .*: 01_two", both)


def test_pages_are_of_a_sane_size(built):
    for nb in COURSE:
        assert len(built[f"{nb.name}.html"]) < 1.6 * nb.path.stat().st_size
    assert len(built["course.css"]) < 20_000


def test_tables_in_the_pages_bring_no_colour_that_a_theme_could_hide(built):
    styles = {style for name, text in built.items() if name.endswith(".html") for style in parsed(text).styles}
    assert any("border-collapse" in style for style in styles)
    grounds = [known["--ground"] for known in themes(built["course.css"]).values()]
    for style in styles:
        assert not re.search(r"(^|;)\s*color:", style)  # the text keeps the page's, which too_faint judges
        for colour in re.findall(r"(?:^|;)\s*background(?:-color)?:([^;]+)", style):
            assert all(contrast(colour, ground) >= 3 for ground in grounds), style


@pytest.mark.parametrize("dark", [False, True])
def test_tables_in_the_pages_of_a_run_are_readable_in_jupyterlabs_themes(tmp_path, dark):
    toys.write(tmp_path / "00_toy.ipynb", toys.notebook(toys.parameters()))
    pages.write_page(tmp_path / "00_toy.ipynb", tmp_path / "page.html", "A toy")
    styles = re.findall(r"<style([^>]*)>(.*?)</style>", (tmp_path / "page.html").read_text("utf-8"), re.DOTALL)
    assert any("dark" in media for media, _ in styles)
    known = variables("".join(css for media, css in styles if dark or "dark" not in media))
    css = "".join(css for _, css in styles)
    text = re.search(r"\.jp-RenderedHTMLCommon table \{[^}]*?[^-]color: ([^;]+);", css)[1]
    rows = re.findall(r"\.jp-RenderedHTMLCommon tbody tr:[^{]*\{\s*background: ([^;]+);", css)
    assert len(rows) == 3  # odd, even, and under the mouse
    for ground in rows:
        under = resolve("var(--jp-layout-color0)", known)
        assert contrast(resolve(text, known), resolve(ground, known), under) >= 4.5, ground


@pytest.mark.parametrize(
    "one, other, ratio", [("#000", "#ffffff", 21), ("#767676", "white", 4.54), ("rgba(0,0,0,0.5)", "#fff", 3.98)]
)
def test_contrast_is_wcags(one, other, ratio):
    assert contrast(one, other) == pytest.approx(ratio, abs=0.03)


# ---- building it -------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path):
    """A course of two notebooks, and their site in `site`."""
    for name in ("00_one", "01_two"):
        cells = [toys.markdown(f"# {name}\n\nHere."), toys.parameters(), toys.code("print(1)", prints="1")]
        toys.write(tmp_path / "notebooks" / f"{name}.ipynb", toys.notebook(*cells, title=name))
    assert attnlab_site(tmp_path) == 0
    return tmp_path


def attnlab_site(folder, *words) -> int:
    return cli.main(["site", "--notebooks", str(folder / "notebooks"), "--out", str(folder / "site"), *words])


def test_a_new_site_takes_the_place_of_the_old_one(toy, capsys):
    before = contents(toy / "site")
    (toy / "notebooks" / "01_two.ipynb").unlink()
    assert attnlab_site(toy) == 0
    assert str(toy / "site" / "index.html") in capsys.readouterr().out
    assert contents(toy / "site").keys() == before.keys() - {"01_two.html"}
    assert sorted(p.name for p in toy.iterdir()) == ["notebooks", "site"]


def test_a_site_of_one_notebook_has_no_dead_link(toy):
    assert attnlab_site(toy, "01") == 0
    assert "00_one.html" not in contents(toy / "site") and faults(contents(toy / "site")) == []


def never_run(path):
    nb = toys.read(path)
    nb["cells"][1]["execution_count"] = None
    path.write_text(notebook_files.dumps(nb))


def no_json(path):
    path.write_text("{")


def no_notebook(path):
    nb = toys.read(path)
    nb["cells"][2]["outputs"] = [{"output_type": "none such"}]
    path.write_text(notebook_files.dumps(nb))


@pytest.mark.parametrize(
    "spoil, words", [(never_run, "never executed"), (no_json, "not JSON"), (no_notebook, "no page could be made")]
)
def test_a_notebook_that_makes_no_page_leaves_the_old_site(toy, capfd, spoil, words):
    before = contents(toy / "site")
    spoil(toy / "notebooks" / "01_two.ipynb")
    capfd.readouterr()
    assert attnlab_site(toy) == 1
    said = capfd.readouterr().err
    assert words in said and "01_two.ipynb" in said and said.count("\n") == 1
    assert contents(toy / "site") == before
    assert sorted(p.name for p in toy.iterdir()) == ["notebooks", "site"]


def test_a_failed_swap_puts_the_old_site_back(toy, monkeypatch):
    before, rename = contents(toy / "site"), pathlib.Path.rename

    def fails_for_new(self, target):
        if self.name == "new":
            raise OSError(28, "No space left on device", str(target))
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fails_for_new)
    assert attnlab_site(toy) == 1
    assert contents(toy / "site") == before


@pytest.mark.parametrize("stranger", ["thesis.txt", ".git", "figures/a.png", "index.html"])
def test_a_folder_with_anything_of_others_is_refused(toy, capsys, stranger):
    path = toy / "site" / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    capsys.readouterr()
    assert attnlab_site(toy) == 2
    said = capsys.readouterr().err
    assert stranger.split("/")[0] in said and "--out DIR" in said and said.count("\n") == 1
    assert path.read_text() == "mine" and (toy / "site" / "00_one.html").exists()


def test_a_file_in_the_way_is_refused_and_an_empty_folder_is_not(toy, capsys):
    (toy / "site").rename(toy / "old")
    (toy / "site").write_text("mine")
    assert attnlab_site(toy) == 2 and "is a file" in capsys.readouterr().err
    (toy / "site").unlink()
    (toy / "site").mkdir()
    assert attnlab_site(toy) == 0 and (toy / "site" / "index.html").exists()
