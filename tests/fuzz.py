"""A seeded fuzzer: damaged files through pipelines, in child processes that may die or hang.

``python tests/fuzz.py 2000`` runs as many and prints what came of them; ``--first N`` begins at another seed. Each
number is a file: kind, damage and pipeline are drawn from it, so one that fails can be run again alone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import av

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from conftest import descriptors, make_clip, ours  # noqa: E402
from test_damage import remux  # noqa: E402
from test_pipeline import balance  # noqa: E402

from framepipe.decoding import GIVE_UP  # noqa: E402
from framepipe.errors import FramepipeError, SourceError  # noqa: E402
from framepipe.pipeline import Pipeline  # noqa: E402
from framepipe.sources.file import File  # noqa: E402

KINDS: dict[str, dict[str, Any]] = {
    "first.mp4": {"count": 40, "gop": 20, "bframes": 2},  # the index first
    "last.mp4": {"count": 40, "gop": 12},
    "one.mp4": {"count": 40, "gop": 250, "bframes": 2},
    "a.mkv": {"count": 40, "gop": 12, "bframes": 2},
    "a.ts": {"count": 40, "gop": 12, "container": "mpegts", "bframes": 2},
    "m2.ts": {"count": 30, "gop": 12, "codec": "mpeg2video", "container": "mpegts"},
    "m4.avi": {"count": 30, "gop": 12, "codec": "mpeg4"},
    "mj.avi": {"count": 20, "codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "v9.webm": {"count": 24, "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "f.mkv": {"count": 12, "codec": "ffv1"},
    "a.gif": {"count": 12, "codec": "gif", "pix_fmt": "rgb8"},
    "a.264": {"count": 40, "gop": 16, "container": "h264", "bframes": 2},
    "nob.264": {"count": 40, "gop": 250, "container": "h264"},
}
FILE_S = 60.0
"""Far more than any file takes."""


def make_files(folder: Path) -> None:
    """The whole files of which all others are made."""
    for name, options in KINDS.items():
        make_clip(folder / name, width=64, height=48, **options)
    remux(folder / "first.mp4", folder / "copy.mp4", movflags="faststart").replace(folder / "first.mp4")
    for name in ("a.mkv", "f.mkv", "v9.webm"):  # they have names of their own, another one each time
        with av.open(str(folder / name)) as source:
            data = remuxed(source, name, list)
        (folder / name).write_bytes(data)


# -- damage ------------------------------------------------------------------------------------------------------------


def remuxed(source: Any, name: str, change: Callable[[list[Any]], list[Any]]) -> bytes:
    """The packets of an opened file, as ``change`` leaves their list, in a container of the same kind."""
    container = {".ts": "mpegts", ".264": "h264", ".mkv": "matroska"}.get(Path(name).suffix, Path(name).suffix[1:])
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options={"fflags": "+bitexact"}) as out:
        stream = source.streams.video[0]
        copy = out.add_stream_from_template(stream)
        packets = [packet for packet in source.demux(stream) if packet.size]
        _stamp(packets)
        for packet in change(packets):
            packet.stream = copy
            with contextlib.suppress(av.FFmpegError):  # muxers refuse some of what was changed
                out.mux(packet)
    return buffer.getvalue()


def _stamp(packets: list[Any]) -> None:
    """Give each a pts and a dts: a raw stream has neither, Matroska only the first."""
    for number, packet in enumerate(packets):
        if packet.pts is None:
            packet.pts, packet.time_base = number, Fraction(1, 25)
    if any(packet.dts is None for packet in packets):
        times = sorted(packet.pts for packet in packets)
        delay = max(time - packet.pts for time, packet in zip(times, packets, strict=True))
        for time, packet in zip(times, packets, strict=True):
            packet.dts = time - delay


def _with_payloads(packets: list[Any], payloads: list[Any]) -> list[Any]:
    """Packets with the data of others and their own times, which muxers insist on."""
    made = []
    for packet, payload in zip(packets, payloads, strict=False):
        new = av.Packet(bytes(payload))
        new.pts, new.dts, new.time_base = packet.pts, packet.dts, packet.time_base
        new.is_keyframe = packet.is_keyframe
        made.append(new)
    return made


def swap_packets(r: random.Random, packets: list[Any]) -> list[Any]:
    payloads = list(packets)
    for _ in range(r.choice((1, 2, 6))):
        a, b = r.randrange(len(payloads)), r.randrange(len(payloads))
        payloads[a], payloads[b] = payloads[b], payloads[a]
    return _with_payloads(packets, payloads)


def remove_packets(r: random.Random, packets: list[Any]) -> list[Any]:
    gone = {r.randrange(len(packets)) for _ in range(r.choice((1, 3, 10)))}
    return [packet for number, packet in enumerate(packets) if number not in gone or len(packets) < 3]


def repeat_packets(r: random.Random, packets: list[Any]) -> list[Any]:
    payloads = list(packets)
    for _ in range(r.choice((1, 3))):
        at = r.randrange(len(payloads))
        payloads.insert(at, payloads[at])
    return _with_payloads(packets, payloads)


def spoil_packets(r: random.Random, packets: list[Any]) -> list[Any]:
    """Damage inside packets alone: the container is whole."""
    payloads = [bytearray(bytes(packet)) for packet in packets]
    for _ in range(r.choice((1, 4, 20))):
        payload = r.choice(payloads)
        payload[r.randrange(len(payload))] = r.randrange(256)
    short = r.choice(payloads)
    if r.random() < 0.3:
        del short[r.randrange(1, len(short) + 1) :]
    return _with_payloads(packets, payloads)


PACKETS = {"swap": swap_packets, "remove": remove_packets, "repeat": repeat_packets, "spoil": spoil_packets}


def spoil_bytes(r: random.Random, data: bytes, how: str) -> bytes:
    size = len(data)
    if how == "cut":
        return data[: r.randrange(size)]
    spoiled = bytearray(data)
    unit = 188 if data[:1] == b"G" and size % 188 == 0 else r.choice((1, 16, 100))
    if how in ("burst", "block", "double"):
        at = r.randrange(size) // unit * unit
        length = unit * r.choice((1, 2, 10))
        if how == "burst":
            spoiled[at : at + length] = r.randbytes(len(spoiled[at : at + length]))
        elif how == "block":
            del spoiled[at : at + length]
        else:
            spoiled[at:at] = spoiled[at : at + length]
        return bytes(spoiled)
    for _ in range(r.choice((1, 3, 10, 40))):
        at = r.randrange(min(1500, size) if how == "head" else size)
        spoiled[at] = spoiled[at] ^ (1 << r.randrange(8)) if r.random() < 0.5 else r.randrange(256)
    return bytes(spoiled)


HOWS = ("cut", "flip", "head", "burst", "block", "double", *PACKETS)


def damaged(folder: Path, r: random.Random) -> tuple[str, str, bytes]:
    """(kind, what was done, bytes) of one file; in one of five twice."""
    name, how = r.choice(list(KINDS)), r.choice(HOWS)
    data = (folder / name).read_bytes()
    if how in PACKETS:
        with av.open(str(folder / name)) as source:
            data = remuxed(source, name, partial(PACKETS[how], r))
    else:
        data = spoil_bytes(r, data, how)
    if data and r.random() < 0.2:
        second = r.choice(("cut", "flip", "burst"))
        how, data = f"{how}+{second}", spoil_bytes(r, data, second)
    return name, how, data


# -- a child -----------------------------------------------------------------------------------------------------------


def _to_the_end(container: Any, stream: Any) -> Iterator[Any]:
    """The packets, and None where they end in an error: what the decoder still holds is whole."""
    with contextlib.suppress(av.FFmpegError, OSError):
        yield from container.demux(stream)
    yield None


def count_plainly(path: Path) -> int | None:
    """How many pictures PyAV alone finds with one thread, damaged packets passed over; None where it opens nothing."""
    count = in_row = 0
    try:
        with av.open(str(path), metadata_errors="replace") if int(av.__version__[:2]) < 19 else av.open(str(path)) as c:
            if not c.streams.video:
                return None
            stream = c.streams.video[0]
            if stream.codec_context is None:
                return None
            stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
            for packet in _to_the_end(c, stream):  # of what comes behind the flush packet PyAV may read beyond its list
                try:
                    count += len(stream.codec_context.decode(packet if packet is not None and packet.size else None))
                    in_row = 0
                except (av.FFmpegError, ValueError):
                    in_row += 1
                if in_row > GIVE_UP or packet is None or not packet.size:
                    break
    except (av.FFmpegError, OSError, ValueError):
        return None
    return count


def run_file(path: Path, r: random.Random) -> dict[str, Any]:
    """Run over one file and check what is left; raises AssertionError."""
    before = descriptors()
    seen: list[int] = []
    decode = r.choice(("auto", "linear", "segments", "frame"))
    pipeline = Pipeline(
        [File(uri=str(path), decode=decode)],
        r.choice(([], ["rgb"])),
        [lambda frame: seen.append(frame.index)],
        device=r.choice(("cpu", "simulated")),
        threads=r.randint(1, 4),
        staging={"batch": r.choice((1, 4))},
    )
    error: FramepipeError | None = None
    with pipeline:
        try:
            pipeline.run()
        except FramepipeError as failed:
            error = failed
    report = pipeline.report
    assert report is not None
    balance(report)
    assert report.exit in ("complete", "incomplete", "failed")
    assert (error is None) == (report.exit != "failed")
    assert seen == list(range(report.frames["delivered"]))
    if error is not None:
        assert isinstance(error, SourceError) or "no picture could be decoded" in str(error), repr(error)
        assert report.error and not seen
    assert not ours(), ours()
    assert descriptors() <= before
    json.dumps(report.to_dict(), allow_nan=False)
    source = report.sources[0]
    return {
        "exit": report.exit,
        "decoded": report.frames["decoded"],
        "plain": count_plainly(path),
        "decode": source["decode"],
        "asked": decode,
        "error": report.error,
        "packet_errors": report.frames["packet_errors"],
    }


def child(folder: Path, first: int, count: int) -> None:
    """Run ``count`` files; a line of JSON before and behind each."""
    faulthandler.enable()
    for number in range(first, first + count):
        r = random.Random(number)
        name, how, data = damaged(folder, r)
        told: dict[str, Any] = {"number": number, "name": name, "how": how}
        print(json.dumps({**told, "began": True}), flush=True)
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / f"{number}{Path(name).suffix}"
            path.write_bytes(data)
            try:
                told.update(run_file(path, r))
            except BaseException as error:
                told["wrong"] = f"{type(error).__name__}: {error}"
        print(json.dumps(told), flush=True)


# -- the parent --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of a series of files."""

    results: list[dict[str, Any]] = field(default_factory=list)
    signals: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def exits(self) -> Counter[str]:
        return Counter(result["exit"] for result in self.results)

    @property
    def other_counts(self) -> list[dict[str, Any]]:
        """Files of which PyAV alone decodes another number of pictures.

        Of damaged ones more may come where there are several decoders: nothing before has spoiled them.
        """
        return [
            result
            for result in self.results
            if (plain := result["plain"]) is not None
            and plain != result["decoded"]
            and not (result["decode"] != "linear" and result["packet_errors"] and result["decoded"] > plain)
        ]


def fuzz(first: int, count: int, folder: Path, batch: int = 100) -> Outcome:
    """Run ``count`` files from number ``first`` on, in children of ``batch`` files each."""
    outcome = Outcome()
    number, end = first, first + count
    while number < end:
        number = _batch(number, min(batch, end - number), folder, outcome)
    return outcome


def _batch(first: int, count: int, folder: Path, outcome: Outcome) -> int:
    """One child; returns the number of the first file that it did not do."""
    command = [sys.executable, __file__, "--child", str(folder), "--first", str(first), str(count)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8") as process,
    ):
        current = f"{first}: before it began"
        done = first
        for told in _lines(process):
            if told is None:
                outcome.hangs.append(current)
                process.kill()
                return done + 1
            current = f"{told['number']}: {told['how']} of {told['name']}"
            done = told["number"]
            if "began" in told:
                continue
            done += 1
            if "wrong" in told:
                outcome.wrong.append(f"{current}: {told['wrong']}")
            else:
                outcome.results.append(told)
        code = process.wait()
        if code:
            log.seek(0)
            words = log.read().decode(errors="replace")[-2000:]
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            outcome.signals.append(f"{current}: {name}\n{words}")
            return done + 1 if done < first + count else done
    return first + count


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
    """What the child says, line by line; None where it says nothing for too long."""
    lines: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    while True:
        try:
            line = lines.get(timeout=FILE_S)
        except Empty:
            yield None
            return
        if line is None:
            reader.join()
            return
        yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.first, arguments.count)
        return 0
    with tempfile.TemporaryDirectory() as place:
        make_files(Path(place))
        outcome = fuzz(arguments.first, arguments.count, Path(place))
    print(f"{arguments.count} files: {dict(outcome.exits)}")
    for what in ("signals", "hangs", "wrong"):
        found = getattr(outcome, what)
        print(f"{what}: {len(found)}")
        for text in found:
            print(f"  {text}")
    print(f"another count than PyAV alone: {len(outcome.other_counts)}")
    for result in outcome.other_counts:
        print(f"  {json.dumps(result)}")
    return int(bool(outcome.signals or outcome.hangs or outcome.wrong))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    sys.exit(main())
