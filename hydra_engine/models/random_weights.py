"""Random weights for a model whose directory has none: seeded, drawn on the device, of finite activations.

Every tensor is drawn from the seed and its own name, so parts of a model in several instances agree. Does not know
checkpoints.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from hydra_engine.models.vlm import VisionLanguageModel

_VISION = ("vision", "visual", "projector", "merger")
_LAST_NORM = ("language_model.norm.weight", "language_model.model.norm.weight")


def randomise(name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
    """In place: norms stay near 1, biases near 0; the decoder mixes enough for its text not to fall into a loop."""
    if name == "model.norm.weight" or name.endswith(_LAST_NORM):
        mean, deviation = 0.5, 0.05  # the last norm: logits near 1, of which float32 rounding is far below 1e-4
    elif "norm" in name or "layrnorm" in name or "ln_q" in name:
        mean, deviation = (1.0 if name.endswith("weight") else 0.0), 0.1
    elif tensor.dim() == 1:
        mean, deviation = 0.0, 0.1
    elif "embed" in name and tensor.dim() == 2:
        mean, deviation = 0.0, 0.5
    else:
        gain = 1.0 if any(part in name for part in _VISION) else 2.0
        mean, deviation = 0.0, gain / tensor[0].numel() ** 0.5
    tensor.normal_(mean, deviation, generator=generator)


def fill_random(
    model: VisionLanguageModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills every slot that a checkpoint must have, one tensor at a time; `progress` is told bytes."""
    slots = {name: slot for name, slot in model.slots.items() if not slot.optional}
    sizes = {name: torch.Size(slot.shape).numel() * (slot.dtype or dtype).itemsize for name, slot in slots.items()}
    total, done = sum(sizes.values()), 0
    generator = torch.Generator(device)
    for name, slot in slots.items():
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # the CPU takes 32 bits
        tensor = torch.empty(slot.shape, dtype=slot.dtype or dtype, device=device)
        randomise(name, tensor, generator)
        slot.fill(tensor)
        done += sizes[name]
        if progress is not None:
            progress(done, total)
