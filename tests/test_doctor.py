"""The doctor: what it finds on any machine, and what it says of machines that this is not."""

from __future__ import annotations

import copy
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_telemetry_windows import Pdh

from framepipe import _cli_doctor, cli, hardware, pagelock
from framepipe.bench.compare import BETTER, NOISE, WORSE, compare, load
from framepipe.device._packages import PACKAGES, newest_cuda
from framepipe.doctor import checks_memory, compiler, examination, gpus, measuring, media, system
from framepipe.doctor.check import GROUNDS, STATUSES, TO_DO, UNKNOWN
from framepipe.doctor.measuring import How
from framepipe.errors import ConfigError
from framepipe.probe import baselines, machine
from framepipe.probe.machine import Available
from framepipe.telemetry.adapter import Adapter, Luid
from framepipe.telemetry.base import SensorUnavailableError

GIB, MIB = 1 << 30, 1 << 20
UUID = "GPU-00000000-0000-0000-0000-000000000005"
H200 = f"NVIDIA H200, {UUID}, 00000000:18:00.0, 580.159.03, 143771, 600, 143171, 9.0, [N/A], [N/A]\n"
LAPTOP = f"NVIDIA GeForce RTX 4060 Laptop GPU, {UUID}, 00000000:01:00.0, 551.61, 8188, 900, 7288, 8.9, WDDM, WDDM\n"
WINDOWS_GPU = Adapter(0, uuid.UUID(int=5), "0000:01:00.0", Luid(0x80000001, 0xD1E5), 2, False)
KERNEL = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023"


@pytest.fixture(autouse=True)
def _apart(monkeypatch, tmp_path):
    """What this machine's user has kept is no part of a test."""
    monkeypatch.setattr(baselines, "default_path", lambda: tmp_path / "nowhere" / "baseline.json")


@pytest.fixture
def install(monkeypatch):
    """A machine whose programs, packages, driver and CuPy are these; everything else is as it is here."""

    def machine_of(
        smi: str | None = None,
        apps: str = "",
        packages: dict[str, str] | None = None,
        cupy: dict[str, Any] | None = None,
        kernel: str | None = None,
    ) -> None:
        def ask(*command: str, timeout_s: float = 15) -> hardware.Answer:
            if command[0] != "nvidia-smi":
                return hardware.Answer(json.dumps(cupy) if cupy else None)
            text = apps if "compute-apps" in command[1] else smi
            return hardware.Answer(text, None if text is not None else "nvidia-smi is not there")

        known = {"pyarrow": "1", "nvidia-ml-py": "13"} if packages is None else packages
        monkeypatch.setattr(hardware, "ask", ask)
        monkeypatch.setattr(hardware, "kernel_driver", lambda: kernel)
        monkeypatch.setattr(compiler, "version", known.get)
        monkeypatch.setitem(sys.modules, "pynvml", None)

    return machine_of


@pytest.fixture
def examined(install):
    def examine(**what: Any) -> dict[str, Any]:
        install(**what)
        return examination.examine()

    return examine


def check(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (each for each in found["checks"] if each["name"] == name)
    return one


def text(found: dict[str, Any], name: str) -> str:
    return "\n".join(line["text"] for line in check(found, name)["lines"])


def again(found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The record with other facts, checked anew."""
    changed = {**copy.deepcopy(found), **changes}
    checks = [examination._asked(each, changed) for each in examination.CHECKS]
    return {**changed, "checks": [each.as_json() for each in checks], "advice": [a for c in checks for a in c.advice]}


# -- any machine --


def test_this_machine_is_examined_without_an_error():
    found = examination.examine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["schema"] == "framepipe.doctor/1"
    assert {"h264", "mjpeg", "ffv1"} <= set(found["video"]["decoders"])
    assert found["video"]["libraries"]["libavcodec"].count(".") == 2
    assert found["cpu"]["logical"] >= 1
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["memory"]["memlock_bytes"] == pagelock.limit_bytes()
    assert found["device"] in ("cpu", "cuda")
    assert (found["measured"], found["measures"]) == (None, [])


def test_the_checks_are_in_order_and_each_line_has_its_ground():
    found = examination.examine()
    assert [each["name"] for each in found["checks"]] == [
        "devices", "driver", "driver_model", "wsl2", "container", "bus", "codecs", "hardware", "cupy", "page_lock",
        "counters", "processes", "churn", "fallback", "pinning", "packages",
    ]  # fmt: skip
    for each in found["checks"]:
        assert each["lines"], each["name"]
        assert each["status"] in STATUSES
        assert (each["status"] == TO_DO) == bool(each["advice"])
        for line in each["lines"]:
            assert line["ground"] in GROUNDS
            assert "\n" not in line["text"]
            assert line["ground"] == GROUNDS[0] or line["source"] or "claim" in line["ground"]


def test_a_check_that_fails_takes_no_other_along(monkeypatch):
    found = examination.examine()
    broken = again(found, memory={})
    assert check(broken, "container")["status"] == UNKNOWN
    assert text(broken, "container").startswith("could not be told: KeyError")
    assert text(broken, "driver_model") == text(found, "driver_model")


def test_no_gpu_is_no_trouble(examined):
    found = examined()
    assert found["gpu"] == {"driver": None, "reason": "nvidia-smi is not there", "devices": []}
    assert found["cupy"] == {"packages": {}, "works": None, "error": None, "cuda": None}
    assert (found["device"], found["why"]) == ("cpu", "there is no NVIDIA GPU")
    assert found["advice"] == []
    assert text(found, "devices") == "none is seen: nvidia-smi is not there"


# -- GPUs --


def test_a_gpu_and_its_memory(examined):
    found = examined(smi=H200)
    assert found["gpu"]["driver"] == "580.159.03"
    assert found["gpu"]["devices"] == [
        {
            "name": "NVIDIA H200",
            "uuid": UUID,
            "pci_bus_id": "00000000:18:00.0",
            "memory_bytes": 143771 * MIB,
            "used_bytes": 600 * MIB,
            "free_bytes": 143171 * MIB,
            "compute_capability": "9.0",
            "driver_model": None,
            "pending_driver_model": None,
        }
    ]
    assert text(found, "devices") == "0: NVIDIA H200, 150.8 GB, 150.1 GB free, compute capability 9.0"
    assert found["why"] == "there is a GPU, but CuPy is not installed"
    assert found["advice"] == ["for the GPU: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"]


def test_of_several_gpus_it_is_said_which_is_which(examined, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    two = examined(smi=H200 + LAPTOP.replace("0005", "0006"))
    assert text(two, "devices").splitlines()[2].startswith("these numbers are nvidia-smi's; CUDA counts from")
    assert "fastest" not in text(examined(smi=H200 + H200.replace("0005", "0006")), "devices")
    about = {"gpu": {**MEASURED["machine"]["gpu"], "index": 1, "name": "NVIDIA H200"}, "cpu": "C"}
    assert "measured on cuda:1, NVIDIA H200" in text(again(two, measured={**MEASURED, "machine": about}), "bus")


def test_a_driver_that_does_not_know_a_field_is_asked_for_less(monkeypatch):
    asked = []

    def ask(*command: str, timeout_s: float = 15) -> hardware.Answer:
        asked.append(command[1])
        if "compute_cap" in command[1]:
            return hardware.Answer(None, "nvidia-smi ended with status 2: Field is not a valid field to query.")
        return hardware.Answer(f"Tesla K80, {UUID}, 00000000:18:00.0, 450.80.02, 11441, [N/A], nonsense\n")

    monkeypatch.setattr(hardware, "ask", ask)
    found = gpus.examine()
    assert (found["driver"], len(asked)) == ("450.80.02", 2)
    (device,) = found["devices"]
    assert (device["memory_bytes"], device["used_bytes"], device["free_bytes"]) == (11441 * MIB, None, None)
    assert device["compute_capability"] is None


def test_a_driver_without_a_gpu_says_why(examined):
    found = examined(kernel="535.104.05")
    assert found["gpu"] == {"driver": "535.104.05", "reason": "nvidia-smi is not there", "devices": []}
    assert found["why"] == "the NVIDIA driver shows no GPU"
    assert check(found, "devices")["status"] == UNKNOWN


def test_a_gpu_that_only_cupy_finds_is_one(examined):
    works = {"works": True, "error": None, "cuda": 12090}
    found = examined(packages={"cupy-cuda12x": "14.2.0", "pyarrow": "1", "nvidia-ml-py": "13"}, cupy=works)
    assert text(found, "devices") == "CuPy finds one; nvidia-smi is not there"
    assert "no GPU" not in text(found, "counters")


@pytest.mark.parametrize(
    ("models", "status", "words"),
    [
        ("WDDM, WDDM", "ok", "0: WDDM"),
        ("TCC, TCC", "ok", "0: TCC"),
        ("MCDM, MCDM", "ok", "0: MCDM"),
        ("WDDM, MCDM", "note", "0: WDDM, and MCDM after the next start of Windows"),
        ("[N/A], [N/A]", "unknown", "0: nvidia-smi does not tell it"),
        ("WDDM, [Unknown Error]", "ok", "0: WDDM"),
    ],
)
def test_driver_models_of_windows_now_and_later(examined, models, status, words):
    found = again(examined(smi=LAPTOP.replace("WDDM, WDDM", models)), system="win32")
    one = check(found, "driver_model")
    assert (one["status"], one["lines"][0]["text"]) == (status, words)
    assert ("prefer the pooled" in "\n".join(found["advice"])) == models.startswith("WDDM")


def test_elsewhere_there_are_no_driver_models(examined):
    found = examined(smi=H200)
    assert text(again(found, system="linux"), "driver_model") == "there is none: this is not Windows"
    assert "WDDM" in text(again(found, system="linux", wsl2=True), "driver_model")


# -- who else --


class NvmlError(Exception):
    pass


class Nvml:
    """The library with one GPU and these rows of compute and graphics processes."""

    NVMLError = NvmlError

    def __init__(self, compute: list[Any], graphics: list[Any]) -> None:
        self.compute, self.graphics, self.open = compute, graphics, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return UUID.encode()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return self.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        return self.graphics

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid == 8:
            raise NvmlError("No permission")
        return b"C:\\Program Files\\A B\\game.exe" if pid == 9 else b"/usr/bin/python3"


def row(pid: int, nbytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


def test_a_program_has_a_name_while_it_runs():
    assert gpus.program(os.getpid())
    assert gpus.program(2**31 - 5) is None


def test_processes_of_nvml_count_once_and_this_one_is_left_out(monkeypatch):
    monkeypatch.setattr(gpus.os, "getpid", lambda: 5)
    nvml = Nvml([row(7, 3 * GIB), row(5, GIB), row(8, None)], [row(7, 3 * GIB), row(9, 20 * MIB)])
    found = gpus.processes(nvml)
    assert found == {
        "source": "NVML",
        "reason": None,
        "rows": [
            {"gpu": UUID, "pid": 7, "name": "python3", "nbytes": 3 * GIB},
            {"gpu": UUID, "pid": 8, "name": None, "nbytes": None},
            {"gpu": UUID, "pid": 9, "name": "game.exe", "nbytes": 20 * MIB},
        ],
    }
    assert nvml.open == 0


def test_nvml_that_fails_is_a_reason(monkeypatch):
    nvml = Nvml([], [])
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: 1 / 0)
    assert gpus.processes(nvml) == {"rows": [], "source": "NVML", "reason": "ZeroDivisionError: division by zero"}
    assert nvml.open == 0


@pytest.mark.parametrize("lacking", [("Graphics",), ("Compute", "Graphics")])
def test_a_list_that_nvml_does_not_have_takes_no_other_along(lacking):
    def refuse(handle: int) -> list[Any]:
        raise NvmlError("Not Supported")

    nvml = Nvml([row(7, GIB)], [])
    for name in lacking:
        setattr(nvml, f"nvmlDeviceGet{name}RunningProcesses", refuse)
    found = gpus.processes(nvml)
    seen = [each["pid"] for each in found["rows"]]
    assert (seen, found["reason"]) == (([7], None) if len(lacking) == 1 else ([], "NvmlError: Not Supported"))


def test_without_nvml_nvidia_smi_is_asked(examined):
    found = examined(smi=H200.replace("600,", "9000,"), apps=f"{UUID}, 77, 6000, /usr/bin/train, v2\nnonsense\n")
    assert found["processes"]["rows"] == [{"gpu": UUID, "pid": 77, "name": "train, v2", "nbytes": 6000 * MIB}]
    assert check(found, "processes")["status"] == "note"
    lines = text(found, "processes").splitlines()
    assert lines[0] == "process 77 (train, v2) holds 6.3 GB"
    assert lines[1].startswith("3.1 GB are used beside that")


def test_nobody_is_nobody_and_unknown_is_unknown(examined):
    found = examined(smi=H200.replace("600,", "12,"))
    assert text(found, "processes") == "nobody, by nvidia-smi, compute processes alone"
    unknown = again(found, processes={"rows": [], "source": "NVML", "reason": "it does not start"})
    assert (check(unknown, "processes")["status"], text(unknown, "processes")) == ("unknown", "NVML: it does not start")
    inside = again(found, wsl2=True)  # the driver lists nobody there, whoever is on the GPU
    assert (check(inside, "processes")["status"], "nobody" in text(inside, "processes")) == ("unknown", False)


@pytest.mark.parametrize(
    ("system", "wsl2", "said"), [("linux", False, True), ("linux", True, False), ("win32", False, False)]
)
def test_only_linux_hides_processes_from_containers(examined, system, wsl2, said):
    found = again(examined(smi=H200.replace("600,", "9000,")), system=system, wsl2=wsl2)
    assert "9.4 GB are used beside that" in text(found, "processes")
    assert ("in a container" in text(found, "processes")) == said


def test_only_so_many_are_shown_the_largest_first(examined):
    rows = [{"gpu": UUID, "pid": pid, "name": None, "nbytes": pid * MIB} for pid in range(1, 12)]
    found = again(examined(smi=H200.replace("600,", "12,")), processes={"rows": rows, "source": "NVML", "reason": None})
    lines = text(found, "processes").splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("process 11 holds 11.5 MB", "and 3 more", 9)


# -- Windows --


def find_one(number: int) -> Adapter:
    if number:
        raise SensorUnavailableError("there is no such device")
    return WINDOWS_GPU


def test_windows_counters_of_adapters_and_processes(monkeypatch):
    monkeypatch.setattr(gpus.os, "getpid", lambda: 8)
    monkeypatch.setattr(gpus, "program", {7: "train.exe"}.get)
    found = gpus.windows_counters("win32", find_one, Pdh())
    assert found == {
        "adapters": [{"uuid": UUID, "dedicated_bytes": 3000, "shared_bytes": 700}],
        "processes": [
            {
                "gpu": UUID,
                "pid": 7,
                "name": "train.exe",
                "dedicated_bytes": 1000,
                "local_bytes": 1001,
                "non_local_bytes": 601,
            }
        ],
        "reason": None,
    }


def test_windows_counters_that_are_not_there_are_a_reason(monkeypatch):
    def tcc(number: int) -> Adapter:
        return Adapter(0, uuid.UUID(int=5), "0", None, 0, True) if not number else find_one(number)

    off = Pdh()
    off.counters.clear()
    monkeypatch.setitem(sys.modules, "win32pdh", None)
    reasons = {
        "none": gpus.windows_counters("win32", lambda number: find_one(number + 1), Pdh())["reason"],
        "linux": gpus.windows_counters("linux")["reason"],
        "tcc": gpus.windows_counters("win32", tcc, Pdh())["reason"],
        "off": gpus.windows_counters("win32", find_one, off)["reason"],
        "package": gpus.windows_counters("win32", find_one)["reason"],
    }
    assert reasons["none"] == "CUDA's driver shows no GPU"
    assert reasons["linux"] == "only Windows has them"
    assert reasons["tcc"] == "no adapter's memory is managed by Windows (TCC)"
    assert "no counters of GPU memory" in reasons["off"]
    assert reasons["package"] == "pywin32 is not installed"


def counters(dedicated: int, **non_local: int) -> dict[str, Any]:
    people = [
        {
            "gpu": UUID,
            "pid": int(pid[1:]),
            "name": "game.exe",
            "dedicated_bytes": None,
            "local_bytes": GIB,
            "non_local_bytes": nbytes,
        }
        for pid, nbytes in non_local.items()
    ]
    adapters = [{"uuid": UUID, "dedicated_bytes": dedicated, "shared_bytes": sum(non_local.values())}]
    return {"adapters": adapters, "processes": people, "reason": None}


FULL = 8188 * MIB - 100 * MIB


@pytest.mark.parametrize(
    ("before", "after", "signs"),
    [
        (counters(FULL, p7=10 * MIB), counters(FULL, p7=100 * MIB), 1),
        (counters(FULL, p7=2 * GIB), counters(FULL, p7=2 * GIB), 1),
        (counters(FULL, p7=10 * MIB), counters(FULL, p7=11 * MIB), 0),
        (counters(4 * GIB, p7=10 * MIB), counters(4 * GIB, p7=2 * GIB), 0),  # pinned memory: the GPU is not full
        (counters(FULL), counters(FULL, p7=300 * MIB, p9=MIB), 1),
    ],
)
def test_the_fallback_is_found_by_its_signs(examined, before, after, signs):
    found = again(examined(smi=LAPTOP), system="win32", windows=[before, after])
    one = check(found, "fallback")
    assert len(list(checks_memory.signs(before, after, {UUID: 8188 * MIB}))) == signs
    assert one["status"] == (TO_DO if signs else "ok")
    assert ("Prefer No Sysmem Fallback" in "".join(one["advice"])) == bool(signs)
    if signs:
        assert "8.5 GB of 8.6 GB video memory are in use, and process 7 has" in text(found, "fallback")
    grown = checks_memory.signs(counters(FULL, p7=10 * MIB), counters(FULL, p7=100 * MIB), {UUID: 8188 * MIB})
    assert next(iter(grown)).endswith("94.4 MB more than before")


def test_the_fallback_where_it_cannot_be(examined):
    found = examined(smi=LAPTOP.replace("551.61", "536.23"))
    nothing = {"adapters": [], "processes": [], "reason": "pywin32 is not installed"}
    assert "has none: it came with 536.40" in text(again(found, system="win32", windows=[nothing] * 2), "fallback")
    newer = again(examined(smi=LAPTOP), system="win32", windows=[nothing] * 2)
    assert check(newer, "fallback")["status"] == UNKNOWN
    assert text(newer, "fallback").endswith("its signs are not known: pywin32 is not installed")
    assert check(again(found, system="linux"), "fallback")["status"] == "ok"
    assert check(again(found, system="linux", wsl2=True), "fallback")["status"] == UNKNOWN
    without = again(examined(), system="win32", windows=[nothing] * 2)
    assert (check(without, "fallback")["status"], len(check(without, "fallback")["lines"])) == ("ok", 1)


def test_what_windows_says_of_a_process_stands_where_nvml_is_silent(examined):
    told = {"rows": [{"gpu": UUID, "pid": 7, "name": "a.exe", "nbytes": None}], "source": "NVML", "reason": None}
    now = counters(FULL, p7=0, p9=0)
    found = again(examined(smi=LAPTOP), system="win32", windows=[now, now], processes=told)
    lines = text(found, "processes").splitlines()
    assert lines[:2] == ["process 7 (a.exe) holds 1.1 GB", "process 9 (game.exe) holds 1.1 GB"]


def test_windows_has_other_limits_of_locking(examined):
    found = again(examined(smi=LAPTOP), system="win32")
    assert "half of the memory" in text(found, "page_lock")
    assert "RLIMIT" not in text(found, "page_lock")
    assert "non-local" in text(found, "pinning")


# -- containers, WSL 2, locking --


def write(root: Path, **files: str) -> Path:
    for name, words in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words, encoding="utf-8")
    return root


def test_the_limits_of_a_container(examined, tmp_path):
    root = write(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/pod/one\n",
            "sys/fs/cgroup/pod/memory.max": "2000000000",
            "sys/fs/cgroup/pod/memory.current": "500000000",
            "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 100000000\nactive_file 200000000",
            "sys/fs/cgroup/pod/one/cpu.max": "50000 100000",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU 3000\nflags\t: fpu",
        },
    )
    memory, cpu = system.memory(root), system.processor(root)
    assert (memory["cgroup_limit_bytes"], memory["cgroup_used_bytes"]) == (2_000_000_000, 500_000_000)
    assert (cpu["quota"], cpu["model"]) == (0.5, "Some CPU 3000")
    found = again(examined(), memory=memory, cpu=cpu)
    usable = cpu["usable"] or cpu["logical"]
    assert found["advice"] == [f"this container gets 0.5 CPUs of {usable}: set threads: 1"]
    words = "limit 2.0 GB, 500.0 MB of it used, 300.0 MB of that by pages of files ("
    assert text(found, "container").startswith(words)
    assert check(again(found, cpu={**cpu, "quota": None}), "container")["status"] == "note"


V1 = {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x/y"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),  # what is above binds as well
        ({"a/cpu.max": "50000 100000", "a/b/cpu.max": "200000 100000"}, 0.5),
        ({"a/cpu.max": "max 100000"}, None),
        ({"a/cpu.max": "50000 0"}, None),
        ({"a/cpu.max": "nonsense"}, None),
        ({**V1, "cpu/x/cpu.cfs_quota_us": "150000", "cpu/x/cpu.cfs_period_us": "100000"}, 1.5),
        ({**V1, "cpu/x/y/cpu.cfs_quota_us": "-1", "cpu/x/y/cpu.cfs_period_us": "100000"}, None),
        ({**V1, "cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),  # as a container sees it
    ],
)
def test_the_lowest_quota_of_either_version_counts(tmp_path, files, quota):
    names = {name if name.startswith("proc") else f"sys/fs/cgroup/{name}": words for name, words in files.items()}
    assert system.processor(write(tmp_path, **{"proc/self/cgroup": "0::/a/b", **names}))["quota"] == quota


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/memory.current": "1",
            "sys/fs/cgroup/cpu.max": "max 100000",
        },
        {
            "proc/self/cgroup": "4:memory:/x",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        },
        {"proc/self/cgroup": "5:devices:/x"},
        {},
    ],
)
def test_no_limit_is_none(examined, tmp_path, files):
    root = write(tmp_path, **files)
    memory, cpu = system.memory(root), system.processor(root)
    assert (memory["cgroup_limit_bytes"], cpu["quota"]) == (None, None)
    one = check(again(examined(), memory=memory, cpu=cpu), "container")
    seen = "" if memory["cgroup_used_bytes"] is not None else " is seen"
    assert (one["status"], one["lines"][0]["text"].split(" (")[0]) == ("ok", f"no limit of memory{seen}")


def test_wsl2_and_what_could_be_pinned_there(examined):
    found = again(examined(smi=H200), wsl2=True)
    assert any(line.startswith("WSL 2 page-locks little") for line in found["advice"])
    assert any("install no NVIDIA driver in Linux" in line for line in found["advice"])
    rows = [
        {**PINNED, "requested": 256 * MIB},
        {**PINNED, "requested": 512 * MIB, "status": "failed", "reason": "out of memory"},
    ]
    seen = again(found, measured={**MEASURED, "pinned": [rows]})
    assert "a block of 268.4 MB could be page-locked\na block of 536.9 MB could not" in text(seen, "wsl2")


@pytest.mark.parametrize(("limit", "words"), [(None, "no limit, for"), (8 << 20, "RLIMIT_MEMLOCK is 8.4 MB")])
def test_one_reading_of_the_lock_limit(examined, monkeypatch, limit, words):
    monkeypatch.setattr(pagelock, "limit_bytes", lambda: limit)
    found = again(examined(smi=H200), system="linux", wsl2=False)
    assert found["memory"]["memlock_bytes"] == limit
    assert text(found, "page_lock").startswith(words)
    assert text(found, "page_lock").endswith("CUDA is not bound by it")
    assert "CUDA" not in text(again(found, wsl2=True), "page_lock"), "nobody knows it of WSL 2"
    assert "CUDA" not in text(again(examined(), system="linux", wsl2=False), "page_lock")


# -- FFmpeg --


def test_codecs_are_told_apart():
    assert media.has_codec("ffv1", "r")
    assert media.has_codec("ffv1", "w")
    assert not media.has_codec("libx264", "r")
    assert not media.has_codec("no-such-codec", "r")


def test_the_drivers_libraries_by_system():
    loaded = []

    def load(name: str) -> ctypes.CDLL:
        loaded.append(name)
        if "enc" in name.lower():
            raise OSError(f"{name}: cannot open\nshared object file")
        return ctypes.CDLL(None)

    assert media.driver_libraries("win32", load) == {
        "decoding": {"name": "nvcuvid.dll", "reason": None},
        "encoding": {"name": "nvEncodeAPI64.dll", "reason": "nvEncodeAPI64.dll: cannot open shared object file"},
    }
    assert media.driver_libraries("darwin", load) == {}
    assert loaded == ["nvcuvid.dll", "nvEncodeAPI64.dll"]


def test_decoding_on_the_gpu_needs_codec_and_library(examined):
    found = examined()
    there = {what: {"name": f"lib-{what}", "reason": None} for what in ("decoding", "encoding")}
    assert check(again(found, driver_libraries=there), "codecs")["status"] == "ok"
    assert text(again(found, driver_libraries=there), "codecs").startswith(
        "decoding: FFmpeg has h264, hevc, av1, vp9 by cuvid;"
    )
    there["encoding"]["reason"] = "no such file"
    assert "the driver's lib-encoding does not load" in text(again(found, driver_libraries=there), "codecs")
    assert check(again(found, driver_libraries=there), "codecs")["status"] == "note"
    assert check(again(found, driver_libraries={}), "codecs")["status"] == "note"
    none = {**found["video"], "nvidia_decoders": []}
    assert "decoding: FFmpeg has none" in text(again(found, video=none, driver_libraries=there), "codecs")


def test_a_pyav_that_cannot_be_imported_is_one_line(examined):
    found = again(examined(), video={"pyav": None, "error": "DLL load failed"})
    assert found["advice"] == ["PyAV cannot be imported (DLL load failed): pip install av"]
    assert {check(found, name)["status"] for name in ("codecs", "hardware")} == {"note"}
    assert list(_cli_doctor.lines(found))


def test_without_a_pyav_the_doctor_still_runs(tmp_path):
    """The one that says so may not need it."""
    (tmp_path / "av.py").write_text("raise ImportError('DLL load failed')", encoding="utf-8")
    paths = [str(tmp_path), str(Path(cli.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-m", "framepipe", "doctor", "--quick"],
        capture_output=True, encoding="utf-8", timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "to do   PyAV cannot be imported (DLL load failed): pip install av" in done.stdout


# -- CuPy --


def test_a_gpu_that_works(examined):
    works = {"works": True, "error": None, "cuda": 12090}
    found = examined(smi=H200, packages={"cupy-cuda12x": "14.2.0", "pyarrow": "1", "nvidia-ml-py": "1"}, cupy=works)
    assert (found["device"], found["advice"]) == ("cuda", [])
    assert text(found, "cupy") == "cupy-cuda12x 14.2.0 compiles and runs a kernel, CUDA 12.9"


def test_an_old_driver_is_told_before_a_package_is(examined):
    found = examined(smi=H200.replace("580.159.03", "470.82"))
    assert found["advice"] == ["for the GPU: update the NVIDIA driver to 525 or newer"]


@pytest.mark.parametrize(
    ("driver", "capability", "package", "advice"),
    [
        ("580.159.03", "9.0", "cupy-cuda13x", f"pip install {' '.join(PACKAGES[13])}"),
        ("580.159.03", "9.0", "cupy-cuda12x", f"pip install {' '.join(PACKAGES[12])}"),
        ("579.1", "9.0", "cupy-cuda13x", f"pip uninstall cupy-cuda13x, then pip install {' '.join(PACKAGES[12])}"),
        ("580.159.03", "7.0", "cupy-cuda13x", f"pip uninstall cupy-cuda13x, then pip install {' '.join(PACKAGES[12])}"),
        (
            "580.159.03",
            "[N/A]",
            "cupy-cuda11x",
            f"pip uninstall cupy-cuda11x, then pip install {' '.join(PACKAGES[12])}",
        ),
        ("524.9", "9.0", "cupy-cuda12x", "update the NVIDIA driver to 525 or newer"),
    ],
)
def test_the_line_suits_the_driver_the_gpu_and_what_is_installed(examined, driver, capability, package, advice):
    smi = H200.replace("580.159.03", driver).replace(", 9.0,", f", {capability},")
    broken = {"works": False, "error": "cannot open libnvrtc", "cuda": None}
    packages = {package: "14.2.0", "pyarrow": "1", "nvidia-ml-py": "1"}
    assert examined(smi=smi, packages=packages, cupy=broken)["advice"][-1].endswith(f": {advice}")


def test_cupy_for_a_newer_driver_than_there_is(examined):
    error = (
        "CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    )
    broken = {"works": False, "error": error, "cuda": None}
    packages = {"cupy-cuda13x": "14.2.0", "pyarrow": "1", "nvidia-ml-py": "1"}
    found = examined(smi=H200.replace("580.159.03", "570.86"), packages=packages, cupy=broken)
    assert found["advice"][-1].startswith("CuPy is for a newer driver than 570.86: pip uninstall cupy-cuda13x, then ")
    found = examined(packages=packages, cupy=broken)
    assert found["cupy"]["error"] == "there is no NVIDIA driver"
    assert found["why"] == "there is no NVIDIA GPU"
    assert found["advice"] == [
        "CuPy is installed, but there is no NVIDIA driver: install one on this machine, or go on with the CPU"
    ]
    found = examined(packages=packages, cupy={**broken, "error": "cannot open libnvrtc"})
    assert found["advice"][-1].endswith(f": pip install {' '.join(PACKAGES[13])}"), "no nvidia-smi is not no driver"
    found = examined(kernel="535.104.05", packages=packages, cupy=broken)
    assert found["advice"] == [
        "the NVIDIA driver 535.104.05 shows no GPU: see nvidia-smi; a container must be given its GPUs"
    ]


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("580", 13), ("579.99", 12), ("525.60", 12), ("524", 11), ("", None), (None, None), ("[N/A]", None)],
)
def test_which_cuda_a_driver_serves(driver, cuda):
    assert newest_cuda(driver) == cuda


def test_what_is_advised_is_what_the_extras_install():
    words = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(words)["project"]["optional-dependencies"]
    for cuda, packages in PACKAGES.items():
        assert [re.split("[<>=]", name)[0] for name in extras[f"cuda{cuda}"]] == [
            re.split("[<>=]", name.strip('"'))[0] for name in packages
        ]
    assert {"parquet", "telemetry"} <= extras.keys(), "both are advised by name"


def test_cupy_that_fails_or_crashes(examined, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/tmp/cache")
    packages = {"cupy-cuda12x": "14.2.0", "pyarrow": "1", "nvidia-ml-py": "1"}
    broken = {"works": False, "error": "RuntimeError: cannot open libnvrtc.so.12", "cuda": None}
    found = examined(smi=H200, packages=packages, cupy=broken)
    assert found["device"] == "cpu"
    assert [line for line in found["advice"] if "pip install cupy-cuda12x" in line]
    found = examined(smi=H200, packages=packages)
    assert found["cupy"]["works"] is False
    assert "crashed" in found["advice"][0]
    monkeypatch.setenv("CUPY_CACHE_DIR", "C:\\Users\\Jürgen\\cache")
    assert any("set CUPY_CACHE_DIR" in line for line in examined(smi=H200, packages=packages, cupy=broken)["advice"])
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda name: "C:\\Users\\Jürgen\\env")
    assert any(
        "make the environment in" in line for line in examined(smi=H200, packages=packages, cupy=broken)["advice"]
    )


def test_the_attempt_looks_for_nothing_in_the_working_folder(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiler, "version", {"cupy-cuda12x": "14.2.0"}.get)
    assert "crashed" not in str(compiler.cupy("580.1")["error"])


def test_two_cupy_packages_hide_each_other(examined):
    packages = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0", "pyarrow": "1", "nvidia-ml-py": "1"}
    found = examined(smi=H200, packages=packages, cupy={"works": True, "error": None, "cuda": 12090})
    assert found["advice"][0].startswith(
        "several CuPy packages hide each other: pip uninstall cupy-cuda12x cupy-cuda13x, then "
    )


def test_missing_extras_have_their_pip_lines(examined):
    assert examined(packages={"x": "1"})["advice"] == ['for the parquet sink: pip install "framepipe[parquet]"']
    with_gpu = examined(smi=H200, packages={"pyarrow": "1"})["advice"]
    assert with_gpu[-1] == 'for more readings of video memory: pip install "framepipe[telemetry]"'


# -- programs and files of the system --


def test_a_program_that_hangs_fails_or_is_not_there_is_a_reason(monkeypatch):
    def run(command: Any, **options: Any) -> Any:
        assert options["stdin"] == subprocess.DEVNULL
        if command[0] == "slow":
            raise subprocess.TimeoutExpired(command, 1)
        if command[0] == "none":
            raise FileNotFoundError(2, "no such file")
        if command[0] == "locked":
            raise PermissionError(13, "Permission denied")
        return subprocess.CompletedProcess(command, 9 if command[0] == "bad" else 0, "text", "went\nwrong")

    monkeypatch.setattr(hardware.subprocess, "run", run)
    answers = {name: hardware.ask(name) for name in ("slow", "none", "locked", "bad", "good")}
    assert answers["good"] == ("text", None)
    assert [answers[name].text for name in ("slow", "none", "locked", "bad")] == [None] * 4
    assert [answers[name].reason for name in ("slow", "none", "locked", "bad")] == [
        "slow took longer than 15 s", "none is not there", "locked: Permission denied",
        "bad ended with status 9: went wrong",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line", [KERNEL, KERNEL.replace("x86_64 Kernel Module", "Open Kernel Module for x86_64"), "nothing"]
)
def test_the_version_of_either_kernel_module_is_found(line, tmp_path):
    (tmp_path / "version").write_text(line, encoding="utf-8")
    assert hardware.kernel_driver(tmp_path / "version") == (None if line == "nothing" else "535.104.05")


def test_a_driver_that_only_nvidia_smi_knows(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware, "kernel_driver", lambda: None)
    monkeypatch.setattr(hardware, "ask", lambda *command: hardware.Answer("551.61\n551.61\n"))
    assert hardware.driver_version() == "551.61"
    monkeypatch.setattr(hardware, "ask", lambda *command: hardware.Answer(None, "not there"))
    assert hardware.driver_version() is None


# -- what is measured --

PINNED = {
    "kind": "default", "requested": GIB, "status": "ok", "reason": None, "free": -2 * MIB, "free_after": 0,
    "allocate_s": 0.4, "recovery_s": 0.1,
}  # fmt: skip
CHURN = {
    "kind": "default", "status": "ok", "take_p50_ms": 0.62, "take_p99_ms": 3.1, "allocations_per_s": 700.0,
    "errors": None, "reason": None,
}  # fmt: skip
RATE = {"what": "to_device", "kind": "default", "threads": None, "nbytes": 64 * MIB, "bytes_per_s": 55e9}
MEASURED: dict[str, Any] = {
    "rounds": 1,
    "device": "auto",
    "seconds": 21.5,
    "complete": True,
    "reason": None,
    "machine": {"gpu": {"name": "NVIDIA H200", "uuid": UUID[4:], "driver": "580.159.03", "cupy": "14.2.0"}, "cpu": "C"},
    "rates": [[RATE, {**RATE, "kind": "pageable", "bytes_per_s": 9e9}, {**RATE, "what": "to_host"}]],
    "churn": [[CHURN, {**CHURN, "kind": "default-pooled", "take_p50_ms": 0.0006}]],
    "pinned": [[PINNED]],
    "counters": {"cuda.free": 149 * GIB, "cuda.total": 150 * GIB, "nvml.free": 149 * GIB + 9 * MIB, "nvml.used": GIB},
    "sources": {},
    "missing": {"wddm": "only Windows has it", "pdh": "only Windows has it"},
    "context_bytes": 520 * MIB,
}


def test_a_measured_machine_in_words(examined):
    found = again(examined(smi=H200), measured=MEASURED)
    assert text(found, "bus").splitlines() == [
        "page-locked, to the device 55.0 GB/s", "page-locked, to the host 55.0 GB/s",
        "pageable, to the device 9.0 GB/s",
        "all measurements took 21.5 s",
    ]  # fmt: skip
    assert "they agree to 9.4 MB" in text(found, "counters")
    assert "only Windows" not in text(again(found, system="linux"), "counters")
    assert "wddm: only Windows has it" in text(again(found, system="win32"), "counters")
    assert "takes 545.3 MB of the GPU for its context alone" in text(found, "counters")
    assert "page-locking a block of 64 kB to 8 MB takes 0.620 ms" in text(found, "churn")
    assert "1.1 GB page-locked took 2.1 MB of free video memory; all came back" in text(found, "pinning")
    assert [check(found, name)["status"] for name in ("bus", "counters", "churn", "pinning")] == ["ok"] * 4


def test_nothing_measured_is_unknown(examined):
    found = examined(smi=H200)
    for name in ("bus", "counters", "churn"):
        assert (check(found, name)["status"], text(found, name)) == (UNKNOWN, "not measured; leave out --quick")


@pytest.mark.parametrize(
    ("row", "status", "words"),
    [
        ({"cuda.free": 20 * GIB, "cuda.total": 24 * GIB, "nvml.free": 23 * GIB}, "note", "they are apart by 3.2 GB"),
        ({"cuda.free": 23 * GIB, "cuda.total": 24 * GIB, "nvml.free": None}, "ok", "one counter alone"),
        ({"cuda.free": 25 * GIB, "cuda.total": 24 * GIB}, "unknown", "cannot be: CUDA: free"),
        ({"nvml.free": -5}, "unknown", "cannot be: NVML: free"),
        ({}, "unknown", "no counter of video memory"),
        (
            {"cuda.free": 7 * GIB, "cuda.total": 8 * GIB, "wddm.local_budget": 7 * GIB, "wddm.local_usage": 2 * GIB},
            "note",
            "Windows: left of this process's budget 5.4 GB",
        ),
    ],
)
def test_counters_that_disagree_are_missing_or_nonsense(examined, row, status, words):
    found = again(examined(smi=H200), measured={**MEASURED, "counters": row})
    assert (check(found, "counters")["status"], words in text(found, "counters")) == (status, True)


def test_the_kept_ceiling_stands_beside(examined, monkeypatch, tmp_path):
    path = tmp_path / "baseline.json"
    monkeypatch.setattr(baselines, "default_path", lambda: path)
    key = machine.gpu_identity(UUID[4:], "580.159.03")
    kept = {"measured": "2031-01-01", "ceiling": {"to_device_bytes_per_s": 56e9, "to_host_bytes_per_s": None}}
    path.write_text(json.dumps({"schema": baselines.SCHEMA, "machines": {key: kept}}), encoding="utf-8")
    found = again(examined(smi=H200), measured=MEASURED)
    assert "probe bandwidth kept 56.0 GB/s to the device, measured 2031-01-01" in text(found, "bus")
    path.write_text("nonsense", encoding="utf-8")
    assert "the baseline cannot be read" in text(again(found, measured=MEASURED), "bus")


def test_a_refused_pin_and_a_slow_bus_are_to_do(examined):
    refused = {**PINNED, "status": "failed", "reason": "cudaHostAlloc: 2 out of memory", "free": None}
    rates = [[{**RATE, "bytes_per_s": 6e9}, {**RATE, "kind": "pageable", "bytes_per_s": 5.9e9}]]
    measured = {**MEASURED, "pinned": [[refused]], "rates": rates}
    one = check(again(examined(smi=H200), measured=measured), "pinning")
    assert one["status"] == TO_DO
    assert [line.split(" ")[0] for line in one["advice"]] == ["1.1", "page-locked"]


class Played:
    """Child processes that answer at once; everything that was asked is in ``asked``."""

    def __init__(self, gpu: bool, stop_at: int | None = None) -> None:
        self.gpu, self.stop_at = gpu, stop_at
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(request)
        what = request["probe"]
        if self.stop_at is not None and len(self.asked) > self.stop_at:
            return {"status": "unfinished", "reason": "interrupted"}
        if what == "machine":
            gpu = {"name": "G", "uuid": UUID[4:], "driver": "580.1"} if self.gpu else None
            return {"status": "ok", "gpu": gpu, "reason": None if gpu else "there is no driver"}
        if what == "bandwidth":
            rate = {"median": 5e9 + len(self.asked), "min": 4e9, "max": 6e9}
            directions = [{}] if request["kind"] == "host_copy" else [{"direction": "to_device"}]
            rows = [{**each, "nbytes": 64 * MIB, "threads": 1, "bytes_per_s": rate} for each in directions]
            return {"status": "ok", "reason": None, "rows": rows}
        if what == "churn":
            times = {f"{key}_ms": 0.5 for key in ("p50", "p95", "p99", "max")}
            return {"status": "ok", "reason": None, "seconds": 1.0, "take": times, "give": times, "errors": {}}
        deltas = {"cuda.free": 0 if request["kind"] == "control" else -2 * MIB}
        readings = {when: {"cuda.free": 9 * GIB, "nvml.used": GIB} for when in ("before", "held", "after")}
        return {
            "status": "ok", "reason": None, "deltas": deltas, "left": {"cuda.free": 0}, "recovery_s": 0.1,
            "readings": readings, "sources": {"cuda.free": "CUDA"}, "missing": {"wddm": "no"}, "free_s": 0.1,
            "steps_s": {"allocate": 0.4},
        }  # fmt: skip


def how(played: Played, **more: Any) -> How:
    ticks = iter(range(1000))
    return How(run=played, memory=lambda: Available(64 * GIB, "plenty"), clock=lambda: next(ticks), **more)


def test_the_probes_are_run_in_children_round_by_round():
    played, told = Played(gpu=True), []
    found = measuring.measure(
        how(played, rounds=2, tell=told.append), wsl2=False, used_bytes={UUID: GIB - 500 * MIB, "other": None}
    )
    kinds = [(each["probe"], each.get("kind"), each.get("pooled")) for each in played.asked]
    one = [
        ("bandwidth", "default", None), ("bandwidth", "pageable", None), ("bandwidth", "host_copy", None),
        ("churn", "control", False), ("churn", "default", False), ("churn", "default", True),
        ("pinned", "control", None), ("pinned", "default", None),
    ]  # fmt: skip
    assert kinds == [("machine", None, None), *one, *one]
    assert {each["device"] for each in played.asked} == {0}
    assert told == [
        f"measuring {what} ({number}/2)"
        for number in (1, 2)
        for what in ("copies", "pinning and freeing", "a pinned block")
    ]
    assert (found["seconds"], found["complete"], found["context_bytes"]) == (1, True, 500 * MIB)
    assert [len(found[name]) for name in ("rates", "churn", "pinned")] == [2, 2, 2]
    made = {(each["id"], each["measure"]): each["samples"] for each in measuring.measures(found)}
    assert made["hold 1.1 GB, default", "free_lost_bytes"] == [2 * MIB] * 2
    assert made["hold 1.1 GB, default", "refused"] == [0.0, 0.0]
    assert made["a CUDA context", "context_bytes"] == [500 * MIB]
    assert len(made["copy host to device, default, 67.1 MB", "bytes_per_s"]) == 2
    assert made["take a block, default", "take_p50_ms"] == [0.5, 0.5]
    json.dumps(found, allow_nan=False)


def test_without_a_gpu_the_processor_is_measured():
    played = Played(gpu=False)
    found = measuring.measure(how(played), wsl2=False, used_bytes={})
    assert {(each["probe"], each.get("kind")) for each in played.asked[1:]} == {
        ("bandwidth", "host_copy"), ("churn", "control"), ("churn", "pageable"), ("pinned", "control"),
        ("pinned", "pageable"),
    }  # fmt: skip
    assert (found["reason"], found["context_bytes"]) == ("there is no driver", None)
    assert found["pinned"][0][0]["requested"] == 256 * MIB


def test_a_gpu_that_was_asked_for_and_is_not_there_is_a_reason(examined):
    found = measuring.measure(how(Played(gpu=False), device="cuda:3"), wsl2=False, used_bytes={})
    assert "was asked for, but there is no driver" in found["reason"]
    assert found["rates"][0]
    record = again(examined(), measured=found)
    assert "no bus was measured: device 'cuda:3' was asked for, but there is no driver" in text(record, "bus")
    with pytest.raises(ConfigError, match="expected auto"):
        measuring.measure(how(Played(gpu=False), device="gpu"), wsl2=False, used_bytes={})


def test_sizes_of_pinned_blocks():
    plenty, little = Available(64 * GIB, ""), Available(machine.RESERVE_NBYTES + 300 * MIB, "")
    assert measuring._sizes(True, False, plenty) == (GIB,)
    assert measuring._sizes(True, False, little) == (150 * MIB,)
    assert measuring._sizes(True, True, plenty) == (256 * MIB, 512 * MIB, GIB)
    assert measuring._sizes(False, True, plenty) == (256 * MIB,)
    assert measuring._sizes(True, False, Available(0, "")) == (16 * MIB,)


@pytest.mark.parametrize("stop_at", [1, 4, 7])
def test_an_interruption_keeps_what_there_is(stop_at, install):
    install(smi=H200)
    played = Played(gpu=True, stop_at=stop_at)
    found = examination.examine(how(played, rounds=5))
    assert found["measured"]["complete"] is False
    assert len(played.asked) == stop_at + 1
    assert [each["name"] for each in found["checks"]] == [each.__name__ for each in examination.CHECKS]
    assert list(_cli_doctor.lines(found))


def test_nonsense_of_a_child_is_no_number(install):
    install(smi=H200)

    def fail(request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return {"status": "failed", "reason": "the child process ended with status 9", "gpu": None}

    found = examination.examine(How(run=fail, memory=lambda: Available(64 * GIB, "")))
    assert {each["measure"] for each in found["measures"]} <= {"refused"}
    assert {check(found, name)["status"] for name in ("bus", "counters", "churn")} == {UNKNOWN}
    assert "the child process ended with status 9" in text(found, "churn")


# -- baselines --


def baseline(driver: str = "580.1", rate: float = 55e9, lost: int = 2 * MIB, **more: Any) -> dict[str, Any]:
    """A record as `examine` makes it, of five rounds."""
    rounds = [[{**RATE, "bytes_per_s": rate * (1 + step / 500)}] for step in range(5)]
    pinned = [[{**PINNED, "free": -lost - step * 4096, **more}] for step in range(5)]
    measured = {**MEASURED, "rates": rounds, "pinned": pinned, "churn": [MEASURED["churn"][0]] * 5}
    fingerprint = {"driver": driver, "os": "Linux", "gpu": {"name": "NVIDIA H200"}}
    return {"schema": examination.SCHEMA, "fingerprint": fingerprint, "measures": measuring.measures(measured)}


def verdicts(found: Any, verdict: str) -> set[tuple[str, str]]:
    return {(row.id, row.measure) for row in found.rows if row.verdict == verdict}


def test_the_same_machine_again_is_noise():
    found = compare(baseline(), baseline(rate=55.3e9, lost=3 * MIB))
    assert (found.kind, {row.verdict for row in found.rows}, found.provenance) == ("doctor", {NOISE}, ())


def test_a_driver_that_costs_memory_or_bandwidth_is_found():
    found = compare(baseline(), baseline(driver="590.2", rate=48e9, lost=220 * MIB))
    assert found.provenance == (("driver", "580.1", "590.2"),)
    assert verdicts(found, WORSE) == {
        ("copy host to device, default, 67.1 MB", "bytes_per_s"), ("hold 1.1 GB, default", "free_lost_bytes"),
    }  # fmt: skip
    back = compare(baseline(rate=48e9, lost=220 * MIB), baseline())
    assert verdicts(back, BETTER) == verdicts(found, WORSE)


def test_what_was_measured_once_is_said_to_be():
    one, other = baseline(), baseline(rate=48e9)
    for record in (one, other):
        for each in record["measures"]:
            del each["samples"][1:]
    (row,) = (row for row in compare(one, other).rows if row.verdict == WORSE)
    assert row.reason == "measured once: its noise is not known"
    assert {row.reason for row in compare(baseline(), baseline(rate=48e9)).rows} == {None}


def test_a_driver_that_refuses_is_worse_and_one_that_keeps_is_too():
    found = compare(baseline(), baseline(status="failed", free=None, free_after=None))
    assert ("hold 1.1 GB, default", "refused") in verdicts(found, WORSE)
    found = compare(baseline(), baseline(free_after=-GIB))
    assert verdicts(found, WORSE) == {("hold 1.1 GB, default", "not_back_bytes")}


def test_bad_baselines_cannot_be_compared(tmp_path):
    first = baseline()
    for other, why in (
        ({**first, "measures": []}, "nothing in common"),
        ({"schema": examination.SCHEMA}, "not as its schema says"),
        ({**first, "measures": [{"id": "x"}]}, "not as its schema says"),
    ):
        with pytest.raises(ConfigError, match=why):
            compare(first, other)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(first), encoding="utf-8")
    assert load(path) == first


# -- the command --


@pytest.fixture
def measured(monkeypatch, install):
    """The command on a machine with a GPU, its children played."""
    install(smi=H200)
    played = Played(gpu=True)
    monkeypatch.setattr("framepipe.probe.children.run", lambda request, timeout_s, stopped: played(request, timeout_s))
    monkeypatch.setattr(machine, "available", lambda: Available(64 * GIB, ""))
    return played


def test_the_command_measures_unless_it_is_to_be_quick(measured, capsys):
    assert cli.main(["doctor"]) == 0
    told = capsys.readouterr()
    assert "note    " in told.out
    assert "page-locked, to the device 5.0 GB/s" in told.out
    assert told.err.splitlines()[0] == "framepipe: doctor: measuring copies"
    assert max(len(line) for line in told.out.splitlines()) <= 120
    asked = len(measured.asked)
    assert cli.main(["doctor", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] is None
    assert len(measured.asked) == asked


def test_a_baseline_is_kept_and_compared(measured, tmp_path, capsys):
    a, b = str(tmp_path / "new" / "a.json"), str(tmp_path / "b.json")
    assert cli.main(["doctor", "--save-baseline", a]) == 0
    assert f"framepipe: wrote {a}" in capsys.readouterr().err
    made = json.loads(Path(a).read_text(encoding="utf-8"))
    assert (made["schema"], made["measured"]["rounds"]) == ("framepipe.doctor/1", 5)
    assert cli.main(["doctor", "--save-baseline", a]) == 2
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert cli.main(["doctor", "--save-baseline", b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(b).read_text(encoding="utf-8"))
    assert cli.main(["compare", a, a]) == 0
    for each in made["measures"]:
        if each["measure"] == "bytes_per_s":
            each["samples"] = [sample * 0.8 for sample in each["samples"]]
    made["fingerprint"]["driver"] = "590.2"
    Path(b).write_text(json.dumps(made), encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["compare", a, b]) == 1
    out = capsys.readouterr().out
    assert "driver  580.159.03 -> 590.2" in out
    assert "5.0 GB/s -> 4.0 GB/s" in out
    assert "repeats decide what is noise" in out


def test_a_baseline_of_nothing_is_not_kept(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(examination, "measures", lambda measured: [])
    assert cli.main(["doctor", "--save-baseline", str(tmp_path / "a.json")]) == 1
    assert "nothing could be measured" in capsys.readouterr().err
    assert not (tmp_path / "a.json").exists()


def test_a_folder_that_cannot_be_written_to_is_told_before_measuring(measured, monkeypatch, tmp_path, capsys):
    def refuse(**where: Any) -> Any:
        assert where == {"dir": tmp_path}
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(examination.tempfile, "TemporaryFile", refuse)
    assert cli.main(["doctor", "--save-baseline", str(tmp_path / "a.json")]) == 2
    assert "a.json: Permission denied" in capsys.readouterr().err
    assert measured.asked == []


def test_what_cannot_be_asked_together(tmp_path, capsys):
    (tmp_path / "a file").write_bytes(b"")
    for argv, why in (
        (["--quick", "--save-baseline", str(tmp_path / "a.json")], "leave out all but one"),
        (["--explain", "--capabilities"], "--explain and --capabilities are different things"),
        (["--quick", "--device", "cuda:1"], "--quick measures nothing"),
        (["--save-baseline", str(tmp_path)], "is a folder"),
        (["--save-baseline", str(tmp_path / "a file" / "a.json")], "a.json: "),
        (["copies"], "a symptom goes with --explain"),
    ):
        assert cli.main(["doctor", *argv]) == 2
        assert why in capsys.readouterr().err


def test_an_interrupted_command_saves_nothing(measured, monkeypatch, tmp_path, capsys):
    class Interrupted:
        code = 130

        def __init__(self, stop: Any, progress: Any) -> None:
            stop()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr("framepipe._cli_run.Interrupt", Interrupted)
    path = tmp_path / "a.json"
    assert cli.main(["doctor", "--save-baseline", str(path)]) == 130
    assert not path.exists()
    assert f"interrupted: {path} is not written" in capsys.readouterr().err


def test_while_nothing_is_measured_yet_ctrl_c_is_not_put_off(install, monkeypatch):
    """A driver that hangs is waited for some while; there is nothing that would have to be ended in order."""
    install()
    gather, seen = examination.facts, []

    def facts() -> dict[str, Any]:
        seen.append(signal.getsignal(signal.SIGINT))
        return gather()

    monkeypatch.setattr(examination, "facts", facts)
    assert cli.main(["doctor", "--quick"]) == 0
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_the_lines_for_people(examined):
    packages = {"cupy-cuda12x": "14.2.0"}
    found = examined(smi=H200, packages=packages, cupy={"works": False, "error": "no headers", "cuda": None})
    words = "\n".join(_cli_doctor.lines(found))
    assert "ok      GPU           0: NVIDIA H200, 150.8 GB" in words
    assert "to do   CuPy          cupy-cuda12x 14.2.0 does not work: no headers" in words
    assert "device  auto will be cpu: CuPy does not work here: no headers" in words
    assert "\nto do   CuPy is installed but does not work (no headers)" in words
    assert "[measured elsewhere: pins beyond the limit" in words


def test_the_table_of_systems_is_printed(capsys):
    assert cli.main(["doctor", "--capabilities"]) == 0
    out = capsys.readouterr().out
    assert out.count("  WSL 2    ") == out.count("  Windows  ") == out.count("  Linux    ") >= 12
    assert "[vendor's documentation: " in out
