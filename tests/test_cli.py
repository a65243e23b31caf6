"""The command line: what it says, where, and its exit status."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from framepipe import __version__, _cli_progress, _cli_run, cli, registry, shipped
from framepipe.errors import ConfigError, DeviceUnavailableError, OutputExistsError, SinkError, SourceError
from framepipe.report import RunReport, Statistics
from framepipe.sink import Sink
from framepipe.source import Source


@dataclass(kw_only=True)
class Clip(Source):
    uri: str


@dataclass(kw_only=True)
class Lines(Sink):
    """A line a picture.

    More words.
    """

    path: str = "-"


class FakePipeline:
    """Runs ``during``, then raises ``error`` or reports ``exit``."""

    def __init__(
        self, exit: str = "complete", error: Exception | None = None, during: Any = None, **parts: Any
    ) -> None:
        self.report: RunReport | None = None
        self._made = RunReport(exit=exit, **parts)
        self._error = error
        self._during = during
        self.stops = 0
        self.closes = 0

    def stop(self) -> None:
        self.stops += 1

    def run(self, progress: Any = None, tell: Any = None) -> RunReport:
        tell("compiling")
        if self._during is not None:
            self._during(self)
        if progress is not None:
            progress(statistics())
        self.report = self._made
        if self._error is not None:
            raise self._error
        return self.report

    def __enter__(self) -> FakePipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.closes += 1


def statistics(seconds: float = 1.0, **parts: Any) -> Statistics:
    whole = {"decoded": 50, "delivered": 50, "skipped": 0, "dropped": 0, "expected": 100, "fps": 50.0, "sources": {}}
    return Statistics(seconds=seconds, **{**whole, **parts})


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    """An empty working folder with one good pipeline, and a registry of three names."""
    known: dict[str, dict[str, type]] = {
        "sources": {"file": Clip},
        "stages": {},
        "sinks": {"lines": Lines},
        "staging": {},
    }
    monkeypatch.setattr(registry, "_registered", known)
    monkeypatch.setattr(registry, "names", lambda kind: sorted(known[kind]))
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("version: 1\nsources: [a.mp4]\n", encoding="utf-8")


@pytest.fixture
def fake(monkeypatch):
    """`run` gets this pipeline, and its configuration lands in ``configs``."""

    def install(**parts: Any) -> FakePipeline:
        made = FakePipeline(**parts)
        made.configs = []  # type: ignore[attr-defined]
        made.options = []  # type: ignore[attr-defined]

        def build(config: Any, **options: Any) -> FakePipeline:
            made.configs.append(config)  # type: ignore[attr-defined]
            made.options.append(options)  # type: ignore[attr-defined]
            return made

        monkeypatch.setattr(cli, "_pipeline", build)
        return made

    return install


# -- exit status --


@pytest.mark.parametrize(("exit", "code"), [("complete", 0), ("incomplete", 3), ("stopped", 3)])
def test_the_report_decides_the_exit_status(fake, exit, code):
    made = fake(exit=exit)
    assert cli.main(["run", "p.yaml", "-q"]) == code
    assert made.closes == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SourceError("a.mp4: no such file"), 1),
        (SinkError("disk full"), 1),
        (ConfigError("no"), 2),
        (OutputExistsError("out.mp4: exists"), 2),
        (DeviceUnavailableError("no GPU"), 2),
    ],
)
def test_an_error_decides_the_exit_status_in_one_line(fake, capsys, error, code):
    fake(exit="failed", error=error)
    assert cli.main(["run", "p.yaml", "-q"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"framepipe: error: {error}\n")


def test_an_unexpected_error_is_called_a_bug_and_has_its_traceback_only_with_debug(fake, capsys):
    error = RuntimeError("two\nlines")
    error.add_note("then: disk full")
    fake(exit="failed", error=error)
    assert cli.main(["run", "p.yaml", "-q"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "framepipe: error: RuntimeError: two lines. This is a bug, in framepipe or in a component of yours; "
        "run it again with --debug for the traceback",
        "framepipe: note: then: disk full",
    ]
    for argv in (["run", "p.yaml", "-q", "--debug"], ["--debug", "run", "p.yaml", "-q"]):
        assert cli.main(argv) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err
    assert cli.main(["run", "p.yaml", "-q"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_every_mistake_of_a_configuration_is_shown(capsys):
    Path("bad.yaml").write_text("version: 1\nsources: [a.mp4]\nsinks: [{lines: {paht: x}}, liens]\n", encoding="utf-8")
    for command in (["run", "bad.yaml"], ["check", "bad.yaml"]):
        assert cli.main(command) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            "framepipe: error: 2 mistakes in bad.yaml",
            "  bad.yaml:3: sinks[0].paht: unknown parameter; did you mean 'path'?",
            "  bad.yaml:3: sinks[1]: unknown sink 'liens'; did you mean 'lines'?",
        ]


@pytest.mark.parametrize(
    "argv", [["bogus"], ["run"], ["run", "p.yaml", "--bogus"], ["run", "p.yaml", "--threads", "0"], []]
)
def test_wrong_usage_is_2_and_says_nothing_on_stdout(argv, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("framepipe: error: " if argv else "Usage: ")


def test_an_interrupted_start_is_130(monkeypatch, capsys):
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    assert cli.main(["run", "p.yaml"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# -- signals --


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_in_good_order(fake, number, code):
    before = signal.getsignal(number)
    made = fake(exit="stopped", during=lambda pipeline: signal.raise_signal(number))
    assert cli.main(["run", "p.yaml", "-q"]) == code
    assert (made.stops, made.closes) == (1, 1)
    assert signal.getsignal(number) is before


def test_a_run_that_is_complete_in_spite_of_the_signal_is_0(fake):
    fake(exit="complete", during=lambda pipeline: signal.raise_signal(signal.SIGINT))
    assert cli.main(["run", "p.yaml", "-q"]) == 0


def test_an_incomplete_run_that_was_interrupted_is_130_and_a_failed_one_1(fake):
    fake(exit="incomplete", during=lambda pipeline: signal.raise_signal(signal.SIGINT))
    assert cli.main(["run", "p.yaml", "-q"]) == 130
    fake(exit="failed", error=SinkError("x"), during=lambda pipeline: signal.raise_signal(signal.SIGINT))
    assert cli.main(["run", "p.yaml", "-q"]) == 1


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_second_signal_ends_the_process_at_once(fake, monkeypatch, second, code):
    class Gone(BaseException):
        pass

    def leave(status: int) -> None:
        raise Gone(status)

    def during(pipeline: FakePipeline) -> None:
        signal.raise_signal(signal.SIGINT)
        assert pipeline.stops == 1
        signal.raise_signal(second)

    monkeypatch.setattr(os, "_exit", leave)
    fake(during=during)
    with pytest.raises(Gone) as gone:
        cli.main(["run", "p.yaml", "-q"])
    assert gone.value.args == (code,)


# -- options --


def test_options_reach_the_configuration(fake, tmp_path):
    made = fake()
    argv = [
        "run",
        "p.yaml",
        "--source=-b.mp4",
        "--source",
        "c.mp4",
        "--set",
        "sinks=[lines]",
        "--set",
        "sinks.lines.path=x",
    ]
    assert cli.main([*argv, "--device", "cuda:1", "--threads", "3", "--overwrite", "-q"]) == 0
    (config,) = made.configs
    assert config.sources == (Clip(uri="-b.mp4"), Clip(uri="c.mp4"))
    assert config.sinks == (Lines(path="x"),)
    assert (config.device, config.threads, config.overwrite) == ("cuda:1", 3, True)


def test_nvtx_is_asked_for_on_the_command_line(fake):
    made = fake()
    assert cli.main(["run", "p.yaml", "-q"]) == cli.main(["run", "p.yaml", "-q", "--nvtx"]) == 0
    assert [options["nvtx"] for options in made.options] == [False, True]


def test_stacks_of_page_locking_are_asked_for_on_the_command_line(fake):
    made = fake()
    assert cli.main(["run", "p.yaml", "-q"]) == cli.main(["run", "p.yaml", "-q", "--pin-stacks"]) == 0
    assert [options["pin_stacks"] for options in made.options] == [False, True]


def test_allow_code_finds_modules_of_the_working_folder(fake, monkeypatch, capsys):
    Path("mine_for_cli_test.py").write_text(
        "from dataclasses import dataclass\nfrom framepipe.sink import Sink\n"
        "@dataclass(kw_only=True)\nclass Mine(Sink):\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = fake()
    argv = ["run", "p.yaml", "-q", "--set", "sinks=[mine_for_cli_test:Mine]"]
    assert cli.main(argv) == 2
    assert "--allow-code" in capsys.readouterr().err
    assert cli.main([*argv, "--allow-code"]) == 0
    assert type(made.configs[0].sinks[0]).__name__ == "Mine"


# -- the report file --


def test_the_report_is_written_whole_and_replaces_an_earlier_one(fake):
    fake(exit="incomplete", fps=12.5)
    for _ in range(2):
        assert cli.main(["run", "p.yaml", "-q", "--report", "out/r.json"]) == 3
    report = json.loads(Path("out/r.json").read_text(encoding="utf-8"))
    assert (report["schema"], report["exit"], report["fps"], report["pipeline"]) == (
        "framepipe.run/1",
        "incomplete",
        12.5,
        "p.yaml",
    )
    assert os.listdir("out") == ["r.json"]


def test_a_report_never_replaces_another_file_unless_asked(fake, capsys):
    made = fake()
    Path("clip.mp4").write_bytes(b"film")
    assert cli.main(["run", "p.yaml", "-q", "--report", "clip.mp4"]) == 2
    assert "no report" in capsys.readouterr().err
    assert Path("clip.mp4").read_bytes() == b"film"
    assert made.closes == 0
    assert cli.main(["run", "p.yaml", "-q", "--report", "clip.mp4", "--overwrite"]) == 0
    assert cli.main(["run", "p.yaml", "-q", "--report", "."]) == 2


def test_a_failed_run_has_a_report_too(fake):
    fake(exit="failed", error=SinkError("disk full"), warnings=["w"])
    assert cli.main(["run", "p.yaml", "-q", "--report", "r.json"]) == 1
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert (report["exit"], report["warnings"]) == ("failed", ["w"])


def test_a_run_that_never_began_has_a_report_too(fake):
    def during(pipeline: FakePipeline) -> None:
        raise OutputExistsError("rtsp://u:s3cr3t@h: exists")

    fake(during=during)
    assert cli.main(["run", "p.yaml", "-q", "--report", "r.json"]) == 2
    report = json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert (report["exit"], report["error"]) == ("failed", "rtsp://***@h: exists")


def test_a_report_that_cannot_be_put_in_place_leaves_nothing_behind(fake, monkeypatch, capsys):
    def refuse(source: Any, target: Any) -> None:
        raise PermissionError(13, "Permission denied")

    fake()
    monkeypatch.setattr(os, "replace", refuse)
    assert cli.main(["run", "p.yaml", "-q", "--report", "r.json"]) == 1
    assert (
        "--report r.json: cannot be written: Permission denied (is it open in another program?)"
        in capsys.readouterr().err
    )
    assert os.listdir() == ["p.yaml"]


def test_the_report_on_stdout(fake, capsys):
    fake()
    assert cli.main(["run", "p.yaml", "--report", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["exit"] == "complete"


# -- what a run says --


def report_of(**parts: Any) -> dict[str, Any]:
    frames = {
        "decoded": 60,
        "delivered": 50,
        "skipped": {"every": 6, "end": 2},
        "dropped": {"stopped": 2},
        "packet_errors": 1,
    }
    whole = {
        "exit": "incomplete",
        "frames": frames,
        "device": {"kind": "cpu", "name": "Some CPU", "why": "auto: CuPy is not installed"},
        "staging": {"strategy": "direct"},
        "sources": [{"name": "door", "error": None, "warnings": ["time stamps go back"]}],
        "seconds": 2.0,
        "fps": 25.0,
        "bottleneck": "sink",
        "sinks": {"0:lines": {"paths": ["x.jsonl", "gone.jsonl"]}},
        "warnings": ["no sound", "door: time stamps go back"],
        **parts,
    }
    return RunReport(**whole).to_dict()  # type: ignore[arg-type]


def test_the_closing_words():
    Path("x.jsonl").write_bytes(bytes(1500))
    assert list(_cli_run.closing_words(report_of())) == [
        "incomplete: 50 frames of door in 2.00 s (25.0 fps)",
        "decoded 60: 8 skipped (every 6, end 2), 2 dropped (stopped), 1 damaged packet",
        "device        cpu, Some CPU (auto: CuPy is not installed)",
        "staging       direct",
        "bottleneck    collecting, drawing and writing the results: everything before it",
        "              waited; try a faster codec or preset, or do less there",
        "warning: no sound",
        "warning: door: time stamps go back",
        "wrote x.jsonl (1.5 kB)",
        "wrote gone.jsonl",
    ]


GPU = {
    "device": {"kind": "cuda", "name": "NVIDIA Model", "why": "auto: a kernel compiled and ran"},
    "staging": {"strategy": "pooled", "slots": 5, "depth": 2, "batch": 8, "fillers": 2},
    "bottleneck": "staging",
    "upload": {"bytes": 8_640_000_000, "bytes_per_s": 4_320_000_000},
    "memory": {
        "pinned_bytes": 12_400_000,
        "pinned_allocations": 1,
        "device_bytes_peak": 310_000_000,
        "vram": [{"source": "none"}, {"free_start": 138_000_000_000, "free_least": 137_600_000_000, "free_end": None}],
    },
}


def test_the_closing_words_of_a_run_on_a_gpu_are_a_table_of_80_columns():
    words = list(_cli_run.closing_words(report_of(**GPU, warnings=[], sources=[], sinks={})))
    assert words[2:] == [
        "device        cuda, NVIDIA Model (auto: a kernel compiled and ran)",
        "staging       pooled, slots 5, depth 2, batch 8, fillers 2",
        "upload        8.6 GB (4.3 GB/s)",
        "page-locked   12.4 MB in 1 allocation",
        "video memory  310.0 MB at most; free 138.0 GB at the start, 137.6 GB at the",
        "              lowest",
        "bottleneck    staging: the device waited for frames to be copied; try more",
        "              fillers or a larger batch",
    ]
    assert max(len(line) for line in words) <= 80


def pinned_row(*pins):
    """The row of a run whose ``pins`` are pairs of owner and bytes."""
    rows = [{"owner": owner, "peak_bytes": nbytes} for owner, nbytes in pins]
    report = report_of(**{**GPU, "memory": {**GPU["memory"], "pins": rows}}, warnings=[], sources=[], sinks={})
    words = "\n".join(_cli_run.closing_words(report))
    return " ".join(words.partition("page-locked")[2].partition("video memory")[0].split())


def test_who_page_locked_is_told_where_there_are_several():
    assert pinned_row() == pinned_row(("ring slab (pooled)", 5)) == "12.4 MB in 1 allocation"
    several = [("ring slab (pooled)", 12_400_000), ("read-back of image", 6_000_000), ("ring slab (pooled)", 1_000_000)]
    assert pinned_row(*several) == ("12.4 MB in 1 allocation: ring slab (pooled) 13.4 MB, read-back of image 6.0 MB")
    many = [(f"read-back of t{i}", 1000 * (9 - i)) for i in range(6)]
    assert pinned_row(*many).endswith("read-back of t3 6.0 kB, 2 more")


def test_what_is_not_known_of_a_gpu_is_left_out():
    memory = {"pinned_bytes": 0, "pinned_allocations": 0, "device_bytes_peak": None, "vram": []}
    parts = {**GPU, "upload": {"bytes": 0, "bytes_per_s": None}, "memory": memory, "bottleneck": None}
    words = list(_cli_run.closing_words(report_of(**parts, warnings=[], sources=[], sinks={})))
    assert words[4:] == ["upload        0 B", "page-locked   0 B in 0 allocations"]


def test_nothing_of_a_gpu_is_said_on_the_cpu():
    parts = {**GPU, "device": {"kind": "cpu", "name": "Some CPU"}}
    labels = [line.split()[0] for line in _cli_run.closing_words(report_of(**parts, warnings=[], sources=[], sinks={}))]
    assert labels == ["incomplete:", "decoded", "device", "staging", "bottleneck", "fillers"]


@pytest.mark.parametrize("name", ["decode", "staging", "launch", "device", "sink"])
def test_every_bottleneck_has_words_and_something_to_try(name):
    words = " ".join(_cli_run.closing_words(report_of(bottleneck=name, warnings=[], sources=[], sinks={})))
    assert "; try " in " ".join(words.split("bottleneck")[1].split())


def test_a_word_longer_than_a_row_stays_whole():
    device = {"kind": "cpu", "name": "x" * 90, "why": "a-b"}
    words = list(_cli_run.closing_words(report_of(device=device, warnings=[], sources=[], sinks={})))
    assert words[2:5] == ["device        cpu,", f"              {'x' * 90}", "              (a-b)"]


def test_the_closing_words_name_sources_that_failed_once():
    sources = [
        {"name": "a", "error": "a.mp4: no such file", "delivered": 0, "status": "failed"},
        {"name": "b", "error": None, "delivered": 50, "status": "complete"},
    ]
    words = list(_cli_run.closing_words(report_of(sources=sources)))
    assert words[0].startswith("incomplete: 50 frames of 2 sources")
    assert "source a: a.mp4: no such file" in words
    assert "source a" not in "".join(
        _cli_run.closing_words(report_of(sources=sources), SourceError("a.mp4: no such file"))
    )


def test_of_several_sources_each_has_a_row():
    sources = [
        {"name": "door", "delivered": 1, "status": "incomplete", "packet_errors": 2, "counters": {"backward": 3}},
        {"name": "a-name-that-is-much-too-long-for-a-row", "delivered": 50, "status": "complete", "counters": {}},
    ]
    words = list(_cli_run.closing_words(report_of(sources=sources, warnings=[], sinks={})))
    assert words[2:4] == [
        "  door                                   1 frame   incomplete  3 backward, 2 damaged packets",
        "  a-name-that-is-much-too-long-fo…      50 frames  complete",
    ]


def test_of_a_run_that_delivered_nothing_the_error_is_all_there_is_to_say():
    report = report_of(exit="failed", frames={"decoded": 0, "delivered": 0}, warnings=[], sources=[], sinks={})
    assert list(_cli_run.closing_words(report)) == []


def test_an_empty_report_still_has_words():
    assert list(_cli_run.closing_words(RunReport(exit="stopped").to_dict())) == []


def test_a_run_talks_on_stderr_only_and_quiet_means_quiet(fake, capsys):
    fake(frames={"decoded": 5, "delivered": 5}, sources=[{"name": "a"}], seconds=1.0, fps=5.0)
    assert cli.main(["run", "p.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "complete: 5 frames of a in 1.00 s (5.0 fps)" in err
    assert cli.main(["run", "p.yaml", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_credentials_are_shown_nowhere(fake, capsys):
    url = "rtsp://cam_user:s3cr3t-Pw@127.0.0.1:5/x?token=s3cr3t-Pw"
    error = SourceError(f"{url}: cannot be opened")
    error.__cause__ = OSError(5, "Input/output error", url)
    fake(
        exit="failed",
        error=error,
        warnings=[f"lost {url}"],
        frames={"decoded": 0, "delivered": 0},
        sources=[{"name": url}],
    )
    assert cli.main(["run", "p.yaml", "--source", url, "--debug"]) == 1
    assert cli.main(["check", "p.yaml", "--source", url, "--set", f"sources[0].fsp={url}"]) == 2
    out, err = capsys.readouterr()
    assert "127.0.0.1" in err
    assert "s3cr3t" not in out + err
    assert "cam_user" not in out + err


# -- progress --


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_every_five_seconds_of_the_run(capsys):
    with _cli_progress.choose(quiet=False, results_on_stdout=False) as progress:
        for quarter in range(4 * 12):
            progress.show(statistics(quarter / 4))
        progress.stopping = True
        progress.show(statistics(15.5, dropped=3, expected=None))
    assert capsys.readouterr().err.splitlines() == [
        "framepipe: 50/100 frames, 50.0 fps, 5.00 s",
        "framepipe: 50/100 frames, 50.0 fps, 10.0 s",
        "framepipe: 50 frames, 50.0 fps, 15.5 s, 3 dropped, stopping",
    ]


ON_GPU: dict[str, Any] = {
    "pinned_bytes": 12_400_000,
    "device_bytes": 310_000_000,
    "vram_free_bytes": 138_000_000_000,
    "upload_bytes_per_s": 4.2e9,
}


def test_plain_lines_tell_of_a_gpu_where_there_is_one(capsys):
    progress = _cli_progress.choose(quiet=False, results_on_stdout=False)
    progress.show(statistics(5.0, **ON_GPU))
    progress.show(statistics(10.0, **{**ON_GPU, "vram_free_bytes": None, "upload_bytes_per_s": None}))
    assert capsys.readouterr().err.splitlines() == [
        "framepipe: 50/100 frames, 50.0 fps, 5.00 s, upload 4.2 GB/s, pinned 12.4 MB, video memory 310.0 MB "
        "(free 138.0 GB)",
        "framepipe: 50/100 frames, 50.0 fps, 10.0 s, pinned 12.4 MB, video memory 310.0 MB",
    ]


def test_a_terminal_gets_a_line_about_a_gpu_below_the_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with _cli_progress.choose(quiet=False, results_on_stdout=False) as progress:
        progress.show(statistics(**ON_GPU))
        lines = terminal.getvalue().splitlines()
    assert "50/100 frames" in lines[-2]
    assert lines[-1] == "upload 4.2 GB/s · pinned 12.4 MB · video memory 310.0 MB (free 138.0 GB)"


def test_what_takes_long_before_the_first_frame_is_told_once(fake, monkeypatch, capsys):
    fake()
    assert cli.main(["run", "p.yaml"]) == 0
    assert capsys.readouterr().err.count("framepipe: compiling\n") == 1
    assert cli.main(["run", "p.yaml", "-q"]) == 0
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["run", "p.yaml"]) == 0
    assert terminal.getvalue().count("framepipe: compiling\n") == 1


def test_a_terminal_gets_a_bar_and_a_line_for_each_of_a_few_sources(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with _cli_progress.choose(quiet=False, results_on_stdout=True) as progress:
        progress.show(statistics(sources={"door": 20, "[gate]": 30}, dropped=4))
        print("a result")
        progress.stopping = True
        progress.show(statistics(2.0, expected=None))
    text = terminal.getvalue()
    assert "50/100 frames" in text
    assert "50 fps, 4 dropped" in text
    assert "door" in text
    assert "[gate]" in text
    assert "stopping" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert capsys.readouterr().out == "a result\n"


def test_no_bar_where_it_would_be_drawn_over_results(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(_cli_progress.choose(quiet=False, results_on_stdout=True), _cli_progress.Lines)
    assert isinstance(_cli_progress.choose(quiet=False, results_on_stdout=False), _cli_progress.Bar)
    assert _cli_progress.choose(quiet=True, results_on_stdout=False).show is None


# -- the other commands --


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"framepipe {__version__}\n"


def test_help_shows_brackets_as_they_are(capsys):
    assert cli.main(["run", "--help"]) == 0
    assert "sinks=[discard]" in capsys.readouterr().out


def test_check_opens_nothing_and_counts(capsys, monkeypatch):
    monkeypatch.setattr(Source, "open", None)
    assert cli.main(["check", "p.yaml", "--set", "sinks=[lines, lines]"]) == 0
    assert capsys.readouterr().out == "p.yaml: ok (1 source, 0 stages, 2 sinks)\n"


def test_list_shows_names_with_their_first_line(capsys, monkeypatch):
    def broken(kind: str, name: str) -> type:
        raise ImportError("no module cupy")

    assert cli.main(["list", "sinks"]) == 0
    assert capsys.readouterr().out == "lines  A line a picture.\n"
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.endswith(":")] == [
        "stages:",
        "sources:",
        "sinks:",
        "staging:",
        "devices:",
    ]
    monkeypatch.setattr(registry, "find", broken)
    assert cli.main(["list", "sinks"]) == 0
    assert "(cannot be imported: ImportError: no module cupy)" in capsys.readouterr().out
    assert cli.main(["list", "sink"]) == 2
    assert "did you mean 'sinks'?" in capsys.readouterr().err


def test_schema_is_json(capsys):
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "framepipe pipeline"


def test_a_reader_of_stdout_that_leaves_early_is_no_traceback(monkeypatch, capsys):
    def leave(*args: Any) -> None:
        raise BrokenPipeError

    silenced: list[bool] = []
    monkeypatch.setattr(cli, "_silence_stdout", lambda: silenced.append(True))
    monkeypatch.setattr("framepipe._cli_list.lines", leave)
    assert cli.main(["list"]) == 1
    assert silenced == [True]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argv", [["--help"], ["probe", "--help"]])
def test_what_a_command_does_is_said_in_a_line(argv, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(argv) == 0
    commands = capsys.readouterr().out.split("Commands:\n")[1].splitlines()
    assert len(commands) >= 3
    assert [line for line in commands if line.endswith("...") or not line.endswith(".")] == []


# -- shipped pipelines --


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Shipped files as a wheel has them, inside the package."""
    package = tmp_path / "site" / "framepipe"
    for name, text in (
        ("pipelines/motion.yaml", "version: 1\nsources: [../samples/a.mp4]\n"),
        ("samples/a.mp4", "film"),
    ):
        path = package / "_shipped" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (package / "_shipped" / "samples" / "__pycache__").mkdir()
    (package / "_shipped" / "samples" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "site" / "pipelines").mkdir()  # somebody else's
    (tmp_path / "site" / "pipelines" / "other.yaml").touch()
    monkeypatch.setattr(shipped.importlib.resources, "files", lambda package_name: package)
    return package


def test_a_shipped_pipeline_is_found_by_name_and_a_file_wins(checkout):
    assert shipped.find("motion") == checkout / "_shipped" / "pipelines" / "motion.yaml"
    Path("motion").mkdir()
    assert shipped.find("motion") == checkout / "_shipped" / "pipelines" / "motion.yaml"
    Path("motion").rmdir()
    Path("motion").touch()
    assert shipped.find("motion") == Path("motion")
    with pytest.raises(ConfigError, match="did you mean 'motion'"):
        shipped.find("moton.yaml")
    with pytest.raises(ConfigError):
        shipped.find("other")
    with pytest.raises(ConfigError, match="is no pipeline file; an address goes with --source"):
        shipped.find("rtsp://camera/1")


def test_in_a_checkout_the_folders_beside_the_package_are_the_shipped_ones(checkout):
    site = checkout.parent
    for path in sorted((checkout / "_shipped").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert shipped.pipelines() == {}
    (site / "pyproject.toml").touch()
    assert shipped.pipelines() == {"other": site / "pipelines" / "other.yaml"}


def test_init_writes_what_is_shipped_and_nothing_over_other_files(checkout, capsys):
    report = checkout / "_shipped" / "samples" / "reports" / "bench.html"
    report.parent.mkdir()
    report.write_text("to be read, not tried", encoding="utf-8")
    assert cli.main(["init", "new"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(Path("new/pipelines/motion.yaml")), str(Path("new/samples/a.mp4"))]
    assert f"framepipe run {Path('new/pipelines/motion.yaml')}" in err
    assert sorted(path.name for path in Path("new").rglob("*")) == ["a.mp4", "motion.yaml", "pipelines", "samples"]
    assert cli.main(["init", "new"]) == 0  # all the same already
    Path("new/samples/a.mp4").write_text("mine", encoding="utf-8")
    Path("new/pipelines/motion.yaml").unlink()
    assert cli.main(["init", "new"]) == 2
    assert "a.mp4: exists already" in capsys.readouterr().err
    assert not Path("new/pipelines/motion.yaml").exists()
    assert cli.main(["init", "new", "--overwrite"]) == 0
    assert Path("new/samples/a.mp4").read_text(encoding="utf-8") == "film"
    assert cli.main(["init", "p.yaml"]) == 2
    capsys.readouterr()
    assert cli.main(["init", "p.yaml/new"]) == 1
    told = capsys.readouterr().err
    assert "cannot be written: Not a directory" in told or sys.platform == "win32"
    assert "This is a bug" not in told


# -- processes --


def _python(*argv: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(cli.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, env=env, check=False)


def test_importing_and_starting_load_nothing_heavy():
    code = (
        "import sys, framepipe\n"
        "heavy = {'av', 'pydantic', 'cupy', 'numpy', 'yaml', 'psutil', 'rich', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from framepipe.cli import main\n"
        "main(['--version'])\n"
        "print(sorted((heavy - {'rich', 'typer'}) & set(sys.modules)))\n"
    )
    assert _python("-c", code).stdout.splitlines() == ["[]", f"framepipe {__version__}", "[]"]


def test_the_module_runs():
    done = _python("-m", "framepipe", "check", "none.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("framepipe: error: none.yaml: no such file, and no shipped pipeline of that name")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="there a child cannot be sent Ctrl-C alone")
def test_ctrl_c_ends_an_endless_run_with_whole_results(tmp_path):
    (tmp_path / "endless.yaml").write_text(
        "version: 1\nsources: [{synthetic: {width: 64, height: 48, shapes: 1, frames: }}]\n"
        "sinks: [{jsonl: {path: '-'}}]\n",
        encoding="utf-8",
    )
    argv = [sys.executable, "-m", "framepipe", "run", "endless.yaml", "--device", "cpu", "--report", "r.json"]
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as child:
        watchdog = threading.Timer(30, child.kill)
        watchdog.start()
        first = json.loads(child.stdout.readline())  # it runs
        child.send_signal(signal.SIGINT)
        out, err = child.stdout.read(), child.stderr.read()
    watchdog.cancel()
    assert child.returncode == 130
    assert (first["index"], first["source"]) == (0, "synthetic")
    assert all(json.loads(line)["index"] == i for i, line in enumerate(out.splitlines(), 1))
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (report["exit"], report["frames"]["delivered"]) == ("stopped", len(out.splitlines()) + 1)
    assert "Traceback" not in err
    assert "stopped: " in err
