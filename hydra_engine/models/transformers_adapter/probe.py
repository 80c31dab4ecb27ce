"""The prompt that a model answers when it is loaded: by its own forward, in the engine's stages, and there beside
another request.

Knows the model's processor; reads no files of weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.models.inputs import LanguageInput, VisionInput
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.transformers_adapter.describe_spec import probe_picture
from hydra_engine.models.transformers_adapter.model import GenericModel
from hydra_engine.models.transformers_adapter.processor_spec import PictureProcessor
from hydra_engine.models.transformers_adapter.spec import SPAN_TOKEN_IDS
from hydra_engine.models.transformers_adapter.surgery import accepts, set_attention

_SIZES = ((64, 64), (96, 64))  # of its pictures
_TEXTS = ("What is in this picture", " and in this one?")  # after the pictures
_NUM_TOKENS = 24  # of text-only models
_NUM_BESIDE = 7  # tokens of the other request in a step
_BLOCK = 16
# Outputs of processors for training: with them models return a loss.
_NO_INPUTS = ("labels",)


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt of pictures, each followed by a text, or of text alone."""

    inputs: Mapping[str, Tensor]  # for the model's own forward
    spans: Sequence[tuple[int, int]]  # of each picture, [first row, end)
    arrays: Sequence[Mapping[str, Tensor]]  # of each picture, as payloads have them

    @classmethod
    def from_spec(cls, module: Any, spec: ModelSpec) -> Probe:
        if spec.processor is None:
            count = min(_NUM_TOKENS, spec.language.max_position - 1)  # as many as a prompt may have
            ids = torch.arange(count)[None] * 7 % spec.language.vocab_size
            return cls({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (), ())
        processor = PictureProcessor.from_spec(spec.processor)
        sizes = _SIZES if spec.processor.joins else _SIZES[:1]
        pictures = [probe_picture(size, turns) for turns, size in enumerate(sizes)]
        outputs = processor.outputs(*zip(pictures, _TEXTS, strict=False))
        ids = outputs["input_ids"][0]
        is_image = ids == spec.processor.image_token_id
        spans, arrays, end = [], [], 0
        for picture in pictures:
            found = processor.expand(picture)
            begin = end + int(is_image[end:].nonzero()[0, 0])
            end = begin + found.num_tokens
            spans.append((begin, end))
            values = {name: torch.from_numpy(array) for name, array in found.arrays.items()}
            arrays.append({SPAN_TOKEN_IDS: ids[begin:end], **values})
        inputs = {
            name: value for name, value in outputs.items() if name not in _NO_INPUTS and accepts(module.forward, name)
        }
        return cls(inputs, spans, arrays)

    @property
    def token_ids(self) -> Tensor:
        return self.inputs["input_ids"][0]

    @property
    def rows(self) -> Tensor:
        """Rows whose logits are compared: the first of each picture, which depends on the picture only if its rows
        attend to each other, and the last of the prompt."""
        return torch.tensor([*(begin for begin, _ in self.spans), len(self.token_ids) - 1])

    def expected_logits(self, module: Any, dtype: torch.dtype) -> Tensor:
        """Returns [rows, V] float32 from the model's own forward, with eager attention, which omits no feature of a
        model. Leaves the module set to eager attention."""
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


class PagedProbe:
    """Runs the probe in the engine's stages, with its own caches. Sets `num_slices` of the model."""

    def __init__(self, probe: Probe, model: GenericModel, spec: ModelSpec, backend: Backend) -> None:
        self._probe, self._model, self._spec, self._backend = probe, model, spec, backend
        self._device = backend.device.torch_device
        language, counts = spec.language, [end - begin for begin, end in probe.spans]
        self._images = self._cache(sum(counts), (1, 1), (1, language.hidden_size))
        shape = (language.num_layers, 2), (language.num_kv_heads, language.head_dim)
        self._keys = self._cache(len(probe.token_ids) + _BLOCK, *shape)
        ends = [end for _, end in probe.spans] or [len(probe.token_ids) // 2]
        self._pieces = [piece for piece in itertools.pairwise((0, *ends, len(probe.token_ids))) if piece[0] < piece[1]]
        self.layers: list[int] = []  # that write keys and values
        if not counts:
            return
        arrays = tuple({name: value.to(self._device) for name, value in each.items()} for each in probe.arrays)
        checkpoints: list[None] = []
        for index, one in enumerate(arrays):
            slots = torch.arange(sum(counts[:index]), sum(counts[: index + 1]), device=self._device)
            batch = VisionInput((), ((1, 1),), ((1, 1, 1),), slots, (one,), lambda: checkpoints.append(None))
            checkpoints.clear()
            model.encode(batch, self._images)
        model.num_slices = len(checkpoints) + 1

    def logits(self) -> Tensor:
        """Returns [rows, V] float32. Runs several steps, each ending after a picture, so that earlier tokens are known
        only through caches and positions."""
        steps = [self._model.step(self._step(*piece), self._keys, self._images) for piece in self._pieces]
        self.layers = steps[-1][1]
        return torch.cat([logits for logits, _ in steps])

    def logits_beside(self) -> Tensor:
        """Returns the last row's logits, [1, V] float32, from the last step run again after the rows of another
        request, which are at the end of the longest context."""
        beside = min(_NUM_BESIDE, self._spec.language.max_position)
        batch = self._step(*self._pieces[-1], beside)
        return self._model.step(batch, self._keys, self._images)[0][-1:]

    def _step(self, begin: int, end: int, beside: int = 0) -> LanguageInput:
        """Builds a step of tokens [begin, end) with the logits of the compared rows among them, after `beside` rows of
        another request, whose keys are in the last block."""
        device, count, last = self._device, end - begin, self._spec.language.max_position
        own, other, num_blocks = torch.arange(begin, end), torch.arange(beside), self._keys.num_blocks
        blocks = torch.arange(num_blocks, dtype=torch.int32).expand(2, -1).clone()
        blocks[0, 0] = num_blocks - 1
        first = 0 if beside else 1
        context = torch.tensor([beside, end], dtype=torch.int32)[first:]
        bounds = torch.tensor([0, beside, beside + count], dtype=torch.int32)[first:]
        rows = self._probe.rows
        is_image = torch.zeros(len(self._probe.token_ids), dtype=torch.bool)
        for span in self._probe.spans:
            is_image[slice(*span)] = True
        slots = is_image.cumsum(0) - 1
        image_rows = is_image[begin:end].nonzero()[:, 0]
        return LanguageInput(
            token_ids=torch.cat((other, self._probe.token_ids[begin:end])).to(device),
            positions=torch.cat((other + last - beside, own)).to(device),
            slots=torch.cat((other + (num_blocks - 1) * _BLOCK, own)).to(device),
            attention=self._backend.ops.plan_attention(bounds, context, blocks[first:]),
            logit_rows=(rows[(rows >= begin) & (rows < end)] - begin + beside).to(device),
            position_end=max(end, last if beside else 0),
            image_rows=(image_rows + beside).to(device) if len(image_rows) else None,
            image_slots=slots[begin:end][image_rows].to(device) if len(image_rows) else None,
        )

    def _cache(self, num_slots: int, layers: tuple[int, int], heads: tuple[int, int]) -> PagedCache:
        shape = (-(-max(num_slots, 1) // _BLOCK), *layers, _BLOCK, *heads)
        return PagedCache(torch.zeros(shape, dtype=self._backend.dtype, device=self._device))
