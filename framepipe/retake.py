"""Taking the tail of a damaged input again, with one thread.

A decoder with frame threads has several packets at work at once. Where one of them fails, or the input ends in
damage, the pictures of the others never come out, often without any error. One thread loses none of them.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import av

_HELD_NBYTES = 64 << 20
_REORDERED = 32
"""By how many packets at most a picture comes out later than a decoder with one thread would need."""


class Retake:
    """The packets given to a decoder with ``threads`` frame threads since the last key frame that it has shown.

    Used in two passes: `sent` and `came` while that decoder is at work; then `packets` go to another decoder, and
    `shown` tells which of its pictures have come before. A picture is known by its pts, or where there are none by
    its number. More than 64 MB of packets behind one key frame are not kept: then `packets` is empty.
    """

    def __init__(self, threads: int) -> None:
        self.packets: list[Any] = []
        self._keys: deque[tuple[int, int | None]] = deque()  # of key frames behind the first: number, pts
        self._first = 0  # the number of packets[0]
        self._nbytes = 0
        self._shown: Counter[int | None] = Counter()  # by pts, of which damage may bring one twice
        self._began = False
        self._first_came = False
        """The key frame of packets[0] was shown, or it is none."""
        self._too_many = False
        self._tail = threads + _REORDERED

    def sent(self, packet: Any) -> None:
        """The decoder is about to get ``packet``."""
        if self._too_many:
            return
        if packet.is_keyframe and self.packets:
            self._keys.append((self._first + len(self.packets), packet.pts))
        elif not self.packets:
            self._first_came = not packet.is_keyframe
        self.packets.append(packet)
        self._nbytes += packet.size
        if self._nbytes > _HELD_NBYTES:
            self._too_many = True
            self.packets.clear()

    def came(self, frame: Any) -> None:
        """The decoder has shown ``frame``."""
        if frame.key_frame and not self._too_many:
            if self._keys and (self._first_came or frame.pts is not None):
                self._forget(frame.pts)
            self._first_came = True  # without time stamps the first key frame shown is the first one sent
        self._shown[frame.pts] += 1

    @property
    def lost(self) -> bool:
        """Behind the flush: whether there is one of the last packets of which no picture came."""
        last = [packet for packet in self.packets[-self._tail :] if not packet.is_discard]
        if last and self.packets[0].pts is not None:  # leading pictures came before their key frame did
            last = [packet for packet in last if packet.pts is None or packet.pts >= self.packets[0].pts]
        if all(packet.pts is None for packet in last):
            return len(self.packets) > self._shown[None]
        return any(packet.pts is not None and not self._shown[packet.pts] for packet in last)

    def shown(self, frame: Any) -> bool:
        """Second pass: whether ``frame`` came in the first one, or belongs to what was before."""
        if not self._began and self._first:
            key_pts = self.packets[0].pts
            if frame.pts is not None and key_pts is not None and frame.pts < key_pts:
                return True  # a leading picture, without what it refers to
            self._began = True
        self._shown[frame.pts] -= 1
        return self._shown[frame.pts] >= 0

    def _forget(self, pts: int | None) -> None:
        """A key frame was shown: nothing before it will come any more."""
        if pts is not None and all(key_pts != pts for _, key_pts in self._keys):
            return
        while self._keys:
            number, key_pts = self._keys.popleft()
            if pts is None or key_pts == pts:
                break
        gone = self.packets[: number - self._first]
        del self.packets[: len(gone)]
        self._nbytes -= sum(packet.size for packet in gone)
        self._first = number
        self._shown.clear()


def copy_of(context: Any) -> Any:
    """A further decoder for what ``context`` decodes, made without opening the input again."""
    copy: Any = av.CodecContext.create(context.codec, "r")
    copy.extradata = context.extradata
    if context.width and context.height:
        copy.width, copy.height = context.width, context.height
    if context.pix_fmt:
        copy.pix_fmt = context.pix_fmt
    return copy
