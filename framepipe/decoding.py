"""What a worker of the decode pool does with a source: open it, cut a segment, decode some packets.

Segments begin where a container flags a key frame. Whether decoding can really begin there is seen from the first
picture, which must bear the key frame's pts; until it has, the decoder of the segment before is not flushed, and if
it does not (intra refresh flagged as key frames), that decoder goes on with this segment too.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from typing import Any

import av
import av.error

from framepipe import pixfmt
from framepipe.container import ContainerStream
from framepipe.cutting import Cutter, Segment
from framepipe.errors import FramepipeError, SourceError
from framepipe.feed import Feed, Shape, Unit
from framepipe.filtergraph import PictureFilter, convert, filter_steps, is_mirrored
from framepipe.frame import FrameSpec
from framepipe.retake import Retake
from framepipe.source import Stream
from framepipe.streams import PixelAspects

STEP = 16
"""Packets a worker decodes before it looks whether another source needs it more."""
GIVE_UP = 250
"""Undecodable packets in a row after which a source is given up."""
_QUEUE_NBYTES = 48 << 20  # a source alone need not have more
MISSES = 3
"""Key frames at which decoding could not begin after which a source is decoded linearly."""


class Decoding(ABC):
    """The work of `DecodePool`, which says who does it when.

    Every method is called by the worker that holds the feed (`_open`, `_cut`) or the unit (`_step`).
    """

    threads: int
    decode: str
    ahead_nbytes: int
    queue_nbytes: int
    min_queue: int
    min_segment: int | None
    stopping: bool
    _lock: threading.RLock
    _active: list[Feed]

    @abstractmethod
    def _room(self, feed: Feed, unit: Unit) -> bool:
        """Whether the unit may put another picture out."""

    @abstractmethod
    def _announce(self, feed: Feed, unit: Unit) -> None:
        """A picture was put out."""

    def _width(self, feed: Feed) -> int:
        """How many threads may work on the source at once."""
        share = max(1, self.threads // max(1, len(self._active)))
        own = getattr(feed.source, "threads", None)
        return share if own is None else min(own, share)

    def _others(self, feed: Feed) -> int:
        """How many other sources are being decoded."""
        return len(self._active) - 1

    def _give_up(self, feed: Feed, error: FramepipeError, unit: Unit | None = None) -> None:
        """The source has failed, in ``unit`` if in one: everything before that is still delivered, nothing behind it.

        So what comes does not depend on how far other threads are.
        """
        with self._lock:
            if not self.stopping:  # a stop looks like the end of the input, and that like damage
                feed.error = feed.error or error
            feed.over = True
            feed.loops_left = 0
            feed.input_ended = True
            units = list(feed.units)
            if unit is None:
                if units and units[-1].segment is not None:
                    units[-1].segment.last = True
                return
            unit.done = True
            unit.verified = unit.verified is None or unit.verified  # the unit before need not take it over
            for other in units[units.index(unit) + 1 :] if unit in units else ():
                other.cancelled = other.done = True
                other.out.clear()

    def _open(self, feed: Feed) -> None:
        """Open the source (again): its first unit, and a cutter where it is decoded in segments."""
        try:
            stream = feed.source.open(lambda: self.stopping)
        except FramepipeError:
            raise
        except Exception as error:
            raise SourceError(f"{feed.name}: cannot be opened ({error})", source=feed.name) from error
        with self._lock:
            if feed.stream is not None:
                feed.retired.append(feed.stream)
                feed.spare.clear()
            feed.stream = stream
            if feed.over:
                return  # a taker said so while the input was being opened
            feed.loops_left -= 1
            feed.input_ended = False
        feed.expected, feed.expected_end_s = stream.expected, stream.expected_end_s
        feed.warnings += [warning for warning in stream.warnings if warning not in feed.warnings]
        if feed.top_pts is not None:
            feed.offset = max(feed.top_pts, feed.round_pts or feed.top_pts) + _one_frame(stream)
        if not isinstance(stream, ContainerStream):
            feed.mode = "frames"
            self._add(feed, Unit(stream, None, stream.frames(), offset=feed.offset))
            return
        if feed.source.start is not None:
            stream.seek(feed.source.start)
        self._begin(feed, stream)

    def _add(self, feed: Feed, unit: Unit) -> None:
        with self._lock:  # others walk over the units under it
            if not feed.over:  # said meanwhile: nobody would take it up any more
                feed.units.append(unit)

    def _begin(self, feed: Feed, stream: ContainerStream) -> None:
        wanted = getattr(feed.source, "decode", None) or self.decode
        others = self._others(feed)
        packets = stream.packets()
        segment = None
        # What may stall cannot be opened a second time either, for a second decoder.
        whole = stream.may_stall or getattr(feed.source, "deinterlace", False)  # that looks at the pictures beside
        whole = whole or feed.drop != "never"  # segments are held decoded until it is their turn
        if not whole and (wanted == "segments" or (wanted == "auto" and self._width(feed) > 1)):
            context = stream.stream.codec_context
            nbytes = context.width * context.height * 3 // 2 or 1
            limit = None if wanted == "segments" else max(32, 2 * self.ahead_nbytes // nbytes)
            cutter = Cutter(packets) if self.min_segment is None else Cutter(packets, self.min_segment)
            segment = cutter.next(limit)
            packets = cutter.rest()
            if segment is not None and segment.packets and not segment.last:
                feed.mode, feed.cutter = "segments", cutter
                self._add(feed, Unit(stream, self._decoder(feed, stream), iter(segment.packets), segment, feed.offset))
                return
            packets = itertools.chain(segment.packets if segment is not None else (), packets)
        threads = self._width(feed) if wanted == "frame" or (wanted == "auto" and not others) else 1
        feed.mode = "frame" if threads > 1 else "linear"
        unit = Unit(stream, stream.decoder(threads), packets, offset=feed.offset)
        unit.sent = Retake(threads) if threads > 1 else None
        self._add(feed, unit)

    def _decoder(self, feed: Feed, stream: ContainerStream) -> Any:
        try:
            return feed.spare.pop()
        except IndexError:
            return stream.decoder()

    def _cut(self, feed: Feed) -> None:
        assert feed.cutter is not None
        stream = feed.stream
        assert isinstance(stream, ContainerStream)
        segment = feed.cutter.next()
        if segment is None:
            feed.end_round()
            if feed.units and feed.units[-1].segment is not None:
                feed.units[-1].segment.last = True
            return
        unit = Unit(stream, self._decoder(feed, stream), iter(segment.packets), segment, feed.offset)
        with self._lock:
            if segment.last:
                feed.end_round()
            self._add(feed, unit)

    def _step(self, feed: Feed, unit: Unit) -> None:
        """Decode up to ``STEP`` packets, as long as there is room."""
        if unit.cancelled:
            unit.out.clear()
            unit.done = True
            return
        if unit.at_tail:
            self._finish(feed, unit)
            return
        for _ in range(STEP):
            if self.stopping or unit.cancelled or unit.verified is False or not self._room(feed, unit):
                return
            packet = self._next(feed, unit)
            if packet is None:
                unit.at_tail = True
                if unit.segment is None or unit.segment.last:
                    self._finish(feed, unit)
                return
            if unit.decoder is None:
                self._emit(feed, unit, packet)
                continue
            if unit.sequences is not None and unit.sequences.change(packet):
                self._decode(feed, unit, None)
                unit.decoder.flush_buffers()
            self._decode(feed, unit, packet)

    def _next(self, feed: Feed, unit: Unit) -> Any:
        assert unit.packets is not None
        try:
            return next(unit.packets, None)
        except FramepipeError:
            raise
        except Exception as error:
            raise SourceError(f"{feed.name}: reading failed ({error})", source=feed.name) from error

    def _decode(self, feed: Feed, unit: Unit, packet: Any) -> None:
        if unit.sent is not None and packet is not None:
            unit.sent.sent(packet)
        try:
            frames = unit.decoder.decode(packet)
            unit.errors_in_row = 0
        except av.error.EOFError:
            return  # flushed before: the end, no failure
        except (av.error.FFmpegError, ValueError) as error:
            if self.stopping:
                return  # the packet may have been cut off by the stop
            if self._take_again(unit):
                return
            feed.packet_errors += 1
            unit.errors_in_row += 1
            if unit.errors_in_row > GIVE_UP:
                raise SourceError(
                    f"{feed.name}: given up after {GIVE_UP} undecodable packets in a row ({error})",
                    source=feed.name,
                ) from error
            return
        if not unit.aspects.decoded(unit.decoder, packet) and self._take_again(unit):
            return
        for frame in frames:
            self._emit(feed, unit, frame)

    def _emit(self, feed: Feed, unit: Unit, frame: Any) -> None:
        segment = unit.segment
        if segment is not None:
            pts = frame.pts
            if pts in segment.leading or (unit.at_tail and pts == segment.tail_pts):
                return  # the segment before shows it, or the one behind
            if unit.verified is None:
                unit.verified = pts == segment.key_pts
            if not unit.verified:
                return
        if unit.sent is not None:
            unit.sent.came(frame)
        if unit.again is not None and unit.again.shown(frame):
            unit.aspects.of(frame)
            return
        self._look_at(feed, unit, frame)
        for ready in (frame,) if unit.filter is None else self._filtered(feed, unit, frame):
            self._put(feed, unit, ready)

    def _look_at(self, feed: Feed, unit: Unit, frame: Any) -> None:
        """How the unit's pictures are to be shown from ``frame`` on."""
        mirrored = unit.shape.mirrored
        # The matrix itself is slow to get at. Streams change it at a key frame, or so that the rotation is another too.
        look = not unit.begun or unit.decoder is None or frame.key_frame or frame.rotation != unit.rotation
        aspect = unit.aspects.of(frame)
        if not look and aspect == unit.shape.sample_aspect:
            return
        if feed.turn and look:
            mirrored, unit.rotation = is_mirrored(frame), frame.rotation
        if not unit.begun:
            steps = filter_steps(feed.source)
            unit.filter = PictureFilter(steps) if steps else None
        shape = Shape(aspect, mirrored)
        if unit.filter is not None and unit.begun and shape != unit.shape:
            for ready in self._filtered(feed, unit, None):  # what it holds back is of the shape before
                self._put(feed, unit, ready)
        unit.shape, unit.begun = shape, True

    def _filtered(self, feed: Feed, unit: Unit, frame: Any) -> list[Any]:
        """What the unit's filter has ready once it has ``frame``, or at the end (None)."""
        assert unit.filter is not None
        before = unit.filter.deinterlaced
        try:
            ready = unit.filter.flush() if frame is None else unit.filter.push(frame)
        except (av.error.FFmpegError, ValueError) as error:
            what = "the end" if frame is None else f"a picture in {frame.format.name}"
            raise SourceError(f"{feed.name}: FFmpeg's filters failed at {what} ({error})", source=feed.name) from error
        feed.deinterlaced += unit.filter.deinterlaced - before
        return ready

    def _put(self, feed: Feed, unit: Unit, frame: Any) -> None:
        if frame.format.name not in pixfmt.table():
            unit.converter = unit.converter or av.video.reformatter.VideoReformatter()
            frame = convert(unit.converter, feed.name, frame)
        pixels = frame.width * frame.height
        if pixels > feed.pixels:  # bounds are in bytes: fewer of larger ones
            feed.pixels, feed.frame_nbytes = pixels, FrameSpec.of(frame).nbytes
            share = min(_QUEUE_NBYTES, self.queue_nbytes // (1 + self._others(feed)))
            feed.limit = max(self.min_queue, min(32, share // feed.frame_nbytes))
        if frame.pts is not None:
            pts = frame.pts + unit.offset
            if feed.top_pts is None or pts > feed.top_pts:
                feed.top_pts = pts
        unit.out.append((frame, unit.shape))
        if feed.drop != "never":
            with self._lock:
                feed.shed()
        self._announce(feed, unit)

    def _finish(self, feed: Feed, unit: Unit) -> None:
        """The unit's packets are through: flush it, or take over the segment behind where decoding cannot begin."""
        segment = unit.segment
        if segment is not None and not segment.last:
            with self._lock:
                if unit.cancelled:
                    return
                if feed.units[-1] is unit:
                    self._go_linear(feed, unit, segment)
                    return
                following = feed.units[feed.units.index(unit) + 1]
                if not following.verified:
                    self._merge(feed, unit, following)
                    return
            for packet in segment.tail:
                self._decode(feed, unit, packet)
        if unit.decoder is not None:
            self._decode(feed, unit, None)
            if unit.sent is not None and unit.sent.lost and not self.stopping:
                self._take_again(unit)
            if not unit.at_tail:
                return
        if unit.filter is not None:
            for frame in self._filtered(feed, unit, None):
                self._put(feed, unit, frame)
        if unit.decoder is not None and segment is not None:
            unit.decoder.flush_buffers()
            with self._lock:  # the next round of a loop may begin now: not with a decoder of this one
                if unit.stream is feed.stream:
                    feed.spare.append(unit.decoder)
        if segment is None or segment.last:
            with self._lock:
                if unit.stream is feed.stream:  # the next round may have begun
                    feed.input_ended = True
            error = getattr(unit.stream, "demux_error", None)
            if error is not None and not self.stopping:
                feed.packet_errors += 1
                feed.warnings.append(f"reading ended early: {error}")
        if unit.verified is None:
            unit.verified = False  # not a single picture came out of it
        unit.packets = unit.decoder = None
        unit.done = True

    def _take_again(self, unit: Unit) -> bool:
        """From the last key frame on decode anew and go on, with one thread; False if one thread did it before."""
        again, unit.sent = unit.sent, None
        if again is None or not again.packets:
            return False
        stream = unit.stream
        assert isinstance(stream, ContainerStream)
        unit.decoder = stream.decoder()
        unit.packets = itertools.chain(again.packets, unit.packets or ())
        unit.again, unit.at_tail = again, False
        unit.aspects = PixelAspects(stream)
        return True

    def _merge(self, feed: Feed, unit: Unit, following: Unit) -> None:
        """Lock held: decoding did not start clean at ``following``: ``unit``'s decoder, not flushed, does it too.

        Nobody is at work on ``following``.
        """
        segment, other = unit.segment, following.segment
        assert segment is not None and other is not None
        following.cancelled = True
        feed.units.remove(following)
        feed.misses += 1
        segment.packets = segment.packets + other.packets
        segment.tail, segment.tail_pts, segment.last = other.tail, other.tail_pts, other.last
        unit.packets = iter(other.packets)
        unit.at_tail = False

    def _go_linear(self, feed: Feed, unit: Unit, segment: Segment) -> None:
        """Lock held: too many key frames were none, so the last unit's decoder takes everything that is left."""
        assert feed.cutter is not None
        unit.packets = feed.cutter.rest()
        unit.at_tail = False
        segment.last, segment.tail = True, []
        feed.cutter, feed.mode = None, "linear"


def _one_frame(stream: Stream) -> int:
    """How long a picture lasts in the stream's ticks, by its rate: the next round of a loop begins so much later."""
    if stream.rate is None or stream.time_base is None:
        return 1
    return max(1, round(1 / (stream.rate * stream.time_base)))
