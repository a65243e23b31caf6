"""The memory of the container, or other control group, that this process lives in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from framepipe.telemetry.base import Sensor, SensorUnavailableError

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 where there is no limit."""

_FILE_PAGES = ("inactive_file", "active_file")


class _Version(NamedTuple):
    line: str  # of /proc/self/cgroup, whose group 1 is the path below `mount`
    mount: str  # below /sys/fs/cgroup
    current: str
    limit: str


_VERSIONS = (
    _Version(r"^0::(/.*)$", "", "memory.current", "memory.max"),
    _Version(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", "memory", "memory.usage_in_bytes", "memory.limit_in_bytes"),
)


class CgroupMemory(Sensor):
    """Memory charged to the control group, and its limit; version 2, or 1 where that is mounted.

    Both figures are of one group, chosen when the sensor is opened: of the process's own and those above it that can
    be seen, the one with the lowest limit; without any limit the process's own, and ``limit`` is None. All processes
    of the group count, and so does the page cache. That page-locked memory is charged here is expected (it is shared
    memory to the kernel) and has not been measured. Files: Linux, Documentation/admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst.
    """

    name = "cgroup"

    def __init__(self, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> None:
        super().__init__()
        version, folder = _choose(proc, root)
        self.source = str(folder)
        self.readings = {"current": version.current, "limit": version.limit}

    def _read(self) -> Mapping[str, int | str]:
        folder = Path(self.source)
        limit = _limit(folder / self.readings["limit"])
        current = int((folder / self.readings["current"]).read_text(encoding="utf-8"))
        return {"current": current, "limit": "no limit is set" if limit is None else limit}

    def page_cache(self) -> int:
        """Bytes of what is charged that are pages of files, which the kernel takes back before anything else.

        0 where the group does not tell. Never raises.
        """
        try:
            lines = (Path(self.source) / "memory.stat").read_text(encoding="utf-8").splitlines()
            numbers = {name: int(number) for name, number in (line.split() for line in lines)}
        except (OSError, ValueError):
            return 0
        # Version 1 counts the group alone under the plain names, and those below it under total_.
        return sum(numbers.get(f"total_{name}", numbers.get(name, 0)) for name in _FILE_PAGES)


def _choose(proc: Path, root: Path) -> tuple[_Version, Path]:
    try:
        text = proc.read_text(encoding="utf-8")
    except OSError as error:
        raise SensorUnavailableError(f"there is no {proc}") from error
    for version in _VERSIONS:
        own = re.search(version.line, text, re.MULTILINE)
        groups = list(_groups(root / version.mount, own[1], version)) if own else []
        if groups:
            return version, min(groups, key=lambda folder: _limit(folder / version.limit) or _NO_LIMIT)
    raise SensorUnavailableError("no control group that can be seen here accounts for memory")


def _groups(mount: Path, path: str, version: _Version) -> Iterator[Path]:
    """From the process's own group upwards those with the two files; a container sees its own as the mount itself."""
    at = mount / path.lstrip("/")
    for folder in (at, *at.parents):
        if (folder / version.current).is_file() and (folder / version.limit).is_file():
            yield folder
        if folder == mount:
            return


def _limit(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None
