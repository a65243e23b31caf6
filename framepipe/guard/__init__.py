"""Watching memory while a pipeline runs, and acting on it by a stated policy. Off by default.

``options`` is what YAML and `framepipe.pipeline.Pipeline` say, ``readings`` tell how much is free and by whose count,
``policy`` decides what to do about little memory and ``growth`` how large the cold tier may be: both are arithmetic on
numbers that they are given. ``monitor`` is the thread that reads, asks them, carries out and notes. ``waiting`` has
`framepipe.guard.waiting.wait_for_headroom` and `framepipe.guard.waiting.settle`, for whoever would sleep instead.
"""
