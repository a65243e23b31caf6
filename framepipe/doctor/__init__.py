"""What this machine is, what to expect of it with page-locked memory, and what to change.

`framepipe.doctor.examination` gathers facts (``system``, ``media``, ``gpus``, ``compiler``), measures in child
processes (``measuring``), and asks the checks in their order (``checks_gpu``, ``checks_memory``, ``checks_media``,
``checks_system``). A check is a function of what was found, so that records of other machines can be checked as well.
``explaining`` has the symptoms and ``capabilities`` the table of systems; both are data files beside it. Nothing here
prints, makes a CUDA context in this process, or raises because something is missing: that is None, with a reason.
"""
