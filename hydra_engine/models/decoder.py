"""The Llama decoder (also mistral and qwen2): tokens and image features in, float32 logits of the wanted rows out.

With `attention_bias` the query, key and value projections have biases and the output projection has none (qwen2).
Does not know requests, sampling or how the cache's blocks were chosen.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hydra_engine.backend.base import Activation, PagedCache
from hydra_engine.models.attention import PagedAttention
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.models.layers import Embedding, GatedMlp, Head, RmsNorm
from hydra_engine.models.parameters import Scope
from hydra_engine.models.rotary import RotaryTable
from hydra_engine.specs.base import LanguageSpec


class Decoder:
    """`scope` is the place of `model.*` and `lm_head.*`."""

    def __init__(self, scope: Scope, spec: LanguageSpec) -> None:
        self._ops = scope.ops
        self._max_token_id = spec.vocab_size - 1
        model = scope.at("model")
        self._head = Head(scope)
        if spec.tie_embeddings:
            scope.skip("lm_head.weight")
        else:
            scope.want("lm_head.weight", (spec.vocab_size, spec.hidden_size), self._head.fill)
        tied_head = self._head if spec.tie_embeddings else None
        self._embed = Embedding(model.at("embed_tokens"), spec.vocab_size, spec.hidden_size, tied_head=tied_head)
        self._layers = tuple(DecoderLayer(model.at(f"layers.{i}"), spec, i) for i in range(spec.num_layers))
        # Each layer's sum is followed by a norm: the next layer's, and at the end the final one.
        final_norm = RmsNorm(model.at("norm"), spec.hidden_size, spec.rms_eps)
        self._next_norms = (*(layer.input_norm for layer in self._layers[1:]), final_norm)
        self._rotary = RotaryTable(spec, scope.device)
        model.skip("rotary_emb.", *(f"layers.{i}.self_attn.rotary_emb." for i in range(spec.num_layers)))

    def __call__(self, batch: LanguageInput, cache: PagedCache, images: PagedCache | None) -> Tensor:
        """[B', V] float32"""
        cos, sin = self._rotary(batch.positions, batch.attention.max_context)  # each [T, D/2]
        residual = self._embed_rows(batch, images)
        hidden = self._layers[0].input_norm(residual)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            rows = batch.logit_rows if index == last else None
            hidden = layer.attention(hidden, cos, sin, cache, batch, rows)
            if rows is not None:
                residual = residual.index_select(0, rows)
            hidden, residual = layer.post_norm.add(hidden, residual)
            hidden, residual = self._next_norms[index].add(layer.mlp(hidden), residual)
        return self._head(hidden)

    def _embed_rows(self, batch: LanguageInput, images: PagedCache | None) -> Tensor:
        if batch.image_rows is None or batch.image_slots is None:
            return self._embed(batch.token_ids)
        if images is None:
            raise ValueError("image_rows: expected an image cache to read from, got none")
        # Ids of image rows may lie outside the vocabulary; their embeddings are overwritten.
        hidden = self._embed(batch.token_ids.clamp(0, self._max_token_id))
        self._ops.merge_image_tokens(hidden, batch.image_rows, images, batch.image_slots)
        return hidden


class DecoderLayer:
    def __init__(self, scope: Scope, spec: LanguageSpec, index: int) -> None:
        self.input_norm = RmsNorm(scope.at("input_layernorm"), spec.hidden_size, spec.rms_eps)
        self.attention = PagedAttention(scope.at("self_attn"), spec, index)
        self.post_norm = RmsNorm(scope.at("post_attention_layernorm"), spec.hidden_size, spec.rms_eps)
        act = cast(Activation, spec.hidden_act)
        self.mlp = GatedMlp(scope.at("mlp"), spec.hidden_size, spec.intermediate_size, act)
