"""What Windows says of displays, remote desktop and hardware scheduling; null with a reason elsewhere."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any

from framepipe.telemetry.base import describe

_MONITORS, _REMOTE_SESSION = 80, 0x1000  # SM_CMONITORS, SM_REMOTESESSION of winuser.h
_DRIVERS = r"SYSTEM\CurrentControlSet\Control\GraphicsDrivers"
_MODES = {1: "off", 2: "on"}


def settings(
    system: str = sys.platform, user32: Any = None, winreg: Any = None
) -> dict[str, dict[str, int | bool | str | None]]:
    """``displays``, ``remote_desktop`` and ``hardware_scheduling``, each with ``value``, ``source`` and ``reason``.

    ``GetSystemMetrics`` counts the monitors on the desktop and knows a remote session (winuser.h); the registry's
    ``HwSchMode`` is 2 where hardware-accelerated scheduling is switched on and 1 where off, and may be absent. Never
    raises. ``user32`` and ``winreg`` stand for the library and the module in tests.
    """
    readings: dict[str, tuple[str, Callable[[], int | bool | str]]] = {
        "displays": ("GetSystemMetrics(SM_CMONITORS)", lambda: _metric(user32, _MONITORS)),
        "remote_desktop": ("GetSystemMetrics(SM_REMOTESESSION)", lambda: bool(_metric(user32, _REMOTE_SESSION))),
        "hardware_scheduling": (rf"HKLM\{_DRIVERS}\HwSchMode", lambda: _scheduling(winreg)),
    }
    return {key: _reading(source, read, system) for key, (source, read) in readings.items()}


def _reading(source: str, read: Callable[[], int | bool | str], system: str) -> dict[str, int | bool | str | None]:
    if system != "win32":
        return {"value": None, "source": source, "reason": "only Windows has it"}
    try:
        return {"value": read(), "source": source, "reason": None}
    except FileNotFoundError:
        return {"value": None, "source": source, "reason": "the registry has no such value: Windows' default holds"}
    except Exception as error:
        return {"value": None, "source": source, "reason": describe(error)}


def _metric(user32: Any, number: int) -> int:
    library = ctypes.WinDLL("user32") if user32 is None else user32  # type: ignore[attr-defined,unused-ignore]
    return int(library.GetSystemMetrics(number))


def _scheduling(winreg: Any) -> str:
    module = importlib.import_module("winreg") if winreg is None else winreg
    with module.OpenKey(module.HKEY_LOCAL_MACHINE, _DRIVERS) as key:
        value, _ = module.QueryValueEx(key, "HwSchMode")
    return _MODES.get(value, f"unknown value {value}")
