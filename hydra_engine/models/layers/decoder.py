"""The Llama decoder (also mistral, qwen2, qwen3) and qwen3_5's hybrid one: tokens and image features in, float32 logits
of the wanted rows out.

Features in further planes of the image cache are added after the first layers (DeepStack, as in Qwen3-VL). Does not
know requests, sampling or how the cache's blocks were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hydra_engine.backend.base import DeferredNorm, PagedCache, Rotary, StepInputs, apply_deferred_norm
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.models.inputs import SCORED_ROWS, LanguageInput
from hydra_engine.models.layers.attention import PagedAttention
from hydra_engine.models.layers.basic import Embedding, GatedMlp, Head, RmsNorm
from hydra_engine.models.layers.hybrid import DeltaNet, GatedAttention
from hydra_engine.models.layers.rotary import RotaryTable, angles_at
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import LanguageSpec, LayerKind


class Decoder:
    """A decoder with its embedding and head. `scope` is the module that contains `model.*` and `lm_head.*`."""

    def __init__(self, scope: Scope, spec: LanguageSpec) -> None:
        self._ops = scope.ops
        self._max_token_id = spec.vocab_size - 1
        model = scope.child("model")
        self._head = Head(scope)
        shape, tied, head = (spec.vocab_size, spec.hidden_size), spec.tie_embeddings, "lm_head.weight"
        self._embed = Embedding(
            model.child("embed_tokens"),
            *shape,
            tied_head=self._head if tied else None,
            substitute=scope.full_name(head) if tied else None,
        )
        # If the config says "tied" but the files contain a head, the head counts, as in transformers 5.
        fill = self._fill_tied_head if tied else self._head.fill
        scope.declare(head, shape, fill, optional=tied, fill_quantized=fill, matrix=True)
        self._layers = tuple(_layers(model, spec))
        # The norm after each layer's sum: the next layer's, or the final one.
        final_norm = RmsNorm(model.child("norm"), spec.hidden_size, spec.rms_eps, centred=spec.centred_norms)
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), final_norm)
        self._rotary = RotaryTable(spec, scope.device)
        self._decodes = scope.ops.recorded(self._decode)
        model.skip("rotary_emb.", *(f"layers.{i}.self_attn.rotary_emb." for i in range(spec.num_layers)))

    def _fill_tied_head(self, weight: Tensor | QuantizedWeight) -> None:
        """Fills the head; if the checkpoint stores the shared tensor only under the head's name, fills the embedding
        too."""
        if self._embed.is_filled:
            self._head.fill(weight)
        else:
            self._embed.fill(weight)

    def __call__(self, batch: LanguageInput, cache: PagedCache, images: PagedCache | None) -> Tensor:
        """Returns the logits of `batch.logit_rows`, [B', V] float32, valid until the next call."""
        wanted, step = batch.logit_rows, StepInputs(batch.slots, batch.attention, batch.states)
        plain = batch.scored is None and batch.image_rows is None
        if plain and batch.attention.max_q == 1 and wanted.shape == batch.slots.shape:
            positions = batch.positions if batch.positions.dim() == 1 else batch.positions[0]
            angles = self._rotary.with_rows(batch.position_end)
            return self._decodes(batch.token_ids, positions, angles, cache, step)
        rotary = self._rotary(batch.positions, batch.position_end)
        hidden, num_deep = self._embed_rows(batch, images), _num_deep(batch, images)
        if batch.scored is not None:
            wanted = torch.cat((batch.scored.rows, wanted))

        def merge(layer: int, residual: Tensor) -> None:
            if layer < num_deep:
                self._merge(residual, batch, images, plane=layer + 1)

        hidden = self._run(hidden, rotary, cache, step, wanted, merge)
        if batch.scored is not None:
            num_scored = batch.scored.rows.shape[0]
            for part in hidden[:num_scored].split(SCORED_ROWS):
                batch.scored.take(self._head(part))
            hidden = hidden[num_scored:]
        return self._head(hidden)

    def _decode(
        self, token_ids: Tensor, positions: Tensor, angles: Tensor, cache: PagedCache, step: StepInputs
    ) -> Tensor:
        return self._head(self._run(self._embed(token_ids), angles_at(angles, positions), cache, step))

    def _run(
        self,
        residual: Tensor,  # [T, C], overwritten
        rotary: Rotary,
        cache: PagedCache,
        step: StepInputs,
        wanted: Tensor | None = None,
        merge: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Runs the layers, calling `merge` in each, and the final norm. Returns [T, C], or only the `wanted` rows of
        it."""
        hidden: Tensor | DeferredNorm = self._layers[0].input_norm(residual)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = wanted if index == last else None
            mixed = layer.mix(hidden, rotary, cache, step, rows)
            if rows is not None:
                residual = residual.index_select(0, rows)
            hidden, residual = layer.post_norm.after_linear(layer.mix.out, mixed, residual)
            inner = layer.mlp.inner(hidden)
            if merge is not None:  # `hidden` is already consumed, so its sum may change
                merge(index, residual)
            hidden, residual = self._next_norms[index].after_linear(layer.mlp.down, inner, residual)
        return apply_deferred_norm(self._ops, hidden)

    def reserve_positions(self, end: int) -> None:
        self._rotary.reserve(end)

    def _embed_rows(self, batch: LanguageInput, images: PagedCache | None) -> Tensor:
        if batch.image_rows is None:
            return self._embed(batch.token_ids)
        # Ids of image rows may lie outside the vocabulary; their embeddings are overwritten.
        hidden = self._embed(batch.token_ids.clamp(0, self._max_token_id))
        self._merge(hidden, batch, images, plane=0)
        return hidden

    def _merge(self, hidden: Tensor, batch: LanguageInput, images: PagedCache | None, *, plane: int) -> None:
        """Writes features of plane 0 over the image rows; adds those of other planes to them."""
        if images is None or batch.image_rows is None or batch.image_slots is None:
            raise ValueError("image_rows: expected their slots and an image cache to read from")
        self._ops.merge_image_tokens(hidden, batch.image_rows, images, batch.image_slots, plane)


def _num_deep(batch: LanguageInput, images: PagedCache | None) -> int:
    """Number of layers followed by a DeepStack merge in this step. It is less than the number of layers, so that the
    last one may drop rows."""
    return 0 if images is None or batch.image_rows is None else images.data.shape[1] - 1


def _layers(model: Scope, spec: LanguageSpec) -> Iterator[DecoderLayer]:
    """Builds the layers; `index` of a layer counts within its kind."""
    counts: dict[LayerKind, int] = {"attention": 0, "delta": 0}
    for index, scope in enumerate(model.children("layers", spec.num_layers, "num_hidden_layers")):
        kind: LayerKind = spec.layer_kinds[index] if spec.layer_kinds else "attention"
        yield DecoderLayer(scope, spec, kind, counts[kind])
        counts[kind] += 1


class DecoderLayer:
    def __init__(self, scope: Scope, spec: LanguageSpec, kind: LayerKind, index: int) -> None:
        size, eps, centred = spec.hidden_size, spec.rms_eps, spec.centred_norms
        self.input_norm = RmsNorm(scope.child("input_layernorm"), size, eps, centred=centred)
        # [T, C] -> the input of its `out`, or only the given rows of it. Caches are written for all rows in any case.
        self.mix: PagedAttention | GatedAttention | DeltaNet
        if kind == "attention":
            attention = GatedAttention if spec.output_gate else PagedAttention
            self.mix = attention(scope.child("self_attn"), spec, index)
        else:
            assert spec.delta is not None
            self.mix = DeltaNet(scope.child("linear_attn"), spec.delta, size, eps, index)
        self.post_norm = RmsNorm(scope.child("post_attention_layernorm"), size, eps, centred=centred)
        self.mlp = GatedMlp(scope.child("mlp"), spec.hidden_size, spec.intermediate_size, spec.hidden_act)
