"""bench.html in a real browser: it fits narrow and wide, by day and by night, and its script does what it should.

A page around it measures: bench.html may run no script but its own.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench_records import record

from framepipe.bench.page import render

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MEASURE = """
const page = document.querySelector("iframe"), found = {errors: []};
addEventListener("load", () => {
  const inner = page.contentDocument, root = inner.documentElement, view = page.contentWindow;
  const colour = (element, name) => view.getComputedStyle(element)[name];
  const shown = (element) => element.getClientRects().length > 0;
  const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const pick = inner.querySelector(".pick"), selects = [...pick.querySelectorAll("select")];
  const choices = () => [...inner.querySelectorAll(".choice")].filter(shown).map((choice) => ({...choice.dataset}));
  found.width = [root.clientWidth, root.scrollWidth];
  found.colours = {paper: colour(inner.body, "backgroundColor"), ink: colour(inner.body, "color"),
    soft: colour(inner.querySelector(".how"), "color"), tick: colour(inner.querySelector(".tick"), "fill"),
    note: [colour(inner.querySelector(".notes"), "backgroundColor"), colour(inner.querySelector(".notes"), "color")]};
  found.pick = shown(pick);
  found.first = choices();
  selects[0].value = selects[0].options[1].value;
  selects[0].dispatchEvent(new Event("change"));
  found.second = choices();
  found.wanted = Object.fromEntries(selects.map((select) => [select.name, select.value]));
  found.plots = [...inner.querySelectorAll("svg.plot")].filter(shown).map((plot) => ({
    title: plot.querySelector("title").textContent, box: box(plot),
    texts: [...plot.querySelectorAll("text")].map((text) => [text.textContent, ...box(text)])}));
  found.files = view.performance.getEntriesByType("resource").length;
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("Chromium is not installed: bench.html was not looked at in a browser")
    return found


def look(browser: str, folder: Path, source: str, width: int, dark: bool) -> dict[str, Any]:
    """What the browser measures of a page that is ``width`` pixels wide."""
    frame = f'<iframe width="{width}" height="800" style="border:0" srcdoc="{html.escape(source)}"></iframe>'
    around = folder / "around.html"
    around.write_text(f'<!DOCTYPE html><meta charset="utf-8">{frame}<script>{MEASURE}</script>', encoding="utf-8")
    argv = [
        *(browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--dump-dom"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={width + 100},900"),
        *(f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=60000"),
        *(["--no-sandbox"] if getattr(os, "geteuid", lambda: 1)() == 0 else []),
        around.as_uri(),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)
    told = re.search("FOUND(.*)END", done.stdout)
    assert told, f"status {done.returncode}: {done.stdout[-500:]} {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


@pytest.fixture(scope="module")
def source() -> str:
    made = record(repeats=3, clip="a clip with a long name, as cameras give them, 2031-04-05 06-07-08.mp4")
    made["notes"] = ["no GPU on this machine: made up for a test"]
    return render(made)


@pytest.fixture(scope="module", params=[(360, False), (1400, True)], ids=["narrow by day", "wide by night"])
def seen(request, browser, source, tmp_path_factory):
    width, dark = request.param
    return width, dark, look(browser, tmp_path_factory.mktemp("browser"), source, width, dark)


def test_the_page_is_no_wider_than_its_window(seen):
    width, _, found = seen
    visible, needed = found["width"]
    assert width - 20 <= visible <= width
    assert needed <= visible


def test_no_text_of_a_plot_covers_another_or_leaves_the_page(seen):
    width, _, found = seen
    assert len(found["plots"]) > 20
    for plot in found["plots"]:
        texts = plot["texts"]
        assert len(texts) > 4
        for i, (words, left, top, right, bottom) in enumerate(texts):
            assert left >= 0
            assert right <= width
            for other, left_2, top_2, right_2, bottom_2 in texts[i + 1 :]:
                across, down = min(right, right_2) - max(left, left_2), min(bottom, bottom_2) - max(top, top_2)
                # Boxes of lines of text are taller than what is drawn.
                assert across < 1 or down < 4, f"{plot['title']}: {words!r} and {other!r}"


def test_plots_fill_their_place(seen):
    _, _, found = seen
    for plot in found["plots"]:
        left, top, right, bottom = plot["box"]
        assert right - left > 180, plot["title"]
        assert bottom - top > 60, plot["title"]


def test_the_script_shows_one_reading_at_a_time(seen):
    _, _, found = seen
    assert found["pick"]
    assert len(found["first"]) == len(found["second"]) == 1
    assert found["first"] != found["second"] == [found["wanted"]]


def test_nothing_is_loaded(seen):
    assert seen[2]["files"] == 0


def test_text_stands_out_by_day_and_by_night(seen):
    _, dark, found = seen
    colours = found["colours"]
    assert (luminance(colours["paper"]) < 0.1) == dark
    assert contrast(colours["ink"], colours["paper"]) > 10
    assert contrast(colours["soft"], colours["paper"]) > 4.5
    assert contrast(colours["tick"], colours["paper"]) > 4.5
    assert contrast(*colours["note"]) > 7


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.2, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
