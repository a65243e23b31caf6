"""Models of what page-locking costs: memory of the ``simulated`` device that behaves as somebody says it does.

`framepipe.memory_models.base` is the contract, `framepipe.memory_models.table` finds a model by name and reads its
parameters. A model is arithmetic on a clock of its own; whatever shows one of its numbers says that it is modelled.
"""
