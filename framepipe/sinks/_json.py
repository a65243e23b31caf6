"""JSON of what stages found: numpy values become plain ones, NaN and infinities become null."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np


def to_json(value: Any) -> str:
    """``value`` as one line of JSON. Raises TypeError naming the type that JSON cannot hold."""
    try:
        text = _dumps(value)
    except (ValueError, TypeError):  # a NaN somewhere, or a key that is no string: the slow way round
        text = _dumps(_clean(value))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as undecodable file names have: only escapes can hold it
        text = json.dumps(json.loads(text))
    return text


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "tolist"):  # arrays of any library
        return value.tolist()
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _clean(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(_clean(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return _clean(_plain(value))
