"""Which stream is taken, what changes inside one, and names and addresses (rows B49 to B61)."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from case_inputs import (
    GREY,
    INTERLACED_ENCODING,
    a_module_leaves_nothing_behind,
    encode,
    numbered,
    planes_of,
    png,
    see,
    solid,
    sound,
    tone,
    with_cover,
)

import framepipe
from framepipe import cli
from framepipe.errors import FramepipeError, SourceError
from framepipe.pipeline import Pipeline
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.video import Video
from framepipe.sources.file import File
from framepipe.stages.motion import Motion
from framepipe.stages.resize import Resize
from framepipe.stages.rgb import Rgb
from framepipe.stages.tensor import Tensor
from framepipe.streams import PixelAspects
from framepipe.testing import FrameList

__all__ = ["a_module_leaves_nothing_behind"]
DEVICES = pytest.mark.parametrize("device", ["cpu", "simulated"])
DECODE = pytest.mark.parametrize("decode", ["linear", "segments", "frame"])


# -- B49, B50: covers and sound ----------------------------------------------------------------------------------------


@DECODE
def test_b49_a_cover_is_not_the_video(tmp_path, decode):
    clip = with_cover(encode(tmp_path / "clip.mp4", numbered(10)))
    with av.open(str(clip)) as container:
        assert len(container.streams.video) == 2  # it is such a file
    seen = see(clip, decode=decode)
    assert seen.numbers == list(range(10))
    assert (seen.source["width"], seen.source["height"]) == (96, 64)


def test_b49_a_song_with_a_cover_has_no_video(tmp_path):
    song = with_cover(sound(tmp_path / "song.m4a"))
    with pytest.raises(SourceError, match=r"song\.m4a: has no video stream; found .*video png \(cover picture\)"):
        see(song)


def test_b49_unless_it_is_asked_for(tmp_path):
    song = with_cover(sound(tmp_path / "song.m4a"))
    seen = see(song, stream=1)
    assert seen.colours == [(0, 0, 255)] and seen.pictures[0].shape == (24, 32, 3)
    assert all(frame.time_s == 0 for frame in seen.frames)


def test_b49_a_cover_attached_to_matroska(tmp_path):
    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as out:
        out.add_attachment("cover.png", "image/png", png(32, 24))
        video = out.add_stream("libx264", rate=25, options={"threads": "1"})
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        for i, frame in enumerate(numbered(5)):
            frame.pts, frame.time_base = i, Fraction(1, 25)
            out.mux(video.encode(frame))
        out.mux(video.encode())
    with av.open(str(path)) as container:
        assert len(container.streams.video) == 2  # it is such a file
    assert see(path).numbers == list(range(5))


def test_b49_an_mp3_with_a_cover(tmp_path):
    path = tmp_path / "song.mp3"
    with av.open(str(path), "w") as out:
        audio = out.add_stream("mp3", rate=44100, layout="mono")
        cover = out.add_stream("mjpeg", rate=25)
        cover.width, cover.height, cover.pix_fmt = 32, 24, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        still = solid((76, 85, 255), size=(32, 24), pix_fmt="yuvj420p")
        still.pts, still.time_base = 0, Fraction(1, 25)
        out.mux([*cover.encode(still), *cover.encode()])
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1152), np.float32), "fltp", "mono")
        samples.sample_rate, samples.pts = 44100, 0
        out.mux([*audio.encode(samples), *audio.encode()])
    with pytest.raises(SourceError, match=r"no video stream; found .*\(cover picture\)"):
        see(path)


@pytest.mark.parametrize("suffix", [".m4a", ".mka", ".mp4"])
def test_b50_sound_alone(tmp_path, suffix):
    song = sound(tmp_path / f"song{suffix}")
    with pytest.raises(SourceError, match=rf"song{suffix}: has no video stream; found 0: audio aac"):
        see(song)


# -- B51, B52: several streams -----------------------------------------------------------------------------------------


def _several(path, sizes, *, audio_first=False, first_pts=0):
    """A video stream a size, each of twenty numbered pictures beside the others, and sound if it is to come first."""
    with av.open(str(path), "w") as out:
        packets = tone(out) if audio_first else []
        streams = []
        for size in sizes:
            options = {"threads": "1", "preset": "ultrafast", "qp": "10", "x264-params": "scenecut=0"}
            stream = out.add_stream("libx264", rate=25, options=options)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            stream.codec_context.gop_size, stream.codec_context.max_b_frames = 5, 0
            stream.codec_context.time_base = Fraction(1, 1000)
            streams.append((stream, size))
        for i in range(20):
            for number, (stream, size) in enumerate(streams):
                frame = solid(GREY, 100 * number + i, size=size)
                frame.pts, frame.time_base = first_pts + 40 * i, Fraction(1, 1000)
                packets += stream.encode(frame)
        for stream, _ in streams:
            packets += stream.encode()
        for packet in sorted(packets, key=lambda p: p.dts * p.time_base):
            out.mux(packet)
    return path


@DECODE
@pytest.mark.parametrize("suffix", [".mkv", ".mp4", ".ts"])
def test_b51_the_first_video_or_the_one_that_is_asked_for(tmp_path, suffix, decode):
    clip = _several(tmp_path / f"two{suffix}", [(64, 48), (128, 96)])
    for options, first, shape in [({}, 0, (48, 64)), ({"stream": 0}, 0, (48, 64)), ({"stream": 1}, 100, (96, 128))]:
        seen = see(clip, decode=decode, **options)
        assert seen.numbers == list(range(first, first + 20))
        assert {picture.shape[:2] for picture in seen.pictures} == {shape}


def test_b51_an_index_that_is_not_there_lists_those_that_are(tmp_path):
    clip = _several(tmp_path / "two.mkv", [(64, 48), (128, 96)])
    with pytest.raises(SourceError, match=r"has no video stream 7; its video streams are 0, 1"):
        see(clip, stream=7)
    with_sound = _several(tmp_path / "sound.mkv", [(64, 48), (128, 96)], audio_first=True)
    with pytest.raises(SourceError, match=r"has no video stream 0; its video streams are 1, 2 \(found 0: audio aac"):
        see(with_sound, stream=0)


@DECODE
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".ts"])
def test_b52_the_picture_begins_after_the_sound(tmp_path, suffix, decode):
    clip = _several(tmp_path / f"late{suffix}", [(96, 64)], audio_first=True, first_pts=500)
    seen = see(clip, decode=decode)
    # A transport stream begins later than 0 as a whole, and sound before its own first packet by what it must decode.
    with av.open(str(clip)) as container:
        sound_s = next(packet.pts * packet.time_base for packet in container.demux(audio=0))
    begins = float(sound_s) if suffix == ".ts" else 0.0
    assert seen.times[0] == pytest.approx(begins + 0.5, abs=0.05 if suffix == ".ts" else 1e-6)
    assert [round(time - seen.times[0], 6) for time in seen.times] == [round(i / 25, 6) for i in range(20)]
    assert seen.numbers == list(range(20))


# -- B53: what changes in the middle -----------------------------------------------------------------------------------


def _glued(tmp_path, sizes, pix_fmts=None, count=6, codec="libx264"):
    """Transport streams of these sizes behind one another, their time stamps going on."""
    parts = []
    for number, size in enumerate(sizes):
        frames = numbered(count, size=size, first=count * number, pix_fmt=(pix_fmts or ["yuv420p"] * 9)[number])
        part = encode(
            tmp_path / f"{number}.ts", frames, codec, pts=range(count * number, count * number + count),
            container_options={"max_delay": "0"},
        )  # fmt: skip
        parts.append(part.read_bytes())
    clip = tmp_path / "all.ts"
    clip.write_bytes(b"".join(parts))
    return clip


SIZES = [(64, 48), (128, 96), (64, 48)]


@DEVICES
@DECODE
@pytest.mark.parametrize(("codec", "batch"), [("libx264", 1), ("libx264", 4), ("mpeg2video", 4), ("mpeg1video", 1),
                                              ("mpeg4", 1), ("libx265", 4)])  # fmt: skip
def test_b53_a_size_that_changes(tmp_path, device, decode, codec, batch):
    seen = see(_glued(tmp_path, SIZES, codec=codec), device=device, decode=decode, batch=batch)
    assert seen.numbers == list(range(18))
    assert [picture.shape[1::-1] for picture in seen.pictures] == [size for size in SIZES for _ in range(6)]
    assert seen.counters["changed"] == 2
    assert seen.warns("2 pictures of another size")
    assert seen.report.memory["replans"] in (0, 1)  # slots grow once and fit from then on


@DEVICES
@DECODE
@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_b53_depth_and_format_change_too(tmp_path, device, decode, codec):
    pix_fmts = ["yuv420p", "yuv420p10le", "yuv422p", "yuv420p"]
    seen = see(_glued(tmp_path, [(64, 48)] * 4, pix_fmts, codec=codec), device=device, decode=decode)
    assert seen.numbers == list(range(24))
    assert [frame.spec.pix_fmt for frame in seen.frames] == [name for name in pix_fmts for _ in range(6)]
    assert all(abs(code - 128) <= 1 for colour in seen.colours for code in colour)
    assert seen.counters == {"changed": 3}


ASPECTS = [Fraction(12, 11), Fraction(16, 11), Fraction(12, 11)]


def _reshaped(tmp_path, codec, counts=(12, 12, 12), bframes=2, suffix=".ts", **options):
    """Pictures of one size whose pixels have one shape after the other."""
    parts, first = [], 0
    for number, (aspect, count) in enumerate(zip(ASPECTS, counts, strict=False)):
        frames = numbered(count, size=(72, 56), first=first)
        times = range(2 * first, 2 * first + count)  # a gap between parts: some encoders begin a picture later
        first += count
        part = encode(
            tmp_path / f"{number}{suffix}", frames, codec, pts=times, aspect=aspect, bframes=bframes, gop=6,
            container_options={"max_delay": "0"} if suffix == ".ts" else None, **options,
        )  # fmt: skip
        parts.append(part.read_bytes())
    clip = tmp_path / f"all{suffix}"
    clip.write_bytes(b"".join(parts))
    return clip


def _aspects(seen):
    return [Fraction(*frame.spec.sample_aspect) for frame in seen.frames]


@pytest.mark.parametrize("codec", ["mpeg2video", "mpeg1video"])
def test_b53_the_shape_of_pixels_changes(tmp_path, codec):
    """As television does between 4:3 and 16:9: the decoder begins anew and must not lose what it holds."""
    seen = see(_reshaped(tmp_path, codec))
    assert seen.numbers == list(range(36))
    first, second, third = (set(_aspects(seen)[at : at + 12]) for at in (0, 12, 24))
    assert first == third != second and len(first) == len(second) == 1


@DEVICES
@DECODE
@pytest.mark.parametrize("bframes", [0, 2])
@pytest.mark.parametrize("codec", ["libx264", "libx265", "mpeg4"])
def test_b53_the_shape_of_pixels_is_that_of_each_picture(tmp_path, device, decode, codec, bframes):
    clip = _reshaped(tmp_path, codec, bframes=bframes)
    stages = [Tensor(height=28, square_pixels=True), Rgb(accuracy="exact"), Resize(square_pixels=True)]
    seen = see(clip, device=device, decode=decode, stages=stages, batch=5)
    right = [aspect for aspect in ASPECTS for _ in range(12)]
    assert _aspects(seen) == right
    assert [picture.shape[:2] for picture in seen.pictures] == [(56, round(72 * aspect)) for aspect in right]
    assert [tensors["tensor"].shape[1:] for tensors in seen.tensors] == [(28, round(36 * aspect)) for aspect in right]
    assert seen.counters["changed"] == 2
    assert seen.warns("2 pictures of another size, shape of pixels")
    assert Fraction(*seen.source["sample_aspect"]) == ASPECTS[0]


@DECODE
@pytest.mark.parametrize(
    ("codec", "counts"),
    [
        (codec, counts)
        for codec in ("libx264", "libx265", "mpeg4", "mpeg2video")
        for counts in ((9, 1), (12, 1), (8, 4, 1))
    ]
    + [("libx264", (1, 1, 8)), ("mpeg4", (1, 1, 8))],  # FFmpeg looks beyond these when it opens the file
)
def test_b53_the_shape_of_pixels_changes_near_an_end(tmp_path, codec, decode, counts):
    """Frame threads give out the last pictures together, and what the decoder says then is true of the last alone."""
    seen = see(_reshaped(tmp_path, codec, counts), decode=decode)
    assert seen.numbers == list(range(sum(counts)))
    found = _aspects(seen)
    assert found[0] != found[counts[0]]
    right = [found[0], found[counts[0]], found[0]]
    assert found == [aspect for aspect, count in zip(right, counts, strict=False) for _ in range(count)]


@DECODE
def test_b53_the_shape_of_pixels_changes_while_deinterlacing(tmp_path, decode):
    """The filter holds one picture back, which has the shape that it came with."""
    options = {"x264-params": "threads=1:scenecut=0:tff=1"}
    clip = _reshaped(tmp_path, "libx264", bframes=0, options=options, flags=INTERLACED_ENCODING)
    seen = see(clip, decode=decode, deinterlace=True)
    assert seen.numbers == list(range(36)) and seen.counters == {"deinterlaced": 36, "changed": 2}
    assert _aspects(seen) == [aspect for aspect in ASPECTS for _ in range(12)]


@DECODE
@pytest.mark.parametrize(("codec", "container"), [("libx264", "h264"), ("libx265", "hevc")])
@pytest.mark.parametrize(("counts", "bframes"), [((12, 12, 12), 2), ((1, 12, 12), 2), ((1, 8, 8), 0), ((12, 8, 1), 0)])
def test_b53_the_shape_of_pixels_changes_without_time_stamps(tmp_path, decode, codec, container, counts, bframes):
    clip = _reshaped(tmp_path, codec, counts, bframes, suffix=f".{container}", container=container)
    right = [aspect for aspect, count in zip(ASPECTS, counts, strict=True) for _ in range(count)]
    assert _aspects(see(clip, decode=decode)) == right


@DECODE
def test_b53_the_shape_and_the_size_change_together(tmp_path, decode):
    muxed = {"max_delay": "0"}
    wide = encode(tmp_path / "a.ts", numbered(8, size=(72, 56)), aspect=Fraction(16, 11), container_options=muxed)
    tall = encode(tmp_path / "b.ts", numbered(8, size=(64, 96)), pts=range(8, 16), container_options=muxed)
    clip = tmp_path / "all.ts"
    clip.write_bytes(wide.read_bytes() + tall.read_bytes())
    seen = see(clip, decode=decode)
    assert _aspects(seen) == [Fraction(16, 11)] * 8 + [Fraction(1)] * 8 and seen.counters["changed"] == 1


def test_b53_a_video_of_pixels_that_change_has_a_part_for_each(tmp_path):
    clip, sink = _reshaped(tmp_path, "libx264", (5, 6, 7)), Video(path=str(tmp_path / "out.mp4"))
    with Pipeline([str(clip)], [], [sink], device="cpu") as pipeline:
        report = pipeline.run()
    assert any("72x56 of pixels 12:11 to 72x56 of pixels 16:11" in warning for warning in report.warnings)
    found = []
    for path in next(iter(report.sinks.values()))["paths"]:
        seen = see(path)
        found.append((_aspects(seen)[0], len(seen.frames)))
    assert found == [(ASPECTS[0], 5), (ASPECTS[1], 6), (ASPECTS[2], 7)]


def test_b53_what_the_container_says_of_the_shape_stays(tmp_path):
    """Where it is not what the codec says."""
    aspect = PixelAspects(SimpleNamespace(sample_aspect=(4, 3), coded_aspect=None))
    frame = SimpleNamespace(key_frame=True, pts=0)
    aspect.decoded(SimpleNamespace(sample_aspect_ratio=Fraction(2)), None)
    assert aspect.of(frame) == (4, 3)


@pytest.mark.parametrize("batch", [1, 4])
@DEVICES
def test_b53_a_source_may_say_another_shape_of_each_picture(device, batch):
    """Moving pictures go on before the background that is known: only the shape of pixels is another."""
    frames = []
    for i in range(24):
        frame = solid((100, 128, 128), size=(160, 96))
        if i >= 12:
            dict(planes_of(frame))["Y"][32:64, 40:72] = 220
        frame.pts, frame.time_base = i, Fraction(1, 25)
        frames.append(frame)
    said = [(1, 1)] * 12 + [(16, 11)] * 6 + [(1, 1)] * 6

    @dataclass(kw_only=True)
    class Said(FrameList):
        def open(self, stopping):
            stream = super().open(stopping)
            given = stream.frames

            def shaped():
                for frame, aspect in zip(given(), said, strict=True):
                    stream.sample_aspect = aspect
                    yield frame

            stream.frames = shaped
            return stream

    seen = see(Said(frames=frames), device=device, batch=batch, stages=[Motion(warmup=8), Rgb(accuracy="exact")])
    assert [frame.spec.sample_aspect for frame in seen.frames] == said
    assert [len(frame.meta["motion"]) for frame in seen.frames] == [0] * 12 + [1] * 12
    assert seen.counters["changed"] == 2


def test_b53_resized_to_one_size(tmp_path):
    stages = [Rgb(accuracy="exact"), Resize(width=64, height=48)]
    for device in ("cpu", "simulated"):
        seen = see(_glued(tmp_path, SIZES), stages=stages, device=device, batch=3)
        assert {picture.shape for picture in seen.pictures} == {(48, 64, 3)} and len(seen.pictures) == 18


@DEVICES
@pytest.mark.parametrize("codec", ["mjpeg", "libvpx-vp9"])
def test_b53_sizes_that_change_with_every_picture(tmp_path, device, codec):
    """No header says so before: slots are made for each picture as it comes."""
    sizes = [(64 + 16 * (i * 7 % 5), 48 + 16 * (i * 3 % 4)) for i in range(12)]
    frames = [solid((200, 100, 160), i, size=size, pix_fmt="yuvj420p") for i, size in enumerate(sizes)]
    for i, frame in enumerate(frames):
        frame.pts, frame.time_base = i, Fraction(1, 25)
    if codec == "mjpeg":
        path = tmp_path / "clip.mjpeg"
        path.write_bytes(b"".join(_jpeg(frame, tmp_path / "one.mjpeg") for frame in frames))
        seen = see(path, device=device)
    else:
        seen = see(FrameList(frames=frames), device=device, batch=3)
    assert seen.numbers == list(range(12))
    assert [picture.shape[1::-1] for picture in seen.pictures] == sizes


def _jpeg(frame, path):
    return encode(path, [frame], "mjpeg", container="mjpeg").read_bytes()


# -- B59: names --------------------------------------------------------------------------------------------------------

NAMES = [
    "with space.mp4", "naïve 日本 видео.mp4", "100%d done.mp4", "%04d.mp4", "-dash.mp4", "a:b.mp4", "quote's & (1).mp4",
    "emoji🎥.mp4", "[1].mp4", "what?.mp4", "star*.mp4", "#1.mp4", "a;b.mp4", 'say "hi".mp4', "~home.mp4", "$HOME.mp4",
    "{source}.mp4", "file:x.mp4", "trailing .mp4", "two  spaces.mp4", "e\u0301.mp4", "a+b@c.mp4", "tab\there.mp4",
]  # fmt: skip


def _made(name, data):
    """Write a file of that name in the working folder; False where the system takes it for something else."""
    try:
        Path(name).write_bytes(data)
    except OSError:
        return False
    return name in os.listdir()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("absolute", [True, False])
def test_b59_hard_names(tmp_path, monkeypatch, name, absolute):
    monkeypatch.chdir(tmp_path)
    data = encode(tmp_path / "plain.mp4", numbered(5)).read_bytes()
    if not _made(name, data):
        pytest.skip("this system has no such names")
    seen = see(tmp_path / name if absolute else name)
    assert seen.numbers == list(range(5))
    assert seen.source["name"] == Path(name).stem
    with framepipe.open(tmp_path / name if absolute else name, device="cpu") as frames:
        assert len(list(frames)) == 5


def test_b59_hard_names_side_by_side_into_outputs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = encode(tmp_path / "plain.mp4", numbered(5)).read_bytes()
    made = [name for name in NAMES if _made(name, data)]
    sink = Jsonl(path=Path("out/{source}.jsonl"))
    with Pipeline([str(tmp_path / name) for name in made], [], [sink], device="cpu") as pipeline:
        report = pipeline.run()
    assert report.exit == "complete" and report.frames["delivered"] == 5 * len(made)
    assert len(list(Path("out").iterdir())) == len(made)
    for path in Path("out").iterdir():
        assert len(path.read_text(encoding="utf-8").splitlines()) == 5


@pytest.mark.parametrize("name", ["日本 1.png", "a%d.png", "[x].png"])
def test_b59_stills_too(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(png(64, 48, (10, 200, 30)))
    assert see(path).colours == [(10, 200, 30)]


# -- B61: secrets ------------------------------------------------------------------------------------------------------

SECRET = "s3cr3t-Pw"
ADDRESSES = [
    f"rtsp://cam_user:{SECRET}@127.0.0.1:{{port}}/live",
    "rtsp://cam_user:s3cr3t%2DPw@127.0.0.1:{port}/live",
    f"http://127.0.0.1:{{port}}/a.m3u8?token={SECRET}",
    f"http://cam_user:{SECRET}@127.0.0.1:{{port}}/a.mp4",
    f"srt://127.0.0.1:{{port}}?passphrase={SECRET}",
    f"rtmp://127.0.0.1:{{port}}/live/x?key={SECRET}",
]


@pytest.fixture(scope="module")
def closed_port():
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _told(error, seen=None):
    """Everything that an error and what it came from say, also in attributes."""
    seen = set() if seen is None else seen
    if error is None or id(error) in seen:
        return ""
    seen.add(id(error))
    parts = [str(error), repr(error), repr(error.args), repr(getattr(error, "__notes__", ""))]
    parts += [repr(getattr(error, name, "")) for name in ("filename", "filename2", "strerror", "log", "where")]
    return "".join(parts) + _told(error.__cause__, seen) + _told(error.__context__, seen)


def _is_clean(text):
    return SECRET not in text and "s3cr3t%2DPw" not in text


@pytest.mark.parametrize("address", ADDRESSES)
def test_b61_no_secret_in_errors_and_reports(tmp_path, closed_port, address, caplog, capfd):
    good = encode(tmp_path / "good.mp4", numbered(3))
    source = File(uri=address.format(port=closed_port), timeout_s=2.0)
    sink = Jsonl(path=tmp_path / "a.jsonl")
    with Pipeline([source, str(good)], [], [sink], device="cpu") as pipeline:
        report = pipeline.run()
    assert report.exit == "incomplete" and report.frames["delivered"] == 3
    assert report.sources[0]["status"] == "failed" and "127.0.0.1" in report.sources[0]["uri"]
    assert _is_clean(json.dumps(report.to_dict()))
    assert _is_clean((tmp_path / "a.jsonl").read_text(encoding="utf-8"))
    assert _is_clean(repr(pipeline)) and _is_clean(caplog.text) and all(map(_is_clean, capfd.readouterr()))
    with Pipeline([source], [], ["discard"], device="cpu") as alone, pytest.raises(FramepipeError) as raised:
        alone.run()
    assert _is_clean(_told(raised.value))


@pytest.mark.parametrize("debug", [(), ("--debug",)])
def test_b61_no_secret_from_the_command_line(tmp_path, closed_port, monkeypatch, capfd, debug):
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("version: 1\nsources: ['${CAM}']\nsinks: [discard]\n", encoding="utf-8")
    monkeypatch.setenv("CAM", ADDRESSES[0].format(port=closed_port))
    assert cli.main(["run", "p.yaml", "--device", "cpu", "--report", "r.json", *debug]) == 1
    out, err = capfd.readouterr()
    assert "127.0.0.1" in err and _is_clean(out) and _is_clean(err)
    if os.path.exists("r.json"):
        assert _is_clean(Path("r.json").read_text(encoding="utf-8"))
