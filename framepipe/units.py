"""Times and sizes as people write and read them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic_core import CoreSchema

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_CLOCK = re.compile(r"([-+]?)(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d*)?)")


def parse_seconds(value: float | str) -> float:
    """Seconds from a number, a number's text, or ``[h:]mm:ss[.f]``.

    Raises `ValueError` for anything else, for minutes or seconds of 60 and more, and for what is not finite.
    """
    if isinstance(value, str):
        seconds = _from_text(value.strip())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError("expected seconds or [h:]mm:ss[.f]")
    if not math.isfinite(seconds):
        raise ValueError("expected a finite number of seconds")
    return seconds


def _from_text(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    clock = _CLOCK.fullmatch(text)
    if clock is None:
        raise ValueError("expected seconds or [h:]mm:ss[.f]")
    sign, hours, minutes, seconds = clock.groups()
    # With no hours in front, 90:00 would be clear enough; 1:90 never is.
    if float(seconds) >= 60 or (hours is not None and int(minutes) >= 60):
        raise ValueError("minutes and seconds go from 0 to 59")
    total = int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds)
    return -total if sign == "-" else total


class _SecondsType:
    """Tells pydantic how to read a time; imports it only when asked, so that `Seconds` costs nothing."""

    expects = "seconds or [h:]mm:ss[.f]"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(parse_seconds)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "number"},
                {"type": "string", "pattern": r"^[-+]?(\d+:)?\d{1,2}:\d{1,2}(\.\d*)?$"},
            ]
        }


Seconds = Annotated[float, _SecondsType()]
"""The annotation of a time: YAML says ``90``, ``1.5e-3`` or ``1:30.5``, the field is a float."""


_BYTES = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SIZES = "a number of bytes, or one with a unit: 4GB (10**9 bytes each), 512MiB (2**20)"


def parse_bytes(value: float | str) -> int:
    """Bytes from a whole number, or text such as ``4GB``, ``1.5 GB`` (decimal) and ``512MiB`` (binary).

    Raises `ValueError` for anything else, and for less than a byte.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected {_SIZES}")
    found = _BYTES.fullmatch(str(value).strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"expected {_SIZES}")
    nbytes = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    if nbytes < 1:
        raise ValueError("expected at least one byte")
    return nbytes


class _BytesType:
    """Tells pydantic how to read a size; see `_SecondsType`."""

    expects = _SIZES

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(parse_bytes)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[\d.]+\s*[kmgtKMGT]?i?[bB]?\s*$"},
            ]
        }


Bytes = Annotated[int, _BytesType()]
"""The annotation of a size: YAML says ``4000000000``, ``4GB`` or ``512MiB``, the field is an int."""


def format_seconds(seconds: float) -> str:
    """``0.42 s``, ``12.3 s``, ``4:05`` or ``1:02:03``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    clock = f"{minutes:02d}:{whole % 60:02d}"
    return f"{hours}:{clock}" if hours else clock.removeprefix("0")


def format_bytes(nbytes: float) -> str:
    """Decimal units, as bandwidth is given: ``640 B``, ``3.1 MB``, ``12.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
