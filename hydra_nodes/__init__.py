"""Instances on other machines than the frontend's: authenticated sessions over TCP, clocks, and how nodes are reached.

A package beside the engine, in the same wheel. The engine does not import it: what crosses machines is handed to it
behind the interfaces of its channels (`cluster/channel.py`).
"""
