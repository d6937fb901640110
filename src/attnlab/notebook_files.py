"""Notebooks as files: which ones there are, what they say about themselves, and one canonical form.

The canonical form makes differences between two versions differences of content. A course notebook
is registered nowhere: its file name gives its place, its metadata title, minutes and needs.

    python -m attnlab.notebook_files check notebooks     # one line a fault, exit status 1
    python -m attnlab.notebook_files format notebooks    # repairs what needs no run
"""

import argparse
import ast
import copy
import dataclasses
import hashlib
import json
import pathlib
import re
import sys

FILE_NAME = re.compile(r"\d\d_[a-z0-9_]+")
CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Absolute paths of the machine that made the outputs; they mean nothing elsewhere and change every diff.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|tmp|opt|mnt|work|workspace|Users)/[^\s'\"<>:,)]*|[^\s'\"<>:,(]*/site-packages/"
)

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Without a Python version, which would change with every machine.
LANGUAGE_INFO = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "pygments_lexer": "ipython3",
}
CELL_METADATA = {"tags", "jupyter"}
CELL_FIELDS = {
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
    "markdown": {"attachments", "cell_type", "id", "metadata", "source"},
    "raw": {"attachments", "cell_type", "id", "metadata", "source"},
}


class NotebookError(ValueError):
    """A file that is no course notebook; the message names it and says what to do."""


@dataclasses.dataclass(frozen=True)
class CourseNotebook:
    """What a notebook says about itself. `parameters` maps a name to the source of its default."""

    path: pathlib.Path
    name: str  # "02_sdpa"
    number: str  # "02"
    title: str
    minutes: int
    needs: str
    parameters: dict[str, str]


def course_notebooks(folder) -> list[CourseNotebook]:
    """The course's notebooks in `folder`, in their order: files named NN_name.ipynb, others are left out.

    Raises:
      NotebookError: no such folder, no notebook in it, two with one number, or one that can't be read.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise NotebookError(f"no folder {folder}: give the course's notebooks with --notebooks DIR")
    found = [describe(p) for p in sorted(folder.glob("*.ipynb")) if FILE_NAME.fullmatch(p.stem)]
    if not found:
        raise NotebookError(f"no notebook named like 00_start_here.ipynb in {folder}: give --notebooks DIR")
    for one, other in zip(found, found[1:], strict=False):
        if one.number == other.number:
            raise NotebookError(f"{one.path.name} and {other.path.name} have one number: rename one of them")
    return found


def describe(path) -> CourseNotebook:
    """What the notebook at `path` says about itself. Raises `NotebookError`."""
    path = pathlib.Path(path)
    nb = read(path)
    about = nb.get("metadata", {}).get("attnlab") or {}
    return CourseNotebook(
        path=path,
        name=path.stem,
        number=path.stem.split("_")[0],
        title=str(about.get("title", path.stem)),
        minutes=int(about.get("minutes", 0)),
        needs=str(about.get("needs", "")),
        parameters=parameters(nb, path),
    )


def parameters(nb: dict, path="the notebook") -> dict[str, str]:
    """Name and source of the default of every assignment in the cell tagged `parameters`."""
    cells = [c for c in nb["cells"] if c["cell_type"] == "code" and "parameters" in tags(c)]
    try:
        tree = ast.parse(source(cells[0])) if cells else ast.Module([], [])
    except SyntaxError as e:
        raise NotebookError(f"{path}: the parameters cell is not Python: {e.msg} (line {e.lineno})") from e
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "value", None) is not None:
            found |= {t.id: ast.unparse(node.value) for t in targets if isinstance(t, ast.Name)}
    return found


def read(path) -> dict:
    """The notebook at `path` as plain dictionaries. Raises `NotebookError`."""
    try:
        nb = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise NotebookError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        raise NotebookError(f"{path}: not a notebook, the file is not JSON: {e}") from e
    cells = nb.get("cells") if isinstance(nb, dict) else None
    known = isinstance(cells, list) and all(isinstance(c, dict) and c.get("cell_type") in CELL_FIELDS for c in cells)
    if not known:
        raise NotebookError(f"{path}: not a notebook of format 4: open it in JupyterLab and save it")
    return nb


def source(cell: dict) -> str:
    """The text of a cell."""
    return joined(cell.get("source", ""))


def tags(cell: dict) -> list[str]:
    """The tags of a cell."""
    return cell.get("metadata", {}).get("tags", [])


def joined(text) -> str:
    """Text that a notebook holds either as one string or as a list of lines."""
    return "".join(text) if isinstance(text, list) else text


def dumps(nb: dict) -> str:
    """The bytes that JupyterLab would write, with a newline at the end."""
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def tidy(nb: dict) -> tuple[dict, list[tuple[int | None, str]]]:
    """A canonical copy of `nb`, and what had to change: (cell number from 1 or None, what was wrong).

    Nothing here needs a run: no output is invented, and only stderr and timing are dropped.
    """
    nb = copy.deepcopy(nb)
    changed = []
    wanted = copy.deepcopy({"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO})
    if "attnlab" in nb.get("metadata", {}):
        wanted["attnlab"] = nb["metadata"]["attnlab"]
    if nb.get("metadata") != wanted:
        found = nb.get("metadata", {})
        names = sorted(k for k in found.keys() | wanted.keys() if found.get(k) != wanted.get(k))
        changed.append((None, f"notebook metadata is not canonical: {', '.join(names)}"))
        nb["metadata"] = wanted
    if (nb.get("nbformat"), nb.get("nbformat_minor")) != (4, 5):
        changed.append((None, f"format {nb.get('nbformat')}.{nb.get('nbformat_minor')}, wanted 4.5"))
        nb["nbformat"], nb["nbformat_minor"] = 4, 5

    kept, seen, count = [], set(), 0
    for number, cell in enumerate(nb["cells"], 1):
        text = source(cell)
        if "injected-parameters" in tags(cell) or "papermill-error-cell-tag" in tags(cell):
            changed.append((number, "a cell that papermill put in"))
            continue
        if not text.strip():
            changed.append((number, "an empty cell"))
            continue
        for what in _tidy_cell(cell, text, seen):
            changed.append((number, what))
        if cell["cell_type"] == "code" and cell["execution_count"] is not None:
            count += 1
            counted = [cell] + [o for o in cell["outputs"] if o.get("output_type") == "execute_result"]
            if any(c.get("execution_count") != count for c in counted):
                changed.append((number, f"execution count {cell['execution_count']}, wanted {count}"))
                for c in counted:
                    c["execution_count"] = count
        kept.append(cell)
    nb["cells"] = kept
    return nb, changed


def _tidy_cell(cell: dict, text: str, seen: set) -> list[str]:
    changed = []
    stripped = text.strip("\n")
    if stripped != text:
        changed.append("empty lines around the source")
    cell["source"] = stripped.splitlines(True)
    extra = sorted(cell.keys() - CELL_FIELDS[cell["cell_type"]])
    if extra:
        changed.append(f"unknown fields: {', '.join(extra)}")
        for key in extra:
            del cell[key]
    metadata = {k: v for k, v in cell.get("metadata", {}).items() if k in CELL_METADATA and v}
    if metadata != cell.get("metadata"):
        names = sorted(k for k in cell.get("metadata", {}) if k not in metadata)
        changed.append(f"metadata that is not content: {', '.join(names) or 'missing'}")
        cell["metadata"] = metadata
    name = cell.get("id")
    if not isinstance(name, str) or not CELL_ID.fullmatch(name) or name in seen:
        changed.append("no cell id" if not name else f"cell id {name!r} is taken or not allowed")
        # From the text, so that formatting twice gives one id.
        n = 0
        while (name := hashlib.sha256(f"{n}{stripped}".encode()).hexdigest()[:8]) in seen:
            n += 1
        cell["id"] = name
    seen.add(cell["id"])
    if cell["cell_type"] == "code":
        cell.setdefault("execution_count", None)
        outputs = [o for o in cell.get("outputs", []) if o.get("name") != "stderr"]
        if len(outputs) != len(cell.get("outputs", [])):
            changed.append("output on stderr")
        full = [o for o in outputs if o.get("output_type") != "display_data" or o.get("data")]
        if len(full) != len(outputs):
            changed.append("an output with nothing in it")  # what a cleared progress line leaves
        outputs = full
        cell["outputs"] = _merged(outputs)
        if len(cell["outputs"]) != len(outputs):
            changed.append("one stream in several pieces")
        for o in cell["outputs"]:
            if o.get("output_type") == "stream":
                o["text"] = joined(o.get("text", "")).splitlines(True)
            for mime, value in o.get("data", {}).items():
                if mime.startswith("text/") or mime in ("image/svg+xml", "application/javascript"):
                    o["data"][mime] = joined(value).splitlines(True)
                elif not mime.endswith("json"):
                    o["data"][mime] = joined(value)
    return changed


def _merged(outputs: list[dict]) -> list[dict]:
    merged = []
    for o in outputs:
        last = merged[-1] if merged else {}
        if o.get("output_type") == "stream" == last.get("output_type") and o.get("name") == last.get("name"):
            last["text"] = joined(last["text"]) + joined(o["text"])
        else:
            merged.append(o)
    return merged


def needs_people(nb: dict) -> list[tuple[int | None, str]]:
    """Faults of a tidy notebook that no rewriting of the file repairs."""
    found = []
    code = [(n, c) for n, c in enumerate(nb["cells"], 1) if c["cell_type"] == "code"]
    tagged = [n for n, c in code if "parameters" in tags(c)]
    if len(tagged) != 1:
        where = f" (cells {', '.join(map(str, tagged))})" if tagged else ""
        found.append((None, f"{len(tagged)} cells tagged parameters{where}, wanted one"))
    if all(c["execution_count"] is None for _, c in code):
        found.append((None, "was never run: its outputs are missing"))
    else:
        unrun = [str(n) for n, c in code if c["execution_count"] is None]
        if unrun:
            found.append((None, f"not run, so without an execution count: cell {', '.join(unrun)}"))
    for n, cell in code:
        for o in cell["outputs"]:
            if o.get("output_type") == "error" and "raises-exception" not in tags(cell):
                found.append((n, f"ends in an error: {o.get('ename')}: {o.get('evalue')}"))
        found += [(n, f"an output names a path of the machine: {p}") for p in _machine_paths(cell)]
    import nbformat  # here, because reading the course needs none of it

    try:
        nbformat.validate(nbformat.from_dict(copy.deepcopy(nb)))
    except nbformat.ValidationError as e:
        found.append((None, f"is not valid nbformat: {str(e).splitlines()[0]}"))
    return found


def _machine_paths(cell: dict) -> list[str]:
    texts = []
    for o in cell["outputs"]:
        texts += [o.get("text", ""), o.get("traceback", ""), o.get("evalue", "")]
        texts += [v for mime, v in o.get("data", {}).items() if mime.startswith("text/")]
    found = (m.group() for text in texts for m in MACHINE_PATH.finditer(joined(text)))
    return list(dict.fromkeys(found))


def files(paths) -> list[pathlib.Path]:
    """The notebooks at `paths`: files as given, and those directly in folders. Raises `NotebookError`."""
    found = []
    for path in map(pathlib.Path, paths):
        inside = sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
        if not inside or not inside[0].exists():
            raise NotebookError(f"no notebook at {path}")
        found += inside
    return found


def check(path) -> list[str]:
    """One line a fault of the notebook at `path`: file, cell number from 1, what is wrong."""
    try:
        nb = read(path)
        tidied, changed = tidy(nb)
    except NotebookError as e:
        return [str(e)]
    if not changed and dumps(tidied) != pathlib.Path(path).read_text(encoding="utf-8"):
        changed = [(None, "the JSON is not laid out canonically")]
    faults = [(n, f"{what}; `make format` repairs it") for n, what in changed] + needs_people(tidied)
    faults.sort(key=lambda f: f[0] or 0)
    return [f"{path}: {what}" if n is None else f"{path}: cell {n}: {what}" for n, what in faults]


def format(path) -> bool:
    """Write the notebook at `path` in canonical form. True when the file changed."""
    path = pathlib.Path(path)
    text = dumps(tidy(read(path))[0])
    if text == path.read_text(encoding="utf-8"):
        return False
    beside = path.with_name(path.name + ".tmp")  # so that an interrupted write loses nothing
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return True


def main(argv=None) -> int:
    """`check` or `format` the notebooks given; the exit status is 1 when faults are left."""
    parser = argparse.ArgumentParser("python -m attnlab.notebook_files", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["check", "format"])
    parser.add_argument("path", nargs="+", help="notebooks, or folders of notebooks")
    args = parser.parse_args(argv)
    try:
        paths = files(args.path)
        if args.action == "format":
            for path in paths:
                if format(path):
                    print(f"{path}: formatted")
    except NotebookError as e:
        print(f"attnlab: {e}", file=sys.stderr)
        return 1
    faults = [line for path in paths for line in check(path)]
    print("".join(line + "\n" for line in faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
