"""What the hardware is: name, compute capability, memory, and the ceilings nobody beats."""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import jax


class DeviceNotFound(RuntimeError):
    """The device that was asked for by name is not there."""


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Published rates of a device. `tflops` by dtype (dense, 10^12 FLOP/s), `gbps` in 10^9 bytes/s, `l2` in bytes."""

    tflops: dict
    gbps: float | None
    l2: int
    source: str

    def bound_ms(self, flops: float, nbytes: float, dtype: str) -> float | None:
        """The shortest possible time in ms: max(FLOPs / peak, max(0, bytes − L2) / bandwidth).

        Inputs that fit in the L2 cache need no DRAM, so their bytes do not bound the time.
        None if no rate is known for `dtype`.
        """
        peak = self.tflops.get(dtype)
        if peak is None:
            return None
        arithmetic = flops / (peak * 1e9)
        traffic = max(0.0, nbytes - self.l2) / (self.gbps * 1e6) if self.gbps else 0.0
        return max(arithmetic, traffic)


def _published(f16, tf32, gbps, l2_mb, source, bf16=True, fp8=None):
    # A float32 matmul runs in TF32 where the card has it, so TF32 is what bounds float32 there.
    rates = {"float16": f16, "float32": tf32} | ({"bfloat16": f16} if bf16 else {})
    rates |= {"float8_e4m3fn": fp8, "float8_e5m2": fp8} if fp8 else {}
    return Ceilings(rates, gbps, l2_mb * 2**20, source)


# Dense rates from NVIDIA's datasheets. The keys are device_kind as JAX reports it.
CEILINGS = {
    "Tesla T4": _published(65, 8.1, 320, 4, "T4 datasheet", bf16=False),
    "NVIDIA A10": _published(125, 62.5, 600, 6, "A10 datasheet"),
    "NVIDIA A100-SXM4-40GB": _published(312, 156, 1555, 40, "A100 datasheet"),
    "NVIDIA A100-SXM4-80GB": _published(312, 156, 2039, 40, "A100 datasheet"),
    "NVIDIA L4": _published(121, 60.5, 300, 48, "L4 datasheet", fp8=242),
    "NVIDIA L40S": _published(362, 183, 864, 96, "L40S datasheet", fp8=733),
    "NVIDIA H100 PCIe": _published(756, 378, 2000, 50, "H100 datasheet", fp8=1513),
    "NVIDIA H100 80GB HBM3": _published(989, 495, 3350, 50, "H100 SXM datasheet", fp8=1979),
    "NVIDIA H200": _published(989, 495, 4800, 50, "H200 SXM datasheet", fp8=1979),
    "NVIDIA B200": _published(2250, 1125, 8000, 126, "B200 datasheet", fp8=4500),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """One device. `kind` is "gpu" or "cpu"; `memory` is in bytes; `cudnn` is an int such as 91900 for 9.19.0."""

    name: str
    kind: str
    compute_capability: tuple[int, int] | None = None
    memory: int | None = None
    driver: str | None = None
    cudnn: int | None = None
    ceilings: Ceilings | None = None
    live: bool = False  # the device of this process, whose libraries can be asked

    @property
    def capability(self) -> str:
        """Compute capability as text: "9.0", or "none" on a CPU."""
        return ".".join(map(str, self.compute_capability)) if self.compute_capability else "none"


def nvidia_smi(*arguments: str) -> list[str] | None:
    """The lines that `nvidia-smi ARGUMENTS` prints, or None where it is absent or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines() if done.returncode == 0 else None


def gpu_names() -> list[str]:
    """The NVIDIA GPUs that a new process would compute on, by nvidia-smi. JAX is not asked: it would take memory."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0].lower() not in ("", "cuda", "gpu"):
        return []
    return nvidia_smi("--query-gpu=name", "--format=csv,noheader") or []


def _query_gpu(field: str) -> str | None:
    """One field of the GPU that JAX computes on; None where nvidia-smi does not tell ("[N/A]" on some boards)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    lines = nvidia_smi(*(["-i", first] if first else []), f"--query-gpu={field}", "--format=csv,noheader,nounits")
    value = lines[0].strip() if lines else ""
    return value if value and not value.startswith("[") else None


def _cudnn_version() -> int | None:
    # JAX has no public name for this; where the private one moves, the version is simply not shown.
    try:
        from jax._src.lib import cuda_versions

        return int(cuda_versions.cudnn_get_version())
    except Exception:
        return None


def _l2_bytes(published: int) -> int:
    # The driver knows better than the datasheet. 38 is CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE.
    try:
        value = ctypes.c_int()
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), 38, 0)
        return published if failed else max(value.value, published)
    except OSError:
        return published


def _cpu() -> Device:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            name = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = os.cpu_count() or 1
    # Generous on purpose: two 512-bit fused multiply-adds a cycle at 6 GHz, more than any core does.
    # It serves to expose clocks that did not wait, so it must never refuse an honest time.
    loose = Ceilings(
        {"float32": cores * 64 * 6.0 / 1e3}, None, 0, f"{cores} cores × 64 FLOP/cycle × 6 GHz, a loose limit"
    )
    return Device(name, "cpu", memory=_host_memory(), ceilings=loose, live=True)


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


@functools.cache
def current() -> Device:
    """The device that JAX computes on by default.

    Raises:
      DeviceNotFound: `JAX_PLATFORMS` names a device that is not there.
    """
    try:
        first = jax.devices()[0]
    except Exception as e:
        asked = os.environ.get("JAX_PLATFORMS", "")
        last = str(e).strip().splitlines()[-1][:200] if str(e).strip() else "this JAX has no such backend"
        raise DeviceNotFound(
            f"JAX found no device for JAX_PLATFORMS={asked!r} ({last}). "
            "Unset JAX_PLATFORMS to take what is there, set JAX_PLATFORMS=cpu, or run `make doctor`."
        ) from e
    if first.platform != "gpu":
        return _cpu()
    major, minor = str(first.compute_capability).split(".")
    total = _query_gpu("memory.total")
    published = CEILINGS.get(first.device_kind)
    if published:
        published = dataclasses.replace(published, l2=_l2_bytes(published.l2))
    return Device(
        name=first.device_kind,
        kind="gpu",
        compute_capability=(int(major), int(minor)),
        memory=int(float(total)) * 2**20 if total else (first.memory_stats() or {}).get("bytes_limit"),
        driver=_query_gpu("driver_version"),
        cudnn=_cudnn_version(),
        ceilings=published,
        live=True,
    )


def free_memory() -> int | None:
    """Bytes that a new array can take on the current device, or None if nobody tells."""
    if current().kind == "gpu":
        stats = jax.devices()[0].memory_stats() or {}
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    try:
        with open("/proc/meminfo", encoding="utf-8") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process that holds GPU memory: its id, name, bytes, and whether it is this process."""

    pid: int
    name: str
    bytes: int
    mine: bool


def memory_holders() -> list[Holder] | None:
    """Who holds the GPU's memory, by nvidia-smi. None where it can't be asked; in a container the list may be short."""
    lines = nvidia_smi("--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits")
    if lines is None:
        return None
    holders = []
    for line in lines:
        pid, rest = line.split(",", 1)
        name, used = (part.strip() for part in rest.rsplit(",", 1))  # a name may hold commas
        size = int(used) * 2**20 if used.isdigit() else 0
        holders.append(Holder(int(pid), os.path.basename(name), size, int(pid) == os.getpid()))
    return holders


def own_memory() -> int:
    """Bytes of GPU memory that this process holds for arrays, used or not."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("pool_bytes", stats.get("bytes_in_use", 0))


def gpu_memory() -> tuple[int, int] | None:
    """Bytes used by everybody, and bytes in all, on the first GPU; None without nvidia-smi."""
    used, total = _query_gpu("memory.used"), _query_gpu("memory.total")
    return (int(used) * 2**20, int(total) * 2**20) if used and total else None


CONTEXT = 2**30  # what a process holds beside its arrays: the CUDA context and the libraries, generously


def held_by_others() -> tuple[int, int] | None:
    """Bytes of the first GPU's memory that other processes hold, and bytes in all; None where nobody tells."""
    memory = gpu_memory() if current().kind == "gpu" else None
    if not memory:
        return None
    # Not the sum of nvidia-smi's list: in a container it is short, or knows this process by another number.
    return max(0, memory[0] - own_memory() - CONTEXT), memory[1]


def finds_late_library() -> tuple[bool, bool]:
    """Put a library into a new folder, name the folder in os.environ["LD_LIBRARY_PATH"], and look for the library.

    Returns:
      Whether this process found it, and whether a new process did.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as f:
            # Any library will do; the C library's mathematics is in every Python.
            library = next(line.split()[-1] for line in f if "libm.so" in line or "libm-" in line)
    except (OSError, StopIteration):
        raise RuntimeError("no library to try with: /proc/self/maps names no libm, is this Linux with glibc?") from None
    before = os.environ.get("LD_LIBRARY_PATH")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(library, os.path.join(folder, "libfound_late.so"))
        os.environ["LD_LIBRARY_PATH"] = folder
        try:
            look = "import ctypes; ctypes.CDLL('libfound_late.so')"
            child = subprocess.run([sys.executable, "-c", look], capture_output=True).returncode == 0
            ctypes.CDLL("libfound_late.so")
            return True, child
        except OSError:
            return False, child
        finally:
            os.environ.pop("LD_LIBRARY_PATH")
            os.environ.update({"LD_LIBRARY_PATH": before} if before is not None else {})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cudnn_text(version: int | None) -> str | None:
    """91900 as "9.19.0"; None stays None."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else None


@functools.cache
def environment() -> dict:
    """What every record carries: device, driver, and the versions of Python, JAX, cuDNN and TransformerEngine."""
    here = current()
    return {
        "device": here.name,
        "kind": here.kind,
        "capability": here.capability,
        "driver": here.driver,
        "jax": jax.__version__,
        "cudnn": cudnn_text(here.cudnn),
        "te": _version("transformer-engine") or _version("transformer_engine"),
        "python": platform.python_version(),
    }


def own_cudnn() -> str | None:
    """The folder of the cuDNN that came with JAX's pip packages, or None."""
    wheel = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    folders = [os.path.join(folder, "lib") for folder in wheel.submodule_search_locations] if wheel else []
    return folders[0] if folders else None


def cudnn_copies() -> list[tuple[str, str, bool]]:
    """The cuDNN libraries in reach: (where, file name, loaded by this process). More than one loaded is trouble.

    "JAX's own" came with JAX's pip packages; the others are the system's or on LD_LIBRARY_PATH.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as f:
            loaded = {line.split()[-1] for line in f if "/libcudnn.so" in line}
    except OSError:
        loaded = set()
    reach = set(loaded)
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        reach.update(str(p) for p in pathlib.Path(folder).glob("libcudnn.so.*"))
    if folder := own_cudnn():
        reach.update(str(p) for p in pathlib.Path(folder).glob("libcudnn.so.*"))
    try:
        cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        cache = ""
    reach.update(line.split("=> ")[1].strip() for line in cache.splitlines() if "libcudnn.so." in line)
    real = {os.path.realpath(p) for p in loaded}
    files = {os.path.realpath(p) for p in reach}
    return sorted(
        ("JAX's own" if f"nvidia{os.sep}cudnn" in p else "the system's", os.path.basename(p), p in real) for p in files
    )
