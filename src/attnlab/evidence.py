"""What the compiled program contains: custom calls, matrix products, dtypes, temporaries.

Read from the optimised HLO, the program that XLA hands to the device. The kernels that then really ran
are `attnlab.timing`'s business.
"""

import collections
import dataclasses
import functools
import json
import math
import re

import jax

from attnlab import device as _device
from attnlab.records import LOG, Finding, Shape

ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
            "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.$-]+) \(.*-> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.$-]+) = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.$-]+)|(?:called_computations|branch_computations)=\{([^}]*)\}"
)
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_ARRAY = re.compile(r"\b([a-z]+[0-9]+\w*|pred)\[([\d,]*)\]")
_MATMUL_TARGET = re.compile(r"gemm|matmul|fmha|attention|convolution|cublas|mosaic|triton", re.I)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      text: the optimised HLO.
      custom_calls: how often each custom-call target runs, such as `__cudnn$fmhaSoftmax`.
      matmuls: how many matrix products run: dots, and custom calls that are one.
      arrays: (dtype, dimensions) of every instruction's result outside fusions: what is written to memory.
      temp_bytes: temporaries that the program allocates, or None if the backend does not say.
    """

    text: str
    custom_calls: dict
    matmuls: int
    arrays: tuple
    temp_bytes: int | None

    @property
    def largest(self) -> tuple[str, tuple[int, ...], int]:
        """The largest array that is written to memory: dtype, dimensions, bytes."""
        sized = [(dtype, dims, ITEMSIZE.get(dtype, 4) * math.prod(dims)) for dtype, dims in self.arrays]
        return max(sized, key=lambda a: a[2])

    def writes(self, *dims: int, dtype: str | None = None) -> bool:
        """Whether an array with these last dimensions (any dtype, or `dtype` in HLO's spelling) is written to memory.

        Axes of length 1 in front or between do not matter.
        """
        want = [d for d in dims if d != 1]
        return any(
            [d for d in found if d != 1][-len(want) :] == want and dtype in (None, name) for name, found in self.arrays
        )

    def calls(self, part: str) -> int:
        """How many custom calls run whose target contains `part`, such as "fmha"."""
        return sum(n for target, n in self.custom_calls.items() if part in target)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The text without what depends on where it was written (module name, metadata) or on autotuning."""
        lines = [line for line in self.text.splitlines() if not _HEADER.match(line)]
        return "\n".join(_without_tuning(re.sub(r", metadata=\{[^}]*\}", "", line)) for line in lines)


_HEADER = re.compile(r"^(HloModule|FileNames|FunctionNames|FileLocations|StackFrames|\d+ )")
_TUNED = {"algorithm", "selected_algorithm", "triton_gemm_config", "block_level_fusion_config", "operation_queue_id",
          "wait_on_operation_queues", "force_earliest_schedule", "reification_cost"}  # fmt: skip


def _without_tuning(line: str) -> str:
    """One line of HLO without what the compiler chose by trial in its backend_config; the rest of that stays."""
    start = line.find("backend_config={")
    if start < 0:
        return line

    def pruned(value):
        if isinstance(value, dict):
            return {key: pruned(v) for key, v in sorted(value.items()) if key not in _TUNED}
        return [pruned(v) for v in value] if isinstance(value, list) else value

    start += len("backend_config=")
    config, end = json.JSONDecoder().raw_decode(line[start:])
    return line[:start] + json.dumps(pruned(config)) + line[start + end :]


def program(fn, *args) -> Program:
    """Compile `fn(*args)` with jit for the current device and read the result.

    Raises whatever `fn` or the compiler raises: cuDNN's refusals come here, in the library's words.
    """
    return of_compiled(jax.jit(fn).lower(*args).compile())


def of_compiled(compiled) -> Program:
    """The `Program` of what `jax.jit(fn).lower(*args).compile()` returned."""
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    return parse(text, getattr(memory, "temp_size_in_bytes", None))


def parse(text: str, temp_bytes: int | None = None) -> Program:
    """Read optimised HLO text. Instructions of a computation count once for each time that it is called."""
    bodies, entry, fused, current = collections.defaultdict(list), None, set(), None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head[2]
            entry = current if head[1] else entry
        elif current and (found := _INSTRUCTION.match(line)):
            called = [n.strip().lstrip("%") for a, b in _CALLED.findall(line) for n in (a or b).split(",") if n.strip()]
            target = _TARGET.search(line)
            bodies[current].append((found[3], target and target[1], found[2], called))
            if found[3] == "fusion":
                fused.update(called)

    @functools.cache
    def count(name):
        calls, matmuls = collections.Counter(), 0
        for opcode, target, _, called in bodies[name]:
            if target:
                calls[target] += 1
            matmuls += opcode in ("dot", "convolution") or bool(target and _MATMUL_TARGET.search(target))
            for inner in called:
                more, products = count(inner)
                calls.update(more)
                matmuls += products
        return calls, matmuls

    calls, matmuls = count(entry) if entry else (collections.Counter(), 0)
    arrays = {
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for name, body in bodies.items()
        if name not in fused
        for opcode, _, shape, _ in body
        if opcode not in ("parameter", "constant", "get-tuple-element", "tuple", "bitcast")
        for dtype, dims in _ARRAY.findall(shape)
    }
    return Program(text, dict(calls), matmuls, tuple(sorted(arrays)), temp_bytes)


def observe(name: str, value, *, label: str = "", shape=None, dtype: str = "", mask: str = "full"):
    """Record a `Finding`, a fact that is not a time, and return its value.

    Raises:
      TypeError: a value that is no number, text, bool or None, or a shape that is no `Shape`.
    """
    value = value.item() if getattr(value, "shape", None) == () else value  # an array of one number
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise TypeError(f"{name!r} must be a number, text, bool or None, got {type(value).__name__}")
    if shape is not None and not isinstance(shape, Shape):
        raise TypeError(f"shape must be a lab.Shape, got {shape!r}: write lab.Shape.of(q, k)")
    dtype = str(dtype)
    LOG.add(
        Finding(
            name=name,
            value=value,
            label=label,
            shape=shape,
            dtype=dtype,
            mask=mask,
            env=_device.environment(),
        )
    )
    return value
