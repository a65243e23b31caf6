"""Time stamps, rates and counts: what the file says is kept, what it does not say is told (B20 to B36)."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from types import SimpleNamespace

import av
import pytest
from case_inputs import (
    a_module_leaves_nothing_behind,
    encode,
    gif,
    needs,
    numbered,
    remuxed,
    retimed,
    see,
    solid,
    sound,
    with_cover,
)
from conftest import number_of
from hypothesis import given, settings
from hypothesis import strategies as st

from framepipe.container import ContainerStream
from framepipe.errors import FramepipeError
from framepipe.pipeline import Pipeline
from framepipe.sinks.images import Images
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.parquet import Parquet
from framepipe.sinks.video import Video
from framepipe.streams import choose
from framepipe.testing import FrameList

__all__ = ["a_module_leaves_nothing_behind"]
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])
DECODE = pytest.mark.parametrize("decode", ["linear", "segments", "frame"])
MS = Fraction(1, 1000)
GREY = (126, 128, 128)
B_FRAMES = {"x264-params": "threads=1:scenecut=0:b-adapt=0:bframes=3:b-pyramid=normal", "preset": "veryfast"}


def _written(clip, *sinks):
    """The report of a run."""
    with Pipeline([clip], [], list(sinks), device="cpu") as pipeline:
        return pipeline.run()


def _lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _read(path):
    """Numbers and exact times of a written video."""
    seen = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            base = Fraction(frame.time_base.numerator, frame.time_base.denominator)
            seen.append((number_of(frame.to_ndarray(format="rgb24")), frame.pts * base))
    return seen


# -- B20, B21, B32: rates ----------------------------------------------------------------------------------------------

VFR = [0, 40, 80, 120, 320, 360, 860, 900]


@DECODE
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov", ".ts", ".nut"])
def test_b20_variable_rates_keep_their_times(tmp_path, suffix, decode):
    durations = [b - a for a, b in itertools.pairwise(VFR)] + [40]
    options = {"max_delay": "0"} if suffix == ".ts" else None
    clip = encode(
        tmp_path / f"vfr{suffix}", numbered(8), time_base=MS, pts=VFR, durations=durations, container_options=options
    )
    seen = see(clip, decode=decode)
    first = seen.times[0]
    assert [round(time - first, 6) for time in seen.times] == [ms / 1000 for ms in VFR]
    assert first == 0 or suffix == ".ts"
    assert seen.numbers == list(range(8))
    assert seen.counters == {} and seen.source["warnings"] == []


def test_b20_and_no_sink_makes_them_even(tmp_path):
    clip = encode(tmp_path / "vfr.mp4", numbered(8), time_base=MS, pts=VFR)
    _written(clip, Jsonl(path=tmp_path / "a.jsonl"), Video(path=tmp_path / "a.mp4"))
    assert [line["time_s"] for line in _lines(tmp_path / "a.jsonl")] == [ms / 1000 for ms in VFR]
    assert _read(tmp_path / "a.mp4") == [(i, Fraction(ms, 1000)) for i, ms in enumerate(VFR)]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".nut"])
@pytest.mark.parametrize("rate", [Fraction(30000, 1001), Fraction(24000, 1001), Fraction(60000, 1001), Fraction(25, 2)])
def test_b21_rates_are_fractions(tmp_path, rate, suffix):
    clip = encode(tmp_path / f"clip{suffix}", numbered(30), rate=rate)
    seen = see(clip)
    tick = Fraction(1, 1000 if suffix == ".mkv" else 10**6)  # Matroska has whole milliseconds
    assert all(abs(time - i / rate) <= tick for i, time in enumerate(seen.times)) and len(seen.times) == 30
    stream = ContainerStream(str(clip), lambda: False)
    assert stream.rate == rate or suffix == ".mkv"  # which it knows by them alone
    stream.close()


def test_b21_ntsc_to_the_last_frame_and_back(tmp_path):
    clip = encode(tmp_path / "ntsc.mp4", numbered(30), rate=Fraction(30000, 1001))
    assert see(clip).times[-1] == 0.967633
    _written(clip, Video(path=tmp_path / "b.mp4"))
    assert _read(tmp_path / "b.mp4") == [(i, i * Fraction(1001, 30000)) for i in range(30)]
    with av.open(str(tmp_path / "b.mp4")) as container:
        rate = container.streams.video[0].average_rate
        assert Fraction(rate.numerator, rate.denominator) == Fraction(30000, 1001)


@pytest.mark.parametrize("rate", [240, 1000, 4000])
def test_b32_very_high_rates(tmp_path, rate):
    pq = pytest.importorskip("pyarrow.parquet")
    clip = encode(tmp_path / "fast.mp4", numbered(50), rate=rate)
    seen = see(clip)
    assert [frame.time_s for frame in seen.frames] == [i / rate for i in range(50)]
    assert seen.counters == {}
    _written(clip, Jsonl(path=tmp_path / "a.jsonl"), Parquet(path=tmp_path / "a.parquet"))
    assert [line["time_s"] for line in _lines(tmp_path / "a.jsonl")] == pytest.approx(
        [i / rate for i in range(50)], abs=1e-9
    )
    times = pq.read_table(tmp_path / "a.parquet")["time_s"].to_pylist()
    assert times == [i / rate for i in range(50)] and len(set(times)) == 50


# -- B22, B23: the end -------------------------------------------------------------------------------------------------

_REORDERING = [
    ("libx264", ".mp4", B_FRAMES), ("libx264", ".mkv", B_FRAMES), ("libx264", ".ts", B_FRAMES),
    ("libx265", ".mp4", {"x265-params": "pools=none:frame-threads=1:bframes=3:b-adapt=0:log-level=none"}),
    ("mpeg2video", ".mpg", {}), ("mpeg4", ".avi", {}), ("mpeg4", ".mp4", {}),
    ("libvpx-vp9", ".webm", {"lag-in-frames": "8", "auto-alt-ref": "1", "deadline": "good"}),
    ("libsvtav1", ".mp4", {"preset": "12", "svtav1-params": "lp=1"}),
]  # fmt: skip


@DECODE
@pytest.mark.parametrize(("codec", "suffix", "options"), _REORDERING, ids=[c + s for c, s, _ in _REORDERING])
def test_b22_the_last_frames_come(tmp_path, codec, suffix, options, decode):
    needs(codec)
    threads = {} if codec != "libsvtav1" else {"threads": "0"}
    clip = encode(
        tmp_path / f"clip{suffix}", numbered(10), codec, gop=30, bframes=3 if codec.startswith(("libx", "mpeg")) else 0,
        options={**options, **threads},
    )  # fmt: skip
    seen = see(clip, decode=decode)
    assert seen.numbers == list(range(10))
    assert seen.report.exit == "complete"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 11, 12, 13])
def test_b22_however_many_there_are(tmp_path, count):
    clip = encode(tmp_path / "clip.mp4", numbered(count), gop=6, bframes=3, options=B_FRAMES)
    for decode in ("linear", "segments", "frame"):
        assert see(clip, decode=decode).numbers == list(range(count)), decode


def test_b23_a_decoder_that_was_flushed_before_is_at_its_end(tmp_path, monkeypatch):
    clip = encode(tmp_path / "clip.mp4", numbered(10), gop=30, bframes=3, options=B_FRAMES)
    real = ContainerStream.decoder
    flushes = []

    class Flushed:
        def __init__(self, context):
            self.context, self.left = context, 10

        def __getattr__(self, name):
            return getattr(self.context, name)

        def decode(self, packet):
            if packet is None:
                flushes.append(self.context)
            self.left -= packet is not None
            frames = self.context.decode(packet)
            return frames if self.left or packet is None else frames + self.context.decode(None)

    monkeypatch.setattr(ContainerStream, "decoder", lambda self, threads=1: Flushed(real(self, threads)))
    seen = see(clip, decode="linear")
    assert seen.numbers == list(range(10)) and len(flushes) == 1
    assert seen.report.exit == "complete" and seen.source["packet_errors"] == 0 and seen.source["warnings"] == []


@DECODE
def test_b23_each_round_is_flushed_once(tmp_path, decode):
    clip = encode(tmp_path / "clip.mp4", numbered(10), gop=5, bframes=3, options=B_FRAMES)
    seen = see(clip, decode=decode, loop=3)
    assert seen.numbers == list(range(10)) * 3 and seen.source["packet_errors"] == 0


# -- B24: no time stamps -----------------------------------------------------------------------------------------------


@DEVICES
@DECODE
@pytest.mark.parametrize(
    ("codec", "suffix", "bframes"), [("libx264", ".h264", 2), ("libx264", ".h264", 0), ("libx265", ".hevc", 0)]
)
def test_b24_without_time_stamps_times_are_estimated(tmp_path, device, decode, codec, suffix, bframes):
    clip = encode(tmp_path / f"raw{suffix}", numbered(10), codec, bframes=bframes, container=suffix[1:])
    seen = see(clip, device=device, decode=decode)
    assert seen.times == [round(i / 25, 6) for i in range(10)]
    assert seen.numbers == list(range(10))
    assert all(frame.estimated and frame.pts is None for frame in seen.frames)
    assert seen.counters == {"estimated": 10}
    assert seen.warns("10 pictures without a time stamp", "25 a second")


def test_b24_the_rate_can_be_given(tmp_path):
    clip = encode(tmp_path / "raw.h264", numbered(10), container="h264")
    assert see(clip, rate=50.0).times == [i / 50 for i in range(10)]


def test_b24_sinks_get_numbers(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    clip = encode(tmp_path / "raw.h264", numbered(10), container="h264", bframes=2)
    sinks = Jsonl(path=tmp_path / "a.jsonl"), Parquet(path=tmp_path / "a.parquet"), Video(path=tmp_path / "a.mp4")
    report = _written(clip, *sinks)
    lines = _lines(tmp_path / "a.jsonl")
    assert [line["time_s"] for line in lines] == [i / 25 for i in range(10)]
    assert all(line["estimated"] for line in lines)
    assert pq.read_table(tmp_path / "a.parquet")["time_s"].to_pylist() == [i / 25 for i in range(10)]
    assert _read(tmp_path / "a.mp4") == [(i, Fraction(i, 25)) for i in range(10)]
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("bframes", [0, 2])
def test_b24_avi_has_times_of_decoding_only(tmp_path, bframes):
    clip = encode(tmp_path / "clip.avi", numbered(10), "mpeg4", bframes=bframes)
    seen = see(clip)
    assert seen.numbers == list(range(10))
    first = 0.04 if bframes else 0.0
    assert seen.times == [round(first + i / 25, 6) for i in range(10)]
    assert seen.counters == {}


def test_b24_some_are_missing():
    """A picture after the one before; those that are there are never changed."""
    stamps = [None, None, 10, None, None, 13, 14, None]
    frames = []
    for number, pts in enumerate(stamps):
        frames.append(solid(GREY, number))
        frames[-1].pts, frames[-1].time_base = pts, Fraction(1, 25)
    seen = see(FrameList(frames=frames))
    assert seen.times == [0.0, 0.04, 0.4, 0.44, 0.48, 0.52, 0.56, 0.6]
    assert [frame.pts for frame in seen.frames] == stamps
    assert [frame.estimated for frame in seen.frames] == [pts is None for pts in stamps]
    assert seen.counters == {"estimated": 5}


# -- B25, B27: the beginning -------------------------------------------------------------------------------------------


def _late(tmp_path, kind):
    if kind == "ts":
        return encode(tmp_path / "late.ts", numbered(30), gop=5, container_options={"max_delay": "700000"}), 1.4
    return encode(tmp_path / f"late.{kind}", numbered(30), gop=5, pts=range(50, 80)), 2.0


@DECODE
@pytest.mark.parametrize("kind", ["ts", "mkv", "nut", "mp4"])
def test_b25_a_start_other_than_0_is_kept(tmp_path, kind, decode):
    clip, first = _late(tmp_path, kind)
    seen = see(clip, decode=decode)
    assert seen.times == [round(first + i / 25, 6) for i in range(30)]
    assert seen.source["first_time_s"] == first


@DECODE
@pytest.mark.parametrize("kind", ["ts", "mkv", "nut", "mp4"])
def test_b25_start_and_end_are_times_of_the_file(tmp_path, kind, decode):
    clip, first = _late(tmp_path, kind)
    seen = see(clip, decode=decode, start=round(first + 0.32, 3), end=round(first + 0.8, 3))
    assert seen.numbers == list(range(8, 20))
    assert see(clip, decode=decode, end=first).numbers == []
    assert see(clip, decode=decode, start=0.0, end=first + 0.08).numbers == [0, 1]


@DECODE
def test_b27_what_an_edit_list_hides_is_not_shown(tmp_path, decode):
    whole = encode(tmp_path / "whole.mp4", numbered(12), gop=12)
    with av.open(str(whole)) as container:
        tick = container.streams.video[0].time_base
        shift = round(6 / 25 / float(tick))
    clip = remuxed(whole, tmp_path / "cut.mp4", shift=-shift)
    seen = see(clip, decode=decode)
    with av.open(str(clip)) as container:
        assert container.streams.video[0].frames == 12
    assert seen.numbers == list(range(6, 12))
    assert seen.times == [round(i / 25, 6) for i in range(6)]
    assert seen.report.exit == "complete"  # every packet came


# -- B29: time stamps that go back, repeat and jump --------------------------------------------------------------------


def _going_back(tmp_path):
    steady = encode(tmp_path / "steady.mkv", numbered(8), "ffv1", time_base=MS, pts=[i * 40 for i in range(8)])
    return retimed(steady, tmp_path / "back.mkv", [0, 40, 80, 120, 60, 100, 140, 180])


@DEVICES
@DECODE
def test_b29_a_step_back_is_kept_and_counted(tmp_path, device, decode):
    seen = see(_going_back(tmp_path), device=device, decode=decode)
    assert seen.numbers == list(range(8))
    assert seen.times == [0, 0.04, 0.08, 0.12, 0.06, 0.1, 0.14, 0.18]
    assert seen.counters == {"backward": 1}
    assert seen.warns("1 picture with a time stamp before that of the one before")
    assert seen.report.exit == "complete"


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_b29_a_muxer_does_not_fail_of_it(tmp_path, suffix):
    report = _written(_going_back(tmp_path), Video(path=tmp_path / f"a{suffix}"))
    read = _read(tmp_path / f"a{suffix}")
    assert [number for number, _ in read] == list(range(8))
    assert all(a < b for (_, a), (_, b) in itertools.pairwise(read))
    assert report.exit == "complete"


@pytest.mark.parametrize(
    ("stamps", "counters"),
    [
        ([0, 1, 1, 2, 2, 2], {"repeated": 3}),
        ([-2, -1, 0, 1], {"negative": 2}),
        ([0, 1, 300, 301], {"jumping": 1}),
        ([0, 1, 251, 252], {}),  # 10 s is no jump yet
        ([500, 501, 0, 1], {"backward": 1}),
        ([5, 4, 3, 3, -1, 9000], {"backward": 3, "repeated": 1, "negative": 1, "jumping": 1}),
    ],
)
def test_b29_each_kind_has_its_name(stamps, counters):
    seen = see(FrameList(frames=_stamped(stamps)))
    assert seen.counters == counters
    assert [frame.pts for frame in seen.frames] == stamps
    assert len(seen.source["warnings"]) == len(counters)


def test_b29_slides_do_not_jump(tmp_path):
    """A picture every half minute is what this file is."""
    clip = encode(tmp_path / "slides.mkv", numbered(5), rate=Fraction(1, 30), pts=range(5))
    seen = see(clip)
    assert seen.times == [0, 30, 60, 90, 120] and seen.counters == {}


@DECODE
def test_b29_recordings_glued_together(tmp_path, decode):
    """Transport streams behind each other, the second of an hour later, the third of the beginning again."""
    parts = []
    for number, start in enumerate([0, 90000, 0]):
        part = encode(
            tmp_path / f"{number}.ts", numbered(20, first=20 * number), gop=5, pts=range(start, start + 20),
            container_options={"max_delay": "0"},
        )  # fmt: skip
        parts.append(part.read_bytes())
    clip = tmp_path / "glued.ts"
    clip.write_bytes(b"".join(parts))
    seen = see(clip, decode=decode)
    assert seen.numbers == list(range(60))
    assert seen.counters.keys() == {"jumping", "backward"}


def _stamped(stamps):
    frames = []
    for number, pts in enumerate(stamps):
        frames.append(solid(GREY, number % 256))
        frames[-1].pts, frames[-1].time_base = pts, Fraction(1, 25)
    return frames


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.none() | st.integers(-3000, 3000), min_size=1, max_size=12), st.sampled_from(["cpu", "simulated"]))
def test_b29_any_time_stamps(stamps, device):
    """Every picture comes, in order, with the time that it has or a number."""
    seen = see(FrameList(frames=_stamped(stamps)), device=device)
    assert seen.numbers == list(range(len(stamps)))
    assert [frame.pts for frame in seen.frames] == stamps
    for frame in seen.frames:
        assert math.isfinite(frame.time_s) and (frame.pts is None or frame.time_s == frame.pts / 25)
    there = [pts for pts in stamps if pts is not None]
    steps = [b - a for a, b in itertools.pairwise(there)]
    right = {
        "estimated": len(stamps) - len(there), "repeated": steps.count(0), "backward": sum(s < 0 for s in steps),
        "jumping": sum(s > 250 for s in steps), "negative": sum(pts < 0 for pts in there),
    }  # fmt: skip
    assert seen.counters == {name: count for name, count in right.items() if count}
    json.dumps(seen.report.to_dict(), allow_nan=False)


# -- B34, B35, B36: counts ---------------------------------------------------------------------------------------------


@DEVICES
@DECODE
@pytest.mark.parametrize("batch", [1, 4])
def test_b34_one_frame(tmp_path, device, decode, batch):
    seen = see(encode(tmp_path / "one.mp4", numbered(1, first=77)), device=device, decode=decode, batch=batch)
    assert seen.numbers == [77] and seen.report.frames["delivered"] == 1


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts", ".avi", ".h264"])
def test_b34_few_frames(tmp_path, count, suffix):
    container = "h264" if suffix == ".h264" else None
    clip = encode(tmp_path / f"few{suffix}", numbered(count), container=container)
    for batch in (1, 4):
        assert see(clip, batch=batch).numbers == list(range(count))


def test_b34_out_of_every_sink(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    clip = encode(tmp_path / "one.mp4", numbered(1, first=77))
    report = _written(
        clip,
        Jsonl(path=tmp_path / "a.jsonl"),
        Parquet(path=tmp_path / "a.parquet"),
        Video(path=tmp_path / "a.mp4"),
        Images(path=tmp_path / "{index}.png"),
    )
    assert report.exit == "complete"
    assert len(_lines(tmp_path / "a.jsonl")) == pq.read_table(tmp_path / "a.parquet").num_rows == 1
    assert [number for number, _ in _read(tmp_path / "a.mp4")] == [77]
    assert [path.name for path in tmp_path.glob("*.png")] == ["0.png"]


@DECODE
def test_b35_a_header_that_announces_what_is_not_there(tmp_path, decode):
    data = encode(tmp_path / "whole.mp4", numbered(40), container_options={"movflags": "+faststart"}).read_bytes()
    nothing = tmp_path / "nothing.mp4"
    nothing.write_bytes(data[: data.index(b"mdat") + 4])
    with pytest.raises(FramepipeError, match="0 packets of 40 announced"):
        see(nothing, decode=decode)
    part = tmp_path / "part.mp4"
    part.write_bytes(data[: len(data) * 2 // 3])
    seen = see(part, decode=decode)
    assert 0 < len(seen.numbers) < 40 and seen.numbers == list(range(len(seen.numbers)))
    assert seen.report.exit == "incomplete" and seen.warns("of 40 announced packets")


@pytest.mark.parametrize("suffix", [".mkv", ".ts", ".webm"])
def test_b35_containers_that_announce_nothing(tmp_path, suffix):
    codec = "libvpx-vp9" if suffix == ".webm" else "libx264"
    clip = encode(tmp_path / f"clip{suffix}", numbered(12), codec)
    seen = see(clip)
    assert seen.numbers == list(range(12)) and seen.report.exit == "complete"


def test_b36_an_unknown_rate_is_null_and_not_nan(tmp_path):
    clip = encode(tmp_path / "clip.nut", numbered(1, pix_fmt="yuv420p"), "rawvideo")
    report = _written(clip, Video(path=tmp_path / "a.mp4"), "discard")
    json.dumps(report.to_dict(), allow_nan=False)
    assert _read(tmp_path / "a.mp4")[0][1] == 0


@pytest.mark.parametrize("rate", [None, Fraction(0), SimpleNamespace(numerator=0, denominator=0)])
def test_b36_however_pyav_says_so(tmp_path, monkeypatch, rate):
    """None, 0, or (0, 0), which as a float is not a number."""
    clip = encode(tmp_path / "clip.mp4", numbered(4))

    class Rateless:
        average_rate = base_rate = rate

        def __init__(self, stream):
            self._stream = stream

        def __getattr__(self, name):
            return getattr(self._stream, name)

    monkeypatch.setattr("framepipe.container.choose", lambda *args: Rateless(choose(*args)))
    stream = ContainerStream(str(clip), lambda: False)
    assert stream.rate is None
    stream.close()


def test_b36_a_song_with_a_cover_has_neither_video_nor_rate(tmp_path):
    song = with_cover(sound(tmp_path / "song.m4a"))
    with pytest.raises(FramepipeError, match=r"no video stream; found 0: audio aac, 1: video png \(cover picture\)"):
        see(song)


# -- B56: stills that move ---------------------------------------------------------------------------------------------

_COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def test_b56_the_delays_of_a_gif(tmp_path):
    clip = gif(tmp_path / "a.gif", _COLOURS, [0, 10, 60, 70])
    seen = see(clip)
    assert seen.times == [0, 0.1, 0.6, 0.7]
    assert seen.numbers == [0, 1, 2, 3]


def test_b56_delays_of_0_are_a_tenth_of_a_second(tmp_path):
    clip = gif(tmp_path / "a.gif", _COLOURS, [0, 10, 60, 70])
    data = bytearray(clip.read_bytes())
    at = -1
    while (at := data.find(b"\x21\xf9\x04", at + 1)) >= 0:
        data[at + 4 : at + 6] = bytes(2)
    clip.write_bytes(data)
    assert see(clip).times == [0, 0.1, 0.2, 0.3]


def test_b56_an_animated_png(tmp_path):
    frames = [solid(c, i, size=(64, 48), pix_fmt="rgb24") for i, c in enumerate(_COLOURS)]
    clip = encode(tmp_path / "a.apng", frames, "apng", time_base=Fraction(1, 100), pts=[0, 10, 60, 70], rate=100)
    seen = see(clip)
    assert seen.times == [0, 0.1, 0.6, 0.7] and seen.colours == _COLOURS
