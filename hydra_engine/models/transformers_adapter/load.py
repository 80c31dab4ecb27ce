"""Loads a model through transformers and checks that it computes in the engine's stages what it computes by itself.

No list names the models that the generic adapter can run: each answers a prompt twice when it is loaded, once by its
own forward and once through the engine's attention and caches, and is refused if the logits differ. Reads only
safetensors.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.core.roles import Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import list_names
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.loading.weights import Progress, all_finite
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.transformers_adapter.counts import bounded_modules, check_counts
from hydra_engine.models.transformers_adapter.describe_spec import cannot_run, load_config, model_class, quiet_logging
from hydra_engine.models.transformers_adapter.failures_spec import PROCESSOR_ERRORS, describe_error
from hydra_engine.models.transformers_adapter.model import GenericModel
from hydra_engine.models.transformers_adapter.probe import PagedProbe, Probe

# Largest difference of the logits, relative to their spread: rounding, and nothing else.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def load_generic(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
) -> GenericModel:
    """Reads the whole checkpoint and keeps the parts that `role` needs. Raises CheckpointError if it cannot be
    served."""
    with SafetensorsCheckpoint(model_dir) as checkpoint:  # complete and not pickled, before anything is read
        entries = checkpoint.entries
    total = sum(entry.nbytes for entry in entries.values())
    report = progress or (lambda _done, _total: None)
    report(0, total)
    with quiet_logging(), torch.inference_mode(False), torch.no_grad():
        module = _load_module(model_dir, spec, backend, entries)
        _check_finite(module)
    with quiet_logging(), torch.inference_mode():
        try:
            model = _checked(module, spec, backend)
        except PROCESSOR_ERRORS as error:
            raise cannot_run(spec.architecture, spec.no_images_because or describe_error(error)) from error
    model.drop_unused(role)
    backend.device.trim()
    report(total, total)
    return model


def check_generic_layers(model_dir: Path, spec: ModelSpec, held: Collection[str]) -> None:
    """Raises CheckpointError if config.json has more layers than the tensors in `held`."""
    check_counts(load_config(model_dir, trust_remote_code=spec.trust_remote_code), held)


def _load_module(model_dir: Path, spec: ModelSpec, backend: Backend, held: Collection[str]) -> Any:
    """Loads the module with transformers. `held`: names of the checkpoint's tensors."""
    trusted = spec.trust_remote_code
    config = load_config(model_dir, trust_remote_code=trusted)
    check_counts(config, held)
    kind = model_class(config, model_dir, trust_remote_code=trusted)
    try:
        with bounded_modules(len(held)):
            module, info = kind.from_pretrained(
                str(model_dir),
                config=config,
                dtype=backend.dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot load the weights: {describe_error(error)}") from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing or info["mismatched_keys"]:
        wrong = list_names(missing) if missing else list_names(str(key) for key, *_ in info["mismatched_keys"])
        raise CheckpointError(f"the weights do not fit config.json; missing or of the wrong shape: {wrong}")
    return module.eval().to(backend.device.torch_device)


def _check_finite(module: torch.nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point() and tensor.numel() and not all_finite(tensor):
            raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")


def _checked(module: Any, spec: ModelSpec, backend: Backend) -> GenericModel:
    """Wraps the module for the engine's stages. Raises CheckpointError if its logits differ from its own forward's,
    alone or beside a request of another length."""
    probe = Probe.from_spec(module, spec)
    expected = probe.expected_logits(module, backend.dtype)
    model = GenericModel(module, spec, backend)
    paged = PagedProbe(probe, model, spec, backend)
    alone = paged.logits()
    num_layers, most = spec.language.num_layers, _TOLERANCES[backend.dtype]
    problem = ""
    if sorted(paged.layers) != list(range(num_layers)):
        problem = f"attention of {len(set(paged.layers))} of its {num_layers} layers is where ours can stand"
    elif expected.shape[1] != spec.language.vocab_size:
        problem = f"it has {expected.shape[1]} logits where config.json says {spec.language.vocab_size}"
    elif not (difference := _difference(alone, expected)) <= most:
        problem = (
            f"its logits differ by {difference:.2g} of their spread from those of its own forward; something in it "
            "does not fit our stages"
        )
    else:
        beside = paged.logits_beside()
        if not (difference := _difference(beside, expected[-1:])) <= most:
            problem = (
                f"its logits differ by {difference:.2g} of their spread beside a request of {spec.max_model_len} "
                "tokens; what it computes for one request depends on how long others are"
            )
        model.deterministic = model.deterministic and torch.equal(beside, alone[-1:])
    if problem:
        raise cannot_run(spec.architecture, problem)
    return model


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the spread of `expected`."""
    return float((actual - expected).abs().max() / (expected - expected.mean(1, keepdim=True)).abs().max())
