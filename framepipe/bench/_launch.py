"""Child processes of a bench: started apart from the terminal, waited for in short slices, ended by their own id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import framepipe

COMMAND = (sys.executable, "-P", "-m", "framepipe.bench.cell")
_SLICE_S = 0.1
_GRACE_S = 2.0
_END_NBYTES = 2000
_END_LINES = 6


@dataclass(frozen=True)
class Outcome:
    """How a child ended: with a ``result``, or with a ``reason`` why there is none.

    ``kind`` is the type of the error that it named, ``exit_code`` what the command line returns for that. ``stopped``
    is True for a child that was ended because the bench was told to stop.
    """

    result: dict[str, Any] | None = None
    reason: str | None = None
    kind: str | None = None
    exit_code: int = 1
    stopped: bool = False


Launch = Callable[[Mapping[str, Any], Callable[[], bool], float], Outcome]
"""Has a request answered; the others are ``stopping``, asked several times a second, and the most seconds it may take.
"""


def launch(request: Mapping[str, Any], stopping: Callable[[], bool], timeout_s: float) -> Outcome:
    """Answer ``request`` in a child process of its own. Never raises for what happens in the child."""
    folder = request.get("folder")
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as told:
        asked.write(json.dumps({**request, "parent": os.getpid()}).encode())
        asked.seek(0)
        # Files, not pipes: nobody has to read while the child writes, and nothing of this process's input is taken.
        process = subprocess.Popen(
            COMMAND,
            stdin=asked,
            stdout=said,
            stderr=told,
            cwd=folder,
            env=environment(os.environ),
            **_apart(),
        )
        try:
            why = _wait(process, stopping, timeout_s)
        finally:
            _end(process)
        if why == "stopped":
            return Outcome(reason="interrupted", stopped=True)
        if why:
            return Outcome(reason=f"{why}{_ending(told)}")
        return _outcome(process.returncode, _last_line(said), told)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: it finds this framepipe and what this process finds, wherever it is started."""
    root = str(Path(framepipe.__file__).resolve().parents[1])
    folders = [os.path.abspath(part) for part in own.get("PYTHONPATH", "").split(os.pathsep) if part]
    installed = os.path.basename(root) in ("site-packages", "dist-packages")
    folders += [] if installed or root in folders else [root]
    path = {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
    return {**own, **path, "PYTHONFAULTHANDLER": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def _apart() -> dict[str, Any]:
    """Out of reach of the terminal's Ctrl-C, which is this process's to handle."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def _wait(process: subprocess.Popen[bytes], stopping: Callable[[], bool], timeout_s: float) -> str:
    """Empty once it has ended by itself, otherwise why it has to be ended."""
    left = max(1, round(timeout_s / _SLICE_S))
    while True:
        try:
            process.wait(_SLICE_S)
            return ""
        except subprocess.TimeoutExpired:
            left -= 1
        if stopping():
            return "stopped"
        if left <= 0:
            return f"no result within {timeout_s:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_GRACE_S)


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").rstrip().splitlines()
    return lines[-1] if lines else ""


def _outcome(code: int, line: str, told: IO[bytes]) -> Outcome:
    try:
        answer = json.loads(line)
        error = answer.get("error")
        result = answer.get("result")
    except (ValueError, AttributeError):
        return Outcome(reason=f"{_how_it_ended(code)}{_ending(told)}")
    if error:
        return Outcome(reason=error["text"], kind=error["type"], exit_code=error["exit_code"])
    if code:  # it crashed on its way out: what it measured is not to be trusted
        return Outcome(reason=f"{_how_it_ended(code)} after its result{_ending(told)}")
    return Outcome(result=result)


def _how_it_ended(code: int) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ", as happens where memory runs out" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{hint}"
    return f"the process ended with status {code if code < 1 << 16 else hex(code)}"


def _ending(told: IO[bytes]) -> str:
    """The end of what the child wrote to its standard error, in one line."""
    told.seek(max(0, told.seek(0, os.SEEK_END) - _END_NBYTES))
    lines = [line.strip() for line in told.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {' | '.join(lines[-_END_LINES:])}" if lines else ""
