"""Choosing a device by its name in YAML."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache

from framepipe.device.base import Device
from framepipe.errors import ConfigError, DeviceUnavailableError
from framepipe.registry import did_you_mean

NAMES = ("auto", "cpu", "cuda", "simulated")
PACKAGES = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}


@dataclass(frozen=True)
class Choice:
    """A device that was chosen and is there, and ``why`` it was."""

    kind: str
    number: int
    why: str

    def make(self) -> Device:
        """A new device of the pipeline's own."""
        if self.kind == "cuda":
            from framepipe.device.cuda import CudaDevice

            return CudaDevice(self.number)
        if self.kind == "simulated":
            from framepipe.device.simulated import SimulatedDevice

            return SimulatedDevice()
        from framepipe.device.cpu import CpuDevice

        return CpuDevice()


def choose(name: str) -> Choice:
    """The device for ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``simulated``.

    ``auto`` is a GPU where a kernel compiled and ran, and the CPU elsewhere. Raises `DeviceUnavailableError` for a GPU
    that was asked for and is not there, saying what would help, and `ConfigError` for a name that is none.
    """
    kind, _, number = name.partition(":")
    if kind not in NAMES or (number and (kind != "cuda" or not number.isdigit())):
        raise ConfigError(f"unknown device {name!r}{did_you_mean(kind, NAMES)}")
    if kind in ("cpu", "simulated"):
        return Choice(kind, 0, "asked for")
    missing = why_not(int(number or 0))
    if kind == "cuda":
        if missing:
            raise DeviceUnavailableError(f"device {name!r} was asked for, but {missing}")
        return Choice("cuda", int(number or 0), "asked for")
    return Choice("cpu", 0, f"auto: {missing}") if missing else Choice("cuda", 0, "auto: a kernel compiled and ran")


@cache
def why_not(number: int = 0) -> str:
    """Why a GPU cannot be used, with the line that would help; empty where a kernel compiled and ran."""
    installed = [package for package in PACKAGES.values() if _installed(package)]
    if len(installed) > 1:
        return f"{' and '.join(installed)} are installed side by side and disturb each other; uninstall one"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'framepipe[cuda12]' (or cuda13, for drivers from 580 on)"
    try:
        import cupy as cp

        driver = cp.cuda.runtime.driverGetVersion()
    except Exception as error:
        return f"CuPy cannot be loaded ({_first_line(error)})"
    if not driver:
        return "there is no NVIDIA driver on this machine"
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except Exception as error:
        supports = f"{driver // 1000}.{driver % 1000 // 10}"
        return f"no GPU can be used ({_first_line(error)}); the driver supports CUDA {supports}"
    if number >= count:
        return f"there is no cuda:{number}; this machine has {', '.join(f'cuda:{i}' for i in range(count))}"
    try:
        with cp.cuda.Device(number):
            kernel = cp.RawKernel('extern "C" __global__ void probe(int* out) { out[0] = 42; }', "probe")
            out = cp.zeros(1, cp.int32)
            kernel((1,), (1,), (out,))
            if int(out[0]) != 42:
                return "a kernel ran and gave a wrong result"
    except Exception as error:
        extra = "cuda13" if driver >= 13000 else "cuda12"
        return f"a kernel does not compile or run ({_first_line(error)}); try pip install 'framepipe[{extra}]'"
    return ""


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
