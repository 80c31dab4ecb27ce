"""From a spec to a model: which parts a family has, which of them a role needs, and their weights.

Knows families; does not know files (`weights.py`) or arithmetic (the backend).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hydra_engine.backend.base import Backend, Ops
from hydra_engine.core.roles import Role
from hydra_engine.errors import ConfigError
from hydra_engine.models.decoder import Decoder
from hydra_engine.models.family import Family
from hydra_engine.models.internvl import INTERNVL
from hydra_engine.models.llava import LLAVA
from hydra_engine.models.llava_next import LLAVA_NEXT
from hydra_engine.models.minicpmv import MINICPMV
from hydra_engine.models.parameters import Demands, Scope
from hydra_engine.models.qwen2_5_vl import QWEN2_5_VL
from hydra_engine.models.qwen2_vl import QWEN2_VL
from hydra_engine.models.qwen3_vl import QWEN3_VL
from hydra_engine.models.random_weights import fill_random
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.models.weights import Checkpoint, Progress, fill_model
from hydra_engine.specs.base import ModelSpec
from hydra_engine.specs.generic import GenericSpec

if TYPE_CHECKING:
    from hydra_engine.models.generic import GenericModel

_CPU = torch.device("cpu")

_TRIM_BYTES = 64 << 20  # of weights read between two trims: bounds what loading holds beyond the weights


FAMILIES: dict[str, Family] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "internvl": INTERNVL,
    "minicpmv4_6": MINICPMV,
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
}


def build_model(
    spec: ModelSpec, ops: Ops, dtype: torch.dtype, role: Role, *, device: torch.device = _CPU
) -> VisionLanguageModel:
    """The parts that `role` needs, with all slots still empty."""
    demands = Demands()
    root = Scope(ops, dtype, device, demands)
    vision = decoder = None
    if spec.vision is not None:
        family = FAMILIES[spec.family]
        if role.needs_vision:
            vision = family.build_vision(root, spec.vision)
        else:
            root.skip(*family.vision_names)
    language = root if spec.vision is None else root.at("language_model")
    root.skip("mtp.")  # layers that guess further tokens, beside some published decoders
    if role.needs_language:
        decoder = Decoder(language, spec.language)
    else:
        language.skip("model.", "lm_head.")
    return VisionLanguageModel(ops, demands, vision=vision, decoder=decoder)


def load_model(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
    *,
    check_finite: bool = True,
    random_weights: bool = False,
) -> VisionLanguageModel | GenericModel:
    """Reads only what `role` needs. Raises `CheckpointError` naming every tensor that does not fit. `random_weights`:
    reads nothing and draws them."""
    if isinstance(spec, GenericSpec):
        if random_weights:
            raise ConfigError("load_format random needs a native model", param="load_format")
        from hydra_engine.models.generic_load import (
            load_generic,  # imports transformers, which native models do without
        )

        return load_generic(spec, backend, role, progress, check_finite=check_finite)
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
    if random_weights:
        with torch.inference_mode():
            fill_random(model, dtype=backend.dtype, device=device, progress=advance)
        return model
    renames = () if spec.vision is None else FAMILIES[spec.family].renames
    with Checkpoint(model_dir, renames) as checkpoint, torch.inference_mode():
        fill_model(model, checkpoint, dtype=backend.dtype, device=device, progress=advance, check_finite=check_finite)
    return model
