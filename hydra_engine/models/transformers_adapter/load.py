"""Loads a model through transformers and makes sure that it computes in our stages what it computes by itself.

No list says which models the generic adapter can run: each answers a prompt twice when it is loaded, once by its own
forward and once through our attention and caches, and is refused where the logits differ. Reads safetensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.core.roles import Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.inputs import LanguageInput, VisionInput
from hydra_engine.models.loading.checkpoint import listed
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.loading.weights import Progress, all_finite
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.transformers_adapter.describe_spec import load_config, model_class, probe_picture
from hydra_engine.models.transformers_adapter.model import GenericModel
from hydra_engine.models.transformers_adapter.processor_spec import PROCESSOR_ERRORS, PictureProcessor, in_one_line
from hydra_engine.models.transformers_adapter.spec import SPAN_TOKEN_IDS
from hydra_engine.models.transformers_adapter.surgery import accepts, set_attention

_PROBE_TEXT = "What is in this picture?"
_PROBE_TOKENS = 24  # of text-only models
_BLOCK = 16
# Largest difference of the logits, relative to their spread: rounding, and nothing else.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def load_generic(
    model_dir: Path,
    spec: ModelSpec,
    backend: Backend,
    role: Role,
    progress: Progress | None = None,
) -> GenericModel:
    """Reads the whole checkpoint, whatever the role, and keeps what the role needs. Raises CheckpointError."""
    with SafetensorsCheckpoint(model_dir) as checkpoint:  # complete and not pickled, before anything is read
        total = sum(entry.nbytes for entry in checkpoint.entries.values())
    report = progress or (lambda _done, _total: None)
    report(0, total)
    with _quiet(), torch.inference_mode(False), torch.no_grad():
        module = _load_module(model_dir, spec, backend)
        _check_finite(module)
    with _quiet(), torch.inference_mode():
        try:
            model = _checked(module, spec, backend)
        except PROCESSOR_ERRORS as error:
            raise _refused(spec, in_one_line(error)) from error
    model.keep(role)
    backend.device.trim()
    report(total, total)
    return model


def _load_module(model_dir: Path, spec: ModelSpec, backend: Backend) -> Any:
    trusted = spec.trust_remote_code
    config = load_config(model_dir, trust_remote_code=trusted)
    kind = model_class(config, model_dir, trust_remote_code=trusted)
    try:
        module, info = kind.from_pretrained(
            str(model_dir),
            config=config,
            dtype=backend.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except PROCESSOR_ERRORS as error:
        raise CheckpointError(f"transformers cannot load the weights: {in_one_line(error)}") from error
    missing = sorted(map(str, info["missing_keys"]))
    if missing or info["mismatched_keys"]:
        wrong = listed(missing) if missing else listed(str(key) for key, *_ in info["mismatched_keys"])
        raise CheckpointError(f"the weights do not fit config.json; missing or of the wrong shape: {wrong}")
    return module.eval().to(backend.device.torch_device)


def _check_finite(module: torch.nn.Module) -> None:
    for name, tensor in module.named_parameters():
        if tensor.is_floating_point() and tensor.numel() and not all_finite(tensor):
            raise CheckpointError(f"tensor {name} holds values that are not finite (NaN or infinity)")


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt: a picture with a question behind it, or text alone."""

    inputs: Mapping[str, Tensor]  # for the model's own forward
    span: tuple[int, int]  # first row of the picture and the one behind its last; (0, 0) without one
    arrays: Mapping[str, Tensor]  # of the picture, as a payload has them

    @classmethod
    def of(cls, module: Any, spec: ModelSpec) -> Probe:
        if spec.processor is None:
            ids = torch.arange(_PROBE_TOKENS)[None] * 7 % spec.language.vocab_size
            return cls({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (0, 0), {})
        processor = PictureProcessor.of(spec.processor)
        outputs = processor.outputs(probe_picture(), _PROBE_TEXT)
        ids = outputs["input_ids"][0]
        image_rows = (ids == spec.processor.image_token_id).nonzero()[:, 0]
        span = int(image_rows[0]), int(image_rows[-1]) + 1
        arrays = {name: torch.from_numpy(array) for name, array in processor.expand(probe_picture()).arrays.items()}
        inputs = {name: value for name, value in outputs.items() if accepts(module.forward, name)}
        return cls(inputs, span, {SPAN_TOKEN_IDS: ids[slice(*span)], **arrays})

    @property
    def token_ids(self) -> Tensor:
        return self.inputs["input_ids"][0]

    @property
    def rows(self) -> Tensor:
        """The rows whose logits are compared: the picture's first, which sees nothing of it unless its rows see each
        other, and the last."""
        return torch.tensor([self.span[0], len(self.token_ids) - 1])

    def expected_logits(self, module: Any, dtype: torch.dtype) -> Tensor:
        """[2, V] float32, by the model's own forward. With eager attention, which leaves nothing of a model out."""
        set_attention(module, "eager")
        device = next(module.parameters()).device
        inputs = {
            name: (value.to(dtype) if value.is_floating_point() else value).to(device)
            for name, value in self.inputs.items()
        }
        rows = self.rows.to(device)
        keeps = {"logits_to_keep": rows} if accepts(module.forward, "logits_to_keep") else {}
        logits: Tensor = module(**inputs, use_cache=False, **keeps).logits[0]
        return (logits if keeps else logits.index_select(0, rows)).float()

    def paged_logits(self, model: GenericModel, spec: ModelSpec, backend: Backend) -> tuple[Tensor, list[int]]:
        """[2, V] float32 through caches of this prompt alone, and the layers that wrote to them. In two steps, so that
        what a layer knows of earlier tokens can only come from the caches and from positions. Sets `num_slices`."""
        device, language = backend.device.torch_device, spec.language
        begin, end = self.span
        num_tokens, num_image = len(self.token_ids), end - begin
        images = _cache(num_image, (1, 1), (1, language.hidden_size), backend)
        image_slots = torch.arange(num_image, device=device)
        if num_image:
            arrays = {name: value.to(device) for name, value in self.arrays.items()}
            checkpoints: list[None] = []
            batch = VisionInput((), ((1, 1),), ((1, 1, 1),), image_slots, (arrays,), lambda: checkpoints.append(None))
            model.encode(batch, images)
            model.num_slices = len(checkpoints) + 1
        keys = _cache(num_tokens, (language.num_layers, 2), (language.num_kv_heads, language.head_dim), backend)
        cut = end or num_tokens // 2
        image_rows = torch.arange(begin, end, device=device) if num_image else None
        first, layers = model.step(self._chunk(0, cut, begin, keys, backend, image_rows, image_slots), keys, images)
        rest, _ = model.step(self._chunk(cut, num_tokens, num_tokens - 1, keys, backend), keys, None)
        return torch.cat((first, rest)), layers

    def _chunk(
        self,
        begin: int,
        end: int,
        row: int,
        keys: PagedCache,
        backend: Backend,
        image_rows: Tensor | None = None,
        image_slots: Tensor | None = None,
    ) -> LanguageInput:
        """Tokens [begin, end), with the logits of one of them."""
        device = backend.device.torch_device
        positions = torch.arange(begin, end, device=device)
        count, context = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        blocks = torch.arange(keys.num_blocks, dtype=torch.int32)[None]
        return LanguageInput(
            token_ids=self.token_ids[begin:end].to(device),
            positions=positions,
            slots=positions,
            attention=backend.ops.plan_attention(count, context, blocks),
            logit_rows=torch.tensor([row - begin], device=device),
            position_end=end,
            image_rows=image_rows,
            image_slots=image_slots,
        )


def _cache(num_slots: int, layers: tuple[int, int], heads: tuple[int, int], backend: Backend) -> PagedCache:
    shape = (-(-max(num_slots, 1) // _BLOCK), *layers, _BLOCK, *heads)
    return PagedCache(torch.zeros(shape, dtype=backend.dtype, device=backend.device.torch_device))


def _checked(module: Any, spec: ModelSpec, backend: Backend) -> GenericModel:
    """The module in our stages, compared with what it did before it was taken over."""
    probe = Probe.of(module, spec)
    expected = probe.expected_logits(module, backend.dtype)
    model = GenericModel(module, spec, backend)
    actual, layers = probe.paged_logits(model, spec, backend)
    num_layers = spec.language.num_layers
    if sorted(layers) != list(range(num_layers)):
        raise _refused(spec, f"attention of {len(set(layers))} of its {num_layers} layers is where ours can stand")
    if expected.shape[1] != spec.language.vocab_size:
        raise _refused(spec, f"it has {expected.shape[1]} logits where config.json says {spec.language.vocab_size}")
    difference = float((actual - expected).abs().max() / (expected - expected.mean(1, keepdim=True)).abs().max())
    if not difference <= _TOLERANCES[backend.dtype]:
        raise _refused(
            spec,
            f"its logits differ by {difference:.2g} of their spread from those of its own forward; something in it "
            "does not fit our stages",
        )
    return model


def _refused(spec: ModelSpec, reason: str) -> CheckpointError:
    return CheckpointError(f"{spec.architecture} cannot run through transformers here: {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no advice of transformers on a user's terminal; errors are still shown."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
