"""FFmpeg's own functions, in the libraries that PyAV has loaded: for what PyAV itself does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path
from types import ModuleType


def path_of(module: ModuleType, library: str, names: Collection[str]) -> str | None:
    """The file in which `ctypes` finds all these functions; ``module`` of PyAV is linked with ``library``.

    None where there is no such file.
    """
    # A module's own handle finds what it is linked with; on Windows a library is named, and PyAV's has a hash in it.
    own = str(module.__file__)
    for path in (own, *sorted(map(str, (Path(own).parents[2] / "av.libs").glob(f"{library}-*.dll")))):
        try:
            found = ctypes.CDLL(path)
            for name in names:
                getattr(found, name)
        except (OSError, AttributeError):
            continue
        return path
    return None
