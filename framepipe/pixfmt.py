"""What the pixel formats that framepipe takes look like in memory, by FFmpeg's names.

PyAV tells bits and subsampling of a format but not where a component stands in its plane, nor how far it is
shifted (``p010le`` keeps its 10 bits at the top), so both are written down here. A format that is not in this
table (palettes, packed 4:2:2, big endian) is converted to the nearest one that is by the decode worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """One plane: ``channels`` interleaved samples a position, at ``>> w_shift`` and ``>> h_shift`` of the size."""

    channels: int = 1
    w_shift: int = 0
    h_shift: int = 0


@dataclass(frozen=True, slots=True)
class PixelFormat:
    """A pixel format.

    ``model`` is ``yuv``, ``rgb`` or ``gray``. ``bits`` are the valid bits of a sample and ``shift`` how far they
    stand above bit 0. ``components`` maps ``Y U V R G B A`` to (plane, channel). Samples of more than 8 bits are
    little-endian ``uint16``.
    """

    name: str
    model: str
    bits: int
    planes: tuple[PlaneFormat, ...]
    components: dict[str, tuple[int, int]]
    shift: int = 0
    full_range: bool = False
    """True where the format itself says full range (``yuvj420p``, RGB) or means it when untagged (grey)."""

    @property
    def itemsize(self) -> int:
        """Bytes of one sample."""
        return 1 if self.bits <= 8 else 2

    @property
    def dtype(self) -> str:
        """NumPy's name of the sample type."""
        return "uint8" if self.bits <= 8 else "uint16"

    def __hash__(self) -> int:
        return hash(self.name)


_SUBSAMPLING = {"420": (1, 1), "422": (1, 0), "444": (0, 0), "440": (0, 1), "411": (2, 0), "410": (2, 2)}


@cache
def table() -> dict[str, PixelFormat]:
    """Every format framepipe takes, by name."""
    formats: list[PixelFormat] = []
    formats += _planar_yuv()
    formats += _semi_planar()
    formats += _gray()
    formats += _rgb()
    return {fmt.name: fmt for fmt in formats}


def _depth(bits: int) -> str:
    return "" if bits == 8 else f"{bits}le"


def _planar_yuv() -> list[PixelFormat]:
    formats = []
    yuv = {"Y": (0, 0), "U": (1, 0), "V": (2, 0)}
    for sub, (ws, hs) in _SUBSAMPLING.items():
        planes = (PlaneFormat(), PlaneFormat(1, ws, hs), PlaneFormat(1, ws, hs))
        for bits in (8, 9, 10, 12, 14, 16):
            formats.append(PixelFormat(f"yuv{sub}p{_depth(bits)}", "yuv", bits, planes, yuv))
            alpha = (*planes, PlaneFormat())
            formats.append(PixelFormat(f"yuva{sub}p{_depth(bits)}", "yuv", bits, alpha, {**yuv, "A": (3, 0)}))
        formats.append(PixelFormat(f"yuvj{sub}p", "yuv", 8, planes, yuv, full_range=True))
    return formats


def _semi_planar() -> list[PixelFormat]:
    formats = []
    uv = {"Y": (0, 0), "U": (1, 0), "V": (1, 1)}
    vu = {"Y": (0, 0), "V": (1, 0), "U": (1, 1)}
    for name, order, sub in (("nv12", uv, "420"), ("nv21", vu, "420"), ("nv16", uv, "422"),
                             ("nv24", uv, "444"), ("nv42", vu, "444")):  # fmt: skip
        formats.append(PixelFormat(name, "yuv", 8, (PlaneFormat(), PlaneFormat(2, *_SUBSAMPLING[sub])), order))
    for digit, sub in (("0", "420"), ("2", "422"), ("4", "444")):
        for bits in (10, 12, 16):
            planes = (PlaneFormat(), PlaneFormat(2, *_SUBSAMPLING[sub]))
            formats.append(PixelFormat(f"p{digit}{bits}le", "yuv", bits, planes, uv, shift=16 - bits))
    return formats


def _gray() -> list[PixelFormat]:
    formats = []
    for bits in (8, 9, 10, 12, 14, 16):
        formats.append(
            PixelFormat(f"gray{_depth(bits)}", "gray", bits, (PlaneFormat(),), {"Y": (0, 0)}, full_range=True)
        )
    for name, bits in (("ya8", 8), ("ya16le", 16)):
        planes = (PlaneFormat(2),)
        formats.append(PixelFormat(name, "gray", bits, planes, {"Y": (0, 0), "A": (0, 1)}, full_range=True))
    return formats


def _rgb() -> list[PixelFormat]:
    formats = []
    for name in ("rgb24", "bgr24", "rgba", "bgra", "argb", "abgr", "rgb0", "bgr0", "0rgb", "0bgr"):
        letters = name.removesuffix("24").upper()
        components = {letter: (0, at) for at, letter in enumerate(letters) if letter != "0"}
        formats.append(PixelFormat(name, "rgb", 8, (PlaneFormat(len(letters)),), components, full_range=True))
    for letters, name in (("RGB", "rgb48le"), ("BGR", "bgr48le"), ("RGBA", "rgba64le"), ("BGRA", "bgra64le")):
        components = {letter: (0, at) for at, letter in enumerate(letters)}
        formats.append(PixelFormat(name, "rgb", 16, (PlaneFormat(len(letters)),), components, full_range=True))
    gbr = {"G": (0, 0), "B": (1, 0), "R": (2, 0)}
    for bits in (8, 9, 10, 12, 14, 16):
        three = (PlaneFormat(),) * 3
        formats.append(PixelFormat(f"gbrp{_depth(bits)}", "rgb", bits, three, gbr, full_range=True))
        four = (PlaneFormat(),) * 4
        formats.append(PixelFormat(f"gbrap{_depth(bits)}", "rgb", bits, four, {**gbr, "A": (3, 0)}, full_range=True))
    return formats
