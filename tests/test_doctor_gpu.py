"""The doctor on a GPU: what it measures there, and that it sees who else is on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from framepipe import cli
from framepipe.bench.compare import NOISE, SECOND_ONLY, compare
from framepipe.device.select import why_not
from framepipe.doctor import examination, gpus, measuring
from framepipe.doctor.check import TO_DO, UNKNOWN
from framepipe.doctor.measuring import How

GIB = 1 << 30
HELD = 4 * GIB
HOG = """
import sys
import cupy
held = cupy.cuda.runtime.malloc(int(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not()), reason=f"no GPU: {why_not()}"),
]


@pytest.fixture(scope="module")
def found():
    """One examination for all who look at it."""
    return examination.examine(How())


@pytest.fixture
def hog() -> Iterator[int]:
    """Another process that holds `HELD` bytes of the first GPU; its number."""
    argv = [sys.executable, "-c", HOG, str(HELD)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.stdin.close()
        process.wait(60)


def check(record, name):
    (one,) = (each for each in record["checks"] if each["name"] == name)
    return one


def text(record, name):
    return "\n".join(line["text"] for line in check(record, name)["lines"])


def test_every_check_is_answered(found):
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["device"] == "cuda"
    assert found["measured"]["complete"]
    for name in ("driver", "driver_model", "bus", "cupy", "counters", "churn", "pinning"):
        assert check(found, name)["status"] != UNKNOWN, text(found, name)


def test_the_bus_and_pins_were_measured(found):
    measured = found["measured"]
    for what in ("to_device", "to_host"):
        assert measuring.rate(measured, what, "default") > 1e9
    assert "page-locked, to the device" in text(found, "bus")
    assert "page-locking a block" in text(found, "churn")
    each, pooled = (measuring.churn_row(measured, pooled=pooled) for pooled in (False, True))
    assert each["take_p50_ms"] > 10 * pooled["take_p50_ms"]
    names = {(each["id"].split(",")[0], each["measure"]) for each in found["measures"]}
    assert ("copy host to device", "bytes_per_s") in names
    assert any(measure == "free_lost_bytes" for _, measure in names)


def test_counters_are_of_one_moment(found):
    row = found["measured"]["counters"]
    assert 0 < row["cuda.free"] < row["cuda.total"]
    assert "CUDA: free" in text(found, "counters")


def test_a_hog_in_another_process_is_seen(hog):
    before = gpus.examine()
    if not before["devices"]:
        pytest.skip(f"nvidia-smi tells nothing here: {before['reason']}")
    record = examination.examine()
    (device, *_) = record["gpu"]["devices"]
    assert device["used_bytes"] > HELD
    assert device["memory_bytes"] - device["free_bytes"] > HELD
    listed = [row for row in record["processes"]["rows"] if (row["nbytes"] or 0) >= HELD]
    said = text(record, "processes")
    if listed:  # the number is the machine's, and in a container not that of `hog`
        assert f"process {listed[0]['pid']}" in said
    else:
        assert "are used beside that, by the driver or by processes that are not listed here" in said


def test_a_second_baseline_of_the_same_machine_is_not_worse(found):
    """One round a side has no noise of its own, so that only what must not move at all is looked at."""
    again = examination.examine(How())
    rows = compare(found, again, tolerance=0.5).rows
    memory = [row for row in rows if row.measure in ("not_back_bytes", "refused")]
    assert memory
    assert {row.verdict for row in memory} <= {NOISE, SECOND_ONLY}


def test_the_command(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "GPU           0: " in out
    assert "device  auto will be cuda: CuPy compiles and runs a kernel" in out
    assert TO_DO in out or "ok      pinning" in out
