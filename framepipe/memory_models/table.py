"""Memory models by name, and their parameters from text: ``wddm-claim,total=12GB,resident=11GB``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from framepipe.errors import ConfigError
from framepipe.memory_models.base import MemoryModel
from framepipe.registry import did_you_mean
from framepipe.units import parse_bytes, parse_seconds

_CLASSES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "linux": ("linux", "Linux"),
        "wddm-claim": ("wddm_claim", "WddmClaim"),
        "wddm-budget": ("wddm_budget", "WddmBudget"),
    }
)
NAMES = tuple(_CLASSES)
PATTERN = rf"simulated(:({'|'.join(NAMES)})(,\w+=[^,=]+)*)?"
"""The device names that mean the simulated device, as a regular expression; values are not checked by it."""


def find(name: str) -> type[MemoryModel]:
    """The class of a model. Raises `ConfigError` naming the nearest one."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown memory model {name!r}{did_you_mean(name, NAMES)}")
    module, cls = _CLASSES[name]
    found: type[MemoryModel] = getattr(importlib.import_module(f"framepipe.memory_models.{module}"), cls)
    return found


def make(text: str) -> MemoryModel:
    """A new model from ``name,key=value,…``: sizes as in 12GB and 64KiB, times in seconds or mm:ss.

    Raises `ConfigError` for an unknown name or key (with the nearest one, or all there are) and a value that is none.
    """
    name, *words = (word.strip() for word in text.split(","))
    cls = find(name)
    readers = {field.name: _READERS[str(field.type)] for field in fields(cls)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in readers:
            raise ConfigError(f"simulated:{name}: unknown key {key!r}{did_you_mean(key, readers)}")
        if not equals or key in values:
            raise ConfigError(f"simulated:{name}: {key} {'is there twice' if key in values else 'has no value'}")
        values[key] = _read(name, key, value, readers[key])
    return cls(**values)


def defaults(name: str) -> dict[str, Any]:
    """The parameters of a model and their defaults."""
    return {field.name: field.default for field in fields(find(name))}


def _read(name: str, key: str, value: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(value)
    except (KeyError, ValueError) as error:
        why = "expected yes or no" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"simulated:{name}: {key}={value}: {why}") from None


def _nbytes(value: str) -> int:
    if value.isdecimal() and 0 < int(value) < 1024:
        raise ValueError(f"{value} would be bytes; write {value}GB or {value}MB")
    return 0 if value == "0" else parse_bytes(value)  # no memory is a size here


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError("expected a number") from None


def _whole_number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError("expected a whole number") from None


_READERS: Mapping[str, Callable[[str], Any]] = {
    "Bytes": _nbytes,
    "Seconds": parse_seconds,
    "float": _number,
    "int": _whole_number,
    "bool": {"yes": True, "true": True, "no": False, "false": False}.__getitem__,
}
"""How a value is read, by the annotation of its field."""
