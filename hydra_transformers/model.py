"""A model that runs transformers' modules in the engine's stages: its tower in the vision lane, its decoder over the
paged cache with a whole step packed into one sequence.

Attention is the engine's (`attention.py`), and so are matrix products (`surgery.py`), because a row's result must not
depend on its batch. Everything around them, scaled embeddings, norms, positions, capped logits, is the model's own
code.

An encode waits between pictures, and before every module of a module list outside the decoder: those lists are the
layers of towers, however a model calls them. Hooks call the checkpoint there; a tower that keeps its layers elsewhere
is cut between pictures alone. Does not know requests or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import DTYPES
from hydra_engine.core.instances import Role
from hydra_engine.models.layers.decoder import SCORED_ROWS, LanguageInput
from hydra_engine.models.layers.vision import VisionInput, no_checkpoint
from hydra_engine.models.specs.base import SPAN_TOKEN_IDS, ModelSpec
from hydra_engine.models.vlm import one_thread
from hydra_transformers.attention import NAME, STEP, Step, register
from hydra_transformers.processor import TokenTypes
from hydra_transformers.spec import DEEPSTACK
from hydra_transformers.surgery import (
    accepts,
    call_before_listed,
    disable_temperatures,
    drop_all_but,
    has_products,
    replace,
    replace_head,
    replace_linears,
    set_attention,
    weights_bytes,
)

NO_TYPES: Mapping[str, TokenTypes] = {}


class GenericModel:
    """A model through transformers. `module` has a language head; it is modified in place and owned by this object.
    `token_types`: arguments of its forward that are made of token ids.

    `num_slices` is the number of pieces in the encode of one picture, 0 without a tower; it is measured at the first
    encode, during loading."""

    can_be_captured = False  # its modules may synchronise or branch on data
    tower = None

    def __init__(
        self, module: Any, spec: ModelSpec, backend: Backend, token_types: Mapping[str, TokenTypes] = NO_TYPES
    ) -> None:
        register()
        self._token_types = token_types
        self._module = module
        self._spec = spec
        self._sees_itself = spec.processor is not None and spec.processor.bidirectional
        self._ops = backend.ops
        self._dtype = backend.dtype
        self._decoder = module.get_decoder()
        self._embeddings = module.get_input_embeddings()
        has_function = hasattr(module, "get_image_features")
        self._get_image_features: Any = getattr(
            module if has_function else module.base_model, "get_image_features", None
        )
        self._checkpoint = no_checkpoint  # of the encode that runs
        call_before_listed(module, self._decoder, lambda: self._checkpoint())
        self.num_slices = 0
        self.notes = tuple(_notes(spec, self._decoder.config))
        self._keeps_rows = accepts(module.forward, "logits_to_keep")
        set_attention(module, NAME)
        disable_temperatures(self._decoder)
        stored = DTYPES.get(spec.dtype, backend.dtype)
        replace_linears(self._decoder, backend.ops, backend.dtype, stored)
        self._head = replace_head(module, backend.ops, backend.dtype, stored)
        # Products that are not ours (the experts of a mixture, say) may depend on how many rows share them.
        self.deterministic = not has_products(self._decoder)

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(self._module)

    def drop_unused(self, role: Role) -> None:
        """Drops the parts that the role does not need. The embeddings always stay: the vision lane needs them for
        text inside a span."""
        if not role.needs_vision:
            drop_all_but(self._module, (self._decoder, self._head, self._embeddings))
            self.num_slices = 0
        if not role.needs_language:
            replace(self._module, self._head, None)
            drop_all_but(self._decoder, (self._embeddings,))

    # ---- vision

    def encode(self, batch: VisionInput, image_cache: PagedCache) -> None:
        """Encodes span by span, because transformers' towers take one shape at a time. Ignores `piece_rows`."""
        begin = 0
        self._checkpoint = batch.checkpoint
        try:
            for arrays in batch.arrays:
                if begin:
                    batch.checkpoint()
                end = begin + arrays[SPAN_TOKEN_IDS].shape[0]
                rows = self._span(dict(arrays))
                self._ops.write_cache(image_cache, 0, (rows.unsqueeze(1),), batch.slots[begin:end])
                begin = end
        finally:
            self._checkpoint = no_checkpoint

    def _span(self, arrays: dict[str, Tensor]) -> Tensor:
        """Returns [num_tokens, C]: features at image tokens, embeddings at the text between them."""
        assert self._spec.image_token_id is not None
        ids = arrays.pop(SPAN_TOKEN_IDS)
        is_image = ids == self._spec.image_token_id
        features = self._features(arrays)
        expected = (int(is_image.sum()), self._spec.language.hidden_size)
        if features.shape != expected:
            raise ValueError(f"get_image_features: expected {list(expected)}, got {list(features.shape)}")
        rows = self._embed(ids).to(self._dtype)
        rows[is_image] = features
        return rows

    def _features(self, arrays: dict[str, Tensor]) -> Tensor:
        """Returns [M, C]. Newer models return an object, older ones the features, or a list for several pieces."""
        values = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in arrays.items()}
        output = self._get_image_features(**values)
        if getattr(output, "deepstack_features", None):
            raise ValueError(DEEPSTACK)
        output = getattr(output, "pooler_output", output)
        if output is None:
            raise ValueError(
                "its image features are not ready when get_image_features ends; its forward goes on with them"
            )
        pieces = [output] if isinstance(output, Tensor) else list(output)
        return torch.cat([piece.flatten(0, -2) for piece in pieces]).to(self._dtype)

    # ---- language

    def reserve_positions(self, end: int) -> None:
        raise ValueError(f"reserve_positions: expected a model that can be captured, to reserve {end}")

    def forward(self, batch: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None = None) -> Tensor:
        """Returns the logits of `batch.logit_rows`, [B', V] float32.

        The head is inside the module, so a step with more than SCORED_ROWS scored rows runs again for each slice of
        them."""
        scored = batch.scored
        if scored is None:
            return self.step(batch, kv_cache, image_cache)[0]
        *slices, rest = scored.rows.split(SCORED_ROWS)
        for rows in slices:
            scored.take(self.step(dataclasses.replace(batch, logit_rows=rows), kv_cache, image_cache)[0])
        last = dataclasses.replace(batch, logit_rows=torch.cat((rest, batch.logit_rows)))
        logits = self.step(last, kv_cache, image_cache)[0]
        scored.take(logits[: rest.shape[0]])
        return logits[rest.shape[0] :]

    def step(
        self, batch: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None
    ) -> tuple[Tensor, list[int]]:
        """Returns the logits, and the layers that wrote keys and values, in order."""
        step = Step(self._ops, kv_cache, batch, self._sees_itself)
        arguments: dict[str, Any] = {STEP: step}
        if self._keeps_rows:
            arguments["logits_to_keep"] = batch.logit_rows
        for name, types in self._token_types.items():
            arguments[name] = self._types_of(batch, types)
        # With several threads torch computes the remainder of a thread's share with other instructions, so a row's
        # activations would depend on the number of rows. The engine's ops have their own threads.
        with one_thread():
            hidden = self._embed_rows(batch, image_cache)
            output = self._module(
                inputs_embeds=hidden[None],
                position_ids=batch.positions.unsqueeze(-2),  # [1, T], or [3, 1, T] with three axes
                # Of any content: with a mask given, transformers looks for no sequences of its own in the positions.
                attention_mask=torch.ones((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device),
                use_cache=False,
                **arguments,
            )
            logits: Tensor = output.logits[0]
        if not self._keeps_rows:
            logits = logits.index_select(0, batch.logit_rows)
        return logits.float(), step.layers

    def _types_of(self, batch: LanguageInput, types: TokenTypes) -> Tensor:
        """Returns [1, T]. A mark that the model writes counts as one of a prompt, which it is in the next turn."""
        ids = batch.token_ids
        found = torch.zeros_like(ids)
        for id, number in types.items():
            found[ids == id] = number
        if batch.image_rows is not None and self._spec.image_token_id is not None:
            found[batch.image_rows] = types.get(self._spec.image_token_id, 0)
        return found[None]

    def _embed_rows(self, batch: LanguageInput, images: PagedCache | None) -> Tensor:
        hidden = self._embed(batch.token_ids).to(self._dtype).contiguous()
        if batch.image_rows is not None and batch.image_slots is not None:
            if images is None:
                raise ValueError("image_rows: expected an image cache to read from, got none")
            self._ops.merge_image_tokens(hidden, batch.image_rows, images, batch.image_slots)
        return hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Returns [T, C]. Ids of image rows may be outside the vocabulary; their embeddings are overwritten."""
        embedded: Tensor = self._embeddings(token_ids.clamp(0, self._embeddings.weight.shape[0] - 1))
        return embedded


def _notes(spec: ModelSpec, text: Any) -> Iterator[str]:
    longest = spec.language.max_position
    if longest < (of_model := getattr(text, "max_position_embeddings", longest)):
        yield (
            f"the context ends at {longest} of the model's {of_model} tokens: what longer requests compute depends on "
            "the length of a whole call, and calls are steps that requests share"
        )
    if spec.one_picture_because:
        yield f"one picture a request: {spec.one_picture_because}"
    if spec.no_images_because:
        yield f"text alone: {spec.no_images_because}"
