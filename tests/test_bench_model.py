"""A bench under a memory model: its record, its page and its words keep apart what is modelled and what is measured."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from bench_records import record as made_up
from test_bench_page import Page

from framepipe.bench import _machine, _plots_model, cell, inputs, output, record, table
from framepipe.bench._gate import Room
from framepipe.bench._launch import Outcome
from framepipe.bench._reading import NO_BREAK
from framepipe.bench.cells import Choice, size_input
from framepipe.bench.options import Options
from framepipe.bench.page import render
from framepipe.bench.runner import Bench
from framepipe.memory_models.wddm_claim import WddmClaim
from framepipe.telemetry.base import Sensor

MB = 10**6
ONE = Choice(modes=("staging",), batch=(1,), depth=(2,), fillers=(1,), copy_threads=(1,), slots=(4,))
CLAIM = "simulated:wddm-claim,total=1GB,resident=900MB,fps=10,seed=3"


def measure(device: str, frames: int = 120) -> dict[str, Any]:
    """A bench of pooled and per_frame in this process; a picture is 64x48, and shown for a tenth of a second."""
    requests: list[Any] = []

    def here(request: Any, stopping: Any, timeout_s: float) -> Outcome:
        requests.append(request)
        return Outcome(cell.answer(request))

    bench = Bench(
        Options(
            inputs=(size_input(64, 48),), strategies=("pooled", "per_frame"), choice=ONE, device=device,
            frames=frames, repeat=1, warmup=2, least_s=0.0,
        ),
        launch=here,
        room=lambda: Room(8 << 30),
    )  # fmt: skip
    found = bench.run()
    assert found is not None
    assert {request["device"] for request in requests} == {device}
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.fixture(scope="module")
def claim() -> dict[str, Any]:
    return measure(CLAIM)


def runs(found: dict[str, Any]) -> dict[str, Any]:
    return {each["axes"]["strategy"]: each["runs"][0] for each in found["cells"]}


def test_the_record_has_the_models_curve_apart_from_what_is_measured(claim):
    for strategy, run in runs(claim).items():
        modelled = run["modelled"]
        assert modelled["name"] == "wddm-claim"
        assert modelled["t_s"] == sorted(modelled["t_s"])
        assert modelled["t_s"][-1] == modelled["now_s"] >= 12.8, "120 pictures and the warm-up, ten a second"
        assert {len(values) for values in modelled["columns"].values()} == {len(modelled["t_s"])}
        assert modelled["columns"].keys() == {f"model.{key}" for key in WddmClaim.words}
        assert not [name for name in run["timeline"]["columns"] if name.startswith("model.")], strategy
        assert not [name for name in run["memory"] if name.startswith("model.")]
    pooled, per_frame = (runs(claim)[name]["modelled"] for name in ("pooled", "per_frame"))
    assert (pooled["pins"], per_frame["pins"] >= 128) == (1, True)
    assert per_frame["least_free"] < pooled["least_free"] < 100 * MB


def test_the_provenance_names_the_model(claim):
    device = claim["provenance"]["device"]
    assert (device["kind"], device["model"]["name"]) == ("simulated", "wddm-claim")
    assert device["model"]["ground"] == "an article's claim, unproven"
    assert device["model"]["parameters"]["resident"] == 900 * MB
    assert claim["provenance"]["sensors"]["model.free"] == "model wddm-claim: video memory that nobody uses"
    assert "modelled by wddm-claim (an article's claim, unproven); none is measured here" in claim["notes"][0]
    assert {each["axes"]["device"] for each in claim["cells"]} == {CLAIM}


class InAGroup(Sensor):
    """Stands for the memory of a control group."""

    name, source = "cgroup", "/sys/fs/cgroup/user.slice/session-7.scope"
    readings = {"current": "memory.current"}  # noqa: RUF012

    def _read(self) -> dict[str, int]:
        return {"current": 5}


def test_a_record_names_no_folder_user_or_control_group(tmp_path, clip, monkeypatch):
    path = tmp_path / "a clip.mp4"
    path.write_bytes(clip.read_bytes())
    monkeypatch.setattr(_machine, "open_sensors", lambda number: [InAGroup()])
    requests: list[Any] = []

    def here(request: Any, stopping: Any, timeout_s: float) -> Outcome:
        requests.append(request)
        if request["do"] == "measure" and request["staging"]["strategy"] == "direct":
            return Outcome(reason=f"cannot read '{path}': no such file")
        found = cell.answer(request)
        if request["do"] == "measure":
            found["warnings"] = [f"'{path}': odd pictures"]
        return Outcome(found)

    options = Options(
        inputs=inputs.find([str(path)]), strategies=("pooled", "direct"), choice=ONE, device="simulated:linux",
        frames=8, repeat=1, warmup=2, least_s=0.0, command=f"framepipe bench '{path}' --out={tmp_path / 'd'}",
    )  # fmt: skip
    found = Bench(options, launch=here, room=lambda: Room(8 << 30)).run()
    text = json.dumps(found)
    assert requests[-1]["input"]["uri"] == str(path), "children are told where it is"
    assert tmp_path.name not in text and tmp_path.parent.name not in text and "session-7" not in text
    assert found["provenance"]["command"] == "framepipe bench '…/a clip.mp4' --out=…/d"
    assert found["provenance"]["sensors"]["cgroup.current"] == "control group: memory.current"
    told = {each["axes"]["strategy"]: (each["reason"], each["runs"]) for each in found["cells"]}
    assert told["direct"][0] == "cannot read '…/a clip.mp4': no such file"
    assert told["pooled"][1][0]["warnings"] == ["'…/a clip.mp4': odd pictures"]


def test_another_model_is_another_bench(claim):
    other = copy.deepcopy(claim)
    assert not record.differences(claim, other)
    other["provenance"]["device"]["model"]["parameters"]["seed"] = 4
    assert [line.split()[0] for line in record.differences(claim, other)] == ["device"]


def test_the_page_shows_curves_and_parameters_and_says_that_it_is_a_model(claim):
    page = Page(render(claim))
    text = " ".join(" ".join(page.text).split())
    assert "Memory under a model" in text
    assert "This is a model, not a measurement: wddm-claim (an article's claim, unproven)." in text
    assert "a picture is shown for 1/10 s" in text
    for words in ("parameters of the model", "share 0.225", "resident 900 MB", "seed 3"):
        assert words in text
    titles = [title for title in page.text if title.startswith("model.free of ")]
    assert [title.split(",")[0] for title in titles] == ["model.free of pooled", "model.free of per_frame"] or [
        title.split(",")[0] for title in titles
    ] == ["model.free of per_frame", "model.free of pooled"]
    assert not [title for title in page.text if title.startswith("model.total of ")], "it never moves"
    assert "none is modelled or cited" not in text
    assert "but those under “Memory under a model” was measured" in text


def test_the_words_at_the_top_of_the_page_say_what_is_modelled(claim):
    page = " ".join(" ".join(Page(render(claim)).text).split())
    words = page.split("Where the figures come from")[0]
    assert re.search(
        r"Modelled by wddm-claim, not measured: with pooled 99\.\d MB stay free in 1\d(\.\d)? s of video; "
        r"pins: 1, none refused\.",
        words,
    )
    assert re.search(
        r"with per_frame 9\d\.\d MB stay free in 1\d(\.\d)? s of video; pins: \d{3}, none refused\.", words
    )


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (11_950_000_000, "11.95 GB"), (12 * 10**9, "12 GB"), (128 * MB, "128 MB"), (65536, "64 KiB"),
     (2 << 20, "2 MiB"), (3 << 30, "3 GiB"), (5, "5 B"), (123_456_789, "123456789 B")],
)  # fmt: skip
def test_a_size_that_somebody_chose_is_shown_as_it_is(nbytes, shown):
    assert _plots_model._parameter("total", nbytes).replace(NO_BREAK, " ") == shown


def test_a_page_without_a_model_says_that_nothing_is_modelled():
    text = " ".join(" ".join(Page(render(made_up())).text).split())
    assert "none is modelled or cited" in text
    assert "Memory under a model" not in text


def test_the_words_of_the_terminal_say_modelled(claim):
    lines = [line for line in table.closing(claim) if line.startswith("modelled by wddm-claim, not measured: ")]
    assert len(lines) == 2
    assert any("pooled" in line and line.endswith(" of video, 1 pin, none refused") for line in lines)
    assert any("per_frame" in line and "none refused" in line and "free at least in" in line for line in lines)


@pytest.mark.parametrize("missing", ["model", "columns", "t_s", "marks", "values", "sensors"])
def test_a_record_that_lacks_something_is_shown_without_it(claim, missing):
    found = copy.deepcopy(claim)
    if missing == "model":
        del found["provenance"]["device"]["model"]
    elif missing == "sensors":
        del found["provenance"]["sensors"]
    for run in runs(found).values():
        if missing == "values":
            run["modelled"]["columns"] = {name: [None] * 3 for name in run["modelled"]["columns"]}
        elif missing in run["modelled"]:
            del run["modelled"][missing]
    text = " ".join(Page(render(found)).text)
    assert ("Memory under a model" in text) == (missing not in ("columns", "t_s"))


def test_a_model_that_refuses_shows_when(tmp_path):
    found = measure("simulated:wddm-budget,ram=128MB,others=67MB,others_from_s=5,fps=10", 80)
    refused = runs(found)["per_frame"]
    assert refused["modelled"]["refusals"] == 1, "the pipeline goes on with pageable memory"
    assert any("refused to page-lock" in warning for warning in refused["warnings"])
    text = " ".join(" ".join(Page(render(found)).text).split())
    assert "other programs come at 5" in text
    assert "first pin refused at 5" in text
    assert "then one refused, and memory is pageable from there on" in text
    assert output.write(tmp_path, found)[0].name == "bench.json"
