"""How to test a stage that runs a network: the same scores on every device, in batches of any size, without a copy."""

import sys
from pathlib import Path

import numpy as np
import pytest

import framepipe
from framepipe.device.select import why_not
from framepipe.stages.tensor import Tensor
from framepipe.testing import pattern_frames, run_stages

sys.path.insert(0, str(Path(__file__).parent))
from torch_stage import TorchScore, small_network

torch = pytest.importorskip("torch")
NO_GPU = why_not() or ("" if torch.cuda.is_available() else "torch sees no GPU")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU))
COUNT = 24


def frames():
    made = pattern_frames(COUNT)
    for number, frame in enumerate(made):
        luma = np.frombuffer(memoryview(frame.planes[0]), np.uint8)
        luma >>= number % 6  # bright and dark pictures, so that they score differently
    return made


def run(device="cpu", batch=1, stage=None, dtype="float32"):
    tensor = Tensor(width=48, height=32, dtype=dtype, accuracy="exact")
    return run_stages([tensor, stage or TorchScore(seed=9)], frames(), device=device, batch=batch)


def scores(results):
    return [result["meta"]["torch-score"]["score"] for result in results]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("device", ["cpu", "simulated", CUDA])
def test_scores_are_those_of_the_network(device, batch):
    results = run(device, batch)
    pictures = torch.from_numpy(np.stack([result["tensors"]["tensor"] for result in results]))
    with torch.inference_mode():
        expected = small_network(9)(pictures).tolist()
    assert scores(results) == pytest.approx(expected, abs=1e-3)  # convolutions on a GPU may round to TF32
    assert max(expected) - min(expected) > 0.01, "pictures that all score the same would prove nothing"


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_half_precision_is_taken_too(device):
    assert scores(run(device, dtype="float16")) == pytest.approx(scores(run("cpu")), abs=1e-3)


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


class Watched(TorchScore):
    """Notes whether the network was given the very memory of the stage before."""

    def launch(self, batch):
        there = address(batch.arrays[self.tensor])

        def look(network, inputs):
            self.seen.append((inputs[0].data_ptr() == there, inputs[0].device.type))

        with self._network.register_forward_pre_hook(look):
            super().launch(batch)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_nothing_is_copied(device):
    stage = Watched()
    stage.seen = []
    stage.id = "watched"
    run(device, 4, stage)
    assert stage.seen == [(True, device)] * (COUNT // 4)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_frame_is_a_tensor_as_it_is(device):
    """In a loop of one's own; on a GPU on a stream of one's own, too, behind which the memory is used again."""
    clip = Path(__file__).with_name("shapes.mp4")
    with framepipe.open(clip, end=2.0, device="cpu", accuracy="exact") as pictures:
        expected = [int(picture.numpy().sum(dtype=np.int64)) for picture in pictures]
    side = torch.cuda.Stream() if device == "cuda" else None
    sums = []
    with framepipe.open(clip, end=2.0, device=device, accuracy="exact") as frames:
        for frame in frames:
            with torch.cuda.stream(side):  # None: nothing changes
                picture = torch.from_dlpack(frame)
                assert (picture.data_ptr(), picture.device.type) == (address(frame.image), device)
                sums.append(picture.sum(dtype=torch.int64))
            del picture
            frame.release(side)
    if side is not None:
        side.synchronize()
    assert [int(total) for total in sums] == expected


def test_the_random_numbers_of_the_program_stay_its_own():
    before = torch.get_rng_state()
    assert scores(run()) == scores(run())
    assert torch.equal(torch.get_rng_state(), before)
