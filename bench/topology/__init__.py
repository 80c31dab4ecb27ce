"""Which topology for which load: simulated on many devices, measured on this machine. See `__main__.py`."""
