"""Builds a model from a spec: the parts of a family that a role needs, and their weights.

Every family's decoder is at `language_model.model.` and `language_model.lm_head.` in canonical names. Does not know
files (`weights.py`) or arithmetic (the backend).
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hydra_engine.backend.base import Backend, Ops
from hydra_engine.backend.select import DTYPES
from hydra_engine.core.instances import Role
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.implementation import LoadedModel, ModelImplementation
from hydra_engine.models.layers.decoder import Decoder
from hydra_engine.models.loading.checkpoint import Checkpoint
from hydra_engine.models.loading.joined_checkpoint import join_tower, tower_folder
from hydra_engine.models.loading.open_checkpoint import open_checkpoint
from hydra_engine.models.loading.parameters import Demands, Scope
from hydra_engine.models.loading.random_weights import fill_random
from hydra_engine.models.loading.weights import Progress, fill_model
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import FAMILIES, find_implementation
from hydra_engine.models.vlm import Vision, VisionLanguageModel, one_thread

_CPU = torch.device("cpu")

_TRIM_BYTES = 64 << 20  # of weights read between two trims: bounds the extra memory of loading


def vision_class(spec: ModelSpec) -> type[Vision]:
    module, name = FAMILIES[spec.family].vision.rsplit(".", 1)
    vision: type[Vision] = getattr(import_module(f"hydra_engine.models.{module}"), name)
    return vision


def build_model(
    spec: ModelSpec,
    ops: Ops,
    dtype: torch.dtype,
    role: Role,
    *,
    device: torch.device = _CPU,
    held: Collection[str] | None = None,
) -> VisionLanguageModel:
    """Builds the parts that `role` needs, with all slots empty. `held`: names of the checkpoint's tensors; with them,
    raises CheckpointError before it builds more layers than the checkpoint has."""
    demands = Demands(held)
    root = Scope(ops, dtype, device, demands)
    vision = decoder = None
    if spec.vision is not None:
        family = vision_class(spec)
        if role.needs_vision:
            vision = family(root, spec.vision)
        else:
            root.skip(*family.weight_names)
    bits = None if spec.at_load is None else spec.at_load.num_bits[0]
    language = root.child("" if spec.vision is None else "language_model", quantize=bits)
    root.skip("mtp.")  # layers that guess further tokens, beside some published decoders
    if role.needs_language:
        decoder = Decoder(language, spec.language)
    else:
        language.skip("model.", "lm_head.")
    return VisionLanguageModel(ops, demands, vision=vision, decoder=decoder)


def check_layers(model_dir: Path, spec: ModelSpec, backend: Backend, role: Role) -> CheckpointError | None:
    """Raises CheckpointError if config.json has more layers than the weights. Reads headers only. Returns the error of
    weights that cannot be opened, which loading them would raise."""
    if (other := _other_implementation(spec)) is not None:
        other.check_layers(model_dir, spec)
        return None
    try:
        checkpoint = _open_checkpoint(model_dir, spec)
    except CheckpointError as error:
        return error
    with checkpoint:
        build_model(spec, backend.ops, backend.dtype, role, held=checkpoint.entries)
    return None


def _other_implementation(spec: ModelSpec) -> ModelImplementation | None:
    """The implementation that computes the model; None for the engine's own."""
    if spec.family in FAMILIES:
        return None
    found: ModelImplementation = find_implementation(spec.family)
    return found


def load_model(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
    *,
    random_weights: bool = False,
    packed_cache: Path | None = None,
) -> LoadedModel:
    """Loads the parts of a model that `role` needs. `random_weights`: draws weights instead of reading them.
    `packed_cache`: folder with packed weights; they are mapped from it if present, else written to it. Raises
    CheckpointError that names every tensor that does not fit, ConfigError for an unsupported combination of options."""
    other = _other_implementation(spec)
    if packed_cache is not None and (other is not None or random_weights or backend.ops.name != "native"):
        raise ConfigError(
            "packed_cache is for a checkpoint's weights in native models on a processor with the native extension; "
            "leave it out here",
            param="packed_cache",
        )
    if other is not None:
        if random_weights:
            raise ConfigError("load_format random needs a native model", param="load_format")
        return other.load_model(model_dir, spec, backend, role, progress)
    device = backend.device.torch_device
    trimmed = 0

    def advance(done: int, total: int) -> None:
        nonlocal trimmed
        if done - trimmed >= _TRIM_BYTES or done == total:
            trimmed = done
            backend.device.trim()
        if progress is not None:
            progress(done, total)

    if random_weights:
        model = build_model(spec, backend.ops, backend.dtype, role, device=device)
        with torch.inference_mode():
            stored = DTYPES.get(spec.dtype, torch.float32)
            fill_random(model, dtype=backend.dtype, device=device, stored=stored, progress=advance)
        return model
    if packed_cache is not None:
        return _cached(model_dir, spec, backend, role, advance, packed_cache)
    return _build_and_fill(model_dir, spec, backend, role, advance)


def _cached(
    model_dir: Path, spec: ModelSpec, backend: Backend, role: Role, progress: Progress, folder: Path
) -> VisionLanguageModel:
    cache: Any = import_module("hydra_engine.models.loading.packed_cache")  # needs the extension
    elsewhere = tower_folder(model_dir, spec.tower) if spec.tower else None
    stats = [path.stat() for path in sorted(elsewhere.glob("*.safetensors"))] if elsewhere is not None else []
    files = [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
    path = cache.cache_file(folder, model_dir, repr((spec, backend.dtype, role, files)))
    if path.exists():  # only once this model was filled from these files
        model = build_model(spec, backend.ops, backend.dtype, role, device=backend.device.torch_device)
        notes = cache.restore(path, model.holders)
        model.notes = (*notes, f"weights: mapped from {path}")
        return model
    model = _build_and_fill(model_dir, spec, backend, role, progress)
    problem: str | None = cache.write(path, model.holders, model.notes)
    where = f"written to {path}" if problem is None else f"not written to {folder}: {problem}"
    model.notes = (*model.notes, f"weights: packed, and {where}")
    return model


def _build_and_fill(
    model_dir: Path, spec: ModelSpec, backend: Backend, role: Role, progress: Progress
) -> VisionLanguageModel:
    device = backend.device.torch_device
    with _open_checkpoint(model_dir, spec) as checkpoint:
        model = build_model(spec, backend.ops, backend.dtype, role, device=device, held=checkpoint.entries)
        # Checking and copying a tensor takes less time than waking other threads, whose spinning would slow down the
        # threads that pack.
        with torch.inference_mode(), one_thread():
            num_widened = fill_model(model, checkpoint, dtype=backend.dtype, device=device, progress=progress)
    if num_widened and spec.at_load is None:
        model.notes = (
            f"weights: {num_widened} matrices stored in 8-bit floats, or in groups of inputs that are not neighbours, "
            f"became {str(backend.dtype).removeprefix('torch.')}; --quantization int8 keeps the decoder's in 8 bits",
        )
    return model


def _open_checkpoint(model_dir: Path, spec: ModelSpec) -> Checkpoint:
    renames = () if spec.vision is None else vision_class(spec).renames
    checkpoint = open_checkpoint(model_dir, renames, spec.quantization)
    return join_tower(checkpoint, model_dir, spec.tower) if spec.tower else checkpoint
