"""A child process of a bench: ``python -m framepipe.bench.cell`` answers one request and ends.

The request is one JSON object on standard input. The answer is the last line of standard output: ``{"result": …}``, or
``{"error": {"text", "type", "exit_code"}}``. A child whose parent has gone ends by itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from framepipe.redact import redact

_LOOK_S = 1.0


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a request says: ``do`` is ``machine``, ``parity``, ``reference`` or ``measure``."""
    from framepipe.bench import _work

    _work.prepare(request)
    return _DO[request["do"]](request)


def _machine(request: Mapping[str, Any]) -> dict[str, Any]:
    from framepipe.bench import _machine

    return _machine.examine(request)


def _measure(request: Mapping[str, Any]) -> dict[str, Any]:
    from framepipe.bench import _measure

    return _measure.measure(request)


def _parity(request: Mapping[str, Any]) -> dict[str, Any]:
    """Hashes of the first frames, as the cell's strategy delivers them."""
    from framepipe.bench import _parity, _work

    limit = request["parity_frames"]
    if request["mode"] == "staging":
        work = _work.staging_work(_work.frames(request, limit), rounds=1, parity=True)
    else:
        work = _work.pipeline_work(request, parity=True, rounds=_rounds(request))
    hashes = _parity.Hashes(limit)
    options = _work.staging(request, measure=False)
    pipeline = _stopped_after(work, hashes, limit, request["device"], options)
    return {"hashes": hashes.of, "warnings": pipeline.report.warnings if pipeline.report else []}


def _rounds(request: Mapping[str, Any]) -> int:
    from framepipe.bench import _work

    return 1 if request["input"]["kind"] == "pipeline" else _work.ENDLESS


def _stopped_after(work: Any, hashes: Any, limit: int, device: str, options: Any) -> Any:
    """Run until ``limit`` frames of every source have come, or to the end."""
    left = {}

    def take(frame: Any) -> None:
        hashes(frame)
        left[frame.source] = limit - 1 - frame.index
        if len(left) >= len(work.sources) and max(left.values()) <= 0:
            pipeline.stop()

    pipeline = work.pipeline(take, host=True, device=device, staging=options)
    with pipeline:
        pipeline.run()
    return pipeline


def _reference(request: Mapping[str, Any]) -> dict[str, Any]:
    """The hashes that every strategy must give, without any: from the decoder's memory, or on the CPU's direct way."""
    from framepipe.bench import _parity as hashing
    from framepipe.bench import _work

    if request["mode"] == "staging":
        return {"hashes": hashing.expected(_work.frames(request, request["parity_frames"])), "warnings": []}
    return _parity({**request, "device": "cpu", "staging": {"strategy": "direct"}})


_DO = {"machine": _machine, "measure": _measure, "parity": _parity, "reference": _reference}


def _watch_parent(number: int) -> None:
    """End this process once its parent has gone: nobody would read the answer, and the machine is not idle for it."""
    import psutil

    wait = threading.Event().wait

    def watch() -> None:
        try:
            parent = psutil.Process(number)
            while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
                wait(_LOOK_S)
        except psutil.NoSuchProcess:
            pass
        except psutil.Error:
            return
        os._exit(1)

    threading.Thread(target=watch, name="framepipe-bench-parent", daemon=True).start()


def main() -> int:
    """Read the request, write the answer."""
    request = json.loads(sys.stdin.buffer.read())
    _watch_parent(request["parent"])
    try:
        text, code = json.dumps({"result": answer(request)}, allow_nan=False), 0
    except Exception as error:
        code = int(getattr(error, "exit_code", 1))
        told = {"text": redact(_one_line(error)), "type": type(error).__name__, "exit_code": code}
        text = json.dumps({"error": told})
        if not hasattr(error, "exit_code"):
            import traceback

            traceback.print_exc()
    sys.stdout.write(f"\n{text}\n")  # a component may have left a line open
    sys.stdout.flush()
    return code


def _one_line(error: Exception) -> str:
    from framepipe.errors import FramepipeError

    text = " ".join(str(error).split())
    return text if isinstance(error, FramepipeError) and text else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main())
