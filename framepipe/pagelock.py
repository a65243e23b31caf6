"""Page-locking by the operating system alone: ``mlock`` and ``VirtualLock``. CUDA does not know of memory so locked."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

_CAP_IPC_LOCK = 14  # Linux, include/uapi/linux/capability.h


def lock(block: np.ndarray) -> None:
    """Keep the pages of a contiguous array in memory. Raises OSError naming the limit where the system refuses."""
    address, nbytes = block.ctypes.data, block.nbytes
    if sys.platform == "win32":
        _lock_windows(ctypes.WinDLL("kernel32", use_last_error=True), address, nbytes)
    elif _call("mlock", address, nbytes):
        code, limit = ctypes.get_errno(), limit_bytes()
        more = "" if limit is None else f"; RLIMIT_MEMLOCK is {limit} bytes"
        raise OSError(code, f"mlock: {os.strerror(code)}{more}")


def unlock(block: np.ndarray) -> None:
    """Let the pages of `lock` go. What cannot be unlocked is as good as unlocked once it is unmapped."""
    if sys.platform == "win32":
        call = ctypes.WinDLL("kernel32").VirtualUnlock
        call(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.nbytes))
    else:
        _call("munlock", block.ctypes.data, block.nbytes)


def limit_bytes() -> int | None:
    """How much this process may lock; None without a limit, and on Windows, where the working set is the limit.

    Linux holds nobody to it who has CAP_IPC_LOCK in the first user namespace (mm/mlock.c, ``can_do_mlock``).
    """
    if sys.platform == "win32" or _may_lock_all():
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _may_lock_all(process: Path = Path("/proc/self")) -> bool:
    try:
        status = (process / "status").read_text(encoding="utf-8")
        users = (process / "uid_map").read_text(encoding="utf-8").split()
    except OSError:
        return False
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    held = capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1)
    return held and users == ["0", "0", str(2**32 - 1)]


def _call(name: str, address: int, nbytes: int) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    return int(function(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)))


def _lock_windows(kernel: Any, address: int, nbytes: int) -> None:
    """``VirtualLock`` behind a working set that has room: the default one has some hundred KB."""
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    least, most = ctypes.c_size_t(), ctypes.c_size_t()
    if kernel.GetProcessWorkingSetSize(process, ctypes.byref(least), ctypes.byref(most)):
        wanted = least.value + nbytes
        kernel.SetProcessWorkingSetSize(
            process, ctypes.c_size_t(wanted), ctypes.c_size_t(max(most.value, wanted) + nbytes)
        )
    if not kernel.VirtualLock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
        code = getattr(ctypes, "get_last_error", ctypes.get_errno)()  # the former is there on Windows alone
        raise OSError(code, f"VirtualLock: Windows error {code}")
