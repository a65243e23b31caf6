"""What a check says: a status, and lines that each have their ground."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, TO_DO, UNKNOWN = "ok", "note", "to do", "unknown"
STATUSES = (OK, NOTE, TO_DO, UNKNOWN)
MEASURED, ELSEWHERE = "measured now", "measured elsewhere"
VENDOR, CLAIM = "vendor's documentation", "unproven claim"
GROUNDS = (MEASURED, ELSEWHERE, VENDOR, CLAIM)
"""``measured now`` was read or measured on this machine, ``measured elsewhere`` by framepipe on another one."""

Found = Mapping[str, Any]
"""The record so far (`framepipe.doctor.examination.examine`)."""


def has_gpu(found: Found) -> bool:
    """Whether anything shows a GPU: in some containers CuPy works where nvidia-smi is not there."""
    measured = found["measured"] or {}
    return bool(found["gpu"]["devices"] or found["cupy"]["works"] or measured.get("machine", {}).get("gpu"))


@dataclass(frozen=True, slots=True)
class Line:
    """One statement, its ``ground`` (of `GROUNDS`) and, where it was not found here, its ``source``."""

    text: str
    ground: str = MEASURED
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The answer of one check: ``status`` of `STATUSES`, at least one line, and what to do in the user's words.

    ``advice`` is there exactly where the status is ``to do``.
    """

    name: str
    title: str
    status: str
    lines: tuple[Line, ...]
    advice: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        lines = [asdict(line) for line in self.lines]
        return {**asdict(self), "lines": lines, "advice": list(self.advice)}


def answer(name: str, title: str, *lines: Line | str, advice: tuple[str, ...] = (), status: str = OK) -> Check:
    """A check; plain text is a line that was measured now, and any advice makes it ``to do``."""
    whole = tuple(line if isinstance(line, Line) else Line(line) for line in lines)
    return Check(name, title, TO_DO if advice else status, whole, advice)
