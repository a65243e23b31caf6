"""Memory models: their arithmetic by hand, time that passes, refusals, and pipelines on a device that has one."""

from __future__ import annotations

import json
import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framepipe import _cli_list, _cli_run, cli
from framepipe.config import loads, schema
from framepipe.device import select
from framepipe.device.modelled import ModelledDevice
from framepipe.errors import ConfigError, DeviceMemoryError
from framepipe.memory_models import table
from framepipe.memory_models.base import PinRefusedError
from framepipe.memory_models.history import History
from framepipe.pipeline import Pipeline
from framepipe.registry import find, names
from framepipe.sinks.callback import Callback
from framepipe.testing import FrameList, check_device, check_stager, pattern_frames

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB, MB = 10**9, 10**6


# -- the arithmetic --


def test_linux_takes_whole_page_tables_and_gives_them_back_at_once():
    model = table.make("linux,total=12GB")
    model.pin(GIB - 1)
    assert model.readings()["free"] == 12 * GB, "nothing is seen below a whole step"
    model.pin(1)
    assert model.readings()["free"] == 12 * GB - 2 * MIB
    model.pin(3 * GIB)
    assert model.readings() == {"free": 12 * GB - 8 * MIB, "total": 12 * GB, "pinned": 4 * GIB}
    model.unpin(3 * GIB)
    assert model.readings()["free"] == 12 * GB - 2 * MIB
    assert model.least_free == 12 * GB - 8 * MIB


def test_the_claim_takes_its_share_of_whole_granules_and_metadata():
    model = table.make("wddm-claim,total=12GB,resident=11GB,share=0.25,metadata=4KiB")
    model.pin(65 * KIB)  # two granules
    assert model.readings()["free"] == GB - (128 * KIB // 4 + 4 * KIB)
    assert model.readings()["charged"] == 36 * KIB
    model.pin(64 * KIB)
    assert model.readings()["charged"] == 36 * KIB + 20 * KIB
    assert table.make("wddm-claim").cost(GIB) == round(0.225 * GIB) + 64 * KIB, "the middle of 20 and 25 %"


def test_what_is_freed_is_back_late():
    model = table.make("wddm-claim,total=1GB,return_least_s=2,return_most_s=2,metadata=0,share=0.5")
    model.pin(64 * MIB)
    model.advance(1)
    model.unpin(64 * MIB)
    late = {"free": GB - 32 * MIB, "total": GB, "pinned": 0, "charged": 32 * MIB, "returning": 32 * MIB}
    assert model.readings() == late
    model.advance(1.99)
    assert model.readings() == late
    model.advance(0.01)
    assert model.readings() == {"free": GB, "total": GB, "pinned": 0, "charged": 0, "returning": 0}


def test_what_is_back_at_once_needs_no_time_to_pass():
    model = table.make("wddm-claim,total=1GB,return_least_s=0,return_most_s=0")
    model.pin(MIB)
    model.unpin(MIB)
    assert model.readings()["free"] == GB


def back_s(seed: int) -> list[float]:
    """When each of 200 blocks is back, to a hundredth of a second."""
    model = table.make(f"wddm-claim,seed={seed}")
    for _ in range(200):
        model.pin(MIB)
    for _ in range(200):
        model.unpin(MIB)
    each, times, time_s = model.cost(MIB), [], 0.0
    while model.readings()["returning"]:
        before = model.readings()["returning"]
        model.advance(0.01)
        time_s += 0.01
        times += [round(time_s, 2)] * ((before - model.readings()["returning"]) // each)
    return times


def test_late_is_between_two_and_five_seconds_and_the_same_for_a_seed():
    one = back_s(1)
    assert len(one) == 200
    assert 2.0 <= min(one) < 2.3
    assert 4.7 < max(one) <= 5.01
    assert one == back_s(1)
    assert one != back_s(2)


def test_the_budget_is_half_of_the_ram_and_video_memory_is_untouched():
    model = table.make("wddm-budget,total=12GB,resident=11GB,ram=1GiB,others=100MiB")
    model.pin(64 * KIB + 1)
    assert model.readings() == {
        "free": GB, "total": 12 * GB, "pinned": 64 * KIB + 1, "local_usage": 11 * GB, "local_budget": 12 * GB,
        "non_local_usage": 128 * KIB, "non_local_budget": 412 * MIB,
    }  # fmt: skip
    assert model.allocate(GB)
    assert not model.allocate(1)
    assert (model.readings()["free"], model.readings()["local_usage"]) == (0, 12 * GB)
    model.free(GB)
    model.unpin(64 * KIB + 1)
    assert (model.readings()["free"], model.readings()["non_local_usage"]) == (GB, 0)


def test_a_budget_has_64_mib_at_least():
    assert table.make("wddm-budget,ram=1MB").readings()["non_local_budget"] == 64 * MIB


def test_a_refused_pin_poisons_those_behind_it():
    model = table.make("wddm-budget,ram=1GiB")
    model.pin(500 * MIB)
    with pytest.raises(PinRefusedError, match=r"13\.6 MB of the non-local segment wanted, 12\.6 MB left") as caught:
        model.pin(13 * MIB)
    assert caught.value.status == 2
    model.unpin(500 * MIB)
    with pytest.raises(PinRefusedError, match="a pin was refused before"):
        model.pin(4096)
    assert (model.pins, model.refusals, model.readings()["pinned"]) == (1, 2, 0)


def test_without_poison_a_smaller_pin_goes_on():
    model = table.make("wddm-budget,ram=1GiB,poison=no")
    with pytest.raises(PinRefusedError):
        model.pin(513 * MIB)
    model.pin(512 * MIB)


def test_the_claim_refuses_what_video_memory_has_no_room_for_and_says_what_is_on_its_way_back():
    model = table.make("wddm-claim,total=100MB,share=0.25,metadata=0")
    model.pin(200 * MIB)
    model.unpin(200 * MIB)
    text = r"it would take 52\.4 MB of video memory, of which 47\.6 MB are free, 52\.4 MB freed and not yet back"
    with pytest.raises(PinRefusedError, match=f"cudaErrorMemoryAllocation, modelled by wddm-claim: {text}"):
        model.pin(200 * MIB)
    model.advance(5)
    model.pin(200 * MIB)


@pytest.mark.parametrize("name", ["linux", "wddm-claim"])
def test_other_programs_come_and_go(name):
    model = table.make(f"{name},total=1GB,others=900MB,others_from_s=1,others_until_s=0:02")
    free = []
    for _ in range(3):
        free.append(model.readings()["free"])
        assert model.allocate(50 * MB)
        model.advance(1)
    assert free == [GB, 50 * MB, 900 * MB]
    model = table.make(f"{name},total=1GB,resident=500MB,others=900MB")
    assert model.readings()["free"] == 0, "never below nothing"
    with pytest.raises(PinRefusedError):
        model.pin(4 * GIB)


@pytest.mark.parametrize("name", table.NAMES)
@given(st.lists(st.tuples(st.sampled_from("pua"), st.integers(1, 40 * MB)), max_size=40))
def test_whatever_is_done_the_books_balance_and_all_comes_back(name, steps):
    model = table.make(f"{name},total=100MB,resident=20MB" + (",ram=200MB,poison=no" if "budget" in name else ""))
    pinned, allocated = [], []
    for what, nbytes in steps:
        if what == "p":
            try:
                model.pin(nbytes)
                pinned.append(nbytes)
            except PinRefusedError:
                pass
        elif what == "u" and pinned:
            model.unpin(pinned.pop())
        elif what == "a" and model.allocate(nbytes):
            allocated.append(nbytes)
        model.advance(nbytes / MB / 20)
        found = model.readings()
        assert found.keys() == model.words.keys()
        assert found["pinned"] == sum(pinned)
        assert 0 <= found["free"] <= 80 * MB - sum(allocated)
        assert model.least_free <= found["free"]
    for nbytes in pinned:
        model.unpin(nbytes)
    for nbytes in allocated:
        model.free(nbytes)
    model.advance(5)
    assert model.readings()["free"] == 80 * MB
    json.dumps(model.describe(), allow_nan=False)


@pytest.fixture
def restless():
    """Threads change at every turn, so that what is not guarded goes wrong."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_may_pin_at_once(restless):
    model = table.make("wddm-claim,total=100GB")

    def work() -> None:
        for _ in range(500):
            model.pin(MIB)
            model.advance(0.001)
            model.unpin(MIB)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (model.pins, model.pinned_ever, model.readings()["pinned"]) == (2000, 2000 * MIB, 0)
    model.advance(5)
    assert model.readings()["free"] == 100 * GB


# -- the history --


@pytest.mark.parametrize(("capacity", "times"), [(4, [0.0, 4.0, 8.0, 10.5]), (5, [0.0, 4.0, 8.0, 10.5])])
def test_the_history_is_even_and_bounded(capacity, times):
    history = History(every_s=1.0, capacity=capacity)
    for time_s in range(11):
        if history.due_s <= time_s:
            history.add(float(time_s), {"free": time_s})
    assert history.as_json(10.5, {"free": -1}) == {
        "t_s": times, "columns": {"free": [*map(int, times[:-1]), -1]}, "marks": [],
    }  # fmt: skip


def test_a_model_notes_each_quarter_of_a_second_before_what_happens_then():
    model = table.make("wddm-claim,total=1GB,metadata=0,share=0.5,others=100MB,others_from_s=0.3")
    model.pin(2 * MIB)
    model.advance(0.4)
    model.pin(2 * MIB)
    model.advance(0.2)
    found = model.describe()["timeline"]
    assert found["t_s"] == [0.0, 0.25, 0.5, 0.6]
    assert found["columns"]["free"] == [GB, GB - MIB, 900 * MB - 2 * MIB, 900 * MB - 2 * MIB]
    assert found["marks"] == [[0.4, "other programs come"]]


# -- names and parameters --


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wddm-clam", "unknown memory model 'wddm-clam'; did you mean 'wddm-claim'?"),
        ("vista", "unknown memory model 'vista'; there are linux, wddm-claim, wddm-budget"),
        ("", "unknown memory model ''; there are linux, wddm-claim, wddm-budget"),
        ("linux,total=12", "total=12: 12 would be bytes; write 12GB or 12MB"),
        ("linux,totl=1GB", "simulated:linux: unknown key 'totl'; did you mean 'total'?"),
        ("linux,colour=1", "unknown key 'colour'; there are total, resident, others, others_from_s,"),
        ("linux,total", "total has no value"),
        ("linux,total=1GB,total=2GB", "total is there twice"),
        ("linux,total=much", "total=much: expected a number of bytes, or one with a unit"),
        ("linux,others_from_s=1:90", "others_from_s=1:90: minutes and seconds go from 0 to 59"),
        ("linux,fps=fast", "fps=fast: expected a number"),
        ("linux,fps=0", "fps is 0; it must be 0.001 or more"),
        ("linux,fps=1e-309", "fps is 1e-309; it must be 0.001 or more"),
        ("linux,fps=nan", "fps is nan"),
        ("linux,others_from_s=9,others_until_s=9", "others_until_s is 9; it must be later than others_from_s, 9"),
        ("linux,step=0", "step is 0"),
        ("wddm-claim,seed=1.5", "seed=1.5: expected a whole number"),
        ("wddm-claim,share=22.5", "share is 22.5; it is a part, from 0 to 1"),
        ("wddm-claim,share=nan", "share is nan"),
        ("wddm-claim,return_least_s=9", "return_least_s is 9 and return_most_s 5"),
        ("wddm-budget,poison=perhaps", "poison=perhaps: expected yes or no"),
        ("wddm-budget,total=1GB,resident=1GB", r"resident \(1000000000 bytes\) leaves nothing of total"),
    ],
)
def test_a_mistake_names_what_there_is(text, words):
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        select.choose(f"simulated:{text}")
    yaml = f"version: 1\nsources: [a.mp4]\ndevice: 'simulated:{text}'\n"
    with pytest.raises(ConfigError, match=f"<text>:3: device: .*{words.replace('?', chr(92) + '?')}"):
        loads(yaml)


def test_parameters_are_read_as_people_write_them():
    model = table.make("wddm-claim, total = 12 GB, resident=0, share=.2, return_most_s=0:04, seed=7")
    assert (model.total, model.resident, model.share, model.return_most_s, model.seed) == (12 * GB, 0, 0.2, 4.0, 7)
    assert table.make("wddm-budget,poison=no").poison is False


def test_a_device_is_made_anew_each_time():
    choice = select.choose("simulated:wddm-claim,total=1GB")
    one, other = choice.make(), choice.make()
    assert isinstance(one, ModelledDevice)
    assert one.model is not other.model
    assert (choice.kind, one.kind) == ("simulated", "simulated")
    one.close()
    other.close()


def test_models_are_listed_and_in_the_schema():
    lines = {line.split()[0]: line for line in _cli_list.lines("devices")}
    for name in table.NAMES:
        line = lines[f"simulated:{name}"]
        assert "total, resident" in line
        assert table.find(name).__doc__.split(".")[0].split(":")[0] in line
    assert "unproven" in lines["simulated:wddm-claim"]
    pattern = schema()["properties"]["device"]["anyOf"][0]["pattern"]
    for good in ("auto", "cuda:3", "simulated", "simulated:linux", "simulated:wddm-claim,total=12GB,resident=11GB"):
        assert re.search(pattern, good)
        assert good == "cuda:3" or loads(f"version: 1\nsources: [a.mp4]\ndevice: {good}\n").device == good
    for bad in ("simulated:", "simulated:vista", "simulated:linux,total", "cpu:linux"):
        assert not re.search(pattern, bad)
        with pytest.raises(ConfigError):
            loads(f"version: 1\nsources: [a.mp4]\ndevice: '{bad}'\n")


# -- the device --


@pytest.mark.parametrize("name", table.NAMES)
def test_a_device_with_a_model_keeps_its_contract(name):
    made = []

    def make() -> ModelledDevice:
        made.append(ModelledDevice(table.make(name)))
        return made[-1]

    check_device(make)
    model = made[0].model
    assert model.pins > 0
    assert (model.pinned, model.allocated) == (0, 0), "what was taken is given back"


@pytest.mark.parametrize("full", [False, True], ids=["room", "none"])
@pytest.mark.parametrize("strategy", [s for s in names("staging") if find("staging", s).missing("simulated") is None])
def test_strategies_keep_theirs_and_give_all_back(strategy, full):
    made = []

    def make() -> ModelledDevice:
        made.append(ModelledDevice(table.make("wddm-claim,total=100MB,share=1" + (",others=95MB" if full else ""))))
        if full:
            made[-1].model.metadata = 50 * MB  # nothing can be page-locked
        return made[-1]

    check_stager(strategy, make)
    model = made[0].model
    assert (model.pinned, model.allocated) == (0, 0)
    assert bool(model.refusals) == (full and strategy not in ("direct", "pageable"))


def test_video_memory_of_the_model_is_the_devices():
    device = ModelledDevice(table.make("linux,total=10MB,resident=4MB"))
    stream = device.stream("s")
    half = device.fixed(4 * MB)
    held = device.empty((MB,), "uint8", stream)
    assert device.vram()[0]["free"] == MB
    with pytest.raises(DeviceMemoryError, match=r"2000000 bytes wanted .*5000000 held .*1000000 free on the device"):
        device.fixed(2 * MB)
    del held  # kept to be used again, until there is need of it
    assert device.vram()[0]["free"] == MB
    more = device.fixed(2 * MB)
    assert device.vram()[0]["free"] == 0
    device.fixed_free(half)
    device.fixed_free(more)
    device.close()
    assert device.vram() == [
        {
            "source": "model linux", "modelled": True, "device": 0, "free": 6 * MB, "total": 10 * MB, "pinned": 0,
            "free_start": 6 * MB, "free_least": 0, "free_end": 6 * MB,
        }
    ]  # fmt: skip


def test_a_refusal_is_told_once_with_its_model():
    device = ModelledDevice(table.make("wddm-budget,ram=200MB"))
    blocks = [device.host_empty(nbytes, pinned=True) for nbytes in (60 * MB, 50 * MB, 4096)]
    assert [device.is_locked(block) for block in blocks] == [True, False, False]
    assert device.model.refusals == 1, "the model is not asked again"
    (warning,) = device.warnings
    assert warning.startswith("the system refused to page-lock 50000000 bytes (cudaErrorMemoryAllocation, modelled by")
    assert "so says the model wddm-budget (Microsoft's documents" in warning
    assert "limit of the host" not in warning
    assert warning.endswith("going on with pageable memory, slower")
    for block in blocks:
        device.host_free(block)
    device.close()


# -- pipelines --


def run(device: str, strategy: str, count: int = 60, **staging: object):
    pipeline = Pipeline(
        [FrameList(name="t", frames=pattern_frames(12), loop=count // 12)],
        ["rgb"],
        [Callback(function=lambda frame: None, reads=frozenset({"image"}), host=False)],  # nothing is read back
        device=device,
        staging={"strategy": strategy, "fillers": 1, **staging},
    )
    with pipeline:
        return pipeline.run()


@pytest.mark.parametrize("strategy", ["pooled", "per_frame", "registered_per_frame", "mapped", "direct"])
@pytest.mark.parametrize("name", table.NAMES)
def test_a_pipeline_runs_under_every_model_and_its_clock_is_that_of_the_video(name, strategy, nothing_left):
    report = run(f"simulated:{name},total=1GB,resident=900MB,fps=12", strategy).to_dict()
    assert (report["exit"], report["frames"]["delivered"]) == ("complete", 60)
    model = report["device"]["model"]
    assert (model["name"], model["parameters"]["resident"], model["now_s"]) == (name, 900 * MB, 5.0)
    assert model["timeline"]["t_s"] == [n / 4 for n in range(21)]
    assert model["timeline"]["columns"].keys() == table.find(name).words.keys()
    assert model["readings"]["pinned"] == 0
    assert model["pins"] == report["memory"]["pinned_allocations"]
    (reading,) = report["memory"]["vram"]
    assert (reading["source"], reading["modelled"], reading["free_start"]) == (f"model {name}", True, 100 * MB)
    assert not report["warnings"]


def test_per_frame_keeps_more_of_video_memory_away_than_pooled_under_the_claim():
    device = "simulated:wddm-claim,total=1GB,resident=900MB,metadata=0"
    pooled, per_frame = (run(device, strategy, 480).device["model"] for strategy in ("pooled", "per_frame"))
    ring = round(0.225 * 64 * KIB)  # the slab of a few small pictures is a granule, and so is each picture
    assert pooled["pins"] == 1
    assert per_frame["pins"] >= 480
    assert max(per_frame["timeline"]["columns"]["returning"]) > 60 * ring, "2 to 5 s of 30 a second"
    assert pooled["timeline"]["columns"]["charged"][-1] == pooled["timeline"]["columns"]["returning"][-1] == ring
    assert set(pooled["timeline"]["columns"]["charged"][1:]) == {ring}, "one slab, to the end"


def test_under_a_model_that_refuses_the_run_goes_on_pageable_and_says_so_once(nothing_left):
    metadata = 20 * MB  # a pin each, of 100 MB that are free
    report = run(f"simulated:wddm-claim,total=1GB,resident=900MB,metadata={metadata}", "per_frame").to_dict()
    assert (report["exit"], report["frames"]["delivered"]) == ("complete", 60)
    (warning,) = report["warnings"]
    assert re.match(r"the system refused to page-lock \d+ bytes \(cudaErrorMemoryAllocation", warning)
    assert "modelled by wddm-claim" in warning
    assert report["device"]["model"]["refusals"] == 1
    assert report["memory"]["pageable_bytes"] > 0
    marks = report["device"]["model"]["timeline"]["marks"]
    assert [label for _, label in marks] == ["first pin refused"]


def test_a_pipeline_that_outgrows_the_models_video_memory_fails_as_on_a_gpu(nothing_left):
    modelled = r"so says the model linux \(measured on one H200 under Linux\), not this machine"
    with pytest.raises(DeviceMemoryError, match=f"no memory for 2 uploads in flight.*; {modelled}"):
        run("simulated:linux,total=9000", "pooled")


def test_the_words_at_the_end_of_a_run_say_modelled(tmp_path, clip, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(f"version: 1\nsources: ['{clip.as_posix()}']\nstages: [rgb]\n", encoding="utf-8")
    device = "simulated:wddm-claim,total=12GB,resident=11GB"
    assert cli.main(["run", "p.yaml", "--device", device, "--staging", "per_frame", "--report", "r.json"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "memory modelled by wddm-claim" in told
    assert "free 1.0 GB at the start" in told
    assert "(modelled: wddm-claim)" in told
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["device"]["model"]["ground"] == "an article's claim, unproven"
    words = list(_cli_run.closing_words({**report, "memory": {**report["memory"], "vram": []}}))
    assert "modelled: " not in " ".join(words)


def test_what_a_run_shows_as_it_goes_is_not_modelled():
    free = []
    pipeline = Pipeline(
        [FrameList(name="t", frames=pattern_frames(12))], device="simulated:linux", sinks=[lambda frame: None]
    )
    with pipeline:
        pipeline.run(progress=lambda now: free.append(now.vram_free_bytes))
    assert free
    assert set(free) == {None}
