"""Validate notebooks: what they have committed against the canonical form, the ledger, and a run by nbval.

A notebook is as committed when its file is canonical and complete, its claims say what the ledger says of the
saved results, nbval finds in a run what it compares, every cell that shows something has an output, and neither
JAX, flax nor TransformerEngine warns that what it uses will go.
"""

import asyncio
import contextlib
import dataclasses
import difflib
import html
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from xml.etree import ElementTree

from attnlab import ledger, notebook_files, records
from attnlab.claims import LEDGER
from attnlab.display import table_bundle
from attnlab.notebook_files import CourseNotebook, NotebookError, code_cells, joined, source

AT_ONCE = 2  # notebooks; two fit on one GPU, and on two cores
CELL_SECONDS, NOTEBOOK_SECONDS = 120, 400
SHOWN = 8  # faults of one notebook in a terminal; its page has them all

RECORDER = pathlib.Path(__file__).with_name("deprecations.py").read_text(encoding="utf-8")  # now: it may be edited
# Deprecations that may be: what the message says, as a pattern, and why the course can do nothing about it.
_TE = "TransformerEngine 2.20 warns of what it does itself; the course's calls are the ones that it documents"
EXCEPTIONS: dict[str, str] = {
    r"^`flax\.traverse_util\.Traversal` will be deprecated": _TE,
    r"^jax\.interpreters\.pxla\.thread_resources is deprecated": _TE,
    r"^Pass mask to fused_attn is deprecated": _TE,
    r"^TransformerEngine logical axes": _TE,
    r"^The Pallas Triton backend is deprecated": "08 says why it uses it, and what follows",
}


@dataclasses.dataclass
class Validation:
    """What was found in one notebook; nothing in `faults` means all is well."""

    name: str
    faults: list[str] = dataclasses.field(default_factory=list)
    cells: list[dict] = dataclasses.field(default_factory=list)  # one a code cell, as notebooks/conftest.py writes them
    seconds: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        red = f"{len(self.faults)} red" if self.faults else "as committed"
        compared = sum(c["compared"] for c in self.cells)
        return f"{self.name}  {red}, {compared} of {len(self.cells)} cells compared, {self.seconds:.0f} s{self.note}"


def main(notebooks: list[CourseNotebook], out="build/validate") -> int:
    """Validate `notebooks` and say what was found; pages of red ones and JUnit files go into the folder `out`.

    Ctrl-C, and an error that is no fault of a notebook, end the runs with their kernels and pass through.

    Returns:
      0, or 1 when one of them is not as committed.
    """
    return asyncio.run(_validate_all(notebooks, pathlib.Path(out)))


async def _validate_all(notebooks: list[CourseNotebook], out: pathlib.Path) -> int:
    gate, done, red, began = asyncio.Semaphore(AT_ONCE), 0, [], time.perf_counter()

    async def one(path):
        nonlocal done
        async with gate:
            found = await _validate(path, out)
        done += 1
        print(f"[{done}/{len(notebooks)}] {found}", flush=True)
        if found.faults:
            red.append(found.name)
            more = len(found.faults) - SHOWN
            lines = found.faults[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
            print("".join(f"  {line}\n" for line in [*lines, f"page: {out / found.name}.html"]), end="", flush=True)

    await asyncio.gather(*(one(nb.path) for nb in notebooks))
    green, seconds = len(notebooks) - len(red), time.perf_counter() - began
    names = f"; red: {', '.join(sorted(red))}" if red else ""
    print(f"{green} of {len(notebooks)} notebooks are as committed ({seconds:.0f} s){names}", flush=True)
    return 1 if red else 0


def validate(path, out) -> Validation:
    """Look at the notebook at `path`, run it by nbval, and say what is not as committed.

    NAME.xml (JUnit) goes into the folder `out`, and NAME.html, a page with each fault, when there are any.
    """
    return asyncio.run(_validate(pathlib.Path(path), pathlib.Path(out)))


async def _validate(path: pathlib.Path, out: pathlib.Path) -> Validation:
    out.mkdir(parents=True, exist_ok=True)
    page, junit, began = out / f"{path.stem}.html", out / f"{path.stem}.xml", time.perf_counter()
    for old in (page, junit):
        old.unlink(missing_ok=True)
    found = Validation(path.stem, notebook_files.check(path))
    try:
        nb = notebook_files.read(path)
        claims = claim_faults(nb, path.stem)
        if claims is None:
            found.note = "; its outputs are of another device than the saved results: claims not looked at"
        found.faults += claims or []
        found.cells, deprecations = await _nbval(path.resolve(), junit.resolve())
        found.faults += _stripped(nb, found.cells) + _not_excepted(nb, deprecations)
    except NotebookError:
        pass  # check says it
    except _NbvalError as e:
        found.faults.append(str(e))
    _write_junit(junit, found)
    found.faults += [_said_of(nb, r) for r in found.cells if r["failed"]]
    found.seconds = time.perf_counter() - began
    if found.faults:
        write_failure_page(path, found.faults, found.cells, page)
    return found


def _write_junit(path: pathlib.Path, found: Validation) -> None:
    """Add what nbval does not look at to its JUnit file, or begin that file."""
    root = ElementTree.parse(path).getroot() if path.exists() else ElementTree.Element("testsuites")
    faults = [re.sub(r"[^\n -\uffff]", "", fault) for fault in found.faults]  # XML takes no control characters
    counts = {"tests": str(len(faults) or 1), "failures": str(len(faults)), "errors": "0", "skipped": "0"}
    suite = ElementTree.SubElement(root, "testsuite", name="what nbval does not look at", **counts)
    for fault in faults or [""]:
        case = ElementTree.SubElement(suite, "testcase", classname=found.name, name=fault[:80] or "all as committed")
        if fault:
            ElementTree.SubElement(case, "failure", message=fault)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


# --- claims: committed tables against the ledger


CLAIMS = r"lab\.(claim|summary)\(([^()]*)\)"
SUMMARY = "What you saw, on "


def claim_faults(nb: dict, name: str) -> list[str] | None:
    """One line a claim whose committed row is not what the ledger says of the saved results.

    None when the notebook's outputs are of another device than the saved results. What its start and its summary
    say of the device must agree: otherwise a word in the start could keep every verdict from being looked at.
    """
    cells = [(n, c) for n, c in enumerate(nb["cells"], 1) if c["cell_type"] == "code"]
    if not any(re.search(CLAIMS, source(c)) for _, c in cells):
        return []
    saved, device = records.saved(), notebook_files.device_of(nb)
    titles = [(n, shown["text/plain"].splitlines()[0]) for n, c in cells for shown in _tables_of(c)]
    if faults := [
        f"cell {n}: is titled {title!r}, and the notebook started on {device or 'no device'}: make regenerate"
        for n, title in titles
        if title.startswith(SUMMARY) and title != f"{SUMMARY}{device}"
    ]:
        return faults
    if not saved or device != saved[0].env.get("device"):
        return None
    return [f"cell {n}: {what}" for n, c in cells for what in _claims_of(c, name, saved, device)]


def _tables_of(cell: dict) -> list[dict]:
    """The tables of claims that a cell shows, each as text by mime type."""
    bundles = [{mime: joined(text) for mime, text in o.get("data", {}).items()} for o in cell["outputs"]]
    return [b for b in bundles if "verdict here" in b.get("text/plain", "")]


def _claims_of(cell: dict, notebook: str, saved, device: str):
    """What is wrong with the claims that a cell shows."""
    wanted = []
    for what, given in re.findall(CLAIMS, source(cell)):
        names = re.findall(r"[\"'](\w+)[\"']", given)
        if what == "summary":
            names = [c.name for c in LEDGER.values() if c.notebook == notebook]
        unknown = [n for n in names if n not in LEDGER]
        if unknown or not names:
            yield f"lab.{what}({given}) names {', '.join(unknown) or 'no claim'}: write names that the ledger has"
            return
        wanted.append(_table(names, saved, f"{SUMMARY}{device}" if what == "summary" else None))
    shown = _tables_of(cell)
    if len(shown) != len(wanted):
        yield f"shows {len(shown)} tables of claims, and its code {len(wanted)}: run it again (make regenerate)"
        return
    for want, have in zip(wanted, shown, strict=True):
        want, have = _plain(want), _plain(have)
        if want != have:
            rows = difflib.ndiff(*([*x["text/html"], *x["text/plain"].splitlines()] for x in (have, want)))
            rows = [row for row in rows if row[0] in "-+"]
            committed, said = (next((r[2:] for r in rows if r[0] == sign), "nothing") for sign in "-+")
            yield f"the committed claim {committed!r} is by the ledger, over the saved results, {said!r}"


def _table(names: list[str], saved, title: str | None) -> dict:
    """The table that `lab.claim` shows on the saved results' own device."""
    body = ledger.rows([LEDGER[name] for name in names], lambda c: c.judge(saved))
    return table_bundle(ledger.HEADERS, body, title=title, aligns=["left"] * len(ledger.HEADERS))


def _plain(bundle: dict) -> dict:
    """A table's bundle with its page as rows of text: how it is drawn is no matter of claims."""
    rows = re.findall(r"<caption.*?</caption>|<tr.*?</tr>", bundle.get("text/html", ""), re.DOTALL)
    rows = [re.sub(r"<[^>]*>", "", row.replace("</td><td", "</td> | <td").replace("<br>", " ")) for row in rows]
    return bundle | {"text/html": [html.unescape(row) for row in rows]}


# --- nbval


class _NbvalError(Exception):
    """nbval came to no result; the message says why."""


async def _nbval(path: pathlib.Path, junit: pathlib.Path) -> tuple[list[dict], list[dict]]:
    """Run nbval on the notebook at `path`, with the conftest.py beside it, and let it write the file `junit`.

    Returns:
      One dictionary a code cell, as notebooks/conftest.py writes them, and the deprecations that
      `attnlab.deprecations` wrote.

    Raises:
      _NbvalError: it ran no cell, took too long, or says something else than its cells.
    """
    if not path.with_name("conftest.py").exists():
        raise _NbvalError(f"{path}: without a conftest.py beside it nbval compares too much: copy the course's there")
    command = [
        sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_SECONDS}",
        "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--color=no", f"--junitxml={junit}", str(path),
    ]  # fmt: skip
    # A kernel that was ended just now may still write there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cells, warned, said = (pathlib.Path(folder) / name for name in ("cells.jsonl", "deprecations.jsonl", "said"))
        startup = pathlib.Path(folder) / "profile_default" / "startup" / "deprecations.py"
        startup.parent.mkdir(parents=True)
        startup.write_text(f"{RECORDER}\nrecord({str(warned)!r})\ndel record, __doc__\n", encoding="utf-8")
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "ATTNLAB_RESULTS"}
        # A profile of our own, so that the reader's does not matter. Two notebooks at once must fit on one GPU.
        env |= {"IPYTHONDIR": folder, "ATTNLAB_NBVAL_OUTPUTS": str(cells), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for _ in range(2):  # no cell ran: another kernel that starts now may have taken its ports
            try:
                async with asyncio.timeout(NOTEBOOK_SECONDS):
                    status = await _run(command, said, env=env, cwd=path.parent)
            except TimeoutError:
                words = f"{path}: nbval was stopped after {NOTEBOOK_SECONDS} s: run the notebook alone"
                raise _NbvalError(words) from None
            if cells.exists():
                break
        results, deprecations = (
            [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else None
            for file in (cells, warned)
        )
        words = " ".join(said.read_text(encoding="utf-8", errors="replace").split())[-600:]
    if not results or (status != 0) != any(r["failed"] for r in results):
        raise _NbvalError(f"{path}: nbval ended with status {status} after {len(results or [])} cells: {words}")
    if deprecations is None:
        raise _NbvalError(f"{path}: its kernel did not watch for deprecations: IPython ran no startup file")
    return results, deprecations


async def _run(command: list[str], said: pathlib.Path, **how) -> int:
    """The exit status of `command`; when this task is cancelled it ends, with all that it started."""
    import psutil

    with said.open("wb") as to:  # no pipe: what a cell left running would hold it open
        # Not asyncio's own: a task that is cancelled while that starts a process loses hold of it.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT, **how)
    try:
        while child.poll() is None:
            await asyncio.sleep(0.05)
        return child.returncode
    finally:
        if child.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                nbval = psutil.Process(child.pid)
                nbval.suspend()  # so that it starts no other kernel now
                for process in [*nbval.children(recursive=True), nbval]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            child.wait()


def _said_of(nb: dict, result: dict) -> str:
    """A red cell in one line."""
    cell = code_cells(nb)[result["cell"]]
    message = re.sub(r"\x1b\[[0-9;]*m", "", result["message"]).strip()
    error = next((f"{o['ename']}: {o['evalue']}" for o in result["outputs"] if o["output_type"] == "error"), "")
    why = re.search(r"pytest plugin exception: (.*)|Cell \d+: (.*)", message)
    why = error or (why and (why[1] or why[2])) or "failed"
    return f"{_at(nb, cell)}: {' '.join(why.split())[:300]}"


def _at(nb: dict, cell: dict) -> str:
    first = source(cell).strip().splitlines()[0]
    return f"cell {nb['cells'].index(cell) + 1} (In [{cell['execution_count']}], {first[:60]})"


def _stripped(nb: dict, results: list[dict]) -> list[str]:
    """Cells that show something now, and have no output at all. Where nbval compares, it says so itself."""
    cells = [code_cells(nb)[r["cell"]] for r in results if not r["failed"] and _everything(r["outputs"])]
    return [
        f"{_at(nb, c)}: shows something, and has no committed output (make regenerate)"
        for c in cells
        if not c["outputs"]
    ]


# --- deprecations


def _not_excepted(nb: dict, deprecations: list[dict]) -> list[str]:
    """One line a deprecation that is no exception, with the cell that led to it."""
    lines = []
    for found in deprecations:
        if any(re.search(pattern, found["message"]) for pattern in EXCEPTIONS):
            continue
        at = next((_at(nb, c) for c in code_cells(nb) if source(c) == found["source"]), "before the first cell")
        words = " ".join(found["message"].split())[:300]
        lines.append(f"{at}: {found['kind']} by {found['by']}, from {found['from']}: {words}")
    return list(dict.fromkeys(lines))


# --- the page of what was found

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}: what is not as committed</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; }}
pre {{ overflow: auto; border: 1px solid #767676; padding: .5rem; white-space: pre-wrap; }}
</style></head>
<body><h1>{name}: what is not as committed</h1>
{body}
</body></html>
"""


def write_failure_page(path, faults: list[str], results: list[dict], page) -> None:
    """Write a page with every fault, and of each failed cell: source, what was expected, what came, the difference."""
    parts = ["<ul>", *(f"<li>{html.escape(fault)}</li>" for fault in faults), "</ul>"]
    failed = [r for r in results if r["failed"]]
    nb = notebook_files.read(path) if failed else {}
    for result in failed:
        cell = code_cells(nb)[result["cell"]]
        expected, got = _everything(cell["outputs"]), _everything(result["outputs"])
        changes = difflib.unified_diff(expected.splitlines(), got.splitlines(), "expected", "got", lineterm="", n=1)
        texts = {"Source": source(cell), "Expected": expected, "Got": got, "Difference": "\n".join(changes)}
        texts["What nbval says"] = re.sub(r"\x1b\[[0-9;]*m", "", result["message"])
        parts.append(f"<h2>Cell {nb['cells'].index(cell) + 1}</h2>")
        parts += [f"<h3>{title}</h3><pre>{html.escape(text)}</pre>" for title, text in texts.items()]
    page.write_text(_PAGE.format(name=pathlib.Path(path).stem, body="\n".join(parts)), encoding="utf-8")


def _everything(outputs: list[dict]) -> str:
    """Outputs as text, with the kind of each; pictures by their size only, stderr and cleared progress not at all."""
    texts = []
    for o in outputs:
        if o["output_type"] == "error":
            texts.append(f"[error] {o['ename']}: {o['evalue']}")
        elif o["output_type"] == "stream" and o["name"] != "stderr":
            texts.append(f"[{o['name']}]\n{joined(o['text'])}")
        for mime, value in o.get("data", {}).items():
            text = joined(value) if mime.startswith("text/") else f"{len(value)} long"
            texts.append(f"[{mime}]\n{text}")
    return "\n".join(texts)
