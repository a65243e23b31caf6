"""Who holds page-locked memory of this process: the pipeline by its ledger, others by what the system counts beyond."""

from __future__ import annotations

import sys
from typing import Any

from framepipe.device.base import Device
from framepipe.telemetry.adapter import find_adapter
from framepipe.telemetry.base import Sensor, describe
from framepipe.telemetry.procfs import ProcfsMemory
from framepipe.telemetry.wddm import WddmMemory
from framepipe.units import format_bytes

_ELSEWHERE = {
    "cpu": "without a GPU nothing is page-locked for one",
    "simulated": "the device is simulated: nothing is really page-locked for it",
}
_TELLING = 16 << 20
"""Bytes whose absence from a counter says that it does not count them; less was now and then not seen (3 MB, Linux)."""


class Holdings:
    """Host memory at the end of a run: ``memory.pins``, ``memory.tiers`` and ``memory.pinned_elsewhere`` of the report.

    To be made before the device of that kind is opened, and told to `look` before anything is closed. It is known that
    on Linux memory which CUDA page-locks shows in RssShmem (measured), and not known that nothing else does: so what is
    said of others is an estimate. Memory that was registered after it was allocated or is write-combined does not show
    there. Where the counter does not even show what the pipeline itself has page-locked, nothing is said of others.
    """

    def __init__(self, kind: str, system: str = sys.platform) -> None:
        self._kind, self._system = kind, system
        self._before = self._read_linux() if kind == "cuda" and system == "linux" else None
        self.pins: list[dict[str, Any]] = []
        self.tiers: dict[str, dict[str, Any]] = {}
        self.elsewhere = _nothing(_ELSEWHERE.get(kind, "the run ended before it was looked for"))

    def look(self, device: Device) -> None:
        """Take the account now. Raises nothing."""
        self.tiers = {name: tier.as_json() for name, tier in device.tiers().items()}
        self.pins = [account.as_json() for account in device.ledger.owners()]
        if self._kind not in _ELSEWHERE:
            try:
                self.elsewhere = self._look_elsewhere(device)
            except Exception as error:  # of a driver or library: an account is no reason for a run to fail
                self.elsewhere = _nothing(describe(error))

    def as_json(self) -> dict[str, Any]:
        """The three parts of the report's ``memory``."""
        return {"pins": self.pins, "tiers": self.tiers, "pinned_elsewhere": self.elsewhere}

    def _look_elsewhere(self, device: Device) -> dict[str, Any]:
        ours = device.ledger.taken["pinned"]
        if self._system == "linux":
            now, before = self._read_linux(), self._before
            if now is None or before is None:
                return _nothing("this kernel does not tell RssShmem")
            unseen = sum(pin.taken for pin in device.ledger.live() if not pin.in_shmem)
            counter = "procfs.rss_shmem (RssShmem of /proc/self/status) since before the device was opened"
            return _estimate(now - before, ours - unseen, counter)
        if self._system == "win32":
            sensor = WddmMemory(find_adapter(int(getattr(device, "number", 0))))
            counter = "wddm.non_local_usage (D3DKMTQueryVideoMemoryInfo of this process)"
            nbytes = _read(sensor, "non_local_usage")
            return _nothing(sensor.reason or "no number") if nbytes is None else _estimate(nbytes, ours, counter)
        return _nothing("this system has no counter of page-locked memory that is known here")

    def _read_linux(self) -> int | None:
        try:
            return _read(ProcfsMemory(), "rss_shmem")
        except Exception:  # where there is no /proc, the report says that there is no number
            return None


def _read(sensor: Sensor, key: str) -> int | None:
    try:
        return sensor.read()[key]
    finally:
        sensor.close()


def _estimate(shown: int, ours: int, counter: str) -> dict[str, Any]:
    if shown < ours // 2 and ours >= _TELLING:
        less = f"{format_bytes(max(0, shown))}, and the pipeline itself has page-locked {format_bytes(ours)}"
        return _nothing(f"{counter} shows {less}: it does not count such memory here")
    return {"bytes": max(0, shown - ours), "counter": counter, "approximate": True, "reason": None}


def _nothing(reason: str) -> dict[str, Any]:
    return {"bytes": None, "counter": None, "approximate": True, "reason": reason}
