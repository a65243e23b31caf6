"""Making a GPU current: the driver's stack is pushed and popped, whatever happens between, and the lock stays held."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from framepipe.device import _current


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
    for loaded in (_current._stack, _current._driver, _current._context):
        loaded.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("free"))
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: Driver("held"))
    yield
    for loaded in (_current._stack, _current._driver, _current._context):
        loaded.cache_clear()


def test_a_context_is_pushed_and_popped_with_the_interpreter_lock_held():
    with pytest.raises(ValueError, match="inside"):
        with _current.current(1):
            assert Driver.calls[-1] == "held push"
            raise ValueError("inside")
    with _current.current(1):
        pass
    assert Driver.calls == ["free init", "free device", "free retain", *["held push", "held pop"] * 2]


def test_to_see_whether_there_is_a_driver_does_not_begin_cuda(monkeypatch):
    assert _current.driver_is_there()
    assert Driver.calls == []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert not _current.driver_is_there()


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
    monkeypatch.setattr(_current.importlib, "import_module", lambda name: cupy)
    with _current.current(2):
        assert entered == [2]
    assert entered == [2, -2] and "held pop" not in Driver.calls
