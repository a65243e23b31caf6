"""`framepipe doctor --explain`: what is found by which words, and that every line of it can be used."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from test_claims import options_of

from framepipe import cli
from framepipe.doctor import capabilities, explaining
from framepipe.doctor.check import CLAIM, GROUNDS

ENTRIES = explaining.symptoms()
DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_an_entry_is_whole(entry):
    assert entry.keys() == {"id", "symptom", "words", "means", "look", "helps"}
    for part in ("means", "helps"):
        assert entry[part]
        for line in entry[part]:
            assert line.keys() <= {"text", "ground", "source"}
            assert line["ground"] in GROUNDS
            assert "\n" not in line["text"].strip()
    for line in entry["means"]:
        if "documentation" in line["ground"]:
            assert line.get("source"), line["text"]
    assert all(look.keys() == {"run", "text"} for look in entry["look"])


def test_names_are_unique_and_every_symptom_finds_itself():
    assert len({entry["id"] for entry in ENTRIES}) == len(ENTRIES) >= 12
    for entry in ENTRIES:
        for asked in (entry["id"], entry["symptom"], f"  {entry['symptom'].upper()} "):
            assert explaining.find(asked)[0] is entry


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("slow copies", "slow-copies"),
        ("cudaHostAlloc out of memory", "pin-fails"),
        ("cudaMallocHost fails", "pin-fails"),
        ("vram leak while nvidia-smi is flat", "vram-falls"),
        ("memory not freed", "not-given-back"),
        ("fps drops after some minutes", "fps-falls"),
        ("works on linux but not in wsl", "wsl2"),
        ("sysmem fallback", "full-but-slow"),
        ("gpu memory full", "full-but-slow"),
        ("shared GPU memory", "shared-grows"),
        ("async copies are serial", "no-overlap"),
        ("docker killed 137", "container-killed"),
        ("TDR", "display-restart"),
        ("fragmentation", "more-than-asked"),
        ("bandwith", "slow-copies"),  # as it is written often
    ],
)
def test_other_words_for_it(asked, found):
    entry, nearest = explaining.find(asked)
    assert entry is not None, [each["id"] for each in nearest]
    assert entry["id"] == found


@pytest.mark.parametrize("asked", ["", "the", "zebra", "?!"])
def test_nothing_is_near_what_means_nothing(asked):
    assert explaining.find(asked) == (None, [])


def test_a_word_of_several_names_the_nearest():
    entry, nearest = explaining.find("slow")
    assert entry is None
    assert {"slow-copies", "full-but-slow"} <= {each["id"] for each in nearest}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_every_command_exists(entry):
    for look in entry["look"]:
        words = shlex.split(look["run"])
        assert words[0] == "framepipe"
        options_of(words[1:])


# -- the command --


def test_it_says_what_is_known(capsys):
    assert cli.main(["doctor", "--explain", "copies", "are", "slow"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("slow-copies: copies are slow\n")
    heads = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["what it may mean:", "how to look here:", "what helps:"]
    assert "\n  framepipe probe bandwidth\n" in out
    assert out.count("  - ") == out.count("[measured") + out.count("[vendor's") + out.count(f"[{CLAIM}")
    assert max(map(len, out.splitlines())) <= 120


def test_as_json_it_is_the_data(capsys):
    for argv, data in (
        (["--explain", "slow-copies"], explaining.find("slow-copies")[0]),
        (["--explain"], ENTRIES),
        (["--capabilities"], capabilities.rows()),
    ):
        assert cli.main(["doctor", *argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == (data if isinstance(data, dict) else list(data))


def test_without_a_symptom_all_are_listed(capsys):
    assert cli.main(["doctor", "--explain"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == [entry["id"] for entry in ENTRIES]


def test_an_unknown_one_has_the_nearest_in_one_line(capsys):
    for asked, words in (("slow", "the nearest are slow-copies"), ("zebra", "there are vram-falls, ")):
        assert cli.main(["doctor", "--explain", asked]) == 2
        told = capsys.readouterr()
        assert (told.out, len(told.err.splitlines())) == ("", 1)
        assert f"no symptom is clearly '{asked}'; {words}" in told.err


# -- the table of systems --


def test_rows_of_the_table_are_whole():
    for row in capabilities.rows():
        assert row.keys() == {"what", *capabilities.SYSTEMS, "ground", "source"}
        assert row["ground"] in GROUNDS
        assert all(isinstance(cell, str) and cell and "|" not in cell for cell in row.values())


def test_the_documentation_has_the_table_that_the_command_has():
    page = (DOCS / "claims.md").read_text(encoding="utf-8")
    assert page.endswith("\n" + "\n".join(capabilities.markdown()) + "\n")
