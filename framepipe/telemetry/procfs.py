"""Memory of this process as Linux counts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from framepipe.telemetry.base import Sensor, SensorUnavailableError

STATUS = Path("/proc/self/status")


class ProcfsMemory(Sensor):
    """``/proc/self/status``: resident memory by kind, and locked and pinned memory.

    Memory that CUDA page-locks (``cudaHostAlloc``) has been measured to appear in ``rss_shmem`` at its full size,
    while ``locked`` and ``pinned`` stay 0: the driver uses neither counter. The kernel keeps the resident figures
    per processor and adds them up lazily, so they may be off by some pages (proc_pid_status(5)).
    """

    name = "procfs"
    source = "/proc/self/status"
    readings = MappingProxyType(
        {"rss": "VmRSS", "rss_anon": "RssAnon", "rss_shmem": "RssShmem", "locked": "VmLck", "pinned": "VmPin"}
    )

    def __init__(self, path: Path = STATUS) -> None:
        super().__init__()
        self._path = path
        if not path.exists():
            raise SensorUnavailableError(f"there is no {path}")

    def _read(self) -> Mapping[str, int | str]:
        rows = dict(line.split(":", 1) for line in self._path.read_text(encoding="utf-8").splitlines() if ":" in line)
        return {key: _nbytes(rows.get(field), field) for key, field in self.readings.items()}


def _nbytes(text: str | None, field: str) -> int | str:
    words = (text or "").split()
    if len(words) != 2 or words[1] != "kB":  # the kernel writes kB and means KiB
        return f"this kernel does not tell {field}"
    return int(words[0]) * 1024
