"""Where sinks write: checks beforehand, files that take their name when whole, errors that say what is left.

A video, picture or table is written as ``NAME.part.SUFFIX`` beside its place (``out/door.part.mp4`` for
``out/door.mp4``; ``.part2`` where that exists, for nothing found is ever touched) and renamed when whole.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from framepipe.errors import ClosedError, ConfigError, OutputExistsError, SinkError
from framepipe.frame import Frame
from framepipe.sink import SinkContext
from framepipe.sinks._names import OutputNames, same_key


def check_outputs(paths: Iterable[Path], overwrite: bool, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse outputs before anything opens.

    Raises `OutputExistsError` naming every file that exists (unless ``overwrite``), and `ConfigError`, always,
    where an output is one of the ``inputs``, a folder, meant twice, or where no file can be made.
    """
    inputs, problems, existing, seen = list(inputs), [], [], set()
    for path in paths:
        if same_key(path) in seen:
            problems.append(f"{path}: two outputs would be written to this file")
        seen.add(same_key(path))
        if (source := _input_at(path, inputs)) is not None:
            problems.append(f"{path}: this output would overwrite the input {source}")
        elif path.is_dir():
            problems.append(f"{path}: this output is a folder")
        elif reason := _no_place(path):
            problems.append(f"{path}: this output cannot be written: {reason}")
        elif path.is_file():  # a device or a pipe is written to, not replaced
            existing.append(str(path))
    if problems:
        raise ConfigError("; ".join(problems), problems)
    if existing and not overwrite:
        raise OutputExistsError(f"{', '.join(existing)}: exists already; --overwrite replaces it", existing)


def _input_at(path: Path, inputs: Iterable[Path | None]) -> Path | None:
    for source in inputs:
        try:
            if source is not None and os.path.samefile(path, source):
                return source
        except OSError:
            continue
    return None


def _no_place(path: Path) -> str | None:
    """Why no file can be made there, as far as looking tells."""
    if os.path.lexists(path):
        return None
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(folder) and (above := os.path.dirname(folder)) != folder:
        folder = above
    if os.path.exists(folder) and not os.path.isdir(folder):
        return f"{folder} is a file, not a folder"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is a folder that you may not write to"
    return None


def check_output(path: Path, context: SinkContext) -> None:
    """`check_outputs` for one name known late; makes its folder. Raises `SinkError` where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise sink_error(error, path, doing="make its folder") from error
    check_outputs([path], context.overwrite, [source.path for source in context.sources.values()])


def sink_error(error: BaseException, path: Path, left: str = "", doing: str = "write it") -> SinkError:
    """The `SinkError` for ``error``: which file, what went wrong, and what is ``left`` of it."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        reason = "the disk is full"
    elif number == errno.EFBIG:
        reason = "the file reached the largest size that is allowed here"
    else:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    told = SinkError(f"{path}: cannot {doing}: {reason}{'; ' + left if left else ''}")
    told.errno = number
    return told


class WholeFile(io.FileIO):
    """A file open for writing whose `write` returns when every byte is written, or raises OSError.

    ``failed`` tells that a write did not.
    """

    failed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        nbytes = len(view)
        try:
            while view:
                view = view[self._write(view) :]
        except OSError:
            self.failed = True
            raise
        return nbytes

    def _write(self, view: memoryview) -> int:
        """Write some of it, as much as the system takes at once."""
        return super().write(view) or 0


class PartFile(WholeFile):
    """A file under a temporary name: `commit` gives it its own, `discard` removes it. Raises `SinkError`."""

    def __init__(self, path: Path, context: SinkContext) -> None:
        self.path = path
        check_output(path, context)
        if path.exists() and not path.is_file():
            raise SinkError(f"{path}: is a device or a pipe, and this output must be a file")
        number = 1
        while True:
            self.part = path.with_name(f"{path.stem}.part{number if number > 1 else ''}{path.suffix}")
            try:
                super().__init__(str(self.part), "x+b")
                return
            except FileExistsError:
                number += 1
            except OSError as error:
                raise sink_error(error, path) from error

    def commit(self) -> None:
        """Close, and take the final name. Where that fails the finished file stays under the temporary one."""
        try:
            self.close()
            os.replace(self.part, self.path)
        except PermissionError as error:
            left = f"the finished file is {self.part}"
            raise SinkError(
                f"{self.path}: cannot be replaced: another program holds it open, or it is protected; {left}"
            ) from error
        except OSError as error:
            raise sink_error(error, self.path, f"what was written is in {self.part}") from error

    def discard(self) -> None:
        """Close and remove. Idempotent, and silent: another error is on its way already."""
        for step in (self.close, self.part.unlink):
            with contextlib.suppress(OSError):
                step()


class Writer(Protocol):
    """One output file."""

    def finish(self) -> None:
        """Make the file whole and close it. Idempotent; after a failure it only lets go."""


W = TypeVar("W", bound=Writer)


class Outputs(Generic[W]):
    """The open files of one sink: made by ``make(path, source, first frame)``, rotated by time stamp.

    With several sources in one file ``rotate_s`` is counted in the time of each.
    """

    def __init__(
        self, names: OutputNames, make: Callable[[Path, str, Frame | None], W], rotate_s: float | None = None
    ) -> None:
        self.names = names
        self.paths: list[Path] = []
        self._make = make
        self._rotate_s = rotate_s
        self._open: dict[str, W] = {}
        self._first: dict[str, dict[str, float]] = {}
        self._closed = False

    def current(self, source: str) -> W | None:
        """The file that is open for ``source``, if one is."""
        return self._open.get(self.names.key(source))

    def get(self, source: str, time_s: float, frame: Frame | None = None) -> W:
        """The file for a frame of ``source`` at ``time_s``."""
        writer = self.current(source)
        if writer is not None and self._rotate_s is not None:
            first = self._first[self.names.key(source)].setdefault(source, time_s)
            if time_s - first >= self._rotate_s - 1e-6:  # a time such as 1.083 - 0.083 is a hair below one second
                writer = None
        return writer if writer is not None else self.renew(source, time_s, frame)

    def renew(self, source: str, time_s: float, frame: Frame | None = None) -> W:
        """Finish the file of ``source`` and begin its next part."""
        if self._closed:
            raise ClosedError(f"{self.names.sink} sink: written to after its close")
        key = self.names.key(source)
        self._finish(key)
        path = self.names.next(source, time_s)
        self._open[key] = self._make(path, source, frame)
        self._first[key] = {source: time_s}
        self.paths.append(path)
        return self._open[key]

    def end(self, source: str) -> None:
        """Finish the file of ``source``, unless others share it."""
        if not self.names.shared:
            self._finish(source)

    def close(self) -> None:
        """Finish every file, going on after one fails. Raises the first error, the others as its notes."""
        self._closed = True
        finish_all([functools.partial(self._finish, key) for key in list(self._open)])

    def _finish(self, key: str) -> None:
        writer = self._open.pop(key, None)
        if writer is not None:
            writer.finish()


def finish_all(steps: Iterable[Callable[[], Any]]) -> None:
    """Do every step. Raises the first error, with the later ones as notes."""
    first: Exception | None = None
    for step in steps:
        try:
            step()
        except Exception as error:
            if first is None:
                first = error
            else:
                first.add_note(f"then: {error}")
    if first is not None:
        raise first
