"""Readings of memory, one sensor a file."""
