"""bench.html: whole, well-formed, self-contained, and safe whatever a record says or lacks."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from bench_records import MB, PINNED, RATES, SWEEPS, cell, record, without_result
from hypothesis import given
from hypothesis import strategies as st

from framepipe.bench import _svg, _verdict
from framepipe.bench._plots_memory import bytes_words, thinned
from framepipe.bench._reading import base_cells, figure, number, plain, sweeps
from framepipe.bench.page import render

NASTY = "<script>alert(1)</script>\"'&amp;</title>\x00\x1b\ud800\u202etxt.mp4"
VOID = {"meta"}


class Page(HTMLParser):
    """What a browser's parser would meet: elements, attributes and text; fails where tags do not match."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: dict[str, str] = {}
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[self.open[-1]] = data
        else:
            self.text.append(data)

    def count(self, tag, class_=None):
        return sum(
            name == tag and (class_ is None or class_ in (attrs.get("class") or "").split())
            for name, attrs in self.elements
        )

    @property
    def words(self):
        return " ".join("\n".join(self.text).replace("\u202f", " ").replace("\xa0", " ").split())


def main_of(source: str) -> ElementTree.Element:
    """The page's content, which is XML as well."""
    return ElementTree.fromstring(source[source.index("<main>") : source.index("</main>") + len("</main>")])


@pytest.fixture(scope="module")
def whole():
    made = record()
    return made, render(made)


# -- form --


def test_every_element_is_closed_and_every_id_is_there_once(whole):
    page = Page(whole[1])
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert ids
    assert max(Counter(ids).values()) == 1
    for _, attrs in page.elements:
        assert set((attrs.get("aria-labelledby") or "").split()) <= set(ids)


def test_pictures_are_xml_with_a_title_and_a_description(whole):
    plots = [each for each in main_of(whole[1]).iter("svg") if each.get("role") == "img"]
    assert len(plots) > 30
    for plot in plots:
        assert [part.tag for part in plot[:2]] == ["title", "desc"]
        assert all(part.text for part in plot[:2])


def test_no_number_of_a_drawing_is_unfinished(whole):
    for each in main_of(whole[1]).iter():
        for name in {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "d"} & set(each.keys()):
            assert re.fullmatch(r"[-MLVZ\d. %]+", each.get(name)), (each.tag, name, each.get(name))


def test_behind_every_plot_is_a_table(whole):
    figures = list(main_of(whole[1]).iter("figure"))
    assert len(figures) > 15
    for each in figures:
        assert each.find("h3") is not None
        assert each.find("details//table/thead/tr/th") is not None
        assert each.findall("details//table/tbody/tr/td")


def test_nothing_is_loaded_and_the_policy_says_so(whole):
    page = Page(whole[1])
    for name, attrs in page.elements:
        assert name not in {"link", "img", "iframe", "object", "embed", "base", "form", "use", "image"}
        assert not {"src", "style", "action", "srcset", "xlink:href"} & attrs.keys()
        assert not any(key.startswith("on") for key in attrs)
        assert all("://" not in (value or "") for value in attrs.values())
        assert (attrs.get("href") or "data:").startswith("data:application/json;base64,") or "href" not in attrs
    assert not re.search(r"url\(|@import|https?:", page.raw["style"] + page.raw["script"])
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_the_record_comes_along_whole(whole):
    made, source = whole
    (link,) = (attrs for name, attrs in Page(source).elements if name == "a")
    assert link["download"] == "bench.json"
    assert json.loads(base64.b64decode(link["href"].partition(",")[2])) == made


def test_a_page_is_the_same_every_time(whole):
    assert render(copy.deepcopy(whole[0])) == whole[1]


# -- content --


def test_every_cell_is_in_the_last_table(whole):
    made, source = whole
    last = list(main_of(source).iter("table"))[-1]
    rows = {row.find("th").text: [data.text for data in row.findall("td")] for row in last.iterfind("tbody/tr")}
    assert list(rows) == [each["id"] for each in made["cells"]]
    assert len(rows) == 3 * (len(RATES) + 1) + 1 + sum(map(len, SWEEPS.values()))
    for each in made["cells"]:
        assert rows[each["id"]][0] == each["status"]
        assert rows[each["id"]][4] == str(len(each["runs"]))
        assert rows[each["id"]][-1] == (each["reason"] or "\u2013")


def test_a_dot_is_a_repeat_where_it_belongs():
    rates = [[80.0, 90.0, 100.0], [40.0, 41.0, 42.0]]
    made = [cell(name, random.Random(0), rate=1.0, repeats=3) for name in ("pooled", "pageable")]
    for each, wanted in zip(made, rates, strict=True):
        for run, fps in zip(each["runs"], wanted, strict=True):
            run["fps"] = fps
    plot = next(main_of(render({"cells": made})).iter("figure")).find("svg")
    dots = [float(dot.get("cx").rstrip("%")) for dot in plot.findall("circle")]
    assert dots == pytest.approx([80, 90, 100, 40, 41, 42])
    medians = [line.get("x1") for line in plot.findall("line") if "median" in line.get("class")]
    assert medians == ["90.00%", "41.00%"]


def test_what_did_not_run_is_listed_with_its_reason(whole):
    words = Page(whole[1]).words
    assert words.count("write_combined unavailable: the driver has no such memory") == 1, "once is enough"
    assert "broken refused: its outputs differ from those of the others: 9 of 16 frames" in words


def test_what_is_absent_from_some_is_told_where():
    made = record(repeats=2)
    made["cells"][5]["reason"] = "for another reason here"
    figures = list(main_of(render(made)).iter("figure"))[:3]
    told = [["".join(item.itertext()) for item in each.iterfind("ul/li")] for each in figures]
    assert told[0][0] == "write_combined unavailable: for another reason here"
    assert told[1] == told[2] == ["write_combined unavailable: the driver has no such memory"]


def test_strategies_stand_in_order_of_their_rates(whole):
    figure_ = next(main_of(whole[1]).iter("figure"))
    assert figure_.find("h3").text == "staging, 1080p, 1920\u00d71080, yuv420p, cuda"
    names = [text.text for text in figure_.iter("text") if text.get("class") == "name"]
    assert set(names) == set(RATES)
    assert names[2:] == ["pageable", "mapped", "per_frame"]
    asides = [aside.text for aside in figure_.iter("tspan")]
    assert asides == ["fastest", "within noise of it"], "pooled and registered are made alike"


def test_provenance_is_told_field_by_field(whole):
    made, source = whole
    words = Page(source).words
    for value in ("driver 570.86.15", "driver model unknown", "bus bytes per s 26.4 GB/s", "warmup 60", "ab12" * 16):
        assert value in words
    names = {name.text for name in main_of(source).iter("dt")}
    provenance = made["provenance"]
    wanted = {
        *provenance,
        *provenance["gpu"],
        *provenance["versions"],
        *provenance["clips"][0],
        *provenance["parameters"],
    }
    wanted -= {"gpu", "versions", "clips", "parameters"}
    assert {name.replace("_", " ") for name in wanted} == names


def test_one_reading_of_one_work_can_be_chosen(whole):
    root = main_of(whole[1])
    pick = next(each for each in root.iter("div") if each.get("class") == "pick")
    assert "hidden" in pick.keys(), "of no use without the script"  # noqa: SIM118 - an element is no dict
    values = {each.get("name"): [option.get("value") for option in each] for each in pick.iter("select")}
    assert values["column"][0] == "nvml.process_used"
    choices = [(e.get("data-column"), e.get("data-work")) for e in root.iter("div") if e.get("class") == "choice"]
    assert sorted(choices) == sorted((column, work) for column in values["column"] for work in values["work"])


def test_sweeps_have_the_base_among_them_in_order(whole):
    root = main_of(whole[1])
    section = next(each for each in root.iter("section") if each.find("h2").text == "One axis at a time")
    rows = [[part.text for part in row] for row in section.iterfind(".//tbody/tr")]
    values = {axis: [row[1] for row in rows if row[0] == axis] for axis in SWEEPS}
    assert values == {
        "batch": ["1", "4", "16"], "depth": ["1", "2", "3"], "fillers": ["1", "2", "4", "auto"],
        "copy_threads": ["1", "2", "4"],
    }  # fmt: skip


def test_a_cell_that_varies_two_axes_is_in_no_sweep():
    made = [
        cell("pooled", random.Random(0), rate=9.0),
        cell("pooled", random.Random(0), rate=9.0, varies=("batch",), batch=4),
        cell("pooled", random.Random(0), rate=9.0, varies=("batch", "depth"), batch=8, depth=3),
        cell("mapped", random.Random(0), rate=9.0),
    ]
    assert sweeps(made) == {"batch": made[:2]}
    assert base_cells(made) == [made[0], made[3]]


# -- in words --


def said(*cells, **rates):
    made = [cell(name, random.Random(0), rate=rate, pinned=PINNED.get(name, 1.0) * MB) for name, rate in rates.items()]
    return " ".join(_verdict.sentences([*made, *cells])).replace("\u202f", " ")


def test_the_verdict_names_the_fastest_and_what_pinning_costs():
    words = said(pooled=1000.0, registered=1001.0, per_frame=250.0)
    assert re.search(r"(pooled|registered) is fastest: [\d,]+ fps, 3\.1\d GB/s\.", words)
    assert re.search(r"Within noise of it: (pooled|registered)\.", words)
    assert re.search(
        r"\(per_frame\) makes it (3\.9|4\.0)\d \u00d7 slower: 2\d\d fps where pooled has [\d,]+ fps", words
    )
    assert "page-locks 37.5 MB more (54.3 MB against 16.8 MB)" in words


def test_each_way_to_allocate_is_compared_with_itself():
    words = said(registered=1000.0, registered_per_frame=500.0, per_frame=100.0)
    assert "(registered_per_frame) makes it 2.00 \u00d7 slower" in words.replace("1.99", "2.00").replace("2.01", "2.00")
    assert "(per_frame)" not in words, "pooled was not measured"


def test_the_verdict_does_not_make_a_difference_of_noise():
    words = said(pooled=1000.0, per_frame=1005.0)
    assert "costs no rate that could be told from noise" in words
    assert "slower" not in words
    assert "Every other strategy is slower" in said(pooled=1000.0, per_frame=250.0)
    assert "as fast as pooled" in said(pooled=1000.0, per_frame=2000.0)


def test_the_verdict_of_little():
    assert said() == "Nothing was measured."
    assert said(without_result("pooled", "failed", "no memory")) == "Nothing was measured."
    assert said(pooled=10.0).startswith("pooled ran alone: ")
    alone = [cell(name, random.Random(0), rate=9.0, repeats=1) for name in ("pooled", "pageable")]
    assert "One repeat" in _verdict.sentences(alone)[-1]


# -- anything --


def test_names_may_be_anything():
    made = record(clip=NASTY, repeats=2)
    made["notes"] = [NASTY]
    made["cells"][0]["axes"]["strategy"] = NASTY
    made["cells"][-1]["reason"] = NASTY
    made["cells"][-1]["status"] = "failed"
    made["cells"][1]["runs"][0]["timeline"]["marks"] = [[0.1, NASTY], "no pair", [None, "no time"]]
    columns = made["cells"][1]["runs"][1]["timeline"]["columns"]
    columns[NASTY] = columns.pop("cuda.free")
    source = render(made)
    source.encode("utf-8")
    page = Page(source)
    assert page.count("script") == page.count("style") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff\u202e]", source)
    shown = "<script>alert(1)</script>\"'&amp;</title>\\x00\\x1b\\ud800\\u202etxt.mp4"
    assert page.words.count(shown) > 10
    main_of(source)


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"cells": []},
        {"cells": [{}]},
        {"cells": [{"id": "a", "status": "ok", "runs": [], "summary": {}}], "provenance": None, "notes": None},
        {"cells": [{"id": "a", "axes": {"strategy": "pooled"}, "summary": {"fps": {"median": 3.0}}}]},
        {"cells": [{"id": "a", "runs": [{"fps": None, "timeline": {"t_s": [], "columns": {}}}]}]},
        {"cells": [{"id": "a", "runs": [{"fps": 0.0, "timeline": {"t_s": [0.0], "columns": {"cuda.free": [0]}}}]}]},
        {"provenance": {"gpu": None, "clips": [None, {"name": None}], "load": None, "versions": {}}},
    ],
)
def test_a_record_may_lack_anything(made):
    source = render(made)
    Page(source)
    main_of(source)
    assert all(each["id"] in source for each in made.get("cells", ()) if each)


def test_a_bench_that_was_stopped_says_so():
    made = record(repeats=2)
    made["complete"] = False
    for each in made["cells"][10:]:
        each.update(status="unfinished", runs=[], summary=None)
    words = Page(render(made)).words
    assert f"Stopped early: 10 of {len(made['cells'])} cells are finished." in words
    assert "Nothing was measured." in words
    assert "unfinished: no reason given" in words


def test_notes_come_first(whole):
    made = {**whole[0], "notes": ["no GPU on this machine (no driver): strategies ran on cpu"]}
    words = Page(render(made)).words
    assert 0 < words.index("no GPU on this machine") < words.index("In words")


def test_a_reading_that_never_moves_is_not_looked_at_first():
    made = [cell(name, random.Random(0), rate=9.0, pinned=MB) for name in ("pooled", "pageable")]
    for each in made:
        for run in each["runs"]:
            columns = run["timeline"]["columns"]
            columns["nvml.process_used"] = [0] * len(columns["nvml.process_used"])
    select = next(each for each in main_of(render({"cells": made})).iter("select") if each.get("name") == "column")
    assert [option.get("value") for option in select] == [
        "cuda.free", "procfs.rss_shmem", "procfs.rss_anon", "nvml.process_used"
    ]  # fmt: skip


def test_no_memory_page_locked_is_said_in_words():
    made = [cell(name, random.Random(0), rate=9.0, pinned=0.0) for name in ("pooled", "pageable")]
    assert "No strategy that ran here page-locked any memory" in Page(render({"cells": made})).words


# -- parts --


@given(st.lists(st.floats(0, 200), min_size=1, max_size=12))
def test_labels_keep_their_distance_and_their_order(wanted):
    found = _svg.apart(wanted, 16, 0, 200)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert all(found[b] - found[a] >= 16 - 1e-6 for a, b in pairwise(order))
    assert min(found) >= -1e-6
    assert max(found) <= 200 + 1e-6


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.integers(2, 6))
def test_a_scale_reaches_from_tick_to_tick_around_its_values(low, wide, wanted):
    scale = _svg.Linear(low, low + wide, (0, 100), wanted)
    slack = scale.step * 1e-6
    assert scale.first - slack <= low <= low + wide <= scale.last + slack
    assert scale(scale.ticks[0]) == pytest.approx(0, abs=1e-6)
    assert scale(scale.ticks[-1]) == pytest.approx(100)
    assert len(scale.ticks) <= wanted + 2


def test_decades():
    scale = _svg.Log([0.0, 0.02, 3.0], (0, 100))
    assert scale.ticks == pytest.approx([0.01, 0.1, 1, 10])
    assert [scale(0.0), scale(0.01), scale(0.1), scale(10)] == pytest.approx([0, 0, 100 / 3, 100])
    assert _svg.Log([0.0], (0, 1)).ticks == [1, 10]


@given(st.lists(st.none() | st.integers(0, 1000), min_size=45, max_size=90), st.integers(4, 20))
def test_thinned_rows_keep_what_stands_out(values, most):
    rows = thinned([float(i) for i in range(len(values))], values, most)
    assert rows == sorted(rows, key=lambda row: row[0])
    assert all(values[int(time_s)] == value for time_s, value in rows)
    assert len(rows) <= most * 1.5 + 3
    known = [value for value in values if value is not None]
    kept = [value for _, value in rows if value is not None]
    assert (min(kept, default=None), max(kept, default=None)) == (min(known, default=None), max(known, default=None))


def test_figures_in_words():
    assert [number(x) for x in (None, 0, 1240.4, 84.72, 8.471, 0.01234)] == [
        "\u2013",
        "0",
        "1,240",
        "84.7",
        "8.47",
        "0.0123",
    ]
    assert figure(0.0421, "ms") == "42.1\u202f\u00b5s"
    assert figure(1.5e9, "bytes_per_s") == "1.50\u202fGB/s"
    assert figure(None, "fps") == figure(float("nan"), "fps") == figure(True, "fps") == "\u2013"
    assert plain("gpu.memory_bytes", 85 * 10**9) == "85.0\u202fGB"
    assert [plain("a", x) for x in (None, True, 3, 0.25, "x")] == ["unknown", "True", "3", "0.25", "x"]
    words = bytes_words(_svg.Linear(83.95e9, 84e9, (0, 1), 4))
    assert [words(x) for x in (83.96e9, 83.98e9)] == ["83.96 GB", "83.98 GB"]
