"""Windows' performance counters of GPU memory, through ``win32pdh`` (package pywin32)."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from framepipe.telemetry.adapter import Adapter, Luid
from framepipe.telemetry.base import PATIENCE_S, Sensor, SensorUnavailableError, describe

ADAPTER, PROCESS = "GPU Adapter Memory", "GPU Process Memory"
_COUNTERS = {
    "adapter_dedicated": (ADAPTER, "Dedicated Usage"),
    "adapter_shared": (ADAPTER, "Shared Usage"),
    "adapter_committed": (ADAPTER, "Total Committed"),
    "process_dedicated": (PROCESS, "Dedicated Usage"),
    "process_shared": (PROCESS, "Shared Usage"),
    "process_local": (PROCESS, "Local Usage"),
    "process_non_local": (PROCESS, "Non Local Usage"),
    "process_committed": (PROCESS, "Total Committed"),
}
_INSTANCE = re.compile(r"(?:pid_(\d+)_)?luid_0x([0-9a-f]{1,8})_0x([0-9a-f]{1,8})_phys_(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Instance:
    """What a counter's instance is of: a process (None for all of an adapter), and one physical adapter."""

    pid: int | None
    luid: Luid
    physical: int


def parse_instance(name: str) -> Instance | None:
    """The instance behind ``luid_0xHIGH_0xLOW_phys_N`` or ``pid_N_luid_…``; None for a name of another form."""
    found = _INSTANCE.fullmatch(name)
    if found is None:
        return None
    pid, high, low, physical = found.groups()
    return Instance(int(pid) if pid else None, Luid(int(high, 16), int(low, 16)), int(physical))


class PdhMemory(Sensor):
    r"""``\GPU Adapter Memory`` of one adapter and ``\GPU Process Memory`` of this process on it.

    The adapter is found by its LUID, which CUDA tells. Counters are named in English, which every Windows understands.
    Nothing is added up: shared memory may be reported again for each adapter. An instance of this process appears
    with its first allocation on the adapter; ``process_dedicated`` has been reported to be wrong at times, so that
    ``process_local`` belongs beside it.

    Raises `SensorUnavailableError` without a LUID (under TCC) and without the counters, and `ModuleNotFoundError`
    without ``win32pdh``.
    """

    name = "pdh"
    source = "Windows performance counters"
    readings = MappingProxyType({key: f"\\{kind}(*)\\{counter}" for key, (kind, counter) in _COUNTERS.items()})

    def __init__(self, adapter: Adapter, library: Any = None, pid: int | None = None) -> None:
        super().__init__()
        self._pdh = importlib.import_module("win32pdh") if library is None else library
        if adapter.luid is None:
            raise SensorUnavailableError("the device has no LUID: Windows does not manage its memory (TCC)")
        self._adapter = Instance(None, adapter.luid, adapter.physical)
        self._process = Instance(os.getpid() if pid is None else pid, adapter.luid, adapter.physical)
        self._refused: dict[str, str] = {}
        self._query = self._pdh.OpenQuery()
        self._counters = dict(self._add())
        if not self._counters:
            self._pdh.CloseQuery(self._query)
            raise SensorUnavailableError(f"Windows has no counters of GPU memory: {next(iter(self._refused.values()))}")

    def _add(self) -> Iterator[tuple[str, Any]]:
        for key, path in self.readings.items():
            try:
                yield key, self._pdh.AddEnglishCounter(self._query, path)
            except self._pdh.error as error:
                self._refused[key] = describe(error)

    def _read(self) -> Mapping[str, int | str]:
        found: dict[str, int | str] = dict(self._refused)
        for key, numbers in self._collect().items():
            if isinstance(numbers, str):
                found[key] = numbers
            else:
                wanted = self._adapter if key.startswith("adapter") else self._process
                found[key] = numbers.get(wanted, f"there is no instance of it {_of(wanted)}")
        return found

    def everything(self) -> dict[str, dict[Instance, int]]:
        """Every counter's number for every adapter and process, by the keys of ``readings``.

        A key or instance that cannot be read is left out. Never raises.
        """
        if not self._lock.acquire(timeout=PATIENCE_S):
            return {}
        try:
            found = {} if self._closed else self._collect()
        except Exception:
            return {}
        finally:
            self._lock.release()
        return {key: numbers for key, numbers in found.items() if not isinstance(numbers, str)}

    def _collect(self) -> dict[str, dict[Instance, int] | str]:
        self._pdh.CollectQueryData(self._query)
        return {key: self._numbers(counter) for key, counter in self._counters.items()}

    def _numbers(self, counter: Any) -> dict[Instance, int] | str:
        try:
            rows = self._pdh.GetFormattedCounterArray(counter, self._pdh.PDH_FMT_LARGE | self._pdh.PDH_FMT_NOSCALE)
        except self._pdh.error as error:  # no instance at all is an error, too
            return describe(error)
        parsed = ((parse_instance(name), int(nbytes)) for name, nbytes in rows.items())
        return {instance: nbytes for instance, nbytes in parsed if instance is not None}

    def _close(self) -> None:
        self._pdh.CloseQuery(self._query)


def _of(instance: Instance) -> str:
    if instance.pid is None:
        return f"for the adapter {instance.luid}"
    return f"for process {instance.pid} on the adapter {instance.luid}: nothing is allocated yet"
