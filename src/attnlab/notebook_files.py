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

from attnlab import files

FILE_NAME = re.compile(r"\d\d_[a-z0-9_]+")
# Absolute paths of the machine that made the outputs; they mean nothing elsewhere and change every diff.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])/(?:home|root|tmp|opt|mnt|work|workspace|Users)/[^\s'\"<>:,)]*|[^\s'\"<>:,(]*/site-packages/"
)

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# Without a Python version, which would change with every machine.
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
CELL_METADATA = {"tags", "jupyter"}
CELL_FIELDS = {"attachments", "cell_type", "execution_count", "id", "metadata", "outputs", "source"}
BY_PAPERMILL = {"injected-parameters", "papermill-error-cell-tag"}


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
      NotebookError: no notebook there, or one that can't be read.
    """
    paths = [p for p in sorted(pathlib.Path(folder).glob("*.ipynb")) if FILE_NAME.fullmatch(p.stem)]
    if not paths:
        raise NotebookError(f"no notebook named like 00_start_here.ipynb in {folder}: give --notebooks DIR")
    return [describe(p) for p in paths]


def describe(path) -> CourseNotebook:
    """What the notebook at `path` says about itself. Raises `NotebookError`."""
    path = pathlib.Path(path)
    nb = read(path)
    about = nb["metadata"].get("attnlab", {})
    return CourseNotebook(
        path=path,
        name=path.stem,
        number=path.stem.split("_")[0],
        title=about.get("title", path.stem),
        minutes=about.get("minutes", 0),
        needs=about.get("needs", ""),
        parameters=parameters(nb),
    )


def parameters(nb: dict) -> dict[str, str]:
    """Name and source of the default of every assignment in the cell tagged `parameters`."""
    text = "\n".join(source(c) for c in code_cells(nb) if "parameters" in tags(c))
    try:
        assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    except SyntaxError:  # the notebook fails in this cell when it runs, and the others go on
        return {}
    return {t.id: ast.unparse(node.value) for node in assigned for t in node.targets if isinstance(t, ast.Name)}


def read(path) -> dict:
    """The notebook at `path` as plain dictionaries. Raises `NotebookError`."""
    try:
        nb = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise NotebookError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        raise NotebookError(f"{path}: not a notebook, the file is not JSON: {e}") from e
    if not isinstance(nb, dict) or nb.get("nbformat") != 4:
        raise NotebookError(f"{path}: not a notebook of format 4: open it in JupyterLab and save it")
    cells = nb.get("cells")
    if not isinstance(nb.get("metadata"), dict) or not isinstance(cells, list) or not all(map(_is_cell, cells)):
        raise NotebookError(f"{path}: a notebook whose cells or metadata are missing or broken: take an older copy")
    return nb


def _is_cell(cell) -> bool:
    kinds = {"markdown": set(), "raw": set(), "code": {"outputs", "execution_count"}}
    if not isinstance(cell, dict) or cell.get("cell_type") not in kinds:
        return False
    return {"source", "metadata"} | kinds[cell["cell_type"]] <= set(cell) and isinstance(cell["metadata"], dict)


def code_cells(nb: dict) -> list[dict]:
    """The code cells, in their order."""
    return [c for c in nb["cells"] if c["cell_type"] == "code"]


def source(cell: dict) -> str:
    """The text of a cell."""
    return joined(cell["source"])


def tags(cell: dict) -> list[str]:
    """The tags of a cell."""
    return cell["metadata"].get("tags", [])


def device_of(nb: dict) -> str | None:
    """What the notebook's own table of the device, by `attnlab.start`, says that it ran on; None without one."""
    for output in (o for cell in code_cells(nb) for o in cell["outputs"]):
        text = joined(output.get("data", {}).get("text/plain", ""))
        if text.startswith("The device\n") and (named := re.search(r"^device +(.+)$", text, re.MULTILINE)):
            return named[1].strip()
    return None


def joined(text) -> str:
    """Text that a notebook holds either as one string or as a list of lines."""
    return "".join(text) if isinstance(text, list) else text


def dumps(nb: dict) -> str:
    """The bytes that JupyterLab would write, with a newline at the end."""
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


# --- the canonical form


def tidy(nb: dict) -> dict:
    """A canonical copy of `nb`. No output is invented; warnings on stderr and times are dropped."""
    metadata = {"kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO}
    metadata |= {key: value for key, value in nb["metadata"].items() if key == "attnlab"}
    cells = [kept for _, kept in _tidied(nb) if kept]
    return {"cells": cells, "metadata": copy.deepcopy(metadata), "nbformat": 4, "nbformat_minor": 5}


def _tidied(nb: dict):
    """Each cell with its canonical form, {} where that is not to have the cell."""
    taken, count = set(), 0
    for cell in nb["cells"]:
        text = source(cell).strip("\n")
        if not text.strip() or BY_PAPERMILL & set(tags(cell)):
            yield cell, {}
            continue
        kept = {key: value for key, value in cell.items() if key in CELL_FIELDS}
        kept["source"] = text.splitlines(True)
        kept["metadata"] = {key: value for key, value in cell["metadata"].items() if key in CELL_METADATA and value}
        n = 0
        while kept.get("id", "") in {"", *taken}:  # from the text, so that formatting twice gives one id
            kept["id"] = hashlib.sha256(f"{n}{text}".encode()).hexdigest()[:8]
            n += 1
        taken.add(kept["id"])
        if cell["cell_type"] == "code":
            ran = cell["execution_count"] is not None
            count += ran
            kept["execution_count"] = count if ran else None
            kept["outputs"] = _tidy_outputs(cell["outputs"], kept["execution_count"])
        yield cell, kept


def _tidy_outputs(outputs: list[dict], count: int | None) -> list[dict]:
    kept = []
    for o in copy.deepcopy(outputs):
        cleared = o["output_type"] == "display_data" and not o["data"]  # what a progress line leaves
        if cleared or o.get("name") == "stderr":
            continue
        if o["output_type"] == "execute_result":
            o["execution_count"] = count
        if o["output_type"] == "stream":
            before = kept.pop()["text"] if kept and kept[-1]["output_type"] == "stream" else []
            o["text"] = (joined(before) + joined(o["text"])).splitlines(True)
        for mime, value in o.get("data", {}).items():
            if mime.startswith("text/") or mime == "image/svg+xml":
                o["data"][mime] = joined(value).splitlines(True)
        kept.append(o)
    return kept


def for_format(nb: dict) -> list[tuple[int | None, str]]:
    """What `format` would change: (cell number from 1 or None, what is not canonical)."""
    found = []
    whole = [b["metadata"] | {"nbformat_minor": b["nbformat_minor"]} for b in (nb, tidy(nb))]
    for number, (given, wanted) in enumerate([whole, *_tidied(nb)]):
        names = sorted(key for key in given.keys() | wanted.keys() if given.get(key) != wanted.get(key))
        if not wanted:
            found.append((number, "empty, or put in by papermill"))
        elif names:
            found.append((number or None, f"not canonical: {', '.join(names)}"))
    return found


def for_people(nb: dict) -> list[tuple[int | None, str]]:
    """Faults that no rewriting of the file repairs."""
    found = []
    code = [(n, c) for n, c in enumerate(nb["cells"], 1) if c["cell_type"] == "code"]
    tagged = [n for n, c in code if "parameters" in tags(c)]
    if len(tagged) != 1:
        found.append((None, f"{len(tagged)} cells tagged parameters, wanted one"))
    unrun = [n for n, c in code if c["execution_count"] is None]
    if len(unrun) == len(code):
        found.append((None, "was never run: its outputs are missing"))
    else:
        found += [(n, "not run, so without an execution count") for n in unrun]
    for n, cell in code:
        for o in cell["outputs"]:
            if o["output_type"] == "error" and "raises-exception" not in tags(cell):
                found.append((n, f"ends in an error: {o['ename']}: {o['evalue']}"))
        found += [(n, f"an output names a path of the machine: {p}") for p in _machine_paths(cell)]
    return found


def _machine_paths(cell: dict) -> list[str]:
    texts = []
    for o in cell["outputs"]:
        texts += [o.get("text", ""), o.get("traceback", ""), o.get("evalue", "")]
        texts += [v for mime, v in o.get("data", {}).items() if mime.startswith("text/")]
    return list(dict.fromkeys(m.group() for text in texts for m in MACHINE_PATH.finditer(joined(text))))


def check(path) -> list[str]:
    """One line a fault of the notebook at `path`: file, cell number from 1, what is wrong."""
    try:
        nb = read(path)
    except NotebookError as e:
        return [str(e)]
    changed = for_format(nb)
    if not changed and dumps(nb) != pathlib.Path(path).read_text(encoding="utf-8"):
        changed = [(None, "the JSON is not laid out canonically")]
    faults = [(n, f"{what}; `make format` repairs it") for n, what in changed] + for_people(nb)
    faults.sort(key=lambda f: f[0] or 0)
    return [f"{path}: {what}" if n is None else f"{path}: cell {n}: {what}" for n, what in faults]


def format(path) -> bool:
    """Write the notebook at `path` in canonical form. True when the file changed."""
    path = pathlib.Path(path)
    text = dumps(tidy(read(path)))
    changed = text != path.read_text(encoding="utf-8")
    if changed:
        files.write_all({path: text})
    return changed


def main(argv=None) -> int:
    """`check` or `format` the notebooks given; the exit status is 1 when faults are left."""
    parser = argparse.ArgumentParser("python -m attnlab.notebook_files", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["check", "format"])
    parser.add_argument("path", nargs="+", type=pathlib.Path, help="notebooks, or folders of notebooks")
    args = parser.parse_args(argv)
    paths = [p for given in args.path for p in (sorted(given.glob("*.ipynb")) if given.is_dir() else [given])]
    faults = []
    for path in paths:
        try:
            if args.action == "format" and format(path):
                print(f"{path}: formatted")
        except NotebookError:
            pass  # check says it
        faults += check(path)
    print("".join(line + "\n" for line in faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
