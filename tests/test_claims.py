"""What framepipe says it never does, and that the page of claims names commands and files that there are."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

import framepipe
from framepipe import cli, hardware, registry
from framepipe.doctor import examination
from framepipe.probe import bandwidth, churn, pinned

ROOT = Path(__file__).parents[1]
PACKAGE = Path(framepipe.__file__).parent
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_shipped" not in path.parts)
KINDS = {"pinned": pinned.KINDS, "bandwidth": bandwidth.NAMES, "churn": churn.NAMES}

RESETS = re.compile(r"(?:cuda|cu|nvml)?device(?:primaryctx)?_?reset(?!s)|DevicePrimaryCtxReset|hipDeviceReset", re.I)
"""Names of calls that reset a device or its context."""
WRITES = {
    "CreateKey", "CreateKeyEx", "DeleteKey", "DeleteKeyEx", "DeleteValue", "SetValue", "SetValueEx", "SaveKey",
    "LoadKey", "RegSetValueExW", "RegCreateKeyExW", "RegDeleteKeyW", "RegDeleteValueW", "KEY_WRITE", "KEY_SET_VALUE",
    "KEY_ALL_ACCESS", "KEY_CREATE_SUB_KEY",
}  # fmt: skip
"""Names of winreg and of advapi32 that change the registry, or ask for the right to."""
SETS = re.compile(r"nvmlDeviceSet\w+|nvmlDeviceReset\w+|nvmlDeviceClear\w+")
PROGRAMS = {"nvidia-smi", "nvidia-smi.exe", "reg", "reg.exe", "regedit", "powershell", "pnputil", "devcon", "taskkill"}
READS = re.compile(r"--(?:query-[a-z-]+|format)=.*")
"""All that nvidia-smi is ever asked."""


def offences(text: str) -> Iterator[str]:
    """What in a source resets a device, changes the registry, a driver's setting or another process."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        name = getattr(node, "attr", None) or (node.id if isinstance(node, ast.Name) else None)
        if isinstance(node, ast.alias):  # whatever it is called afterwards
            name = node.name.rsplit(".", 1)[-1]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            name = node.value  # that is looked up by getattr, or by ctypes
        if isinstance(name, str) and (RESETS.fullmatch(name) or name in WRITES or SETS.fullmatch(name)):
            yield f"line {node.lineno}: {name}"
        if isinstance(node, ast.Call | ast.List | ast.Tuple):
            yield from _programs(node)


def _programs(node: ast.Call | ast.List | ast.Tuple) -> Iterator[str]:
    """A program in a call or an argument list: any but nvidia-smi, and nvidia-smi with more than questions."""
    parts = node.args if isinstance(node, ast.Call) else node.elts
    # Of an f-string the beginning, which names the program.
    starts = [part.values[0] if isinstance(part, ast.JoinedStr) and part.values else part for part in parts]
    words = [part.value for part in starts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    named = [word for word in words if re.split(r"[/\\]", word.split(" ")[0].lower())[-1] in PROGRAMS]
    for word in named:
        rest = [*word.split(" ")[1:], *(other for other in words if other is not word)]
        if not word.lower().startswith("nvidia-smi") or not all(READS.fullmatch(each) for each in rest):
            yield f"line {node.lineno}: {' '.join(words)}"


def test_no_device_is_reset_no_registry_edited_no_driver_model_switched():
    found = {str(path.relative_to(PACKAGE)): list(offences(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "cupy.cuda.runtime.deviceReset()",
        "library.cudaDeviceReset()",
        "getattr(cuda, 'cuDevicePrimaryCtxReset_v2'.removesuffix('_v2'))(0)\ncuda.cuDevicePrimaryCtxReset(0)",
        "from ctypes import cdll\ncdll.nvcuda['cudaDeviceReset']()",
        "winreg.SetValueEx(key, 'HwSchMode', 0, 4, 2)",
        "winreg.OpenKey(root, path, 0, winreg.KEY_WRITE)",
        "nvml.nvmlDeviceSetDriverModel(handle, 1, 0)",
        "hardware.ask('nvidia-smi', '-dm', '1')",
        "subprocess.run(['nvidia-smi', '--gpu-reset', '-i', '0'])",
        "subprocess.run(['nvidia-smi', '-r'])",
        "os.system('nvidia-smi -r')",
        "os.system(f'nvidia-smi -dm {model}')",
        "subprocess.run(['C:/Windows/System32/nvidia-smi.exe', '-dm', '1'])",
        "from pynvml import nvmlDeviceSetDriverModel as choose",
        "subprocess.run(('reg', 'add', 'HKLM'))",
        "subprocess.run(['taskkill', '/pid', '7'])",
    ],
)
def test_what_would_be_found(line):
    assert list(offences(line))


@pytest.mark.parametrize(
    "line",
    [
        '"""Never calls cudaDeviceReset, and never nvidia-smi -r."""',
        "hardware.ask('nvidia-smi', '--query-gpu=name,driver_model.pending', '--format=csv,noheader')",
        "winreg.QueryValueEx(key, 'HwSchMode')",
        "raise OSError('the device was lost; see nvidia-smi -q')",
    ],
)
def test_what_is_allowed(line):
    assert list(offences(line)) == []


def test_reading_the_registry_is_all_there_is():
    users = [path for path in SOURCES if "winreg" in path.read_text(encoding="utf-8")]
    called = {name for path in users for name in re.findall(r"module\.(\w+)\(", path.read_text(encoding="utf-8"))}
    assert called == {"OpenKey", "QueryValueEx"}


def test_programs_are_only_asked(monkeypatch):
    asked = []

    def ask(*command: str, timeout_s: float = 15) -> hardware.Answer:
        asked.append(command)
        return hardware.Answer(None, "it is not there")

    monkeypatch.setattr(hardware, "ask", ask)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(hardware, "kernel_driver", lambda: None)
    examination.facts()
    hardware.driver_version()
    smi = [command for command in asked if command[0] != sys.executable]
    assert len(smi) >= 3
    assert all(command[0] == "nvidia-smi" and all(map(READS.fullmatch, command[1:])) for command in smi)


# -- the page --


def options_of(words: Sequence[str]) -> Any:
    """The command that ``words`` (behind ``framepipe``) call, and that its options, kinds and strategies are there."""
    command: Any = typer.main.get_command(cli.app)
    rest = list(words)
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)} is a group of commands"
        assert rest[0] in command.commands, f"there is no command {rest[0]!r}"
        command = command.commands[rest.pop(0)]
    known = {option: parameter for parameter in command.params for option in parameter.opts}
    for at, word in enumerate(rest):
        if word.startswith("--"):
            assert word in known, f"framepipe {' '.join(words)}: there is no option {word}"
            if word == "--kinds":
                assert set(rest[at + 1].split(",")) <= set(KINDS[words[1]])
            if word == "--staging":
                assert set(rest[at + 1].split(",")) <= set(registry.names("staging"))
    return command


COMMANDS = sorted(set(re.findall(r"`framepipe ([^`]+)`", " ".join(PAGE.split()))))


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_of_the_page_exist(words):
    options_of(shlex.split(words))


def test_the_page_is_linked_and_its_statements_have_verdicts():
    assert "(docs/claims.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.findall(r'^\*\*"', PAGE, re.MULTILINE)
    assert len(said) >= 30
    assert len(COMMANDS) >= 12
    for verdict in ("Wrong", "Unproven", "In part"):
        assert f" {verdict}" in PAGE
    for name in re.findall(r"\]\(((?!https)[^)]+)\)", PAGE):
        assert (ROOT / "docs" / name).exists(), name
