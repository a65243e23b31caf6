"""Choosing a device by its name in YAML."""

from __future__ import annotations

from framepipe.device.base import Device
from framepipe.errors import ConfigError, DeviceUnavailableError
from framepipe.registry import did_you_mean

NAMES = ("auto", "cpu", "cuda", "simulated")


def make(name: str) -> tuple[Device, str]:
    """A new device for ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``simulated``, and why it was taken.

    Raises `DeviceUnavailableError` for a GPU that is not there, `ConfigError` for a name that is none.
    """
    kind, _, number = name.partition(":")
    if kind not in NAMES or (number and (kind != "cuda" or not number.isdigit())):
        raise ConfigError(f"unknown device {name!r}{did_you_mean(kind, NAMES)}")
    if kind == "cuda":
        raise DeviceUnavailableError(
            f"device {name!r} was asked for, but this version of framepipe has no CUDA device yet; use cpu"
        )
    if kind == "simulated":
        from framepipe.device.simulated import SimulatedDevice

        return SimulatedDevice(), "asked for"
    from framepipe.device.cpu import CpuDevice

    if kind == "cpu":
        return CpuDevice(), "asked for"
    return CpuDevice(), "auto: this version of framepipe has no CUDA device yet"
