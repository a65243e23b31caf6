"""Whatever fails, wherever: the first error comes out with its place, sinks are whole, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass

import pytest
from test_pipeline import Mean, balance

import framepipe
from framepipe.errors import FramepipeError, SinkError, SourceError, SourceNotFoundError, StageError
from framepipe.frame import Batch
from framepipe.pipeline import Pipeline
from framepipe.sink import Sink
from framepipe.stage import Flow, Stage
from framepipe.staging.direct import Direct
from framepipe.staging.pooled import Pooled
from framepipe.testing import FrameList, pattern_frames

pytestmark = pytest.mark.usefixtures("nothing_left")
DEVICES = ["cpu", "simulated"]


class Boom(Exception):
    """What goes wrong in these tests."""


@dataclass(kw_only=True)
class Failing(Stage):
    """Fails in one of its methods, at frame ``at``."""

    where: str
    at: int = 5

    reads = frozenset({"planes"})
    writes = frozenset({"meta"})

    def open(self, device) -> None:
        super().open(device)
        self._maybe("open")

    def plan(self, flow: Flow) -> Flow:
        self._maybe("plan")
        return flow

    def launch(self, batch: Batch) -> None:
        self._maybe("launch", batch)

    def collect(self, batch: Batch) -> None:
        self._maybe("collect", batch)

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, where: str, batch: Batch | None = None) -> None:
        if where == self.where and (batch is None or any(item.index == self.at for item in batch.items)):
            raise Boom(where)


@dataclass(kw_only=True)
class Recorder(Sink):
    """Notes what it gets and that it was closed; fails where told."""

    where: str = ""
    at: int = 5
    type_name = "recorder"

    def __post_init__(self) -> None:
        self.seen: list[int] = []
        self.closed = 0

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise Boom(where)

    def open(self, context) -> None:
        self._maybe("open")

    def write(self, frame) -> None:
        if frame.index == self.at:
            self._maybe("write")
        self.seen.append(frame.index)

    def end(self, source) -> None:
        self._maybe("end")

    def close(self) -> None:
        self.closed += 1
        self._maybe("close")


def failing_run(sources, stages, sink: Sink, error: type[BaseException], **options) -> tuple[Pipeline, BaseException]:
    pipeline = Pipeline(sources, stages, [sink], **options)
    with pytest.raises(error) as caught:
        pipeline.run()
    pipeline.close()
    if pipeline.report is not None:
        balance(pipeline.report)
        assert pipeline.report.exit == "failed" and pipeline.report.error
    return pipeline, caught.value


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_stage_fails_in_the_middle(clip, device, where, batch):
    sink = Recorder()
    pipeline, error = failing_run(
        [clip], [Failing(where=where)], sink, StageError, device=device, staging={"batch": batch}
    )
    assert "failing" in str(error) and "Boom" in str(error) and isinstance(error.__cause__, Boom)
    assert error.where["stage"] == "failing" and error.where["source"] == "a"
    assert error.where["index"] == (5 if batch == 1 else 4) and error.where["pts"] is not None
    assert sink.seen == list(range(5 if batch == 1 else 4)), "what came before the failure is delivered"
    assert sink.closed == 1
    assert pipeline.report.frames["failed"].get("failing", 0) >= 1 or where == "launch"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["open", "plan", "close"])
def test_a_stage_fails_at_its_ends(clip, device, where):
    sink = Recorder()
    failing_run([clip], [Failing(where=where)], sink, (StageError, Boom), device=device)
    assert sink.closed == (1 if where != "open" else 0)


@pytest.mark.parametrize("where", ["open", "write", "end", "close"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_sink_fails(clip, device, where):
    sink, other = Recorder(where=where), Recorder()
    pipeline = Pipeline([clip], [Mean()], [other, sink], device=device)
    with pytest.raises((SinkError, Boom)) as caught:
        pipeline.run()
    pipeline.close()
    assert other.closed == 1
    if where == "write":
        assert caught.value.where == {"sink": "recorder", "source": "a", "index": 5, "pts": caught.value.where["pts"]}
        assert pipeline.report.frames["failed"] == {"recorder": 1}
        assert other.seen == [0, 1, 2, 3, 4, 5]
        balance(pipeline.report)


def test_a_callback_fails(clip):
    def callback(frame):
        raise Boom("in the callback")

    with Pipeline([clip], [], [callback], device="cpu") as pipeline:
        with pytest.raises(SinkError, match="in the callback") as caught:
            pipeline.run()
    assert isinstance(caught.value.__cause__, Boom)


@pytest.mark.parametrize("device", DEVICES)
def test_a_filler_fails(clip, device, monkeypatch):
    def fill(self, frames, at, slot, spec):
        if slot.ticket >= 5:
            raise Boom("while filling")
        return original(self, frames, at, slot, spec)

    stager = Direct if device == "cpu" else Pooled
    original = stager.fill
    monkeypatch.setattr(stager, "fill", fill)
    failing_run([clip], [], Recorder(), Boom, device=device)


class Broken(FrameList):
    """A source whose own code fails after some frames, or at opening."""

    at = 3

    def open(self, stopping):
        if self.at < 0:
            raise Boom("at opening")
        stream = super().open(stopping)
        plain = stream.frames

        def frames():
            for number, frame in enumerate(plain()):
                if number == self.at:
                    raise Boom("while reading")
                yield frame

        stream.frames = frames
        return stream


def test_a_source_fails_beside_others(clip):
    source = Broken(name="broken", frames=pattern_frames(9))
    with Pipeline([source, clip], [], ["discard"], device="cpu") as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.exit == "incomplete"
    broken, good = report.sources
    assert broken["status"] == "failed" and "while reading" in broken["error"] and broken["delivered"] == 3
    assert good["status"] == "complete" and good["delivered"] == 60


def test_a_source_alone_fails_at_opening():
    source = Broken(name="broken", frames=pattern_frames(9))
    source.at = -1
    sink = Recorder()
    _, error = failing_run([source], [], sink, SourceError, device="cpu")
    assert "at opening" in str(error) and sink.closed == 1


@pytest.mark.parametrize("decode", ["auto", "linear", "segments", "frame"])
def test_a_file_that_is_not_there(tmp_path, decode):
    _, error = failing_run([tmp_path / "nope.mp4"], [], Recorder(), SourceNotFoundError, device="cpu", decode=decode)
    assert "nope.mp4" in str(error) and "no such file" in str(error)


def test_files_that_are_no_video(tmp_path, clip):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no video at all\n" * 60)
    for name, words in (("empty.mp4", "empty"), ("text.mp4", "no video")):
        _, error = failing_run([tmp_path / name], [], Recorder(), SourceError, device="cpu")
        assert name in str(error) and words in str(error)


def test_a_file_that_is_cut_off(clip, tmp_path):
    data = clip.read_bytes()
    cut = tmp_path / "cut.mp4"
    # libx264 into MP4: the index stands at the end, so move it to the front first.
    import av

    with av.open(str(clip)) as source, av.open(str(cut), "w", options={"movflags": "faststart"}) as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                out.mux(packet)
    data = cut.read_bytes()
    cut.write_bytes(data[: len(data) * 2 // 3])
    sink = Recorder(at=-1)
    with Pipeline([cut], [], [sink], device="cpu", decode="linear") as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.exit == "incomplete" and 20 < len(sink.seen) < 60
    assert report.sources[0]["status"] == "incomplete" and report.sources[0]["warnings"]


def test_damaged_packets_are_passed_over_and_counted(clip, tmp_path):
    data = bytearray(clip.read_bytes())
    at = data.index(b"mdat") + 3000
    data[at : at + 12] = b"\xff" * 12
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(data)
    with Pipeline([broken], [], ["discard"], device="cpu", decode="linear") as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.frames["delivered"] + report.frames["packet_errors"] >= 59


def test_close_from_inside_a_callback_says_what_to_do(clip):
    pipeline = Pipeline([clip], [], [lambda frame: pipeline.close()], device="cpu")
    with pytest.raises(FramepipeError, match=r"call stop\(\) there"):
        pipeline.run()
    pipeline.close()


def test_stop_from_inside_a_callback(clip):
    seen = []

    def callback(frame):
        seen.append(frame.index)
        if frame.index == 10:
            pipeline.stop()

    with Pipeline([clip], [], [callback], device="cpu") as pipeline:
        report = pipeline.run()
    balance(report)
    assert report.exit == "stopped" and seen[:11] == list(range(11)) and len(seen) <= 11 + 16 + 1


def test_two_errors_the_first_is_raised_and_the_second_noted(clip):
    pipeline = Pipeline([clip], [Failing(where="launch")], [Recorder(where="close")], device="cpu")
    with pytest.raises(StageError) as caught:
        pipeline.run()
    assert any("Boom: close" in note for note in caught.value.__notes__)
    pipeline.close()


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_while_iterating_comes_behind_what_was_before_it(clip, device):
    seen = []
    with pytest.raises(StageError), Pipeline([clip], [Failing(where="launch")], device=device) as pipeline:
        for frame in pipeline:
            seen.append(frame.index)
    assert seen == [0, 1, 2, 3, 4]


def test_the_queue_is_full_when_a_stage_fails(clip):
    """The consumer is slow, everything behind it is full: the error still comes, and close does not hang."""
    with (
        pytest.raises(StageError),
        framepipe.open(clip, device="cpu", stages=[Failing(where="launch", at=12)]) as frames,
    ):
        for frame in frames:
            if frame.index == 0:
                threading.Event().wait(0.05)
    gc.collect()
