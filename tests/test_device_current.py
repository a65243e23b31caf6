"""Making a GPU current: the driver's stack is pushed and popped, whatever happens between, and the lock stays held."""

from __future__ import annotations

import ctypes
import importlib
import sys
import uuid
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from framepipe.device import current as making
from framepipe.telemetry.adapter import Adapter


class Driver:
    """Stands for the driver's library, loaded in one of two ways."""

    calls: list[str]
    refuses = False

    def __init__(self, how: str) -> None:
        def call(name: str, result: int = 0) -> Any:
            return lambda *given: Driver.calls.append(f"{how} {name}") or result

        self.cuInit, self.cuDeviceGet = call("init"), call("device")
        self.cuDevicePrimaryCtxRetain = call("retain")
        self.cuCtxPushCurrent_v2, self.cuCtxPopCurrent_v2 = call("push", int(Driver.refuses)), call("pop")


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    Driver.calls, Driver.refuses = [], False
    for loaded in (making._stack, making._driver, making._context):
        loaded.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("free"))
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: Driver("held"))
    yield
    for loaded in (making._stack, making._driver, making._context):
        loaded.cache_clear()


def test_a_context_is_pushed_and_popped_with_the_interpreter_lock_held():
    with pytest.raises(ValueError, match="inside"):
        with making.current(1):
            assert Driver.calls[-1] == "held push"
            raise ValueError("inside")
    with making.current(1):
        pass
    assert Driver.calls == ["free init", "free device", "free retain", *["held push", "held pop"] * 2]


def test_to_see_whether_there_is_a_driver_does_not_begin_cuda(monkeypatch):
    assert making.driver_is_there()
    assert Driver.calls == []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert not making.driver_is_there()


@pytest.mark.parametrize("why", ["refused", "no library"])
def test_otherwise_cupy_does_it(why, monkeypatch):
    Driver.refuses = True
    if why == "no library":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    entered: list[int] = []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            entered.append(self.number)

        def __exit__(self, *error: object) -> None:
            entered.append(-self.number)

    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=Device))
    monkeypatch.setattr(making.importlib, "import_module", lambda name: cupy)
    with making.current(2):
        assert entered == [2]
    assert entered == [2, -2] and "held pop" not in Driver.calls


def with_cupy(monkeypatch: pytest.MonkeyPatch, name: str, **cuda: Any) -> Any:
    """The module of this name, made anew with something else for CuPy, and forgotten behind the test."""
    errors = {"runtime": SimpleNamespace(CUDARuntimeError=OSError), "driver": SimpleNamespace(CUDADriverError=OSError)}
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(**{**errors, **cuda})))
    for each in ("framepipe.device._cuda_errors", name):
        package, _, leaf = each.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), leaf, None, raising=False)
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
        del sys.modules[each]
    return importlib.import_module(name)


def test_free_memory_is_asked_for_on_the_device_and_no_other_is_made_current(monkeypatch):
    """A guard that watches the second GPU takes nothing of the first one."""

    def free() -> tuple[int, int]:
        Driver.calls.append("asked")
        return 3, 4

    module = with_cupy(monkeypatch, "framepipe.telemetry.cuda_memory", runtime=SimpleNamespace(memGetInfo=free))
    sensor = module.CudaMemory(Adapter(index=1, uuid=uuid.UUID(int=1), pci_bus_id="0000:00:07.0"))
    assert sensor.read() == {"free": 3, "total": 4}
    assert Driver.calls[-3:] == ["held push", "asked", "held pop"]


@pytest.mark.parametrize(("kind", "handles"), [("CudaEvent", 1), ("CudaTimer", 2), ("CudaStream", 1)])
def test_what_belongs_to_a_device_is_destroyed_with_it_current(monkeypatch, kind, handles):
    class Handle:
        ptr = 1

        def __init__(self, **options: bool) -> None:
            pass

        def __del__(self) -> None:
            Driver.calls.append("destroyed")

    module = with_cupy(monkeypatch, "framepipe.device._cuda_streams", Event=Handle, Stream=Handle)
    made = getattr(module, kind)(*(() if kind == "CudaTimer" else ("name",)), 1)
    Driver.calls.clear()
    del made
    assert Driver.calls[-2 - handles :] == ["held push", *["destroyed"] * handles, "held pop"]


def test_blocks_are_waited_for_and_given_up_with_their_device_current(monkeypatch):
    """Also by the thread that lets go of the last frame when the pipeline is closed."""
    module = with_cupy(monkeypatch, "framepipe.device._cuda_leases")
    ledger = SimpleNamespace(add=lambda kind, nbytes: Driver.calls.append("counted"))
    outputs = module.Outputs(SimpleNamespace(number=1, ledger=ledger))
    block = module.Block("memory", 8)
    block.behind = [SimpleNamespace(synchronize=lambda: Driver.calls.append("waited"))]
    outputs._free[8] = deque([block])
    Driver.calls.clear()
    outputs.close()
    assert Driver.calls[-4:] == ["held push", "waited", "counted", "held pop"]
    assert block.behind == [] and block.memory is None, "whoever lets go of the last frame has the block until then"


def test_nothing_else_makes_a_gpu_current_for_a_while():
    """``with cupy.cuda.Device(number)`` makes the context of the first GPU when it is left."""
    package = Path(making.__file__).parent.parent
    found = [path.name for path in package.rglob("*.py") if "cuda.Device(" in path.read_text(encoding="utf-8")]
    assert found == ["current.py"]
