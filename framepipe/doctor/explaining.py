"""Symptoms as people describe them, and what is known of each: the data file ``symptoms.yaml`` beside this.

An entry has ``id``, ``symptom``, ``words`` by which it is found besides, ``means`` and ``helps`` (each with ``text``,
``ground`` and, where there is one, ``source``), and ``look``: commands (``run``) and what they show (``text``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("symptoms.yaml")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a after an and are as at be but by do does for from has have i in is it its my not of on or so some that the "
        "then there this though to too under while why with",
    )
)
_ENOUGH = 0.5
_ALIKE, _OTHERS = 0.75, 0.95


@cache
def symptoms() -> tuple[Mapping[str, Any], ...]:
    """All entries, in the file's order."""
    return tuple(yaml.safe_load(_FILE.read_text(encoding="utf-8")))


def find(asked: str) -> tuple[Mapping[str, Any] | None, list[Mapping[str, Any]]]:
    """The entry that ``asked`` means, or None where no one is clearly it; and the nearest three, the best first.

    An id or a whole symptom is found as it stands; else words count, those of the symptom more than the others.
    """
    plain = " ".join(asked.lower().split())
    for entry in symptoms():
        if plain in (entry["id"], entry["symptom"].lower()):
            return entry, [entry]
    words = _words(plain)
    scored = sorted(((_score(words, entry), -at) for at, entry in enumerate(symptoms())), reverse=True)
    nearest = [symptoms()[-at] for score, at in scored[:3] if score > 0]
    clear = len(scored) > 1 and scored[0][0] >= _ENOUGH and scored[0][0] > scored[1][0]
    return (nearest[0] if clear else None), nearest


def _score(words: Sequence[str], entry: Mapping[str, Any]) -> float:
    """The share of ``words`` that the entry has, those that are in the symptom itself whole and others for less."""
    if not words:
        return 0.0
    own, more = _words(entry["symptom"]), _words(" ".join(map(str, entry["words"])) + " " + entry["id"])
    return sum(max(_best(word, own), _OTHERS * _best(word, more)) for word in words) / len(words)


def _best(word: str, among: Sequence[str]) -> float:
    """1 for the word itself, less for one that is written nearly so, 0 otherwise."""
    if word in among:
        return 1.0
    found = max((difflib.SequenceMatcher(None, word, other).ratio() for other in among), default=0.0)
    return found if found >= _ALIKE else 0.0


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9+/-]+", text.lower()) if word not in _COMMON]
