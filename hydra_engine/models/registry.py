"""From a spec to a model: which parts a family has, which of them a role needs, and their weights.

Knows families; does not know files (`weights.py`) or arithmetic (the backend).
"""

from __future__ import annotations

from pathlib import Path

import torch

from hydra_engine.backend.base import Backend, Ops
from hydra_engine.core.roles import Role
from hydra_engine.models.decoder import Decoder
from hydra_engine.models.parameters import Demands, Scope
from hydra_engine.models.projector import LlavaProjector
from hydra_engine.models.vision_clip import ClipTower
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.models.weights import Checkpoint, Progress, fill_model
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.llava import LlavaVisionSpec

_CPU = torch.device("cpu")

_TRIM_BYTES = 64 << 20  # of weights read between two trims: bounds what loading holds beyond the weights


def build_model(
    spec: ModelSpec, ops: Ops, dtype: torch.dtype, role: Role, *, device: torch.device = _CPU
) -> VisionLanguageModel:
    """The parts that `role` needs, with all slots still empty."""
    demands = Demands()
    root = Scope(ops, dtype, device, demands)
    tower = projector = decoder = None
    if isinstance(spec.vision, LlavaVisionSpec):
        if role.needs_vision:
            tower = ClipTower(root.at("vision_tower"), spec.vision)
            projector = LlavaProjector(root.at("multi_modal_projector"), spec.vision)
        else:
            root.skip("vision_tower.", "multi_modal_projector.")
    elif spec.vision is not None:
        raise ValueError(f"spec: expected a family with a known vision tower, got {spec.family!r}")
    language = root if spec.vision is None else root.at("language_model")
    if role.needs_language:
        decoder = Decoder(language, spec.language)
    else:
        language.skip("model.", "lm_head.")
    return VisionLanguageModel(ops, demands, tower=tower, projector=projector, decoder=decoder)


def load_model(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
    *,
    check_finite: bool = True,
) -> VisionLanguageModel:
    """Reads only what `role` needs. Raises `CheckpointError` naming every tensor that does not fit."""
    device = backend.device.torch_device
    trimmed = 0

    def advance(done: int, total: int) -> None:
        nonlocal trimmed
        if done - trimmed >= _TRIM_BYTES or done == total:
            trimmed = done
            backend.device.trim()
        if progress is not None:
            progress(done, total)

    model = build_model(spec, backend.ops, backend.dtype, role, device=device)
    with Checkpoint(model_dir, nested=spec.vision is not None) as checkpoint, torch.inference_mode():
        fill_model(model, checkpoint, dtype=backend.dtype, device=device, progress=advance, check_finite=check_finite)
    return model
