"""attnlab: measure attention, prove what ran, and check every claim. The helper package of the course.

    import attnlab as lab
    lab.start("01_naive_attention")

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

import importlib

__version__ = "0.1.0"

# Public name → the module that defines it. No name may be a module's: importing that module would shadow it.
_HOME = {
    "start": "session",
    "Shape": "records", "Timing": "records", "Finding": "records", "Records": "records",
    "saved": "records", "log": "records",
    "current": "device", "environment": "device", "memory_holders": "device", "gpu_memory": "device",
    "has": "features",
    "qkv": "inputs",
    "naive_attention": "attention", "variant": "attention", "reference": "attention", "relative_error": "attention",
    "reference_gradients": "attention", "error_by_head": "attention", "sampled_rows": "attention",
    "flops": "attention", "min_bytes": "attention", "weight_bytes": "attention", "TOLERANCE": "attention",
    "flash_attention": "flash", "hopper_attention": "flash",
    "program": "evidence", "observe": "evidence",
    "benchmark": "timing", "check_time": "timing", "work_of": "timing", "ImpossibleTime": "timing",
    "eager_kernels": "timing",
    "compare": "comparison", "measure": "comparison", "refusal": "comparison",
    "longest": "limits",
    "sweep": "sweeps", "crossover": "sweeps",
    "block_tree": "display", "show_table": "display", "show_bars": "display", "Progress": "display",
    "format_ms": "display", "format_bytes": "display", "format_number": "display",
    "show_features": "tables", "show_timings": "tables", "show_times": "tables", "show_kernels": "tables",
    "show_findings": "tables", "show_grid": "tables",
    "show_sweep": "curves", "show_lines": "curves", "show_ladder": "curves", "show_roofline": "curves",
    "heatmap": "plots", "lines": "plots", "four_steps": "plots",
    "claim": "ledger", "summary": "ledger",
    "predict": "exercises",
}  # fmt: skip

_MODULES = {
    "device",
    "evidence",
    "features",
    "flash",
    "nsight",
    "timing",
}  # what notebooks reach as lab.device and so on

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(f"attnlab.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"attnlab.{name}")
    elif name.startswith("check_"):
        value = getattr(importlib.import_module("attnlab.checks"), name)
    else:
        raise AttributeError(f"attnlab has no {name!r}: its names are {', '.join(__all__)}")
    globals()[name] = value
    return value
