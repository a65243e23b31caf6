"""Devices: ``cpu``, ``simulated`` and (with CuPy) ``cuda``, behind one contract in `framepipe.device.base`."""
