"""The exercises' checks, one a NAME: `check_NAME(answer)` says not tried yet, right, or wrong with a hint.

Each check runs the reader's function on small cases and sets its results beside the right ones. A file a
notebook; all are reached from here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    _found = vars(importlib.import_module(f"{__name__}.{_module.name}"))
    globals().update({name: value for name, value in _found.items() if name.startswith("check_")})
