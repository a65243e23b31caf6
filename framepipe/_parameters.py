"""The parameters of a component class: the fields of its dataclass, read strictly from YAML values.

Each field is checked by itself with pydantic, in strict mode: ``"4"`` is no number and ``4.0`` no whole
one. A list is good for a tuple and a text for a path, as in JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import (
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
)

from framepipe import _yaml
from framepipe.registry import did_you_mean

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)

Raw = Callable[[_yaml.Key], str | None]
"""What a text was before ``${…}`` in it was replaced, or None, by its way from the parameter's value."""


@dataclass(frozen=True)
class Parameter:
    """One field; ``adapter`` is None where YAML cannot give its type."""

    name: str
    annotation: Any
    adapter: TypeAdapter[Any] | None
    required: bool

    @classmethod
    def of(cls, name: str, annotation: Any, *, required: bool = False) -> Parameter:
        """A parameter of a type that pydantic may or may not know."""
        try:
            bare = typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation
            own = dataclasses.is_dataclass(bare) or hasattr(bare, "model_config")
            adapter = TypeAdapter(annotation, config=None if own else _STRICT)
        except (PydanticUndefinedAnnotation, PydanticSchemaGenerationError):
            adapter = None  # a field for those who embed: an array, a class of their own
        return cls(name, annotation, adapter, required)

    @property
    def is_path(self) -> bool:
        """Whether a text in it names a file: by its type, or because it is called ``uri``, ``path`` or ``files``."""
        return self.name in ("uri", "path", "files") or any(part is Path for part in _parts(self.annotation))


_known: dict[type, Mapping[str, Parameter]] = {}


def parameters(cls: type) -> Mapping[str, Parameter]:
    """The parameters of a component class by name, in the order of its fields."""
    if cls not in _known:
        _known[cls] = _parameters(cls)
    return _known[cls]


def _parameters(cls: type) -> Mapping[str, Parameter]:
    return {
        field.name: _parameter(cls, field)
        for field in dataclasses.fields(cls)
        if field.init and not field.name.startswith("_")
    }


def _parameter(cls: type, field: dataclasses.Field[Any]) -> Parameter:
    required = field.default is MISSING and field.default_factory is MISSING
    try:
        return Parameter.of(field.name, _resolve(cls, field), required=required)
    except NameError:  # a type that is imported for type checkers only
        return Parameter(field.name, Any, None, required)


def _resolve(cls: type, field: dataclasses.Field[Any]) -> Any:
    # typing.get_type_hints(cls) would resolve every annotation of every base, those for type checkers too.
    home = next(base for base in reversed(cls.__mro__) if _fields(base).get(field.name) is field)
    holder = types.SimpleNamespace(__annotations__={field.name: field.type})
    hints = typing.get_type_hints(
        holder, vars(sys.modules[home.__module__]), {home.__name__: home}, include_extras=True
    )
    return hints[field.name]


def _fields(cls: type) -> Mapping[str, Any]:
    found: Mapping[str, Any] = cls.__dict__.get("__dataclass_fields__", {})
    return found


def read(parameter: Parameter, value: Any, raw: Raw) -> tuple[Any, str]:
    """The value for the field and "", or None and what is wrong.

    A text that came from ``${…}`` is text where the parameter takes text, and is read as YAML otherwise.
    """
    if parameter.adapter is None:
        return None, "cannot be given here, only in Python"
    error: ValidationError | None = None
    for candidate in (value, _reread(value, raw, ())):
        try:
            return _strict(parameter.adapter, candidate), ""
        except ValidationError as failed:
            error = error or failed
    assert error is not None
    return None, _explain(parameter, value, error, raw)


def _strict(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return adapter.validate_json(json.dumps(value), strict=True)


def _reread(value: Any, raw: Raw, key: _yaml.Key) -> Any:
    if isinstance(value, str) and raw(key) is not None:
        return _yaml.scalar(value)
    if isinstance(value, list):
        return [_reread(item, raw, (*key, i)) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _reread(item, raw, (*key, name)) for name, item in value.items()}
    return value


def _explain(parameter: Parameter, value: Any, error: ValidationError, raw: Raw) -> str:
    got = f", got {_show(value, raw(()))}"
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        if not _is_about_type(fault["type"]):
            return _sentence(fault["msg"]) + got
    expected = describe(parameter.annotation) or _sentence(error.errors()[0]["msg"]).removeprefix("expected ")
    text = f"expected {expected}{got}"
    if raw(()) is None and isinstance(value, str):
        other = _yaml.scalar(value)
        if not isinstance(other, str) and _fits(parameter, other):
            return f"{text}; remove the quotes"
    return text + _nearest(value, parameter.annotation)


def _is_about_type(kind: str) -> bool:
    about = (
        "literal_error",
        "enum",
        "is_instance_of",
        "needs_python_object",
        "missing",
        "too_long",
        "json_invalid",
    )
    return kind.endswith("_type") or kind in about


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").replace("Input should be", "expected", 1)
    return text[:1].lower() + text[1:]


def _fits(parameter: Parameter, value: Any) -> bool:
    assert parameter.adapter is not None
    try:
        _strict(parameter.adapter, value)
    except ValidationError:
        return False
    return True


def _show(value: Any, raw: str | None) -> str:
    if raw is not None:
        return f"what {raw!r} stands for"
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            return f"the text {value if len(value) < 60 else value[:57] + '...'!r}"
        case list() | dict():
            text = json.dumps(value)
            kind = "the list" if isinstance(value, list) else "the mapping"
            return f"{kind} {text if len(text) < 60 else text[:57] + '...'}"
        case float() if not math.isfinite(value):
            return str(value)
    return repr(value)


def describe(annotation: Any) -> str:
    """A type in words, or "" where there are none."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        Path: "a path",
        Any: "anything",
    }
    if annotation in words:
        return words[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return next((meta.expects for meta in args[1:] if hasattr(meta, "expects")), describe(args[0]))
    if origin is typing.Literal:
        return _either(repr(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return _either(_words(arg for arg in args if arg is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _either(repr(member.value) for member in annotation)
    return _describe_container(origin or annotation, args)


def _describe_container(origin: Any, args: tuple[Any, ...]) -> str:
    if not isinstance(origin, type):
        return ""
    if issubclass(origin, Mapping):
        return "a mapping"
    if origin is tuple and args and args[-1] is not Ellipsis:
        kinds = set(_words(args))
        return f"a list of {len(args)} values" + (f" ({kinds.pop()} each)" if len(kinds) == 1 else "")
    if issubclass(origin, Iterable):
        inner = next(_words(args[:1]), "")
        return f"a list ({inner} each)" if inner else "a list"
    return ""


def _words(annotations: Iterable[Any]) -> Iterator[str]:
    return (words for words in map(describe, annotations) if words)


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for arg in typing.get_args(annotation):
        yield from _parts(arg)


def _choices(annotation: Any) -> list[str]:
    found: list[str] = []
    for part in _parts(annotation):
        if typing.get_origin(part) is typing.Literal:
            found += [arg for arg in typing.get_args(part) if isinstance(arg, str)]
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            found += [member.value for member in part if isinstance(member.value, str)]
    return found


def _nearest(value: Any, annotation: Any) -> str:
    choices = _choices(annotation)
    texts = (
        [value]
        if isinstance(value, str)
        else [item for item in value if isinstance(item, str)]
        if isinstance(value, list)
        else []
    )
    for text in texts:
        if text not in choices and (hint := nearest(text, choices)):
            return hint
    return ""


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where one of ``known`` differs in case or a letter or two, else ""."""
    known = list(known)
    same = [name for name in known if name.casefold() == word.casefold()]
    hint = did_you_mean(word.casefold(), same or known)
    return hint if hint.endswith("?") else ""


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON Schema of a class's parameters, for editors."""
    found = parameters(cls)
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _field_schema(parameter) for name, parameter in found.items()},
        **({"required": names} if (names := [name for name, each in found.items() if each.required]) else {}),
    }


def _field_schema(parameter: Parameter) -> dict[str, Any]:
    if parameter.adapter is None:
        return {"not": {}}
    try:
        schema = parameter.adapter.json_schema()
    except PydanticInvalidForJsonSchema:  # a callable, for those who embed
        return {"not": {}}
    # A number may come from the environment.
    return schema if _takes_text(schema) else {"anyOf": [schema, {"type": "string", "pattern": r"\$\{.+\}"}]}


def _takes_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and "enum" not in schema
