"""CuPy: which packages there are, and whether one compiles and runs a kernel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

from framepipe import hardware
from framepipe.device._packages import install_line, newest_cuda

CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "cupy")
_TOO_OLD = "cudaErrorInsufficientDriver"
"""What CUDA says of a driver that is too old, and where there is none."""
NO_DRIVER = "there is no NVIDIA driver"

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


def version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cupy(driver: str | None) -> dict[str, Any]:
    """``packages`` that are installed; whether CuPy ``works``, its ``error`` and its ``cuda``, from a child process."""
    packages = {name: known for name in CUPY if (known := version(name))}
    out: dict[str, Any] = {"packages": packages, "works": None, "error": None, "cuda": None}
    if packages:
        # -P: the working folder is not looked at for modules, whatever lies there.
        text = hardware.ask(sys.executable, "-P", "-c", _TRY_CUPY, timeout_s=120).text or ""
        try:
            out.update(json.loads(text))
        except ValueError:
            out.update(works=False, error="the attempt crashed or took longer than two minutes")
        if not driver and any(sign in str(out["error"]) for sign in (_TOO_OLD, "libcuda.so", "nvcuda.dll")):
            out["error"] = NO_DRIVER
    return out


def expected_device(found: Mapping[str, Any]) -> tuple[str, str]:
    """What ``device: auto`` will be as far as can be told from outside, and why."""
    if found["cupy"]["works"]:
        return "cuda", "CuPy compiles and runs a kernel"
    if not found["gpu"]["devices"]:
        return "cpu", "there is no NVIDIA GPU" if not found["gpu"]["driver"] else "the NVIDIA driver shows no GPU"
    if not found["cupy"]["packages"]:
        return "cpu", "there is a GPU, but CuPy is not installed"
    return "cpu", f"CuPy does not work here: {found['cupy']['error']}"


def advice(found: Mapping[str, Any]) -> Iterator[str]:
    """What to do for a CuPy that works; nothing where there is none to be had, or it does."""
    gpu, known = found["gpu"], found["cupy"]
    if gpu["devices"] and not known["packages"]:
        yield f"for the GPU: {_line(gpu)}"
    if len(known["packages"]) > 1:
        yield f"several CuPy packages hide each other: {_line(gpu, known)}"
    elif known["packages"] and not known["works"]:
        yield from _trouble(known, gpu, found["wsl2"])


def _line(gpu: Mapping[str, Any], known: Mapping[str, Any] | None = None) -> str:
    """What to do for a CuPy that suits the driver and every GPU."""
    cuda = newest_cuda(gpu["driver"])
    old = [device for device in gpu["devices"] if _capability(device) < (7, 5)]
    if cuda is not None and old:
        cuda = min(cuda, 12)  # CUDA 13 compiles for nothing before Turing, whose compute capability is 7.5
    return install_line(cuda, list(known["packages"]) if known else ())


def _capability(device: Mapping[str, Any]) -> tuple[int, ...]:
    numbers = str(device["compute_capability"]).split(".")
    return tuple(int(number) for number in numbers) if all(number.isdigit() for number in numbers) else (0,)


def _trouble(known: Mapping[str, Any], gpu: Mapping[str, Any], wsl2: bool) -> Iterator[str]:
    if known["error"] == NO_DRIVER:
        where = "in Windows, and none in Linux" if wsl2 else "on this machine"
        yield f"CuPy is installed, but {NO_DRIVER}: install one {where}, or go on with the CPU"
        return
    if gpu["driver"] and not gpu["devices"]:
        yield f"the NVIDIA driver {gpu['driver']} shows no GPU: see nvidia-smi; a container must be given its GPUs"
        return
    error = str(known["error"])
    yield f"CuPy is installed but does not work ({error})"
    cache, packages = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~"), sysconfig.get_path("platlib")
    if not cache.isascii():
        yield f"CuPy cannot compile under {cache!r}: set CUPY_CACHE_DIR to a folder with plain ASCII letters"
    if not packages.isascii():
        yield f"CuPy may not compile from {packages!r}: make the environment in a folder with plain ASCII letters"
    if _TOO_OLD in error:
        yield f"CuPy is for a newer driver than {gpu['driver']}: {_line(gpu, known)}"
    elif "nvrtc" in error.lower() or "include" in error.lower():
        yield f"the CUDA compiler or its headers are missing, or do not know this GPU: {_line(gpu, known)}"
