"""One measurement in a process of its own: started, listened to, and ended by its id.

The child gets one line of JSON on its standard input, which stays open: where that ends, the parent is gone and the
child ends itself. It answers with lines of JSON, ``{"event": …}`` on the way and ``{"result": …}`` at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import framepipe

_SLICE_S = 0.1
_GRACE_S = 3.0
_LINES = 8
ARGV = (sys.executable, "-P", "-m", "framepipe.probe._child")
"""-P: the working folder is not looked at for modules, whatever lies there."""


def run(
    request: Mapping[str, Any],
    timeout_s: float,
    *,
    stopped: Callable[[], bool] = lambda: False,
    hear: Callable[[Any], None] = lambda event: None,
    argv: Sequence[str] = ARGV,
) -> dict[str, Any]:
    """The result of one child process; it never raises for what happens to the child.

    ``status`` is what the child says, or ``failed`` with a ``reason`` where it crashed, said nothing or took longer
    than ``timeout_s``, or ``unfinished`` once ``stopped`` says so (asked ten times a second; the child is ended). An
    exception of ``hear``, which gets the events, or a KeyboardInterrupt ends the child, too.
    """
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment(), **_apart()
    )
    conversation = _Conversation(child)
    try:
        conversation.ask(request)
        return conversation.hear_out(time.monotonic() + timeout_s, timeout_s, stopped, hear)
    finally:
        _end(child)
        conversation.close()


class _Conversation:
    """Pipes read by threads, so that neither side ever waits for the other with a full pipe."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._heard: SimpleQueue[bytes | None] = SimpleQueue()
        self._complaints: deque[bytes] = deque(maxlen=_LINES)
        targets = ((self._listen, child.stdout), (self._note, child.stderr))
        self._threads = [
            threading.Thread(target=target, args=(pipe,), name="framepipe-probe", daemon=True)
            for target, pipe in targets
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._heard.put(line)
        self._heard.put(None)

    def _note(self, pipe: IO[bytes]) -> None:
        self._complaints.extend(pipe)

    def ask(self, request: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already, and its exit status says more
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()

    def hear_out(
        self, deadline_s: float, timeout_s: float, stopped: Callable[[], bool], hear: Callable[[Any], None]
    ) -> dict[str, Any]:
        result: dict[str, Any] | None = None
        while True:
            if stopped():
                return {"status": "unfinished", "reason": "interrupted"}
            if time.monotonic() > deadline_s:
                return {"status": "failed", "reason": f"took longer than {timeout_s:g} s and was ended"}
            try:
                line = self._heard.get(timeout=_SLICE_S)
            except Empty:
                continue
            if line is None:
                return result or self._nothing()
            said = _parsed(line)
            if "event" in said:
                hear(said["event"])
            result = said.get("result", result)

    def _nothing(self) -> dict[str, Any]:
        try:
            status: int | None = self._child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            status = None
        self._threads[1].join(_GRACE_S)
        words = " | ".join(line.decode("utf-8", "replace").strip() for line in self._complaints)
        ended = "closed its output without a result" if status is None else f"ended with status {status}"
        return {"status": "failed", "reason": f"the child process {ended}{f': {words}' if words else ''}"}

    def close(self) -> None:
        for thread in self._threads:
            thread.join(_GRACE_S)
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was written and never read
                    pipe.close()


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except ValueError:  # a library that writes to the descriptor itself
        return {}
    return said if isinstance(said, dict) else {}


def _environment() -> dict[str, str]:
    """The parent's, and the folder that this framepipe was imported from."""
    own = str(Path(framepipe.__file__).parent.parent)
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([own, given] if given else [own])}


def _apart() -> dict[str, Any]:
    """Ctrl-C on a terminal goes to the parent alone, which ends the child when it has seen to the rest."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"process_group": 0}


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:  # inside a driver's call
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
