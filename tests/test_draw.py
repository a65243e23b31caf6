"""Draw: boxes land where they belong, are cut at the edges, and never on anybody else's memory."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from framepipe.device.cpu import CpuDevice
from framepipe.errors import ConfigError
from framepipe.frame import Batch, FrameSpec, Item
from framepipe.kernels import _font
from framepipe.kernels._draw import Mark, draw_boxes
from framepipe.stage import Affine, ArraySpec, Flow
from framepipe.stages.draw import Draw

RED, GREY = (255, 0, 0), 90


def canvas(width: int = 60, height: int = 40) -> np.ndarray:
    return np.full((height, width, 3), GREY, np.uint8)


def painted(image: np.ndarray) -> np.ndarray:
    return (image != GREY).any(axis=2)


def drawn(
    stage: Draw, meta: dict[str, Any], image: np.ndarray | None = None, to_source: Affine | None = None
) -> np.ndarray:
    """One picture through the stage, as a pipeline does it."""
    image = canvas() if image is None else image
    device = CpuDevice()
    stage.id = "draw"
    stage.open(device)
    array = ArraySpec(image.shape, to_source=to_source or Affine())
    flow = stage.plan(Flow(FrameSpec(60, 40, "yuv420p"), {"image": array}))
    assert flow.arrays["image"] == array
    assert flow.arrays["image"] is not array, "a picture of its own"
    item = Item("door", 7, 70, None, 2.8, meta=meta)
    batch = Batch([item], None, {"image": [image]})
    batch.out = {"image": np.full((1, *image.shape), 13, np.uint8)}
    stage.launch(batch)
    return batch.out["image"][0]


def box(*sides: float, **more: Any) -> dict[str, Any]:
    return {"box": list(sides), "label": "cat", "score": 0.875, **more}


def test_the_outline_is_inside_the_box():
    image = canvas()
    draw_boxes(image, [Mark((10, 8, 30.4, 27.6), RED)], 2, 1)
    expected = np.zeros((40, 60), bool)
    expected[8:28, 10:30] = True
    expected[10:26, 12:28] = False
    assert np.array_equal(painted(image), expected)
    assert (image[expected] == RED).all()


@pytest.mark.parametrize("text", ["", "cat 0.88", "a label far longer than the picture is wide"])
@pytest.mark.parametrize(
    "sides",
    [
        (-10, -10, 20, 15), (50, 30, 90, 70), (-100, -100, 200, 200), (-9, 5, 200, 12), (10, 10, 11, 11), (5, 5, 5, 5),
        (20, 20, 10, 10), (59.6, 39.6, 80, 80), (-5, -5, 0, 0), (100, 100, 120, 120), (-1e30, -1e30, 1e30, 1e30),
        (float("nan"), 0, 5, 5), (0, 0, float("inf"), 5),
    ],
)  # fmt: skip
def test_whatever_is_outside_is_cut_off(sides, text):
    # A picture inside a larger one of the same memory: what is written beside it shows.
    around = canvas(100, 80)
    image = around[20:60, 20:80]
    draw_boxes(image, [Mark(sides, RED, text)], 3, 1)
    beside = around.copy()
    beside[20:60, 20:80] = GREY
    assert (beside == GREY).all()
    if all(np.isfinite(sides)):
        x1, y1, x2, y2 = (int(np.clip(round(side), -9, 99)) for side in sides)
        inside = painted(image)[max(y1, 0) : max(y2, 0), max(x1, 0) : max(x2, 0)]
        if not text:
            assert painted(image).sum() == inside.sum(), "all that is drawn is inside the box"
        assert inside.size == 0 or sides[0] < -90 or inside.any()
    else:
        assert not painted(image).any()


def test_boxes_are_mapped_from_the_source_to_the_image():
    # The image shows the source shrunk by 4, 5 pixels from the left and 2 from the top.
    to_source = Affine(4, 4, -20, -8)
    out = drawn(Draw(text=False, thickness=1), {"m": [box(20, 12, 100, 60)]}, to_source=to_source)
    rows, columns = np.nonzero(painted(out))
    assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == (10, 5, 30, 17)


def test_the_image_that_comes_in_stays_as_it_is():
    image = canvas()
    image.flags.writeable = False
    out = drawn(Draw(), {"m": [box(10, 20, 30, 35)]}, image)
    assert (image == GREY).all()
    assert painted(out).any()
    assert np.array_equal(drawn(Draw(), {}, image), image), "without boxes it is a copy"


def test_it_draws_the_stages_it_is_told_to():
    meta = {
        "a": [box(2, 2, 12, 12)],
        "b": [box(40, 20, 55, 35)],
        "count": 3,
        "names": ["x"],
        "c": [{"label": "no box"}],
    }
    plain = Draw(text=False)
    both, first, none = (
        drawn(plain, meta),
        drawn(replace(plain, stages=["a"]), meta),
        drawn(replace(plain, stages=[]), meta),
    )
    assert painted(both)[:, :30].any()
    assert painted(both)[:, 30:].any()
    assert painted(first)[:, :30].any()
    assert not painted(first)[:, 30:].any()
    assert not painted(none).any()


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        (True, {}, "cat 0.88"),
        (True, {"score": None}, "cat"),
        (False, {}, ""),
        ("{label} {id} at {time_s:.1f}", {"id": 4}, "cat 4 at 2.8"),
        ("{source}#{index} {stage}", {}, "door#7 m"),
        ("{nothing}{label:.3f}{box[9]}{box.x}!", {}, "cat!"),
        ("100 {{%}}", {}, "100 {%}"),
    ],
)
def test_what_the_text_says(text, entry, words):
    image = canvas(200, 40)
    out = drawn(Draw(text=text, thickness=1, font_scale=1), {"m": [box(4, 20, 30, 35, **entry)]}, image)
    expected = image.copy()
    draw_boxes(expected, [Mark((4, 20, 30, 35), (0x39, 0xFF, 0x14), words)], 1, 1)
    assert np.array_equal(out, expected)


def test_text_stands_above_the_box_and_inside_where_there_is_no_room():
    for top, rows in ((20, (11, 20)), (4, (6, 15))):
        image = canvas(100, 40)
        draw_boxes(image, [Mark((10, top, 60, 35), RED, "cat")], 2, 1)
        band = image[rows[0] : rows[1], 10 : 10 + 19]
        ink = (band == 255).all(axis=2)  # white on red
        assert np.array_equal(ink[1:, 1:-1], _font.text("cat"))
        assert (band[~ink] == RED).all()
    light = canvas(100, 40)
    draw_boxes(light, [Mark((90, 20, 99, 35), (255, 255, 0), "cat")], 1, 1)
    assert ((light == 0).all(axis=2)).sum() == _font.text("cat").sum(), (
        "black on a light colour, moved into the picture"
    )


def test_size_follows_the_picture():
    small, large = (
        painted(drawn(Draw(), {"m": [box(*(side * k for side in (10, 20, 30, 36)))]}, canvas(60 * k, 40 * k)))
        for k in (1, 27)
    )
    assert small[25, 10:14].tolist() == [True, False, False, False]
    assert large[25 * 27, 270:276].tolist() == [True] * 4 + [False] * 2


def test_the_font_has_every_printable_letter():
    printable = [letter for letter in string.printable if letter.isprintable()]
    pictures = {letter: _font.glyphs()[letter] for letter in printable}
    assert len(pictures) == 95
    assert len({picture.tobytes() for picture in pictures.values()}) == 95
    assert all(picture.shape == (8, 5) for picture in pictures.values())
    assert not pictures[" "].any()
    assert ["".join(".#"[int(dot)] for dot in row) for row in pictures["4"]] == [
        "...#.", "..##.", ".#.#.", "#..#.", "#####", "...#.", "...#.", ".....",
    ]  # fmt: skip
    assert np.array_equal(_font.text("né\n"), _font.text("n??"))
    assert _font.text("abc").shape == (8, 17)
    assert _font.text("").shape == (8, 0)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no stage before it makes one"):
        Draw().plan(Flow(FrameSpec(60, 40, "yuv420p")))
    for options, words in (
        ({"color": "red"}, "#rrggbb"),
        ({"color": "#12345g"}, "#rrggbb"),
        ({"color": (0, 0, 256)}, "three numbers"),
        ({"text": "{label"}, "template"),
        ({"thickness": 0}, "thickness"),
        ({"font_scale": 65}, "font_scale"),
    ):
        with pytest.raises(ConfigError, match=words):
            Draw(**options)
    assert Draw(color=(57, 255, 20))._color == Draw(color="#39FF14")._color
