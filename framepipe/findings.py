"""What was found in a source that its reader should know of: counted by name, and in words."""

from __future__ import annotations

from collections.abc import Sequence

from framepipe.feed import Feed
from framepipe.stage import Stage
from framepipe.timestamps import JUMP_S

_HDR = {"pq": "PQ", "hlg": "HLG"}


def counters(feed: Feed) -> dict[str, int]:
    """Pictures by what is odd about them, without those that there were none of.

    Their time stamp is ``estimated``, ``repeated``, ``backward``, ``jumping`` or ``negative`` (`framepipe.timestamps`);
    they are ``interlaced``, or were before they were ``deinterlaced``; they are ``changed`` (another size, shape of
    pixels, format or colour than the one before).
    """
    found = {
        **feed.clock.odd,
        "interlaced": feed.interlaced,
        "deinterlaced": feed.deinterlaced,
        "changed": feed.changed,
    }
    return {name: count for name, count in found.items() if count}


def findings(feed: Feed, stages: Sequence[Stage]) -> list[str]:
    """A sentence for each finding in pictures that went through ``stages``."""
    count = counters(feed)
    told = [text.format(_pictures(count[name])) for name, text in _texts(feed).items() if name in count]
    plain = sorted({stage.type_name for stage in stages if stage.tonemap == "none"})
    if plain or all(stage.tonemap is None for stage in stages):
        remedy = " and ".join(f"{name}: {{tonemap: hable}}" for name in plain or ["rgb"])
        for transfer in sorted(feed.transfers & _HDR.keys()):
            told.append(
                f"is HDR ({_HDR[transfer]}) and was not tone mapped: it looks as if it were SDR; {remedy} maps it"
            )
    for named, taken in feed.other_matrices.items():
        told.append(f"has a matrix that there is no formula for here ({named}): {taken} was taken, and colours are off")
    if feed.with_alpha and not any(stage.uses_alpha for stage in stages):
        told.append(
            f"has alpha ({', '.join(sorted(feed.with_alpha))}), which was dropped: no stage uses it; "
            "rgb: {alpha: [255, 255, 255]} puts the pictures on white"
        )
    return told


def _texts(feed: Feed) -> dict[str, str]:
    return {
        "estimated": f"{{}} without a time stamp: times are estimated, at {float(feed.rate):g} a second",
        "repeated": "{} with the time stamp of the one before",
        "backward": "{} with a time stamp before that of the one before",
        "jumping": f"{{}} with a time stamp more than {JUMP_S:g} s behind the one before",
        "negative": "{} with a negative time stamp",
        "interlaced": "{} interlaced, and left so; deinterlace: true of the source makes whole ones of them",
        "changed": "{} of another size, shape of pixels, format or colour than the one before",
    }


def _pictures(count: int) -> str:
    return f"{count} picture{'' if count == 1 else 's'}"
