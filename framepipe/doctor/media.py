"""FFmpeg as PyAV brings it, and the driver's libraries for decoding and encoding on the GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, Literal

DECODERS = ("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mjpeg", "prores", "ffv1", "gif", "png")
ENCODERS = ("libx264", "libx265", "libsvtav1", "libvpx-vp9", "mpeg4", "mjpeg", "ffv1", "aac")
NVIDIA_DECODERS = ("h264_cuvid", "hevc_cuvid", "av1_cuvid", "vp9_cuvid")
NVIDIA_ENCODERS = ("h264_nvenc", "hevc_nvenc", "av1_nvenc")
LIBRARIES = {
    "win32": {"decoding": "nvcuvid.dll", "encoding": "nvEncodeAPI64.dll"},
    "linux": {"decoding": "libnvcuvid.so.1", "encoding": "libnvidia-encode.so.1"},
}
"""What the driver brings for NVDEC and NVENC (NVIDIA Video Codec SDK)."""


def video() -> dict[str, Any]:
    """PyAV, FFmpeg and its libraries, codecs that people ask for, and hardware devices that are built in."""
    try:
        import av
        from av.codec.hwaccel import hwdevices_available
    except ImportError as error:
        return {"pyav": None, "error": str(error)}
    return {
        "pyav": av.__version__,
        "ffmpeg": getattr(av, "ffmpeg_version_info", None),
        "libraries": {name: ".".join(map(str, number)) for name, number in sorted(av.library_versions.items())},
        "decoders": [name for name in DECODERS if has_codec(name, "r")],
        "encoders": [name for name in ENCODERS if has_codec(name, "w")],
        "nvidia_decoders": [name for name in NVIDIA_DECODERS if has_codec(name, "r")],
        "nvidia_encoders": [name for name in NVIDIA_ENCODERS if has_codec(name, "w")],
        "hardware": sorted(hwdevices_available()),
    }


def has_codec(name: str, mode: Literal["r", "w"]) -> bool:
    """Whether FFmpeg was built with a codec; ``mode`` is ``r`` to decode and ``w`` to encode."""
    from av import Codec

    try:
        Codec(name, mode)
    except ValueError:  # av.codec.codec.UnknownCodecError
        return False
    return True


def driver_libraries(system: str = sys.platform, load: Callable[[str], Any] = ctypes.CDLL) -> dict[str, Any]:
    """For ``decoding`` and ``encoding`` the ``name`` of the library and why it does not load (``reason``, or None)."""
    names = LIBRARIES.get(system, {})
    return {what: {"name": name, "reason": _why_not(load, name)} for what, name in names.items()}


def _why_not(load: Callable[[str], Any], name: str) -> str | None:
    try:
        load(name)
    except OSError as error:
        return " ".join(str(error).split())
    return None
