"""The kernels: the same few functions for each device."""
