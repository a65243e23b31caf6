"""Which adapter of the system a CUDA device is: the names under which NVML and Windows know it.

The driver library itself is asked, through ctypes: it numbers devices as CUDA does (CUDA_VISIBLE_DEVICES included),
needs no context, and gives all bytes of the identifiers (a binding that takes them for text would stop at a zero).
Functions and constants: CUDA Driver API, Device Management.
"""

from __future__ import annotations

import ctypes
import sys
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from framepipe.telemetry.base import SensorUnavailableError

_TCC_DRIVER = 35  # CU_DEVICE_ATTRIBUTE_TCC_DRIVER


class Luid(NamedTuple):
    """Windows' locally unique identifier of an adapter, both halves unsigned; it changes with every boot."""

    high: int
    low: int

    @classmethod
    def from_bytes(cls, raw: bytes) -> Luid:
        """From the eight bytes that CUDA gives, which are a LUID structure: low half first, little endian."""
        if len(raw) != 8:
            raise ValueError(f"a LUID has 8 bytes, not {len(raw)}")
        return cls(int.from_bytes(raw[4:], "little"), int.from_bytes(raw[:4], "little"))

    def __str__(self) -> str:
        return f"0x{self.high:08X}_0x{self.low:08X}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A CUDA device as the rest of the system names it.

    ``index`` is CUDA's number in this process, ``uuid`` the device's (of a MIG instance: its own). ``luid`` is None
    where it is not defined: outside Windows and under TCC. ``physical`` counts within linked adapters, and is 0
    without them. ``tcc`` is None where CUDA does not tell.
    """

    index: int
    uuid: uuid.UUID
    pci_bus_id: str
    luid: Luid | None = None
    physical: int = 0
    tcc: bool | None = None


def find_adapter(index: int, library: Any = None) -> Adapter:
    """The adapter behind CUDA device ``index``; ``library`` stands for the driver library in tests.

    Initialises the CUDA driver in this process, and makes no context. Raises `SensorUnavailableError`.
    """
    cuda = _load() if library is None else library
    _check(cuda.cuInit(0), "cuInit")
    device = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), f"cuDeviceGet of device {index}")
    tcc = _tcc(cuda, device)
    luid, physical = (None, 0) if tcc else _luid(cuda, device)
    return Adapter(index, _uuid(cuda, device), _pci_bus_id(cuda, device), luid, physical, tcc)


def _load() -> Any:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise SensorUnavailableError(f"there is no NVIDIA driver ({error})") from error


def _check(status: int, what: str) -> None:
    if status:
        known = {100: " (there is no CUDA device)", 101: " (there is no such device)"}.get(status, "")
        raise SensorUnavailableError(f"{what} failed with CUDA error {status}{known}")


def _uuid(cuda: Any, device: ctypes.c_int) -> uuid.UUID:
    raw = (ctypes.c_ubyte * 16)()
    # The second version names a MIG instance instead of the GPU around it; drivers before 11.4 have only the first.
    get = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    _check(get(ctypes.byref(raw), device), "cuDeviceGetUuid")
    return uuid.UUID(bytes=bytes(raw))


def _pci_bus_id(cuda: Any, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(32)
    _check(cuda.cuDeviceGetPCIBusId(text, 32, device), "cuDeviceGetPCIBusId")
    return text.value.decode("ascii", "replace")


def _luid(cuda: Any, device: ctypes.c_int) -> tuple[Luid | None, int]:
    """The LUID, and the lowest set bit of the node mask as the place among linked adapters."""
    raw, mask = (ctypes.c_ubyte * 8)(), ctypes.c_uint()
    get = getattr(cuda, "cuDeviceGetLuid", None)  # exported on Windows alone
    if get is None or get(ctypes.byref(raw), ctypes.byref(mask), device) or not any(raw):
        return None, 0
    return Luid.from_bytes(bytes(raw)), max(0, (mask.value & -mask.value).bit_length() - 1)


def _tcc(cuda: Any, device: ctypes.c_int) -> bool | None:
    value = ctypes.c_int()
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), _TCC_DRIVER, device)
    return None if failed else bool(value.value)
