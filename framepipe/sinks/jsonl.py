"""Results as lines of JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framepipe.errors import ConfigError, SinkError
from framepipe.frame import Frame
from framepipe.registry import register
from framepipe.sink import Sink, SinkContext
from framepipe.sinks._json import to_json
from framepipe.sinks._names import OutputNames
from framepipe.sinks._output import Outputs, WholeFile, check_output, sink_error


@register("jsonl")
@dataclass(kw_only=True)
class Jsonl(Sink):
    """One line of JSON a picture: ``source, index, time_s, width, height, meta``.

    ``path`` may hold ``{source}``, ``{index}`` (number of the part) and ``{start}`` (seconds); without
    ``{source}`` every source goes to one file, and ``-`` is the standard output. ``rotate_s`` begins a new part
    after so many seconds of video. ``time_s`` is null where it is not finite, and ``estimated`` is true beside
    it where the stream carried no time stamp. Every line is written whole and at once, under the final name:
    the file can be read while it grows, and after an error, a full disk or Ctrl-C.
    """

    path: str
    rotate_s: float | None = None

    reads = frozenset({"meta"})

    def __post_init__(self) -> None:
        self._stdout = str(self.path) == "-"
        if self.rotate_s is not None and (self._stdout or self.rotate_s <= 0):
            raise ConfigError("jsonl: rotate_s takes seconds above 0, and a file to rotate")
        self._names = OutputNames(self.path, "jsonl", shared=True)
        self._outputs = Outputs(self._names, self._file, self.rotate_s)
        self._context = SinkContext({})
        self._lines = 0

    def paths(self, sources: list[str]) -> list[Path]:
        return [] if self._stdout else self._names.paths(sources)

    def open(self, context: SinkContext) -> None:
        self._context = context
        if self._names.shared and self._names.known:
            self._outputs.get("", 0.0)  # the file of a run that finds nothing is empty, not missing

    def write(self, frame: Frame) -> None:
        record: dict[str, Any] = {
            "source": frame.source,
            "index": frame.index,
            "time_s": frame.time_s,
            "width": frame.width,
            "height": frame.height,
        }
        if frame.item.estimated:
            record["estimated"] = True
        record["meta"] = frame.meta
        try:
            line = to_json(record)
        except TypeError as error:
            raise SinkError(
                f"jsonl: meta of picture {frame.index} of {frame.source!r}: {error}",
                source=frame.source,
                index=frame.index,
            ) from error
        self._outputs.get(frame.source, frame.time_s).line(line)
        self._lines += 1

    def end(self, source: str) -> None:
        if not self._names.shared and self._names.known and not self._names.used(source):
            self._outputs.get(source, 0.0)
        self._outputs.end(source)

    def close(self) -> None:
        self._outputs.close()

    def state(self) -> dict[str, Any]:
        paths = [] if self._stdout else [str(path) for path in self._outputs.paths]
        return {"paths": paths, "lines": self._lines}

    def _file(self, path: Path, source: str, frame: Frame | None) -> _Lines | _Stdout:
        return _Stdout() if self._stdout else _Lines(path, self._context)


class _Lines:
    """A file of whole lines. Unbuffered, so that every line is readable as soon as it is written."""

    def __init__(self, path: Path, context: SinkContext) -> None:
        check_output(path, context)
        self._path = path
        try:
            self._file: WholeFile | None = WholeFile(str(path), "w")
        except OSError as error:
            raise sink_error(error, path) from error
        self._whole = 0

    def line(self, text: str) -> None:
        if self._file is None:
            return  # it failed, which was told
        try:
            self._whole += self._file.write((text + "\n").encode())
        except OSError as error:
            file, self._file = self._file, None
            cut = _cut(file, self._whole)
            file.close()
            raise sink_error(error, self._path, "the lines before are whole" if cut else "") from error

    def finish(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:  # network file systems report a full disk here
                raise sink_error(error, self._path) from error
            finally:
                self._file = None


def _cut(file: WholeFile, nbytes: int) -> bool:
    """Cut half a line off; False where the file is none that can be cut (a device)."""
    try:
        file.truncate(nbytes)
    except OSError:
        return False
    return True


class _Stdout:
    """The standard output, in UTF-8 whatever the console's code page."""

    def line(self, text: str) -> None:
        try:
            raw = getattr(sys.stdout, "buffer", None)
            if raw is None:
                sys.stdout.write(text + "\n")
            else:
                sys.stdout.flush()
                raw.write((text + "\n").encode())
            sys.stdout.flush()
        except OSError as error:
            raise sink_error(error, Path("standard output")) from error

    def finish(self) -> None:
        pass
