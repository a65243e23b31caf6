"""NVIDIA's libraries, played by Python objects: which device is which, and what NVML tells of it."""

from __future__ import annotations

import sys
import uuid
from types import SimpleNamespace

import pytest

from framepipe.telemetry import adapter as adapters
from framepipe.telemetry import nvml, sensors
from framepipe.telemetry.adapter import Adapter, Luid, find_adapter
from framepipe.telemetry.base import SensorUnavailableError
from framepipe.telemetry.nvml import NvmlMemory
from framepipe.telemetry.sensors import open_sensors, read_driver_model
from framepipe.telemetry.system import DriverModel

UUID = uuid.UUID("5d2f0041-00c3-7a18-9e00-b45cfe60a1aa")  # with bytes of zero, which end a C string
LUID = bytes.fromhex("e5d1000001000080")


class Driver:
    """The CUDA driver library: writes through the pointers that it is given."""

    def __init__(self, **changes: object) -> None:
        self.asked: list[str] = []
        self.uuid, self.luid, self.mask, self.tcc = UUID, LUID, 1, 0
        self.failing: dict[str, int] = {}
        vars(self).update(changes)

    def _status(self, name: str) -> int:
        self.asked.append(name)
        return self.failing.get(name, 0)

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._status("cuInit")

    def cuDeviceGet(self, device, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return self._status("cuDeviceGet")

    def cuDeviceGetUuid_v2(self, raw, device) -> int:
        assert device.value == 41
        raw._obj[:] = self.uuid.bytes
        return self._status("cuDeviceGetUuid_v2")

    def cuDeviceGetPCIBusId(self, text, size: int, device) -> int:
        assert (size, device.value) == (32, 41)
        text.value = b"0000:18:00.0"
        return self._status("cuDeviceGetPCIBusId")

    def cuDeviceGetLuid(self, raw, mask, device) -> int:
        raw._obj[:], mask._obj.value = self.luid, self.mask
        return self._status("cuDeviceGetLuid")

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        assert (attribute, device.value) == (35, 41)
        value._obj.value = self.tcc
        return self._status("cuDeviceGetAttribute")


# -- which device --


def test_a_luid_is_a_structure_of_two_halves():
    luid = Luid.from_bytes(LUID)
    assert luid == (0x80000001, 0xD1E5)
    assert str(luid) == "0x80000001_0x0000D1E5"
    with pytest.raises(ValueError, match="8 bytes"):
        Luid.from_bytes(b"1234567")


def test_an_adapter_has_every_name_of_its_device():
    found = find_adapter(1, Driver())
    assert found == Adapter(1, UUID, "0000:18:00.0", Luid(0x80000001, 0xD1E5), 0, False)


@pytest.mark.parametrize(("mask", "physical"), [(1, 0), (2, 1), (8, 3), (6, 1), (0, 0)])
def test_the_node_mask_tells_the_place_among_linked_adapters(mask, physical):
    assert find_adapter(1, Driver(mask=mask)).physical == physical


def test_under_tcc_there_is_no_luid_whatever_the_driver_writes():
    driver = Driver(tcc=1)
    found = find_adapter(1, driver)
    assert (found.luid, found.tcc) == (None, True)
    assert "cuDeviceGetLuid" not in driver.asked


@pytest.mark.parametrize("changes", [{"luid": bytes(8)}, {"failing": {"cuDeviceGetLuid": 801}}])
def test_a_device_without_a_luid(changes):
    assert find_adapter(1, Driver(**changes)).luid is None


def test_linux_exports_no_luid_and_an_older_driver_only_the_first_uuid():
    class Older(Driver):
        cuDeviceGetLuid = cuDeviceGetUuid_v2 = None
        cuDeviceGetUuid = Driver.cuDeviceGetUuid_v2

    found = find_adapter(1, Older())
    assert (found.luid, found.uuid) == (None, UUID)


def test_an_attribute_that_is_not_told_is_unknown():
    assert find_adapter(1, Driver(failing={"cuDeviceGetAttribute": 1})).tcc is None


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ({"cuInit": 100}, r"cuInit failed with CUDA error 100 \(there is no CUDA device\)"),
        ({"cuDeviceGet": 101}, r"cuDeviceGet of device 1 failed with CUDA error 101 \(there is no such device\)"),
        ({"cuDeviceGetUuid_v2": 999}, "cuDeviceGetUuid failed with CUDA error 999$"),
        ({"cuDeviceGetPCIBusId": 1}, "cuDeviceGetPCIBusId failed"),
    ],
)
def test_what_the_driver_refuses_is_said(failing, message):
    with pytest.raises(SensorUnavailableError, match=message):
        find_adapter(1, Driver(failing=failing))


def test_no_driver_is_said(monkeypatch):
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(adapters.ctypes, "CDLL", none)
    with pytest.raises(SensorUnavailableError, match="there is no NVIDIA driver"):
        find_adapter(0)


# -- NVML --


class NVMLError(Exception):
    pass


class NotFound(NVMLError):
    pass


class NotSupported(NVMLError):
    pass


class FunctionNotFound(NVMLError):
    pass


class Nvml:
    """The module ``pynvml`` with one device; a value that is an error is raised."""

    NVMLError = NVMLError
    NVMLError_FunctionNotFound = FunctionNotFound
    nvmlMemory_v2 = 0x02000028

    def __init__(self, **changes: object) -> None:
        self.running = 0
        self.known = f"GPU-{UUID}"
        self.start: object = None
        self.v1 = SimpleNamespace(total=1000, used=350, free=650)
        self.v2: object = SimpleNamespace(total=1000, reserved=50, used=300, free=650)
        self.compute: object = [SimpleNamespace(pid=7, usedGpuMemory=120), SimpleNamespace(pid=8, usedGpuMemory=9)]
        self.graphics: object = []
        self.model_v2: object = NotSupported("Not Supported")
        self.model_v1: object = NotSupported("Not Supported")
        vars(self).update(changes)

    @staticmethod
    def _give(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlInit(self) -> None:
        self._give(self.start)
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name != self.known:
            raise NotFound("Not Found")
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> object:
        assert handle == "handle"
        return self._give(self.v2 if version == self.nvmlMemory_v2 else self.v1)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> object:
        return self._give(self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> object:
        return self._give(self.graphics)

    def nvmlDeviceGetDriverModel_v2(self, handle: str) -> object:
        return self._give(self.model_v2)

    def nvmlDeviceGetDriverModel_v1(self, handle: str) -> object:
        return self._give(self.model_v1)


DEVICE = Adapter(1, UUID, "0000:18:00.0")


@pytest.fixture
def sensor(monkeypatch):
    """A function that opens the sensor of process 7 over the library given, where numbers are the machine's."""
    monkeypatch.setattr(nvml, "_sees_machine_pids", lambda: True)
    return lambda library: NvmlMemory(DEVICE, library, pid=7)


def test_the_device_and_this_process(sensor):
    library = Nvml()
    opened = sensor(library)
    assert library.running == 1
    assert opened.read() == {"used": 300, "free": 650, "total": 1000, "reserved": 50, "process_used": 120}
    assert opened.reason is None
    opened.close()
    opened.close()
    assert library.running == 0


def test_a_process_in_both_lists_is_not_counted_twice(sensor):
    library = Nvml(graphics=[SimpleNamespace(pid=7, usedGpuMemory=125)])
    assert sensor(library).read()["process_used"] == 125


def test_wddm_does_not_tell_what_a_process_has(sensor):
    opened = sensor(Nvml(compute=[SimpleNamespace(pid=7, usedGpuMemory=None)]))
    found = opened.read()
    assert (found["process_used"], found["used"]) == (None, 300)
    assert opened.reasons == {"process_used": "NVML cannot tell it: under WDDM Windows manages the memory"}


def test_a_process_that_is_not_listed_is_unknown_and_not_zero(sensor):
    opened = sensor(Nvml(compute=[SimpleNamespace(pid=8, usedGpuMemory=9)]))
    assert opened.read()["process_used"] is None
    assert opened.reason is not None and "no context on the device yet" in opened.reason


def test_lists_that_are_not_supported_take_nothing_else_away(sensor):
    opened = sensor(Nvml(compute=NotSupported("Not Supported")))
    assert opened.read()["used"] == 300
    assert opened.reasons == {"process_used": "NotSupported: Not Supported"}


def test_in_a_container_another_process_of_the_same_number_is_not_taken_for_this(monkeypatch):
    monkeypatch.setattr(nvml, "_sees_machine_pids", lambda: False)
    opened = NvmlMemory(DEVICE, Nvml(), pid=7)
    assert opened.read()["process_used"] is None
    assert opened.reason is not None and "container" in opened.reason


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")
def test_the_machines_own_namespace_is_known_by_its_number():
    def at(number: int) -> SimpleNamespace:
        return SimpleNamespace(stat=lambda: SimpleNamespace(st_ino=number))

    assert nvml._sees_machine_pids(at(0xEFFFFFFC))
    assert not nvml._sees_machine_pids(at(4026532345))
    assert not nvml._sees_machine_pids(nvml.Path("/proc/self/no-such-thing"))


def test_an_old_driver_has_no_figure_for_what_is_reserved(sensor):
    opened = sensor(Nvml(v2=FunctionNotFound("Function Not Found")))
    assert opened.read() == {"used": 350, "free": 650, "total": 1000, "reserved": None, "process_used": 120}
    assert opened.reason == "this driver counts reserved memory as used"


def test_a_device_that_shares_the_hosts_memory(sensor):
    opened = sensor(Nvml(v2=NotSupported("Not Supported")))
    assert opened.read() == {"used": None, "free": None, "total": None, "reserved": None, "process_used": 120}
    assert opened.reason == "NotSupported: Not Supported"


def test_a_mig_instance_is_found_by_its_own_uuid(sensor):
    assert sensor(Nvml(known=f"MIG-{UUID}")).read()["used"] == 300


def test_a_device_that_nvml_does_not_know_leaves_nothing_running(sensor):
    library = Nvml(known="GPU-another")
    with pytest.raises(SensorUnavailableError, match=f"NVML does not know the device {UUID}: Not Found"):
        sensor(library)
    assert library.running == 0


def test_nvml_without_its_library(sensor):
    with pytest.raises(SensorUnavailableError, match="NVML does not start: NVML Shared Library Not Found"):
        sensor(Nvml(start=NVMLError("NVML Shared Library Not Found")))


def test_the_package_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "framepipe.telemetry.cuda_memory", raising=False)
    reasons = {row.name: row.reason for row in open_sensors(adapter=DEVICE)}
    assert reasons["nvml"] == "nvidia-ml-py is not installed"
    assert reasons["cuda"] == "CuPy is not installed"


def test_an_installed_package_is_used(monkeypatch):
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(sensors, "find_adapter", lambda index: DEVICE)
    opened = {row.name: row for row in open_sensors(1)}
    assert isinstance(opened["nvml"], NvmlMemory)
    assert library.running == 1
    sensors.close_sensors(opened.values())
    assert library.running == 0


# -- driver models --


@pytest.mark.parametrize(
    ("pair", "models"),
    [([0, 0], (DriverModel.WDDM, DriverModel.WDDM)), ([1, 2], (DriverModel.TCC, DriverModel.MCDM))],
)
def test_the_driver_model_now_and_after_a_boot(sensor, pair, models):
    reading = sensor(Nvml(model_v2=pair)).driver_model()
    assert (reading.current, reading.pending) == models
    assert (reading.source, reading.reason) == ("nvmlDeviceGetDriverModel_v2", None)


def test_an_older_nvml_knows_the_first_version(sensor):
    reading = sensor(Nvml(model_v2=FunctionNotFound("x"), model_v1=[1, 0])).driver_model()
    assert (reading.current, reading.pending) == (DriverModel.TCC, DriverModel.WDDM)
    assert reading.source == "nvmlDeviceGetDriverModel"


def test_linux_or_a_model_of_the_future_has_a_reason(sensor):
    reading = sensor(Nvml()).driver_model()
    assert (reading.current, reading.pending, reading.reason) == (None, None, "NotSupported: Not Supported")
    reading = sensor(Nvml(model_v2=[3, 0])).driver_model()
    assert reading.current is None and reading.reason is not None and reading.reason.startswith("ValueError")


def test_nvml_comes_before_cuda(sensor, monkeypatch):
    opened = sensor(Nvml(model_v2=[2, 2]))
    assert read_driver_model([opened], DEVICE).current is DriverModel.MCDM
    silent = sensor(Nvml())
    assert read_driver_model([silent], DEVICE).source == "CU_DEVICE_ATTRIBUTE_TCC_DRIVER"
