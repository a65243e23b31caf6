"""How Windows drives the GPUs of this machine: the driver model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum


class DriverModel(Enum):
    """How Windows drives a GPU; the values are NVML's (``nvmlDriverModel_t``).

    ``WDDM`` lets Windows manage the memory, ``TCC`` (NVML: WDM) leaves it to the NVIDIA driver, and ``MCDM`` is the
    subset of WDDM for computing without a display.
    """

    WDDM = 0
    TCC = 1
    MCDM = 2


@dataclass(frozen=True, slots=True)
class DriverModelReading:
    """The driver model now and after the next boot, by ``source``; None with a ``reason``."""

    current: DriverModel | None
    pending: DriverModel | None
    source: str
    reason: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Plain values; the models by name."""
        names = {key: model.name if model else None for key, model in self._models()}
        return {**names, "source": self.source, "reason": self.reason}

    def _models(self) -> tuple[tuple[str, DriverModel | None], ...]:
        return ("current", self.current), ("pending", self.pending)


def model_from_cuda(tcc: bool | None, system: str = sys.platform) -> DriverModelReading:
    """What CUDA's attribute ``tccDriver`` says, for want of NVML: it knows TCC and cannot tell WDDM from MCDM."""
    source = "CU_DEVICE_ATTRIBUTE_TCC_DRIVER"
    if system != "win32":
        return DriverModelReading(None, None, source, "driver models are Windows' alone")
    if tcc:
        return DriverModelReading(DriverModel.TCC, None, source, "the pending model is known to NVML alone")
    return DriverModelReading(None, None, source, "WDDM and MCDM are told apart by NVML alone")
