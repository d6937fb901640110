"""What JAX, flax and TransformerEngine say will go, seen from inside a notebook's kernel.

`attnlab.validation` puts the text of this file into a startup file of IPython: it runs before JAX is imported, so
it imports nothing of the course, and leaves no name behind.
"""


def record(path):
    """Write what JAX, jaxlib, flax and TransformerEngine deprecate in this process to a file, as JSON lines.

    No filter is changed, so that cells show what they always show; a filter hides nothing from it either.

    Seen is what goes through `warnings.warn`, `warnings.warn_explicit` and the decorator `deprecated` (PEP 702).
    Not seen: warnings of C++ code, of subprocesses, and of a deprecated class that only gets a subclass.
    """
    import json
    import sys
    import warnings

    open(path, "w").close()  # says that it runs
    cell = {"source": ""}

    def name(frame):
        return frame.f_globals.get("__name__", "?")

    def place(frame):
        return f"{name(frame)}, line {frame.f_lineno}"

    def note(message, category, by=None):
        """Note a warning that the caller's caller issues; `by` names its module where that is another."""
        kind = type(message) if isinstance(message, Warning) else category
        if not kind or not issubclass(kind, (DeprecationWarning, PendingDeprecationWarning, FutureWarning)):
            return
        frames = [sys._getframe(2)]
        while frames[-1].f_back:
            frames.append(frames[-1].f_back)
        if name(frames[0]) in ("warnings", "_py_warnings", "typing_extensions"):
            # A wrapper by `deprecated`: what it wraps, in `arg`, says whose warning it is.
            by = getattr(frames[0].f_locals.get("arg"), "__module__", None)
            frames = frames[1:] or frames
        by = by or place(frames[0])
        if by.split(",")[0].split(".")[0] in ("jax", "jaxlib", "flax", "transformer_engine"):
            ours = next((f for f in frames if name(f).split(".")[0] in ("attnlab", "__main__")), frames[0])
            line = {"kind": kind.__name__, "by": by, "from": place(ours), "message": str(message)}
            with open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps(line | cell) + "\n")

    issued, issued_explicitly = warnings.warn, warnings.warn_explicit

    def warn(message, category=None, stacklevel=1, *args, **kwargs):
        note(message, category)
        return issued(message, category, stacklevel + 1, *args, **kwargs)

    def warn_explicit(message, category, filename, lineno, module=None, *args, **kwargs):
        note(message, category, module)
        return issued_explicitly(message, category, filename, lineno, module, *args, **kwargs)

    warnings.warn, warnings.warn_explicit = warn, warn_explicit
    get_ipython().events.register("pre_run_cell", lambda info: cell.update(source=info.raw_cell))  # noqa: F821
