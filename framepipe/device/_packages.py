"""The line that makes CuPy work on a machine: itself, its compiler, and the headers that it compiles with.

The packages are those of the extras ``cuda12`` and ``cuda13``, named one by one: that holds wherever framepipe came
from, and no CUDA toolkit is needed.
"""

from __future__ import annotations

from collections.abc import Collection

PACKAGES = {
    12: ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    13: ("cupy-cuda13x", '"nvidia-cuda-nvrtc==13.*"', '"nvidia-cuda-runtime==13.*"'),
}
OLDEST_DRIVER = {12: 525, 13: 580}
"""From the release notes of CUDA 12 and 13: every minor version runs on these and later drivers."""


def newest_cuda(driver: str | None) -> int | None:
    """The newest major version of CUDA under a driver such as ``"580.95.05"``: 13, 12 or less, or None if unknown."""
    branch = (driver or "").split(".")[0]
    if not branch.isdigit():
        return None
    return max((cuda for cuda, oldest in OLDEST_DRIVER.items() if int(branch) >= oldest), default=11)


def install_line(cuda: int | None, present: Collection[str] = ()) -> str:
    """What to do for a CuPy that works where ``cuda`` is the newest that can be used (None: not known).

    ``present`` are the CuPy packages that are installed. CUDA 12 is the choice: it works under newer drivers too, and
    with every GPU that CuPy knows; who has the packages of CUDA 13 keeps them where the driver allows it.
    """
    if cuda is not None and cuda < 12:
        return f"update the NVIDIA driver to {OLDEST_DRIVER[12]} or newer"
    keep = 13 if list(present) == [PACKAGES[13][0]] and (cuda is None or cuda >= 13) else 12
    line = f"pip install {' '.join(PACKAGES[keep])}"
    if set(present) <= {PACKAGES[keep][0]}:
        return line
    # All of them: they share a folder, so that taking one away breaks the others.
    return f"pip uninstall {' '.join(present)}, then {line}"
