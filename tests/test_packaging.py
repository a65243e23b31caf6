"""What `pip install` gets: the wheel has the package, the pipelines and the samples, and nothing else."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import framepipe

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built by the backend that is installed or can be fetched."""
    folder = tmp_path_factory.mktemp("wheel")
    isolation = []
    if importlib.util.find_spec("hatchling"):
        isolation = ["--no-build-isolation"]
    elif pip("download", "--no-deps", "--dest", str(folder / "backend"), "hatchling").returncode:
        pytest.skip("the build backend is not installed and cannot be fetched")
    done = pip("wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(ROOT))
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def relative(folder: str, pattern: str = "*") -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


SAMPLES = {name for name in relative("samples") if not name.startswith("samples/reports/")}


def test_the_wheel_is_told_of_every_sample():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    places = tables["wheel"]["force-include"]
    assert places == {name: f"framepipe/_shipped/{name}" for name in ("pipelines", *SAMPLES)}


@pytest.mark.slow
def test_the_wheel_has_what_it_should_and_no_more(wheel):
    names = set(wheel.namelist())
    info = f"framepipe-{framepipe.__version__}.dist-info/"
    expected = relative("framepipe") | {
        f"framepipe/_shipped/{name}" for name in relative("pipelines", "*.yaml") | SAMPLES
    }
    assert {name for name in names if not name.startswith(info)} == expected
    assert {"framepipe/py.typed", "framepipe/_shipped/pipelines/motion.yaml"} <= names
    assert {"framepipe/_shipped/samples/shapes.mp4", f"{info}licenses/LICENSE"} <= names
    assert Path(wheel.filename).stat().st_size < 1_000_000


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    metadata = wheel.read(f"framepipe-{framepipe.__version__}.dist-info/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[0] in metadata
    scripts = wheel.read(f"framepipe-{framepipe.__version__}.dist-info/entry_points.txt").decode()
    assert "framepipe = framepipe.cli:end" in scripts


def test_one_version():
    assert PROJECT["version"] == framepipe.__version__


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in (
        "Version 2.0, January 2004",
        "9. Accepting Warranty",
        "END OF TERMS",
        "Copyright The framepipe authors",
    ):
        assert part in text


def test_nothing_but_what_is_declared_is_needed():
    """What modules import outside of functions is required; only those that are named ``cuda`` need CuPy as well."""
    declared = {re.split(r"[\[<>=]", name)[0] for name in PROJECT["dependencies"]}
    packages = {"yaml": "pyyaml"}
    for path in (ROOT / "framepipe").rglob("*.py"):
        known = declared | {"cupy"} if "cuda" in path.stem else declared
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for top in {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"framepipe"}:
                assert packages.get(top, top) in known, f"{path.name} imports {top}"


def test_extras_that_messages_name_are_there():
    named = set()
    for path in (ROOT / "framepipe").rglob("*.py"):
        named |= set(re.findall(r"framepipe\[(\w+)\]", path.read_text(encoding="utf-8")))
    assert named <= PROJECT["optional-dependencies"].keys()
    assert "parquet" in PROJECT["optional-dependencies"]
