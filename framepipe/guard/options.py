"""What a guard is told: marks, what to do at them, and how the cold tier may grow."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from framepipe.errors import ConfigError
from framepipe.registry import did_you_mean
from framepipe.units import Bytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%")
_LEAST_NBYTES = 1 << 20
_EXPECTED = "a share of the total such as 15%, or a number of bytes with a unit such as 1GB"

Action = Literal["give_back", "depth", "pageable", "warn", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)
"""What a guard can do: free memory that is kept to be used again (the cold tier's, and that of results on the device),
have one batch less in flight, page-lock nothing more, put a warning into the report, end the run in good order."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark in ``percent`` of the total, or in ``nbytes``; one of the two."""

    percent: float | None = None
    nbytes: int | None = None

    def of(self, total: int | None) -> int | None:
        """The mark in bytes; None for a share of an unknown total."""
        if self.percent is None:
            return self.nbytes
        return None if total is None else round(total * self.percent / 100)

    def part(self, of: int) -> Mark:
        """The mark at one part ``of`` so many."""
        return Mark(None if self.percent is None else self.percent / of, self.nbytes and self.nbytes // of)

    def __str__(self) -> str:
        return f"{self.percent:.3g}%" if self.percent is not None else format_bytes(self.nbytes or 0)


def parse_mark(value: Mark | float | str) -> Mark:
    """A mark from ``15%``, ``1GB``, ``512MiB`` or a whole number of bytes. Raises `ValueError` for anything else."""
    if isinstance(value, Mark):
        return value
    found = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is not None:
        percent = float(found[1])
        if not 0 < percent < 100:
            raise ValueError("expected a share between 0% and 100%")
        return Mark(percent=percent)
    try:
        nbytes = parse_bytes(value)
    except ValueError:
        raise ValueError(f"expected {_EXPECTED}") from None
    if nbytes < _LEAST_NBYTES:
        raise ValueError(f"expected {_EXPECTED}; {nbytes} would be bytes")
    return Mark(nbytes=nbytes)


class _MarkType:
    """Tells pydantic how to read a mark; see `framepipe.units.Bytes`."""

    expects = _EXPECTED

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(parse_mark)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        sizes = r"^\s*[\d.]+\s*(%|[kmgtKMGT]?i?[bB]?)\s*$"
        return {"anyOf": [{"type": "integer", "minimum": _LEAST_NBYTES}, {"type": "string", "pattern": sizes}]}


MarkField = Annotated[Mark, _MarkType()]


@dataclass(frozen=True, kw_only=True)
class ColdOptions:
    """How the cold tier grows ahead of need, and shrinks again: ``guard: {cold: {…}}``.

    It grows when more than ``busy_percent`` of it are in use in ``busy_samples`` readings on end **and** what is free
    stays above the low mark with the growth in it; by ``step_percent`` of itself, 50 at most, up to ``cap`` bytes. It
    shrinks when less than ``idle_percent`` were in use in ``idle_samples`` readings on end: what nobody uses is given
    back. ``cooldown_s`` passes between two such decisions.
    """

    busy_percent: float = 90.0
    busy_samples: int = 5
    step_percent: float = 50.0
    cap: Bytes = 1 << 30
    idle_percent: float = 25.0
    idle_samples: int = 60
    cooldown_s: float = 30.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("busy_samples", "idle_samples")
            if getattr(self, name) < 1
        ]
        if not 0 < self.step_percent <= 50:
            problems.append(f"step_percent is {self.step_percent:g}; it must be above 0, and 50 at most")
        if not 0 <= self.idle_percent < self.busy_percent <= 100:
            problems.append(
                f"idle_percent is {self.idle_percent:g} and busy_percent {self.busy_percent:g}; "
                "the first must be less than the second, both from 0 to 100"
            )
        if self.cooldown_s < 0:
            problems.append(f"cooldown_s is {self.cooldown_s:g}; it cannot be negative")
        if problems:
            raise ConfigError("; ".join(problems), problems)


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """The ``guard:`` block.

    Memory is read every ``interval_s`` seconds. Below ``low`` what ``on_low`` names is done, in its order, below
    ``critical`` (by default a third of ``low``) what ``on_critical`` names: each action once until memory has been back
    above the mark by ``hysteresis_percent`` of it for ``calm_samples`` readings, and the same mark acts again after
    ``cooldown_s`` at the soonest, after twice as long each time that it follows right upon the last. ``cold`` lets the
    cold tier grow and shrink (see `ColdOptions`; None leaves it alone). The last ``keep`` events are in the report;
    ``file`` gets every reading as a line of JSON.
    """

    low: MarkField = Mark(percent=15.0)
    critical: MarkField | None = None
    interval_s: float = 1.0
    on_low: tuple[Action, ...] = ("give_back", "warn")
    on_critical: tuple[Action, ...] = ("depth", "pageable", "warn")
    hysteresis_percent: float = 20.0
    calm_samples: int = 3
    cooldown_s: float = 30.0
    cold: ColdOptions | None = None
    keep: int = 200
    file: Path | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)
        problems = [
            f"{name} is {getattr(self, name):g}; it must be at least {least:g}"
            for name, least in (("interval_s", 0.05), ("cooldown_s", 1), ("calm_samples", 1), ("keep", 1))
            if getattr(self, name) < least
        ]
        if self.hysteresis_percent < 0:
            problems.append(f"hysteresis_percent is {self.hysteresis_percent:g}; it cannot be negative")
        for name in ("on_low", "on_critical"):
            problems += _odd_actions(name, getattr(self, name))
        for name in ("low", "critical"):
            if not isinstance(mark := getattr(self, name), Mark | None) or (mark is None and name == "low"):
                raise ConfigError(f"{name} is {mark!r}; expected a Mark, as parse_mark makes it")
        if not _is_below(self.critical_mark, self.low):
            problems.append(f"critical is {self.critical}; it must be less than low, {self.low}")
        if problems:
            raise ConfigError("; ".join(problems), problems)

    @property
    def critical_mark(self) -> Mark:
        """``critical``, or what it is if not given."""
        return self.critical or self.low.part(3)


def _check_numbers(options: Any) -> None:
    """Raise `ConfigError` for what is no number: dataclasses take anything, and NaN passes every comparison below."""
    problems = [
        f"{field.name} is {value!r}; expected a {'whole ' if field.type == 'int' else ''}number"
        for field in fields(options)
        if field.type in ("int", "float") and not _is_number(value := getattr(options, field.name), field.type)
    ]
    if problems:
        raise ConfigError("; ".join(problems), problems)


def _is_number(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) if kind == "int" else math.isfinite(value)


def _odd_actions(name: str, actions: tuple[str, ...]) -> list[str]:
    if not isinstance(actions, tuple):
        return [f"{name} is {actions!r}; expected a list of {', '.join(ACTIONS)}"]
    problems = [
        f"{name} has {action!r}{did_you_mean(str(action), ACTIONS)}" for action in actions if action not in ACTIONS
    ]
    if len(set(actions)) < len(actions):
        problems.append(f"{name} names an action twice")
    return problems


def _is_below(mark: Mark, other: Mark) -> bool:
    """Whether one mark is below another; of a share and a number of bytes nobody knows before the total is."""
    if mark.percent is not None and other.percent is not None:
        return mark.percent < other.percent
    return mark.nbytes is None or other.nbytes is None or mark.nbytes < other.nbytes


def make_guard(guard: bool | Mapping[str, Any] | GuardOptions | None) -> GuardOptions | None:
    """Options as a caller may give them: True for the defaults, the ``guard:`` block, or none. Raises `ConfigError`."""
    if guard is None or isinstance(guard, bool):
        return GuardOptions() if guard else None
    if isinstance(guard, GuardOptions):
        return guard
    values = _known("guard", GuardOptions, guard)
    values["cold"] = cold = values.get("cold")
    if isinstance(cold, Mapping):
        growth = _known("guard.cold", ColdOptions, cold)
        if "cap" in growth:
            growth["cap"] = _parsed("guard.cold.cap", parse_bytes, growth["cap"])
        values["cold"] = ColdOptions(**growth)
    elif isinstance(cold, bool):
        values["cold"] = ColdOptions() if cold else None
    elif not isinstance(cold, ColdOptions | None):
        raise ConfigError(f"guard.cold is {cold!r}; expected True, False, a mapping or ColdOptions")
    for name in ("low", "critical"):
        if name in values and (name == "low" or values[name] is not None):
            values[name] = _parsed(f"guard.{name}", parse_mark, values[name])
    for name in ("on_low", "on_critical"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    if values.get("file") is not None:
        values["file"] = _path(values["file"])
    return GuardOptions(**values)


def _path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"guard.file is {value!r}; expected a path")
    return Path(value)


def _parsed(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}, got {value!r}") from None


def _known(what: str, cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} is {given!r}; expected True, False, a mapping or {cls.__name__}")
    known = [field.name for field in fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(f"{what} has no {name!r}{did_you_mean(name, known)}")
    return dict(given)
