"""A network of PyTorch as a stage, which reads the tensor of the stage before it where that lies: nothing is copied.

In YAML, with this folder on ``PYTHONPATH``, run with ``--allow-code``:
``stages: [{tensor: {width: 224, height: 224}}, {"torch_stage:TorchScore": {seed: 1}}]``.

The network is small and its weights are random: put one of yours in its place. PyTorch is installed apart.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import framepipe
from framepipe.device.base import Device, Stream
from framepipe.errors import ConfigError


def small_network(seed: int) -> Any:
    """(N, 3, H, W) float32 to N scores between 0 and 1; the same weights for the same ``seed``."""
    import torch

    with torch.random.fork_rng(devices=[]):  # the program's own random numbers go on as if nothing had been
        torch.manual_seed(seed)
        layers = [
            torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 1, 3, stride=2, padding=1),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(0),
            torch.nn.Sigmoid(),
        ]
        return torch.nn.Sequential(*layers).eval()


@framepipe.register("torch-score")
@dataclass(kw_only=True)
class TorchScore(framepipe.Stage):
    """Puts ``{"score": …}`` of every picture into ``meta``; ``tensor`` names a float tensor (N, 3, H, W)."""

    tensor: str = "tensor"
    seed: int = 0

    def __post_init__(self) -> None:
        self.reads, self.writes = frozenset({self.tensor}), frozenset({"meta"})
        self._network: Any = None

    @property
    def _scores(self) -> str:
        return f"{self.id}.scores"  # the full stop makes it the stage's own: frames do not have it

    def open(self, device: Device) -> None:
        super().open(device)
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"{self.id} needs PyTorch, which cannot be imported: {error}") from error
        self._torch = torch
        self._target = torch.device("cuda", device.number) if device.kind == "cuda" else torch.device("cpu")
        # This copy is done when it returns, so that the weights are there on whichever stream reads them.
        self._network = small_network(self.seed).to(self._target)

    def plan(self, flow: framepipe.Flow) -> framepipe.Flow:
        self.readback = (self._scores,)
        return flow.put(self._scores, framepipe.ArraySpec((), "float32"))

    def launch(self, batch: framepipe.Batch) -> None:
        """Both arrays are shared with torch, which lets go of them at the end; its work is on the batch's stream."""
        torch = self._torch
        with torch.inference_mode(), self._on(batch.stream):
            pictures = torch.from_dlpack(batch.arrays[self.tensor])
            scores = torch.from_dlpack(batch.out[self._scores])
            scores.copy_(self._network(pictures.float()))

    def _on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Torch enqueues on ``stream``, behind the stage before, and takes its own memory in the order of it, too."""
        if self._target.type == "cpu":
            return nullcontext()
        external = self._torch.cuda.ExternalStream(stream.ptr, device=self._target)
        return self._torch.cuda.stream(external)

    def collect(self, batch: framepipe.Batch) -> None:
        for item, score in zip(batch.items, batch.host[self._scores], strict=True):
            item.meta[self.id] = {"score": round(float(score), 4)}

    def close(self) -> None:
        if self._network is not None and self._target.type == "cuda":
            self._torch.cuda.empty_cache()  # what torch keeps for a stream is of no use to any other
        self._network = None
