"""The probes on a GPU: every kind of memory is really taken, refusals have codes, copies copy."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from framepipe import cli
from framepipe.device.select import why_not
from framepipe.hardware import is_wsl2
from framepipe.probe import baselines, children, machine
from framepipe.probe.bandwidth import NAMES, SIZES_NBYTES, baseline
from framepipe.probe.counters import Patience

MIB = 1 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]

PINNED = ["default", "write_combined", "mapped", "portable", "registered"]
PATIENCE = Patience(eps_nbytes=4 * MIB, window_s=0.2, timeout_s=5.0)


def pinned(kind, nbytes, **more):
    asked = {"probe": "pinned", "kind": kind, "device": 0, "nbytes": nbytes, "hold_s": 0.0}
    return children.run({**asked, "patience": asdict(PATIENCE), **more}, 120)


def about(nbytes, wanted, tolerance=32 * MIB):
    return nbytes is not None and abs(nbytes - wanted) <= tolerance


# -- blocks and copies, in this process --


@pytest.fixture
def cuda():
    from framepipe.probe import _cuda_blocks

    _cuda_blocks.start(0)
    return _cuda_blocks


@pytest.mark.parametrize("kind", ["control", "pageable", "device", *PINNED])
def test_a_block_is_memory_of_its_kind(kind, cuda):
    import cupy as cp

    block = cuda.BLOCKS[kind](4 * MIB)
    try:
        if kind == "control":
            assert block.address is None
            return
        wanted = {"device": 2, "pageable": 0}.get(kind, 1)  # cudaMemoryTypeDevice, Unregistered, Host
        assert cp.cuda.runtime.pointerGetAttributes(block.address).type == wanted
        assert all(seconds >= 0 for seconds in block.steps_s.values())
    finally:
        block.free()


def test_a_refusal_has_cudas_code_and_name(cuda):
    from framepipe.probe._host_blocks import RefusedError

    with pytest.raises(RefusedError, match="cudaFreeHost") as caught:
        cuda.call("cudaFreeHost", lambda: cuda.runtime.freeHost(4096))
    assert caught.value.code == 1
    assert caught.value.name == "cudaErrorInvalidValue"
    with pytest.raises(RefusedError, match="not tried"):
        cuda.DeviceAllocated(1 << 50)


@pytest.mark.parametrize("kind", ["default", "pageable", "mapped", "registered", "write_combined"])
def test_copies_copy_all_bytes_both_ways(kind, cuda):
    import time

    from framepipe.probe import _cuda_copies

    nbytes = 3 * MIB + 16
    host, there, back = cuda.BLOCKS[kind](nbytes), cuda.DeviceAllocated(nbytes), np.zeros(nbytes, np.uint8)
    view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host.address))
    wanted = np.random.default_rng(1).integers(0, 256, nbytes).astype(np.uint8)
    try:
        copies = _cuda_copies._Copies(kind, host, there, time.perf_counter)
        view[:] = wanted
        copies._copy_all("to_device", nbytes, 1)
        view[:] = 0
        cuda.runtime.memcpy(back.ctypes.data, there.address, nbytes, 2)
        assert np.array_equal(back, wanted)
        seconds, wall_s = copies._copy_all("to_host", nbytes, 2)
        assert np.array_equal(view, wanted)
        assert 0 < seconds <= wall_s
    finally:
        del view
        there.free()
        host.free()


# -- cells in child processes --


@pytest.mark.parametrize("kind", PINNED)
def test_pinned_memory_is_host_memory(kind):
    """Other users of the GPU would disturb what is said of device memory."""
    found = pinned(kind, 256 * MIB)
    assert found["status"] == "ok", found["reason"]
    assert "cuda" not in found["missing"]
    if sys.platform.startswith("linux") and not is_wsl2():
        assert about(found["deltas"]["process.rss"], 256 * MIB)
        assert about(found["deltas"]["cuda.free"], 0, 64 * MIB)
        if kind not in ("registered", "write_combined"):  # pages of the process's own, and of the driver's (580.159)
            assert about(found["deltas"]["procfs.rss_shmem"], 256 * MIB)


def test_device_memory_is_device_memory_and_comes_back():
    found = pinned("device", 512 * MIB)
    assert found["status"] == "ok", found["reason"]
    assert about(found["deltas"]["cuda.free"], -512 * MIB)
    assert about(found["left"]["cuda.free"], 0)
    assert found["back_s"]["cuda.free"] is not None


def test_the_control_moves_nothing():
    found = pinned("control", 512 * MIB)
    assert found["status"] == "ok", found["reason"]
    assert about(found["deltas"]["cuda.free"], 0)


def test_a_pin_that_cannot_be_is_a_row_with_its_code():
    found = pinned("default", 1 << 50)
    assert found["status"] == "failed"
    assert found["error"]["code"] in (1, 2, 208, 801)
    assert found["error"]["name"].startswith("cudaError")
    assert found["deltas"]["cuda.free"] is not None


@pytest.mark.parametrize(("kind", "pooled"), [("default", False), ("default", True), ("registered", False)])
def test_churn(kind, pooled):
    asked = {"probe": "churn", "kind": kind, "pooled": pooled, "device": 0, "seconds": 2.0, "per_s": 200.0, "seed": 1}
    found = children.run(asked, 120)
    assert (found["status"], found["errors"]) == ("ok", {})
    assert found["takes"] > 32
    assert (found["allocations"] < found["takes"]) == pooled
    assert "cuda.free" in found["slopes"]


@pytest.mark.parametrize("kind", [name for name in NAMES if name != "host_copy"])
def test_bandwidth(kind):
    asked = {"probe": "bandwidth", "kind": kind, "device": 0, "sizes": [65536, 4 * MIB], "threads": [1], "repeats": 2}
    found = children.run({**asked, "region": MIB}, 120)
    assert found["status"] == "ok", found["reason"]
    assert [(row["nbytes"], row["direction"]) for row in found["rows"]] == [
        (nbytes, direction) for nbytes in (65536, 4 * MIB) for direction in ("to_device", "to_host")
    ]
    for row in found["rows"]:
        assert row["bytes_per_s"]["median"] >= row["wall_bytes_per_s"]["median"] > 0


# -- the command line --


def test_the_command_line_keeps_a_baseline_that_this_machine_finds(tmp_path, capsys):
    path = tmp_path / "baseline.json"
    assert cli.main(["probe", "bandwidth", "--sizes", "1MiB", "--repeats", "1", "--baseline", str(path), "--save"]) == 0
    assert "host to device:" in capsys.readouterr().out
    kept = baseline(path)
    assert kept["gpu"]["uuid"] in machine.identity()
    assert kept["ceiling"]["to_device_bytes_per_s"] > 0
    assert list(baselines.read(path)) == [machine.identity()]
    assert max(SIZES_NBYTES) == 256 * MIB


def test_every_kind_from_the_command_line(tmp_path, capsys):
    assert cli.main(["probe", "pinned", "--sizes", "64MiB", "--settle", "2", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "cuda.free (cudaMemGetInfo: cudaMemGetInfo free)" in out
    found = json.loads((tmp_path / "probe-pinned.json").read_text(encoding="utf-8"))
    assert {cell["kind"]: cell["status"] for cell in found["cells"]} == dict.fromkeys(
        ["control", *PINNED, "device", "pageable"], "ok"
    )
    assert found["provenance"]["gpu"]["driver_model"]["source"]
    assert found["notes"] == []


def test_the_parent_has_no_cupy():
    code = (
        "import sys; from framepipe import cli\n"
        "status = cli.main(['probe', 'pinned', '--sizes', '16MiB', '--kinds', 'default', '--settle', '1'])\n"
        "sys.exit(9 if 'cupy' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=children._environment(), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
