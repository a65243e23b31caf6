"""What a run tells: live `Statistics` while it goes on, a `RunReport` at its end."""

from __future__ import annotations

import contextlib
import math
import platform
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "framepipe.run/1"
_MUCH = 0.5
_SOME = 0.2
"""Shares of the run's time."""


class Durations:
    """Durations of one stage: exact while few, an even sample of ``size`` once many. One thread adds."""

    def __init__(self, size: int = 4096) -> None:
        self.count = 0
        self.total_s = 0.0
        self.max_s = 0.0
        self._size = size
        self._sample: list[float] = []
        self._random = random.Random(0)

    def add(self, seconds: float) -> None:
        """Count one duration (reservoir sampling, Vitter 1985, algorithm R)."""
        self.count += 1
        self.total_s += seconds
        if seconds > self.max_s:
            self.max_s = seconds
        if len(self._sample) < self._size:
            self._sample.append(seconds)
        else:
            at = self._random.randrange(self.count)
            if at < self._size:
                self._sample[at] = seconds

    def summary(self) -> dict[str, Any]:
        """Count and percentiles in milliseconds; null where nothing was measured."""
        ordered = sorted(self._sample)

        def at(share: float) -> float | None:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 4) if ordered else None

        return {
            "count": self.count,
            "p50_ms": at(0.50),
            "p95_ms": at(0.95),
            "p99_ms": at(0.99),
            "max_ms": round(self.max_s * 1e3, 4) if ordered else None,
        }


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of a running pipeline.

    ``decoded``, ``delivered``, ``skipped`` and ``dropped`` are frames so far; ``expected`` is what the inputs
    announce, or None; ``fps`` is delivered frames a second since the start; ``sources`` maps names to delivered.
    The rest is None where there is no GPU or nothing is known yet: bytes page-locked now, bytes of device memory that
    the pipeline holds now and held at most, the device's last reading of what is free (of all processes), and bytes
    uploaded a second since the snapshot before this one.
    """

    decoded: int
    delivered: int
    skipped: int
    dropped: int
    expected: int | None
    seconds: float
    fps: float
    sources: dict[str, int]
    pinned_bytes: int | None = None
    device_bytes: int | None = None
    device_bytes_peak: int | None = None
    vram_free_bytes: int | None = None
    upload_bytes_per_s: float | None = None


@dataclass
class RunReport:
    """The account of one run, as ``--report`` writes it (schema ``framepipe.run/1``). Unknown is None, never 0.

    ``exit`` is complete, incomplete, stopped or failed. ``frames`` balance: decoded = skipped + dropped + filtered
    + failed + delivered. ``waits_s`` are seconds waited: ``decoder`` for room behind it (all decoding threads
    together), ``filler`` for decoded frames, ``runner`` for filled slots, ``device`` for the device to finish
    (on the CPU the time in stages), ``sink`` for whoever takes the results. ``bottleneck`` is what `bottleneck` makes
    of them.

    ``stages`` has for each id ``count``, ``p50_ms``, ``p95_ms``, ``p99_ms`` and ``max_ms`` of the host's time a batch:
    on the CPU that of the work, on a GPU that to launch it. ``device`` in it is the same of the GPU's own time, from a
    sample of the batches, or None where that was not measured. ``guard`` is what watched memory
    (`framepipe.guard.monitor.Guard.report`), or None where nothing did.

    ``memory`` has in ``pins`` a row for each owner of page-locked memory (`framepipe.ledger.Account`), in ``tiers`` the
    ``hot`` and the ``cold`` one (`framepipe.tiers.TierState`) as they were at the end of the run, and in
    ``pinned_elsewhere`` an estimate of what others in the process have page-locked (`framepipe.holdings.Holdings`).
    """

    exit: str = "complete"
    pipeline: str | None = None
    device: dict[str, Any] = field(default_factory=dict)
    staging: dict[str, Any] = field(default_factory=dict)
    frames: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    fps: float | None = None
    waits_s: dict[str, float | None] = field(default_factory=dict)
    bottleneck: str | None = None
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)
    upload: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes None."""
        return {"schema": SCHEMA, **_clean(asdict(self))}


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def versions() -> dict[str, str]:
    """Versions of what a result depends on, but for PyAV and FFmpeg where PyAV cannot be imported."""
    import numpy as np

    from framepipe import __version__

    found = {
        "framepipe": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "os": platform.platform(),
    }
    with contextlib.suppress(ImportError):
        import av

        found["av"] = av.__version__
        for name, number in av.library_versions.items():
            found[name] = ".".join(str(part) for part in number)
    return found


def peak_rss_bytes() -> int | None:
    """The most memory this process has had resident, or None where the system does not tell."""
    import psutil

    peak_wset = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    if peak_wset is not None:
        return int(peak_wset)
    try:
        import resource
    except ImportError:  # pragma: no cover - neither Windows nor POSIX
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if platform.system() == "Darwin" else peak * 1024)


def bottleneck(
    waits_s: Mapping[str, float | None],
    seconds: float,
    *,
    held_s: float | None = None,
    busy_s: float | None = None,
) -> str | None:
    """Which part of the pipeline the others waited for, or None where nobody waited much.

    ``waits_s`` are those of `RunReport`. With a device of its own memory ``held_s`` is how long batches in flight kept
    another one back, and ``busy_s`` how long the runner thread worked; None elsewhere. The answer is the part behind
    which everybody starves and before which everybody is held back: ``decode``, ``staging`` (the copy to slots),
    ``launch`` (the runner's own work: uploads and launches), ``device`` or ``sink``. Whoever waits for input is asked
    first, from the decoders on: that the last batch is not done yet when the sink thread looks is no sign of a busy
    device while nothing is queued behind it.
    """
    if seconds <= 0:
        return None
    share = {name: (value or 0.0) / seconds for name, value in waits_s.items()}
    if share.get("sink", 0.0) > _MUCH:
        return "sink"
    if share.get("filler", 0.0) > _MUCH:
        return "decode"
    if share.get("runner", 0.0) > _MUCH:
        return "staging"
    if share.get("device", 0.0) > _MUCH and (held_s is None or held_s / seconds > _SOME):
        return "device"
    return "launch" if busy_s is not None and busy_s / seconds > _MUCH else None
