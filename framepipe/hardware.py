"""What hardware and driver this is, as the system and its programs tell it without CUDA."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_CPU_INFO = Path("/proc/cpuinfo")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
WSL2_RING_NBYTES = 512 << 20
"""What a ring page-locks at most in WSL 2, which has 0.5 to 1 GB in all, for everybody (reports differ)."""


class Answer(NamedTuple):
    """What a program wrote to its standard output, or None with the ``reason`` in one line."""

    text: str | None
    reason: str | None = None


def ask(*command: str, timeout_s: float = 15.0) -> Answer:
    """The output of a program that only tells something. Never raises: not there, failed and too slow are reasons."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return Answer(None, f"{command[0]} is not there")
    except subprocess.TimeoutExpired:
        return Answer(None, f"{command[0]} took longer than {timeout_s:g} s")
    except OSError as error:
        return Answer(None, f"{command[0]}: {error.strerror or error}")
    if done.returncode:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        return Answer(None, f"{command[0]} ended with status {done.returncode}{f': {words}' if words else ''}")
    return Answer(done.stdout)


def cpu_name(path: Path = _CPU_INFO) -> str | None:
    """The processor's model, or None where the system does not tell."""
    named = re.search(r"^model name\s*:\s*(.+)$", _read(path), re.MULTILINE)
    return named[1] if named else platform.processor() or None


def cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def driver_version() -> str | None:
    """The version of the NVIDIA driver, by NVML, the kernel module or ``nvidia-smi``, or None."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            version = nvml.nvmlSystemGetDriverVersion()
        finally:
            nvml.nvmlShutdown()
        return version.decode() if isinstance(version, bytes) else str(version)
    except Exception:  # not installed, or no driver: others may still tell
        told = kernel_driver() or ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").text
        return told.splitlines()[0].strip() if told else None


def kernel_driver(path: Path = _KERNEL_MODULE) -> str | None:
    """The version of the NVIDIA driver that is loaded into Linux, or None."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _read(path))
    return found[1] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_wsl2(release: str | None = None, dxg: Path = Path("/dev/dxg")) -> bool:
    """Whether this Linux runs in WSL 2, where pinned memory is scarce and the GPU is driven by Windows.

    Its kernels are released as ``microsoft-standard``; one that a user built may be called anything and still has the
    device ``/dev/dxg``. WSL 1 has neither.
    """
    if not sys.platform.startswith("linux"):
        return False
    name = (platform.release() if release is None else release).lower()
    return "microsoft-standard" in name or "wsl2" in name or dxg.exists()
