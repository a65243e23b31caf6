"""What this machine is, what to expect of it, what to change: data, which the command line prints.

Nothing here needs a GPU, makes a CUDA context in this process, or raises because something is missing: what is not
known is None. CuPy is tried in a child process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from framepipe import __version__
from framepipe.device._packages import install_line, newest_cuda
from framepipe.units import format_bytes

DECODERS = ("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mjpeg", "prores", "ffv1", "gif", "png")
ENCODERS = (
    "libx264",
    "libx265",
    "libsvtav1",
    "libvpx-vp9",
    "h264_nvenc",
    "hevc_nvenc",
    "mpeg4",
    "mjpeg",
    "ffv1",
    "aac",
)
_CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy")
_TOO_OLD = "cudaErrorInsufficientDriver"
"""What CUDA says of a driver that is too old, and where there is none."""
_NO_DRIVER = "there is no NVIDIA driver"
_NO_LIMIT = 1 << 60
"""cgroup version 1 writes a number near 2**63 for "no limit"."""


def examine() -> dict[str, Any]:
    """Everything that is known of this machine, as plain JSON values, and ``advice``."""
    gpu = _gpu()
    found: dict[str, Any] = {
        "framepipe": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "os": platform.platform(),
        "wsl": "microsoft" in platform.release().lower(),
        "cpu": _cpu(),
        "memory": _memory(),
        "video": _video(),
        "gpu": gpu,
        "cupy": _cupy(gpu),
        "optional": {name: _version(name) for name in ("pyarrow", "nvidia-ml-py")},
    }
    found["device"], found["why"] = _expected_device(found)
    found["advice"] = list(_advice(found))
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- processor and memory --


def _cpu() -> dict[str, Any]:
    import psutil

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": _cpu_model(),
        "machine": platform.machine(),
        "logical": psutil.cpu_count(),
        "physical": psutil.cpu_count(logical=False),
        "usable": usable,
        "quota": _cpu_quota(),
    }


def _cpu_model() -> str | None:
    named = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return named[1] if named else platform.processor() or None


def _cpu_quota() -> float | None:
    """CPUs that a container may use in the long run, from cgroup version 2."""
    words = (_cgroup("cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _memory() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    limit = _cgroup("memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes") or ""
    nbytes = int(limit) if limit.isdigit() else _NO_LIMIT
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "cgroup_limit_bytes": nbytes if nbytes < min(_NO_LIMIT, memory.total) else None,
        "memlock_bytes": _memlock(),
    }


def _memlock() -> int | str | None:
    """How much a process may page-lock by itself (CUDA is not bound by it): bytes, or ``unlimited``."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _cgroup(name: str) -> str | None:
    """A value of this process's cgroup, or of the nearest one above that has it."""
    own = re.search(r"^0::(/.*)$", _read("/proc/self/cgroup") or "", re.MULTILINE)
    if own is None:
        return None
    at = Path("/sys/fs/cgroup") / own[1].lstrip("/")
    for folder in (at, *at.parents):
        if folder == Path("/sys/fs"):
            return None
        if text := _read(str(folder / name)):
            return text
    return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# -- FFmpeg --


def _video() -> dict[str, Any]:
    try:
        import av
        from av.codec.hwaccel import hwdevices_available
    except ImportError as error:
        return {"pyav": None, "error": str(error)}
    return {
        "pyav": av.__version__,
        "ffmpeg": getattr(av, "ffmpeg_version_info", None),
        "libraries": {name: ".".join(map(str, number)) for name, number in sorted(av.library_versions.items())},
        "decoders": [name for name in DECODERS if _has_codec(name, "r")],
        "encoders": [name for name in ENCODERS if _has_codec(name, "w")],
        "hardware": sorted(hwdevices_available()),
    }


def _has_codec(name: str, mode: str) -> bool:
    from av import Codec

    try:
        Codec(name, mode)  # type: ignore[arg-type]
    except ValueError:  # av.codec.codec.UnknownCodecError
        return False
    return True


# -- GPU --


def _gpu() -> dict[str, Any]:
    """The NVIDIA driver and its GPUs as nvidia-smi tells them; it makes no CUDA context."""
    fields = ["name", "memory.total", "driver_version", "compute_cap", "pci.bus_id"]
    if sys.platform == "win32":
        fields.append("driver_model.current")
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    devices = [_gpu_row(row) for row in (text or "").splitlines() if row.count(",") >= 4]
    driver = devices[0].pop("driver") if devices else _kernel_driver()
    for device in devices:
        device.pop("driver", None)
    return {"driver": driver, "devices": devices}


def _gpu_row(row: str) -> dict[str, Any]:
    name, mib, driver, capability, bus, *model = (part.strip() for part in row.split(","))
    return {
        "name": name,
        "memory_bytes": int(mib) << 20 if mib.isdigit() else None,
        "driver": driver,
        "compute_capability": capability,
        "pci_bus_id": bus,
        "driver_model": model[0] if model else None,
    }


def _kernel_driver() -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _read("/proc/driver/nvidia/version") or "")
    return found[1] if found else None


def _output(*command: str, timeout_s: float = 15) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


_TRY_CUPY = r"""
import json, sys
try:
    import cupy
    code = '#include <cuda_fp16.h>\nextern "C" __global__ void twice(float* x) { x[0] *= __half2float(__half(2.f)); }'
    kernel = cupy.RawKernel(code, "twice")
    x = cupy.ones(1, cupy.float32)
    kernel((1,), (1,), (x,))
    works, error = float(x[0]) == 2, None
    version = cupy.cuda.runtime.runtimeGetVersion()
except BaseException as failed:
    works, error, version = False, f"{type(failed).__name__}: {failed}", None
json.dump({"works": works, "error": error, "cuda": version}, sys.stdout)
"""


def _cupy(gpu: Mapping[str, Any]) -> dict[str, Any]:
    """Which CuPy packages are installed, and whether one compiles and runs a kernel, tried in a child process."""
    packages = {name: version for name in _CUPY if (version := _version(name))}
    out: dict[str, Any] = {"packages": packages, "works": None, "error": None, "cuda": None}
    if packages:
        text = _output(sys.executable, "-c", _TRY_CUPY, timeout_s=120) or ""
        try:
            out.update(json.loads(text))
        except ValueError:
            out.update(works=False, error="the attempt crashed or took longer than two minutes")
        if not gpu["driver"] and any(sign in str(out["error"]) for sign in (_TOO_OLD, "libcuda.so", "nvcuda.dll")):
            out["error"] = _NO_DRIVER
    return out


# -- what follows from it --


def _expected_device(found: Mapping[str, Any]) -> tuple[str, str]:
    """What ``device: auto`` will be as far as can be told from outside, and why."""
    if found["cupy"]["works"]:
        return "cuda", "CuPy compiles and runs a kernel"
    if not found["gpu"]["devices"]:
        return "cpu", "there is no NVIDIA GPU" if not found["gpu"]["driver"] else "the NVIDIA driver shows no GPU"
    if not found["cupy"]["packages"]:
        return "cpu", "there is a GPU, but CuPy is not installed"
    return "cpu", f"CuPy does not work here: {found['cupy']['error']}"


def _advice(found: Mapping[str, Any]) -> Iterator[str]:
    gpu, cupy, memory, cpu = found["gpu"], found["cupy"], found["memory"], found["cpu"]
    if found["video"]["pyav"] is None:
        yield f"PyAV cannot be imported ({found['video']['error']}): pip install av"
    if gpu["devices"] and not cupy["packages"]:
        yield f"for the GPU: {_cupy_line(gpu)}"
    if len(cupy["packages"]) > 1:
        yield f"several CuPy packages hide each other: {_cupy_line(gpu, cupy)}"
    elif cupy["packages"] and not cupy["works"]:
        yield from _cupy_trouble(cupy, gpu, found["wsl"])
    if found["wsl"] and gpu["devices"]:
        yield "WSL 2 page-locks only about 1 GB in all, for every process: keep slots and batch small"
    if any(device["driver_model"] == "WDDM" for device in gpu["devices"]):
        yield "under WDDM page-locked memory counts against the GPU's budget: prefer the pooled staging strategy"
    if memory["cgroup_limit_bytes"]:
        yield f"this container may use {format_bytes(memory['cgroup_limit_bytes'])}: page-locked memory counts too"
    usable = cpu["usable"] or cpu["logical"] or 1
    if cpu["quota"] and cpu["quota"] < usable:
        yield f"this container gets {cpu['quota']:g} CPUs of {usable}: set threads: {max(1, int(cpu['quota']))}"
    if found["optional"]["pyarrow"] is None:
        yield 'for the parquet sink: pip install "framepipe[parquet]"'


def _cupy_line(gpu: Mapping[str, Any], cupy: Mapping[str, Any] | None = None) -> str:
    """What to do for a CuPy that suits the driver and every GPU."""
    cuda = newest_cuda(gpu["driver"])
    old = [device for device in gpu["devices"] if _capability(device) < (7, 5)]
    if cuda is not None and old:
        cuda = min(cuda, 12)  # CUDA 13 compiles for nothing before Turing, whose compute capability is 7.5
    return install_line(cuda, list(cupy["packages"]) if cupy else ())


def _capability(device: Mapping[str, Any]) -> tuple[int, ...]:
    numbers = str(device["compute_capability"]).split(".")
    return tuple(int(number) for number in numbers) if all(number.isdigit() for number in numbers) else (0,)


def _cupy_trouble(cupy: Mapping[str, Any], gpu: Mapping[str, Any], wsl: bool) -> Iterator[str]:
    if cupy["error"] == _NO_DRIVER:
        where = "in Windows, and none in Linux" if wsl else "on this machine"
        yield f"CuPy is installed, but {_NO_DRIVER}: install one {where}, or go on with the CPU"
        return
    if gpu["driver"] and not gpu["devices"]:
        yield f"the NVIDIA driver {gpu['driver']} shows no GPU: see nvidia-smi; a container must be given its GPUs"
        return
    error = str(cupy["error"])
    yield f"CuPy is installed but does not work ({error})"
    cache, packages = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~"), sysconfig.get_path("platlib")
    if not cache.isascii():
        yield f"CuPy cannot compile under {cache!r}: set CUPY_CACHE_DIR to a folder with plain ASCII letters"
    if not packages.isascii():
        yield f"CuPy may not compile from {packages!r}: make the environment in a folder with plain ASCII letters"
    if _TOO_OLD in error:
        yield f"CuPy is for a newer driver than {gpu['driver']}: {_cupy_line(gpu, cupy)}"
    elif "nvrtc" in error.lower() or "include" in error.lower():
        yield f"the CUDA compiler or its headers are missing, or do not know this GPU: {_cupy_line(gpu, cupy)}"
