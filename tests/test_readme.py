"""The README is true: its blocks run as they stand, what they print is what is shown, its tables name what there is.

A block is run by its language (``bash``, ``python``, ``yaml``), in the order of the page, in one folder a section
that holds the pipelines and samples as a checkout does. Words behind the language say more: ``file=NAME`` writes the
block to a file of that name, and ``no-run`` leaves it alone. A ``text`` block is what the block before it prints;
``…`` in it stands for anything, and times and rates are not compared. Lines that install framepipe are run by the
slow test at the end, in an environment of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import framepipe
from framepipe import cli
from framepipe.config import loads

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = "python -m pip install "
_FENCE = re.compile(r"^```(\w*) ?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_VARIES = re.compile(r"(?<=in )[\d.]+ m?s\b|(?<=\()[\d.]+ (?:fps|kB|MB)(?=\))")
_PACE = re.compile(r"^(bottleneck  .*\n(  .*\n)*|framepipe: \d+/\d+ frames.*\n)", re.MULTILINE)
_MACHINE = re.compile(r"(?<=device        cpu,)\s.*?(?=\s\()")


@dataclass
class Block:
    """One fenced block."""

    language: str
    words: str
    text: str

    @property
    def file(self) -> str | None:
        found = re.search(r"file=(\S+)", self.words)
        return found[1] if found else None

    @property
    def runs(self) -> bool:
        return "no-run" not in self.words.split()


SECTIONS = {
    title: [Block(*found) for found in _FENCE.findall(text)]
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
}
RUN = [title for title, blocks in SECTIONS.items() if any(block.runs for block in blocks)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder like a checkout, where ``framepipe`` and ``python`` are those of this interpreter."""
    for name in ("pipelines", "samples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("python", ""), ("framepipe", "-m framepipe ")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n', encoding="utf-8")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # what is shown was run without a GPU
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_bash(text: str) -> str:
    """What a block prints on both streams; fails where any of its commands does."""
    if shutil.which("bash") is None:  # pragma: no cover
        pytest.skip("there is no bash")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_python(text: str) -> str:
    """What a block prints on standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def run(block: Block) -> str:
    if block.file:
        Path(block.file).write_text(block.text, encoding="utf-8")
        if block.language == "yaml":
            loads(block.text, path=Path(block.file), allow_code=True)
        return ""
    if block.language == "python":
        return run_python(block.text)
    assert block.language == "bash", f"a block of {block.language or 'no language'} is tagged file=NAME or no-run"
    return run_bash("".join(line for line in block.text.splitlines(True) if not line.startswith(INSTALL)))


def same(shown: str, printed: str) -> bool:
    """Whether ``printed`` is what the page shows, but for times, rates, sizes and what ``…`` stands for."""

    def settled(text: str) -> str:
        return _MACHINE.sub("CPU", _VARIES.sub("N", _PACE.sub("", text))).strip()

    pattern = ".*".join(re.escape(part) for part in settled(shown).split("…"))
    return re.fullmatch(pattern, settled(printed), re.DOTALL) is not None


@pytest.mark.parametrize("title", RUN)
def test_the_blocks_of_a_section_run_and_print_what_is_shown(title, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    printed = ""
    for block in filter(lambda block: block.runs, SECTIONS[title]):
        if block.language == "text":
            assert same(block.text, printed), f"shown:\n{block.text}\nprinted:\n{printed}"
        else:
            printed = run(block)
    sys.modules.pop("invert_stage", None)


def test_what_is_compared():
    assert same("in 1.65 s (151.5 fps)\nwrote a (…)\n", "in 0.9 s (2000 fps)\nwrote a (9 kB)\n")
    assert not same("250 frames in 1.65 s", "249 frames in 1.65 s")
    assert not same("wrote a", "wrote a\nwarning: b")
    assert not same("1 0.04 s", "1 0.05 s")
    assert same(
        "wrote a", "framepipe: 9/250 frames, 2.0 fps, 5.1 s\nbottleneck    decoding:\n              slow\nwrote a\n"
    )
    assert same("device        cpu, x86_64 (auto: …)", "device        cpu, Intel64 Family 6 (auto: why)")
    assert not same("device        cpu, x86_64 (auto: …)", "device        cuda, x86_64 (auto: why)")


def test_every_fence_is_a_block_and_every_text_follows_something_that_ran():
    assert README.count("```") == 2 * sum(len(blocks) for blocks in SECTIONS.values())
    for blocks in SECTIONS.values():
        for before, block in zip([None, *blocks], blocks, strict=False):
            if block.language == "text":
                assert before is not None
                assert before.runs
                assert before.language in ("bash", "python")


@pytest.mark.parametrize("name", ["invert_stage.py", "test_invert_stage.py"])
def test_what_is_said_to_be_a_sample_is_that_sample(name):
    shown = [block for blocks in SECTIONS.values() for block in blocks if block.file == name]
    assert [block.text for block in shown] == [(ROOT / "samples" / name).read_text(encoding="utf-8")]


def test_the_sample_of_five_lines_runs():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(ROOT / "samples" / "five_lines.py"), run_name="__main__")
    printed = out.getvalue().splitlines()
    assert (len(printed), printed[0], printed[-1]) == (250, "0 0.00 s (360, 640, 3)", "249 9.96 s (360, 640, 3)")


# -- what it says of other files --


def _rows(title: str, head: str) -> list[list[str]]:
    section = README.split(f"\n## {title}\n")[1].split("\n## ")[0]
    table = section.split(f"| {head} |", 1)[1].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def test_the_table_of_commands_is_what_there_is():
    there: Any = typer.main.get_command(cli.app)
    named: dict[str, set[str]] = {}
    command = ""
    for first, text in _rows("The command line", "command"):
        command = first.strip("`").split()[1] if first else command
        named.setdefault(command, set()).update(re.findall(r"--[a-z-]+", first + text))
    assert list(named) == list(there.commands)  # as in the help
    for name, options in named.items():
        known = {option for parameter in there.commands[name].params for option in parameter.opts if option[:2] == "--"}
        assert options <= known
        if name == "run":
            assert options == known - {"--debug", "--help"}


def test_links_and_pictures_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert "docs/motion.png" in targets
    for target in targets:
        assert (ROOT / target).is_file(), target
    for name in re.findall(r"`((?:framepipe|pipelines|samples|tests|\.ci)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
    assert (ROOT / "docs/motion.png").stat().st_size < 150_000


def test_staging_strategies_are_named_as_they_are():
    assert [row[0].strip("`") for row in _rows("How frames get to the stages", "staging")] == [
        "direct", "pooled", "per_frame", "pageable", "registered", "registered_per_frame", "write_combined", "mapped",
        "cupy_pool", "cuda_core", "torch", "locked", "locked_per_frame",
    ]  # fmt: skip
    from framepipe import registry

    rows = {row[0].strip("`"): row[1] for row in _rows("How frames get to the stages", "staging")}
    assert rows.keys() == set(registry.names("staging"))
    for name, where in rows.items():
        stager = registry.find("staging", name)
        assert (stager.missing("cpu") is None) == (where in ("all", "CPU"))
        assert (stager.missing("simulated") is None) == (
            where in ("all", "GPU") and name not in ("cupy_pool", "cuda_core", "torch")
        )


def test_the_fields_of_the_report_are_what_there_is():
    named = {name for row in _rows("The report", "field") for name in re.findall(r"`(\w+)`", row[0])}
    assert named == framepipe.RunReport().to_dict().keys() - {"schema", "frames"}


def test_ci_runs_what_is_said_for_development():
    (block,) = (block for block in SECTIONS["Development"] if block.language == "bash")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for line in block.text.splitlines():
        arguments = line.removeprefix("python ")
        assert f'"$python" {arguments}' in script, line
    for check in ("ruff check", "ruff format --check", "mypy framepipe", "pytest -m slow"):
        assert check in script
        assert check in README


def test_the_changelog_has_this_version():
    assert f"\n## {framepipe.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# -- from nothing --


@pytest.mark.slow
def test_the_first_commands_work_in_an_environment_of_their_own(tmp_path, monkeypatch):
    """What a newcomer does: install from a clone and run the sample; then again in an empty folder."""
    ignore = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", ".hypothesis", ".venv*", "out")
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT, clone, ignore=ignore)
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    first, *_ = SECTIONS["Try it"]
    assert INSTALL in first.text
    monkeypatch.chdir(clone)
    run_bash(first.text)
    assert {path.name for path in (clone / "out").iterdir()} == {"shapes.jsonl", "shapes.mp4"}
    left = {str(path.relative_to(clone)) for path in clone.rglob("*")} - {"out", "out/shapes.jsonl", "out/shapes.mp4"}
    there = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*")}
    assert left <= there, "installing leaves nothing in the clone"
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for name in yaml.safe_load(str([path.stem for path in (ROOT / "pipelines").glob("*.yaml")])):
        run_bash(f"framepipe run {name} --quiet")
    assert len(list((empty / "out").iterdir())) == 4
    run_bash("framepipe init mine; framepipe run mine/pipelines/motion.yaml --quiet --overwrite")
