"""One cell of ``probe bandwidth``, in its child process: all sizes of one kind of memory, or of host copies."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from framepipe.probe import _host_copies
from framepipe.probe._host_blocks import RefusedError


def run(request: Mapping[str, Any], tell: Callable[[Any], None]) -> dict[str, Any]:
    """The cell that ``request`` describes (`framepipe.probe.bandwidth`); rows before a refusal are kept."""
    found: list[dict[str, Any]] = []
    try:
        for row in _measure(request):
            found.append(row)
    except RefusedError as error:
        return {"status": "failed", "reason": str(error), "error": error.as_json(), "rows": found}
    return {"status": "ok", "reason": None, "error": None, "rows": found}


def _measure(request: Mapping[str, Any]) -> Any:
    sizes, repeats = request["sizes"], request["repeats"]
    if request["kind"] == "host_copy":
        return _host_copies.measure(sizes, request["threads"], repeats, request["region"])
    copies = importlib.import_module("framepipe.probe._cuda_copies")
    return copies.measure(request["kind"], request["device"], sizes, repeats)
