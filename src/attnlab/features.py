"""What can run here, and for each thing that can't, why, and what to do about it.

The answers come from the compute capability and from the libraries themselves, never from the device's name.
"""

import dataclasses
import warnings

from attnlab import device as _device


@dataclasses.dataclass(frozen=True)
class Feature:
    """`ok` says whether it runs here, `reason` why, `todo` what to do about a no ("" if nothing is to be done)."""

    name: str
    ok: bool
    reason: str
    todo: str = ""


@dataclasses.dataclass(frozen=True)
class Rule:
    """A feature that a compute capability decides."""

    name: str
    needs: tuple[int, int]
    what: str  # the first architecture that has it
    source: str
    cudnn: bool = False  # also needs cuDNN in the process
    until: tuple[int, int] = (99, 0)  # the newest that has it


RULES = {
    "tf32_matmul": Rule("TF32 matrix units for float32", (8, 0), "Ampere", "CUDA programming guide"),
    "bf16_matmul": Rule("bfloat16 matrix units", (8, 0), "Ampere", "CUDA programming guide"),
    "cudnn_attention": Rule(
        "cuDNN attention, head dim up to 128", (8, 0), "Ampere", "cuDNN support matrix", cudnn=True
    ),
    "cudnn_head_dim_256": Rule("cuDNN attention, head dim up to 256", (9, 0), "Hopper", "JAX's own check", cudnn=True),
    "fp8_matmul": Rule("FP8 matrix products", (8, 9), "Ada", "CUDA programming guide"),
    "fp8_attention": Rule("FP8 attention in cuDNN", (9, 0), "Hopper", "cuDNN support matrix", cudnn=True),
    "pallas_triton": Rule("Pallas kernels, compiled through Triton", (8, 0), "Ampere", "Pallas documentation"),
    "wgmma": Rule("warpgroup matrix products (wgmma)", (9, 0), "Hopper", "PTX ISA: sm_90a only", until=(9, 0)),
    "mxfp8_matmul": Rule("MXFP8 and NVFP4 matrix products", (10, 0), "Blackwell", "CUDA programming guide"),
}


def _by_capability(rule: Rule, d: _device.Device) -> Feature:
    need = ".".join(map(str, rule.needs))
    if d.kind != "gpu":
        return Feature(rule.name, False, "no NVIDIA GPU here", "run on a GPU machine, or read the saved rows")
    if d.compute_capability < rule.needs:
        why = f"compute capability {d.capability}, and it needs {need} ({rule.what}) or newer"
        return Feature(rule.name, False, why, f"nothing on this card: use one of capability {need} or newer")
    if d.compute_capability > rule.until:
        why = f"compute capability {d.capability}, and only {rule.what} ({need}) has it"
        return Feature(rule.name, False, why, f"nothing on this card: use one of capability {need}")
    if rule.cudnn and not d.cudnn:
        return Feature(rule.name, False, "JAX finds no cuDNN", "install jax[cuda12] or jax[cuda13]: `make run` does")
    version = f", cuDNN {_device.cudnn_text(d.cudnn)}" if rule.cudnn else ""
    return Feature(rule.name, True, f"compute capability {d.capability} (needs {need}, {rule.source}){version}")


def _gpu(d: _device.Device) -> Feature:
    name = "NVIDIA GPU"
    if d.kind == "gpu":
        return Feature(name, True, f"{d.name}, driver {d.driver or 'unknown'}")
    if d.live and _device.nvidia_smi("-L"):
        return Feature(
            name,
            False,
            "nvidia-smi sees a GPU but JAX does not use it",
            "unset JAX_PLATFORMS; delete .venv, `make run`",
        )
    return Feature(name, False, "JAX runs on the CPU and nvidia-smi finds nothing", "the course runs; sizes are small")


def _ceilings(d: _device.Device) -> Feature:
    name = "published ceilings"
    if d.ceilings:
        return Feature(name, True, d.ceilings.source)
    return Feature(
        name, False, f"{d.name!r} is not in attnlab.device.CEILINGS: times have no bound", "add its datasheet"
    )


def _cupti(d: _device.Device) -> Feature:
    name = "CUPTI, the device clock"
    todo = "times fall back to chained calls; see NVIDIA's page on ERR_NVGPUCTRPERM, or close the other profiler"
    if d.kind != "gpu":
        return Feature(name, False, "no NVIDIA GPU here", "nothing: on a CPU the host clock is right")
    if not d.live:
        return Feature(name, False, "not asked: not this process's device")
    try:
        import jax.numpy as jnp
        from jax.experimental.mosaic.gpu import profiler

        _, ms = profiler.measure(lambda x: x + 1)(jnp.ones(8))
    except Exception as e:
        words = " ".join(str(e).split())[:120]
        return Feature(name, False, f"{type(e).__name__}{': ' if words else ''}{words}", todo)
    return Feature(name, True, "counted one kernel") if ms else Feature(name, False, "it reported no kernel", todo)


def _transformer_engine(d: _device.Device) -> Feature:
    name = "TransformerEngine for JAX"
    if not d.live:
        return Feature(name, False, "not asked: not this process's device")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that its PyTorch half is missing, which nobody needs here
            import transformer_engine.jax as te
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] == "transformer_engine":
            return Feature(
                name, False, "not installed", "`make run EXTRAS=te`, or NVIDIA's JAX container, which has it"
            )
        return Feature(name, False, f"its import fails: {e}", "install what is missing")
    except Exception as e:
        first = str(e).strip().splitlines()[0][:160] if str(e).strip() else ""
        todo = "two cuDNNs in one process do this: unset LD_LIBRARY_PATH, or point it at JAX's own cuDNN"
        return Feature(name, False, f"its import fails: {type(e).__name__}: {first}", todo)
    return Feature(name, True, f"version {getattr(te, '__version__', None) or _device.environment()['te']}")


OTHERS = {"gpu": _gpu, "ceilings": _ceilings, "cupti": _cupti, "transformer_engine": _transformer_engine}


def feature(key: str, d: _device.Device | None = None) -> Feature:
    """One feature on `d` (default: the device of this process). Raises `KeyError` naming the known keys."""
    d = d or _device.current()
    if key in RULES:
        return _by_capability(RULES[key], d)
    if key not in OTHERS:
        raise KeyError(f"unknown feature {key!r}: known are {', '.join([*OTHERS, *RULES])}")
    return OTHERS[key](d)


def features(d: _device.Device | None = None) -> dict[str, Feature]:
    """Every feature of the course by key, on `d` (default: the device of this process)."""
    d = d or _device.current()
    libraries = ["cupti", "transformer_engine"] if d.live else []  # what this process has says nothing of another card
    return {key: feature(key, d) for key in ["gpu", *RULES, "ceilings", *libraries]}


def has(key: str, d: _device.Device | None = None) -> bool:
    """Whether the feature `key` runs here. Raises as `feature`."""
    return feature(key, d).ok
