"""The doctor: what it finds on any machine, and what it advises on machines that this is not."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from framepipe import _cli_doctor, cli, doctor
from framepipe.device._packages import PACKAGES, newest_cuda

H200 = "NVIDIA H200, 143771, 580.159.03, 9.0, 00000000:18:00.0\n"


@pytest.fixture
def machine(monkeypatch):
    """A machine whose files, commands, packages and CuPy are these; everything else is as it is here."""

    def install(
        files: dict[str, str] | None = None,
        smi: str | None = None,
        packages: dict[str, str] | None = None,
        cupy: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        def output(*command: str, timeout_s: float = 15) -> str | None:
            return smi if command[0] == "nvidia-smi" else json.dumps(cupy) if cupy else None

        monkeypatch.setattr(doctor, "_read", lambda path: (files or {}).get(path.replace("\\", "/")))
        monkeypatch.setattr(doctor, "_output", output)
        monkeypatch.setattr(doctor, "_version", lambda name: (packages or {"pyarrow": "1"}).get(name))
        return doctor.examine()

    return install


def test_this_machine_is_examined_without_an_error():
    found = doctor.examine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {"h264", "mjpeg", "ffv1"} <= set(found["video"]["decoders"])
    assert found["video"]["libraries"]["libavcodec"].count(".") == 2
    assert found["cpu"]["logical"] >= 1
    assert found["memory"]["total_bytes"] > found["memory"]["available_bytes"] > 0
    assert found["device"] in ("cpu", "cuda")


def test_codecs_are_told_apart():
    assert doctor._has_codec("ffv1", "r")
    assert doctor._has_codec("ffv1", "w")
    assert not doctor._has_codec("libx264", "r")
    assert not doctor._has_codec("no-such-codec", "r")


def test_no_gpu_is_no_trouble(machine):
    found = machine()
    assert found["gpu"] == {"driver": None, "devices": []}
    assert found["cupy"] == {"packages": {}, "works": None, "error": None, "cuda": None}
    assert (found["device"], found["why"]) == ("cpu", "there is no NVIDIA GPU")
    assert found["advice"] == []


def test_a_gpu_without_cupy_gets_the_pip_line(machine):
    found = machine(smi=H200)
    assert found["gpu"]["driver"] == "580.159.03"
    assert found["gpu"]["devices"] == [
        {
            "name": "NVIDIA H200",
            "memory_bytes": 143771 << 20,
            "compute_capability": "9.0",
            "pci_bus_id": "00000000:18:00.0",
            "driver_model": None,
        }
    ]
    assert found["why"] == "there is a GPU, but CuPy is not installed"
    assert found["advice"] == ["for the GPU: pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"]


def test_an_old_driver_is_told_before_a_package_is(machine):
    found = machine(smi=H200.replace("580.159.03", "470.82"))
    assert found["advice"] == ["for the GPU: update the NVIDIA driver to 525 or newer"]


def test_a_gpu_that_works(machine):
    works = {"works": True, "error": None, "cuda": 12090}
    found = machine(smi=H200, packages={"cupy-cuda12x": "14.2.0", "pyarrow": "1"}, cupy=works)
    assert (found["device"], found["advice"]) == ("cuda", [])
    assert found["cupy"]["cuda"] == 12090


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
def test_the_line_suits_the_driver_the_gpu_and_what_is_installed(machine, driver, capability, package, advice):
    smi = H200.replace("580.159.03", driver).replace("9.0", capability)
    broken = {"works": False, "error": "cannot open libnvrtc", "cuda": None}
    found = machine(smi=smi, packages={package: "14.2.0", "pyarrow": "1"}, cupy=broken)
    assert found["advice"][-1].endswith(f": {advice}")


def test_cupy_for_a_newer_driver_than_there_is(machine):
    error = (
        "CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    )
    broken = {"works": False, "error": error, "cuda": None}
    packages = {"cupy-cuda13x": "14.2.0", "pyarrow": "1"}
    found = machine(smi=H200.replace("580.159.03", "570.86"), packages=packages, cupy=broken)
    assert found["advice"][-1].startswith("CuPy is for a newer driver than 570.86: pip uninstall cupy-cuda13x, then ")
    found = machine(packages=packages, cupy=broken)
    assert found["cupy"]["error"] == "there is no NVIDIA driver"
    assert found["why"] == "there is no NVIDIA GPU"
    assert found["advice"] == [
        "CuPy is installed, but there is no NVIDIA driver: install one on this machine, or go on with the CPU"
    ]
    found = machine(packages=packages, cupy={**broken, "error": "cannot open libnvrtc"})
    assert found["advice"][-1].endswith(f": pip install {' '.join(PACKAGES[13])}"), "no nvidia-smi is not no driver"
    files = {
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023"
    }
    found = machine(files, packages=packages, cupy=broken)
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
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for cuda, packages in PACKAGES.items():
        assert [re.split("[<>=]", name)[0] for name in extras[f"cuda{cuda}"]] == [
            re.split("[<>=]", name.strip('"'))[0] for name in packages
        ]


def test_cupy_that_fails_or_crashes(machine, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", "/tmp/cache")
    packages = {"cupy-cuda12x": "14.2.0", "pyarrow": "1"}
    broken = {"works": False, "error": "RuntimeError: cannot open libnvrtc.so.12", "cuda": None}
    found = machine(smi=H200, packages=packages, cupy=broken)
    assert found["device"] == "cpu"
    assert [line for line in found["advice"] if "pip install cupy-cuda12x" in line]
    found = machine(smi=H200, packages=packages)
    assert found["cupy"]["works"] is False
    assert "crashed" in found["advice"][0]
    monkeypatch.setenv("CUPY_CACHE_DIR", "C:\\Users\\Jürgen\\cache")
    assert any("set CUPY_CACHE_DIR" in line for line in machine(smi=H200, packages=packages, cupy=broken)["advice"])
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: "C:\\Users\\Jürgen\\env")
    assert any(
        "make the environment in" in line for line in machine(smi=H200, packages=packages, cupy=broken)["advice"]
    )


def test_two_cupy_packages_hide_each_other(machine):
    packages = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0", "pyarrow": "1"}
    found = machine(smi=H200, packages=packages, cupy={"works": True, "error": None, "cuda": 12090})
    assert found["advice"][0].startswith(
        "several CuPy packages hide each other: pip uninstall cupy-cuda12x cupy-cuda13x, then "
    )


def test_a_missing_extra_has_its_pip_line(machine):
    assert machine(packages={"x": "1"})["advice"] == ['for the parquet sink: pip install "framepipe[parquet]"']


def test_windows_driver_model_and_wsl(machine, monkeypatch):
    monkeypatch.setattr(doctor.platform, "release", lambda: "5.15.0-microsoft-standard-WSL2")
    found = machine(smi="GeForce, 8192, 551.61, 8.9, 0000:01:00.0, WDDM\n")
    assert found["gpu"]["devices"][0]["driver_model"] == "WDDM"
    assert found["wsl"]
    assert any("WDDM" in line for line in found["advice"])
    assert any("WSL 2" in line for line in found["advice"])


def test_the_limits_of_a_container(machine):
    files = {
        "/proc/self/cgroup": "0::/pod/one",
        "/sys/fs/cgroup/pod/memory.max": "2000000000",
        "/sys/fs/cgroup/pod/one/cpu.max": "50000 100000",
    }
    found = machine(files)
    assert found["memory"]["cgroup_limit_bytes"] == 2_000_000_000
    assert found["cpu"]["quota"] == 0.5
    usable = found["cpu"]["usable"] or found["cpu"]["logical"]
    assert found["advice"] == [
        "this container may use 2.0 GB: page-locked memory counts too",
        f"this container gets 0.5 CPUs of {usable}: set threads: 1",
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/cpu.max": "max 100000"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
        {"/proc/self/cgroup": "5:memory:/x"},
    ],
)
def test_no_limit_is_none(machine, files):
    found = machine(files)
    assert found["memory"]["cgroup_limit_bytes"] is None
    assert found["cpu"]["quota"] is None


def test_the_cpu_and_driver_files(machine):
    files = {
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU 3000\nflags\t: fpu",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023",
    }
    found = machine(files)
    assert found["cpu"]["model"] == "Some CPU 3000"
    assert found["gpu"] == {"driver": "535.104.05", "devices": []}
    assert found["why"] == "the NVIDIA driver shows no GPU"


def test_a_command_that_hangs_fails_or_is_not_there_gives_nothing(monkeypatch):
    def run(command: Any, **options: Any) -> Any:
        if command[0] == "slow":
            raise subprocess.TimeoutExpired(command, 1)
        if command[0] == "none":
            raise FileNotFoundError(2, "no such file")
        return subprocess.CompletedProcess(command, 9 if command[0] == "bad" else 0, "text", "")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert [doctor._output(name) for name in ("slow", "none", "bad", "good")] == [None, None, None, "text"]


def test_the_lines_for_people(machine):
    packages = {"cupy-cuda12x": "14.2.0"}
    found = machine(smi=H200, packages=packages, cupy={"works": False, "error": "no headers", "cuda": None})
    text = "\n".join(_cli_doctor.lines(found))
    assert "GPU 0      NVIDIA H200, 150.8 GB, compute capability 9.0" in text
    assert "CuPy       cupy-cuda12x 14.2.0 does not work: no headers" in text
    assert "device     auto will be cpu: CuPy does not work here: no headers" in text
    assert "to do      " in text
    assert "GPU" not in "\n".join(_cli_doctor.lines(machine())).replace("NVIDIA GPU", "")


def test_the_command_prints_lines_or_json(monkeypatch, capsys, machine):
    found = machine()
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == list(_cli_doctor.lines(found))
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Sat Aug 19 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    ],
)
def test_the_version_of_either_kernel_module_is_found(text, monkeypatch):
    monkeypatch.setattr(doctor, "_read", lambda path: text if path == "/proc/driver/nvidia/version" else None)
    assert doctor._kernel_driver() == "580.159.04"
