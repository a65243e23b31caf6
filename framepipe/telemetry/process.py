"""Memory of this process on any system, through psutil."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framepipe.telemetry.base import Sensor


class ProcessMemory(Sensor):
    """psutil: the resident set, and on Windows the private bytes, which count against the commit limit.

    Windows has no counter of page-locked memory: there it shows in ``private`` if at all, and in the non-local usage
    of the ``wddm`` sensor.
    """

    name = "process"
    source = "psutil.Process().memory_info()"

    def __init__(self, process: Any = None) -> None:
        import psutil

        super().__init__()
        self._process = psutil.Process() if process is None else process
        fields = self._process.memory_info()._fields
        self.readings = {key: key for key in ("rss", "private") if key in fields}

    def _read(self) -> Mapping[str, int | str]:
        info = self._process.memory_info()
        return {key: int(getattr(info, key)) for key in self.readings}
