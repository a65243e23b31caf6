"""YAML to a checked configuration: every mistake at once, with file, line, parameter and the nearest name."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framepipe import registry
from framepipe.config import PipelineConfig, load, loads, schema
from framepipe.errors import ConfigError
from framepipe.sink import Sink
from framepipe.source import Source
from framepipe.stage import Stage
from framepipe.stager import Stager
from framepipe.units import Seconds


@dataclass(kw_only=True)
class Clip(Source):
    uri: str
    rate: float | None = None


@dataclass(kw_only=True)
class Pattern(Source):
    width: int = 64
    height: int = 48
    files: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Shrink(Stage):
    """Makes pictures smaller.

    More words.
    """

    width: int | None = None
    size: tuple[int, int] | None = None
    filter: Literal["area", "bilinear"] = "area"
    factor: float = 1.0
    classes: list[Literal["car", "person"]] = field(default_factory=list)
    slots: int | Literal["auto"] = "auto"
    at: Seconds = 0.0
    label: str = ""
    keep: bool = True
    mask: Path | None = None
    hook: Any = None

    def __post_init__(self) -> None:
        problems = [f"{name} must be positive" for name in ("factor", "width") if (getattr(self, name) or 1) <= 0]
        if self.width and self.size:
            problems.append("either width or size")
        if problems:
            raise ConfigError(f"shrink: {'; '.join(problems)}", problems)


@dataclass(kw_only=True)
class Lines(Sink):
    path: Path | str = "-"
    folder: Path | None = None


@dataclass(kw_only=True)
class Slab(Stager):
    pass


@pytest.fixture(autouse=True)
def components(monkeypatch):
    """The registry with nothing but the classes above."""
    known = {
        "sources": {"file": Clip, "pattern": Pattern},
        "stages": {"shrink": Shrink},
        "sinks": {"lines": Lines},
        "staging": {"slab": Slab},
    }
    monkeypatch.setattr(registry, "_registered", known)
    monkeypatch.setattr(registry, "names", lambda kind: sorted(known[kind]))


HEAD = "version: 1\nsources: [a.mp4]\n"
TAB_IN_PATH = (
    r"the control character '\t' in a path; in double quotes YAML takes \ and a letter for one: "
    r"write a Windows path in single quotes, 'C:\new\table.mp4'"
)
NO_SOURCES = "missing: what to read, as a list of files, URLs or patterns"
STAGE = HEAD + "stages:\n  - shrink:\n      "


def problems(text: str | bytes, **options: Any) -> list[str]:
    options.setdefault("env", {})
    with pytest.raises(ConfigError) as caught:
        loads(text, path=Path("p.yaml"), **options)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return list(caught.value.problems)


def good(text: str, path: Path = Path("p.yaml"), **options: Any) -> PipelineConfig:
    options.setdefault("env", {})
    return loads(text, path=path, **options)


def stage(text: str, **options: Any) -> Any:
    return good(STAGE + text, **options).stages[0]


# -- what a good file gives --


def test_everything_has_a_default_but_version_and_sources():
    config = good(HEAD)
    assert config.sources == (Clip(uri="a.mp4"),)
    assert (config.device, config.threads, config.decode) == ("auto", None, "auto")
    assert (config.stages, config.sinks, config.overwrite) == ((), (), False)
    assert config.staging.strategy == "auto"


def test_kwargs_are_what_a_pipeline_takes_with_components_of_their_own():
    config = good(
        HEAD + "stages: [shrink]\nsinks: [lines]\nthreads: 3\ndecode: linear\ndevice: cuda:1\n", overwrite=True
    )
    first, second = config.kwargs(), config.kwargs()
    keys = {"sources", "stages", "sinks", "device", "device_memory", "staging", "threads", "decode", "guard"}
    assert set(first) == {*keys, "overwrite"}
    assert (first["device"], first["threads"], first["decode"], first["overwrite"]) == ("cuda:1", 3, "linear", True)
    assert first["stages"] == second["stages"]
    assert first["stages"][0] is not second["stages"][0]
    assert first["stages"][0].id == "shrink"


def test_staging_is_a_name_or_a_block():
    assert good(HEAD + "staging: slab\n").staging.strategy == "slab"
    options = good(HEAD + "staging: {strategy: slab, slots: 6, batch: 4, batch_timeout_s: 1e-3}\n").staging
    assert (options.slots, options.batch, options.batch_timeout_s) == (6, 4, 0.001)


def test_ids_are_said_or_made():
    config = good(
        HEAD + "stages: [shrink, shrink, {shrink: {width: 4}, id: small}, {shrink: , id: shrink-3}, shrink]\n"
    )
    assert [each.id for each in config.stages] == ["shrink", "shrink-2", "small", "shrink-3", "shrink-4"]


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("b.mp4", Clip(uri="b.mp4")),
        ("'-'", Clip(uri="-")),
        ("{uri: b.mp4, name: door, start: '1:30', end: 95.5}", Clip(uri="b.mp4", name="door", start=90.0, end=95.5)),
        ("pattern", Pattern()),
        ("{pattern: {width: 640}}", Pattern(width=640)),
        ("{pattern: }", Pattern()),
        ("{file: {uri: b.mp4}}", Clip(uri="b.mp4")),
        ("rtsp://h/x", Clip(uri="rtsp://h/x")),
    ],
)
def test_the_ways_to_write_a_source(entry, source):
    assert good(f"version: 1\nsources: [{entry}]\n").sources == (source,)


def test_a_file_wins_over_a_kind_of_source(tmp_path):
    (tmp_path / "pattern").touch()
    config = good("version: 1\nsources: [pattern]\n", path=tmp_path / "p.yaml")
    assert config.sources == (Clip(uri=str(tmp_path / "pattern")),)


def test_source_defaults_reach_every_source_that_has_the_parameter():
    text = "version: 1\nsource_defaults: {fps: 5, rate: 9}\nsources: [a.mp4, {uri: b.mp4, fps: 2}, pattern]\n"
    assert good(text).sources == (Clip(uri="a.mp4", fps=5, rate=9), Clip(uri="b.mp4", fps=2, rate=9), Pattern(fps=5))


def test_inputs_belong_to_the_file_outputs_to_the_working_folder(tmp_path):
    text = (
        "version: 1\nsources: [a.mp4, 'sub/*.mp4', rtsp://h/x, '-', 'C:\\v\\a.mp4', '\\\\host\\v.mp4', pipe:0]\n"
        "stages: [{shrink: {mask: m.png}}]\nsinks: [{lines: {path: out/x.jsonl, folder: out}}]\n"
    )
    config = good(text, path=tmp_path / "p.yaml")
    uris = [source.uri for source in config.sources]
    assert uris[:2] == [str(tmp_path / "a.mp4"), str(tmp_path / "sub" / "*.mp4")]
    assert uris[2:] == ["rtsp://h/x", "-", r"C:\v\a.mp4", r"\\host\v.mp4", "pipe:0"]
    assert config.stages[0].mask == tmp_path / "m.png"
    text = "version: 1\nsources: [{pattern: {files: [a.png, 'C:\\b.png']}}]\n"
    assert good(text, path=tmp_path / "p.yaml").sources[0].files == (str(tmp_path / "a.png"), "C:\\b.png")
    assert (config.sinks[0].path, config.sinks[0].folder) == ("out/x.jsonl", Path("out"))


def test_a_pattern_does_not_match_in_the_name_of_its_folder(tmp_path):
    folder = tmp_path / "[ab]"
    folder.mkdir()
    (folder / "x[1].mp4").touch()
    config = good("version: 1\nsources: ['*.mp4', 'x[1].mp4']\n", path=folder / "p.yaml")
    assert [s.uri for s in config.sources] == [str(tmp_path / "[[]ab]" / "*.mp4"), str(folder / "x[1].mp4")]


@pytest.mark.skipif(sys.platform == "win32", reason="there a colon in a name is no file of its own")
def test_a_file_whose_name_looks_like_a_scheme(tmp_path):
    (tmp_path / "cam1:b.mp4").touch()
    config = good("version: 1\nsources: ['cam1:b.mp4', 'lavfi:x']\n", path=tmp_path / "p.yaml")
    assert [source.uri for source in config.sources] == [str(tmp_path / "cam1:b.mp4"), "lavfi:x"]


# -- scalars --


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("factor: 1e-3", "factor", 0.001),
        ("factor: 2", "factor", 2.0),
        ("width: 0x10", "width", 16),
        ("width: 010", "width", 10),
        ("width: ~", "width", None),
        ("at: 1:30", "at", 90.0),
        ("at: 90", "at", 90.0),
        ("label: yes", "label", "yes"),
        ("label: 2024-01-01", "label", "2024-01-01"),
        ("label: !!str 4", "label", "4"),
        ("keep: false", "keep", False),
        ("size: [640, 360]", "size", (640, 360)),
        ("slots: 4", "slots", 4),
        ("slots: auto", "slots", "auto"),
        ("classes: [car]", "classes", ["car"]),
        ("label: 日本 🎥", "label", "日本 🎥"),
        ("label: 'a$$b $HOME'", "label", "a$b $HOME"),
    ],
)
def test_scalars_follow_yaml_1_2(text, name, value):
    assert getattr(stage(text), name) == value


def test_a_bom_is_fine():
    assert loads(("\ufeff" + HEAD).encode()).sources


# -- the environment --


def test_variables_in_texts():
    env = {"CAM": "rtsp://h/x", "EMPTY": "", "N": "7"}
    config = good(
        "version: 1\nsources: ['${CAM}/1', '${NONE:-b}.mp4', '${EMPTY:-c}.mp4', 'd${EMPTY}.mp4']\n"
        "stages: [{shrink: {width: '${N}', label: '${N}'}}, {shrink: {size: ['${N}', 2]}}]\nthreads: ${N}\n",
        env=env,
    )
    assert [source.uri for source in config.sources] == ["rtsp://h/x/1", "b.mp4", "c.mp4", "d.mp4"]
    assert (config.stages[0].width, config.stages[0].label, config.stages[1].size) == (7, "7", (7, 2))
    assert config.threads == 7


def test_a_missing_variable_is_a_mistake_with_its_line_and_no_other():
    found = problems(STAGE + "width: ${N}\n      factor: ${M-1}\n      label: ${\n")
    assert found == [
        "p.yaml:5: stages[0].width: the environment variable N is not set; ${N:-x} would give a default",
        "p.yaml:6: stages[0].factor: '${M-1}' is no ${NAME} or ${NAME:-default}; a plain $ is written $$",
        "p.yaml:7: stages[0].label: '${' is no ${NAME} or ${NAME:-default}; a plain $ is written $$",
    ]


def test_what_came_from_the_environment_is_never_shown():
    found = problems(STAGE + "width: ${PW}\n", env={"PW": "s3cr3t"})
    assert found == ["p.yaml:5: stages[0].width: expected a whole number, got what '${PW}' stands for"]


# -- mistakes --


def test_every_mistake_at_once_in_the_order_of_lines():
    found = problems(
        "version: 2\n"
        "devise: cpu\n"
        "device: GPU\n"
        "staging: {strategy: Slab, slotz: 1, batch: '4'}\n"
        "threads: 0\n"
        "decode: Linear\n"
        "overwrite: true\n"
        "sources:\n"
        "  - url: a.mp4\n"
        "  - pattern: {widht: 4, height: x}\n"
        "stages:\n"
        "  - shirnk\n"
        "  - shrink: {widht: 640, filter: Area}\n"
        "sinks: [{lines: {paht: x}}]\n"
    )
    assert found == [
        "p.yaml:1: version: expected 1, the only version this framepipe knows, got 2",
        "p.yaml:2: devise: unknown key; did you mean 'device'?",
        "p.yaml:3: device: unknown device 'GPU'; did you mean 'cuda'?",
        "p.yaml:4: staging.slotz: unknown parameter; did you mean 'slots'?",
        "p.yaml:4: staging.batch: expected a whole number, got the text '4'; remove the quotes",
        "p.yaml:5: threads: expected at least 1 decode thread, got 0",
        "p.yaml:6: decode: expected 'auto', 'frame', 'segments' or 'linear', got the text 'Linear'; "
        "did you mean 'linear'?",
        "p.yaml:7: overwrite: unknown key; it is an option of the command line",
        "p.yaml:9: sources[0].url: unknown parameter; did you mean 'uri'?",
        "p.yaml:10: sources[1].widht: unknown parameter; did you mean 'width'?",
        "p.yaml:10: sources[1].height: expected a whole number, got the text 'x'",
        "p.yaml:12: stages[0]: unknown stage 'shirnk'; did you mean 'shrink'?",
        "p.yaml:13: stages[1].widht: unknown parameter; did you mean 'width'?",
        "p.yaml:13: stages[1].filter: expected 'area' or 'bilinear', got the text 'Area'; did you mean 'area'?",
        "p.yaml:14: sinks[0].paht: unknown parameter; did you mean 'path'?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('width: "4"', "width: expected a whole number, got the text '4'; remove the quotes"),
        ("width: 4.0", "width: expected a whole number, got 4.0"),
        ("width: true", "width: expected a whole number, got true"),
        ("factor: .nan", "factor: expected a finite number, got nan"),
        ("keep: yes", "keep: expected true or false, got the text 'yes'"),
        ("label: 4", "label: expected text, got 4"),
        ("size: [1]", "size: expected a list of 2 values (a whole number each), got the list [1]"),
        ("size: 4", "size: expected a list of 2 values (a whole number each), got 4"),
        ("slots: Auto", "slots: expected a whole number or 'auto', got the text 'Auto'; did you mean 'auto'?"),
        ("at: 1:75", "at: minutes and seconds go from 0 to 59, got the text '1:75'"),
        ("at: soon", "at: expected seconds or [h:]mm:ss[.f], got the text 'soon'"),
        ("factor: ", "factor: expected a number, got nothing"),
        ("factor: -1", "factor: must be positive"),
        ("id: x", "id: unknown parameter; 'id' stands beside 'shrink', not below it"),
    ],
)
def test_a_wrong_value_says_what_was_expected(text, problem):
    assert problems(STAGE + text) == [f"p.yaml:5: stages[0].{problem}"]


def test_a_wrong_word_in_a_list_names_the_nearest():
    (found,) = problems(STAGE + "classes: [car, persn]")
    assert found.endswith('got the list ["car", "persn"]; did you mean \'person\'?')


def test_what_the_class_says_goes_to_the_parameter_it_names_or_to_the_stage():
    assert problems(STAGE + "size: [1, 2]\n      width: 4\n      factor: -1\n") == [
        "p.yaml:4: stages[0]: either width or size",
        "p.yaml:7: stages[0].factor: must be positive",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "p.yaml: empty; a pipeline begins with 'version: 1' and has 'sources'"),
        ("# nothing\n", "p.yaml: empty; a pipeline begins with 'version: 1' and has 'sources'"),
        (HEAD + 'stages: [{shrink: {mask: "a\\tb"}}]\n', f"p.yaml:3: stages[0].mask: {TAB_IN_PATH}"),
        ("- a\n", "p.yaml:1: expected a mapping that begins with 'version: 1'"),
        ("stages: [shrink]\nversion: 1\n", f"p.yaml:1: sources: {NO_SOURCES}"),
        ("version: 1\nsources: []\n", f"p.yaml:2: sources: {NO_SOURCES}"),
        ("sources: [a]\n", "p.yaml:1: version: missing; write 'version: 1'"),
        (HEAD + "stages:\n\t- shrink\n", "p.yaml:4: a tab; YAML is indented with spaces"),
        (HEAD + "sources: [b]\n", "p.yaml:3: sources: given twice, first in line 2"),
        (STAGE + "width: 1\n      width: 2\n", "p.yaml:6: stages[0].width: given twice, first in line 5"),
        (
            HEAD + "stages: {shrink: }\n",
            "p.yaml:3: stages: expected a list: [ …, … ], or a line that begins with '- ' for each",
        ),
        (
            HEAD + "stages: [4]\n",
            "p.yaml:3: stages[0]: expected the name of a stage, or the name with its parameters below it",
        ),
        (
            HEAD + "stages:\n  - shrink:\n    width: 4\n",
            "p.yaml:4: stages[0]: 'width' beside 'shrink': indent parameters further than the stage's name",
        ),
        (
            HEAD + "stages: [{shrink: 4}]\n",
            "p.yaml:3: stages[0]: expected the parameters of 'shrink', each as 'name: value', such as {width: …}",
        ),
        (
            HEAD + "stages: [{shrink: , id: a}, {shrink: , id: a}]\n",
            "p.yaml:3: stages[1].id: the id 'a' is already that of stages[0]",
        ),
        (
            HEAD + "stages: [{shrink: , id: a.b}]\n",
            "p.yaml:3: stages[0].id: expected a word of letters, digits, _ and -, beginning with a letter",
        ),
        ("version: 1\nsources: [{file: {}}]\n", "p.yaml:2: sources[0].uri: missing; 'file' needs it"),
        ("version: 1\nsources: ['']\n", "p.yaml:2: sources[0].uri: the name of an input is empty"),
        (
            "version: 1\nsources:\n  - {uri: a, name: door}\n  - {uri: b, name: door}\n",
            "p.yaml:4: sources[1].name: 'door' is already the name of sources[0]",
        ),
        (
            HEAD + "source_defaults: {fsp: 1}\n",
            "p.yaml:3: source_defaults.fsp: unknown parameter; did you mean 'fps'?",
        ),
        (
            HEAD + "source_defaults: {fps: x}\n",
            "p.yaml:3: source_defaults.fps: expected a number, got the text 'x'",
        ),
        (
            HEAD + "staging: 4\n",
            "p.yaml:3: staging: expected a strategy, or {strategy: …, slots: …, depth: …, batch: …}",
        ),
        (HEAD + "device: &a [*a]\n", "p.yaml:3: device[0]: an anchor that contains itself"),
        (HEAD + "device: *x\n", "p.yaml:3: found undefined alias 'x'"),
        (
            HEAD + "stages: [x.py:Y]\n",
            "p.yaml:3: stages[0]: 'x.py:Y' is Python code to import; allow that with --allow-code (allow_code=True)",
        ),
    ],
)
def test_one_mistake(text, problem):
    found = problems(text)
    assert problem in found
    assert len([each for each in found if "device" not in each]) <= 1


@pytest.mark.parametrize("path", [r"C:\temp\a.mp4", r"D:\new", r"C:\Pictures\a.mp4"])
def test_a_windows_path_in_double_quotes_that_is_yaml(path):
    (found,) = problems(f'version: 1\nsources:\n  - "{path}"\n')
    assert found.startswith("p.yaml:3: sources[0].uri: the control character '\\")
    assert "single quotes" in found
    (found,) = problems(f'{HEAD}sinks:\n  - lines: {{path: "{path}"}}\n')
    assert found.startswith("p.yaml:4: sinks[0].path: the control character")


@pytest.mark.parametrize("path", [r"C:\Users\a.mp4", r"C:\data", r"C:\xvid"])
def test_a_windows_path_in_double_quotes_that_is_no_yaml(path):
    (found,) = problems(f'version: 1\nsources:\n  - "{path}"\n')
    assert found.startswith("p.yaml:3: ")
    assert "Windows path" in found


def test_a_windows_path_in_single_quotes_keeps_its_backslashes():
    assert good("version: 1\nsources: ['C:\\temp\\a.mp4']\n").sources[0].uri == "C:\\temp\\a.mp4"


@pytest.mark.parametrize("data", [HEAD.encode("utf-16"), b"version: 1\nsources: [\xe9.mp4]\n"])
def test_anything_but_utf_8_says_how_to_save_it(data):
    (found,) = problems(data)
    assert found.endswith("save the file as UTF-8")
    assert found.startswith("p.yaml:")


@pytest.mark.parametrize("data", [b"\0\0\0\x20ftypisom\xb1", b"x" * ((1 << 22) + 1)], ids=["binary", "large"])
def test_a_video_in_place_of_a_pipeline_says_where_it_goes(tmp_path, data):
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.mp4: is no pipeline file; a video goes with --source"):
        load(tmp_path / "a.mp4")


def test_a_folder_in_place_of_a_pipeline(tmp_path, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")  # so does Windows

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="is a folder, not a pipeline file"):
        load(tmp_path)


def test_a_line_of_tabs_says_every_line():
    assert problems("version: 1\nsources:\n\t- a\n\t- b\n") == [
        "p.yaml:3: a tab; YAML is indented with spaces (lines 3, 4)"
    ]


def test_aliases_of_aliases_end():
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    assert any("too many values" in each for each in problems(bomb))


def test_deep_nesting_is_a_mistake_and_no_crash():
    (found,) = problems(HEAD + "stages: " + "[" * 500)
    assert "nested" in found


def test_credentials_are_in_no_message():
    found = problems(
        "version: 1\nsources: [{uri: 'rtsp://u:s3cr3t@h', fps: 'rtsp://u:s3cr3t@h'}]\n", sets=["x.y=rtsp://u:s3cr3t@h"]
    )
    assert "s3cr3t" not in "".join(found)
    assert "s3cr3t" not in repr(good("version: 1\nsources: ['rtsp://u:s3cr3t@h']\n"))


def test_nothing_is_opened_before_every_mistake_is_told(tmp_path, monkeypatch):
    made: list[Any] = []
    monkeypatch.setattr(Source, "open", lambda self, stopping: made.append(self))
    monkeypatch.setattr(Sink, "open", lambda self, context: made.append(self))
    (tmp_path / "p.yaml").write_text(HEAD + "sinks: [{lines: {path: out/x.jsonl}}]\nstages: [nope]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        load("p.yaml")
    assert made == []
    assert os.listdir(tmp_path) == ["p.yaml"]


_WORDS = st.sampled_from(
    ["version", "device", "staging", "strategy", "threads", "sources", "uri", "name", "file", "pattern", "width",
     "stages", "shrink", "id", "size", "label", "at", "classes", "sinks", "lines", "path", "a.mp4", "${X}", "${",
     "1:30", "auto"]
)  # fmt: skip
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=12,
)
_STEPS = st.lists(_WORDS | st.sampled_from(["0", "[0]", "[9]", ""]), max_size=4).map(".".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    document=_VALUES
    | st.fixed_dictionaries({"version": st.just(1), "sources": _VALUES, "stages": _VALUES, "sinks": _VALUES}),
    sets=st.lists(st.tuples(_STEPS, _VALUES), max_size=2),
)
def test_whatever_is_written_is_a_configuration_or_a_list_of_mistakes(document, sets):
    assignments = [f"{path}={json.dumps(value)}" for path, value in sets]
    with contextlib.suppress(ConfigError):
        assert loads(json.dumps(document), sets=assignments, env={"X": "1"}).sources


# -- the file itself --


def test_load_reads_a_file(tmp_path):
    (tmp_path / "p.yaml").write_text(HEAD, encoding="utf-8")
    config = load(tmp_path / "p.yaml")
    assert config.path == tmp_path / "p.yaml"
    assert config.sources[0].uri == str(tmp_path / "a.mp4")


def test_a_file_that_is_not_there_or_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such file"):
        load(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match=r"is a folder|denied"):
        load(tmp_path)


# -- the command line over it --


def test_sets_change_values_by_id_and_position():
    config = good(
        HEAD + "staging: slab\nstages: [shrink, {shrink: {width: 4}}]\nsinks: [lines]\n",
        sets=[
            "stages.shrink.width=9",
            "stages.shrink-2.at=1:30",
            "sinks[0].path=-",
            "sinks.lines.folder=out",
            "sources[0].fps=5",
            "staging.batch=4",
            "device=cpu",
            "source_defaults.every=2",
        ],
    )
    assert [(each.width, each.at) for each in config.stages] == [(9, 0.0), (4, 90.0)]
    assert (config.sinks[0].path, config.sinks[0].folder) == ("-", Path("out"))
    assert config.sources == (Clip(uri="a.mp4", fps=5, every=2),)
    assert (config.staging.strategy, config.staging.batch, config.device) == ("slab", 4, "cpu")


def test_sets_on_a_text_that_is_no_mapping_hide_nothing():
    assert problems("- a\n", sets=["device=cpu"]) == ["p.yaml:1: expected a mapping that begins with 'version: 1'"]


def test_sets_replace_whole_lists():
    config = good(HEAD + "stages: [shrink]\n", sets=["stages=[]", "sinks=[lines]", "sources=[pattern]"])
    assert (config.stages, config.sinks, config.sources) == ((), (Lines(),), (Pattern(),))


def test_sets_apply_in_order():
    config = good(HEAD, sets=["stages=[shrink]", "stages.shrink.width=1", "stages.shrink.width=2"])
    assert config.stages[0].width == 2


def test_sources_by_name_and_kind():
    text = "version: 1\nsources: [{uri: a.mp4, name: door}, pattern, {pattern: {width: 4}}]\n"
    config = good(text, sets=["sources.door.fps=5", "sources[1].width=8", "sources.2.height=9"])
    assert config.sources == (Clip(uri="a.mp4", name="door", fps=5), Pattern(width=8), Pattern(width=4, height=9))


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("stages.shirnk.width=9", "no stage 'shirnk'; did you mean 'shrink'?"),
        ("stages.q.width=9", "no stage 'q'; there are shrink"),
        ("sinks.q.width=9", "no sink 'q'; there are no sinks"),
        ("stages[4].width=9", "no stage 4; there are shrink"),
        ("stages.shrink=9", "say stages.shrink.PARAMETER=… for one parameter, or stages=[…] for all"),
        ("stages.shrink.widht=9", "stages[0].widht: unknown parameter; did you mean 'width'?"),
        ("stages.shrink.width=x", "stages[0].width: expected a whole number, got the text 'x'"),
        ("stages.shrink.width=[", "stages[0].width: expected the node content"),
        ("stages.shrink.label.x=1", "stages.shrink.label has no parameters to set"),
        ("stages.shrink.size[0]=1", "stages.shrink.size has no parameters to set"),
        ("staging[0]=1", "staging has no parameters to set"),
        ("devise=cpu", "devise: unknown key; did you mean 'device'?"),
        ("device=tpu", "device: unknown device 'tpu'"),
        ("staging.batch=x", "staging.batch: expected a whole number, got the text 'x'"),
        ("device.x=1", "device has no parameters to set"),
        ("width", "expected PATH.TO.KEY=VALUE"),
        ("=4", "expected PATH.TO.KEY=VALUE"),
        ("a..b=4", "a"),
    ],
)
def test_a_wrong_set_names_the_option(assignment, problem):
    found = problems(HEAD + "device: cpu\nstages: [{shrink: {label: a, size: }}]\n", sets=[assignment])
    assert len(found) == 1
    assert found[0].startswith(f"--set {assignment}: {problem}")


def test_options_replace_what_the_file_says():
    text = HEAD + "device: cpu\nstaging: {strategy: auto, batch: 4}\nthreads: 1\n"
    config = good(text, device="simulated", staging="slab", threads=5)
    assert (config.device, config.staging.strategy, config.staging.batch, config.threads) == ("simulated", "slab", 4, 5)
    assert problems(text, device="gpu", staging="slap") == [
        "--device: device: unknown device 'gpu'; did you mean 'cuda'?",
        "--staging: staging.strategy: unknown strategy 'slap'; did you mean 'slab'?",
    ]


def test_inputs_of_the_command_line_belong_to_the_working_folder(tmp_path):
    path = tmp_path / "p.yaml"
    assert good(HEAD, path=path, sources=["b.mp4", "-"]).sources == (Clip(uri="b.mp4"), Clip(uri="-"))
    assert good(HEAD, path=path, sets=["sources[0].uri=b.mp4"]).sources == (Clip(uri="b.mp4"),)
    assert good("version: 1\nsource_defaults: {fps: 2}\n", path=path, sources=["pattern"]).sources == (Pattern(fps=2),)
    assert good(HEAD, path=path, sources=["odd\udcff.mp4"]).sources[0].uri == "odd\udcff.mp4"
    assert problems(HEAD, sources=[""]) == ["--source: sources[0].uri: the name of an input is empty"]


# -- code --


def test_code_is_imported_only_where_that_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text(
        "from dataclasses import dataclass\nfrom framepipe.stage import Stage\n"
        "@dataclass(kw_only=True)\nclass Mine(Stage):\n    n: int = 1\nclass Other:\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = HEAD + "stages: [mine_for_test:Mine, {mine_for_test:Mine: {n: 4}}]\n"
    assert all("--allow-code" in each for each in problems(text))
    config = good(text, allow_code=True)
    assert [(each.id, each.n) for each in config.stages] == [("Mine", 1), ("Mine-2", 4)]
    found = problems(HEAD + "stages: [mine_for_test:Other, none_for_test:X]\n", allow_code=True)
    assert found[0] == "p.yaml:3: stages[0]: 'mine_for_test:Other' is no dataclass derived from framepipe.Stage"
    assert "none_for_test:X' cannot be imported: ModuleNotFoundError" in found[1]


# -- the schema --


def test_the_schema_knows_components_and_is_json():
    made = json.loads(json.dumps(schema()))
    named = {
        name: entry["properties"][name]["anyOf"][0]
        for entry in made["properties"]["stages"]["items"]["anyOf"]
        if "properties" in entry
        for name in entry["required"]
    }
    assert named["shrink"]["description"].startswith("Makes pictures smaller.")
    assert named["shrink"]["properties"]["filter"]["anyOf"][0]["enum"] == ["area", "bilinear"]
    assert named["shrink"]["additionalProperties"] is False
    assert "anyOf" in json.dumps(named["shrink"]["properties"]["at"])
    assert made["properties"]["staging"]["anyOf"][0] == {"enum": ["auto", "slab"]}
    assert {"type": "string", "pattern": r"\$\{.+\}"} in named["shrink"]["properties"]["width"]["anyOf"]
