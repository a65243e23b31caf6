"""The cells of a probe one after the other: never two at once, and those that cannot be say why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from framepipe.probe.kinds import Kind
from framepipe.probe.machine import Available, Machine, too_large

Run = Callable[[Mapping[str, Any], float], dict[str, Any]]
"""A request and the seconds that it may take to a result: `framepipe.probe.children.run`."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """A cell to be: what is known of it, what the child is asked, and for how long."""

    label: str
    cell: dict[str, Any]
    request: dict[str, Any]
    timeout_s: float
    kind: Kind
    nbytes: int
    """Host memory that it takes."""


def carry_out(
    found: dict[str, Any],
    steps: Sequence[Step],
    machine: Machine,
    run: Run,
    tell: Tell,
    memory: Callable[[], Available],
) -> None:
    """Add a cell to the record for each step. What is left unfinished is the last, and the record incomplete."""
    for number, step in enumerate(steps, 1):
        tell(f"{number}/{len(steps)} {step.label}")
        result = _hindrance(step, machine, memory) or run({**step.request, "device": machine.device}, step.timeout_s)
        found["cells"].append({**step.cell, **result})
        if result["status"] == "unfinished":
            found["complete"] = False
            return


def _hindrance(step: Step, machine: Machine, memory: Callable[[], Available]) -> dict[str, Any] | None:
    if step.kind.cuda and machine.device is None:
        return {"status": "unavailable", "reason": f"needs a GPU: {machine.reason}"}
    if step.nbytes and (reason := too_large(step.nbytes, memory())):
        return {"status": "refused", "reason": f"not tried: {reason}"}
    return None
