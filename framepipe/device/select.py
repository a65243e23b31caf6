"""Choosing a device by its name in YAML."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

from framepipe.device._packages import install_line
from framepipe.device.base import Device
from framepipe.device.current import current, driver_is_there
from framepipe.errors import ConfigError, DeviceUnavailableError
from framepipe.memory_models import table
from framepipe.registry import did_you_mean

NAMES = ("auto", "cpu", "cuda", "simulated")
_CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_SPAWN = "start worker processes with multiprocessing.get_context('spawn')"
_behind_fork = False  # of a process that had found a GPU
_NO_DRIVER = "there is no NVIDIA driver on this machine"


@dataclass(frozen=True)
class Choice:
    """A device that was chosen and is there, and ``why`` it was."""

    kind: str
    number: int
    why: str
    model: str = ""
    """The memory model of the simulated device with its parameters, if it has one."""

    def make(self) -> Device:
        """A new device of the pipeline's own."""
        if self.kind == "cuda":
            from framepipe.device.cuda import CudaDevice

            return CudaDevice(self.number)
        if self.model:
            from framepipe.device.modelled import ModelledDevice

            return ModelledDevice(table.make(self.model))
        if self.kind == "simulated":
            from framepipe.device.simulated import SimulatedDevice

            return SimulatedDevice()
        from framepipe.device.cpu import CpuDevice

        return CpuDevice()


def choose(name: str) -> Choice:
    """The device for ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``simulated`` or ``simulated:MODEL,key=value,…``.

    ``auto`` is a GPU where a kernel compiled and ran, and the CPU elsewhere. Raises `DeviceUnavailableError` for a GPU
    that was asked for and is not there, saying what would help, and `ConfigError` for a name that is none.
    """
    kind, colon, number = name.partition(":")
    if kind == "simulated" and colon:
        table.make(number)  # a mistake in it is told now
        return Choice(kind, 0, "asked for", number)
    if kind not in NAMES or (number and (kind != "cuda" or not number.isdigit())):
        raise ConfigError(f"unknown device {name!r}{did_you_mean(kind, NAMES)}")
    if kind in ("cpu", "simulated"):
        return Choice(kind, 0, "asked for")
    if _behind_fork:
        raise DeviceUnavailableError(f"this process was forked from one that used CUDA, so it cannot: {_SPAWN}")
    missing = why_not(int(number or 0))
    if kind == "cuda":
        if missing:
            raise DeviceUnavailableError(f"device {name!r} was asked for, but {missing}")
        return Choice("cuda", int(number or 0), "asked for")
    return Choice("cpu", 0, f"auto: {missing}") if missing else Choice("cuda", 0, "auto: a kernel compiled and ran")


@cache
def why_not(number: int = 0) -> str:
    """Why a GPU cannot be used, with the line that would help; empty where a kernel compiled and ran."""
    present = [name for name in _CUPY if _installed(name)]
    try:
        cupy = importlib.import_module("cupy")
        driver = int(cupy.cuda.runtime.driverGetVersion())
        runtime = int(cupy.cuda.runtime.runtimeGetVersion())
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed: {install_line(None)}" if driver_is_there() else _NO_DRIVER
        if len(present) > 1:
            return _several(present, None)
        if any(library in str(error) for library in ("libcuda.so", "nvcuda.dll")):
            return _NO_DRIVER
        return f"CuPy cannot be loaded ({_first_line(error)})"
    if not driver:
        return _NO_DRIVER
    if len(present) > 1:
        return _several(present, driver // 1000)
    # Within one major version an older driver runs what a newer toolkit made, if perhaps not all of it.
    if runtime // 1000 > driver // 1000:
        return _too_old(driver, runtime, present)
    return _no_device(cupy, number) or _no_kernel(cupy, number, driver, runtime, present)


def _several(present: list[str], cuda: int | None) -> str:
    return f"{' and '.join(present)} are installed side by side and disturb each other: {install_line(cuda, present)}"


def _no_device(cupy: Any, number: int) -> str:
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        return f"no GPU can be used ({_first_line(error)}){_perhaps_forked(error)}"
    if not count:
        return "the NVIDIA driver shows no GPU"
    if number >= count:
        return f"there is no cuda:{number}; this machine has {', '.join(f'cuda:{i}' for i in range(count))}"
    return ""


def _no_kernel(cupy: Any, number: int, driver: int, runtime: int, present: list[str]) -> str:
    try:
        with current(number):
            kernel = cupy.RawKernel('extern "C" __global__ void probe(int* out) { out[0] = 42; }', "probe")
            out = cupy.zeros(1, cupy.int32)
            kernel((1,), (1,), (out,))
            return "" if int(out[0]) == 42 else "a kernel ran and gave a wrong result"
    except Exception as error:
        told = _first_line(error)
        if "nvrtc" in str(error).lower():
            # For the CuPy that is there, and not a second one beside it.
            return f"the CUDA compiler (NVRTC) cannot be loaded ({told}): {install_line(driver // 1000, present)}"
        if runtime > driver:
            return f"a kernel does not compile or run ({told}); {_too_old(driver, runtime, present)}"
        help = _perhaps_forked(error) or "; 'framepipe doctor' may tell more"
        return f"a kernel does not compile or run ({told}){help}"


def _perhaps_forked(error: BaseException) -> str:
    """What to do about CUDA that does not begin: behind a fork it never does."""
    begins = not any(name in str(error) for name in ("cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED"))
    return "" if begins else f"; if this process was forked from one that used CUDA, {_SPAWN}"


def _forked() -> None:
    global _behind_fork
    _behind_fork = why_not.cache_info().currsize > 0 and not why_not()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _too_old(driver: int, runtime: int, present: list[str]) -> str:
    other = "update the driver, or else " if driver >= 12000 else ""
    return (
        f"CuPy is made for CUDA {_version(runtime)}, and the driver supports CUDA {_version(driver)} at most: "
        f"{other}{install_line(driver // 1000, present)}"
    )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
