"""FlashAttention written by hand: the kernels of notebooks 08 and 09.

Names are loaded when they are first used: Pallas and its backends take longer to import than all the rest.
"""

import importlib

_HOME = {"flash_attention": "attention", "hopper_attention": "hopper"}
_MODULES = {"attention", "backward", "forward", "hopper", "tiles"}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"attnlab.flash has no {name!r}: its names are {', '.join(__all__)}")
