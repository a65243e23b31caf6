"""Why a GPU cannot be used, told on machines that this is not: CuPy is a fake one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from framepipe import cli
from framepipe.device import select
from framepipe.errors import DeviceUnavailableError

NEITHER = "pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
THIRTEEN = 'pip install cupy-cuda13x "nvidia-cuda-nvrtc==13.*" "nvidia-cuda-runtime==13.*"'
NVRTC = "CuPy failed to load libnvrtc.so.12: OSError: libnvrtc.so.12: cannot open shared object file"


class Raises(MetaPathFinder, Loader):
    """A CuPy that fails when it is imported."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "cupy" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        raise self.error

    def exec_module(self, module: ModuleType) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a CuPy for CUDA ``runtime`` over a driver that supports ``driver``, with ``count`` GPUs."""

    def install(
        *,
        driver: int = 12040,
        runtime: int = 12040,
        count: int | Exception = 1,
        compiles: Exception | None = None,
        gives: int = 42,
        packages: tuple[str, ...] = ("cupy-cuda12x",),
        fails: Exception | None = None,
    ) -> None:
        monkeypatch.setattr(select, "_installed", lambda package: package in packages)
        if fails is not None:
            monkeypatch.delitem(sys.modules, "cupy", raising=False)
            monkeypatch.setattr(sys, "meta_path", [Raises(fails), *sys.meta_path])
            return
        cupy: Any = ModuleType("cupy")

        def devices() -> int:
            if isinstance(count, Exception):
                raise count
            return count

        def kernel(code: str, name: str) -> Callable[..., None]:
            if compiles is not None:
                raise compiles

            def launch(grid: Any, block: Any, arguments: tuple[list[int]]) -> None:
                arguments[0][0] = gives

            return launch

        cupy.cuda = SimpleNamespace(
            Device=lambda number: contextlib.nullcontext(),
            runtime=SimpleNamespace(
                driverGetVersion=lambda: driver, runtimeGetVersion=lambda: runtime, getDeviceCount=devices
            ),
        )
        cupy.int32, cupy.RawKernel, cupy.zeros = int, kernel, lambda size, dtype: [0] * size
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    select.why_not.cache_clear()
    yield install
    select.why_not.cache_clear()


def test_a_gpu_that_runs_a_kernel(fake):
    fake(count=2)
    assert select.why_not(1) == ""
    assert (select.choose("auto").kind, select.choose("cuda:1").number) == ("cuda", 1)


@pytest.mark.parametrize(
    ("there", "why"),
    [(True, f"CuPy is not installed: {NEITHER}"), (False, "there is no NVIDIA driver on this machine")],
)
def test_no_cupy(fake, monkeypatch, there, why):
    monkeypatch.setattr(select, "driver_is_there", lambda: there)
    fake(fails=ModuleNotFoundError("No module named 'cupy'", name="cupy"), packages=())
    assert select.why_not() == why  # nobody without a GPU is told to install what would not help


def test_a_cupy_that_cannot_be_loaded(fake):
    fake(fails=ImportError("numpy is too old\nmore"))
    assert select.why_not() == "CuPy cannot be loaded (ImportError: numpy is too old)"


def test_a_module_that_cupy_misses_is_not_cupy(fake):
    fake(fails=ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"))
    assert "CuPy cannot be loaded" in select.why_not()


@pytest.mark.parametrize(
    "state", [{"driver": 0}, {"fails": ImportError("libcuda.so.1: cannot open")}, {"fails": OSError("nvcuda.dll")}]
)
def test_no_driver(fake, state):
    fake(**state)
    assert select.why_not() == "there is no NVIDIA driver on this machine"


def test_a_driver_of_an_older_major_version(fake):
    fake(driver=12080, runtime=13000, packages=("cupy-cuda13x",))
    assert select.why_not() == (
        "CuPy is made for CUDA 13.0, and the driver supports CUDA 12.8 at most: update the driver, or else "
        f"pip uninstall cupy-cuda13x, then {NEITHER}"
    )


def test_a_driver_before_every_extra(fake):
    fake(driver=11080)
    assert select.why_not() == (
        "CuPy is made for CUDA 12.4, and the driver supports CUDA 11.8 at most: "
        "update the NVIDIA driver to 525 or newer"
    )


def test_an_older_minor_version_is_tried(fake):
    fake(driver=12020, runtime=12090)
    assert select.why_not() == ""


def test_an_older_minor_version_is_named_where_nothing_runs(fake):
    fake(driver=12020, runtime=12090, compiles=RuntimeError("unsupported PTX"))
    found = select.why_not()
    assert "unsupported PTX" in found and "CUDA 12.9" in found and "CUDA 12.2" in found and NEITHER in found


def test_no_compiler(fake):
    fake(compiles=RuntimeError(NVRTC))
    assert select.why_not().endswith(f": {NEITHER}")
    assert "NVRTC" in select.why_not()


def test_the_compiler_of_the_cupy_that_is_there(fake):
    fake(driver=13000, runtime=13000, compiles=RuntimeError(NVRTC), packages=("cupy-cuda13x",))
    assert select.why_not().endswith(f": {THIRTEEN}")
    fake(driver=13000, compiles=RuntimeError(NVRTC))
    select.why_not.cache_clear()
    assert select.why_not().endswith(f": {NEITHER}")


def test_two_packages_side_by_side(fake):
    fake(packages=("cupy-cuda12x", "cupy-cuda13x"))
    assert select.why_not() == (
        "cupy-cuda12x and cupy-cuda13x are installed side by side and disturb each other: "
        f"pip uninstall cupy-cuda12x cupy-cuda13x, then {NEITHER}"
    )


def test_two_packages_that_cannot_even_be_loaded(fake):
    fake(packages=("cupy-cuda12x", "cupy-cuda13x"), fails=ImportError("undefined symbol"))
    assert "side by side" in select.why_not()


def test_a_number_that_is_not_there(fake):
    fake(count=2)
    with pytest.raises(DeviceUnavailableError, match="there is no cuda:2; this machine has cuda:0, cuda:1"):
        select.choose("cuda:2")


@pytest.mark.parametrize("count", [0, RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")])
def test_a_driver_without_a_gpu(fake, count):
    fake(count=count)
    assert select.choose("auto").kind == "cpu"
    assert ("shows no GPU" if count == 0 else "cudaErrorNoDevice") in select.why_not()


def test_a_kernel_that_is_wrong(fake):
    fake(gives=41)
    assert "wrong result" in select.why_not()


def test_the_command_line_says_why_and_exits_2(fake, capsys, clip):
    fake(driver=11080)
    assert cli.main(["run", "motion", "--source", str(clip), "--device", "cuda", "--set", "sinks=[discard]"]) == 2
    said = capsys.readouterr().err
    assert "driver supports CUDA 11.8 at most" in " ".join(said.split())
