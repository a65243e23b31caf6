"""The errors of framepipe: one base, few children, each also the matching builtin.

A caller who catches ``FileNotFoundError`` or ``ValueError`` needs no name from here. Where an error
happened (stage, source, index, pts) is in attributes as well as in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FramepipeError(Exception):
    """Base of every error that framepipe raises on purpose.

    ``where`` holds what is known of the place: any of ``stage``, ``sink``, ``source``, ``index``, ``pts``.
    ``exit_code`` is what the command line returns for it.
    """

    exit_code = 1

    def __init__(self, message: str, **where: Any) -> None:
        super().__init__(message)
        self.where: dict[str, Any] = {key: value for key, value in where.items() if value is not None}

    def __str__(self) -> str:
        # OSError (a base of some children) would format errno and strerror instead.
        return str(self.args[0]) if self.args else ""


class ConfigError(FramepipeError, ValueError):
    """A pipeline, parameter or command line that cannot be right. ``problems`` lists every mistake."""

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[str] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)


class ClosedError(FramepipeError, ValueError):
    """Something was used after its close, or a single-use pipeline a second time."""


class SourceError(FramepipeError, OSError):
    """An input that cannot be opened or read on."""


class SourceNotFoundError(SourceError, FileNotFoundError):
    """An input that does not exist."""


class UnsupportedFormatError(SourceError):
    """A pixel format or codec that framepipe cannot take; the message names it."""


class SinkError(FramepipeError, OSError):
    """Results could not be written."""


class OutputExistsError(ConfigError, FileExistsError):
    """An output exists already and nobody said that it may be replaced."""


class StageError(FramepipeError, RuntimeError):
    """A stage failed; the original error is its ``__cause__``."""


class DeviceError(FramepipeError, RuntimeError):
    """A device failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """Device memory is exhausted, or a limit set on it is reached; the message says what was wanted and what helps."""


class DeviceUnavailableError(DeviceError):
    """A device was asked for that this machine does not have; the message says what would help."""

    exit_code = 2


class HazardError(DeviceError):
    """The simulated device saw two conflicting accesses that no event orders."""
