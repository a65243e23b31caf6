"""``python -m framepipe.probe._child``: one request from standard input, events and a result to standard output."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_WORK = {
    "machine": ("machine", "look"),
    "pinned": ("_pinned_cell", "run"),
    "churn": ("_churn_cell", "run"),
    "bandwidth": ("_bandwidth_cell", "run"),
}


def main() -> int:
    """Do what was asked; 0 even if it failed, since the result says so."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(what: str, value: Any) -> None:
        out.write(json.dumps({what: value}, allow_nan=False) + "\n")
        out.flush()

    request = json.loads(_line())
    threading.Thread(target=_end_with_parent, name="framepipe-probe-parent", daemon=True).start()
    say("result", _work(request, lambda event: say("event", event)))
    return 0


def _work(request: dict[str, Any], tell: Callable[[Any], None]) -> dict[str, Any]:
    module, function = _WORK[request["probe"]]
    try:
        found: dict[str, Any] = getattr(importlib.import_module(f"framepipe.probe.{module}"), function)(request, tell)
    except Exception as error:
        traceback.print_exc()
        # Where blocks refuse they have a code and name, whichever module is theirs.
        said = error.as_json() if hasattr(error, "as_json") else None
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}", "error": said}
    return found


def _line() -> bytes:
    # By descriptor: a reader's buffer would be locked by the waiting thread when the interpreter ends.
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit("no request")
        line += part
    return line


def _end_with_parent() -> None:
    while True:
        try:
            if os.read(0, 1):
                continue
        except OSError:
            pass
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
