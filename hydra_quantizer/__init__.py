"""Writes checkpoints again with fewer bits.

A package beside the engine, in the same wheel: it uses the engine's readers of checkpoints, and serves nothing.
"""

from hydra_engine.cli.commands import Command

QUANTIZE = Command(
    "write a checkpoint again with its decoder in 8 or 4 bits, as compressed-tensors stores it",
    "hydra_quantizer.quantize",
    position=54,
)
