"""Real footage on a GPU: every frame of it, and the results of the CPU. Slow on few cores; takes FRAMEPIPE_FOOTAGE."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from framepipe.config import load
from framepipe.device.select import why_not
from framepipe.pipeline import Pipeline
from framepipe.shipped import find

FOLDER = os.environ.get("FRAMEPIPE_FOOTAGE")
CLIPS = {
    "bikes_640x272_h264.mp4": 250, "cars_768x432_12_5fps.mp4": 377, "deer_1080p_h264.mp4": 23,
    "hello_720p_h264_aac.mp4": 249, "person_768x432_139s.mp4": 1394, "phone_dog_1080p_h264_vfr.mp4": 41,
    "phone_portrait_2160p60.mp4": 18, "street_1080p_h264_annexb.264": 54, "vtest_768x576_pedestrians_79s.avi": 795,
}  # fmt: skip

EXACT = {"motion": [], "tensors": ["stages.tensor.accuracy=exact"]}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
    pytest.mark.skipif(not FOLDER, reason="set FRAMEPIPE_FOOTAGE to a folder with real footage"),
]


def results(name: str, path: Path, device: str) -> list[Any]:
    """What a shipped pipeline makes of a clip: its meta, and the bytes of its tensor."""
    config = load(find(name), sets=["sinks=[]", *EXACT[name]], sources=[str(path)], device=device)
    found = []
    with Pipeline(**config.kwargs()) as pipeline:
        for frame in pipeline:
            tensors = [hashlib.sha1(frame.to_host(array).tobytes()).hexdigest() for array in frame.tensors.values()]
            found.append((frame.index, frame.time_s, frame.meta, tensors))
    assert pipeline.report is not None and pipeline.report.exit == "complete"
    return found


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ["motion", "tensors"])
def test_footage_gives_what_it_gives_on_the_cpu(name, clip):
    path = Path(FOLDER or "") / clip
    if not path.exists():
        pytest.skip(f"{clip} is not in FRAMEPIPE_FOOTAGE")
    found = results(name, path, "cuda")
    assert len(found) == CLIPS[clip]
    assert found == results(name, path, "cpu")
