"""One video file: pictures in, times kept, sound copied beside them, whole at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from framepipe.errors import FramepipeError, SinkError
from framepipe.sink import SinkContext
from framepipe.sinks._audio import AudioTrack, packet_time
from framepipe.sinks._colour import Converter
from framepipe.sinks._encoder import Encoding, Size, is_mov, keeps_start
from framepipe.sinks._output import PartFile, finish_all, sink_error

_Failure = (av.FFmpegError, OSError, ValueError)


class VideoWriter:
    """Writes pictures of one size to one file.

    ``first`` is the time of the first picture in seconds; it is kept, or with ``from_zero`` taken off every time.
    ``aspect`` is width by height of a pixel.
    A time that is not after the one before is written one tick after it, counted in ``moved``. ``warn`` gets a
    kind and a text. Raises `SinkError`.
    """

    def __init__(
        self,
        path: Path,
        context: SinkContext,
        encoding: Encoding,
        size: Size,
        *,
        first: Fraction,
        time_base: Fraction | None,
        rate: Fraction,
        sound: AudioTrack | None = None,
        from_zero: bool = False,
        aspect: Fraction = Fraction(1),
        warn: Callable[[str, str], None],
    ) -> None:
        self.size = size
        self.moved = 0
        self._encoding = encoding
        self.aspect = aspect
        self._warn = warn
        self._sound = sound
        from_zero = from_zero or not keeps_start(encoding.container)
        self._origin = first if from_zero or first < 0 else Fraction(0)
        if first < 0 and not from_zero:
            warn("start", f"{path}: times begin at {float(first):.3f} s; files cannot, so this one begins at 0")
        self._pad = encoding.padding(size)
        if any(self._pad):
            warn(
                "odd",
                f"{path}: {encoding.codec} in {encoding.pix_fmt} cannot hold {size[0]}x{size[1]}: the last column "
                "or row is repeated once; pix_fmt: yuv444p keeps the size",
            )
        self._time_base, self._rate = encoding.timing(time_base, rate)
        self._interval = 1 / self._rate
        self._tick = self._time_base
        self._last: int | None = None
        self._last_time = first
        self._last_sound: int | None = None
        self._held: Any = None
        self._container: Any = None
        self._stream: Any = None
        self._sound_stream: Any = None
        self._whole = False
        self._file = PartFile(path, context)
        try:
            self._open()
        except BaseException:
            self._release()
            self._file.discard()
            raise

    def write(self, image: np.ndarray, time: Fraction) -> None:
        """Encode a picture, (H, W, 3) uint8, that shows at ``time``."""
        if self._container is None or self._file.failed:
            return  # told already
        with self._failing():
            if any(self._pad):
                image = np.pad(image, ((0, self._pad[1]), (0, self._pad[0]), (0, 0)), mode="edge")
            frame = self._convert(image)
            frame.pts = round(self._place(time) * self._tick / self._time_base)
            frame.time_base = self._time_base
            self._put(self._stream.encode(frame))

    def copy_sound(self, until: Fraction | None) -> None:
        """Copy the sound that begins before ``until``, or all that is left."""
        if self._sound is None or self._container is None or self._file.failed:
            return
        with self._failing():
            for packet in self._sound.until(until):
                self._put_sound(packet)

    def finish(self) -> None:
        """Let every picture out, write the index, take the final name. After a full disk it only lets go."""
        if self._container is None:
            return
        steps = [lambda: self.copy_sound(self._last_time + self._interval), self._flush, self._close]
        try:
            if not self._file.failed:
                with self._failing():
                    finish_all(steps)
        finally:
            # What sound or encoder spoiled is whole all the same, up to there.
            whole = self._whole
            self._release(close=not whole)
            if whole:
                self._file.commit()

    def _open(self) -> None:
        """Open the file, without sound where the container cannot hold it."""
        refused: Exception | None = None
        if self._sound is not None:
            try:
                self._begin(with_sound=True)
                return
            except _Failure as error:
                refused = error
                self._sound = None
                self._file.seek(0)
                self._file.truncate()
        try:
            self._begin(with_sound=False)
        except _Failure as error:
            doing = f"open {self._encoding.codec} for {self.size[0]}x{self.size[1]} {self._encoding.pix_fmt}"
            raise sink_error(error, self._file.path, doing=doing) from error
        if refused is not None:
            reason = getattr(refused, "strerror", None) or refused
            text = f"{self._file.path}: the sound is left out, such a file cannot hold it: {reason}"
            self._warn("sound", text)

    def _begin(self, with_sound: bool) -> None:
        encoding = self._encoding
        container: Any = av.open(
            self._file,
            "w",
            format=encoding.container.name,
            container_options=encoding.muxer_options(self._time_base),
        )
        stream = container.add_stream(encoding.codec, rate=self._rate, options=encoding.encoder_options())
        size = (self.size[0] + self._pad[0], self.size[1] + self._pad[1])
        colour = encoding.configure(stream.codec_context, size, self._rate, self._time_base)
        if self.aspect != 1:
            stream.codec_context.sample_aspect_ratio = self.aspect
        if with_sound:
            assert self._sound is not None
            self._sound_stream = container.add_stream_from_template(self._sound.stream)
        container.start_encoding()
        self._container, self._stream = container, stream
        self._convert = Converter(size, encoding.pix_fmt, colour)
        # Matroska counts milliseconds whatever the encoder counts.
        base = stream.time_base
        self._tick = max(self._time_base, Fraction(base.numerator, base.denominator))

    def _place(self, time: Fraction) -> int:
        """The tick of a picture: its own, or one after the last."""
        tick = round((time - self._origin) / self._tick)
        if self._last is not None and tick <= self._last:
            self.moved += 1
            self._warn(
                "moved",
                f"{self._file.path}: time stamps repeat, go back or lie closer than {self._tick} s "
                f"(first at {float(time):.3f} s): each is written one tick after the last",
            )
            tick = self._last + 1
        elif self._last is not None:
            # A long gap tells nothing of how long the last picture should stand.
            self._interval = min(time - self._last_time, max(Fraction(1), 1 / self._rate))
        self._last = tick
        self._last_time = time
        return tick

    def _put(self, packets: list[Any]) -> None:
        # One is held back: the very last gets a duration of its own.
        for packet in packets:
            if self._held is not None:
                self._container.mux(self._held)
            self._held = packet

    def _put_sound(self, packet: Any) -> None:
        time = packet_time(packet)
        if time < self._origin and not (self._origin == 0 and is_mov(self._container.format)):
            return  # an edit list hides what comes before zero (the encoder's run-up); nothing else does
        base = packet.time_base
        shift = round(self._origin * base.denominator / base.numerator)
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        if self._last_sound is not None and packet.dts <= self._last_sound:
            return  # a damaged file; muxers take no step back
        self._last_sound = packet.dts
        packet.stream = self._sound_stream
        self._container.mux(packet)

    def _flush(self) -> None:
        packets = ([self._held] if self._held is not None else []) + self._stream.encode(None)
        self._held = None
        for packet in packets:
            if not packet.duration:
                base = packet.time_base
                packet.duration = max(1, round(self._interval * base.denominator / base.numerator))
            self._container.mux(packet)

    def _close(self) -> None:
        self._container.close()
        self._whole = True

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except FramepipeError:
            raise
        except _Failure as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> SinkError:
        left = ""
        if self._file.failed:
            left = f"what was written before is in {self._file.part}"
            if is_mov(self._encoding.container):
                left += ", which lacks the index that players need"
        return sink_error(error, self._file.path, left)

    def _release(self, close: bool = True) -> None:
        # The file first: PyAV writes no index into a closed one when it drops an unfinished container.
        if close:
            with contextlib.suppress(OSError):
                self._file.close()
        self._held = self._stream = self._sound_stream = self._container = self._sound = None
