"""The JSON Schema of a pipeline file, for editors."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import TypeAdapter

from framepipe import registry
from framepipe._parameters import json_schema
from framepipe.config import VERSION, Decode
from framepipe.guard.options import ColdOptions, GuardOptions
from framepipe.memory_models.table import PATTERN
from framepipe.stager import StagingOptions
from framepipe.units import Bytes

_ENV = {"type": "string", "pattern": r"\$\{.+\}"}


def schema() -> dict[str, Any]:
    """Draft 2020-12. Components that cannot be imported on this machine are named, with any parameters."""
    strategies = {"enum": ["auto", *registry.names("staging")]}
    staging = json_schema(StagingOptions)
    staging["properties"]["strategy"] = strategies
    guard = json_schema(GuardOptions)
    guard["properties"]["cold"] = {"anyOf": [{"type": ["boolean", "null"]}, json_schema(ColdOptions)]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "framepipe pipeline",
        "type": "object",
        "additionalProperties": False,
        "required": ["version", "sources"],
        "properties": {
            "version": {"const": VERSION},
            "device": {"anyOf": [{"type": "string", "pattern": rf"^(auto|cpu|cuda(:\d+)?|{PATTERN})$"}, _ENV]},
            "device_memory": {"anyOf": [TypeAdapter(Bytes).json_schema(), {"type": "null"}, _ENV]},
            "staging": {"anyOf": [strategies, staging]},
            "threads": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}, _ENV]},
            "guard": {"anyOf": [{"type": ["boolean", "null"]}, guard]},
            "decode": {"enum": list(Decode.__args__)},  # type: ignore[attr-defined]
            "source_defaults": {"type": "object", "properties": _every_source_parameter()},
            "sources": {"type": "array", "minItems": 1, "items": {"anyOf": _sources()}},
            "stages": {"type": "array", "items": {"anyOf": _entries("stages", named=True)}},
            "sinks": {"type": "array", "items": {"anyOf": _entries("sinks", named=True)}},
        },
    }


def _sources() -> list[dict[str, Any]]:
    text = {"type": "string", "description": "A file, folder, pattern, URL, or - for standard input."}
    file = [_component("sources", "file")] if "file" in registry.names("sources") else []
    return [text, *file, *_entries("sources", named=False)]


def _entries(kind: str, *, named: bool) -> list[dict[str, Any]]:
    names = registry.names(kind)
    bare = {"enum": names}
    identity = {"id": {"type": "string", "pattern": r"^[^\W\d][\w\-]*$"}} if named else {}
    return [bare] + [
        {
            "type": "object",
            "additionalProperties": False,
            "required": [name],
            "properties": {name: {"anyOf": [_component(kind, name), {"type": "null"}]}, **identity},
        }
        for name in names
    ]


def _component(kind: str, name: str) -> dict[str, Any]:
    try:
        cls = registry.find(kind, name)
    except Exception as error:  # whatever the module of somebody else raises
        return {"type": "object", "description": f"cannot be imported here: {error}"}
    return {"description": inspect.getdoc(cls) or "", **json_schema(cls)}


def _every_source_parameter() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in registry.names("sources"):
        found.update(_component("sources", name).get("properties", {}))
    return found
