"""``framepipe run``: signals, exit codes, the report file and the closing words of a run."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from framepipe._cli_progress import Silent
from framepipe.errors import ConfigError, OutputExistsError
from framepipe.redact import redact
from framepipe.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from framepipe.pipeline import Pipeline

_EXIT = {"complete": 0, "failed": 1, "incomplete": 3, "stopped": 3}
_WORDS = {
    "decode": "decoding: everything behind it waited for frames; try more threads, a file that can be cut at key "
    "frames, or a codec that is faster to decode",
    "staging": "staging: the device waited for frames to be copied; try more fillers or a larger batch",
    "launch": "launching: the thread that feeds the device was busy all the time; try a larger batch or fewer stages",
    "device": "the stages: the device was busy all the time; try a larger batch, smaller pictures or fewer stages",
    "sink": "collecting, drawing and writing the results: everything before it waited; try a faster codec or preset, "
    "or do less there",
}
"""What held everything up, and what to change."""
_FILES_SHOWN = 8
_OWNERS_SHOWN = 4
_UNHEARD = logging.NullHandler()
"""Without a handler Python would print what `Pipeline.run` tells of as well."""
_LABEL = 14
_WIDTH = 80


class Interrupt:
    """While it is entered, the first SIGINT, SIGTERM or SIGBREAK calls ``stop``, the second one ends the process."""

    def __init__(self, stop: Callable[[], None], progress: Silent) -> None:
        self._stop = stop
        self._progress = progress
        self._old: dict[int, Any] = {}
        self.code: int | None = None
        """The exit status that the signal asks for, once there was one."""

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGBREAK"):
                if number := getattr(signal, name, None):
                    self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code = 130 if number == signal.SIGINT else 143
        if self.code is not None:
            _show_cursor()
            os._exit(code)
        self.code = code
        self._progress.stopping = True
        self._stop()


def _show_cursor() -> None:
    # Not through sys.stderr: the signal may have come in the middle of a write to it.
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")


def execute(pipeline: Pipeline, progress: Silent, interrupt: Interrupt) -> tuple[Exception | None, int]:
    """Run to the end, or until ``interrupt`` stops it. The error if there was one, and the exit status."""
    error: Exception | None = None
    logging.getLogger("framepipe").addHandler(_UNHEARD)
    try:
        with progress, pipeline:
            pipeline.run(progress=progress.show, tell=progress.tell)
    except Exception as failed:
        error = failed
    if error is not None:
        return error, int(getattr(error, "exit_code", 1))
    ended = pipeline.report.exit if pipeline.report is not None else "failed"
    if interrupt.code is not None and ended != "complete":
        return None, interrupt.code
    return None, _EXIT[ended]


def log_cuda(name: str) -> None:
    """Have the CUDA driver log to a file, or to ``stdout`` or ``stderr``, from its initialisation on (CUDA_LOG_FILE).

    It logs errors only, from CUDA 12.9 on. Must be called before CUDA is in use. Raises `ConfigError` for a folder.
    """
    if name not in ("stdout", "stderr"):
        path = Path(name).absolute()
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"--cuda-log {name}: {'is a folder' if path.is_dir() else 'there is no such folder'}")
        name = str(path)
    os.environ["CUDA_LOG_FILE"] = name


class ReportFile:
    """``--report``: a file that is whole or not there. A report of an earlier run is replaced, any other file is not.

    ``-`` is standard output. Raises `OutputExistsError` or `ConfigError` when made, so that no run is for nothing.
    """

    def __init__(self, name: str, *, overwrite: bool) -> None:
        self.path = None if name == "-" else Path(name)
        if self.path is None:
            return
        if self.path.is_dir():
            raise ConfigError(f"--report {name}: is a folder")
        self._replace = self.path.is_file() or not self.path.exists()  # else a device or a pipe: it is written to
        if self.path.is_file() and not overwrite and not _is_report(self.path):
            raise OutputExistsError(f"--report {name}: exists and is no report; --overwrite replaces it")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--report {name}: {error.strerror}") from None

    def write(self, report: Mapping[str, Any]) -> None:
        """Write it whole, then put it in its place. Raises OSError."""
        text = json.dumps(report, indent=2, default=str) + "\n"
        if self.path is None:
            sys.stdout.write(text)
            return
        if not self._replace:
            self.path.write_text(text, encoding="utf-8")
            return
        if _has_part(report, self.path):
            raise FileExistsError(errno.EEXIST, "it belongs to this run, as an input or a result")
        place = Path(os.path.realpath(self.path))  # a link, such as /dev/stdout, stays one
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)


def _has_part(report: Mapping[str, Any], path: Path) -> bool:
    """Whether ``path`` is an input or a result of the run, or its pipeline."""
    names = [report.get("pipeline"), *(source.get("uri") for source in report.get("sources", ()))]
    names += [name for state in report.get("sinks", {}).values() for name in state.get("paths", ())]
    names.append((report.get("guard") or {}).get("file"))
    return os.path.realpath(path) in {os.path.realpath(name) for name in names if name}


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(200)
    return not head or b'"framepipe.run/' in head


def closing_words(report: Mapping[str, Any], error: BaseException | None = None) -> Iterator[str]:
    """What is worth saying at the end of a run, from a `RunReport` as a dict; ``error`` is said elsewhere."""
    frames, device = report["frames"], report["device"]
    nothing = report["exit"] == "failed" and not frames.get("delivered")  # then the error is all there is to say
    if frames and not nothing:
        yield _headline(report, frames)
        yield from _losses(frames)
        if len(report["sources"]) > 1:
            yield from _each(report["sources"])
    if device and not nothing:
        for label, text in _table(report):
            yield from _row(label, text)
    yield from source_errors(report, error)
    said = [*report.get("warnings", ()), *(text for source in report["sources"] for text in source.get("warnings", ()))]
    # A source's warnings may be among the run's, under its name.
    for text in said:
        if not any(other.endswith(f": {text}") for other in said):
            yield f"warning: {text}"
    yield from _written(report.get("sinks") or {}, (report.get("guard") or {}).get("file"))


def _table(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a run was made of, as labels and texts; what only a GPU has is left out where there is none."""
    device, staging, memory = report["device"], report["staging"], report["memory"]
    name = f", {device['name']}" if device.get("name") else ""
    why = f" ({device['why']})" if device.get("why") else ""
    yield "device", f"{device.get('kind')}{name}{why}"
    numbers = [
        f"{key} {staging[key]}" for key in ("slots", "depth", "batch", "fillers") if staging.get(key, "auto") != "auto"
    ]
    yield "staging", ", ".join([str(staging.get("strategy")), *numbers])
    if device.get("kind") != "cpu" and memory:
        uploaded, rate = report["upload"].get("bytes"), report["upload"].get("bytes_per_s")
        if uploaded is not None:
            yield "upload", f"{format_bytes(uploaded)}{f' ({format_bytes(rate)}/s)' if rate is not None else ''}"
        yield "page-locked", _page_locked(memory)
        if text := _video_memory(memory):
            yield "video memory", text
    if report.get("guard"):
        yield "guard", _guard(report["guard"])
    if report["bottleneck"]:
        yield "bottleneck", _WORDS.get(report["bottleneck"], report["bottleneck"])


def _guard(guard: Mapping[str, Any]) -> str:
    """How little was free, by which count, and how often something was done about it."""
    least = guard.get("least")
    if least is None:
        return "nothing here tells how much memory is free"
    of = f" of {format_bytes(least['total'])}" if least["total"] is not None else ""
    times, decisions = guard["episodes"], guard["decisions"]
    low = f"low {times} time{'' if times == 1 else 's'}" if times else f"never below {guard['low']}"
    made = f", {decisions} decision{'' if decisions == 1 else 's'}" if decisions else ""
    return f"{format_bytes(least['free'])}{of} free at the lowest ({least['source']}), {low}{made}"


def _page_locked(memory: Mapping[str, Any]) -> str:
    """How much and how often, and where there are several who page-locked, who did."""
    count = memory["pinned_allocations"]
    text = f"{format_bytes(memory['pinned_bytes'])} in {count} allocation{'' if count == 1 else 's'}"
    peaks: dict[str, int] = {}
    for pin in memory.get("pins") or ():
        peaks[pin["owner"]] = peaks.get(pin["owner"], 0) + pin["peak_bytes"]
    if len(peaks) < 2:
        return text
    most = sorted(peaks.items(), key=lambda item: -item[1])
    shown = [f"{owner} {format_bytes(nbytes)}" for owner, nbytes in most[:_OWNERS_SHOWN]]
    more = [f"{len(most) - _OWNERS_SHOWN} more"] if len(most) > _OWNERS_SHOWN else []
    return f"{text}: {', '.join([*shown, *more])}"


def _video_memory(memory: Mapping[str, Any]) -> str:
    peak = memory.get("device_bytes_peak")
    parts = [f"{format_bytes(peak)} at most"] if peak is not None else []
    names = {"free_start": "at the start", "free_least": "at the lowest", "free_end": "at the end"}
    for reading in memory.get("vram") or ():
        free = [f"{format_bytes(reading[key])} {when}" for key, when in names.items() if reading.get(key) is not None]
        if free:
            modelled = f" (modelled: {reading['source'].removeprefix('model ')})" if reading.get("modelled") else ""
            parts.append(f"free {', '.join(free)}{modelled}")
            break
    return "; ".join(parts)


def _row(label: str, text: str) -> list[str]:
    """A row of the table, in as many lines as it takes; words stay whole."""
    indent = " " * _LABEL
    return textwrap.wrap(
        f"{label:{_LABEL}}{text}", _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def source_errors(report: Mapping[str, Any], error: BaseException | None = None) -> Iterator[str]:
    """What ended sources early, but for ``error``, which is said elsewhere."""
    for source in report["sources"]:
        if source.get("error") and source["error"] != redact(error):
            yield f"source {source['name']}: {source['error']}"


def _headline(report: Mapping[str, Any], frames: Mapping[str, Any]) -> str:
    sources = report["sources"]
    of = f"of {sources[0]['name']}" if len(sources) == 1 else f"of {len(sources)} sources"
    fps = f" ({report['fps']:.1f} fps)" if report["fps"] else ""
    return f"{report['exit']}: {frames['delivered']} frames {of} in {format_seconds(report['seconds'])}{fps}"


def _each(sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each source: its name, frames delivered, status, and what there was about it, by name."""
    width = min(32, max(len(source["name"]) for source in sources))
    for source in sources:
        odd = [f"{count} {name}" for name, count in (source.get("counters") or {}).items()]
        if source.get("packet_errors"):
            odd.append(_damaged(source["packet_errors"]))
        notes = f"  {', '.join(odd)}" if odd else ""
        unit = "frame " if source["delivered"] == 1 else "frames"
        yield f"  {_short(source['name'], width):<{width}} {source['delivered']:>7} {unit}  {source['status']}{notes}"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _damaged(count: int) -> str:
    return f"{count} damaged packet{'' if count == 1 else 's'}"


def _losses(frames: Mapping[str, Any]) -> Iterator[str]:
    parts = [
        f"{sum(frames[kind].values())} {kind} ({_reasons(frames[kind])})"
        for kind in ("skipped", "dropped", "filtered", "failed")
        if frames.get(kind)
    ]
    if frames.get("packet_errors"):
        parts.append(_damaged(frames["packet_errors"]))
    if parts:
        yield f"decoded {frames['decoded']}: {', '.join(parts)}"


def _reasons(counts: Mapping[str, int]) -> str:
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{why} {n}" for why, n in counts.items())


def _written(sinks: Mapping[str, Mapping[str, Any]], guarded: str | None) -> Iterator[str]:
    paths = [Path(path) for state in sinks.values() for path in state.get("paths", ())]
    paths += [Path(guarded)] if guarded else []
    for path in paths[:_FILES_SHOWN]:
        size = f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""
        yield f"wrote {path}{size}"
    if len(paths) > _FILES_SHOWN:
        yield f"… and {len(paths) - _FILES_SHOWN} more files"


def failure(error: BaseException) -> dict[str, Any]:
    """A report for a run that ended before the pipeline could make one."""
    from framepipe.report import RunReport

    return RunReport(exit="failed", error=redact(error)).to_dict()
