"""What page-locked memory costs on this machine, measured in child processes.

``pinned`` holds large blocks of each kind and reads every counter before, meanwhile and afterwards; ``churn`` takes and
gives small ones for minutes and says what grows; ``bandwidth`` copies between host and device and keeps the ceiling.
Each runs in the parent and gives a record of plain JSON values (`framepipe.probe.record`); ``children`` starts
the processes and ``_child`` is what runs in them. Nothing here prints, and nothing says why a counter moved: a delta
beside that of a control that allocated nothing is all that is known.
"""
