"""The checks of decoding and encoding on the GPU, FFmpeg, and CuPy."""

from __future__ import annotations

from collections.abc import Sequence

from framepipe.doctor import compiler
from framepipe.doctor.check import NOTE, Check, Found, Line, answer


def codecs(found: Found) -> Check:
    """NVDEC and NVENC: FFmpeg's codecs, and the driver's libraries behind them."""
    video = found["video"]
    if video["pyav"] is None:
        return answer("codecs", "NVDEC, NVENC", "PyAV cannot be imported, so that its FFmpeg is not known", status=NOTE)
    lines, lacking = [], False
    for what, name in (("decoding", "nvidia_decoders"), ("encoding", "nvidia_encoders")):
        built = _short(video[name])
        library = found["driver_libraries"].get(what)
        state = _library(library)
        lacking = lacking or library is None or library["reason"] is not None or not video[name]
        lines.append(f"{what}: FFmpeg has {built}; {state}")
    lines.append("framepipe decodes on the CPU; the encoders are for `video: {codec: h264_nvenc}`")
    return answer("codecs", "NVDEC, NVENC", *lines, status=NOTE if lacking else "ok")


def _short(codecs: Sequence[str]) -> str:
    """``h264_nvenc`` and ``av1_nvenc`` are ``h264, av1 by nvenc``."""
    kinds, _, by = zip(*(name.partition("_") for name in codecs), strict=True) if codecs else ((), "", ("",))
    return f"{', '.join(kinds)} by {by[0]}" if kinds else "none"


def _library(library: dict[str, str | None] | None) -> str:
    if library is None:
        return "this system has no such library of the driver"
    if library["reason"] is None:
        return f"the driver's {library['name']} loads"
    return f"the driver's {library['name']} does not load"


def hardware(found: Found) -> Check:
    """Which kinds of hardware FFmpeg was built for; whether one is there is the driver's say."""
    kinds = found["video"].get("hardware")
    if kinds is None:
        return answer("hardware", "FFmpeg", "PyAV cannot be imported, so that its FFmpeg is not known", status=NOTE)
    return answer("hardware", "FFmpeg", f"built for {', '.join(kinds) or 'no hardware'}; the driver decides what works")


def cupy(found: Found) -> Check:
    """Whether CuPy is there, compiles and runs."""
    known = found["cupy"]
    named = " ".join(f"{name} {version}" for name, version in known["packages"].items())
    advice = tuple(compiler.advice(found))
    if not known["packages"]:
        return answer("cupy", "CuPy", "not installed", advice=advice, status=NOTE)
    if known["works"]:
        return answer("cupy", "CuPy", f"{named} compiles and runs a kernel, CUDA {_cuda(known['cuda'])}", advice=advice)
    return answer("cupy", "CuPy", Line(f"{named} does not work: {known['error']}"), advice=advice, status=NOTE)


def _cuda(version: int | None) -> str:
    return "unknown" if version is None else f"{version // 1000}.{version % 1000 // 10}"
