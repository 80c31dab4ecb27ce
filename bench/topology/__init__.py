"""Small topologies measured on this machine, beside what the simulator says of them. See `__main__.py`."""
