"""A source in the decode pool (`Feed`) and its decoders at work (`Unit`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from framepipe.cutting import Cutter, Segment
from framepipe.errors import FramepipeError
from framepipe.filtergraph import PictureFilter
from framepipe.frame import FrameSpec
from framepipe.retake import Retake
from framepipe.sink import SourceInfo
from framepipe.source import Source, Stream
from framepipe.streams import PixelAspects, Sequences
from framepipe.timestamps import Clock


class Shape(NamedTuple):
    """What does not stand in a decoded picture itself: how its pixels and the whole of it are to be shown."""

    sample_aspect: tuple[int, int] = (1, 1)
    mirrored: bool = False


class Unit:
    """A decoder and its packets: a segment, or all the rest of a source.

    ``out`` holds decoded frames in order, each with its shape. ``verified`` is None until the first picture has shown
    whether decoding could begin at this unit's key frame. ``busy`` and ``cancelled`` are guarded by the pool's lock.
    """

    def __init__(
        self,
        stream: Stream,
        decoder: Any,
        packets: Iterator[Any] | None,
        segment: Segment | None = None,
        offset: int = 0,
    ) -> None:
        self.out: deque[tuple[Any, Shape]] = deque()
        self.stream = stream
        self.decoder = decoder
        self.packets = packets
        self.segment = segment
        self.offset = offset
        self.verified: bool | None = True if segment is None or segment.key_pts is None else None
        self.at_tail = False
        self.done = False
        self.busy = False
        self.cancelled = False
        self.errors_in_row = 0
        self.converter: Any = None
        self.sent: Retake | None = None
        """What a decoder with frame threads was given last."""
        self.again: Retake | None = None
        """What another decoder does again."""
        self.sequences = Sequences.of(decoder)
        self.begun = False
        self.filter: PictureFilter | None = None
        self.shape = Shape()
        """Of the pictures that are being put out."""
        self.rotation = 0
        """Of the picture that was looked at last."""
        self.aspects = PixelAspects(stream)


class Feed:
    """One source in the pool, and its books.

    Written by the worker that holds it (``stream``, ``error``), by the filler that takes from it (``decoded``,
    ``skipped``, ``taken``) or by the sink thread (``handled``, ``delivered``, ``filtered``).
    """

    def __init__(self, source: Source, name: str, group: int = 0) -> None:
        self.source = source
        self.name = name
        self.group = group
        self.stream: Stream | None = None
        self.retired: list[Stream] = []
        self.units: deque[Unit] = deque()
        self.mode = ""
        self.claimed = False  # being opened or cut
        self.drop = source.drop
        self.passed_over = 0
        """Frames dropped behind the one that was taken last; guarded by the pool's lock."""
        self.alone = source.may_stall
        self.input_ended = False
        self.ended = False
        """Nothing more will be decoded; heads may still hold frames."""
        self.over = False
        """Nothing more is to be read: its ``end`` was passed, or it failed."""
        self.error: FramepipeError | None = None
        self.cutter: Cutter | None = None
        self.spare: list[Any] = []
        self.misses = 0
        self.pixels = 0
        self.frame_nbytes = 0
        """Of the largest picture so far."""
        self.limit = 8
        self.packet_errors = 0
        self.warnings: list[str] = []
        self.loops_left = max(1, source.loop)
        self.offset = 0
        self.top_pts: int | None = None
        self.round_pts: int | None = None
        """The last pts of the round of a loop that is being decoded, once its packets have all been cut."""
        self.shift = 0
        """What to add to the pts of the frame taken last: loops go on in time."""
        # the books
        self.decoded = 0
        self.taken = 0
        self.handled = 0
        self.delivered = 0
        self.skipped: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.filtered: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.first_time_s: float | None = None
        self.last_time_s: float | None = None
        self.spec: FrameSpec | None = None
        """Of the first picture that was taken."""
        self.latest: FrameSpec | None = None
        self.transfers: set[str] = set()
        self.other_matrices: dict[str, str] = {}
        """Matrices without a formula here, and what was taken instead."""
        self.with_alpha: set[str] = set()
        """Pixel formats with alpha that came."""
        self.clock = Clock()
        self.interlaced = 0
        self.deinterlaced = 0
        self.changed = 0
        """How often a picture had another spec than the one before."""
        self.shape = Shape()
        """Of the frame taken last."""
        self.turn = getattr(source, "rotate", "auto") == "auto"
        self.time_base: Fraction | None = None
        self.rate = Fraction(25)
        self.full_range = {"full": True, "limited": False}.get(getattr(source, "color_range", None) or "")
        self.nth = 0
        self.info: SourceInfo = SourceInfo(name, "")
        self.due_s: float | None = None
        self.fps_origin_s = 0.0
        self.expected: int | None = None
        self.expected_end_s: float | None = None
        self.packets_read = 0

    def note(self, spec: FrameSpec) -> None:
        """The next picture has another spec than the one before."""
        self.changed += self.latest is not None
        self.latest = spec
        self.transfers.add(spec.transfer)
        if spec.other_matrix:
            self.other_matrices[spec.other_matrix] = spec.matrix
        if "A" in spec.format.components:
            self.with_alpha.add(spec.pix_fmt)

    def end_round(self) -> None:
        """All packets of the input have been cut into segments."""
        if self.cutter is not None and self.cutter.top_pts is not None:
            self.round_pts = self.offset + self.cutter.top_pts
        self.input_ended, self.cutter = True, None

    def close(self) -> None:
        """Close what was opened; generators and decoders before their container: PyAV crashes when used after it."""
        self.cutter = None
        self.spare.clear()
        for stream in (*self.retired, self.stream):
            if stream is not None:
                self.put_away(stream)
        self.retired.clear()
        self.stream = None

    def put_away(self, stream: Stream) -> None:
        """Close a stream that is read no more; one that cannot be closed costs nobody anything but a warning."""
        self.packets_read += getattr(stream, "packets_read", 0)
        try:
            stream.close()
        except Exception as error:
            self.warnings.append(f"closing failed: {type(error).__name__}: {error}")

    def shed(self) -> None:
        """Drop what is more than a source that drops may hold. Pool's lock held."""
        most = 1 if self.drop == "latest" else self.limit
        for _ in range(sum(len(unit.out) for unit in self.units) - most):
            next(unit for unit in self.units if unit.out).out.popleft()
            self.passed_over += 1

    def take_counted(self) -> Any:
        """Take the next frame of a source that drops, once what was dropped before it is entered. Pool's lock held."""
        self.count_dropped()
        # A frame that was seen without the lock may have been dropped since, but then there is one behind it.
        unit = next(unit for unit in self.units if unit.out)
        self.shift = unit.offset
        frame, self.shape = unit.out.popleft()
        return frame

    def count_dropped(self) -> None:
        """Enter what was passed over into the books. Pool's lock held."""
        number, self.passed_over = self.passed_over, 0
        if number:
            self.decoded += number
            self.dropped[self.drop] = self.dropped.get(self.drop, 0) + number

    @property
    def in_flight(self) -> int:
        """Frames taken and not yet through the sinks."""
        return self.taken - self.handled
