"""The contract of a sensor: a few numbers of bytes, each with its source, and a reason wherever there is none."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from framepipe.errors import FramepipeError

PATIENCE_S = 2.0
"""How long a reader or closer waits for another thread that is inside the same sensor: a driver may hang."""


class SensorUnavailableError(FramepipeError, RuntimeError):
    """A sensor that this machine or process does not have; the message says why."""


class Sensor(ABC):
    """One place where memory is read, such as NVML or a file of /proc.

    ``name`` is short and unique, ``source`` says in words where the numbers come from, and ``readings`` maps the keys
    of `read` to the call, field or counter behind each. Whoever opens a sensor closes it.
    """

    name: str
    source: str
    readings: Mapping[str, str]

    def __init__(self) -> None:
        # Held while the system is asked and while the sensor is closed, so that no handle is used after its close.
        self._lock = threading.Lock()
        self._closed = False
        self.reasons: dict[str, str] = {}
        """Why the last `read` has None, by key; replaced by each, never changed in place."""

    def read(self) -> dict[str, int | None]:
        """Bytes by key, None where there is no number; any thread may call it and nothing is raised.

        `reasons` then says why for every None. After `close` all are None.
        """
        if not self._lock.acquire(timeout=PATIENCE_S):
            return self._without_numbers("another thread is still waiting for this sensor")
        try:
            if self._closed:
                return self._without_numbers("the sensor is closed")
            return self._sorted_out(self._read())
        except Exception as error:  # of a driver or library: whoever watches memory must not be stopped by it
            return self._without_numbers(describe(error))
        finally:
            self._lock.release()

    @property
    def reason(self) -> str | None:
        """Why the last `read` was not whole, in one line, or None."""
        return "; ".join(dict.fromkeys(self.reasons.values())) or None

    def close(self) -> None:
        """Give handles back. Idempotent; what fails is a ResourceWarning, and a sensor that hangs is left alone."""
        if not self._lock.acquire(timeout=PATIENCE_S):
            warnings.warn(f"the sensor {self.name} hangs and is not closed", ResourceWarning, stacklevel=2)
            return
        try:
            if not self._closed:
                self._closed = True
                self._close()
        except Exception as error:  # the sensors after this one are to be closed as well
            warnings.warn(f"closing the sensor {self.name}: {describe(error)}", ResourceWarning, stacklevel=2)
        finally:
            self._lock.release()

    @abstractmethod
    def _read(self) -> Mapping[str, int | str]:
        """For each key of ``readings`` bytes, or the reason why there are none; may raise. The lock is held."""

    def _close(self) -> None:  # noqa: B027  # most sensors hold nothing
        """Give handles back; called once, with the lock held."""

    def _sorted_out(self, found: Mapping[str, int | str]) -> dict[str, int | None]:
        answers = {key: found.get(key, "nothing was said about it") for key in self.readings}
        self.reasons = {key: answer for key, answer in answers.items() if isinstance(answer, str)}
        return {key: None if isinstance(answer, str) else answer for key, answer in answers.items()}

    def _without_numbers(self, reason: str) -> dict[str, int | None]:
        self.reasons = dict.fromkeys(self.readings, reason)
        return dict.fromkeys(self.readings)


class Missing(Sensor):
    """The row of a sensor that is not there: its numbers are unknown, and ``reason`` says why."""

    source = "nothing"
    readings: Mapping[str, str] = MappingProxyType({})

    def __init__(self, name: str, reason: str) -> None:
        super().__init__()
        self.name = name
        self._reason = reason

    @property
    def reason(self) -> str:
        """Why the sensor is not there."""
        return self._reason

    def _read(self) -> Mapping[str, int | str]:
        return {}

    def __repr__(self) -> str:
        return f"Missing({self.name!r}, {self._reason!r})"


def describe(error: Exception) -> str:
    """An error in one line, with its type where the text alone would not do."""
    text = " ".join(str(error).split())
    return text if isinstance(error, FramepipeError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
