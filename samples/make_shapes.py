"""Makes shapes.mp4 and shapes.json beside this file: a small clip and the truth about it.

Run it as ``python samples/make_shapes.py [FOLDER]``. The pictures come from the ``synthetic`` source; the first
second shows the empty scene, as a fixed camera would see it before anybody comes. Running it again gives the same
pictures, and with the same version of PyAV the same bytes.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

from framepipe.sources.synthetic import Synthetic

SCENE = Synthetic(width=640, height=360, rate=25, frames=250, empty=25, seed=7)


def write_video(path: Path) -> None:
    """Encode every picture as H.264, with a key frame each second."""
    # Nothing of the machine or the moment goes into the file: no date, no thread count.
    with av.open(str(path), "w", options={"movflags": "+faststart", "fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(SCENE.rate), options={"crf": "23", "preset": "slow"})
        stream.width, stream.height, stream.pix_fmt = SCENE.width, SCENE.height, "yuv420p"
        context = stream.codec_context
        context.thread_count, context.gop_size = 1, int(SCENE.rate)
        # BT.601 as 525-line video has it: 6 in all three tables of H.273; 1 is limited range.
        context.colorspace = context.color_primaries = context.color_trc = 6
        context.color_range = 1
        for frame in SCENE.open(lambda: False).frames():
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def truth() -> dict[str, Any]:
    """What each picture shows; boxes are ``x1, y1, x2, y2`` in pixels."""
    return {
        "video": "shapes.mp4",
        "width": SCENE.width,
        "height": SCENE.height,
        "rate": str(SCENE.rate),
        "frames": [
            {"index": index, "time_s": index / SCENE.rate, "boxes": SCENE.truth(index)} for index in range(SCENE.frames)
        ],
    }


def write_truth(path: Path) -> None:
    """Write JSON, a line a picture."""
    known = truth()
    frames = ",\n".join(json.dumps(frame) for frame in known.pop("frames"))
    head = json.dumps(known)[:-1]
    path.write_text(f'{head}, "frames": [\n{frames}\n]}}\n', encoding="utf-8", newline="\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    write_video(folder / "shapes.mp4")
    write_truth(folder / "shapes.json")
