"""CUDA C through NVRTC: the sources in `framepipe/kernels/cu`, compiled once a process and device, when first used.

CuPy keeps what it compiled on disk, so that later processes only load it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np

from framepipe.errors import DeviceError

_TYPES = {
    "int32": "int", "int64": "long long", "uint32": "unsigned int", "uint64": "unsigned long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "float32": "float",
}  # fmt: skip

_cupy: ModuleType | None = None


def cupy() -> ModuleType:
    """CuPy, imported when it is needed: this package is imported on machines without it."""
    global _cupy
    if _cupy is None:
        _cupy = importlib.import_module("cupy")
    return _cupy


class Program:
    """One translation unit: ``files`` of the source folder behind ``structs`` and ``macros``.

    ``structs`` are NumPy dtypes made with ``align=True``; the C declarations are written from them, so that host and
    device cannot disagree.
    """

    def __init__(
        self, *files: str, structs: Mapping[str, np.dtype[Any]], macros: Mapping[str, str] | None = None
    ) -> None:
        self.files = files
        self.structs = structs
        self.macros = macros or {}
        self._kernels: dict[tuple[int, str], Any] = {}
        self._modules: dict[int, Any] = {}
        self._compiling = threading.Lock()  # guards _modules; nobody compiles what somebody else is compiling

    def source(self) -> str:
        """The whole text that is compiled."""
        folder = resources.files("framepipe.kernels") / "cu"
        parts = [f"#define {name} {value}\n" for name, value in self.macros.items()]
        parts += [_declaration(name, self.structs) for name in self.structs]
        parts += [(folder / name).read_text(encoding="utf-8") for name in ("common.cuh", *self.files)]
        return "\n".join(parts)

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Enqueue a kernel on the current device's current stream, with ``shared`` bytes that it does not declare."""
        number = cupy().cuda.runtime.getDevice()
        kernel = self._kernels.get((number, name))
        if kernel is None:
            kernel = self._kernels[number, name] = self.module().get_function(name).kernel
        kernel(grid, block, arguments, shared)

    def module(self) -> Any:
        """The compiled code on the current device, compiled now if it is not there yet."""
        cp = cupy()
        number = cp.cuda.runtime.getDevice()
        with self._compiling:
            if number not in self._modules:
                module = cp.RawModule(code=self.source(), options=("--std=c++14",))
                try:
                    module.compile()
                except (cp.cuda.compiler.CompileException, OSError, UnicodeError) as error:
                    raise DeviceError(f"the GPU kernels of {self.files[-1]} cannot be compiled: {error}") from error
                self._modules[number] = module
            return self._modules[number]


def _declaration(name: str, structs: Mapping[str, np.dtype[Any]]) -> str:
    """A C struct with the fields, and by C's rules of alignment the offsets, of a dtype."""
    fields = structs[name].fields
    assert fields is not None
    lines = []
    for field, (dtype, *_) in fields.items():
        sides = "".join(f"[{side}]" for side in dtype.shape)
        base = dtype.base
        kind = _TYPES.get(base.name) or next(each for each, of in structs.items() if of == base)
        lines.append(f"    {kind} {field}{sides};\n")
    return f"struct {name} {{\n{''.join(lines)}}};\n"


def by_value(struct: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A structured array of no dimensions as an argument of a launch. The memory is shared.

    Without its fields: to describe them takes CuPy ten times as long as the launch.
    """
    return struct.view(np.dtype(f"V{struct.dtype.itemsize}"))


def blocks(length: int, size: int) -> int:
    """How many blocks of ``size`` cover ``length``."""
    return -(-length // size)
