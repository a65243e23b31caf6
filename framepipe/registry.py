"""Names of stages, sources, sinks and staging strategies, and the classes behind them.

A built-in extension is one module named like its YAML name in the package of its kind
(``framepipe/stages/motion.py`` is ``motion``), imported when it is first asked for. Other packages announce
theirs by entry points in the groups ``framepipe.stages``, ``.sources``, ``.sinks`` and ``.staging``; code that
is already running uses ``@register("name")``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from framepipe.errors import ConfigError

KINDS = ("stages", "sources", "sinks", "staging")

T = TypeVar("T", bound=type)
_registered: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}


class Component:
    """Base of everything that has a YAML name: a dataclass whose fields are its YAML parameters.

    Equality and ``repr`` come from the dataclass. ``kind`` is one of ``KINDS`` and set by the four base classes.
    """

    kind = ""
    type_name = ""
    """The name in YAML; set by ``register``."""


def register(name: str) -> Callable[[T], T]:
    """Class decorator: make a `Component` known under ``name``. The class itself says which kind it is."""

    def add(cls: T) -> T:
        kind = getattr(cls, "kind", "")
        if kind not in _registered:
            raise TypeError(f"{cls.__name__} is no Stage, Source, Sink or Stager")
        cls.type_name = name  # type: ignore[attr-defined]
        _registered[kind][name] = cls
        return cls

    return add


def names(kind: str) -> list[str]:
    """Every name of one kind, sorted; nothing is imported but the package of that kind."""
    package = importlib.import_module(f"framepipe.{kind}")
    found = {module.name for module in pkgutil.iter_modules(package.__path__) if not module.name.startswith("_")}
    found.update(_registered[kind])
    found.update(point.name for point in importlib.metadata.entry_points(group=f"framepipe.{kind}"))
    return sorted(found)


def find(kind: str, name: str) -> type[Any]:
    """The class registered as ``name``.

    Raises `ConfigError` naming the nearest known name.
    """
    known = _registered[kind]
    if name not in known and name in names(kind):
        points = importlib.metadata.entry_points(group=f"framepipe.{kind}", name=name)
        for point in points:
            known[name] = point.load()
        if not points:
            importlib.import_module(f"framepipe.{kind}.{name}")
    if name not in known:
        raise ConfigError(f"unknown {_singular(kind)} {name!r}{did_you_mean(name, names(kind))}")
    return known[name]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause for an error message: the nearest of ``known``, or all of them when none is near."""
    known = list(known)
    same = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), same, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {same[near[0]]!r}?"
    return f"; there are {', '.join(known)}" if known else ""


def _singular(kind: str) -> str:
    return {"staging": "staging strategy"}.get(kind, kind.rstrip("s"))
