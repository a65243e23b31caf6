"""Making a `RunReport` of an engine that has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from framepipe import report as reports
from framepipe.engine import Engine
from framepipe.feed import Feed
from framepipe.redact import redact
from framepipe.report import RunReport


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
        report = RunReport(
            exit=_exit(engine, feeds, stopped, frames),
            device={"kind": device.kind, "name": device.name, "why": self.why},
            staging={
                "strategy": self.strategy,
                "slots": len(engine.ring.slots),
                "depth": engine.options.depth,
                "batch": engine.options.batch,
                "fillers": engine.options.fillers,
            },
            frames=frames,
            sources=[_source(feed) for feed in feeds],
            seconds=round(engine.seconds, 4),
            fps=round(frames["delivered"] / engine.seconds, 2) if engine.seconds > 0 else None,
            waits_s=waits,
            bottleneck=reports.bottleneck(waits, engine.seconds),
            stages={
                link.id: {**engine.runner.durations[link.id].summary(), **link.state()} for link in engine.chains.stages
            },
            sinks={f"{i}:{sink.type_name}": sink.state() for i, sink in enumerate(engine.deliverer.sinks)},
            upload={
                "bytes": engine.runner.uploaded,
                "bytes_per_s": round(engine.runner.uploaded / engine.seconds) if engine.seconds > 0 else None,
            },
            memory={
                "pinned_bytes": device.ledger.peak.get("pinned", 0),
                "pinned_allocations": device.ledger.allocations.get("pinned", 0),
                "replans": engine.fillers.replans,
                "pageable_bytes": device.ledger.peak.get("pageable", 0),
                "device_bytes_peak": device.ledger.peak.get("device"),
                "rss_peak_bytes": reports.peak_rss_bytes(),
                "vram": device.vram(),
            },
            versions=reports.versions(),
            warnings=[
                *device.warnings,
                *engine.context.warnings,
                *(f"{feed.name}: {warning}" for feed in feeds for warning in feed.warnings),
            ],
        )
        error = engine.error or next((feed.error for feed in feeds if feed.error is not None), None)
        report.error = redact(str(error)) if error is not None else None
        if report.exit == "failed" and report.error is None:
            report.error = nothing_delivered(feeds)
        return report


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


def truncated(feed: Feed) -> bool:
    """Whether fewer packets came than the header announced, of an input that was to be read whole."""
    whole = feed.source.start is None and feed.source.end is None and feed.ended and feed.source.loop == 1
    return bool(whole and feed.mode != "frames" and feed.expected and feed.packets_read < feed.expected)


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


def _source(feed: Feed) -> dict[str, Any]:
    info = feed.info
    status = "failed" if feed.error is not None else "complete" if feed.ended else "stopped"
    if status == "complete" and (feed.packet_errors or truncated(feed)):
        status = "incomplete"
    warnings = list(feed.warnings)
    if truncated(feed):
        warnings.append(f"{feed.packets_read} of {feed.expected} announced packets were there")
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
        "first_time_s": feed.first_time_s,
        "last_time_s": feed.last_time_s,
        "warnings": warnings,
    }
