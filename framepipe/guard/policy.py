"""What to do about little memory: each action once an episode, with hysteresis and growing pauses. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from framepipe.guard.options import Action, GuardOptions, Mark
from framepipe.guard.readings import Reading

Level = Literal["ok", "low", "critical"]
MOST_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing to be done now: ``do`` an action (or ``raise_depth``, or None: a level was left) and ``why``."""

    event: Literal["low", "critical", "recovered", "depth_back"]
    do: Action | Literal["raise_depth"] | None
    why: str


def scarcest(readings: Sequence[Reading], mark: Mark) -> Reading | None:
    """The reading that is nearest to its mark, or furthest below it: the one that decides.

    A mark in percent is one of each count's own total, so that a container of 4 GB is not judged by the size of the
    GPU. None where no count has a mark.
    """
    known = [(reading.free / nbytes, reading) for reading in readings if (nbytes := mark.of(reading.total))]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def doubled(pause_s: float, cooldown_s: float) -> float:
    """A pause twice as long, up to `MOST_PAUSE_S` or to a ``cooldown_s`` that is longer."""
    return min(2 * pause_s, max(MOST_PAUSE_S, cooldown_s))


class _Threshold:
    """One mark: whether memory is below it, and when it may act again.

    It is left once memory was above the mark and its hysteresis in ``calm`` readings on end, so that noise about the
    mark is one episode. Each time that it is met again soon after a pause the next pause is twice as long: what does
    not help is not done over and over.
    """

    def __init__(self, mark: Mark, options: GuardOptions) -> None:
        self.mark = mark
        self.active = False
        self._band = 1 + options.hysteresis_percent / 100
        self._calm_samples = options.calm_samples
        self._calm = 0
        self._cooldown_s = options.cooldown_s
        self._pause_s = options.cooldown_s
        self._acted_s: float | None = None

    def is_below(self, readings: Sequence[Reading]) -> bool:
        reading = scarcest(readings, self.mark)
        return reading is not None and reading.free < (self.mark.of(reading.total) or 0)

    def enter(self, t_s: float, readings: Sequence[Reading]) -> bool:
        """Whether an episode begins now."""
        if self.active or not self.is_below(readings):
            return False
        if self._acted_s is not None:
            since_s = t_s - self._acted_s
            if since_s < self._pause_s:
                return False
            soon = since_s < 2 * self._pause_s
            self._pause_s = doubled(self._pause_s, self._cooldown_s) if soon else self._cooldown_s
        self._acted_s = t_s
        self.active, self._calm = True, 0
        return True

    def leave(self, readings: Sequence[Reading]) -> bool:
        """Whether the episode ends now."""
        known = [(reading, mark) for reading in readings if (mark := self.mark.of(reading.total))]
        if not self.active or not known:
            return False
        self._calm = self._calm + 1 if all(self._is_enough(*each) for each in known) else 0
        if self._calm < self._calm_samples:
            return False
        self.active = False
        return True

    def _is_enough(self, reading: Reading, mark: int) -> bool:
        enough = mark * self._band
        if reading.total is not None:  # a mark near it would have its band beyond it, where nothing is ever enough
            enough = min(enough, (mark + reading.total) / 2)
        return reading.free >= enough


class Policy:
    """Decisions from readings. One `decide` a reading; what it returns is to be carried out in its order.

    ``depth`` is how many batches may be in flight; it is lowered by one in an episode, never below 1, and raised again
    by one when memory has stayed above the low mark for ``cooldown_s`` since the episode, for twice as long each time
    that it had to be lowered once more after that. ``pageable`` and ``stop`` are for good.
    """

    def __init__(self, options: GuardOptions, depth: int) -> None:
        self.depth = self.full_depth = depth
        self.episodes = 0
        self._options = options
        self._low = _Threshold(options.low, options)
        self._critical = _Threshold(options.critical_mark, options)
        self._done: set[Action] = set()
        self._for_good: set[Action] = set()
        self._calm_since_s: float | None = None
        self._raise_after_s = options.cooldown_s
        self._raised = False  # since depth was lowered last

    @property
    def level(self) -> Level:
        """Which mark memory is held to be below."""
        return "critical" if self._critical.active else "low" if self._low.active else "ok"

    def decide(self, t_s: float, readings: Sequence[Reading]) -> tuple[Reading | None, list[Decision]]:
        """The reading that decided, and what to do; ``t_s`` is the time of the readings. No reading, no decision."""
        decisions = [*self._leave(t_s, readings), *self._enter(t_s, readings)]
        mark = self._critical.mark if self.level == "critical" else self._low.mark
        reading = scarcest(readings, mark)
        return reading, decisions or self._recover(t_s, readings)

    def _enter(self, t_s: float, readings: Sequence[Reading]) -> list[Decision]:
        decisions: list[Decision] = []
        began = self.level == "ok"
        marks: list[tuple[Literal["low", "critical"], _Threshold, Sequence[Action]]] = [
            ("low", self._low, self._options.on_low),
            ("critical", self._critical, self._options.on_critical),
        ]
        for event, threshold, actions in marks:
            if not threshold.enter(t_s, readings):
                continue
            why = f"below {threshold.mark}"
            wanted = [action for action in actions if self._may(action)]
            for action in wanted:
                self._done.add(action)
                if action == "depth":
                    self._lower()
                elif action in ("pageable", "stop"):
                    self._for_good.add(action)
            # An episode shows in the records even where nothing can be done about it.
            things: list[Action | None] = [*wanted] or [None]
            decisions += [Decision(event, thing, why) for thing in things]
        if decisions:
            self._calm_since_s = None
            self.episodes += began
        return decisions

    def _lower(self) -> None:
        self.depth -= 1
        if self._raised:  # more in flight may be what it is about
            self._raise_after_s = doubled(self._raise_after_s, self._options.cooldown_s)
        self._raised = False

    def _may(self, action: Action) -> bool:
        if action in self._done or action in self._for_good:
            return False
        return action != "depth" or self.depth > 1

    def _leave(self, t_s: float, readings: Sequence[Reading]) -> list[Decision]:
        left = [threshold for threshold in (self._critical, self._low) if threshold.leave(readings)]
        if not left or self.level != "ok":
            return []
        self._done.clear()
        self._calm_since_s = t_s
        return [Decision("recovered", None, f"above {left[-1].mark} again")]

    def _recover(self, t_s: float, readings: Sequence[Reading]) -> list[Decision]:
        since_s = self._calm_since_s
        if self.level != "ok" or self.depth >= self.full_depth or since_s is None:
            return []
        if scarcest(readings, self._low.mark) is None:
            return []
        if self._low.is_below(readings) or self._critical.is_below(readings):  # in the pause of the mark
            self._calm_since_s = t_s
            return []
        if t_s - since_s < self._raise_after_s:
            return []
        self._calm_since_s = t_s
        self._raised = True
        self.depth += 1
        return [Decision("depth_back", "raise_depth", f"above {self._low.mark} for {t_s - since_s:.0f} s")]
