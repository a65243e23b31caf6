"""SVG that fits any width: places across are per cent, places down are pixels, text keeps its size."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import count

# What XML does not allow, lone surrogates (of file names that are no text) and marks that turn text round.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def text(value: object) -> str:
    """``value`` for HTML and XML, attributes too; characters that are invisible or not allowed as ``\\xNN``."""
    return html.escape(_ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), str(value)))


def tag(name: str, body: str = "", /, **attributes: object) -> str:
    """An element; ``body`` is markup, attributes are escaped, None is left out, ``aria_label`` gets its hyphen."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_short(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{body}</{name}>"


def _short(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else text(value)


class Names:
    """Ids for one page, each once."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def new(self) -> str:
        """Another id."""
        return f"n{next(self._numbers)}"


def picture(names: Names, title: str, description: str, height: float, parts: Iterable[str], class_: str = "") -> str:
    """An ``svg`` as wide as its place and ``height`` pixels high, with words for who cannot see it."""
    head, more = names.new(), names.new()
    body = tag("title", text(title), id=head) + tag("desc", text(description), id=more) + "".join(parts)
    return tag(
        "svg", body, role="img", class_=f"plot {class_}".strip(), aria_labelledby=f"{head} {more}",
        height=round(height),
    )  # fmt: skip


def label(x: float, y: float, words: str, class_: str = "", anchor: str = "start", dx: float = 0) -> str:
    """Text at ``x`` per cent and ``y`` pixels (of its base line), ``dx`` pixels aside."""
    return tag(
        "text", text(words), x=f"{x:.2f}%", y=float(y), dx=dx or None, class_=class_ or None,
        text_anchor=anchor if anchor != "start" else None,
    )  # fmt: skip


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return tag("line", x1=f"{x1:.2f}%", y1=float(y1), x2=f"{x2:.2f}%", y2=float(y2), class_=class_)


def dot(x: float, y: float, radius: float, class_: str, hint: str = "") -> str:
    """A dot; ``hint`` is shown where the pointer rests on it."""
    body = tag("title", text(hint)) if hint else ""
    return tag("circle", body, cx=f"{x:.2f}%", cy=float(y), r=float(radius), class_=class_)


def bar(x1: float, x2: float, y: float, height: float, class_: str) -> str:
    """A level bar around ``y``, two per mille wide at least, so that it is seen."""
    width = max(x2 - x1, 0.2)
    return tag(
        "rect",
        x=f"{x1:.2f}%",
        width=f"{width:.2f}%",
        y=float(y - height / 2),
        height=float(height),
        rx=2,
        class_=class_,
    )


def curve(points: Iterable[tuple[float, float] | None], height: float, class_: str) -> str:
    """A line through points of per cent and pixels, of a plot ``height`` pixels high; None is a gap."""
    path, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        path.append(f"{pen}{point[0] * 10:.1f} {point[1]:.1f}")
        pen = "L"
    inner = tag("path", d="".join(path), class_=class_)
    return tag(
        "svg", inner, viewBox=f"0 0 1000 {height:g}", preserveAspectRatio="none", width="100%", height=float(height),
        class_="inner",
    )  # fmt: skip


# -- scales --


class Linear:
    """Values to a range of places, with ticks at round values; ``low`` and ``high`` are widened to ticks."""

    def __init__(self, low: float, high: float, places: tuple[float, float], wanted: int = 4) -> None:
        if high - low <= 1e-9 * max(abs(low), 1.0):  # one value, or nearly
            high = low + max(abs(low), 1.0)
        step = nice((high - low) / wanted)
        self.first, self.last = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        self.ticks = [self.first + step * i for i in range(round((self.last - self.first) / step) + 1)]
        self.step = step
        self._places = places

    def __call__(self, value: float) -> float:
        start, end = self._places
        return start + (value - self.first) / (self.last - self.first) * (end - start)


class Log:
    """Values to a range of places by their logarithm, over whole decades; 0 and less stand at the start."""

    def __init__(self, values: Sequence[float], places: tuple[float, float]) -> None:
        known = [value for value in values if value > 0] or [1.0]
        self.low = math.floor(math.log10(min(known)) + 1e-9)
        self.high = max(math.ceil(math.log10(max(known)) - 1e-9), self.low + 1)
        self.ticks = [10.0**power for power in range(self.low, self.high + 1)]
        self._places = places

    def __call__(self, value: float) -> float:
        start, end = self._places
        share = (math.log10(value) - self.low) / (self.high - self.low) if value > 0 else 0.0
        return start + min(max(share, 0.0), 1.0) * (end - start)


def nice(step: float) -> float:
    """The round number (1, 2, 2.5 or 5 times a power of ten) that is not below ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those ``wanted``, ``gap`` from each other and between ``low`` and ``high`` if there is room."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    floor = low
    for i in order:
        found[i] = floor = max(found[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        found[i] = min(found[i], ceiling)
        ceiling = found[i] - gap
    return found


def axis_below(scale: Linear | Log, y: float, top: float, words: Callable[[float], str]) -> list[str]:
    """Hairlines up from ``y`` to ``top`` at the ticks, with their values below."""
    last = len(scale.ticks) - 1
    every = math.ceil(last / 5)  # more would run into each other where the page is narrow
    out = []
    for i, tick in enumerate(scale.ticks):
        x = scale(tick)
        out.append(line(x, top, x, y, "grid"))
        if (last - i) % every == 0:
            anchor = "start" if i == 0 else "end" if i == last else "middle"
            out.append(label(x, y + 16, words(tick), "tick", anchor))
    return out


def axis_left(scale: Linear, words: Callable[[float], str]) -> list[str]:
    """Hairlines across at the ticks, with their values in the margin on the left."""
    return [
        line(0, scale(tick), 100, scale(tick), "grid") + label(0, scale(tick) + 4, words(tick), "tick", "end", dx=-8)
        for tick in scale.ticks
    ]


def figures_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], summary: str = "The figures as a table"
) -> str:
    """A table of text that is opened on demand; the first column names the row."""
    return tag("details", tag("summary", text(summary)) + table(head, rows, summary))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], name: str) -> str:
    """A table that scrolls sideways in a place of its own (reached by keyboard as well)."""
    top = tag("tr", "".join(tag("th", text(each), scope="col") for each in head))
    body = "".join(
        tag("tr", tag("th", text(row[0]), scope="row") + "".join(tag("td", text(each)) for each in row[1:]))
        for row in rows
    )
    whole = tag("table", tag("thead", top) + tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=name)
