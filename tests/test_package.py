"""The package is one flow: no module imports from what stands to its right."""

import ast
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "attnlab"
FLOW = [
    "files", "records", "device", "features", "inputs", "attention", "flash", "evidence", "timing", "nsight", "display",
    "plots", "comparison", "limits", "sweeps", "tables", "curves", "claims", "ledger", "exercises", "checks", "session",
    "clock", "notebook_files", "pages", "course", "changes", "regenerate", "deprecations", "validation", "site",
    "doctor", "preclass", "bench", "cli",
]  # fmt: skip


def imported(path: pathlib.Path) -> set[str]:
    """The attnlab modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "attnlab":
            rest = node.module.split(".")[1:]
            found.update(rest[:1] or (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("attnlab."))
    return found


@pytest.mark.parametrize("module", FLOW)
def test_nothing_imports_from_its_right(module):
    later = FLOW[FLOW.index(module) :]
    path = SOURCE / module
    for file in path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
        # A folder's files may import each other; that is no arrow between modules.
        assert not imported(file) & set(later) - ({module} if path.is_dir() else set()), (
            f"{file} imports from its right"
        )


def test_every_module_has_its_place():
    modules = {p.stem for p in [*SOURCE.glob("*.py"), *(p.parent for p in SOURCE.glob("*/__init__.py"))]}
    assert modules - {"__init__", "__main__"} == set(FLOW)
