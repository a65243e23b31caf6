"""HDR to SDR on a GPU: the kernels of pictures with a reader that tone maps, and their tables in the code.

Everything that `framepipe.kernels._cuda_picture` does with planes of any format is done here too, in one launch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from framepipe.frame import FrameSpec
from framepipe.kernels import _tonemap
from framepipe.kernels._colour import FRACTION
from framepipe.kernels._cuda_code import Program
from framepipe.kernels._cuda_place import PLACE
from framepipe.kernels._cuda_source import SOURCE, TARGET, Struct, planes_source
from framepipe.kernels._tonemap import Tone

assert SOURCE.fields is not None
TONED_SOURCE = np.dtype(
    [
        *((name, field[0]) for name, field in SOURCE.fields.items()),
        ("hlg", "i4"),
        ("luminance", "f4", 3),
        ("ratio", "f4", 5),
        ("peak", "f4"),
        ("smallest", "f4"),
        ("lead", "f4", (3, 2)),
    ],
    align=True,
)
"""A source, and the numbers of `framepipe.kernels._tonemap.Steps`."""

TONED_JOB = np.dtype([("source", TONED_SOURCE), ("target", TARGET), ("place", PLACE)], align=True)
_STRUCTS = {"Source": TONED_SOURCE, "Target": TARGET, "Place": PLACE, "Job": TONED_JOB}
_LEVELS = {
    "separate": "Separate", "yuv_8": "Yuv<u8>", "yuv_16": "Yuv<u16>", "smooth_8": "Smooth<u8>",
    "smooth_16": "Smooth<u16>",
}  # fmt: skip


def _words(table: np.ndarray[Any, Any]) -> str:
    """Numbers, of float32 the bits: a compiler might round decimals differently."""
    return ",".join(f"{word:#x}" for word in table.view(np.uint32 if table.itemsize == 4 else np.uint8).tolist())


def _programs() -> dict[str, Program]:
    tables = {
        "PQ_LIGHT_WORDS": _words(_tonemap.light("pq")),
        "HLG_LIGHT_WORDS": _words(_tonemap.light("hlg")),
        "HLG_DISPLAY_WORDS": _words(_tonemap.hlg_display()),
        "SDR_CODE_BYTES": _words(_tonemap.sdr_codes()),
    }
    numbers = {
        "CODE_FRACTION": FRACTION,
        "CODE_HALF": 1 << FRACTION - 1,
        "CODE_TOP": _tonemap.TOP,
        "ROOT_STEPS": _tonemap.STEPS,
    }
    return {
        reader: Program(
            "source.cuh",
            "tonemap.cuh",
            "place.cuh",
            "picture.cu",
            structs=_STRUCTS,
            macros={
                **{name: str(number) for name, number in numbers.items()},
                **tables,
                "READER": "Toned",
                "LEVELS": levels,
                **({"ONLY_COPY": "1"} if reader.startswith("smooth") else {}),
            },
        )
        for reader, levels in _LEVELS.items()
    }


programs = {f"toned_{reader}": program for reader, program in _programs().items()}


@lru_cache(maxsize=256)
def toned_source(spec: FrameSpec, picture: int, tone: Tone, smooth: bool = False) -> tuple[Struct, str]:
    """`framepipe.kernels._cuda_source.planes_source` for a reader that tone maps."""
    source, reader = planes_source(spec, picture, smooth)
    toned = np.zeros((), TONED_SOURCE)
    for name in source.dtype.names or ():
        toned[name] = source[name]
    found = _tonemap.steps(spec.transfer, tone)
    toned["hlg"], toned["luminance"] = found.hlg, _tonemap.luminance()
    toned["ratio"], toned["peak"], toned["smallest"] = found.ratio, found.peak, _tonemap.SMALLEST
    toned["lead"] = _tonemap.differences()
    return toned, f"toned_{'separate' if reader == 'codes' else reader}"
