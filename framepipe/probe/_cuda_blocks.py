"""Blocks that CUDA allocates or page-locks. In a child process alone: a refused pin has been seen to poison one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cupy as cp

from framepipe.probe import _host_blocks
from framepipe.probe._host_blocks import Block, Pageable, RefusedError

runtime = cp.cuda.runtime
ERRORS: tuple[type[Exception], ...] = (runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError)


def start(device: int) -> None:
    """Make the context of ``device`` and a stream, so that neither counts as memory of what is probed."""
    call("cudaSetDevice", lambda: runtime.setDevice(device))
    call("cudaFree", lambda: runtime.free(0))
    cp.cuda.Stream(non_blocking=True).synchronize()


def call(name: str, function: Callable[[], Any]) -> Any:
    """The result of ``function``; what CUDA raises comes as `RefusedError` with its code and name."""
    try:
        return function()
    except ERRORS as error:
        said, _, text = str(error).partition(":")
        raise RefusedError(name, int(getattr(error, "status", -1)), said.strip(), text.strip()) from error


def free_bytes() -> int:
    """``cudaMemGetInfo``: free bytes of the current device."""
    return int(call("cudaMemGetInfo", runtime.memGetInfo)[0])


class HostAllocated(Block):
    """``cudaHostAlloc`` with ``flags``."""

    def __init__(self, nbytes: int, flags: int = 0) -> None:
        super().__init__(nbytes)
        make = partial(runtime.hostAlloc, nbytes, flags)
        self.address = int(self.timed("allocate", lambda: call("cudaHostAlloc", make)))

    def free(self) -> None:
        call("cudaFreeHost", lambda: runtime.freeHost(self.address))


class Registered(Block):
    """A mapping whose pages are touched first, then ``cudaHostRegister``."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._pages = Pageable(nbytes)
        self.address = self._pages.address
        self.steps_s.update(self._pages.steps_s)
        register = partial(runtime.hostRegister, self.address, nbytes, 0)
        try:
            self.timed("register", lambda: call("cudaHostRegister", register))
        except RefusedError:
            self._pages.free()
            raise

    def free(self) -> None:
        call("cudaHostUnregister", lambda: runtime.hostUnregister(self.address))
        self._pages.free()


class DeviceAllocated(Block):
    """``cudaMalloc``. Refused beforehand where the device has less, since Windows may go on in the host's memory."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        free = free_bytes()
        if nbytes > free:
            raise RefusedError(
                "cudaMalloc", None, "not tried", f"{nbytes} bytes wanted, cudaMemGetInfo tells {free} free"
            )
        self.address = int(self.timed("allocate", lambda: call("cudaMalloc", lambda: runtime.malloc(nbytes))))

    def free(self) -> None:
        call("cudaFree", lambda: runtime.free(self.address))


BLOCKS: dict[str, Callable[[int], Block]] = {
    **_host_blocks.BLOCKS,
    "default": HostAllocated,
    "portable": partial(HostAllocated, flags=runtime.hostAllocPortable),
    "mapped": partial(HostAllocated, flags=runtime.hostAllocMapped),
    "write_combined": partial(HostAllocated, flags=runtime.hostAllocWriteCombined),
    "registered": Registered,
    "device": DeviceAllocated,
}
"""By the names of `framepipe.probe.kinds`."""
