"""Reading what may stall: pipes in short slices, networks in a thread of their own.

Nothing from outside ends a read that FFmpeg is in. So what comes from a network is read by a thread that nobody has to
wait for: whoever wants packets looks several times a second whether the pipeline stops, and how long nothing has come.
A thread that is stuck is left to itself; FFmpeg's own time-out ends it, and it then closes what it opened. Until then
the interpreter must not be taken down around it, which would crash it inside FFmpeg: Python waits for such a thread as
for any other, unless the process ends at once (`stuck`).
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from typing import Any

_SLICE_S = 0.1
_PACKETS = 64
_GRACE_S = 0.5
"""So much later than FFmpeg, which may know more of the reason, we say ourselves that the time is over."""
_JOIN_S = 0.3
_THREAD = "framepipe-read-"


def stuck() -> bool:
    """Whether a thread is still in a read that nobody waits for: the interpreter's end would wait for it."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


class PatientFile:
    """A readable object over a file descriptor that waits in short slices, so that a stalled input can be stopped.

    FFmpeg cannot time out a pipe, a FIFO or standard input, and an exception in its read callback is swallowed;
    here a stop simply looks like the end of the input.
    """

    def __init__(self, fd: int, name: str, stopping: Callable[[], bool], *, owns_fd: bool) -> None:
        self.name = name
        self.nbytes = 0
        """Bytes read so far."""
        self._fd = fd
        self._stopping = stopping
        self._owns_fd = owns_fd

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; ``b""`` at the end or once the pipeline stops."""
        size = size if size > 0 else 65536
        data = self._read_in_thread(size) if sys.platform == "win32" else self._read(size)
        self.nbytes += len(data)
        return data

    def _read(self, size: int) -> bytes:
        while not self._stopping():
            if _readable(self._fd):
                return os.read(self._fd, size)
        return b""

    def _read_in_thread(self, size: int) -> bytes:
        # select() takes only sockets on Windows. A read that never returns is left to its daemon thread.
        box: list[bytes] = []
        thread = threading.Thread(
            target=lambda: box.append(os.read(self._fd, size)), name="framepipe-stdin", daemon=True
        )
        thread.start()
        while thread.is_alive() and not self._stopping():
            thread.join(_SLICE_S)
        return box[0] if box else b""

    def close(self) -> None:
        """Close the descriptor if it is ours. Idempotent."""
        if self._owns_fd:
            self._owns_fd = False
            os.close(self._fd)


def _readable(fd: int) -> bool:
    """Whether a read returns at once, or does within a short while."""
    if hasattr(select, "poll"):  # `select` takes no descriptor above 1023
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(_SLICE_S * 1000))
    return bool(select.select([fd], [], [], _SLICE_S)[0])


class Stopped(Exception):
    """The pipeline stops, and nobody wants the input any more."""


class Reader:
    """Opens an input by calling ``open``, which has a time-out of ``timeout_s``, and reads its packets.

    One thread at a time uses it. What ``open`` returns is closed by the reader's own thread, behind `close`, since a
    container must not be closed while something reads it.
    """

    def __init__(self, open: Callable[[], Any], stopping: Callable[[], bool], timeout_s: float, name: str) -> None:
        self._open = open
        self._stopping = stopping
        self._timeout_s = timeout_s
        self._opened: Queue[Any] = Queue()
        self._packets: Queue[Any] = Queue(_PACKETS)
        self._wanted: Queue[Any] = Queue()  # the stream whose packets are to be read, or None: nobody reads
        self._closing = threading.Event()
        self._told_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{_THREAD}{name}", daemon=False)

    def open(self) -> Any:
        """The opened container. Raises what ``open`` raised, TimeoutError once the time is over, or `Stopped`."""
        self._thread.start()
        return self._result(self._opened)

    def packets(self, stream: Any) -> Iterator[Any]:
        """Packets of ``stream`` in order, with the flush packet. Raises as `open` does."""
        self._wanted.put(stream)
        while (packet := self._result(self._packets)) is not None:
            yield packet

    def close(self) -> None:
        """Make the thread close the container and end; one that is stuck is not waited for. Idempotent."""
        self._tell()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, self._told_s + _JOIN_S - time.monotonic()))

    def _tell(self) -> None:
        if not self._closing.is_set():
            self._told_s = time.monotonic()
            self._closing.set()
            self._wanted.put(None)

    def _result(self, queue: Queue[Any]) -> Any:
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while True:
            try:
                result = queue.get(timeout=_SLICE_S)
            except Empty:
                if self._stopping():
                    self._tell()
                    raise Stopped from None
                if time.monotonic() >= deadline:
                    self._tell()
                    raise TimeoutError from None
                continue
            if isinstance(result, BaseException):
                raise result
            return result

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            container = self._open()
        except BaseException as error:
            self._opened.put(self._judged(error, time.monotonic() - began_s))
            return
        try:
            self._opened.put(container)
            self._read(container)
            self._closing.wait()
        finally:
            container.close()

    def _read(self, container: Any) -> None:
        stream = self._wanted.get()
        if stream is None:
            return
        # Of the last reads: what a time-out leaves of packets still comes, and only then the error, at once.
        waits_s: deque[float] = deque(maxlen=4)
        began_s = time.monotonic()
        try:
            for packet in container.demux(stream):
                waits_s.append(time.monotonic() - began_s)
                if not self._put(packet):
                    return
                began_s = time.monotonic()
            self._put(None)
        except BaseException as error:
            self._put(self._judged(error, *waits_s, time.monotonic() - began_s))

    def _judged(self, error: BaseException, *waits_s: float) -> BaseException:
        """FFmpeg calls its time-outs by many names, and by some that mean something else: the clock decides."""
        return TimeoutError() if max(waits_s) >= 0.95 * self._timeout_s else error

    def _put(self, packet: Any) -> bool:
        while not self._closing.is_set():
            with contextlib.suppress(Full):
                self._packets.put(packet, timeout=_SLICE_S)
                return True
        return False
