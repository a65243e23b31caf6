"""Shared fixtures: clips that tests make themselves, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

import framepipe
from framepipe.device import select


def picture(width: int, height: int, number: int, pix_fmt: str = "yuv420p") -> av.VideoFrame:
    """A textured picture that says its ``number`` in eight black or white 8x8 blocks at the top left."""
    rng = np.random.default_rng(number)
    y = np.indices((height, width)).sum(0) * 3 % 160 + 40
    y = (y + rng.integers(0, 24, (height, width))).astype(np.uint8)
    for bit in range(8):
        y[:8, bit * 8 : bit * 8 + 8] = 235 if number >> (7 - bit) & 1 else 16
    rgb = np.repeat(y[..., None], 3, 2)
    return av.VideoFrame.from_ndarray(rgb, "rgb24").reformat(format=pix_fmt)


def number_of(image: np.ndarray) -> int:
    """The number that `picture` wrote, from an RGB picture or a luma plane."""
    luma = image.mean(-1) if image.ndim == 3 else image
    return sum((luma[4, bit * 8 + 4] > 126) << (7 - bit) for bit in range(8))


def make_clip(
    path: Path,
    count: int = 60,
    *,
    width: int = 96,
    height: int = 64,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    rate: int = 25,
    gop: int = 12,
    bframes: int = 0,
    pts: list[int] | None = None,
    options: dict[str, str] | None = None,
    container: str | None = None,
    first: int = 0,
) -> Path:
    """A clip of numbered pictures; ``pts`` in ticks of 1/rate."""
    with av.open(str(path), "w", format=container) as out:
        options = {"threads": "1", **(options or {})}
        if codec == "libx264":
            options = {"preset": "veryfast", "x264-params": "threads=1:scenecut=0", **options}
        stream = out.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.time_base = Fraction(1, rate)
        if codec not in ("png", "mjpeg", "rawvideo", "ffv1", "gif"):
            stream.codec_context.gop_size = gop
            stream.codec_context.max_b_frames = bframes
        for i in range(count):
            frame = picture(width, height, (first + i) % 256, pix_fmt)
            frame.pts, frame.time_base = (i if pts is None else pts[i]), Fraction(1, rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``a.mp4`` (60 numbered pictures, key frame each 12) and ``b.mp4`` (40 of another size)."""
    folder = tmp_path_factory.mktemp("clips")
    make_clip(folder / "a.mp4")
    make_clip(folder / "b.mp4", 40, width=128, height=80, bframes=2)
    return folder


@pytest.fixture
def clip(clips: Path) -> Path:
    """60 numbered pictures of 96x64 at 25 a second."""
    return clips / "a.mp4"


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new_is_collected() -> None:
    """Many tests collect garbage to see whether something is left, and would look through all of pytest's each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _auto_is_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a GPU, too: tests of it are marked ``gpu`` and name it; for the others ``auto`` is the CPU."""
    if request.node.get_closest_marker("gpu") or select.why_not():
        return
    plain = select.choose
    choose = types.SimpleNamespace(choose=lambda name: plain("cpu" if name == "auto" else name))
    monkeypatch.setattr("framepipe.pipeline.select", choose)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for child processes


def footage(name: str) -> Path:
    """A file of the folder that FRAMEPIPE_FOOTAGE names; the test is skipped where there is none."""
    folder = os.environ.get("FRAMEPIPE_FOOTAGE")
    if not folder:
        pytest.skip("set FRAMEPIPE_FOOTAGE to a folder with real footage")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"{name} is not in FRAMEPIPE_FOOTAGE")
    return path


def ours() -> list[str]:
    """Names of living threads of pipelines."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("framepipe")]


def descriptors() -> int:
    """Open descriptors (or handles) of this process."""
    process = psutil.Process()
    return process.num_fds() if hasattr(process, "num_fds") else process.num_handles()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no thread of ours, no descriptor more than before."""
    gc.collect()
    before = descriptors()
    yield
    deadline = time.monotonic() + 5
    while ours() and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.01)
    assert not ours()
    gc.collect()
    assert descriptors() <= before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A table of the rows that ``test_bNN_…`` in ``test_cases_*`` stand for, where such tests ran."""
    rows: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            found = re.search(r"test_cases_\w+\.py::test_(b\d\d)_", getattr(report, "nodeid", ""))
            if found is not None:
                row = rows.setdefault(found[1].upper(), {})
                row[outcome] = row.get(outcome, 0) + 1
    if not rows:
        return
    terminalreporter.section("rows of the cases")
    for name in sorted(rows):
        row = rows[name]
        worst = "FAILED" if row.keys() & {"failed", "error"} else "passed" if "passed" in row else "skipped"
        terminalreporter.write_line(f"{name}  {worst:8}{', '.join(f'{n} {outcome}' for outcome, n in row.items())}")
    passed = sum(row.keys() <= {"passed", "skipped"} and "passed" in row for row in rows.values())
    terminalreporter.write_line(f"{passed} of {len(rows)} rows passed")


__all__ = ["descriptors", "footage", "framepipe", "make_clip", "number_of", "ours", "picture"]
