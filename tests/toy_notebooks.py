"""Small notebooks for tests of what handles notebooks: no JAX in them, so that they run in a second."""

import json
import pathlib

from attnlab import notebook_files


def markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text: str, *tags: str, prints: str = "") -> dict:
    """A code cell that was run, and printed `prints`."""
    outputs = [{"output_type": "stream", "name": "stdout", "text": prints + "\n"}] if prints else []
    return {
        "cell_type": "code",
        "execution_count": 0,
        "metadata": {"tags": list(tags)} if tags else {},
        "outputs": outputs,
        "source": text,
    }


def parameters(text: str = "repeats = 5\nname = 'x'") -> dict:
    return code(text, "parameters")


def notebook(*cells: dict, title: str = "A toy") -> dict:
    """A canonical notebook of these cells."""
    about = {"title": title, "minutes": 5, "needs": "nothing"}
    nb = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"attnlab": about}, "cells": list(cells)}
    return notebook_files.tidy(nb)


def write(path, nb: dict) -> pathlib.Path:
    """Write a notebook in canonical form."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebook_files.dumps(nb), encoding="utf-8")
    return path


def read(path) -> dict:
    return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))


def course_notebook(name: str = "00_toy") -> dict:
    """A notebook with everything that the course's notebooks must have."""
    exercises = []
    for exercise in ("one", "two", "three"):
        exercises += [
            code(f"{exercise}_{name[3:]} = ...", f"exercise:{name}_{exercise}"),
            code(
                f"lab.check_{name}_{exercise}({exercise}_{name[3:]})",
                prints=f"{name}_{exercise}: not tried yet",
            ),
        ]
    return notebook(
        markdown("# A toy\n\nAfter it you can play."),
        parameters(),
        code(f'import attnlab as lab\n\nlab.start("{name}")', "nbval-ignore-output", prints="NVIDIA H200"),
        markdown("## What is a shape?"),
        code(f"{name[3:]} = (4, 128)\n{name[3:]}", prints="(4, 128)"),
        code(f"len({name[3:]})", prints="2 axes"),
        code(f"{name[3:]}[0] == 4", prints="True"),
        code(f"print({name[3:]}, 1.5)", "nbval-ignore-output", prints="1.5 ms"),
        markdown("## Exercises"),
        *exercises,
        markdown("## What you saw"),
    )
