"""Fills a model's slots from a checkpoint, one tensor at a time.

Compares all names and shapes before it reads anything. Does not know files or layers: a slot takes its tensor and packs
it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import Checkpoint, StoredTensor, list_names
from hydra_engine.models.loading.parameters import Slot
from hydra_engine.models.vlm import VisionLanguageModel

logger = logging.getLogger(__name__)

_LOGGED, _LOGGED_CHARS = 1000, 200  # names of each kind of trouble, and of each name

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def fill_model(
    model: VisionLanguageModel,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> int:
    """Fills all slots in the order of the model's layers, so that fused matrices complete at once. `progress` receives
    bytes as stored. Returns the number of quantised matrices that were dequantised on reading."""
    entries = checkpoint.entries
    check_names(model, entries)
    slots = {name: slot for name, slot in model.slots.items() if name in entries}
    total = sum(entries[name].nbytes for name in slots)
    done = num_widened = 0
    for name, slot in slots.items():
        stored = checkpoint.read(name)
        if isinstance(stored, QuantizedWeight):
            _fill_quantized(name, slot, stored, slot.dtype or dtype, device)
        else:
            num_widened += entries[name].quantized
            target = slot.dtype_of(stored.dtype, dtype)
            _fill_plain(name, slot, stored, target, device)
        done += entries[name].nbytes
        if progress is not None:
            progress(done, total)
    return num_widened


def _fill_plain(name: str, slot: Slot, stored: Tensor, target: torch.dtype, device: torch.device) -> None:
    tensor = stored.to(device=device, dtype=target)
    if not all_finite(tensor):
        if all_finite(stored):
            raise CheckpointError(f"tensor {name} holds values that {str(target).removeprefix('torch.')} cannot")
        raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")
    slot.fill(tensor)


def _fill_quantized(name: str, slot: Slot, stored: QuantizedWeight, target: torch.dtype, device: torch.device) -> None:
    """Fills a slot with a quantised weight, dequantised if the slot takes tensors only."""
    parts = [part for part in (stored.scales, stored.offsets, stored.block_scales) if part is not None]
    if not all(map(all_finite, parts)):
        raise CheckpointError(f"tensor {name} has scales or zero points that are not finite (NaN or infinity)")
    if stored.is_float and stored.values.isnan().any():
        raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")
    # A matrix of zeros has one number all over, whatever its format.
    if not _scaled(stored) and _varies(stored.values):
        raise CheckpointError(f"tensor {name} has numbers, but its scales are all zero")
    if slot.fill_quantized is None:
        slot.fill(stored.dequantized(target).to(device))
    else:
        slot.fill_quantized(stored.to(device))


def _scaled(stored: QuantizedWeight) -> bool:
    """True if any scale or offset is not zero; of scales on two levels, any on each level."""
    parts = [part for part in (stored.scales, stored.offsets) if part is not None]
    if stored.block_scales is None:
        return any(bool(part.any()) for part in parts)
    return any(bool(part.any() and stored.block_scales[:, :, i].any()) for i, part in enumerate(parts))


def _varies(values: Tensor) -> bool:
    octets = values.view(torch.uint8)
    return bool(octets.min() != octets.max())


def check_names(model: VisionLanguageModel, entries: Mapping[str, StoredTensor]) -> None:
    """Raises one CheckpointError for all tensors that are missing, unexpected, misplaced or of another shape than in
    config.json."""
    slots, unneeded = model.slots, model.unneeded
    needed = {name: entries[name] for name in slots if name in entries}
    missing = [
        name
        for name, slot in slots.items()
        if name not in entries and not slot.optional and slot.substitute not in entries
    ]
    missing += [part for entry in needed.values() for part in entry.missing]
    surplus = [
        name for name in entries if name not in slots and not name.startswith(unneeded) and not entries[name].spare
    ]
    misplaced = [part for entry in needed.values() for part in entry.misplaced]
    misshaped = [
        f"{name} is {list(entry.shape)} instead of {list(slots[name].shape)}"
        for name, entry in needed.items()
        if entry.shape != slots[name].shape and not entry.missing and not entry.misshaped
    ]
    misshaped += [part for entry in needed.values() for part in entry.misshaped]
    problems = {"missing": missing, "not expected": surplus, "of the wrong shape": misshaped}
    problems["in another file than the index says"] = misplaced
    complaints = [f"{what}: {list_names(names)}" for what, names in problems.items() if names]
    if complaints:
        for what, names in problems.items():
            for name in names[:_LOGGED]:
                logger.error("weights: %s: %s", what, name[:_LOGGED_CHARS])
            if len(names) > _LOGGED:
                logger.error("weights: %s: %d more", what, len(names) - _LOGGED)
        raise CheckpointError(f"the weights do not fit config.json; {'; '.join(complaints)}")


def all_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite: minimum and maximum propagate both, far cheaper than a mask."""
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(tensor))
