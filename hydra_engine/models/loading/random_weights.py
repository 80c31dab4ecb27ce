"""Random weights for a model without a checkpoint: seeded, drawn on the device, with finite activations.

Every tensor is drawn from the seed and its own name, so parts of a model in several instances agree. Matrices whose
products are added to the residual rows are scaled down with the number of layers, so that rows keep their order of
magnitude from the first layer to the last. Does not know checkpoints.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from hydra_engine.models.vlm import VisionLanguageModel

_VISION = ("vision", "visual", "projector", "merger", "resampler", "vpm")
_LAST_NORM = ("language_model.norm.weight", "language_model.model.norm.weight", "llm.model.norm.weight")
# A layer of a stack, and the matrices whose products are added to its rows, two of them in each layer.
_LAYER = re.compile(r"^(.*?\.)?(?:layers|blocks|layer)\.(\d+)\.")
_ADDED = ("o_proj", "out_proj", "attn.proj", "projection_layer", "down_proj", "fc2")
_ADDED_WEIGHTS = tuple(f"{name}.weight" for name in _ADDED)


def randomise(name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
    """Draws in place: norms near 1, biases near 0; the decoder mixes enough to keep its text out of a loop."""
    if name == "model.norm.weight" or name.endswith(_LAST_NORM):
        mean, deviation = 0.5, 0.05  # the last norm: logits near 1, of which float32 rounding is far below 1e-4
    elif "norm" in name or "layrnorm" in name or "ln_" in name:
        mean, deviation = (1.0 if name.endswith("weight") else 0.0), 0.1
    elif tensor.dim() == 1:
        mean, deviation = 0.0, 0.1
    elif "embed" in name and tensor.dim() == 2:
        mean, deviation = 0.0, 0.5
    else:
        gain = 1.0 if any(part in name for part in _VISION) else 2.0
        num_in = tensor.shape[-1] if ".experts." in name else tensor[0].numel()  # one tensor may hold all experts
        mean, deviation = 0.0, gain / num_in**0.5
    tensor.normal_(mean, deviation, generator=generator)


class NamedDraws:
    """A source of random weights that depend on the seed, the tensor's name and the depth of its stack among
    `names`."""

    def __init__(self, names: Iterable[str], device: torch.device, seed: int = 0) -> None:
        self._depths = _depths(names)
        self._generator = torch.Generator(device)
        self._seed = seed

    def draw(self, name: str, tensor: Tensor) -> None:
        """Draws in place, on the device of the generator."""
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))  # the CPU takes 32 bits
        randomise(name, tensor, self._generator)
        if name.endswith(_ADDED_WEIGHTS) and (layer := _LAYER.match(name)):
            tensor.mul_((2 * self._depths[layer[1]]) ** -0.5)


def fill_random(
    model: VisionLanguageModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stored: torch.dtype = torch.float32,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills every slot that is not optional, one tensor at a time. `stored` is the dtype of the checkpoint that they
    replace. `progress` receives (bytes done, bytes in total). At most the model, one tensor and the parts of one fused
    matrix exist at a time."""
    slots = {name: slot for name, slot in model.slots.items() if not slot.optional}
    dtypes = {name: slot.dtype_of(stored, dtype) for name, slot in slots.items()}
    sizes = {name: torch.Size(slot.shape).numel() * dtypes[name].itemsize for name, slot in slots.items()}
    total, done = sum(sizes.values()), 0
    draws = NamedDraws(slots, device, seed)
    for name, slot in slots.items():
        tensor = torch.empty(slot.shape, dtype=dtypes[name], device=device)
        draws.draw(name, tensor)
        slot.fill(tensor)
        del tensor  # before the next one is made
        done += sizes[name]
        if progress is not None:
            progress(done, total)


def _depths(names: Iterable[str]) -> dict[str, int]:
    """Number of layers of each stack, by name prefix."""
    depths: dict[str, int] = {}
    for name in names:
        if layer := _LAYER.match(name):
            depths[layer[1]] = max(depths.get(layer[1], 0), int(layer[2]) + 1)
    return depths
