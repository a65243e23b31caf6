"""A stage of one's own in one file: it makes a negative of every picture.

In Python: ``Pipeline([…], stages=[Invert()], …)``. In YAML, with this folder on ``PYTHONPATH``:
``stages: [{"invert_stage:Invert": {strength: 0.5}}]``, run with ``--allow-code``.
"""

from dataclasses import dataclass

import framepipe


@framepipe.register("invert")
@dataclass(kw_only=True)
class Invert(framepipe.Stage):
    """Every code ``c`` becomes ``255 - c``, or as much of the way there as ``strength`` (0 to 1) says."""

    strength: float = 1.0

    reads = frozenset({"image"})
    writes = frozenset({"image"})

    def launch(self, batch: framepipe.Batch) -> None:
        """Write to ``batch.out``; what was there before is anybody's, so all of it is written."""
        xp = self.device.xp  # numpy or cupy
        for picture, out in zip(batch.arrays["image"], batch.out["image"], strict=True):
            if self.strength == 1.0:
                xp.subtract(255, picture, out=out)
            else:
                out[...] = xp.rint(picture + (255.0 - 2.0 * picture) * self.strength)
