"""A guard beside a running pipeline: what it does to it, under modelled pressure and in real time; YAML; commands."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_pipeline import balance
from test_stress import Listed, pictures, within
from typer.testing import CliRunner

from framepipe import _cli_run, guarding
from framepipe.cli import app
from framepipe.config import loads, schema
from framepipe.device import select
from framepipe.device.simulated import SimulatedDevice
from framepipe.errors import ConfigError, OutputExistsError, SinkError, StageError
from framepipe.guard.options import ColdOptions, GuardOptions
from framepipe.guard.readings import Reading
from framepipe.pipeline import Pipeline
from framepipe.sources.synthetic import Synthetic
from framepipe.stage import Stage
from framepipe.tokens import LEAST, Token, Tokens

pytestmark = pytest.mark.usefixtures("nothing_left")

LIMIT_S = 30
"""Far more than anything here takes."""
MB = 10**6
FPS, FRAMES = 20, 400
"""Modelled pictures a second, and pictures: twenty seconds of video."""


@dataclass(kw_only=True)
class Burst(Stage):
    """Wants ``nbytes`` of video memory at picture ``at``, as a stage does whose picture is large for once."""

    at: int
    nbytes: int

    reads = frozenset({"planes"})

    def __post_init__(self) -> None:
        self.block: Any = None

    def launch(self, batch: Any) -> None:
        if any(item.index == self.at for item in batch.items):
            self.block = self.device.fixed(self.nbytes)

    def close(self) -> None:
        if self.block is not None:
            self.device.fixed_free(self.block)


@dataclass(kw_only=True)
class Chunks(Stage):
    """Takes ``count`` chunks of cold memory at picture 0, keeps ``keep`` of them, takes one of ``nbytes`` at ``at``."""

    count: int
    keep: int = 0
    at: int = -1
    nbytes: int = 0

    reads = frozenset({"planes"})

    def __post_init__(self) -> None:
        self.kept: list[Any] = []
        self.locked: bool | None = None

    def launch(self, batch: Any) -> None:
        for item in batch.items:
            if item.index == 0:
                made = [self.device.host_output((MB,), "uint8", "chunk") for _ in range(self.count)]
                self.kept = made[: self.keep]
            if item.index == self.at:
                self.kept.append(self.device.host_output((self.nbytes,), "uint8", "large chunk"))
                # Of the owner's account: the ring page-locks beside it, a picture at a time.
                self.locked = any(pin.owner == "large chunk" for pin in self.device.ledger.live())


def modelled(model: str, **keys: Any) -> str:
    return f"simulated:{model},fps={FPS}," + ",".join(f"{key}={value}" for key, value in keys.items())


def clip(frames: int = FRAMES) -> Synthetic:
    return Synthetic(width=64, height=48, frames=frames)


def ran(stages: Any, device: str, guard: Any, **options: Any) -> Any:
    with Pipeline([clip()], stages, device=device, guard=guard, staging="per_frame", **options) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    balance(report)
    return report


# -- pressure --

# Per-frame pinning as an article claims it to be takes some 18 of 60 MB here, since what is freed comes back late; from
# the tenth second on other programs take 36, and near the twentieth a stage wants 20.
CLAIM = modelled(
    "wddm-claim", total="100MB", resident="40MB", others="36MB", others_from_s=10, share=1, metadata=0,
    granularity="250kB",
)  # fmt: skip


def burst() -> Burst:
    return Burst(at=FRAMES - 20, nbytes=20 * MB)


def test_without_a_guard_pressure_ends_the_run():
    with pytest.raises(StageError, match="device memory is exhausted: 20000000 bytes wanted"):
        ran([burst()], CLAIM, None)


def test_with_a_guard_the_same_run_lives():
    report = ran([burst()], CLAIM, {"on_low": ["pageable", "warn"]})
    assert (report.exit, report.frames["delivered"]) == ("complete", FRAMES)
    told = report.guard
    assert [event["text"] for event in told["events"][:2]] == [
        "below 15%: nothing more is page-locked in this run",
        "below 15%: warned",
    ]
    at_s = told["events"][0]["t_s"]
    assert 10 <= at_s <= 11.5  # modelled seconds
    assert told["events"][0]["source"] == "model wddm-claim"
    assert told["events"][0]["free"] < 15 * MB
    assert not told["page_locking"]
    assert 200 <= report.memory["pinned_allocations"] < 240
    assert any("the guard stopped page-locking: memory is below 15%" in warning for warning in report.warnings)
    assert not any("refused" in warning for warning in report.warnings)


def test_a_warning_alone_saves_nothing():
    with pytest.raises(StageError, match="device memory is exhausted"):
        ran([burst()], CLAIM, {"on_low": ["warn"], "on_critical": []})


def test_a_run_can_be_ended_in_good_order_instead():
    report = ran([burst()], CLAIM, {"on_low": ["stop"]})
    assert report.exit == "stopped"
    assert 190 <= report.frames["delivered"] < 250
    assert report.guard["events"][0]["text"] == "below 15%: the run is ended"


# 70 MB of the non-local segment, of which other programs take 55 from the fifth second on. The cold tier has 12 MB of
# idle chunks in one size, and at the tenth second 4 MB in another are wanted.
BUDGET = modelled("wddm-budget", ram="140MB", others="55MB", others_from_s=5)


def chunks() -> Chunks:
    return Chunks(count=12, at=FRAMES // 2, nbytes=4 * MB)


def test_without_a_guard_one_refused_pin_poisons_the_pool():
    stage = chunks()
    report = ran([stage], BUDGET, None)
    assert report.exit == "complete"  # slower from there on, and told
    assert stage.locked is False
    assert sum("refused to page-lock 4000000 bytes" in warning for warning in report.warnings) == 1
    assert report.memory["pinned_allocations"] < 12 + 250
    assert report.guard is None


def test_with_a_guard_the_pool_stays_page_locked():
    stage = chunks()
    report = ran([stage], BUDGET, {"low": "30%", "on_low": ["give_back"]})
    assert stage.locked is True
    assert report.warnings == []
    assert report.memory["pinned_allocations"] == 12 + 1 + FRAMES
    told = report.guard
    assert told["page_locking"]
    assert told["events"][0]["source"] == "model wddm-budget non-local budget"
    assert told["events"][0]["text"] == "below 30%: 12.0 MB of cold memory given back"
    assert [event["event"] for event in told["events"]] == ["low", "recovered"]


def test_the_cold_tier_grows_ahead_of_need_and_only_with_headroom():
    cold = ColdOptions(busy_samples=3, cooldown_s=1000)
    stage = Chunks(count=4, keep=4)
    report = ran([stage], modelled("linux", total="1GB"), GuardOptions(cold=cold))
    assert [event["text"] for event in report.guard["events"]] == [
        "100% in use for 3 readings, 15% stays free: 2.0 MB of cold memory made"
    ]
    assert report.guard["events"][0]["cold_use"] == pytest.approx(4 / 6, abs=1e-4)
    report = ran([Chunks(count=4, keep=4)], modelled("linux", total="100MB", resident="80MB"), GuardOptions(cold=cold))
    assert report.guard["decisions"] == 1
    report = ran([Chunks(count=4, keep=4)], modelled("linux", total="100MB", resident="83MB"), GuardOptions(cold=cold))
    assert report.guard["decisions"] == 0  # 2 MB more would not leave 15 %


# -- depth --

ALWAYS_LOW = modelled("linux", total="100MB", resident="90MB")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fewer_batches_in_flight_and_never_none(depth):
    options = {"low": "20%", "critical": "15%", "on_low": [], "on_critical": ["depth"]}
    with Pipeline([clip()], ["rgb"], device=ALWAYS_LOW, guard=options, staging={"depth": depth}) as pipeline:
        report = within(LIMIT_S, pipeline.run)
        assert pipeline._engine.runner.tokens.qsize() == max(depth, 2)  # of depth + 1, one is held back but of two
    assert report.frames["delivered"] == FRAMES
    assert report.guard["depth_least"] == max(depth - 1, 1)
    assert report.staging["depth"] == depth


def test_lower_depth_goes_for_many_small_pictures_too(monkeypatch):
    """Where frames travel as they are decoded more batches than the depth are in flight, until it is lowered."""

    class Low(Nothing):
        def read(self) -> list[Reading]:
            return [Reading("test", 1, 100)]

    monkeypatch.setattr(guarding, "_memory", lambda device: Low())
    seen = threading.Event()
    guard = {"on_low": ["depth"], "on_critical": []}
    with Pipeline([clip(60)], ["rgb"], device="cpu", guard=guard, on_guard=lambda _: seen.set()) as frames:
        for _ in frames:
            assert seen.wait(LIMIT_S)
        tokens = frames._engine.runner.tokens
    assert len(tokens) == 16
    assert tokens.qsize() == 2
    assert frames.report.guard["depth_least"] == 1


def test_tokens_that_are_added_are_held_back_too():
    tokens = Tokens([Token(None) for _ in range(3)])
    tokens.limit(2)
    tokens.add(Token(None))
    assert (len(tokens), tokens.qsize()) == (4, 2)
    tokens.limit(None)
    assert tokens.qsize() == 4


def test_pictures_of_another_size_come_while_batches_are_held_back():
    """Memory is planned anew with nothing in flight: what is held back must not be waited for."""
    sources = [
        Listed(name=f"s{number}", frames=[frame for size in sizes for frame in pictures(3, *size)])
        for number, sizes in enumerate([[(64, 48), (96, 64)] * 4, [(80, 48), (32, 32)] * 4])
    ]
    options = {"low": "20%", "critical": "15%", "on_low": [], "on_critical": ["depth"], "interval_s": 0.05}
    with Pipeline(sources, ["rgb"], device=ALWAYS_LOW, guard=options, staging={"depth": 3}) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    assert report.frames["delivered"] == 48
    assert report.guard["depth_least"] == 2


def test_tokens_are_held_back_as_they_come_and_let_go_again():
    every = [Token(None) for _ in range(4)]
    tokens = Tokens(every)
    out = [tokens.get(), tokens.get()]
    tokens.limit(0)
    assert (len(tokens), tokens.qsize()) == (4, 0)  # two are held, and never so many that fewer than two go round
    assert LEAST == 2
    for token in out:
        tokens.put(token)
    assert tokens.qsize() == 2
    tokens.limit(3)
    assert tokens.qsize() == 3
    tokens.limit(None)
    assert tokens.qsize() == 4
    assert {id(tokens.get_nowait()) for _ in range(4)} == {id(token) for token in every}


def test_gathering_tokens_takes_those_held_back_and_holding_waits_for_it():
    tokens = Tokens([Token(None) for _ in range(4)])
    tokens.limit(2)
    mine = tokens.get()
    out = tokens.get()
    gathered: list[Token] = []
    thread = threading.Thread(target=lambda: gathered.extend(tokens.gather()), daemon=True)
    thread.start()
    deadline_s = time.monotonic() + LIMIT_S
    while not tokens._gathering and time.monotonic() < deadline_s:
        pass
    tokens.limit(3)  # meanwhile
    tokens.put(out)
    thread.join(LIMIT_S)
    assert len(gathered) == 3
    for token in (mine, *gathered):
        tokens.put(token)
    assert tokens.qsize() == 3
    tokens.limit(None)
    assert tokens.qsize() == 4


# -- in real time --


class Falling(SimulatedDevice):
    """Says that little memory is free, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 90

    def vram(self) -> list[dict[str, Any]]:
        return [{"source": "test", "free": self.free, "total": 100}]


def test_the_thread_of_a_guard_acts_and_ends_with_the_pipeline(monkeypatch, caplog):
    made: list[Falling] = []

    def make(_: Any) -> Falling:
        made.append(Falling())
        return made[0]

    monkeypatch.setattr("framepipe.device.select.Choice.make", make)
    seen: list[Any] = []
    acted = threading.Event()

    def on_guard(record: Any) -> None:
        seen.append((record.event, threading.current_thread().name))
        acted.set()

    guard = {"interval_s": 0.05, "on_low": ["pageable"], "on_critical": []}
    with Pipeline(
        [clip(20)], device="simulated", guard=guard, on_guard=on_guard, name="p", check_memory=False
    ) as frames:
        for number, _ in enumerate(frames):
            if number == 3:
                made[0].free = 10
                assert acted.wait(LIMIT_S)
    assert seen == [("low", "p-guard")]
    report = frames.report
    assert report.frames["delivered"] == 20
    assert report.guard["least"] == {
        "t_s": report.guard["events"][0]["t_s"],
        "free": 10,
        "total": 100,
        "source": "test",
    }
    assert report.guard["cost"]["reading_s"] > 0
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == ["framepipe.guard"]


def test_what_a_callback_raises_is_the_error_of_the_run():
    def fail(record: Any) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ran([], CLAIM, {"low": "90%"}, on_guard=fail)


def test_a_callback_without_a_guard_is_a_mistake():
    with pytest.raises(ConfigError, match="on_guard is given and no guard"):
        Pipeline([clip(1)], device="cpu", on_guard=print)


def test_results_that_were_held_and_dropped_go_back_to_the_system():
    """A user who held forty results: the device keeps their memory to use it again, until memory is low."""
    model = modelled("linux", total="8MB", others="7MB", others_from_s=3)
    options = {"low": "20%", "on_low": ["give_back"], "on_critical": []}
    held: list[Any] = []
    with Pipeline([clip(100)], ["rgb"], device=model, guard=options) as frames:
        for number, frame in enumerate(frames):
            if number < 40:
                held.append(frame)
            else:
                held.clear()
    told = frames.report.guard["events"]
    assert told[0]["event"] == "low"
    assert " of cold memory and " in told[0]["text"]
    assert told[0]["text"].endswith(" of results given back")


class Nothing:
    """Memory that nobody counts."""

    missing = {"cuda": "no CUDA device"}  # noqa: RUF012

    def __init__(self) -> None:
        self.closed = 0

    def read(self) -> list[Reading]:
        return []

    def close(self) -> None:
        self.closed += 1


def test_a_guard_without_any_count_watches_on_and_says_so(monkeypatch):
    memory = Nothing()
    monkeypatch.setattr(guarding, "_memory", lambda device: memory)
    with Pipeline([clip(5)], device="cpu", guard=True) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    told = report.guard
    assert (told["least"], told["decisions"], told["missing"]) == (None, 0, {"cuda": "no CUDA device"})
    assert told["samples"] == told["samples_unknown"] >= 1
    assert memory.closed == 1
    assert "guard         nothing here tells how much memory is free" in list(_cli_run.closing_words(report.to_dict()))


def test_on_this_machine_ram_is_watched():
    with Pipeline([clip(5)], device="cpu", guard=True) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    assert report.guard["least"]["free"] > 0


def test_a_guard_is_off_unless_asked_for():
    with Pipeline([clip(5)], device="cpu") as pipeline:
        report = within(LIMIT_S, pipeline.run)
    assert report.guard is None
    assert report.to_dict()["guard"] is None


def test_the_file_is_an_output_like_any_other(tmp_path):
    path = tmp_path / "guard.jsonl"
    path.write_text("something else\n", encoding="utf-8")
    guard = {"file": str(path)}
    with Pipeline([clip(5)], device="cpu", guard=guard) as pipeline, pytest.raises(OutputExistsError):
        pipeline.run()
    with Pipeline([clip(5)], device="cpu", guard=guard, overwrite=True) as pipeline:
        within(LIMIT_S, pipeline.run)
    assert "free" in json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    with Pipeline([clip(5)], device="cpu", guard={"file": str(tmp_path)}) as pipeline, pytest.raises(ConfigError):
        pipeline.run()


def test_a_file_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "new" / "g.jsonl"
    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        Pipeline([clip(5)], device="cpu", guard={"file": str(path)}) as pipeline,
        pytest.raises(SinkError, match="cannot make it: Permission denied"),
    ):
        pipeline.run()


def test_a_guard_that_reads_once_in_a_lifetime_runs_and_ends():
    with Pipeline([clip(5)], device="cpu", guard={"interval_s": 1e300}) as pipeline:
        report = within(LIMIT_S, pipeline.run)
    assert report.guard["samples"] == 1


def test_a_device_that_cannot_tell_is_no_reason_not_to_run(monkeypatch):
    def broken(self: Any) -> Any:
        raise RuntimeError("the driver is gone")

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedDevice, "vram", broken)
        memory = guarding._memory(SimulatedDevice())
    assert memory.read()[-1].source == "RAM available"
    memory.close()


# -- YAML and commands --

HEAD = "version: 1\nsources: [synthetic]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("guard: 3", ":3: guard: expected true, false or {low: …, critical: …, interval_s: …, …}"),
        ("guard: {lwo: 5%}", ":3: guard.lwo: unknown parameter; did you mean 'low'?"),
        ("guard: {low: 15}", ":3: guard.low: expected a share of the total such as 15%"),
        ("guard:\n  on_low: [giveback]", ":4: guard.on_low: expected a list"),
        ("guard: {critical: 20%}", ":3: guard.critical: is 20%; it must be less than low, 15%"),
        (
            "guard: {cold: {busy_percnt: 5}}",
            ":3: guard.cold.busy_percnt: unknown parameter; did you mean 'busy_percent'?",
        ),
        ("guard: {cold: {step_percent: 60}}", ":3: guard.cold.step_percent: is 60; it must be above 0, and 50 at most"),
        ("guard: {cold: 3}", ":3: guard.cold: expected true, false or {busy_percent: …"),
        ('guard: {file: "a\\tb"}', ":3: guard.file: the control character '\\t' in a path"),
    ],
)
def test_mistakes_in_yaml_are_told_with_their_place(text, words):
    with pytest.raises(ConfigError) as caught:
        loads(HEAD + text)
    assert words in str(caught.value)


def test_a_guard_in_yaml(tmp_path):
    assert loads(HEAD).guard is None
    assert loads(HEAD + "guard: false").guard is None
    assert loads(HEAD + "guard: true").guard == GuardOptions()
    text = HEAD + "guard: {low: 2GB, on_low: [depth], cold: {cap: 64MB}, file: g.jsonl}"
    options = loads(text, path=tmp_path / "p.yaml").guard
    assert options.file == Path("g.jsonl")  # an output: of the working folder
    assert (options.low.nbytes, options.on_low, options.cold) == (2000 * MB, ("depth",), ColdOptions(cap=64 * MB))
    assert loads(HEAD + "guard: {cold: true}").guard.cold == ColdOptions()
    assert loads(HEAD, guard=True).guard == GuardOptions()
    assert loads(text, guard=True).guard.on_low == ("depth",)
    assert loads(HEAD + "guard: false", guard=True).guard == GuardOptions()
    assert loads(text, guard=False).guard is None
    assert str(loads(text, sets=["guard.low=20%"]).guard.low) == "20%"


def test_a_switch_takes_parameters_from_the_command_line():
    def given(text: str, *sets: str, guard: bool | None = None) -> Any:
        return loads(HEAD + text, sets=sets, guard=guard).guard

    assert str(given("", "guard.low=20%", guard=True).low) == "20%"
    assert str(given("guard: true", "guard.low=20%").low) == "20%"
    assert str(given("guard: false", "guard.low=20%").low) == "20%"
    assert given("guard: {cold: true}", "guard.cold.cap=5MB").cold.cap == 5 * MB
    assert given("guard: true", "guard.cold.cap=5MB").cold.cap == 5 * MB
    with pytest.raises(ConfigError, match="expected a share of the total"):
        given("guard: true", "guard.low.x=3")


def test_the_schema_knows_the_guard():
    properties = schema()["properties"]["guard"]["anyOf"][1]["properties"]
    assert set(properties) == set(GuardOptions.__dataclass_fields__)
    assert set(properties["cold"]["anyOf"][1]["properties"]) == set(ColdOptions.__dataclass_fields__)


PIPELINE = f"""\
version: 1
device: {CLAIM}
staging: per_frame
sources: [{{synthetic: {{width: 64, height: 48, frames: {FRAMES}}}}}]
sinks: [discard]
"""


def test_run_tells_of_decisions_and_reports_them(tmp_path):
    (tmp_path / "p.yaml").write_text(PIPELINE, encoding="utf-8")
    report = tmp_path / "r.json"
    command = [sys.executable, "-m", "framepipe", "run", str(tmp_path / "p.yaml"), "--guard", "--report", str(report)]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=LIMIT_S, check=True)
    assert result.stderr.count("guard: low: below 15%: warned; ") == 1  # by `tell`, and not by logging as well
    assert "free at the lowest (model wddm-claim), low 1 time," in " ".join(result.stderr.split())
    assert json.loads(report.read_text(encoding="utf-8"))["guard"]["decisions"] >= 2
    result = CliRunner().invoke(app, ["run", str(tmp_path / "p.yaml"), "--no-guard"])
    assert "guard" not in result.stderr


def test_the_file_of_a_guard_is_a_result_and_no_place_for_the_report(tmp_path, monkeypatch):
    (tmp_path / "p.yaml").write_text(PIPELINE.replace(f"frames: {FRAMES}", "frames: 2"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "p.yaml", "--set", "guard.file=g.jsonl", "--report", "g.jsonl"])
    assert "g.jsonl: cannot be written: it belongs to this run" in str(result.exception)
    assert "free" in json.loads((tmp_path / "g.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert "wrote g.jsonl (" in result.stderr


def test_cuda_log_is_set_before_anything_of_cuda(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_LOG_FILE", "before")
    (tmp_path / "p.yaml").write_text(PIPELINE.replace(f"frames: {FRAMES}", "frames: 2"), encoding="utf-8")
    seen: list[str | None] = []
    real = select.choose
    monkeypatch.setattr(select, "choose", lambda name: seen.append(os.environ["CUDA_LOG_FILE"]) or real(name))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "p.yaml", "--cuda-log", "cuda.log"])
    assert result.exit_code == 0, result.output
    assert seen == [str(tmp_path / "cuda.log")]
    for name in ("stdout", "stderr"):
        _cli_run.log_cuda(name)
        assert os.environ["CUDA_LOG_FILE"] == name
    result = CliRunner().invoke(app, ["run", "p.yaml", "--cuda-log", "none/cuda.log"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "--cuda-log none/cuda.log: there is no such folder"
    with pytest.raises(ConfigError, match="is a folder"):
        _cli_run.log_cuda(str(tmp_path))


def test_the_help_says_what_cuda_logs():
    result = CliRunner().invoke(app, ["run", "--help"])
    words = " ".join(result.output.split())
    assert "log its errors" in words
    assert "12.9" in words
    assert "without errors logs nothing" in words
