"""How to test a stage of one's own: the contract with `check_stage`, then what it is for."""

import sys
from pathlib import Path

import numpy as np
import pytest

from framepipe.testing import check_stage, pattern_frames, run_stages

sys.path.insert(0, str(Path(__file__).parent))
from invert_stage import Invert


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_it_keeps_the_contract_of_a_stage(strength):
    check_stage(Invert(strength=strength))


def test_it_makes_a_negative():
    frames = pattern_frames(3)
    plain = run_stages(["rgb"], frames)
    negative = run_stages(["rgb", Invert()], frames)
    for before, after in zip(plain, negative, strict=True):
        assert np.array_equal(after["image"], 255 - before["image"])


def test_half_way_is_grey():
    for result in run_stages(["rgb", Invert(strength=0.5)], pattern_frames(1)):
        assert set(np.unique(result["image"])) <= {127, 128}
