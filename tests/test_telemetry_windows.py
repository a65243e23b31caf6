"""Windows' own sensors against structures as they are documented and libraries played by Python objects."""

from __future__ import annotations

import ctypes
import struct
import sys
import uuid

import pytest

from framepipe.telemetry import sensors, wddm
from framepipe.telemetry.adapter import Adapter, Luid
from framepipe.telemetry.base import Missing, SensorUnavailableError
from framepipe.telemetry.pdh import Instance, PdhMemory, parse_instance
from framepipe.telemetry.wddm import CloseAdapter, OpenAdapterFromLuid, QueryVideoMemoryInfo, WddmMemory

GPU = Adapter(0, uuid.UUID(int=5), "0000:01:00.0", Luid(0x80000001, 0xD1E5), 2, False)
TCC = Adapter(0, uuid.UUID(int=5), "0000:01:00.0", None, 0, True)
INVALID_PARAMETER, DEVICE_REMOVED = 0xC000000D, 0xC00002B6


def signed(status: int) -> int:
    """An NTSTATUS as a function without a declared type gives it."""
    return ctypes.c_int32(status).value


# -- structures --


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="offsets of 64-bit Windows")
def test_the_query_has_the_documented_layout():
    """The members of D3DKMT_QUERYVIDEOMEMORYINFO in order, with a handle of 8 bytes and D3DKMT_ALIGN64 numbers."""
    offsets = [(name, getattr(QueryVideoMemoryInfo, name).offset) for name, _ in QueryVideoMemoryInfo._fields_]
    assert offsets == [
        ("hProcess", 0),
        ("hAdapter", 8),
        ("MemorySegmentGroup", 12),
        ("Budget", 16),
        ("CurrentUsage", 24),
        ("CurrentReservation", 32),
        ("AvailableForReservation", 40),
        ("PhysicalAdapterIndex", 48),
    ]
    assert ctypes.sizeof(QueryVideoMemoryInfo) == 56


def test_the_small_structures():
    assert (OpenAdapterFromLuid.AdapterLuid.offset, OpenAdapterFromLuid.hAdapter.offset) == (0, 8)
    assert ctypes.sizeof(OpenAdapterFromLuid) == 12
    assert ctypes.sizeof(CloseAdapter) == 4


# -- the kernel's budget --


class Gdi32:
    """gdi32.dll with one adapter, reading and writing raw bytes at the documented places."""

    HANDLE = 0x40000100

    def __init__(self) -> None:
        self.open = 0
        self.status = dict.fromkeys(("open", "query", "close"), 0)
        self.failing_group: int | None = None
        self.asked: list[tuple[int, int, int]] = []

    def D3DKMTOpenAdapterFromLuid(self, request) -> int:
        raw = bytes(request._obj)
        if raw[:8] != bytes.fromhex("e5d10000 01000080"):
            return signed(INVALID_PARAMETER)
        if not self.status["open"]:
            ctypes.memmove(ctypes.byref(request._obj, 8), struct.pack("<I", self.HANDLE), 4)
            self.open += 1
        return signed(self.status["open"])

    def D3DKMTQueryVideoMemoryInfo(self, query) -> int:
        process, adapter, group, *_, physical = struct.unpack("<QIi4QI4x", bytes(query._obj))
        self.asked.append((process, group, physical))
        if adapter != self.HANDLE or not self.open:
            return signed(0xC0000008)
        if self.failing_group in (group, -1):
            return signed(self.status["query"])
        numbers = (8 << 30, 1 << 30, 16, 4 << 30) if group == 0 else (15 << 30, 256 << 20, 0, 7 << 30)
        recorded = struct.pack("<QIi4QI4x", process, adapter, group, *numbers, physical)
        ctypes.memmove(query, recorded, len(recorded))
        return 0

    def D3DKMTCloseAdapter(self, request) -> int:
        assert struct.unpack("<I", bytes(request._obj)) == (self.HANDLE,)
        self.open -= 1
        return signed(self.status["close"])


def test_local_and_non_local_memory_of_this_process():
    gdi32 = Gdi32()
    sensor = WddmMemory(GPU, gdi32)
    assert sensor.read() == {
        "local_usage": 1 << 30,
        "local_budget": 8 << 30,
        "local_reservation": 16,
        "local_available_for_reservation": 4 << 30,
        "non_local_usage": 256 << 20,
        "non_local_budget": 15 << 30,
        "non_local_reservation": 0,
        "non_local_available_for_reservation": 7 << 30,
    }
    assert sensor.reason is None
    assert gdi32.asked == [(0, 0, 2), (0, 1, 2)]  # no process handle, both groups, the linked adapter asked for
    sensor.close()
    sensor.close()
    assert gdi32.open == 0
    assert set(sensor.read().values()) == {None}
    assert len(gdi32.asked) == 2


def test_a_group_that_is_refused_leaves_the_other():
    gdi32 = Gdi32()
    gdi32.failing_group, gdi32.status["query"] = 1, INVALID_PARAMETER
    sensor = WddmMemory(GPU, gdi32)
    found = sensor.read()
    assert found["local_usage"] == 1 << 30
    assert {nbytes for key, nbytes in found.items() if key.startswith("non_local")} == {None}
    assert sensor.reason == "D3DKMTQueryVideoMemoryInfo failed with 0xC000000D (STATUS_INVALID_PARAMETER)"


def test_a_removed_adapter_is_a_reason_and_it_may_come_back():
    gdi32 = Gdi32()
    sensor = WddmMemory(GPU, gdi32)
    gdi32.failing_group, gdi32.status["query"] = -1, DEVICE_REMOVED
    assert set(sensor.read().values()) == {None}
    assert sensor.reason is not None and "STATUS_DEVICE_REMOVED" in sensor.reason
    gdi32.failing_group = None
    assert sensor.read()["local_budget"] == 8 << 30


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (INVALID_PARAMETER, r"0xC000000D \(STATUS_INVALID_PARAMETER\)"),
        (0xC01E0100, "failed with 0xC01E0100$"),
        (0x80000005, "failed with 0x80000005$"),
    ],
)
def test_an_adapter_that_does_not_open_is_no_sensor(status, text):
    gdi32 = Gdi32()
    gdi32.status["open"] = status
    with pytest.raises(SensorUnavailableError, match=f"^D3DKMTOpenAdapterFromLuid .*{text}"):
        WddmMemory(GPU, gdi32)


def test_an_unknown_luid_is_refused_by_the_kernel():
    stranger = Adapter(0, uuid.UUID(int=5), "0000:01:00.0", Luid(0, 1))
    with pytest.raises(SensorUnavailableError, match="STATUS_INVALID_PARAMETER"):
        WddmMemory(stranger, Gdi32())


def test_a_status_of_success_is_none_of_failure():
    gdi32 = Gdi32()
    gdi32.status["close"] = 0x00000102  # STATUS_TIMEOUT, a success code
    WddmMemory(GPU, gdi32).close()
    assert gdi32.open == 0


def test_a_handle_that_does_not_close_is_a_warning():
    gdi32 = Gdi32()
    sensor = WddmMemory(GPU, gdi32)
    gdi32.status["close"] = INVALID_PARAMETER
    with pytest.warns(ResourceWarning, match="wddm: D3DKMTCloseAdapter failed with 0xC000000D"):
        sensor.close()


def test_windows_before_10_has_no_such_function():
    class Older(Gdi32):
        def __getattribute__(self, name: str):
            if name == "D3DKMTQueryVideoMemoryInfo":
                raise AttributeError(f"function '{name}' not found")
            return super().__getattribute__(name)

    sensor = WddmMemory(GPU, Older())
    assert set(sensor.read().values()) == {None}
    assert sensor.reason == "this Windows has no D3DKMTQueryVideoMemoryInfo: it came with Windows 10"
    sensor.close()


def test_tcc_has_no_luid_to_ask_by():
    with pytest.raises(SensorUnavailableError, match="TCC"):
        WddmMemory(TCC, Gdi32())
    with pytest.raises(SensorUnavailableError, match="TCC"):
        PdhMemory(TCC, Pdh())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has it")
def test_elsewhere_there_is_no_gdi32():
    with pytest.raises(SensorUnavailableError, match="only Windows has gdi32"):
        WddmMemory(GPU)


# -- performance counters --


@pytest.mark.parametrize(
    ("name", "instance"),
    [
        ("luid_0x00000000_0x0000D1E5_phys_0", Instance(None, Luid(0, 0xD1E5), 0)),
        ("luid_0x80000001_0x0000d1e5_phys_12", Instance(None, Luid(0x80000001, 0xD1E5), 12)),
        ("pid_1234_luid_0x00000000_0x0000D1E5_phys_1", Instance(1234, Luid(0, 0xD1E5), 1)),
        ("_Total", None),
        ("luid_0x00000000_0x0000D1E5_phys_0_part_1", None),
        ("pid_x_luid_0x00000000_0x0000D1E5_phys_0", None),
        ("luid_0x000000000_0x0000D1E5_phys_0", None),
    ],
)
def test_names_of_instances(name, instance):
    assert parse_instance(name) == instance


class PdhError(Exception):
    pass


class Pdh:
    """The module win32pdh: counters by path, each a mapping of instances or an error."""

    error = PdhError
    PDH_FMT_LARGE, PDH_FMT_NOSCALE = 0x400, 0x1000

    def __init__(self, **counters: object) -> None:
        mine, other = "luid_0x80000001_0x0000D1E5_phys_2", "luid_0x00000000_0x0000AAAA_phys_0"
        self.counters: dict[str, object] = {
            r"\GPU Adapter Memory(*)\Dedicated Usage": {mine: 3000, other: 50, "_Total": 1},
            r"\GPU Adapter Memory(*)\Shared Usage": {mine: 700, other: 700},
            r"\GPU Adapter Memory(*)\Total Committed": {mine: 3700, other: 750},
            r"\GPU Process Memory(*)\Dedicated Usage": {f"pid_7_{mine}": 1000, f"pid_8_{mine}": 2, f"pid_7_{other}": 3},
            r"\GPU Process Memory(*)\Shared Usage": {f"pid_7_{mine}": 600},
            r"\GPU Process Memory(*)\Local Usage": {f"pid_7_{mine}": 1001},
            r"\GPU Process Memory(*)\Non Local Usage": {f"pid_7_{mine}": 601},
            r"\GPU Process Memory(*)\Total Committed": {f"pid_7_{mine}": 1602},
        }
        self.queries = 0
        self.collected = False

    def OpenQuery(self) -> str:
        self.queries += 1
        return "query"

    def CloseQuery(self, query: str) -> None:
        assert query == "query"
        self.queries -= 1

    def AddEnglishCounter(self, query: str, path: str) -> str:
        if path not in self.counters:
            raise PdhError(-1073738824, "AddEnglishCounter", "The specified object was not found on the computer.")
        return path

    def CollectQueryData(self, query: str) -> None:
        assert self.queries == 1
        self.collected = True

    def GetFormattedCounterArray(self, counter: str, form: int) -> dict[str, int]:
        assert self.collected and form == 0x1400
        rows = self.counters[counter]
        if isinstance(rows, Exception):
            raise rows
        return rows


def test_counters_of_one_adapter_and_this_process():
    pdh = Pdh()
    sensor = PdhMemory(GPU, pdh, pid=7)
    assert sensor.read() == {
        "adapter_dedicated": 3000,
        "adapter_shared": 700,  # not 1400: another adapter shows the same memory
        "adapter_committed": 3700,
        "process_dedicated": 1000,
        "process_shared": 600,
        "process_local": 1001,
        "process_non_local": 601,
        "process_committed": 1602,
    }
    assert sensor.readings["process_non_local"] == r"\GPU Process Memory(*)\Non Local Usage"
    sensor.close()
    assert pdh.queries == 0
    assert sensor.everything() == {}


def test_every_adapter_for_whoever_compares_them():
    found = PdhMemory(GPU, Pdh(), pid=7).everything()
    assert found["adapter_shared"] == {
        Instance(None, Luid(0x80000001, 0xD1E5), 2): 700,
        Instance(None, Luid(0, 0xAAAA), 0): 700,
    }
    assert {instance.pid for instance in found["process_dedicated"]} == {7, 8}


def test_a_process_without_an_allocation_is_unknown_and_not_zero():
    sensor = PdhMemory(GPU, Pdh(), pid=99)
    found = sensor.read()
    assert found["adapter_dedicated"] == 3000
    assert found["process_local"] is None
    assert sensor.reasons["process_local"].endswith("nothing is allocated yet")
    assert "adapter_shared" not in sensor.reasons


def test_another_linked_adapter_is_another_one():
    other = Adapter(0, uuid.UUID(int=5), "0000:01:00.0", GPU.luid, 0)
    sensor = PdhMemory(other, Pdh(), pid=7)
    assert set(sensor.read().values()) == {None}
    assert "there is no instance of it for the adapter 0x80000001_0x0000D1E5" in sensor.reasons["adapter_shared"]


def test_a_counter_that_a_windows_does_not_have_or_that_fails_takes_no_other_along():
    pdh = Pdh()
    del pdh.counters[r"\GPU Process Memory(*)\Local Usage"]
    pdh.counters[r"\GPU Process Memory(*)\Non Local Usage"] = PdhError("no data")
    sensor = PdhMemory(GPU, pdh, pid=7)
    found = sensor.read()
    assert (found["process_local"], found["process_non_local"], found["process_shared"]) == (None, None, 600)
    assert "not found on the computer" in sensor.reasons["process_local"]
    assert sensor.reasons["process_non_local"] == "PdhError: no data"
    assert "process_non_local" not in sensor.everything()


def test_counters_that_are_switched_off_are_no_sensor():
    pdh = Pdh()
    pdh.counters.clear()
    with pytest.raises(SensorUnavailableError, match=r"no counters of GPU memory: .*not found on the computer"):
        PdhMemory(GPU, pdh)
    assert pdh.queries == 0


def test_a_collection_that_fails_is_a_reason(monkeypatch):
    pdh = Pdh()
    sensor = PdhMemory(GPU, pdh, pid=7)

    def fail(query: str) -> None:
        raise PdhError("PDH_NO_DATA")

    monkeypatch.setattr(pdh, "CollectQueryData", fail)
    assert set(sensor.read().values()) == {None}
    assert sensor.reason == "PdhError: PDH_NO_DATA"
    assert sensor.everything() == {}


# -- together --


def test_windows_opens_its_sensors(monkeypatch):
    """The system is played, too; what only Linux has is missing."""
    gdi32, pdh = Gdi32(), Pdh()
    monkeypatch.setattr(sensors.sys, "platform", "win32")
    monkeypatch.setattr(wddm.ctypes, "WinDLL", lambda name: gdi32, raising=False)
    monkeypatch.setitem(sys.modules, "win32pdh", pdh)
    opened = {sensor.name: sensor for sensor in sensors.open_sensors(adapter=GPU)}
    assert isinstance(opened["wddm"], WddmMemory)
    assert isinstance(opened["pdh"], PdhMemory)
    assert isinstance(opened["procfs"], Missing)
    found = sensors.read_sensors(opened.values())
    assert (found["wddm.non_local_usage"], found["pdh.adapter_shared"]) == (256 << 20, 700)
    sensors.close_sensors(opened.values())
    assert (gdi32.open, pdh.queries) == (0, 0)


def test_pywin32_is_optional(monkeypatch):
    monkeypatch.setattr(sensors.sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "win32pdh", None)
    opened = {sensor.name: sensor for sensor in sensors.open_sensors(adapter=TCC)}
    assert opened["pdh"].reason == "pywin32 is not installed"
    assert opened["wddm"].reason is not None
    sensors.close_sensors(opened.values())
