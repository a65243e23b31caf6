"""Sensors of memory: their contract, those of Linux, and what is said where there is none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from framepipe.hardware import is_wsl2
from framepipe.telemetry import base, sensors
from framepipe.telemetry.base import Missing, Sensor, SensorUnavailableError, describe
from framepipe.telemetry.cgroup import CgroupMemory
from framepipe.telemetry.process import ProcessMemory
from framepipe.telemetry.procfs import ProcfsMemory
from framepipe.telemetry.sensors import NAMES, close_sensors, open_sensors, read_driver_model, read_sensors
from framepipe.telemetry.system import DriverModel, DriverModelReading, model_from_cuda

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has /proc")


class Scripted(Sensor):
    """Answers what it is given, or raises it."""

    name = "scripted"
    source = "a test"
    readings = {"used": "field u", "free": "field f"}  # noqa: RUF012

    def __init__(self, answer: Mapping[str, int | str] | Exception) -> None:
        super().__init__()
        self.answer = answer
        self.closings = 0

    def _read(self) -> Mapping[str, int | str]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _close(self) -> None:
        self.closings += 1


# -- the contract --


def test_numbers_are_given_and_a_text_is_the_reason_why_there_is_none():
    sensor = Scripted({"used": 5, "free": "not under this driver"})
    assert sensor.read() == {"used": 5, "free": None}
    assert sensor.reasons == {"free": "not under this driver"}
    assert sensor.reason == "not under this driver"
    sensor.answer = {"used": 0, "free": 7}
    assert sensor.read() == {"used": 0, "free": 7}
    assert (sensor.reasons, sensor.reason) == ({}, None)


def test_a_key_that_was_forgotten_has_a_reason_and_one_too_many_is_not_shown():
    sensor = Scripted({"used": 5, "other": 1})
    assert sensor.read() == {"used": 5, "free": None}
    assert list(sensor.reasons) == ["free"]


def test_an_error_is_a_reason_for_every_reading_and_the_next_may_succeed():
    sensor = Scripted(OSError("the driver\nis gone"))
    assert sensor.read() == {"used": None, "free": None}
    assert sensor.reason == "OSError: the driver is gone"
    sensor.answer = {"used": 1, "free": 2}
    assert sensor.read() == {"used": 1, "free": 2}


def test_a_closed_sensor_tells_nothing_and_closes_once():
    sensor = Scripted({"used": 5, "free": 6})
    sensor.close()
    sensor.close()
    assert sensor.closings == 1
    assert sensor.read() == {"used": None, "free": None}
    assert sensor.reason == "the sensor is closed"


def test_a_failing_close_is_a_warning_so_that_others_are_closed():
    first, second = Scripted({}), Scripted({})
    second._close = lambda: 1 // 0
    with pytest.warns(ResourceWarning, match="closing the sensor scripted: ZeroDivisionError"):
        close_sensors([first, second])
    assert first.closings == 1


def test_a_sensor_that_hangs_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(base, "PATIENCE_S", 0.0)
    entered, leave = threading.Event(), threading.Event()

    class Hanging(Scripted):
        def _read(self) -> Mapping[str, int | str]:
            entered.set()
            leave.wait(10)
            return {"used": 1, "free": 2}

    sensor = Hanging({})
    seen: list[dict[str, int | None]] = []
    thread = threading.Thread(target=lambda: seen.append(sensor.read()))
    thread.start()
    assert entered.wait(10)
    assert sensor.read() == {"used": None, "free": None}
    assert sensor.reason == "another thread is still waiting for this sensor"
    with pytest.warns(ResourceWarning, match="hangs and is not closed"):
        sensor.close()
    leave.set()
    thread.join(10)
    assert seen == [{"used": 1, "free": 2}]
    sensor.close()
    assert sensor.closings == 1


def test_a_missing_sensor_is_a_row_with_its_reason():
    missing = Missing("nvml", "it is not installed")
    assert (missing.name, missing.reason, missing.read()) == ("nvml", "it is not installed", {})
    missing.close()
    assert missing.reason == "it is not installed"


def test_an_error_in_one_line():
    assert describe(SensorUnavailableError("no GPU")) == "no GPU"
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(RuntimeError()) == "RuntimeError"


# -- /proc --

STATUS = """Name:\tpython3
Umask:\t0022
VmLck:\t       8 kB
VmPin:\t       0 kB
VmHWM:\t   16488 kB
VmRSS:\t 4210688 kB
RssAnon:\t   11600 kB
RssFile:\t   15320 kB
RssShmem:\t 4194304 kB
Threads:\t1
"""


def test_the_status_file_is_read_in_bytes(tmp_path):
    path = tmp_path / "status"
    path.write_text(STATUS, encoding="utf-8")
    sensor = ProcfsMemory(path)
    assert sensor.read() == {
        "rss": 4210688 * 1024,
        "rss_anon": 11600 * 1024,
        "rss_shmem": 4 << 30,
        "locked": 8192,
        "pinned": 0,
    }
    path.write_text(
        STATUS.replace("VmPin:\t       0 kB\n", "").replace("VmLck:\t       8 kB", "VmLck:"), encoding="utf-8"
    )
    found = sensor.read()
    assert (found["locked"], found["pinned"], found["rss_shmem"]) == (None, None, 4 << 30)
    assert sensor.reasons == {"locked": "this kernel does not tell VmLck", "pinned": "this kernel does not tell VmPin"}
    path.unlink()
    assert set(sensor.read().values()) == {None}
    assert sensor.reason is not None and sensor.reason.startswith("FileNotFoundError")


def test_no_proc_is_no_sensor(tmp_path):
    with pytest.raises(SensorUnavailableError, match="there is no"):
        ProcfsMemory(tmp_path / "status")


@LINUX
def test_shared_memory_of_this_process_shows_where_pinned_memory_would():
    import mmap

    sensor = ProcfsMemory()
    before = sensor.read()
    with mmap.mmap(-1, 32 << 20) as shared:
        for at in range(0, len(shared), mmap.PAGESIZE):
            shared[at] = 1
        after = sensor.read()
    grown = after["rss_shmem"] - before["rss_shmem"]
    assert abs(grown - (32 << 20)) <= 1 << 20
    assert after["rss"] - before["rss"] >= 31 << 20


def test_the_resident_set_by_psutil():
    sensor = ProcessMemory()
    rss = sensor.read()["rss"]
    assert rss is not None and 0.5 < rss / psutil.Process().memory_info().rss < 2


def test_windows_has_private_bytes_too():
    from collections import namedtuple

    class Process:
        def memory_info(self):
            return namedtuple("pmem", "rss vms private")(10, 20, 30)

    assert ProcessMemory(Process()).read() == {"rss": 10, "private": 30}


# -- control groups --


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def tree(tmp_path):
    """A function that makes the sensor of a machine whose /proc/self/cgroup has ``text``."""

    def sensor(text: str) -> CgroupMemory:
        (tmp_path / "cgroup").write_text(text, encoding="utf-8")
        return CgroupMemory(tmp_path / "cgroup", tmp_path / "fs")

    sensor.root = tmp_path / "fs"
    return sensor


def test_version_2_takes_the_group_with_the_lowest_limit(tree):
    group(tree.root, "", memory__stat="root has no memory.current")
    group(tree.root, "pod", memory__current="5000", memory__max="8000")
    group(tree.root, "pod/one", memory__current="3000", memory__max="max")
    sensor = tree("0::/pod/one\n")
    assert sensor.read() == {"current": 5000, "limit": 8000}
    assert sensor.source == str(tree.root / "pod")
    assert sensor.readings == {"current": "memory.current", "limit": "memory.max"}
    group(tree.root, "pod/one", memory__max="6000")
    assert tree("0::/pod/one\n").read() == {"current": 3000, "limit": 6000}


def test_no_limit_is_none_and_said(tree):
    group(tree.root, "pod/one", memory__current="3000", memory__max="max")
    sensor = tree("0::/pod/one\n")
    assert sensor.read() == {"current": 3000, "limit": None}
    assert sensor.reason == "no limit is set"


def test_version_2_in_a_namespace_stands_at_the_mount(tree):
    group(tree.root, "", memory__current="1", memory__max="2")
    assert tree("0::/\n").read() == {"current": 1, "limit": 2}


@pytest.mark.parametrize("controllers", ["memory", "hugetlb,memory", "memory,cpu"])
def test_version_1_where_the_process_sees_its_group(tree, controllers):
    v1 = {"memory__usage_in_bytes": "7000", "memory__limit_in_bytes": "9223372036854771712"}
    group(tree.root, "memory", **v1)
    group(tree.root, "memory/docker/x", **{**v1, "memory__limit_in_bytes": "9000"})
    sensor = tree(f"5:cpuset:/other\n4:{controllers}:/docker/x\n0::/docker/x\n")
    assert sensor.read() == {"current": 7000, "limit": 9000}
    assert sensor.source.endswith("x")


def test_version_1_in_a_container_that_is_mounted_as_the_root(tree):
    group(tree.root, "memory", memory__usage_in_bytes="7000", memory__limit_in_bytes="9223372036854771712")
    sensor = tree("4:memory:/docker/not-to-be-seen\n")
    assert sensor.read() == {"current": 7000, "limit": None}
    assert sensor.source == str(tree.root / "memory")


@pytest.mark.parametrize("text", ["", "0::/pod\n", "5:memorystick:/x\n"])
def test_no_group_that_counts_memory_is_no_sensor(tree, text):
    with pytest.raises(SensorUnavailableError, match="no control group"):
        tree(text)


def test_no_file_of_groups_is_no_sensor(tmp_path):
    with pytest.raises(SensorUnavailableError, match="there is no"):
        CgroupMemory(tmp_path / "cgroup", tmp_path)


# -- all of them --


def test_every_sensor_has_a_row_and_those_without_a_device_say_so():
    opened = open_sensors()
    assert tuple(sensor.name for sensor in opened) == NAMES
    missing = {sensor.name: sensor.reason for sensor in opened if isinstance(sensor, Missing)}
    assert {"cuda", "nvml", "wddm", "pdh"} <= set(missing)
    assert missing["cuda"] == missing["nvml"] == "no CUDA device was named"
    found = read_sensors(opened)
    assert found["process.rss"] > 0
    assert not any(key.startswith(("cuda.", "nvml.")) for key in found)
    close_sensors(opened)
    assert set(read_sensors(opened).values()) == {None}


@LINUX
def test_windows_sensors_are_missing_on_linux_with_a_reason():
    opened = {sensor.name: sensor for sensor in open_sensors()}
    assert opened["wddm"].reason == opened["pdh"].reason == "only Windows has it"
    assert not isinstance(opened["procfs"], Missing)
    close_sensors(opened.values())


def test_linux_sensors_are_missing_elsewhere(monkeypatch):
    monkeypatch.setattr(sensors.sys, "platform", "darwin")
    opened = {sensor.name: sensor.reason for sensor in open_sensors()}
    assert opened["procfs"] == opened["cgroup"] == "only Linux has it"
    assert opened["wddm"] == "only Windows has it"


def test_a_machine_without_a_driver_has_rows_that_say_so(monkeypatch):
    def none(index: int) -> None:
        raise SensorUnavailableError(f"there is no NVIDIA driver for {index}")

    monkeypatch.setattr(sensors, "find_adapter", none)
    opened = {sensor.name: sensor for sensor in open_sensors(3)}
    assert opened["cuda"].reason == opened["nvml"].reason == "there is no NVIDIA driver for 3"
    close_sensors(opened.values())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("no", name="pynvml"), "nvidia-ml-py is not installed"),
        (SensorUnavailableError("NVML does not start"), "NVML does not start"),
        (OSError("cannot load libnvrtc"), "OSError: cannot load libnvrtc"),
    ],
)
def test_a_sensor_that_does_not_open_is_a_row(monkeypatch, error, reason):
    def fail(adapter: object) -> None:
        raise error

    monkeypatch.setattr("framepipe.telemetry.nvml.NvmlMemory", fail)
    opened = open_sensors(adapter=object())
    assert [sensor.reason for sensor in opened if sensor.name == "nvml"] == [reason]
    assert tuple(sensor.name for sensor in opened) == NAMES
    close_sensors(opened)


# -- driver models and WSL --


def test_what_cuda_tells_of_the_driver_model():
    assert model_from_cuda(True, "win32").current is DriverModel.TCC
    unknown = model_from_cuda(False, "win32")
    assert unknown.current is None
    assert unknown.as_json() == {
        "current": None,
        "pending": None,
        "source": "CU_DEVICE_ATTRIBUTE_TCC_DRIVER",
        "reason": "WDDM and MCDM are told apart by NVML alone",
    }
    assert model_from_cuda(False, "linux").reason == "driver models are Windows' alone"


def test_a_reading_of_the_driver_model_is_plain():
    reading = DriverModelReading(DriverModel.WDDM, DriverModel.MCDM, "x")
    assert reading.as_json() == {"current": "WDDM", "pending": "MCDM", "source": "x", "reason": None}


@LINUX
def test_linux_has_no_driver_model():
    assert read_driver_model([Missing("nvml", "x")]).reason == "driver models are Windows' alone"


@LINUX
@pytest.mark.parametrize(
    ("release", "dxg", "wsl2"),
    [
        ("5.15.153.1-microsoft-standard-WSL2", False, True),
        ("4.19.84-microsoft-standard", False, True),
        ("6.6.0-my-own", True, True),
        ("4.4.0-19041-Microsoft", False, False),
        ("6.8.0-45-generic", False, False),
    ],
)
def test_wsl_2_is_told_by_its_kernel_or_its_device(tmp_path, release, dxg, wsl2):
    device = tmp_path / "dxg"
    if dxg:
        device.touch()
    assert is_wsl2(release, device) is wsl2


def test_other_systems_are_never_wsl_2(monkeypatch, tmp_path):
    monkeypatch.setattr("framepipe.hardware.sys.platform", "win32")
    assert not is_wsl2("5.15.153.1-microsoft-standard-WSL2", tmp_path)
