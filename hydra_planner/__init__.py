"""Finds the topology that a workload needs, by simulation of the real scheduler, router and migration in virtual time.

A package beside the engine, in the same wheel: it uses the engine, which does not import it.
"""
