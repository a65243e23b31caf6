"""NVIDIA GPUs through CuPy: explicit non-blocking streams, a memory pool a pipeline, exact-size pinned blocks.

Nothing here uses CuPy's pinned memory pool (it rounds up to powers of two and never gives back), nor the default
stream. Waiting threads sleep (blocking-sync events); spinning would cost a core each.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cupy as cp
import numpy as np

from framepipe.device._cuda_leases import Lease, Outputs, Share
from framepipe.device.base import Device, Event, Stream
from framepipe.errors import ClosedError, DeviceError, DeviceUnavailableError
from framepipe.memory import RecyclingPool, aligned_empty

_CudaError = cp.cuda.runtime.CUDARuntimeError
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
_PIN_REFUSED = (1, 2, 208, 801)
"""InvalidValue, MemoryAllocation, AlreadyMapped, NotSupported: what a refused pin has been seen to return."""
_STICKY = (700, 701, 702, 709, 710, 714, 715, 716, 717, 718, 719)
"""Errors after which a context is lost: illegal address, launch failure and their like."""
_owner_pid: int | None = None


def _explain(error: Exception) -> DeviceError:
    status = getattr(error, "status", None)
    if status in _STICKY:
        return DeviceError(f"the GPU context is lost ({error}): nothing more can run in this process; start a new one")
    return DeviceError(f"CUDA failed: {error}")


class CudaEvent(Event):
    """A CUDA event with blocking synchronisation and without timing."""

    __slots__ = ("_event", "_recorded", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._event = cp.cuda.Event(block=True, disable_timing=True)
        self._recorded = False

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        self._event.record(stream.raw)
        self._recorded = True

    def done(self) -> bool:
        return not self._recorded or bool(self._event.done)

    def synchronize(self) -> None:
        if self._recorded:
            try:
                self._event.synchronize()
            except _CudaError as error:
                raise _explain(error) from error


class CudaStream(Stream):
    """A non-blocking CUDA stream; ``raw`` is CuPy's object, ``ptr`` the handle for other libraries."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.raw = cp.cuda.Stream(non_blocking=True)
        self.ptr = self.raw.ptr

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        if event._recorded:
            self.raw.wait_event(event._event)

    def synchronize(self) -> None:
        try:
            # An event, because cudaStreamSynchronize spins unless the whole device is set to block.
            event = cp.cuda.Event(block=True, disable_timing=True)
            event.record(self.raw)
            event.synchronize()
        except _CudaError as error:
            raise _explain(error) from error


class CudaDevice(Device):
    """One GPU.

    Raises `DeviceUnavailableError` for a number that is not there, and in a process forked after CUDA was in use.
    """

    kind = "cuda"
    xp = cp
    host_shared = False

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        _check_fork()
        count = cp.cuda.runtime.getDeviceCount()
        if number >= count:
            there = ", ".join(f"cuda:{i} ({_name(i)})" for i in range(count))
            raise DeviceUnavailableError(f"there is no cuda:{number} on this machine; there is {there}")
        self.number = number
        self.name = _name(number)
        self._device = cp.cuda.Device(number)
        self._pool = cp.cuda.MemoryPool()
        self._closed = False
        self._pinned: dict[int, Any] = {}
        self._refused = False
        self._streams: list[CudaStream] = []
        self._outputs = Outputs(self)
        self._host_outputs = _PinnedPool(self)
        self._lock = threading.Lock()  # guards _pinned and _refused
        with self._device:
            self._free_start, self._total = (int(value) for value in cp.cuda.runtime.memGetInfo())
        self._free_least = self._free_start
        self._free_end: int | None = None

    @property
    def kernels(self) -> ModuleType:
        return importlib.import_module("framepipe.kernels.cuda")

    # -- order ---------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> CudaStream:
        with self._device:
            stream = CudaStream(name)
        self._streams.append(stream)
        return stream

    def event(self, name: str) -> CudaEvent:
        with self._device:
            return CudaEvent(name)

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, CudaStream)
        with self._device, cp.cuda.using_allocator(self.malloc), stream.raw:
            yield

    def enqueue(
        self, stream: Stream, work: Callable[[], None], reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        assert isinstance(stream, CudaStream)
        try:
            with stream.raw:
                work()
        except _CudaError as error:
            raise _explain(error) from error

    def flush(self, stream: Stream) -> None:
        if sys.platform == "win32":
            cp.cuda.runtime.streamQuery(stream.ptr)

    def watch(self) -> None:
        self._free_least = min(self._free_least, int(cp.cuda.runtime.memGetInfo()[0]))

    def vram(self) -> list[dict[str, Any]]:
        reading = {"free_start": self._free_start, "free_least": self._free_least, "free_end": self._free_end}
        return [{"source": "cudaMemGetInfo", "device": self.number, "total": self._total, **reading}]

    # -- memory --------------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> Any:
        """Device memory of the pipeline's own pool (what CuPy allocates in its threads comes from here too)."""
        if self._closed:
            raise ClosedError("the device of this pipeline is closed")
        memory = self._pool.malloc(nbytes)
        total = self._pool.total_bytes()
        with self.ledger._lock:
            self.ledger.peak["device"] = max(self.ledger.peak.get("device", 0), total)
        return memory

    def host_empty(self, nbytes: int, *, pinned: bool) -> np.ndarray:
        if pinned and not self._refused:
            try:
                with self._device:
                    memory = cp.cuda.PinnedMemory(nbytes, 0)
            except _CudaError as error:
                if getattr(error, "status", None) not in _PIN_REFUSED:
                    raise _explain(error) from error
                self._refuse(nbytes, error)
            else:
                block = np.frombuffer(cp.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
                with self._lock:
                    self._pinned[block.ctypes.data] = memory
                self.ledger.add("pinned", nbytes)
                return block
        self.ledger.add("pageable", nbytes)
        return aligned_empty(nbytes)

    def _refuse(self, nbytes: int, error: Exception) -> None:
        # Once, and never again in this pipeline: a failed pin has been seen to make later ones fail too.
        self._refused = True
        self.warnings.append(
            f"the system refused to page-lock {nbytes} bytes ({error}); this is a limit of the host, not of the GPU's "
            "memory: going on with pageable memory, slower"
        )

    def host_free(self, block: np.ndarray) -> None:
        with self._lock:
            pinned = self._pinned.pop(block.ctypes.data, None)
        self.ledger.add("pinned" if pinned is not None else "pageable", -block.nbytes)

    def fixed(self, nbytes: int) -> Any:
        with self._device:
            memory = self.malloc(nbytes)
        self.ledger.add("device", nbytes)
        return cp.ndarray((nbytes,), cp.uint8, memory)

    def fixed_free(self, block: Any) -> None:
        self.ledger.add("device", -block.nbytes)

    def empty(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> Any:
        assert isinstance(stream, CudaStream)
        return self._outputs.lease(shape, np.dtype(dtype), stream)

    def trim(self) -> None:
        self._outputs.trim()
        self._host_outputs.trim()

    def part(self, array: Any, i: int) -> Any:
        """``array[i]``, whose last holder's stream is waited for by itself before the block is used again."""
        lease = getattr(array.data.mem, "_owner", None)
        if not isinstance(lease, Lease) or not array.flags.c_contiguous:
            return array[i]
        view = array[i]
        memory = cp.cuda.UnownedMemory(view.data.ptr, max(1, view.nbytes), Share(lease), self.number)
        return cp.ndarray(view.shape, view.dtype, cp.cuda.MemoryPointer(memory, 0))

    def host_output(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self._host_outputs.empty(shape, dtype)

    def upload(self, dst: Any, src: np.ndarray, stream: Stream) -> None:
        _copy(dst.data.ptr, dst.strides, src.ctypes.data, src.strides, src.shape, src.itemsize, _TO_DEVICE, stream)

    def download(self, dst: np.ndarray, src: Any, stream: Stream) -> None:
        with self._device:
            if not src.flags.c_contiguous:
                assert isinstance(stream, CudaStream)
                with stream.raw:
                    src = cp.ascontiguousarray(src)
            cp.cuda.runtime.memcpyAsync(dst.ctypes.data, src.data.ptr, dst.nbytes, _TO_HOST, stream.ptr)

    def to_host(self, array: Any) -> np.ndarray:
        with self._device:
            host: np.ndarray = cp.asnumpy(array)
            return host

    def using(self, stream: Any) -> Any:
        """A context in which dropping memory counts as use by ``stream`` (CuPy's, ours, a raw handle or torch's)."""
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
        lost: Exception | None = None
        for stream in self._streams:
            try:
                stream.synchronize()
            except DeviceError as error:
                lost = lost or error
        try:
            with self._device:
                self._free_end = int(cp.cuda.runtime.memGetInfo()[0])
        except _CudaError as error:
            lost = lost or _explain(error)
        self._closed = True
        self._outputs.close()
        self._host_outputs.close()
        self._pool.free_all_blocks()
        if lost is not None:
            raise lost


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


class _PinnedPool(RecyclingPool):
    """Page-locked memory that results are read back to."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(None)
        self._device = device

    def _new(self, nbytes: int) -> np.ndarray:
        return self._device.host_empty(nbytes, pinned=True)

    def _let_go(self, block: np.ndarray) -> None:
        self._device.host_free(block)
