"""Sensors of memory on a GPU: CUDA, NVML and Linux see what is allocated."""

from __future__ import annotations

import sys

import pytest

from framepipe.device.select import why_not
from framepipe.hardware import is_wsl2
from framepipe.telemetry.base import Missing
from framepipe.telemetry.sampler import Sampler
from framepipe.telemetry.sensors import close_sensors, open_sensors, read_sensors

MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]


@pytest.fixture
def opened():
    """All sensors of device 0 by name, with CUDA's context made, so that it does not count as an allocation."""
    import cupy as cp

    with cp.cuda.Device(0):
        cp.cuda.runtime.free(0)
        cp.cuda.Stream(non_blocking=True).synchronize()
        sensors = open_sensors(0)
        yield {sensor.name: sensor for sensor in sensors}
    close_sensors(sensors)


def need(opened, *names):
    for name in names:
        if isinstance(opened[name], Missing):
            pytest.skip(f"{name}: {opened[name].reason}")


def about(nbytes: int | None, wanted: int, tolerance: int = 64 * MIB) -> bool:
    return nbytes is not None and abs(nbytes - wanted) <= tolerance


def test_cuda_and_nvml_see_one_allocation_alike(opened):
    """Other users of the GPU would disturb this."""
    import cupy as cp

    need(opened, "nvml")
    before = read_sensors(opened.values())
    memory = cp.cuda.Memory(512 * MIB)
    during = read_sensors(opened.values())
    del memory
    after = read_sensors(opened.values())
    assert about(before["cuda.free"] - during["cuda.free"], 512 * MIB)
    assert about(during["nvml.used"] - before["nvml.used"], 512 * MIB)
    assert about(before["nvml.free"] - during["nvml.free"], 512 * MIB)
    assert about(after["cuda.free"], before["cuda.free"])
    assert about(after["nvml.used"], before["nvml.used"])


def test_cuda_and_nvml_mean_the_same_device(opened):
    need(opened, "nvml")
    found = read_sensors(opened.values())
    # NVML's total has what the driver reserves; CUDA's has not.
    assert about(found["nvml.total"] - (found["nvml.reserved"] or 0), found["cuda.total"], 1024 * MIB)
    assert found["nvml.used"] + found["nvml.free"] <= found["nvml.total"]


def test_what_nvml_says_of_this_process_grows_or_is_unknown_with_a_reason(opened):
    import cupy as cp

    need(opened, "nvml")
    before = opened["nvml"].read()["process_used"]
    if before is None:
        assert "process_used" in opened["nvml"].reasons
        pytest.skip(opened["nvml"].reasons["process_used"])
    memory = cp.cuda.Memory(512 * MIB)
    assert about(opened["nvml"].read()["process_used"] - before, 512 * MIB)
    del memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssShmem is Linux's")
def test_pinned_memory_shows_as_shared_and_not_as_locked(opened):
    import cupy as cp

    before = opened["procfs"].read()
    memory = cp.cuda.PinnedMemory(256 * MIB, 0)
    during = opened["procfs"].read()
    del memory
    after = opened["procfs"].read()
    assert about(during["rss_shmem"] - before["rss_shmem"], 256 * MIB, 16 * MIB)
    assert about(during["rss"] - before["rss"], 256 * MIB, 32 * MIB)
    assert about(after["rss_shmem"], before["rss_shmem"], 16 * MIB)
    assert (during["locked"], during["pinned"]) == (before["locked"], before["pinned"])


@pytest.mark.skipif(not sys.platform.startswith("linux") or is_wsl2(), reason="Windows is not behind it")
def test_linux_has_no_driver_model_and_no_luid(opened):
    from framepipe.telemetry.adapter import find_adapter

    need(opened, "nvml")
    assert opened["nvml"].driver_model().current is None
    adapter = find_adapter(0)
    assert adapter.luid is None
    assert adapter.uuid.int


def test_the_sampler_sees_a_peak_from_its_own_thread(opened):
    import cupy as cp

    with Sampler(opened.values(), 50) as sampler:
        sampler.mark("start")
        memory = cp.cuda.Memory(512 * MIB)
        sampler.sample()
        del memory
    timeline = sampler.timeline()
    free = timeline["extremes"]["cuda.free"]
    assert about(free["most"] - free["least"], 512 * MIB)
    assert timeline["cost"]["sensors"]["cuda"] > 0
    assert None not in timeline["columns"]["cuda.free"]
