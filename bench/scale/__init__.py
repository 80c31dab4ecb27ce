"""Sizes beyond this machine: `python -m bench.scale`."""
