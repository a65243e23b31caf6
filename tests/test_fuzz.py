"""Damaged files by the hundred, each in a child process: no signal, no hang, no wrong count.

``FRAMEPIPE_FUZZ=2000 pytest -m slow tests/test_fuzz.py`` runs as many; ``python tests/fuzz.py 2000`` tells more.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import av
import fuzz
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    fuzz.make_files(made)
    return made


def check(outcome: fuzz.Outcome, count: int) -> None:
    assert not outcome.signals, "\n".join(outcome.signals)
    assert not outcome.hangs, outcome.hangs
    assert not outcome.wrong, "\n".join(outcome.wrong)
    assert len(outcome.results) == count
    assert not outcome.other_counts, outcome.other_counts


def test_a_few_damaged_files(folder):
    outcome = fuzz.fuzz(20, 40, folder)
    check(outcome, 40)
    assert set(outcome.exits) == {"complete", "incomplete", "failed"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_damaged_files(folder, part):
    count = int(os.environ.get("FRAMEPIPE_FUZZ", "400")) // 4
    check(fuzz.fuzz(10_000 + part * count, count, folder), count)


def test_every_kind_is_damaged_in_every_way(folder):
    drawn = {fuzz.damaged(folder, random.Random(number))[:2] for number in range(600)}
    assert {name for name, _ in drawn} == set(fuzz.KINDS)
    assert {how.split("+")[0] for _, how in drawn} == set(fuzz.HOWS)


def test_a_number_is_a_file(folder):
    """The same one each time, so that a failure can be looked into."""
    for number in range(12):
        assert fuzz.damaged(folder, random.Random(number)) == fuzz.damaged(folder, random.Random(number))


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_what_dies_or_hangs_is_found(folder, monkeypatch, tmp_path):
    """And the files behind it have their turn."""
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, os, signal, sys, threading\n"
        "first = int(sys.argv[sys.argv.index('--first') + 1])\n"
        "for number in range(first, first + int(sys.argv[-1])):\n"
        "    told = {'number': number, 'name': 'a.ts', 'how': 'cut'}\n"
        "    print(json.dumps({**told, 'began': True}), flush=True)\n"
        "    if number == 2:\n"
        "        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    if number == 4:\n"
        "        threading.Event().wait()\n"
        "    told.update(exit='complete', plain=1, decode='linear', decoded=1 + (number == 6))\n"
        "    print(json.dumps(told), flush=True)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(fuzz, "__file__", str(fake))
    monkeypatch.setattr(fuzz, "FILE_S", 1.0)
    outcome = fuzz.fuzz(0, 8, folder)
    assert [result["number"] for result in outcome.results] == [0, 1, 3, 5, 6, 7]
    assert len(outcome.signals) == 1 and outcome.signals[0].startswith("2: cut of a.ts: SIGSEGV")
    assert outcome.hangs == ["4: cut of a.ts"]
    assert [result["number"] for result in outcome.other_counts] == [6]


def test_the_whole_files_are_whole(folder):
    for name, options in fuzz.KINDS.items():
        with av.open(str(folder / name)) as container:
            assert sum(1 for _ in container.decode(video=0)) == options["count"], name
