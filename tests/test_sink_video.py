"""The video sink: times, counts, colours, sizes, sound, and whole files whatever happens."""

from __future__ import annotations

import errno
import io
import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from framepipe.errors import ConfigError, OutputExistsError, SinkError
from framepipe.frame import Frame, FrameSpec, Item
from framepipe.sink import SinkContext, SourceInfo
from framepipe.sinks import _output
from framepipe.sinks._colour import Colour, Converter
from framepipe.sinks.video import Video

MS = Fraction(1, 1000)
TICK = Fraction(1, 90_000)
VFR = [Fraction(ms, 1000) for ms in (0, 40, 80, 500, 540, 580, 1100, 1140)]


def flat(colour, width=96, height=64):
    return np.full((height, width, 3), colour, np.uint8)


def noise(index, width=96, height=64):
    return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def frame(index, time, *, source="cam", base=TICK, image=None, pts=True):
    ticks = round(time / base)
    image = flat(index * 20 % 256) if image is None else image
    item = Item(source, index, ticks if pts else None, base if pts else None, float(ticks * base if pts else time))
    return Frame(item, FrameSpec(image.shape[1], image.shape[0], "yuv420p"), image)


def context(*names, overwrite=False, rate=Fraction(25), **info):
    return SinkContext({name: SourceInfo(name, name, rate=rate, **info) for name in names or ("cam",)}, overwrite)


def write(path, given, *, base=TICK, pts=True, rate=Fraction(25), images=None, **parameters):
    """Frames at the ``given`` times through a sink; the sink and its context."""
    sink = Video(path=str(path), **parameters)
    told = context(rate=rate)
    sink.open(told)
    for index, time in enumerate(given):
        sink.write(frame(index, time, base=base, pts=pts, image=images[index] if images else None))
    sink.end("cam")
    sink.close()
    sink.close()
    return sink, told


def times(path):
    with av.open(str(path)) as container:
        return [
            Fraction(each.pts * each.time_base.numerator, each.time_base.denominator)
            for each in container.decode(video=0)
        ]


def open_in(folder):
    """Names of files under ``folder`` that this process has open."""
    paths = [Path(each.path) for each in psutil.Process().open_files()]
    return [path.name for path in paths if path.is_relative_to(folder.resolve())]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -- times


@pytest.mark.parametrize(
    ("suffix", "codec", "base"),
    [
        ("mp4", "libx264", MS),
        ("mp4", "libx264", TICK),
        ("mov", "libx264", TICK),
        ("mkv", "libx264", TICK),
        ("ts", "libx264", TICK),
        ("flv", "libx264", TICK),
        ("mp4", "mpeg4", MS),
        ("mp4", "libx265", TICK),
        ("webm", "libvpx-vp9", TICK),
        ("nut", "ffv1", TICK),
    ],
)
@pytest.mark.parametrize("start", [0, 2])
def test_variable_times_are_kept(tmp_path, suffix, codec, base, start, capfd):
    path = tmp_path / f"a.{suffix}"
    wanted = [time + start for time in VFR]
    sink, told = write(path, wanted, base=base, codec=codec)
    assert times(path) == wanted
    assert told.warnings == []
    assert sink.state() == {"paths": [str(path)], "frames": 8, "moved_times": 0}
    assert capfd.readouterr().err == ""


def test_a_start_between_milliseconds_is_kept(tmp_path):
    wanted = [time + 2 + Fraction(1, 3000) for time in VFR]
    write(tmp_path / "a.mp4", wanted)
    assert times(tmp_path / "a.mp4") == wanted


@pytest.mark.parametrize(
    ("base", "count"), [(Fraction(1001, 30_000), 60), (Fraction(1, 1000), 120), (Fraction(1, 1_000_000_000), 30)]
)
def test_every_frame_comes_out_at_its_time(tmp_path, base, count):
    step = max(base, MS)
    wanted = [index * step for index in range(count)]
    write(tmp_path / "a.mp4", wanted, base=base, rate=1 / step)
    assert times(tmp_path / "a.mp4") == wanted
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert Fraction(1, 1_000_000) <= container.streams.video[0].time_base <= Fraction(1, 10_000)


def test_a_rate_without_time_stamps(tmp_path):
    wanted = [Fraction(index, 30) for index in range(20)]
    write(tmp_path / "a.mp4", wanted, pts=False)
    assert times(tmp_path / "a.mp4") == wanted


def test_a_time_that_the_pipeline_moved_wins_over_the_stamp(tmp_path):
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context())
    for index in range(6):
        item = Item("cam", index, index % 3 * 3600, TICK, index / 25)  # a loop: the stamps begin anew
        sink.write(Frame(item, FrameSpec(96, 64, "yuv420p"), flat(0)))
    sink.close()
    assert sink.state()["moved_times"] == 0
    assert times(tmp_path / "a.mp4") == [Fraction(index, 25) for index in range(6)]


def test_mpeg4_counts_at_most_65535_ticks_a_second(tmp_path):
    write(tmp_path / "a.mp4", VFR, base=TICK, codec="mpeg4", rate=Fraction(30_000, 1001))
    for got, wanted in zip(times(tmp_path / "a.mp4"), VFR, strict=True):
        assert abs(got - wanted) < Fraction(1, 60_000)


@pytest.mark.parametrize("codec", ["mpeg4", "mpeg2video"])
def test_a_constant_rate_where_container_or_codec_knows_no_other(tmp_path, codec):
    wanted = [Fraction(index, 25) for index in range(10)]
    path = tmp_path / ("a.avi" if codec == "mpeg4" else "a.mp4")
    write(path, wanted, codec=codec, rate=Fraction(25))
    assert times(path) == wanted


@pytest.mark.parametrize(
    ("name", "codec", "rate"), [("a.avi", "mpeg4", Fraction(3_628_800, 502_589)), ("a.mp4", "mpeg2video", Fraction(7))]
)
def test_rates_that_a_codec_does_not_know(tmp_path, name, codec, rate):
    write(tmp_path / name, [index / rate for index in range(5)], codec=codec, rate=rate)
    assert len(times(tmp_path / name)) == 5


@pytest.mark.parametrize("base", [Fraction(1, 25_000), Fraction(1, 50)])
def test_times_that_repeat_or_go_back(tmp_path, base):
    given = [Fraction(ms, 1000) for ms in (0, 40, 40, 120, 60, 160, 200)]
    sink, told = write(tmp_path / "a.mp4", given, base=base)
    got = times(tmp_path / "a.mp4")
    assert len(got) == 7
    assert got == sorted(set(got))
    for at, (was, now) in enumerate(zip(given, got, strict=True)):
        assert abs(now - (was if at != 4 else given[3])) <= Fraction(1, 10_000)
    assert sink.state()["moved_times"] == 2
    assert len(told.warnings) == 1
    assert "0.040" in told.warnings[0]


def test_times_closer_than_the_container_can_say(tmp_path):
    given = [Fraction(index, 4000) for index in range(8)]
    sink, told = write(tmp_path / "a.mkv", given, rate=Fraction(1000))
    assert times(tmp_path / "a.mkv") == [Fraction(index, 1000) for index in range(8)]
    assert sink.state()["moved_times"] > 0
    assert "1/1000 s" in told.warnings[0]


def test_avi_begins_at_zero(tmp_path):
    write(tmp_path / "a.avi", [2 + Fraction(index, 25) for index in range(5)], codec="mpeg4")
    assert times(tmp_path / "a.avi") == [Fraction(index, 25) for index in range(5)]


def test_times_below_zero_move_the_whole_file(tmp_path):
    _, told = write(tmp_path / "a.mp4", [time - Fraction(1, 25) for time in VFR])
    assert times(tmp_path / "a.mp4") == VFR
    assert "-0.040" in told.warnings[0]


def test_the_last_picture_stands_as_long_as_the_one_before(tmp_path):
    write(tmp_path / "a.mkv", [Fraction(index, 10) for index in range(5)])
    with av.open(str(tmp_path / "a.mkv")) as container:
        assert container.duration == 500_000
    write(tmp_path / "b.mkv", [Fraction(0)], rate=Fraction(5))
    with av.open(str(tmp_path / "b.mkv")) as container:
        assert container.duration == 200_000
    assert len(times(tmp_path / "b.mkv")) == 1


def test_from_zero(tmp_path):
    write(tmp_path / "a.mp4", [time + 100 for time in VFR], times="zero")
    assert times(tmp_path / "a.mp4") == VFR


# -- colour


def planes(path):
    with av.open(str(path)) as container:
        picture = next(container.decode(video=0))
        found = [
            np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width].copy()
            for plane in picture.planes
        ]
    return found, picture


def rgb_of(y, u, v, kr, kb):
    """Limited range, ITU-R BT.601/709 equations 1 to 3 inverted."""
    luma, cb, cr = (y - 16.0) / 219, (u - 128.0) / 224, (v - 128.0) / 224
    r, b = luma + 2 * (1 - kr) * cr, luma + 2 * (1 - kb) * cb
    return np.array([r, (luma - kr * r - kb * b) / (1 - kr - kb), b]) * 255


@pytest.mark.parametrize(
    ("height", "kr", "kb", "tag"), [(64, 0.299, 0.114, 6), (718, 0.299, 0.114, 6), (720, 0.2126, 0.0722, 1)]
)
def test_colours_come_back_by_the_tagged_matrix(tmp_path, height, kr, kb, tag):
    for colour in [(74, 203, 221), (255, 0, 0), (16, 16, 200)]:
        path = tmp_path / f"{height}-{colour[0]}.mp4"
        write(path, [Fraction(0)], images=[flat(colour, height=height)], preset="ultrafast", crf=18)
        (y, u, v), picture = planes(path)
        assert np.abs(rgb_of(y[32, 40], u[16, 20], v[16, 20], kr, kb) - colour).max() <= 3
        assert (int(picture.colorspace), int(picture.color_range)) == (tag, 1)
        assert (int(picture.color_primaries), int(picture.color_trc)) == (tag, tag)


def test_rgb_formats_stay_rgb(tmp_path):
    image = noise(0)
    write(tmp_path / "a.mkv", [Fraction(0)], images=[image], codec="ffv1", pix_fmt="bgr0")
    with av.open(str(tmp_path / "a.mkv")) as container:
        np.testing.assert_array_equal(next(container.decode(video=0)).to_ndarray(format="rgb24"), image)


@pytest.mark.parametrize(("codec", "pix_fmt"), [("mjpeg", "yuvj420p"), ("mjpeg", "yuv420p"), ("libx264", "yuvj420p")])
def test_full_range_is_tagged(tmp_path, codec, pix_fmt):
    write(tmp_path / "a.mkv", [Fraction(0)], images=[flat((250, 250, 250))], codec=codec, pix_fmt=pix_fmt)
    (y, _, _), picture = planes(tmp_path / "a.mkv")
    assert abs(int(y[30, 30]) - 250) <= 1
    assert int(picture.color_range) == 2


def test_encoders_never_hold_memory_of_the_picture():
    # Threads of an encoder that dropped it would wait for the GIL of whoever waits for them.
    image = flat((1, 2, 3))
    for pix_fmt in ("rgb24", "yuv420p", "gbrp"):
        converted = Converter((96, 64), pix_fmt, Colour.of(pix_fmt, 64))(image)
        before = bytes(converted.planes[0])
        image[:] = 200
        assert bytes(converted.planes[0]) == before
        image[:] = (1, 2, 3)


def test_rgb_pictures_in_encoder_threads(tmp_path):
    images = [noise(index) for index in range(9)]
    given = [Fraction(index, 25) for index in range(9)]
    write(tmp_path / "a.mov", given, images=images, codec="png", pix_fmt="rgb24", threads=2)
    with av.open(str(tmp_path / "a.mov")) as container:
        for picture, image in zip(container.decode(video=0), images, strict=True):
            np.testing.assert_array_equal(picture.to_ndarray(format="rgb24"), image)


# -- sizes and parts


def test_an_odd_size_is_padded_by_repeating(tmp_path):
    image = noise(1, 63, 47)
    image[:, -1], image[-1, :] = (255, 255, 255), (0, 0, 0)
    _, told = write(tmp_path / "a.mp4", VFR, images=[image] * 8, crf=1)
    (y, _, _), _ = planes(tmp_path / "a.mp4")
    assert y.shape == (48, 64)
    assert y[:40, 62:].min() > 200
    assert y[46:].max() < 40
    assert len(told.warnings) == 1
    assert "63x47" in told.warnings[0]
    assert "yuv444p" in told.warnings[0]


@pytest.mark.parametrize(("codec", "pix_fmt"), [("libx264", "yuv444p"), ("libvpx-vp9", "yuv420p")])
def test_an_odd_size_stays_where_the_codec_can_say_it(tmp_path, codec, pix_fmt):
    _, told = write(tmp_path / "a.mkv", VFR, images=[flat(9, 63, 47)] * 8, codec=codec, pix_fmt=pix_fmt)
    assert planes(tmp_path / "a.mkv")[0][0].shape == (47, 63)
    assert told.warnings == []


def test_another_size_begins_a_new_part(tmp_path):
    sizes = [(64, 48)] * 6 + [(128, 96)] * 6 + [(64, 48)] * 6
    given = [Fraction(index, 25) for index in range(18)]
    sink, told = write(tmp_path / "a.mp4", given, images=[flat(99, *size) for size in sizes])
    assert names(tmp_path) == ["a.mp4", "a_0001.mp4", "a_0002.mp4"]
    for part, name in enumerate(names(tmp_path)):
        assert times(tmp_path / name) == given[part * 6 : part * 6 + 6]
        assert planes(tmp_path / name)[0][0].shape == (sizes[part * 6][1], sizes[part * 6][0])
    assert len(told.warnings) == 1
    assert "64x48 to 128x96" in told.warnings[0]
    assert len(sink.state()["paths"]) == 3


def test_parts_by_time_begin_at_zero(tmp_path):
    given = [Fraction(1083, 1000) + Fraction(index, 10) for index in range(25)]
    write(tmp_path / "{source}_{index:02d}_{start}.mp4", given, base=MS, rotate_s=1, rate=Fraction(10))
    assert names(tmp_path) == ["cam_00_1.083.mp4", "cam_01_2.083.mp4", "cam_02_3.083.mp4"]
    parts = [times(tmp_path / name) for name in names(tmp_path)]
    assert [len(part) for part in parts] == [10, 10, 5]
    assert [part[0] for part in parts] == [0, 0, 0]
    assert parts[1] == [Fraction(index, 10) for index in range(10)]


def test_a_name_known_late_is_checked_too(tmp_path):
    (tmp_path / "a_0001.mp4").write_text("mine")
    sink = Video(path=str(tmp_path / "a.mp4"), rotate_s=0.1)
    sink.open(context())
    with pytest.raises(OutputExistsError, match="a_0001"):
        for index in range(9):
            sink.write(frame(index, Fraction(index, 25)))
    sink.close()
    assert (tmp_path / "a_0001.mp4").read_text() == "mine"
    assert len(times(tmp_path / "a.mp4")) == 3


def test_sources_have_files_of_their_own_finished_at_their_end(tmp_path):
    with pytest.raises(ConfigError, match=r"\{source\}"):
        Video(path="a.mp4").paths(["a", "b"])
    sink = Video(path=str(tmp_path / "{source}.mp4"))
    assert sink.paths(["a/x", "b"]) == [tmp_path / "a_x.mp4", tmp_path / "b.mp4"]
    sink.open(context("a/x", "b"))
    for index in range(10):
        sink.write(frame(index, Fraction(index, 25), source="a/x"))
        sink.write(frame(index, Fraction(index, 5), source="b"))
    assert names(tmp_path) == ["a_x.part.mp4", "b.part.mp4"]
    sink.end("a/x")
    assert names(tmp_path) == ["a_x.mp4", "b.part.mp4"]
    sink.close()
    assert times(tmp_path / "a_x.mp4")[-1] == Fraction(9, 25)
    assert times(tmp_path / "b.mp4")[-1] == Fraction(9, 5)
    assert open_in(tmp_path) == []


# -- sound


@pytest.fixture(scope="module")
def sounding(tmp_path_factory):
    """Two seconds at 25 a second with AAC sound; by name, also with PCM sound and as MPEG-TS."""
    folder = tmp_path_factory.mktemp("sound")
    for name, codec in (("a.mp4", "aac"), ("pcm.mkv", "pcm_s16le"), ("a.ts", "aac")):
        with av.open(str(folder / name), "w") as container:
            video = container.add_stream("libx264", rate=25, options={"preset": "ultrafast", "bf": "0"})
            video.width, video.height, video.codec_context.time_base = 96, 64, TICK
            audio = container.add_stream(codec, rate=8000, layout="mono")
            for index in range(50):
                picture = av.VideoFrame.from_ndarray(flat(index), "rgb24")
                picture.pts, picture.time_base = index * 3600, TICK
                container.mux(video.encode(picture))
            fmt = audio.codec_context.format.name
            samples = np.random.default_rng(0).normal(0, 0.2, (1, 16_000)).clip(-1, 1).astype(np.float32)
            for at in range(0, 16_000, 1000):
                piece = samples[:, at : at + 1000]
                if fmt == "s16":
                    piece = (piece * 32767).astype(np.int16)
                sound = av.AudioFrame.from_ndarray(piece, format=fmt, layout="mono")
                sound.sample_rate, sound.pts, sound.time_base = 8000, at, Fraction(1, 8000)
                container.mux(audio.encode(sound))
            container.mux(video.encode())
            container.mux(audio.encode())
    return folder


def sound_packets(path):
    """{bytes: time} of the sound."""
    with av.open(str(path)) as container:
        if not container.streams.audio:
            return {}
        stream = container.streams.audio[0]
        return {bytes(each): float(each.pts * each.time_base) for each in container.demux(stream) if each.size}


def copy(source, path, *, start=None, end=None, end_source=True, **parameters):
    sink = Video(path=str(path), audio="copy", **parameters)
    told = context(path=source, start=start, end=end, has_audio=True)
    sink.open(told)
    for index in range(50):
        time = Fraction(index, 25)
        if (start is None or time >= start) and (end is None or time < end):
            sink.write(frame(index, time))
    if end_source:
        sink.end("cam")
    sink.close()
    return told.warnings


@pytest.mark.parametrize(
    ("source", "target", "parameters"),
    [
        ("a.mp4", "o.mp4", {}),
        ("a.mp4", "o.mkv", {}),
        ("a.ts", "o.mp4", {}),
        ("a.mp4", "o.ts", {}),
        ("pcm.mkv", "o.mkv", {"codec": "ffv1"}),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_sound_is_copied_at_its_time(tmp_path, sounding, source, target, parameters, cut):
    start, end = (0.6, 1.4) if cut else (None, None)
    warnings = copy(sounding / source, tmp_path / target, start=start, end=end, **parameters)
    assert warnings == []
    given, got = sound_packets(sounding / source), sound_packets(tmp_path / target)
    if source.endswith(target[-3:]):  # other containers frame the same sound otherwise
        assert set(got) <= set(given)
        for data, time in got.items():
            assert time == pytest.approx(given[data], abs=0.0011)
    wanted = [time for time in given.values() if time >= (0.6 if cut else 0) and time < (1.4 if cut else 9)]
    found = sorted(time for time in got.values() if time >= 0)
    assert found == pytest.approx(sorted(wanted), abs=0.0011)
    assert times(tmp_path / target) == [Fraction(index, 25) for index in (range(15, 35) if cut else range(50))]


def test_sound_follows_a_file_that_begins_at_zero_and_its_parts(tmp_path, sounding):
    copy(sounding / "a.mp4", tmp_path / "a.mp4", start=0.6, end=1.5, rotate_s=0.4)
    given = sound_packets(sounding / "a.mp4")
    for part, name in enumerate(names(tmp_path)):
        got = sound_packets(tmp_path / name)
        begin = 0.6 + 0.4 * part
        assert got
        for data, time in got.items():
            assert time + begin == pytest.approx(given[data], abs=0.0011)
            assert 0 <= time < 0.4
    assert len(names(tmp_path)) == 3


def test_sound_of_a_gap_between_parts_is_kept(tmp_path, sounding):
    sink = Video(path=str(tmp_path / "a.mkv"), audio="copy", rotate_s=0.5, times="source")
    sink.open(context(path=sounding / "a.mp4", has_audio=True))
    for index, time in enumerate([0.0, 0.04, 1.0, 1.04]):
        sink.write(frame(index, Fraction(time)))
    sink.end("cam")
    sink.close()
    given = {data: time for data, time in sound_packets(sounding / "a.mp4").items() if time >= 0}
    first, second = (sound_packets(tmp_path / name) for name in names(tmp_path))
    assert {**first, **second}.keys() == given.keys()
    assert max(first.values()) < 1 <= min(second.values())


def test_sound_ends_with_the_pictures_of_a_stopped_run(tmp_path, sounding):
    sink = Video(path=str(tmp_path / "a.mp4"), audio="copy")
    sink.open(context(path=sounding / "a.mp4", has_audio=True))
    for index in range(10):
        sink.write(frame(index, Fraction(index, 25)))
    sink.close()
    assert 0.2 < max(sound_packets(tmp_path / "a.mp4").values()) < 0.4
    assert open_in(tmp_path) == []


def test_sound_that_the_container_cannot_hold_is_left_out(tmp_path, sounding):
    warnings = copy(sounding / "a.mp4", tmp_path / "a.webm", codec="libvpx-vp9")
    assert len(times(tmp_path / "a.webm")) == 50
    assert sound_packets(tmp_path / "a.webm") == {}
    assert len(warnings) == 1
    assert "sound is left out" in warnings[0]
    # AVI refuses this one only when the header is written.
    warnings = copy(sounding / "a.ts", tmp_path / "a.avi", codec="mpeg4")
    assert len(times(tmp_path / "a.avi")) == 50
    assert len(warnings) == 1


def test_sound_whose_times_go_back_does_not_spoil_the_video(tmp_path, sounding):
    (tmp_path / "twice.ts").write_bytes((sounding / "a.ts").read_bytes() * 2)
    copy(tmp_path / "twice.ts", tmp_path / "a.mp4")
    assert len(times(tmp_path / "a.mp4")) == 50
    assert len(sound_packets(tmp_path / "a.mp4")) == len(sound_packets(sounding / "a.ts"))


def test_sound_left_out_is_told_once(tmp_path, sounding):
    sink = Video(path=str(tmp_path / "{source}.mp4"))
    told = context("a", "b", has_audio=True)
    sink.open(told)
    for index in range(3):
        sink.write(frame(index, Fraction(index, 25), source="a"))
        sink.write(frame(index, Fraction(index, 25), source="b"))
    sink.close()
    assert len(told.warnings) == 2
    assert "audio: copy" in told.warnings[0]
    assert ["no file" in text for text in copy(None, tmp_path / "c.mp4")] == [True]
    assert ["left out" in text for text in copy(tmp_path / "gone.mp4", tmp_path / "d.mp4")] == [True]


# -- whole files whatever happens


def test_a_run_that_ends_early_leaves_a_readable_file(tmp_path):
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context())
    given = [Fraction(index, 25) for index in range(60)]
    for index, time in enumerate(given[:37]):
        sink.write(frame(index, time))
    with pytest.raises(SinkError, match="float32"):
        sink.write(frame(37, given[37], image=flat(0).astype(np.float32)))
    assert names(tmp_path) == ["a.part.mp4"]
    sink.close()
    assert names(tmp_path) == ["a.mp4"]
    assert times(tmp_path / "a.mp4") == given[:37]
    assert open_in(tmp_path) == []


@pytest.fixture
def full_disk(monkeypatch):
    """Names of files in it cannot be written to any more."""
    full = set()
    real = io.FileIO.write

    def write(self, data):
        if any(name in str(self.name) for name in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    monkeypatch.setattr(_output.WholeFile, "_write", write)
    return full


def test_a_full_disk(tmp_path, full_disk):
    sink = Video(path=str(tmp_path / "a.mp4"), preset="ultrafast", options={"tune": "zerolatency"})
    sink.open(context())
    sink.write(frame(0, Fraction(0)))
    full_disk.add("a.part")
    with pytest.raises(SinkError, match=r"a\.mp4.*disk is full.*a\.part\.mp4.*index") as caught:
        for index in range(1, 50):
            sink.write(frame(index, Fraction(index, 25), image=noise(index)))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.exit_code == 1
    sink.write(frame(50, Fraction(2)))  # told once
    sink.close()
    sink.close()
    assert names(tmp_path) == ["a.part.mp4"]
    assert open_in(tmp_path) == []


def test_a_file_that_may_grow_no_further(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = Video(path=str(tmp_path / "{source}.ts"), preset="ultrafast", options={"tune": "zerolatency"})
    sink.open(context("a", "b"))
    sink.write(frame(0, Fraction(0), source="b"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
        with pytest.raises(SinkError, match=r"a\.ts.*largest size.*a\.part\.ts$"):
            for index in range(50):
                sink.write(frame(index, Fraction(index, 25), source="a", image=noise(index)))
        sink.close()  # b is finished all the same
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["a.part.ts", "b.ts"]
    assert len(times(tmp_path / "b.ts")) == 1
    assert len(times(tmp_path / "a.part.ts")) >= 3
    assert open_in(tmp_path) == []


def test_the_disk_fills_at_the_very_end(tmp_path, full_disk):
    sink = Video(path=str(tmp_path / "{source}.mp4"))
    sink.open(context("a", "b", "c"))
    for source in "abc":
        sink.write(frame(0, Fraction(0), source=source))
    full_disk.update(["a.part", "c.part"])
    with pytest.raises(SinkError, match=r"a\.mp4.*disk is full") as caught:
        sink.close()
    assert "c.mp4" in caught.value.__notes__[0]
    assert names(tmp_path) == ["a.part.mp4", "b.mp4", "c.part.mp4"]
    assert len(times(tmp_path / "b.mp4")) == 1
    assert open_in(tmp_path) == []


def test_an_output_held_open_leaves_the_finished_file(tmp_path, monkeypatch):
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context())
    sink.write(frame(0, Fraction(0)))

    def refuse(src, dst):
        raise PermissionError(errno.EACCES, "Access is denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SinkError, match=r"holds it open.*a\.part\.mp4"):
        sink.end("cam")
    sink.close()
    assert len(times(tmp_path / "a.part.mp4")) == 1


def test_an_existing_file_stays_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "a.mp4").write_text("old")
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context())
    with pytest.raises(OutputExistsError):
        sink.write(frame(0, Fraction(0)))
    sink.close()
    assert names(tmp_path) == ["a.mp4"]
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context(overwrite=True))
    sink.write(frame(0, Fraction(0)))
    assert (tmp_path / "a.mp4").read_text() == "old"
    sink.close()
    assert len(times(tmp_path / "a.mp4")) == 1


def test_hard_names(tmp_path):
    name = "a %d é 前庭 'q'" + ("" if os.name == "nt" else " x:y\\z") + ".mp4"
    write(tmp_path / name, VFR)
    assert names(tmp_path) == [name]
    assert len(times(tmp_path / name)) == 8


# -- the encoder


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"codec": "libopenh264"}, ["libopenh264", "libx264", "h264"]),
        ({"codec": "aac"}, ["aac", "audio"]),
        ({"preset": "fasst"}, ["libx264", "preset=fasst"]),
        ({"options": {"tunne": "film"}}, ["tunne", "'tune'"]),
        ({"codec": "mpeg4", "crf": 20}, ["mpeg4", "crf"]),
        ({"pix_fmt": "rgb24"}, ["rgb24", "yuv420p"]),
        ({"path": "a.webm"}, [".webm", "libx264"]),
        ({"path": "a.foo"}, [".foo", ".mp4"]),
        ({"path": "a"}, [".mp4"]),
        ({"path": "a.m3u8"}, [".m3u8", ".mp4"]),
        ({"path": "a.png"}, [".png"]),
        ({"path": "a.mkv", "faststart": True}, ["faststart", ".mp4"]),
    ],
)
def test_what_cannot_be_encoded_is_told_before_the_first_frame(parameters, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = Video(**{"path": "a.mp4", **parameters})
    with pytest.raises(ConfigError) as caught:
        sink.open(context())
    for word in words:
        assert word in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "parameters",
    [
        {"crf": 20, "bitrate": 1000},
        {"bitrate": "4X"},
        {"bitrate": -1},
        {"threads": 0},
        {"rotate_s": 0},
        {"audio": "aac"},
        {"times": "mine"},
        {"path": "{nr}.mp4"},
    ],
)
def test_parameters_that_cannot_be_right(parameters):
    with pytest.raises(ConfigError, match="video"):
        Video(**{"path": "a.mp4", **parameters})


def test_a_size_that_the_encoder_refuses(tmp_path):
    sink = Video(path=str(tmp_path / "a.mp4"))
    sink.open(context())
    with pytest.raises(SinkError, match="libx264 for 20000x2"):
        sink.write(frame(0, Fraction(0), image=flat(0, 20_000, 2)))
    sink.close()
    assert names(tmp_path) == []


def test_threads_and_options_reach_the_encoder(tmp_path):
    images = [noise(index) for index in range(25)]
    given = [Fraction(index, 25) for index in range(25)]
    write(tmp_path / "a.mp4", given, images=images, crf=40, threads=3, options={"bf": 0})
    said = (tmp_path / "a.mp4").read_bytes()  # x264 writes its settings into the stream
    for word in (b" threads=3 ", b" sliced_threads=0 ", b" crf=40.0 ", b" bframes=0 "):
        assert word in said
    write(tmp_path / "b.mp4", given, images=images, bitrate="200k", preset="ultrafast")
    assert b" bitrate=200 " in (tmp_path / "b.mp4").read_bytes()


def test_faststart_puts_the_index_first(tmp_path):
    for faststart in (False, True):
        path = tmp_path / f"{faststart}.mp4"
        write(path, VFR, faststart=faststart)
        data = path.read_bytes()
        assert (data.index(b"moov") < data.index(b"mdat")) is faststart
        assert times(path) == VFR


def test_any_layout_of_memory(tmp_path):
    wide = noise(3, 120, 64)
    images = [wide[:, 7:103], wide[::-1, 7:103], np.asfortranarray(wide[:, :96])]
    for image in images:
        image.flags.writeable = False
    write(tmp_path / "a.mkv", VFR[:3], images=images, codec="ffv1", pix_fmt="bgr0")
    with av.open(str(tmp_path / "a.mkv")) as container:
        for picture, image in zip(container.decode(video=0), images, strict=True):
            np.testing.assert_array_equal(picture.to_ndarray(format="rgb24"), image)
