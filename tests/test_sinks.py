"""Names, checks and the sinks that write no video."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import string
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framepipe import registry
from framepipe.errors import ClosedError, ConfigError, OutputExistsError, SinkError
from framepipe.frame import Frame, FrameSpec, Item
from framepipe.sink import SinkContext, SourceInfo
from framepipe.sinks import _output
from framepipe.sinks._names import OutputNames, safe_name
from framepipe.sinks._output import Outputs, PartFile, check_outputs
from framepipe.sinks.callback import Callback
from framepipe.sinks.discard import Discard
from framepipe.sinks.images import Images
from framepipe.sinks.jsonl import Jsonl
from framepipe.sinks.parquet import Parquet


def frame(index=0, source="cam", *, time_s=None, meta=None, image=None, size=(64, 48), estimated=False):
    time_s = index / 25 if time_s is None else time_s
    item = Item(source, index, index, Fraction(1, 25), time_s, estimated=estimated, meta=meta or {})
    return Frame(item, FrameSpec(*size, "yuv420p"), image)


def context(*names, overwrite=False):
    return SinkContext({name: SourceInfo(name, name) for name in names or ("cam",)}, overwrite)


def lines(path):
    text = Path(path).read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def open_in(folder):
    """Names of files under ``folder`` that this process has open."""
    paths = [Path(each.path) for each in psutil.Process().open_files()]
    return [path.name for path in paths if path.is_relative_to(folder.resolve())]


@pytest.fixture
def file_size_limit():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # Python ignores SIGXFSZ: writes fail with EFBIG instead

    @contextlib.contextmanager
    def limit(nbytes):
        # Lifted within the test: behind it pytest writes to its own output, which may be a file too.
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


# -- names


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("door", "door"),
        ("front door 前庭 é😀", "front door 前庭 é😀"),
        ('a/b\\c:d*e?f"g<h>i|j', "a_b_c_d_e_f_g_h_i_j"),
        ("rtsp://cam:554/1", "rtsp___cam_554_1"),
        ("tab\there\x00", "tab_here_"),
        ("CON", "CON_"),
        ("con.txt", "con_.txt"),
        ("Lpt1", "Lpt1_"),
        ("COM¹", "COM¹_"),
        ("console", "console"),
        ("dots...", "dots"),
        ("space ", "space"),
        ("..", "_"),
        ("", "_"),
        ("-rf", "-rf"),
    ],
)
def test_names_are_safe_on_windows_and_posix(name, safe):
    assert safe_name(name) == safe


@given(st.text())
def test_any_name_becomes_a_file_name(name):
    safe = safe_name(name)
    assert safe
    assert not set(safe) & set('/\\:*?"<>|\x00')
    assert safe[-1] not in ". "
    assert len(safe.encode("utf-8", "surrogatepass")) < 200
    assert safe_name(safe) == safe


def test_sources_whose_safe_names_collide_get_files_of_their_own():
    names = OutputNames("out/{source}.x", "test", shared=True)
    sources = ["a/b", "a_b", "A:B", "a_b_2", "e\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
    paths = names.paths(sources)
    assert len({str(path).casefold() for path in paths}) == len(sources)
    assert paths[0] == Path("out/a_b.x")
    assert names.paths(sources) == paths
    assert [names.next(source, 0.0) for source in reversed(sources)] == paths[::-1]


def test_template_fields_and_doubled_braces():
    names = OutputNames("o/{source}_{index:04d}_{start}_{{x}}.jsonl", "test", shared=True)
    assert names.next("a", 1.5) == Path("o/a_0000_1.500_{x}.jsonl")
    assert names.next("a", 2.25) == Path("o/a_0001_2.250_{x}.jsonl")
    assert OutputNames("{start:07.1f}.x", "test", shared=True).next("", 2.0) == Path("00002.0.x")


@pytest.mark.parametrize("path", ["{sorce}.jsonl", "{}.jsonl", "{source.name}.jsonl", "{0}.jsonl"])
def test_an_unknown_field_is_named_beside_the_known_ones(path):
    with pytest.raises(ConfigError) as caught:
        Jsonl(path=path)
    assert path.removesuffix(".jsonl") in str(caught.value)
    assert "{source}, {index}, {start}" in str(caught.value)


@pytest.mark.parametrize("path", ["{index:q}.jsonl", "a{.jsonl", "a}.jsonl", "{index:{width}}.jsonl", "out/", ""])
def test_a_template_that_cannot_be_filled_is_refused(path):
    with pytest.raises(ConfigError, match="jsonl"):
        Jsonl(path=path)


def test_many_sources_need_the_source_in_the_name_of_an_image():
    with pytest.raises(ConfigError) as caught:
        Images(path="out/{index}.png").paths(["a", "b"])
    assert str(Path("out/{index}_{source}.png")) in str(caught.value).replace("\\\\", "\\")
    assert Images(path="out/{index}.png").paths(["a"]) == []
    assert Jsonl(path="out/all.jsonl").paths(["a", "b"]) == [Path("out/all.jsonl")]
    assert Jsonl(path="{source}-{index}.jsonl").paths(["a", "b"]) == [Path("a-0.jsonl"), Path("b-0.jsonl")]
    assert Jsonl(path="{start}.jsonl").paths(["a"]) == []


# -- checks


def test_existing_outputs_are_all_named(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("x")
    check_outputs([new], overwrite=False)
    with pytest.raises(OutputExistsError) as caught:
        check_outputs([new, old], overwrite=False)
    assert str(old) in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert str(new) not in str(caught.value)
    assert caught.value.exit_code == 2
    check_outputs([new, old], overwrite=True)


def test_an_input_is_never_an_output(tmp_path):
    source, link = tmp_path / "in.mp4", tmp_path / "link.mp4"
    source.write_text("x")
    os.link(source, link)
    for path in (source, tmp_path / "." / "in.mp4", link):
        with pytest.raises(ConfigError, match="overwrite the input"):
            check_outputs([path], overwrite=True, inputs=[None, tmp_path / "missing", source])


def test_folders_and_doubles_are_no_outputs(tmp_path):
    with pytest.raises(ConfigError, match="folder"):
        check_outputs([tmp_path], overwrite=True)
    with pytest.raises(ConfigError, match="two outputs"):
        check_outputs([tmp_path / "a", tmp_path / "b" / ".." / "a"], overwrite=True)
    if os.path.exists(os.devnull):
        check_outputs([Path(os.devnull)], overwrite=False)


# -- temporary names


def test_a_file_takes_its_name_when_whole(tmp_path):
    path = tmp_path / "new folder" / "a.bin"
    file = PartFile(path, context())
    file.write(b"12345")
    assert [each.name for each in path.parent.iterdir()] == ["a.part.bin"]
    file.commit()
    assert [each.name for each in path.parent.iterdir()] == ["a.bin"]
    assert path.read_bytes() == b"12345"


def test_a_temporary_file_found_there_is_not_touched(tmp_path):
    (tmp_path / "a.part.bin").write_text("of another run")
    file = PartFile(tmp_path / "a.bin", context())
    assert file.part == tmp_path / "a.part2.bin"
    file.discard()
    file.discard()
    assert [each.name for each in tmp_path.iterdir()] == ["a.part.bin"]
    assert (tmp_path / "a.part.bin").read_text() == "of another run"


def test_a_name_that_a_player_holds_open_is_told(tmp_path, monkeypatch):
    def refuse(src, dst):
        raise PermissionError(errno.EACCES, "Access is denied")

    file = PartFile(tmp_path / "a.bin", context())
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SinkError, match="holds it open") as caught:
        file.commit()
    assert str(tmp_path / "a.bin") in str(caught.value)
    assert str(tmp_path / "a.part.bin") in str(caught.value)
    assert file.closed


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SinkError, match="folder") as caught:
        PartFile(tmp_path / "file" / "a.bin", context())
    assert caught.value.exit_code == 1


def test_finishing_goes_on_after_a_failure():
    done = []

    class Bad:
        def __init__(self, path, source, first):
            self.source = source

        def finish(self):
            done.append(self.source)
            if self.source != "b":
                raise SinkError(f"no room for {self.source}")

    outputs = Outputs(OutputNames("{source}", "test", shared=False), Bad)
    for source in "abc":
        outputs.get(source, 0.0)
    with pytest.raises(SinkError, match="no room for a") as caught:
        outputs.close()
    assert done == ["a", "b", "c"]
    assert caught.value.__notes__ == ["then: no room for c"]
    outputs.close()
    with pytest.raises(ClosedError):
        outputs.get("a", 0.0)


# -- jsonl


def test_jsonl_lines(tmp_path):
    sink = Jsonl(path=str(tmp_path / "new" / "all.jsonl"))
    sink.open(context("a", "b"))
    sink.write(frame(0, "a", meta={"motion": {"changed": 0.5}}))
    sink.write(frame(7, "b", time_s=1 / 3, size=(96, 64), estimated=True))
    sink.end("a")
    sink.close()
    sink.close()
    assert lines(tmp_path / "new" / "all.jsonl") == [
        {"source": "a", "index": 0, "time_s": 0.0, "width": 64, "height": 48, "meta": {"motion": {"changed": 0.5}}},
        {"source": "b", "index": 7, "time_s": 1 / 3, "width": 96, "height": 64, "estimated": True, "meta": {}},
    ]
    assert sink.state() == {"paths": [str(tmp_path / "new" / "all.jsonl")], "lines": 2}


def test_jsonl_holds_numpy_values_and_no_nan(tmp_path):
    meta = {
        "scalar": np.float32(0.5),
        "int": np.int64(3),
        "flag": np.bool_(True),
        "array": np.arange(4, dtype=np.uint8).reshape(2, 2),
        "bad": [1.0, math.nan, -math.inf, np.float64("nan")],
        "bad array": np.array([np.nan, 1], np.float32),
        "ratio": Fraction(1, 4),
        "tuple": (1, 2),
        np.int32(5): "key",
        "text": "前庭 \ud800 \u2028",
    }
    sink = Jsonl(path=str(tmp_path / "a.jsonl"))
    sink.open(context())
    sink.write(frame(0, time_s=math.nan, meta=meta))
    sink.close()
    (record,) = lines(tmp_path / "a.jsonl")
    assert record["time_s"] is None
    assert record["meta"] == {
        "scalar": 0.5,
        "int": 3,
        "flag": True,
        "array": [[0, 1], [2, 3]],
        "bad": [1.0, None, None, None],
        "bad array": [None, 1.0],
        "ratio": 0.25,
        "tuple": [1, 2],
        "5": "key",
        "text": "前庭 \ud800 \u2028",
    }


def test_jsonl_keeps_unicode_readable(tmp_path):
    sink = Jsonl(path=str(tmp_path / "a.jsonl"))
    sink.open(context())
    sink.write(frame(source="前庭"))
    sink.close()
    assert "前庭" in (tmp_path / "a.jsonl").read_text(encoding="utf-8")


def test_jsonl_times_of_a_fast_camera_stay_apart(tmp_path):
    sink = Jsonl(path=str(tmp_path / "a.jsonl"))
    sink.open(context())
    times = [5000 + i / 10_000 for i in range(50)]
    for index, time_s in enumerate(times):
        sink.write(frame(index, time_s=time_s))
    sink.close()
    assert [record["time_s"] for record in lines(tmp_path / "a.jsonl")] == times


def test_jsonl_is_readable_while_it_grows_and_after_an_error(tmp_path):
    sink = Jsonl(path=str(tmp_path / "a.jsonl"))
    sink.open(context())
    for index in range(3):
        sink.write(frame(index))
        assert [record["index"] for record in lines(tmp_path / "a.jsonl")] == list(range(index + 1))
    with pytest.raises(SinkError, match="picture 3 of 'cam'") as caught:
        sink.write(frame(3, meta={"bad": object()}))
    assert caught.value.where == {"source": "cam", "index": 3}
    sink.close()
    assert len(lines(tmp_path / "a.jsonl")) == 3
    assert open_in(tmp_path) == []


def test_jsonl_of_a_run_without_results_is_empty(tmp_path):
    shared = Jsonl(path=str(tmp_path / "all.jsonl"))
    shared.open(context())
    shared.close()
    own = Jsonl(path=str(tmp_path / "{source}.jsonl"))
    own.open(context("a", "b"))
    own.end("a")
    own.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"all.jsonl": b"", "a.jsonl": b""}


def test_jsonl_a_file_a_source_closed_at_its_end(tmp_path):
    sink = Jsonl(path=str(tmp_path / "{source}.jsonl"))
    sink.open(context("a", "b"))
    for index in range(4):
        sink.write(frame(index, "a"))
        sink.write(frame(index, "b"))
    sink.end("a")
    assert open_in(tmp_path) == ["b.jsonl"]
    sink.write(frame(4, "b"))
    sink.close()
    assert open_in(tmp_path) == []
    assert len(lines(tmp_path / "a.jsonl")) == 4
    assert len(lines(tmp_path / "b.jsonl")) == 5


def test_jsonl_rotates_by_time_stamp(tmp_path):
    sink = Jsonl(path=str(tmp_path / "a.jsonl"), rotate_s=1.0)
    sink.open(context())
    for index in range(30):
        sink.write(frame(index, time_s=0.083 + index / 10))
    sink.close()
    names = ["a.jsonl", "a_0001.jsonl", "a_0002.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [[record["index"] for record in lines(tmp_path / name)] for name in names] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 30)),
    ]
    assert sink.state()["paths"] == [str(tmp_path / name) for name in names]


def test_jsonl_rotates_a_shared_file_in_the_time_of_each_source(tmp_path):
    sink = Jsonl(path=str(tmp_path / "{index}.jsonl"), rotate_s=1.0)
    sink.open(context("a", "b"))
    for index in range(12):
        sink.write(frame(index, "a", time_s=index / 10))
        sink.write(frame(index, "b", time_s=1000 + index / 10))
    sink.close()
    assert [len(lines(tmp_path / f"{part}.jsonl")) for part in (0, 1)] == [20, 4]


def test_jsonl_refuses_and_replaces(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("a much longer text than what comes\n" * 9)
    with pytest.raises(OutputExistsError, match="--overwrite"):
        Jsonl(path=str(path)).open(context())
    sink = Jsonl(path=str(path))
    sink.open(context(overwrite=True))
    sink.write(frame())
    sink.close()
    assert len(lines(path)) == 1


def test_jsonl_never_overwrites_its_input(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("video")
    sink = Jsonl(path=str(path))
    with pytest.raises(ConfigError, match="input"):
        sink.open(SinkContext({"a": SourceInfo("a", "a", path=path)}, overwrite=True))
    assert path.read_text() == "video"


def test_jsonl_to_standard_output(capsysbinary):
    sink = Jsonl(path="-")
    assert sink.paths(["a", "b"]) == []
    sink.open(context())
    sink.write(frame(source="前庭"))
    sink.close()
    out = capsysbinary.readouterr().out
    assert out.endswith(b"\n")
    assert json.loads(out.decode("utf-8"))["source"] == "前庭"
    assert sink.state()["paths"] == []
    with pytest.raises(ConfigError, match="rotate"):
        Jsonl(path="-", rotate_s=5)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_jsonl_on_a_full_disk():
    sink = Jsonl(path="/dev/full")
    sink.open(context())
    with pytest.raises(SinkError, match=r"/dev/full.*disk is full") as caught:
        sink.write(frame())
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.exit_code == 1
    sink.close()


def test_jsonl_keeps_whole_lines_when_the_disk_fills(tmp_path, file_size_limit):
    sink = Jsonl(path=str(tmp_path / "a.jsonl"))
    sink.open(context())
    with file_size_limit(5000):
        with pytest.raises(SinkError, match="lines before are whole"):
            for index in range(1000):
                sink.write(frame(index))
        sink.close()
    found = lines(tmp_path / "a.jsonl")
    assert len(found) > 10
    assert [record["index"] for record in found] == list(range(len(found)))


# -- parquet


def read_table(path):
    pq = pytest.importorskip("pyarrow.parquet")
    with open(path, "rb") as file:
        return pq.read_table(file)


def test_parquet_rows(tmp_path):
    path = tmp_path / "new" / "a.parquet"
    sink = Parquet(path=str(path))
    sink.open(context())
    sink.write(frame(3, meta={"m": [1, math.nan]}))
    sink.write(frame(4, time_s=math.nan))
    assert not path.exists()
    sink.end("cam")
    sink.close()
    sink.close()
    table = read_table(path)
    assert table.to_pylist() == [
        {"source": "cam", "index": 3, "pts": 3, "time_s": 0.12, "width": 64, "height": 48, "meta": '{"m": [1, null]}'},
        {"source": "cam", "index": 4, "pts": 4, "time_s": None, "width": 64, "height": 48, "meta": "{}"},
    ]
    assert str(table.schema.field("time_s").type) == "double"
    assert [each.name for each in path.parent.iterdir()] == ["a.parquet"]
    assert sink.state() == {"paths": [str(path)], "rows": 2}


def test_parquet_a_row_a_box(tmp_path):
    found = [
        {"box": np.array([1, 2, 3.5, 4]), "score": np.float32(0.5), "label": "cat"},
        {"box": [5, 6, 7, 8]},
    ]
    sink = Parquet(path=str(tmp_path / "a.parquet"), boxes=True)
    sink.open(context())
    sink.write(frame(0, meta={"motion": found, "count": 2, "other": [1, 2]}))
    sink.write(frame(1))
    sink.close()
    rows = read_table(tmp_path / "a.parquet").select(["index", "stage", "x1", "y2", "score", "label"]).to_pylist()
    assert rows == [
        {"index": 0, "stage": "motion", "x1": 1.0, "y2": 4.0, "score": 0.5, "label": "cat"},
        {"index": 0, "stage": "motion", "x1": 5.0, "y2": 8.0, "score": None, "label": None},
    ]


def test_parquet_is_whole_after_an_error_and_in_row_groups(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("framepipe.sinks.parquet._ROWS", 4)
    sink = Parquet(path=str(tmp_path / "{source}.parquet"), rotate_s=100)
    sink.open(context())
    for index in range(10):
        sink.write(frame(index))
    with pytest.raises(SinkError, match="picture 10"):
        sink.write(frame(10, meta={"bad": object()}))
    sink.close()
    assert read_table(tmp_path / "cam.parquet").num_rows == 10
    with open(tmp_path / "cam.parquet", "rb") as file:
        assert pq.ParquetFile(file).num_row_groups == 3
    assert open_in(tmp_path) == []


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r'pip install "framepipe\[parquet\]"'):
        Parquet(path=str(tmp_path / "a.parquet")).open(context())


def test_parquet_on_a_full_disk_leaves_nothing_unreadable(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    sink = Parquet(path=str(tmp_path / "a.parquet"))
    sink.open(context())
    sink.write(frame())

    def full(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_output.WholeFile, "write", full)
    with pytest.raises(SinkError, match=r"a\.parquet.*disk is full.*removed"):
        sink.close()
    sink.close()
    assert list(tmp_path.iterdir()) == []
    assert open_in(tmp_path) == []


# -- images


def noise(height=21, width=33, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def flat(colour, height=21, width=33):
    return np.full((height, width, 3), colour, np.uint8)


def read_image(path):
    with av.open(str(path)) as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


def test_png_is_exact_whatever_the_memory_layout(tmp_path):
    sink = Images(path=str(tmp_path / "{source}" / "{index:04d}.png"))
    sink.open(context("a/b"))
    wide = noise(width=40)
    pictures = [noise(), wide[:, 3:36], noise()[::-1], noise(48, 64)]
    pictures[1].flags.writeable = False
    for index, image in enumerate(pictures):
        sink.write(frame(index * 10, "a/b", image=image))
    sink.close()
    sink.close()
    folder = tmp_path / "a_b"
    assert sorted(path.name for path in folder.iterdir()) == ["0000.png", "0010.png", "0020.png", "0030.png"]
    for index, image in enumerate(pictures):
        np.testing.assert_array_equal(read_image(folder / f"{index * 10:04d}.png"), image)
    assert sink.state() == {"paths": [str(folder)], "frames": 4}
    assert open_in(tmp_path) == []


@pytest.mark.parametrize("full_chroma", [False, True])
@pytest.mark.parametrize("suffix", ["jpg", "JPEG"])
def test_jpeg_colours(tmp_path, suffix, full_chroma):
    colours = [(74, 203, 221), (255, 0, 0), (0, 0, 255), (250, 250, 250), (3, 3, 3)]
    sink = Images(path=str(tmp_path / ("{index}." + suffix)), full_chroma=full_chroma)
    sink.open(context())
    for index, colour in enumerate(colours):
        sink.write(frame(index, image=flat(colour)))
    sink.close()
    for index, colour in enumerate(colours):
        error = read_image(tmp_path / f"{index}.{suffix}").astype(int) - colour
        assert error.shape == (21, 33, 3)
        assert np.abs(error).max() <= 6
    with av.open(str(tmp_path / f"0.{suffix}")) as container:
        assert container.streams.video[0].pix_fmt == ("yuvj444p" if full_chroma else "yuvj420p")


def test_jpeg_quality(tmp_path):
    sizes = []
    for quality in (10, 50, 75, 95):
        sink = Images(path=str(tmp_path / f"{quality}-{{index}}.jpg"), quality=quality)
        sink.open(context())
        sink.write(frame(image=noise(64, 64)))
        sink.close()
        sizes.append((tmp_path / f"{quality}-0.jpg").stat().st_size)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"path": "a.png"}, "{index}"),
        ({"path": "{index}.bmp"}, ".png, .jpg"),
        ({"path": "{index}.jpg", "quality": 0}, "1 to 100"),
    ],
)
def test_images_parameters(parameters, text):
    with pytest.raises(ConfigError) as caught:
        Images(**parameters)
    assert text in str(caught.value)


def test_images_refuse_what_exists_and_what_is_no_picture(tmp_path):
    (tmp_path / "1.png").write_text("mine")
    sink = Images(path=str(tmp_path / "{index}.png"))
    sink.open(context())
    sink.write(frame(0, image=noise()))
    with pytest.raises(OutputExistsError, match=r"1\.png"):
        sink.write(frame(1, image=noise()))
    assert (tmp_path / "1.png").read_text() == "mine"
    with pytest.raises(SinkError, match="float32"):
        sink.write(frame(2, image=noise().astype(np.float32)))
    with pytest.raises(ClosedError, match="no image"):
        sink.write(frame(2))
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.png", "1.png"]


def test_images_on_a_full_disk(tmp_path, file_size_limit):
    sink = Images(path=str(tmp_path / "{index}.png"))
    sink.open(context())
    with file_size_limit(1000):
        with pytest.raises(SinkError, match=r"0\.png.*removed"):
            sink.write(frame(0, image=noise(64, 64)))
        sink.close()
    assert list(tmp_path.iterdir()) == []


# -- discard, callback, registry


def test_discard_reads_nothing_unless_asked():
    sink = Discard()
    assert (sink.reads, sink.host) == (frozenset(), False)
    assert Discard(read="image").reads == {"image"}
    sink.open(context())
    sink.write(frame())
    sink.end("cam")
    sink.close()
    assert sink.state() == {"paths": [], "frames": 1}


def test_callback_calls_and_passes_errors_on():
    seen = []

    def function(each):
        if each.index == 2:
            raise KeyError("mine")
        seen.append(each)

    sink = Callback(function=function, reads=["meta"], host=False)
    assert (sink.reads, sink.host) == ({"meta"}, False)
    assert Callback(function=function).reads == {"image", "meta"}
    frames = [frame(index) for index in range(3)]
    sink.open(context())
    sink.write(frames[0])
    sink.write(frames[1])
    with pytest.raises(KeyError, match="mine"):
        sink.write(frames[2])
    sink.close()
    assert seen == frames[:2]
    assert sink.state()["frames"] == 2
    with pytest.raises(ConfigError, match="YAML"):
        Callback(function="print")


def test_every_sink_is_known_by_its_name():
    names = registry.names("sinks")
    assert {"callback", "discard", "images", "jsonl", "parquet", "video"} <= set(names)
    for name in names:
        assert not set(name) - set(string.ascii_lowercase)
        assert registry.find("sinks", name).type_name == name
