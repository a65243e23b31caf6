"""The decode pool: every way of decoding gives the same pictures, whatever the container says of its key frames."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import av
import pytest
from conftest import footage, make_clip

from framepipe.cutting import Cutter
from framepipe.decode import DecodePool
from framepipe.decoding import MISSES
from framepipe.feed import Feed
from framepipe.frame import FrameSpec, frame_planes
from framepipe.sources.file import File
from framepipe.testing import FrameList, pattern_frames


def digest(frame: av.VideoFrame) -> str:
    planes = frame_planes(frame, FrameSpec.of(frame))
    return hashlib.md5(b"".join(plane.tobytes() for plane in planes)).hexdigest()


def decode(path: Path, how: str, threads: int = 3, **options: object) -> tuple[Feed, list[tuple]]:
    feed = Feed(File(uri=str(path)), "test")
    pool = DecodePool([feed], threads=threads, decode=how, **options)
    pool.start()
    out = []
    while (got := pool.take(20)) is not None:
        frame = got[1]
        out.append((frame.pts, frame.width, frame.height, frame.format.name, digest(frame)))
    assert pool.exhausted
    pool.stop()
    pool.join()
    return feed, out


X264 = {
    "closed": {"gop": 7, "bframes": 2},
    "open": {
        "gop": 9,
        "bframes": 3,
        "options": {"x264-params": "open-gop=1:keyint=9:min-keyint=9:scenecut=0:threads=1"},
    },
    "intra-refresh": {"gop": 10, "options": {"x264-params": "intra-refresh=1:keyint=10:scenecut=0:threads=1"}},
    "pyramid": {"gop": 12, "bframes": 5, "options": {"x264-params": "b-pyramid=normal:scenecut=0:threads=1"}},
    "all-intra": {"gop": 1},
    "one-gop": {"gop": 600},
}
CASES: dict[str, Callable[[Path], Path]] = {
    f"{name}-{suffix}": lambda folder, options=options, suffix=suffix: make_clip(
        folder / f"clip.{suffix}", 50, container={"264": "h264", "ts": "mpegts"}.get(suffix), **options
    )
    for name, options in X264.items()
    for suffix in ("mp4", "mkv", "ts", "264", "avi")
    if not (suffix == "avi" and options.get("bframes"))  # AVI has no place for reordered times
}
CASES |= {
    "hevc-open": lambda folder: make_clip(
        folder / "c.mp4", 40, codec="libx265", gop=8, bframes=3,
        options={"x265-params": "open-gop=1:keyint=8:min-keyint=8:log-level=none:pools=none:frame-threads=1"},
    ),
    "mpeg2": lambda folder: make_clip(folder / "c.ts", 40, codec="mpeg2video", gop=6, bframes=2),
    "mpeg4-avi": lambda folder: make_clip(folder / "c.avi", 40, codec="mpeg4", gop=6),
    "vp9": lambda folder: make_clip(
        folder / "c.webm", 40, codec="libvpx-vp9", gop=8, options={"deadline": "realtime", "cpu-used": "8"}
    ),
    "av1": lambda folder: make_clip(
        folder / "c.mp4", 24, codec="libsvtav1", gop=8, options={"preset": "12", "svtav1-params": "lp=1"}
    ),
    "ffv1": lambda folder: make_clip(folder / "c.mkv", 20, codec="ffv1", pix_fmt="yuv422p10le"),
    "gif": lambda folder: make_clip(folder / "c.gif", 12, codec="gif", pix_fmt="rgb8"),
    "mjpeg": lambda folder: make_clip(folder / "c.avi", 20, codec="mjpeg", pix_fmt="yuvj422p"),
    "times-go-back": lambda folder: _spliced(folder),
    "no-pts-open": lambda folder: make_clip(folder / "c.264", 50, container="h264", **X264["open"]),
}  # fmt: skip


def _spliced(folder: Path) -> Path:
    """Two transport streams one behind the other: times begin again in the middle."""
    parts = [make_clip(folder / f"{i}.ts", 20, container="mpegts", gop=5, first=20 * i) for i in range(2)]
    path = folder / "spliced.ts"
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


@pytest.mark.parametrize("name", CASES)
def test_segments_are_pixel_identical_to_linear(name, tmp_path, nothing_left):
    try:
        path = CASES[name](tmp_path)
    except (av.error.FFmpegError, ValueError) as error:
        pytest.skip(f"this FFmpeg cannot encode it: {error}")
    _, linear = decode(path, "linear")
    assert linear
    for threads in (2, 5):
        feed, segments = decode(path, "segments", threads, min_segment=1)
        assert segments == linear, f"decoded in {feed.mode}"
    assert decode(path, "auto")[1] == linear
    if not name.startswith("intra-refresh"):  # frame threads begin a picture with no reference differently
        assert decode(path, "frame")[1] == linear


def test_segments_really_are_used_where_they_can_be(tmp_path):
    path = CASES["closed-mp4"](tmp_path)
    assert decode(path, "segments", min_segment=1)[0].mode == "segments"
    assert decode(CASES["open-mkv"](tmp_path), "segments", min_segment=1)[0].mode == "segments"


def test_intra_refresh_is_found_out(tmp_path):
    clip = make_clip(tmp_path / "long.mp4", 120, **X264["intra-refresh"])
    feed, _ = decode(clip, "segments", 2, min_segment=1)
    assert feed.misses == MISSES and feed.mode == "linear"


def test_without_time_stamps_there_is_no_cut(tmp_path):
    assert decode(CASES["closed-264"](tmp_path), "segments", min_segment=1)[0].mode == "linear"


def test_a_tiny_budget_still_decodes_in_order(tmp_path):
    path = CASES["open-mp4"](tmp_path)
    linear = decode(path, "linear")[1]
    assert decode(path, "segments", 4, min_segment=1, ahead_nbytes=1, queue_nbytes=1)[1] == linear


@pytest.mark.parametrize(
    "name",
    ["deer_1080p_h264.mp4", "bikes_640x272_h264.mp4", "phone_dog_1080p_h264_vfr.mp4", "street_1080p_h264_annexb.264",
     "phone_portrait_2160p60.mp4", "cars_768x432_12_5fps.mp4"],
)  # fmt: skip
@pytest.mark.slow
def test_segments_are_pixel_identical_on_real_footage(name):
    path = footage(name)
    assert decode(path, "segments", min_segment=1)[1] == decode(path, "linear")[1]


class Packet:
    """As much of a packet as the cutter looks at."""

    def __init__(self, pts: int | None, key: bool = False) -> None:
        self.pts, self.is_keyframe = pts, key


def cut(*packets: Packet) -> list[list[int | None]]:
    cutter = Cutter(iter(packets), 1)
    segments = []
    while (segment := cutter.next()) is not None:
        segments.append(segment)
    assert [p for segment in segments for p in segment.packets] == list(packets), "every packet exactly once, in order"
    assert [segment.last for segment in segments] == [False] * (len(segments) - 1) + [True]
    return [[p.pts for p in segment.packets] for segment in segments]


def test_the_cutter_cuts_at_key_frames():
    assert cut(*(Packet(i, i % 3 == 0) for i in range(7))) == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_cutter_gives_leading_pictures_to_both_sides():
    packets = [Packet(0, True), Packet(1), Packet(4, True), Packet(2), Packet(3), Packet(5)]
    cutter = Cutter(iter(packets), 1)
    first, second = cutter.next(), cutter.next()
    assert [p.pts for p in first.tail] == [4, 2, 3] and first.tail_pts == 4
    assert second.leading == {2, 3} and [p.pts for p in second.packets] == [4, 2, 3, 5]


@pytest.mark.parametrize("times", [[0, 1, None, 3], [0, 5, 3, 4], [0, 1, 1, 2], [None, None, None, None]])
def test_the_cutter_keeps_together_what_it_cannot_order(times):
    assert len(cut(*(Packet(pts, i in (0, 2)) for i, pts in enumerate(times)))) == 1


def test_the_cutter_survives_a_key_frame_at_the_very_end():
    assert cut(Packet(0, True), Packet(1), Packet(2, True)) == [[0, 1], [2]]
    assert cut(Packet(0, True), Packet(3, True), Packet(1), Packet(2)) == [[0], [3, 1, 2]]


# -- the pool itself ------------------------------------------------------------------------------------------------


def pool_of(*sources: object, threads: int = 2, **options: object) -> DecodePool:
    return DecodePool([Feed(s, f"s{i}") for i, s in enumerate(sources)], threads=threads, **options)


def test_fifty_sources_share_two_threads_fairly():
    pool = pool_of(*(FrameList(frames=pattern_frames(6, 16, 16, seed=i)) for i in range(50)))
    pool.start()
    order = []
    while (got := pool.take(20)) is not None:
        feed, _ = got
        feed.taken += 1
        order.append(feed.name)
    pool.stop()
    pool.join()
    assert len(order) == 300
    # Nothing is ever handed back here, so least-holding means: nobody gets a second one before all had a first.
    assert all(order.count(name) == 6 for name in set(order)) and len(set(order)) == 50


def test_a_stalled_source_holds_nobody_back():
    release = threading.Event()

    class Stalling(FrameList):
        may_stall = True

        def open(self, stopping):
            release.wait(20)
            return super().open(stopping)

    pool = pool_of(Stalling(frames=pattern_frames(1)), FrameList(frames=pattern_frames(9)), threads=1)
    pool.start()
    names = [pool.take(20)[0].name for _ in range(9)]
    assert names == ["s1"] * 9
    release.set()
    assert pool.take(20)[0].name == "s0"
    pool.stop()
    pool.join()


def test_a_head_holds_no_more_than_its_bound():
    pool = pool_of(FrameList(frames=pattern_frames(40)), queue_nbytes=1, min_queue=2)
    pool.start()
    feed = pool.feeds[0]
    first = pool.take(20)
    assert first is not None
    pool.stop()
    pool.join()
    assert feed.limit == 2
    assert sum(feed.dropped.values()) <= 2 + 1  # what was waiting is in the books


def test_stop_wakes_a_waiting_taker():
    release = threading.Event()

    class Never(FrameList):
        may_stall = True

        def open(self, stopping):
            release.wait(20)
            return super().open(stopping)

    pool = pool_of(Never())
    pool.start()
    got = []
    thread = threading.Thread(target=lambda: got.append(pool.take()))
    thread.start()
    pool.stop()
    thread.join(20)
    assert got == [None]
    release.set()
    pool.join()


def test_a_short_loop_does_not_run_ahead_without_bound():
    frames = pattern_frames(3, 16, 16)
    pool = pool_of(FrameList(frames=frames, loop=1000))
    pool.start()
    taken = [pool.take(20)[1] for _ in range(30)]
    pool.stop()
    pool.join()
    feed = pool.feeds[0]
    assert taken == frames * 10
    assert [frame.pts for frame in frames] == [0, 1, 2], "the source's own frames must not be changed"
    assert feed.dropped.get("stopped", 0) <= 2 * feed.limit
