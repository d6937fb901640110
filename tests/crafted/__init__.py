"""Records and answers made up for the tests, a file a notebook.

CRAFTED: claim → (records with which it holds, several with which it fails).
MISTAKES: exercise → plausible wrong answers, beyond the one in tests/wrong_answers/.
"""

import importlib
import pkgutil

from attnlab.records import Finding, Shape, Timing

DEFAULT = Shape.square(4, 128, 8, 64)
LONG = Shape.square(2, 8192, 16, 128)


def fact(name, value, label="", **fields):
    return Finding(name=name, value=value, label=label, **fields)


def row(label, ms, **fields):
    fields = {**dict(p20=ms, p80=ms, samples=5, clock="cupti", wall_ms=0.08, compile_s=1.0, dtype="bfloat16"), **fields}
    return Timing(label=label, ms=ms, **fields)


def temporaries(sizes: dict, label="naive", weights=None, written=True):
    """Temporaries by length, and the weights' bytes beside them."""
    out = [fact("temporaries", size, label, shape=Shape.square(2, T, 8, 64)) for T, size in sizes.items()]
    for T in weights or ():
        out.append(fact("weight bytes", weights[T], "weights", shape=Shape.square(2, T, 8, 64)))
        out.append(fact("T×S array written", written, label, shape=Shape.square(2, T, 8, 64)))
    return out


def gathered(name: str) -> dict:
    """The dict called `name` of every notebook's file, in one."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        found |= getattr(importlib.import_module(f"{__name__}.{module.name}"), name)
    return found
