"""What `framepipe.plan` finds, as data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from framepipe import budget
from framepipe.budget import Knob, Need, Setup
from framepipe.frame import FrameSpec
from framepipe.limits import Limit

SCHEMA = "framepipe.plan/1"
KINDS = ("pinned", "device", "pageable", "decoder", "ahead")


@dataclass(frozen=True, kw_only=True)
class RulesOfThumb:
    """Constants of an article's rules, without a ground that could be checked; nothing here is decided by them.

    A pool of ``pool`` times what is in flight at most; video memory as a pipeline needs, times ``linux`` or
    ``windows``; or what it needs, ``base`` bytes, and ``gui_app`` bytes for each of ``gui_apps`` programs with windows.
    """

    pool: float = 1.5
    linux: float = 1.2
    windows: float = 1.8
    base: int = 2_500_000_000
    gui_app: int = 500_000_000
    gui_apps: int = 0

    def of(self, needs: Collection[Need], setup: Setup, picture_nbytes: int) -> list[tuple[str, int]]:
        """What they come to, as pairs of words and bytes."""
        flights = setup.options.depth + 1
        pool = round(self.pool * flights * setup.options.batch * picture_nbytes)
        found = [(f"pool: {self.pool:g} x the peak in flight ({flights} batches)", pool)]
        if setup.host_shared:
            return found
        needed = budget.total(needs, "device")
        apps = f"{self.gui_apps} x {self.gui_app / 1e9:g} GB for programs with windows"
        return [
            *found,
            (f"video memory, Linux: {self.linux:g} x what is needed", round(self.linux * needed)),
            (f"video memory, Windows: {self.windows:g} x what is needed", round(self.windows * needed)),
            (
                f"video memory, desktop: what is needed + {self.base / 1e9:g} GB + {apps}",
                needed + self.base + self.gui_apps * self.gui_app,
            ),
        ]


@dataclass(frozen=True)
class PlannedSource:
    """A source: the ``spec`` of its first picture and bytes by kind for it alone, or the ``error`` instead."""

    name: str
    uri: str
    spec: FrameSpec | None = None
    alone: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Plan:
    """What a run would take (``needs``), and what there is (``limits``).

    ``exceeded`` are the limits that it would go beyond. ``device`` and ``staging`` are as in a run's report. ``rules``
    are pairs of words and bytes, of the rules of thumb; ``notes`` what could not be found out, ``unplanned`` what else
    takes memory.
    """

    device: Mapping[str, Any]
    staging: Mapping[str, Any]
    sources: Sequence[PlannedSource]
    needs: Sequence[Need] = ()
    limits: Sequence[Limit] = ()
    knobs: Sequence[Knob] = ()
    rules: Sequence[tuple[str, int]] = ()
    notes: Sequence[str] = ()
    unplanned: Sequence[str] = ()
    refusal: str | None = None
    """What a memory model would not page-lock, in its words."""

    @property
    def exceeded(self) -> list[Limit]:
        """The limits that the needs go beyond."""
        return [limit for limit in self.limits if limit.lacks(self.needs) > 0]

    @property
    def fits(self) -> bool | None:
        """Whether no limit is exceeded; None where nothing could be planned."""
        return not self.exceeded and self.refusal is None if self.needs else None

    def nbytes(self, *kinds: str) -> int:
        """Bytes of these kinds that are to be reckoned with."""
        return budget.total(self.needs, *kinds)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "device": dict(self.device),
            "staging": dict(self.staging),
            "sources": [_source_dict(source) for source in self.sources],
            "planned": [{**asdict(need), "ground": _ground(need)} for need in self.needs],
            "planned_bytes": {kind: self.nbytes(kind) for kind in KINDS},
            "limits": [
                {**asdict(limit), "needed": self.nbytes(*limit.kinds), "lacks": max(0, limit.lacks(self.needs))}
                for limit in self.limits
            ],
            "knobs": [
                {"change": knob.change, "saves": {kind: knob.saves(kind) for kind in KINDS}} for knob in self.knobs
            ],
            "rules_of_thumb": [{"rule": rule, "bytes": nbytes} for rule, nbytes in self.rules],
            "refusal": self.refusal,
            "notes": list(self.notes),
            "unplanned": list(self.unplanned),
        }


def _ground(need: Need) -> str:
    return "model" if need.modelled else "planned"


def _source_dict(source: PlannedSource) -> dict[str, Any]:
    spec = source.spec
    return {
        "name": source.name,
        "uri": source.uri,
        "width": spec.width if spec else None,
        "height": spec.height if spec else None,
        "pix_fmt": spec.pix_fmt if spec else None,
        "picture_bytes": spec.nbytes if spec else None,
        "alone_bytes": dict(source.alone),
        "error": source.error,
    }
