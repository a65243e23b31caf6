"""Inputs by address, pipes and standard input: they answer late, stall or never come, and nothing waits for ever.

Rows B61 to B63 and B65. Every server is one of this machine that the test began.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import av
import pytest
import servers
from case_inputs import a_module_leaves_nothing_behind  # noqa: F401 (a fixture)
from conftest import make_clip, number_of, ours
from test_interrupt import ended, running
from test_pipeline import balance
from test_stress import within

from framepipe import cli
from framepipe.container import ContainerStream
from framepipe.errors import ConfigError, FramepipeError, SourceError
from framepipe.pipeline import Pipeline
from framepipe.report import RunReport
from framepipe.sources.file import File

pytestmark = pytest.mark.usefixtures("a_module_leaves_nothing_behind")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
TIMEOUT_S = 0.5
SECRET = "s3cr3t-Pw"
ROOT = str(Path(cli.__file__).parents[1])


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> bytes:
    """100 pictures as a transport stream."""
    return make_clip(tmp_path_factory.mktemp("live") / "s.ts", 100, gop=10, container="mpegts").read_bytes()


def half(stream: bytes) -> bytes:
    return stream[: len(stream) // 2 // 188 * 188]


def numbers(path: Path) -> list[int]:
    """What PyAV decodes of a file, the last picture included."""
    with av.open(str(path)) as container:
        return [number_of(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def run(*sources: File | str | Path, **options) -> tuple[RunReport, list[tuple[str, int]]]:
    seen: list[tuple[str, int]] = []
    sink = lambda frame: seen.append((frame.source, number_of(frame.numpy())))  # noqa: E731
    with Pipeline(list(sources), [], [sink], device="cpu", **options) as pipeline:
        try:
            report = within(30, pipeline.run)
        except FramepipeError:
            balance(pipeline.report)
            raise
    balance(report)
    return report, seen


# -- what answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["auto", "segments", "frame"])
def test_a_file_by_http(clip, decode):
    with servers.files(clip.parent) as port:
        report, seen = run(f"http://{servers.HOST}:{port}/{clip.name}", decode=decode)
    assert report.exit == "complete" and seen == [("a", i) for i in range(60)]


def test_a_stream_by_tcp(stream):
    with servers.Stalling(stream) as server:
        server.go.set()
        report, seen = run(File(name="camera", uri=f"tcp://{servers.HOST}:{server.port}"))
    assert report.exit == "complete" and [number for _, number in seen] == list(range(100))


def test_a_playlist_by_hls(tmp_path, clip):
    with av.open(str(clip)) as source, av.open(str(tmp_path / "p.m3u8"), "w", format="hls") as out:
        copy = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = copy
                out.mux(packet)
    with servers.files(tmp_path) as port:
        report, seen = run(f"http://{servers.HOST}:{port}/p.m3u8")
    assert report.exit == "complete" and [number for _, number in seen] == list(range(60))


def test_start_and_end_of_what_cannot_be_read_twice(clip):
    with servers.files(clip.parent) as port:
        _, seen = run(File(uri=f"http://{servers.HOST}:{port}/{clip.name}", start=0.5, end=1.0))
    assert [number for _, number in seen] == list(range(13, 25))


@pytest.mark.parametrize(
    ("status", "words"), [(404, "Not Found"), (401, "authorization"), (403, "forbidden"), (500, "5XX")]
)
def test_a_refusal_is_told(status, words):
    with servers.refusing(status) as port, pytest.raises(SourceError, match=f"(?i){words}"):
        run(File(uri=f"http://{servers.HOST}:{port}/clip.mp4"))


def test_a_protocol_that_is_not_there_is_told():
    with pytest.raises(SourceError, match="this FFmpeg knows no nosuch"):
        run(File(uri="nosuch://127.0.0.1/x"))


# -- what does not -----------------------------------------------------------------------------------------------------

ADDRESSES = ["rtsp", "http", "https", "rtmp", "tcp", "udp"]


def address(scheme: str, port: int) -> str:
    path = {"rtsp": "/door", "http": "/clip.mp4", "https": "/clip.mp4", "rtmp": "/live/key"}.get(scheme, "")
    return f"{scheme}://{servers.HOST}:{port}{path}"


def fails_in_time(source: File, limit_s: float = TIMEOUT_S + 1) -> SourceError:
    began_s = time.monotonic()
    with pytest.raises(SourceError) as caught:
        run(source)
    assert time.monotonic() - began_s < limit_s
    return caught.value


@pytest.mark.parametrize("scheme", ADDRESSES)
def test_b62_connects_and_never_answers(scheme):
    """FFmpeg calls it invalid data, an exit or an input error; we go by the time that has passed."""
    with servers.deaf() if scheme == "udp" else servers.silent() as port:
        error = fails_in_time(File(uri=address(scheme, port), timeout_s=TIMEOUT_S))
    assert "nothing came for 0.5 s" in str(error)


def test_b62_answers_and_then_says_nothing_at_all(stream):
    """It has begun, so FFmpeg counts anew: we do not."""
    with servers.Stalling(stream[:188]) as server:
        error = fails_in_time(File(uri=f"tcp://{servers.HOST}:{server.port}", timeout_s=TIMEOUT_S), 2 * TIMEOUT_S + 1)
    assert "nothing came for 0.5 s" in str(error)


def test_b62_beside_a_good_source(clip):
    with servers.silent() as port:
        report, seen = run(File(name="mute", uri=address("rtsp", port), timeout_s=TIMEOUT_S), clip, threads=1)
    assert report.exit == "incomplete" and [number for _, number in seen] == list(range(60))
    assert [source["status"] for source in report.sources] == ["failed", "complete"]


@pytest.mark.parametrize("scheme", ["rtsp", "http", "tcp"])
def test_b62_a_stop_does_not_wait_for_the_time_out(scheme, clip):
    """What is left of it ends once the server hangs up, or else by its time-out."""
    with servers.silent() as port:
        pipeline = Pipeline([File(uri=address(scheme, port), timeout_s=60.0)], [], ["discard"], device="cpu")
        timer = threading.Timer(0.2, pipeline.stop)
        timer.start()
        with pipeline:
            report = within(10, pipeline.run)
        timer.join()
    assert report.exit == "stopped" and report.error is None and report.sources[0]["status"] == "stopped"


@posix
@pytest.mark.parametrize("scheme", ["rtsp", pytest.param("http", marks=pytest.mark.slow)])
def test_b62_ctrl_c_ends_the_process(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server((servers.HOST, 0)) as server:
        source = json.dumps({"uri": address(scheme, server.getsockname()[1]), "timeout_s": 60})
        Path("p.yaml").write_text(f"version: 1\nsources: [{source}]\nsinks: [discard]\n", encoding="utf-8")
        with running() as process:
            assert select.select([server], [], [], 30)[0], "it never came"
            process.send_signal(signal.SIGINT)
            code, err = ended(process)
    assert code == 130, err
    assert json.loads(Path("r.json").read_text(encoding="utf-8"))["exit"] == "stopped"


def test_b62_the_interpreter_waits_for_a_read_that_nobody_waits_for():
    """Taken down around FFmpeg it would now and then crash: an embedding program ends with the read, and well."""
    code = (
        "import sys, threading\n"
        "from framepipe.pipeline import Pipeline\n"
        "from framepipe.sources.file import File\n"
        "pipeline = Pipeline([File(uri=sys.argv[1], timeout_s=60.0)], [], ['discard'], device='cpu')\n"
        "threading.Thread(target=lambda: (sys.stdin.readline(), pipeline.stop())).start()\n"
        "with pipeline:\n"
        "    pipeline.run()\n"
        "print([thread.daemon for thread in threading.enumerate() if 'framepipe-' in thread.name], flush=True)\n"
    )
    with socket.create_server((servers.HOST, 0)) as server:
        server.settimeout(30)
        child = subprocess.Popen(
            [sys.executable, "-c", code, address("rtsp", server.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ROOT},
        )
        with child, server.accept()[0]:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(b"stop\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"[False]\n"
    assert child.returncode == 0


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_b62_there_is_no_way_without_a_time_out(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        File(uri="rtsp://127.0.0.1/x", timeout_s=timeout_s)
    assert File(uri="rtsp://127.0.0.1/x").timeout_s == 10.0


def test_b63_stalls_in_mid_stream(stream, tmp_path):
    """What came is delivered to the last picture, those inside the decoder included."""
    (tmp_path / "half.ts").write_bytes(half(stream))
    with servers.Stalling(half(stream), stream[len(half(stream)) :]) as server:
        report, seen = run(File(name="s", uri=f"tcp://{servers.HOST}:{server.port}", timeout_s=TIMEOUT_S))
    assert [number for _, number in seen] == numbers(tmp_path / "half.ts")
    assert report.exit == "incomplete"
    assert "reading ended early: nothing came for 0.5 s" in " ".join(report.sources[0]["warnings"])


def test_b63_a_stall_within_the_time_out_is_none(stream):
    with servers.Stalling(half(stream), stream[len(half(stream)) :]) as server:
        timer = threading.Timer(0.4, server.go.set)
        timer.start()
        report, seen = run(File(name="s", uri=f"tcp://{servers.HOST}:{server.port}", timeout_s=20.0))
        timer.join()
    assert report.exit == "complete" and [number for _, number in seen] == list(range(100))


def test_b63_a_stop_while_it_stalls(stream):
    """And it holds back no other source, nor their results."""
    with servers.Stalling(half(stream)) as server:
        source = File(name="s", uri=f"tcp://{servers.HOST}:{server.port}", timeout_s=60.0)
        seen: list[int] = []
        pipeline = Pipeline([source], [], [lambda frame: seen.append(frame.index)], device="cpu")

        def stop() -> None:
            while len(seen) < 30:
                threading.Event().wait(0.01)
            pipeline.stop()

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pipeline:
            report = within(10, pipeline.run)
        stopper.join()
    balance(report)
    assert report.exit == "stopped" and report.frames["delivered"] == len(seen)


def test_b63_a_server_that_dies_is_an_end(stream, tmp_path):
    (tmp_path / "half.ts").write_bytes(half(stream))
    with servers.Stalling(half(stream)) as server:
        server.go.set()
        _, seen = run(File(name="s", uri=f"tcp://{servers.HOST}:{server.port}"))
    assert [number for _, number in seen] == numbers(tmp_path / "half.ts")


def test_what_is_read_from_a_network_is_closed_by_its_reader(clip):
    """In the order reader, stream, container; and twice does no harm."""
    with servers.files(clip.parent) as port:
        opened = ContainerStream(f"http://{servers.HOST}:{port}/{clip.name}", lambda: False)
        packets = opened.packets()
        next(packets)
        assert any(name.startswith("framepipe-read-") for name in ours())
        opened.close()
        opened.close()
    assert not ours()


# -- pipes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path) -> Iterator[tuple[Path, int]]:
    """A FIFO and a descriptor to write to it."""
    path = tmp_path / "pipe.ts"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path, fd
    os.close(fd)


def pour(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left[:4096]) :]
        except BlockingIOError:
            threading.Event().wait(0.002)


@posix
@pytest.mark.parametrize("given", [0, 0.5], ids=["nothing", "half"])
def test_b65_a_stalled_pipe_ends_with_a_stop(pipe, stream, given):
    path, fd = pipe
    seen: list[int] = []
    pipeline = Pipeline([path], [], [lambda frame: seen.append(frame.index)], device="cpu")

    def write_and_stop() -> None:
        pour(fd, stream[: int(len(stream) * given)])
        while len(seen) < (20 if given else 0) or not ours():
            threading.Event().wait(0.01)
        pipeline.stop()

    writer = threading.Thread(target=write_and_stop)
    writer.start()
    with pipeline:
        report = within(10, pipeline.run)
    writer.join()
    balance(report)
    assert report.exit == "stopped" and report.frames["delivered"] == len(seen)


@posix
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_b65_a_stalled_pipe_ends_with_ctrl_c(pipe, stream, number, tmp_path, monkeypatch):
    """Standard input has the same test beside the other interrupts."""
    monkeypatch.chdir(tmp_path)
    path, fd = pipe
    Path("p.yaml").write_text(f"version: 1\nsources: [{path.name}]\nsinks: [{{jsonl: {{path: o.jsonl}}}}]\n", "utf-8")
    with running() as process:
        writer = threading.Thread(target=pour, args=(fd, stream[: len(stream) // 2]))
        writer.start()
        while not Path("o.jsonl").exists() or Path("o.jsonl").read_bytes().count(b"\n") < 20:
            assert process.poll() is None
            threading.Event().wait(0.01)
        writer.join()
        process.send_signal(number)
        code, err = ended(process)
    assert code == (130 if number == signal.SIGINT else 143), err


# -- secrets -----------------------------------------------------------------------------------------------------------

LEAKS = [
    "rtsp://cam_user:{secret}@{host}/door",
    "rtsp://cam%5Fuser:{encoded}@{host}/door",
    "http://u:{secret}@{host}/clip.mp4",
    "http://{host}/clip.mp4?token={secret}",
    "http://{host}/clip.mp4?tok%65n={secret}&x=1",
    "https://{host}/a.m3u8?X-Amz-Signature={secret}",
    "rtmp://{host}/live/{secret}",
    "rtmp://{host}/live/door?key={secret}",
    "srt://{host}?mode=caller&passphrase={secret}&streamid={secret}",
    "tcp://u:{secret}@{host}",
]


def told(error: BaseException | None, seen: set[int]) -> Iterator[str]:
    """All that an exception says, and what it came from."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield from (str(error), repr(error), str(getattr(error, "filename", "")), repr(vars(error)), repr(error.args))
    yield from getattr(error, "__notes__", ())
    yield "".join(traceback.format_exception(error))
    yield from told(error.__cause__, seen)
    yield from told(error.__context__, seen)


def shows_nothing(text: str) -> None:
    for secret in (SECRET, "s3cr3t", SECRET.replace("-", "%2D")):
        assert secret not in text, text


@pytest.mark.parametrize("template", LEAKS)
@pytest.mark.parametrize("refused", [False, True], ids=["silent", "refused"])
def test_b61_credentials_are_in_no_error_log_or_report(template, refused, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    with servers.silent() as port:
        host = f"{servers.HOST}:{1 if refused else port}"
        uri = template.format(host=host, secret=SECRET, encoded=SECRET.replace("-", "%2D"))
        source = File(uri=uri, timeout_s=0.1)
        shows_nothing(repr(source))
        pipeline = Pipeline([source], [], ["discard"], device="cpu")
        with pipeline, pytest.raises(SourceError) as caught:
            pipeline.run()
    for text in told(caught.value, set()):
        shows_nothing(text)
    assert host in str(caught.value), "which input it is has to be said"
    shows_nothing(json.dumps(pipeline.report.to_dict()))
    shows_nothing("".join(capfd.readouterr()) + caplog.text)
    shows_nothing(" ".join(thread.name for thread in threading.enumerate()))


@pytest.mark.parametrize("query", ["?token={secret}", "?x=1&access_token={secret}"])
def test_b61_credentials_are_in_no_result(clip, tmp_path, query):
    with servers.files(clip.parent) as port:
        uri = f"http://u:{SECRET}@{servers.HOST}:{port}/{clip.name}{query.format(secret=SECRET)}"
        (tmp_path / "p.yaml").write_text(
            json.dumps(
                {
                    "version": 1,
                    "sources": [uri],
                    "sinks": [
                        {"jsonl": {"path": (tmp_path / "{source}.jsonl").as_posix()}},
                        {"video": {"path": (tmp_path / "{source}.mp4").as_posix()}},
                    ],
                }
            ),
            encoding="utf-8",
        )
        assert cli.main(["run", str(tmp_path / "p.yaml"), "-q", "--report", str(tmp_path / "r.json")]) == 0
    (tmp_path / "p.yaml").unlink()
    assert len(list(tmp_path.iterdir())) == 3
    for path in tmp_path.iterdir():
        shows_nothing(path.name + path.read_bytes().decode("latin-1"))


def test_b61_credentials_are_on_no_screen(tmp_path, capfd):
    """Of the command line: not at ``check``, not when it fails, not with a traceback."""
    uri = f"rtsp://u:{SECRET}@{servers.HOST}:1/door?token={SECRET}"
    (tmp_path / "p.yaml").write_text(json.dumps({"version": 1, "sources": [uri], "sinks": ["discard"]}), "utf-8")
    assert cli.main(["check", str(tmp_path / "p.yaml")]) == 0
    assert cli.main(["run", str(tmp_path / "p.yaml"), "--device", "cpu", "--debug"]) == 1
    text = "".join(capfd.readouterr())
    assert f"{servers.HOST}:1" in text
    shows_nothing(text)
