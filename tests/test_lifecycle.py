"""Stopping, closing, forgetting and interrupting a pipeline, in every state it can be in."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from conftest import ours
from test_pipeline import Gate, balance

import framepipe
from framepipe.pipeline import Pipeline
from framepipe.testing import FrameList, pattern_frames

pytestmark = pytest.mark.usefixtures("nothing_left")
ENDLESS = FrameList(name="endless", frames=pattern_frames(8, 32, 32), loop=1_000_000)


def test_stop_before_the_start(clip):
    pipeline = Pipeline([clip], [], ["discard"], device="cpu")
    pipeline.stop()
    assert pipeline.run().exit == "stopped"
    pipeline.close()


def test_stop_after_the_end_changes_nothing(clip):
    with Pipeline([clip], [], ["discard"], device="cpu") as pipeline:
        assert pipeline.run().exit == "complete"
        pipeline.stop()
        assert pipeline.report.exit == "complete"


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("batch", [1, 5])
def test_stop_while_everything_runs(device, batch):
    reached = threading.Event()
    pipeline = Pipeline(
        [ENDLESS], [], [lambda f: f.index > 40 and reached.set()], device=device, staging={"batch": batch}
    )
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    assert reached.wait(20)
    pipeline.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert pipeline.report.exit == "stopped"
    balance(pipeline.report)
    pipeline.close()


def test_stop_while_a_source_is_waited_for():
    source = Gate(name="g", frames=pattern_frames(1)).gated([threading.Event()])
    pipeline = Pipeline([source], [], ["discard"], device="cpu")
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    pipeline.stop()
    thread.join(20)
    assert not thread.is_alive()
    pipeline.close()


def test_stop_while_a_sink_is_busy_and_everything_is_full():
    entered, go_on = threading.Event(), threading.Event()

    def sink(frame):
        entered.set()
        go_on.wait(20)

    pipeline = Pipeline([ENDLESS], [], [sink], device="cpu")
    thread = threading.Thread(target=pipeline.run)
    thread.start()
    assert entered.wait(20)
    pipeline.stop()
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()
    balance(pipeline.report)
    pipeline.close()


def test_stop_while_nobody_takes_frames():
    pipeline = framepipe.open(ENDLESS, device="cpu")
    next(iter(pipeline))
    pipeline.stop()
    left = list(pipeline)
    assert len(left) <= 8
    pipeline.close()
    balance(pipeline.report)


def test_break_out_of_iteration(clip):
    with framepipe.open(clip, device="cpu") as frames:
        for frame in frames:
            if frame.index == 3:
                break
    assert frames.report.exit == "stopped"
    balance(frames.report)


def test_an_exception_in_the_loop_closes_the_pipeline(clip):
    with pytest.raises(KeyError), framepipe.open(clip, device="cpu") as frames:
        for _ in frames:
            raise KeyError
    assert not ours()


def test_a_forgotten_pipeline_ends_its_threads(clip):
    pipeline = framepipe.open(ENDLESS, device="cpu")
    next(iter(pipeline))
    assert ours()
    with pytest.warns(ResourceWarning, match="never closed"):
        del pipeline
        gc.collect()


def test_frames_outlive_their_pipeline(clip):
    for device in ("cpu", "simulated"):
        with framepipe.open(clip, device=device) as frames:
            frame = next(iter(frames))
        assert frame.numpy().shape == (64, 96, 3)


def test_async_iteration(clip):
    async def collect() -> list[int]:
        with framepipe.open(clip, device="cpu") as frames:
            return [frame.index async for frame in frames]

    assert asyncio.run(collect()) == list(range(60))


def test_async_cancellation_stops_the_pipeline():
    async def main() -> None:
        pipeline = framepipe.open(ENDLESS, device="cpu")

        async def consume() -> None:
            async for _ in pipeline:
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pipeline.close()

    asyncio.run(main())


# -- whole processes --------------------------------------------------------------------------------------------------


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A Python process running ``code``, which prints ``ready`` when it is."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(framepipe.__file__).parent.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip


def test_the_interpreter_exits_with_one_open(clip):
    process = child(
        """
        import sys, framepipe
        pipeline = framepipe.open([sys.argv[1]], device="cpu", loop=100000)
        next(iter(pipeline))
        print("ready")
        """,
        str(clip),
    )
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "ready\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send to another process")
@pytest.mark.parametrize("way", ["run", "iterate"])
def test_ctrl_c_in_a_program_that_uses_it(clip, way):
    use = "pipeline.run()" if way == "run" else "[0 for _ in pipeline]"
    process = child(
        f"""
        import sys, framepipe
        from framepipe.sources.file import File
        sink = lambda frame: frame.index == 20 and print("ready")
        pipeline = framepipe.Pipeline([File(uri=sys.argv[1], loop=100000)], [], [sink], device="cpu")
        with pipeline:
            {use}
        """,
        str(clip),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT or process.returncode == 130
    assert err.strip().endswith("KeyboardInterrupt")
