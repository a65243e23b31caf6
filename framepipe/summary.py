"""What an engine tells: `Statistics` while it runs, a `RunReport` once it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from framepipe import report as reports
from framepipe.engine import Engine
from framepipe.feed import Feed
from framepipe.findings import counters, findings
from framepipe.redact import redact
from framepipe.report import RunReport, Statistics

_LOST_S = 0.25
"""By so much a time that a container announces may be wrong without anything missing."""


@dataclass(frozen=True)
class Summary:
    """What was decided at opening: ``why`` this device, and which staging ``strategy``."""

    why: str
    strategy: str

    def report(self, engine: Engine, feeds: Sequence[Feed], stopped: bool) -> RunReport:
        """The account of the run."""
        frames = _frames(feeds)
        waits = _waits(engine)
        device = engine.device
        sources = [_source(feed, engine) for feed in feeds]
        report = RunReport(
            exit=_exit(engine, feeds, stopped, frames),
            device={**device.describe(), "why": self.why},
            staging={
                "strategy": self.strategy,
                "slots": len(engine.ring.slots),
                "depth": engine.options.depth,
                "batch": engine.options.batch,
                "fillers": engine.options.fillers,
                "copy_threads": engine.options.copy_threads,
                **_timings(engine),
            },
            frames=frames,
            sources=sources,
            seconds=round(engine.seconds, 4),
            fps=round(frames["delivered"] / engine.seconds, 2) if engine.seconds > 0 else None,
            waits_s=waits,
            bottleneck=_bottleneck(engine, waits),
            stages=_stages(engine),
            sinks={f"{i}:{sink.type_name}": sink.state() for i, sink in enumerate(engine.deliverer.sinks)},
            upload={
                "bytes": engine.runner.uploaded,
                "bytes_per_s": round(engine.runner.uploaded / engine.seconds) if engine.seconds > 0 else None,
            },
            memory={
                "pinned_bytes": device.ledger.peak.get("pinned", 0),
                "pinned_bytes_taken": device.ledger.most_taken("pinned"),
                "pinned_allocations": device.ledger.allocations.get("pinned", 0),
                "pinned_bytes_total": device.ledger.pinned_total,
                "replans": engine.fillers.replans,
                "pageable_bytes": device.ledger.peak.get("pageable", 0),
                "device_bytes_peak": device.ledger.peak.get("device"),
                "rss_peak_bytes": reports.peak_rss_bytes(),
                "vram": device.vram(),
                **engine.holdings.as_json(),
            },
            guard=engine.guard.report() if engine.guard is not None else None,
            versions=reports.versions(),
            warnings=[
                *device.warnings,
                *engine.context.warnings,
                *(f"{source['name']}: {warning}" for source in sources for warning in source["warnings"]),
            ],
        )
        error = engine.error or next((feed.error for feed in feeds if feed.error is not None), None)
        report.error = redact(str(error)) if error is not None else None
        if report.exit == "failed" and report.error is None:
            report.error = nothing_delivered(feeds)
        return report


class Snapshots:
    """Makes `Statistics` for one pipeline; remembers the snapshot before, for what is counted since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _at_s and _uploaded
        self._at_s = 0.0
        self._uploaded = 0

    def take(self, engine: Engine | None, feeds: Sequence[Feed]) -> Statistics:
        """A snapshot, before the start (without an engine), in the run or after its end. Any thread."""
        seconds = 0.0
        if engine is not None:
            seconds = engine.seconds if engine.finished.is_set() else time.perf_counter() - engine.started_s
        delivered = {feed.name: feed.delivered for feed in feeds}
        known = [feed.expected for feed in feeds]
        plain = all(f.source.start is None and f.source.end is None and f.source.loop == 1 for f in feeds)
        total = sum(delivered.values())
        return Statistics(
            decoded=sum(feed.decoded for feed in feeds),
            delivered=total,
            skipped=sum(sum(feed.skipped.values()) for feed in feeds),
            dropped=sum(sum(feed.dropped.values()) for feed in feeds),
            expected=sum(k for k in known if k) if known and all(known) and plain else None,
            seconds=seconds,
            fps=total / seconds if seconds > 0 else 0.0,
            sources=delivered,
            **(self._of_device(engine, seconds) if engine is not None and not engine.device.host_shared else {}),
        )

    def _of_device(self, engine: Engine, seconds: float) -> dict[str, Any]:
        ledger = engine.device.ledger
        # What is modelled is not told beside what is measured, where there is no room to say which is which.
        measured = [reading for reading in engine.device.vram() if not reading.get("modelled")]
        free = [reading["free"] for reading in measured if reading.get("free") is not None]
        return {
            "pinned_bytes": ledger.bytes.get("pinned"),
            "device_bytes": ledger.bytes.get("device"),
            "device_bytes_peak": ledger.peak.get("device"),
            "vram_free_bytes": free[0] if free else None,
            "upload_bytes_per_s": self._rate(engine.runner.uploaded, seconds),
        }

    def _rate(self, uploaded: int, seconds: float) -> float | None:
        with self._lock:
            passed = seconds - self._at_s
            if passed <= 0:
                return None
            rate = (uploaded - self._uploaded) / passed
            self._at_s, self._uploaded = seconds, uploaded
        return rate


def _frames(feeds: Sequence[Feed]) -> dict[str, Any]:
    def add(name: str) -> dict[str, int]:
        total: dict[str, int] = {}
        for feed in feeds:
            for reason, number in getattr(feed, name).items():
                total[reason] = total.get(reason, 0) + number
        return total

    return {
        "decoded": sum(feed.decoded for feed in feeds),
        "delivered": sum(feed.delivered for feed in feeds),
        "skipped": add("skipped"),
        "dropped": add("dropped"),
        "filtered": add("filtered"),
        "failed": add("failed"),
        "packet_errors": sum(feed.packet_errors for feed in feeds),
    }


def _waits(engine: Engine) -> dict[str, float | None]:
    stages_s = sum(durations.total_s for durations in engine.runner.durations.values())
    device_s = stages_s if engine.device.host_shared else engine.deliverer.waited_s
    waits = {
        "decoder": engine.pool.waited_s,
        "filler": engine.fillers.waited_s,
        "runner": engine.ring.waited_s["get"],
        "device": device_s,
        # The runner is kept back by what is in flight: by the device, or else by whoever takes the results.
        "sink": max(0.0, engine.runner.waited_s - engine.deliverer.waited_s),
    }
    return {name: round(value, 4) for name, value in waits.items()}


def _bottleneck(engine: Engine, waits: dict[str, float | None]) -> str | None:
    if engine.device.host_shared:
        return reports.bottleneck(waits, engine.seconds)
    runner = engine.runner
    busy_s = runner.ran_s - engine.ring.waited_s["get"] - runner.waited_s
    return reports.bottleneck(waits, engine.seconds, held_s=runner.waited_s, busy_s=busy_s)


def _timings(engine: Engine) -> dict[str, dict[str, Any]]:
    """What ``staging: {measure: true}`` asks for: ``copy_ms``, ``allocate_ms``, ``release_ms``, ``upload_ms``."""
    told = {}
    for what, seconds in (engine.stager.timings or {}).items():
        durations = reports.Durations()
        for each in seconds:
            durations.add(each)
        told[f"{what}_ms"] = durations.summary()
    return told


def _stages(engine: Engine) -> dict[str, dict[str, Any]]:
    """The times of each stage, on the host and where they were measured on the device, and what it has to tell."""
    told = {}
    for stage in engine.chains.stages:
        measured = engine.runner.device_durations[stage.id]
        told[stage.id] = {
            **engine.runner.durations[stage.id].summary(),
            **stage.state(),
            "device": measured.summary() if measured.count else None,
        }
    return told


def truncated(feed: Feed) -> str | None:
    """What is missing of that which the container announced, of an input that was to be read whole."""
    whole = feed.source.start is None and feed.source.end is None and feed.ended and feed.source.loop == 1
    if not whole or feed.mode in ("", "frames"):
        return None
    if feed.expected and feed.packets_read < feed.expected:
        return f"{feed.packets_read} of {feed.expected} announced packets were there"
    end_s = float(((feed.top_pts or 0) * (feed.time_base or 0)) + 1 / feed.rate)
    if feed.expected_end_s is not None and feed.expected_end_s - end_s > max(_LOST_S, float(3 / feed.rate)):
        return f"the pictures end at {end_s:.3f} s of {feed.expected_end_s:.3f} s announced"
    return None if feed.decoded else "not one picture was there"


def _exit(engine: Engine, feeds: Sequence[Feed], stopped: bool, frames: dict[str, Any]) -> str:
    if engine.error is not None:
        return "failed"
    if stopped and (not engine.pool.exhausted or "stopped" in frames["dropped"]):
        return "stopped"
    damaged = any(feed.error is not None or feed.packet_errors or truncated(feed) for feed in feeds)
    if not damaged:
        return "complete"
    return "incomplete" if frames["delivered"] else "failed"


def nothing_delivered(feeds: Sequence[Feed]) -> str:
    """Why a run without an error delivered nothing."""
    feed = next((f for f in feeds if f.packet_errors or truncated(f)), feeds[0])
    of = f" of {feed.expected} announced" if feed.expected else ""
    return f"{feed.name}: no picture could be decoded ({feed.packets_read} packets{of}, {feed.packet_errors} damaged)"


def _source(feed: Feed, engine: Engine) -> dict[str, Any]:
    info = feed.info
    status = "failed" if feed.error is not None else "complete" if feed.ended else "stopped"
    if status == "complete" and (feed.packet_errors or truncated(feed)):
        status = "incomplete"
    warnings = [*feed.warnings, *findings(feed, engine.chains.stages)]
    if missing := truncated(feed):
        warnings.append(missing)
    return {
        "name": feed.name,
        "uri": redact(info.uri),
        "status": status,
        "error": redact(str(feed.error)) if feed.error is not None else None,
        "decode": feed.mode or None,
        "decoded": feed.decoded,
        "delivered": feed.delivered,
        "skipped": feed.skipped,
        "dropped": feed.dropped,
        "filtered": feed.filtered,
        "failed": feed.failed,
        "packet_errors": feed.packet_errors,
        "reconnects": 0,
        "width": feed.spec.upright_size[0] if feed.spec is not None else None,
        "height": feed.spec.upright_size[1] if feed.spec is not None else None,
        "pix_fmt": feed.spec.pix_fmt if feed.spec is not None else None,
        "matrix": feed.spec.matrix if feed.spec is not None else None,
        "full_range": feed.spec.full_range if feed.spec is not None else None,
        "assumed": list(feed.spec.assumed) if feed.spec is not None else None,
        "transfer": feed.spec.transfer if feed.spec is not None else None,
        "sample_aspect": list(feed.spec.upright_aspect) if feed.spec is not None else None,
        "counters": counters(feed),
        "first_time_s": feed.first_time_s,
        "last_time_s": feed.last_time_s,
        "warnings": warnings,
    }
