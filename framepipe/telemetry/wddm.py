"""What Windows lets this process use of a GPU's memory and what it uses, asked of the kernel through gdi32.dll."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from framepipe.telemetry.adapter import Adapter
from framepipe.telemetry.base import Sensor, SensorUnavailableError

# The structures are those of d3dkmthk.h as Microsoft documents them (Windows Driver Kit, Display Devices Reference):
# D3DKMT_OPENADAPTERFROMLUID, D3DKMT_CLOSEADAPTER, D3DKMT_QUERYVIDEOMEMORYINFO. Types are named by width, since LONG
# and UINT have 32 bits on Windows alone.


class LuidStructure(ctypes.Structure):
    """``LUID`` of winnt.h."""

    _fields_ = (("LowPart", ctypes.c_uint32), ("HighPart", ctypes.c_int32))


class OpenAdapterFromLuid(ctypes.Structure):
    """``D3DKMT_OPENADAPTERFROMLUID``: the LUID goes in, the handle comes out."""

    _fields_ = (("AdapterLuid", LuidStructure), ("hAdapter", ctypes.c_uint32))


class CloseAdapter(ctypes.Structure):
    """``D3DKMT_CLOSEADAPTER``."""

    _fields_ = (("hAdapter", ctypes.c_uint32),)


class QueryVideoMemoryInfo(ctypes.Structure):
    """``D3DKMT_QUERYVIDEOMEMORYINFO``; no process handle means this process. The 64-bit members are 8-byte aligned."""

    _fields_ = (
        ("hProcess", ctypes.c_void_p),
        ("hAdapter", ctypes.c_uint32),
        ("MemorySegmentGroup", ctypes.c_int32),
        ("Budget", ctypes.c_uint64),
        ("CurrentUsage", ctypes.c_uint64),
        ("CurrentReservation", ctypes.c_uint64),
        ("AvailableForReservation", ctypes.c_uint64),
        ("PhysicalAdapterIndex", ctypes.c_uint32),
    )


_GROUPS = {"local": 0, "non_local": 1}  # D3DKMT_MEMORY_SEGMENT_GROUP
_FIELDS = {
    "usage": "CurrentUsage",
    "budget": "Budget",
    "reservation": "CurrentReservation",
    "available_for_reservation": "AvailableForReservation",
}
_STATUS = {
    0xC0000008: "STATUS_INVALID_HANDLE",
    0xC000000D: "STATUS_INVALID_PARAMETER",
    0xC0000022: "STATUS_ACCESS_DENIED",
    0xC00002B6: "STATUS_DEVICE_REMOVED",
}


class WddmMemory(Sensor):
    """``D3DKMTQueryVideoMemoryInfo``: usage, budget and reservation of this process, local and non-local.

    Local memory is the GPU's own, non-local is system memory that the GPU uses: there page-locked memory is expected.
    All numbers are of this process and never of the device. A budget is what Windows lets the process use at the
    moment, and shrinks when others want memory. The adapter is found by its LUID, which CUDA tells.

    Raises `SensorUnavailableError` without Windows, without a LUID (under TCC), and where the kernel refuses.
    """

    name = "wddm"
    source = "D3DKMTQueryVideoMemoryInfo"

    def __init__(self, adapter: Adapter, library: Any = None) -> None:
        super().__init__()
        self.readings = {
            f"{group}_{key}": f"D3DKMTQueryVideoMemoryInfo {group} {field}"
            for group in _GROUPS
            for key, field in _FIELDS.items()
        }
        self._gdi32 = _load() if library is None else library
        self._physical = adapter.physical
        self._handle = self._open(adapter)

    def _open(self, adapter: Adapter) -> int:
        if adapter.luid is None:
            raise SensorUnavailableError("the device has no LUID: Windows does not manage its memory (TCC)")
        request = OpenAdapterFromLuid(LuidStructure(adapter.luid.low, adapter.luid.high), 0)
        self._call("D3DKMTOpenAdapterFromLuid", request)
        return int(request.hAdapter)

    def _read(self) -> Mapping[str, int | str]:
        found: dict[str, int | str] = {}
        for group in _GROUPS:
            try:
                numbers: dict[str, int | str] = {**self._query(group)}
            except SensorUnavailableError as error:
                numbers = dict.fromkeys(_FIELDS, str(error))
            found.update({f"{group}_{key}": number for key, number in numbers.items()})
        return found

    def _query(self, group: str) -> dict[str, int]:
        query = QueryVideoMemoryInfo(
            hAdapter=self._handle, MemorySegmentGroup=_GROUPS[group], PhysicalAdapterIndex=self._physical
        )
        self._call("D3DKMTQueryVideoMemoryInfo", query)
        return {key: int(getattr(query, field)) for key, field in _FIELDS.items()}

    def _call(self, name: str, structure: ctypes.Structure) -> None:
        try:
            function = getattr(self._gdi32, name)
        except AttributeError as error:
            raise SensorUnavailableError(f"this Windows has no {name}: it came with Windows 10") from error
        status = function(ctypes.byref(structure)) & 0xFFFFFFFF
        if status >= 0x80000000:  # the severities of an NTSTATUS that are no success
            named = _STATUS.get(status)
            raise SensorUnavailableError(f"{name} failed with 0x{status:08X}{f' ({named})' if named else ''}")

    def _close(self) -> None:
        self._call("D3DKMTCloseAdapter", CloseAdapter(self._handle))


def _load() -> Any:
    windll = getattr(ctypes, "WinDLL", None)
    if windll is None:
        raise SensorUnavailableError("only Windows has gdi32.dll")
    return windll("gdi32.dll")
