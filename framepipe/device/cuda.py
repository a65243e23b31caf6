"""NVIDIA GPUs through CuPy: explicit non-blocking streams, a memory pool a pipeline, exact-size pinned blocks.

Nothing here uses CuPy's pinned memory pool (it rounds up to powers of two and never gives back; ``cupy_pool`` staging
shows it), nor the default stream. Waiting threads sleep (blocking-sync events); spinning would cost a core each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import cupy as cp
import numpy as np

from framepipe.device._cuda_errors import CUDA_ERRORS, OUT_OF_MEMORY, explain, explained, is_refused
from framepipe.device._cuda_leases import Lease, Outputs, Share
from framepipe.device._cuda_streams import CudaEvent, CudaStream, CudaTimer
from framepipe.device.base import Device, Stream, memory_error, patiently
from framepipe.device.current import current
from framepipe.errors import ClosedError, DeviceError, DeviceMemoryError, DeviceUnavailableError
from framepipe.hardware import WSL2_RING_NBYTES, is_wsl2

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
_owner_pid: int | None = None


class CudaDevice(Device):
    """One GPU.

    Raises `DeviceUnavailableError` for a number that is not there, and in a process forked after CUDA was in use.
    """

    kind = "cuda"
    xp = cp
    host_shared = False

    @explained
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        _check_fork()
        count = cp.cuda.runtime.getDeviceCount()
        if number >= count:
            there = ", ".join(f"cuda:{i} ({_name(i)})" for i in range(count))
            raise DeviceUnavailableError(f"there is no cuda:{number} on this machine; there is {there}")
        self.number = number
        self.name = _name(number)
        self._pool = cp.cuda.MemoryPool()
        self._closed = False
        self._streams: list[CudaStream] = []
        self._outputs = Outputs(self)
        self._unaligned: set[tuple[int, int]] = set()  # sizes that CUDA has been seen not to align so
        self.host_limit_nbytes = WSL2_RING_NBYTES if is_wsl2() else None
        with self.bound():
            self._free_start, self._total = (int(value) for value in cp.cuda.runtime.memGetInfo())
        self._free_least = self._free = self._free_start
        self._free_end: int | None = None

    @property
    def kernels(self) -> ModuleType:
        return importlib.import_module("framepipe.kernels.cuda")

    def prepare(self, tell: Callable[[str], None]) -> None:
        def compile_all() -> None:
            # The stage that launches what cannot be compiled raises and says why; others need not care.
            with self.bound(), contextlib.suppress(Exception):
                self.kernels.prepare()

        patiently(compile_all, tell, "compiling GPU kernels (once for this version and driver)…")

    # -- order ---------------------------------------------------------------------------------------------------

    @explained
    def stream(self, name: str) -> CudaStream:
        with self.bound():
            stream = CudaStream(name, self.number)
        self._streams.append(stream)
        return stream

    @explained
    def event(self, name: str) -> CudaEvent:
        with self.bound():
            return CudaEvent(name, self.number)

    @explained
    def timer(self) -> CudaTimer:
        with self.bound():
            return CudaTimer(self.number)

    def bound(self) -> AbstractContextManager[None]:
        return current(self.number)

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, CudaStream)
        with self.bound(), cp.cuda.using_allocator(self.malloc), stream.raw:
            yield

    @explained
    def enqueue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        assert isinstance(stream, CudaStream)
        with stream.raw:
            work()

    def explain(self, error: BaseException) -> BaseException:
        if isinstance(error, CUDA_ERRORS) and getattr(error, "status", None) == OUT_OF_MEMORY:
            return self._memory_error(None)  # what CUDA itself needs: code, local memory, a library's workspace
        return explain(error)

    def flush(self, stream: Stream) -> None:
        if sys.platform == "win32":
            cp.cuda.runtime.streamQuery(stream.ptr)

    @explained
    def watch(self) -> None:
        self._free = int(cp.cuda.runtime.memGetInfo()[0])
        self._free_least = min(self._free_least, self._free)

    def vram(self) -> list[dict[str, Any]]:
        reading = {"free_start": self._free_start, "free_least": self._free_least, "free_end": self._free_end}
        return [
            {"source": "cudaMemGetInfo", "device": self.number, "total": self._total, "free": self._free, **reading}
        ]

    # -- memory --------------------------------------------------------------------------------------------------

    def limit_memory(self, nbytes: int) -> None:
        self.memory_limit_nbytes = nbytes
        with self.bound():
            self._pool.set_limit(size=nbytes)

    @explained
    def malloc(self, nbytes: int) -> Any:
        """Device memory of the pipeline's own pool (what CuPy allocates in its threads comes from here too).

        Raises `DeviceMemoryError` if there is none even without what the pipeline keeps to use again.
        """
        if self._closed:
            raise ClosedError("the device of this pipeline is closed")
        try:
            memory = self._pool.malloc(nbytes)
        except cp.cuda.memory.OutOfMemoryError:
            memory = self._malloc_again(nbytes)
        total = self._pool.total_bytes()
        with self.ledger._lock:
            self.ledger.peak["device"] = max(self.ledger.peak.get("device", 0), total)
        return memory

    def _malloc_again(self, nbytes: int) -> Any:
        self._outputs.trim()
        self._pool.free_all_blocks()
        try:
            return self._pool.malloc(nbytes)
        except cp.cuda.memory.OutOfMemoryError as error:
            raise self._memory_error(nbytes) from error

    def _memory_error(self, nbytes: int | None) -> DeviceMemoryError:
        with self.bound():
            held, limit = int(self._pool.total_bytes()), int(self._pool.get_limit())
            free = int(cp.cuda.runtime.memGetInfo()[0])
        # CuPy counts in units of 512 bytes, and takes a limit from the environment too.
        if nbytes is None or not limit or held + -(-nbytes // 512) * 512 <= limit:
            return memory_error(nbytes, held, free)
        own = self.memory_limit_nbytes is not None
        return memory_error(nbytes, held, free, limit, "device_memory" if own else "CUPY_GPU_MEMORY_LIMIT")

    def _pin(self, nbytes: int, flags: int, align: int | None) -> tuple[np.ndarray, int]:
        """CUDA aligns large blocks well enough by itself; only one that is not takes ``align`` bytes more."""
        align = align or 1
        room = nbytes + align if (nbytes, align) in self._unaligned else nbytes
        with self.bound():
            block = np.asarray(_Pinned(cp.cuda.PinnedMemory(room, flags), room, self.number))
        at = -block.ctypes.data % align
        if at + nbytes <= room:
            return block[at : at + nbytes], room
        del block  # before another one is made
        self._unaligned.add((nbytes, align))
        return self._pin(nbytes, flags, align)

    def refused(self, error: Exception) -> bool:
        return is_refused(error)

    def _register(self, block: np.ndarray) -> None:
        with self.bound():
            cp.cuda.runtime.hostRegister(block.ctypes.data, block.nbytes, 0)

    def _unregister(self, block: np.ndarray) -> None:
        with contextlib.suppress(*CUDA_ERRORS), self.bound():  # once the context is lost nothing is registered
            cp.cuda.runtime.hostUnregister(block.ctypes.data)

    def device_view(self, block: np.ndarray) -> Any:
        """Kernels read the host's memory over the bus; under unified addressing its address is the same for them."""
        memory = cp.cuda.UnownedMemory(block.ctypes.data, block.nbytes, block, self.number)
        return cp.ndarray(block.shape, block.dtype, cp.cuda.MemoryPointer(memory, 0))

    def fixed(self, nbytes: int) -> Any:
        with self.bound():
            memory = self.malloc(nbytes)
        self.ledger.add("device", nbytes)
        return cp.ndarray((nbytes,), cp.uint8, memory)

    def fixed_free(self, block: Any) -> None:
        self.ledger.add("device", -block.nbytes)

    @explained
    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> Any:
        assert isinstance(stream, CudaStream)
        return self._outputs.lease(shape, np.dtype(dtype), stream)

    @explained
    def give_back(self) -> int:
        with self.bound():
            before = int(self._pool.total_bytes())
            self._outputs.trim()
            self._pool.free_all_blocks()
            return max(0, before - int(self._pool.total_bytes()))  # others may take some meanwhile

    def trim(self) -> None:
        self._outputs.trim()
        self.cold.give_back()

    def part(self, array: Any, i: int) -> Any:
        """``array[i]``, whose last holder's stream is waited for by itself before the block is used again."""
        lease = getattr(array.data.mem, "_owner", None)
        if not isinstance(lease, Lease) or not array.flags.c_contiguous:
            return array[i]
        view = array[i]
        memory = cp.cuda.UnownedMemory(view.data.ptr, max(1, view.nbytes), Share(lease), self.number)
        return cp.ndarray(view.shape, view.dtype, cp.cuda.MemoryPointer(memory, 0))

    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        _copy(dst.data.ptr, dst.strides, src.ctypes.data, src.strides, src.shape, src.itemsize, _TO_DEVICE, stream)

    @explained
    def download(self, dst: np.ndarray, src: Any, stream: Stream) -> None:
        with self.bound():
            if not src.flags.c_contiguous:
                assert isinstance(stream, CudaStream)
                with stream.raw:
                    src = cp.ascontiguousarray(src)
            cp.cuda.runtime.memcpyAsync(dst.ctypes.data, src.data.ptr, dst.nbytes, _TO_HOST, stream.ptr)

    @explained
    def to_host(self, array: Any) -> np.ndarray:
        with self.bound():
            host: np.ndarray = cp.asnumpy(array)
            return host

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """A context in which dropping memory counts as use by ``stream`` (CuPy's, ours, a raw handle or torch's)."""
        with self.bound(), self.stream_of(stream):
            yield

    def stream_of(self, stream: Any) -> Any:
        """CuPy's object for a stream of CuPy, of ours or of torch, or for a raw handle."""
        if isinstance(stream, CudaStream):
            return stream.raw
        if isinstance(stream, cp.cuda.Stream | cp.cuda.ExternalStream):
            return stream
        if hasattr(stream, "__cuda_stream__") and hasattr(cp.cuda.Stream, "from_external"):
            return cp.cuda.Stream.from_external(stream)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # CuPy has no other way to take a raw handle
            return cp.cuda.ExternalStream(int(getattr(stream, "cuda_stream", stream)), self.number)

    def close(self) -> None:
        if self._closed:
            return
        lost: BaseException | None = None
        for stream in self._streams:
            try:
                with self.bound():
                    stream.synchronize()
            except DeviceError as error:
                lost = lost or error
        try:
            with self.bound():
                self._free = self._free_end = int(cp.cuda.runtime.memGetInfo()[0])
        except CUDA_ERRORS as error:
            lost = lost or explain(error)
        self._closed = True
        self._outputs.close()
        self.cold.close()
        self.free_unused()
        if lost is not None:
            raise lost

    def free_unused(self) -> None:
        """Give the pool's unused memory back to the device; nothing where the context is lost."""
        with contextlib.suppress(*CUDA_ERRORS), self.bound():
            self._pool.free_all_blocks()


def _copy(
    dst: int, dst_strides: Any, src: int, src_strides: Any, shape: Any, itemsize: int, kind: int, stream: Stream
) -> None:
    """An asynchronous copy of (rows, bytes) memory whose rows may be apart, in one call."""
    width = itemsize * shape[-1]
    rows = shape[0] if len(shape) > 1 else 1
    if rows == 1 or (dst_strides[0] == width and src_strides[0] == width):
        cp.cuda.runtime.memcpyAsync(dst, src, width * rows, kind, stream.ptr)
    else:
        cp.cuda.runtime.memcpy2DAsync(dst, dst_strides[0], src, src_strides[0], width, rows, kind, stream.ptr)


def _name(number: int) -> str:
    name = cp.cuda.runtime.getDeviceProperties(number)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def _check_fork() -> None:
    """CUDA does not survive a fork: say so instead of failing somewhere inside it."""
    global _owner_pid
    if _owner_pid is not None and _owner_pid != os.getpid():
        raise DeviceUnavailableError(
            "this process was forked from one that used CUDA, which does not survive a fork; "
            "start workers with multiprocessing.get_context('spawn')"
        )
    _owner_pid = os.getpid()


class _Pinned:
    """Keeps a page-locked block for as long as an array over it lives, and frees it on its own device."""

    __slots__ = ("__array_interface__", "_memory", "_number")

    def __init__(self, memory: Any, nbytes: int, number: int) -> None:
        self._memory, self._number = memory, number
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (memory.ptr, False), "version": 3}

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with current(self._number):
                self._memory = None
