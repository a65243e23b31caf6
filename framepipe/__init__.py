"""framepipe: streaming video pipelines in bounded memory, decoded with PyAV.

``import framepipe`` loads nothing heavy: names are looked up on first use. What follows is the design.

The way of a frame
------------------
::

    decode pool     as many threads as the budget says. One demuxer a source cuts packets into segments at key frames
         |          where the container allows it; a worker takes the next segment, decodes it (without the GIL) and
         |          holds its frames, bounded in bytes, until it is the segment's turn. Sources keep their order.
    filling         a frame at a time, of the source that holds least, gets the next place in a slot of the ring; who
         |          took it waits for the slot's fence and copies it, outside any lock. Filler threads do so, and
         |          where there are several sources the decoding threads, behind what they decoded.
    runner thread   enqueues only: the upload on the copy stream, then the stages on the compute stream, then the
         |          copy back of small results and of what sinks want on the host. Up to `depth` batches are in
         |          flight. Gives the slot back with its fence.
    sink thread     waits for the oldest batch, lets stages collect, writes to the sinks and puts frames into a
         |          bounded queue.
    caller          run(), for and async for wait in short slices, so that Ctrl-C works on every system.
    guard thread    where asked for: reads what memory is free once a second, and acts by stated rules.

The unit of flow is a `Batch`: pictures of one `FrameSpec` in one slot, from one or several sources. A sink or a user
sees one `Frame` a picture. Planes travel as they were decoded (4:2:0 is 1.5 bytes a pixel against 3 for RGB) and are
converted on the device. Where host and device are one (``cpu``) the default staging is ``direct``: the decoder's own
frames travel, read-only, since a copy would buy nothing. A frame that does not fit its slot commits the partial batch
and plans anew; what a stage remembers is a source's own and is dropped when the source changes its spec in
more than the shape of pixels.

What is always true
-------------------
1. With ``pooled`` staging the ring is one block of the exact size, allocated once, the hot tier of host memory. What
   goes back to the host is in the cold tier. After the first frame no more is page-locked, unless the input itself
   grows (``memory.replans`` counts that), results are held (see 3), or a guard is told to let the cold tier grow.
2. A host slot is refilled only after its fence. On the device an upload is waited for by the stages that read it (the
   edge forward), and waits for the stages that read what it overwrites (the edge back).
3. What leaves the pipeline is memory of its own, complete when it is seen, and nobody overwrites it while it is held.
   Who holds much makes the pipeline allocate more; nothing ever waits for it.
4. The books balance, in frames: decoded = skipped + dropped + filtered + failed + delivered. A source drops nothing
   unless asked to (``drop``) or the run is stopped. Damaged packets are counted apart: they never became frames.
5. Every resource has one owner, which closes it, in reverse order of opening, once the streams are idle. Closing twice
   is harmless and use after it raises. Threads end by being told; each has a name and is joined, but for one that is
   stuck in a read from a network: it is left to its time-out, and then closes what it opened.
6. The same pipeline gives the same results on every device with ``accuracy: exact``. ``simulated`` defers every
   launch until somebody waits, poisons what is freed, and raises `HazardError` where no event orders two accesses.
7. A configuration is checked whole before anything is opened or written, and what needs more memory than is measured
   free is not begun. Files appear under their name when they are whole; lines of JSON appear line by line.
8. The threads hold the engine and never the `Pipeline`, so that a forgotten pipeline is collected and its threads end.

The contracts
-------------
A stage, source, sink or staging strategy is one dataclass in one file: its fields are its YAML parameters, and
``@register("name")`` makes it known. Other packages announce theirs by entry points (`framepipe.registry`).

=========  ===========================================================================================================
`Stage`    ``plan`` maps array specs before the first frame, ``launch`` only enqueues, ``collect`` turns small results
           into ``meta`` on the host. ``reads`` and ``writes`` decide what memory is made and how long it is kept.
`Source`   ``open`` gives a `framepipe.source.Stream` of decoded frames; files go through packets and segments instead.
`Sink`     ``open``, ``write`` a frame at a time, ``end`` of a source, ``close``: whole output after an error, too.
`Stager`   ``fill`` a slot on a filler thread, ``upload`` it on the runner, saying when the host side is free again.
`Device`   memory, streams, events, copies; all order is explicit. ``xp`` is its array module, ``kernels`` its pixels.
=========  ===========================================================================================================

`framepipe.testing` has a ``check_*`` for each of them, the one that the built-in ones pass.

The house
---------
Imports go down only. Modules of one row that ``|`` separates know nothing of each other. A test reads this table.

=========  ===========================================================================================================
commands   cli __main__ _cli_*
diagnosis  doctor/
measuring  bench/ | probe/
tools      config _entries _parameters _schema _tree _yaml | plan planned | shipped | testing _testing_streams
pipeline   pipeline alive guarding fitting parts summary findings
machinery  engine running tokens delivering filling decode decoding preview | sources/ | stages/ | sinks/ | staging/
planning   chain budget limits
inputs     container cutting feed reading retake filtergraph selecting streams timestamps
contracts  source stage sink stager | guard/ | holdings
below      kernels/ | planecopy slicecopy | ring | telemetry/
values     frame framespec pixfmt | report
devices    device/
models     memory_models/
ground     errors registry tracing | memory tiers | ledger | pagelock | redact | units | hardware | ffmpeg
=========  ===========================================================================================================

The commands alone print and handle signals. ``config`` turns YAML into components, ``parts`` does so with names and
paths. ``engine`` owns the threads, whose bodies are ``decode`` (with ``decoding``), ``filling``, ``running`` and
``delivering``; ``chain`` plans the stages. ``container`` opens inputs, ``cutting`` cuts their packets into segments,
``streams`` chooses among what they hold, ``reading`` waits for networks and pipes, ``retake`` is for tails that frame
threads lose, ``filtergraph`` readies odd pictures, ``timestamps`` tells when they show and ``selecting`` which are
wanted, ``feed`` keeps the books of a source and ``findings`` words what was odd. ``ring`` hands slots round,
``planecopy`` copies into them (with ``slicecopy`` by several threads; ``ffmpeg`` finds functions that PyAV does not
offer), ``memory`` makes blocks, ``ledger`` counts every byte and who asked for it, ``tiers`` are the pools of host
memory, ``holdings`` tells of both at the end, ``pagelock`` is the system's own page-locking, ``telemetry`` reads what
the system counts, ``memory_models`` are what the memory of the simulated device may be like (see ``device/modelled``).
``guard`` decides what to do about little memory, ``guarding`` does it to an engine, with ``tokens`` that are held back.
``budget`` works out what memory is needed and ``limits`` what there is: for ``fitting``, as a pipeline opens, and for
``plan``, by the first pictures that ``preview`` gets. ``bench`` measures pipelines, each in a child process; ``doctor``
examines the machine, with the probes for what has to be measured.

Arrays are (height, width, ...), configuration has width before height. Boxes are ``x1, y1, x2, y2`` in pixels of the
upright source picture, whatever resize came between. Names carry units: ``_s``, ``_ms``, ``nbytes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from framepipe.errors import FramepipeError as FramepipeError
    from framepipe.frame import Batch as Batch
    from framepipe.frame import Frame as Frame
    from framepipe.frame import FrameSpec as FrameSpec
    from framepipe.pipeline import Pipeline as Pipeline
    from framepipe.pipeline import open as open
    from framepipe.registry import register as register
    from framepipe.report import RunReport as RunReport
    from framepipe.sink import Sink as Sink
    from framepipe.source import Source as Source
    from framepipe.stage import Affine as Affine
    from framepipe.stage import ArraySpec as ArraySpec
    from framepipe.stage import Flow as Flow
    from framepipe.stage import Stage as Stage

_HOME = {
    "Affine": "stage", "ArraySpec": "stage", "Batch": "frame", "Flow": "stage", "Frame": "frame",
    "FrameSpec": "frame", "FramepipeError": "errors", "Pipeline": "pipeline", "RunReport": "report", "Sink": "sink",
    "Source": "source", "Stage": "stage", "open": "pipeline", "register": "registry",
}  # fmt: skip

__all__ = [
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'framepipe' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"framepipe.{_HOME[name]}"), name)
