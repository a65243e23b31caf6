"""Readings of memory, one sensor a file.

`framepipe.telemetry.sensors` opens all that there are, ``base`` is their contract, and `framepipe.telemetry.sampler`
reads them in a thread. Sources are never mixed: each number keeps the name of what counted it, and a number that is
not known is None with a reason, never 0.
"""
