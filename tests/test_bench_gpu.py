"""A bench's children on a GPU: what they find out about it, and that every strategy there is right and has figures."""

from __future__ import annotations

import json

import pytest
from test_bench_child import STAGING, request

from framepipe.bench import cell, record
from framepipe.device.select import why_not
from framepipe.registry import names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]
GPU = {"device": "cuda", "device_index": 0}


@pytest.fixture(scope="module")
def machine():
    return cell.answer(request("machine", device="cuda"))


def test_the_machine_has_a_gpu_with_a_bus(machine):
    json.dumps(machine, allow_nan=False)
    gpu = machine["gpu"]
    assert gpu["name"] and gpu["cupy"] and gpu["cuda"]
    assert 0 < gpu["free_bytes"] < gpu["memory_bytes"]
    assert gpu["bus_bytes_per_s"] > 1e9
    assert not machine["device"]["shared"] and "cuda.free" in machine["sensors"]
    assert record.notes(machine) == []


@pytest.mark.parametrize("mode", ["staging", "pipeline"])
@pytest.mark.parametrize("strategy", names("staging"))
def test_every_strategy_is_right_and_has_figures(machine, clip, mode, strategy):
    if machine["strategies"][strategy] is not None:
        pytest.skip(machine["strategies"][strategy])
    asked = request("parity", clip, mode, staging={**STAGING, "strategy": strategy}, **GPU)
    assert cell.answer(asked)["hashes"] == cell.answer({**asked, "do": "reference"})["hashes"]
    found = cell.answer({**asked, "do": "measure"})
    json.dumps(found, allow_nan=False)
    assert found["frames"] == 20 and found["memory"]["cuda.free"]["rest"] > 0
    assert record.vram_peak(found) >= 0
    assert found["memory"]["cuda.free"]["back_s"] is not None, "what CUDA keeps for good was there before"
    assert found["upload_ms"]["count"] >= 18, "36 pictures in batches of 2"
