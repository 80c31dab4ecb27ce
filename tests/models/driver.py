"""Plays the worker for one model: poisoned paged caches, shuffled block tables, packed steps over several requests.

Knows how slots follow from block tables. Makes no policy: a test says which request advances by how many tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.base import AttentionPlan, Backend, PagedCache, StateCache, StateRows, States
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.base import LanguageSpec, ModelSpec
from hydra_engine.models.specs.registry import load_spec

GARBAGE = 2**30  # entries of a block table beyond its end
NUM_PLACES = 64  # of recurrent states
OUTSIDE = -5  # token ids at image rows: the prompt's placeholders need not be in the vocabulary


class Span(NamedTuple):
    """An image span, as a vision plan and its payload describe it."""

    pixels: Tensor  # uint8 [pictures, height, width, 3]
    source: tuple[int, int]
    grid: tuple[int, int, int]
    num_tokens: int
    arrays: Mapping[str, Tensor] = {}


@dataclass(eq=False)
class Request:
    token_ids: list[int]
    image_slots: dict[int, int]  # prompt position -> slot in the image cache
    rope: Tensor | None = None  # [3, num_prompt], for models with multimodal rotary positions
    rope_delta: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    places: list[int] = field(default_factory=list)  # of its states: the first is read, the second written

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


class Driver:
    def __init__(
        self,
        model_dir: Path,
        backend: Backend,
        *,
        role: Role = EPD,
        block_size: int = 4,
        image_block_size: int = 3,
        num_blocks: int = 256,
        seed: int = 0,
        options: SpecOptions | None = None,
    ) -> None:
        self.spec: ModelSpec = load_spec(model_dir, options)
        self.backend = backend
        self.model = load_model(model_dir, self.spec, backend, role)
        language = self.spec.language
        shape = (num_blocks, language.num_kv_layers, 2, block_size, language.num_kv_heads, language.head_dim)
        self.kv_cache = PagedCache(torch.full(shape, float("nan"), dtype=backend.dtype))
        planes = 1 if self.spec.vision is None else self.spec.vision.num_planes
        image_shape = (num_blocks, planes, 1, image_block_size, 1, language.hidden_size)
        self.image_cache = PagedCache(torch.full(image_shape, float("nan"), dtype=backend.dtype))
        self.states = _poisoned_states(self.spec.language, backend.dtype)
        self._random = random.Random(seed)
        self._num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Forgets all requests; their blocks may be used again, in another order."""
        self._free = self._random.sample(range(self._num_blocks), self._num_blocks)
        self._free_image = self._random.sample(range(self._num_blocks), self._num_blocks)
        self._free_places = self._random.sample(range(NUM_PLACES), NUM_PLACES)

    def embeddings(self, request: Request) -> Tensor:
        """[T, C]: what goes into the first layer for the whole prompt."""
        rows = sorted(request.image_slots)
        decoder = self.model._decoder
        assert decoder is not None
        batch = LanguageInput(
            token_ids=torch.tensor(request.token_ids),
            positions=torch.arange(len(request.token_ids)),
            slots=torch.empty(0, dtype=torch.int64),
            attention=self._plan([(self.request([0]), 0)]),
            logit_rows=torch.empty(0, dtype=torch.int64),
            position_end=len(request.token_ids),
            image_rows=torch.tensor(rows),
            image_slots=torch.tensor([request.image_slots[row] for row in rows]),
        )
        with torch.inference_mode():
            return decoder._embed_rows(batch, self.image_cache)

    def encode(self, spans: Sequence[Span], **slicing: Any) -> list[list[int]]:
        """Encodes `spans`; returns the slots of the features of each. `slicing`: checkpoint and piece_rows of the
        input."""
        size = self.image_cache.block_size
        found = []
        for span in spans:
            blocks = [self._free_image.pop() for _ in range(-(-span.num_tokens // size))]
            found.append([blocks[i // size] * size + i % size for i in range(span.num_tokens)])
        batch = VisionInput(
            pixels=tuple(span.pixels for span in spans),
            sources=tuple(span.source for span in spans),
            grids=tuple(span.grid for span in spans),
            slots=torch.tensor([slot for slots in found for slot in slots]),
            arrays=tuple(span.arrays for span in spans if span.arrays),
            **slicing,
        )
        with torch.inference_mode():
            self.model.encode(batch, self.image_cache)
        return found

    def features(self, slots: Sequence[int], plane: int = 0) -> Tensor:
        """[M, C]"""
        with torch.inference_mode():
            return self.backend.ops.gather_cache(self.image_cache, plane, 0, torch.tensor(slots)).squeeze(1)

    def request(
        self,
        token_ids: Sequence[int],
        spans: Sequence[tuple[int, Sequence[int]]] = (),
        rope: Tensor | None = None,
        rope_delta: int = 0,
    ) -> Request:
        """`spans`: (first token, slots of the features) of each image span."""
        ids, slots = list(token_ids), {}
        for start, found in spans:
            for offset, slot in enumerate(found):
                slots[start + offset] = slot
                ids[start + offset] = OUTSIDE
        if rope is None and self.spec.language.rope_sections is not None:
            rope = torch.arange(len(ids)).expand(3, -1)
        return Request(ids, slots, rope, rope_delta)

    def step(
        self, work: Sequence[tuple[Request, int]], *, all_logits: bool = False, want_logits: bool = True
    ) -> list[Tensor]:
        """Computes that many more tokens of each request; per request the logits of its last row, or of all or none."""
        token_ids, positions, slots, image_rows, image_slots, wanted, counts = [], [], [], [], [], [], []
        for request, count in work:
            begin, end = request.num_computed, request.num_computed + count
            self._reserve(request, end)
            for position in range(begin, end):
                if position in request.image_slots:
                    image_rows.append(len(token_ids))
                    image_slots.append(request.image_slots[position])
                token_ids.append(request.token_ids[position])
                positions.append(self._position(request, position))
                slots.append(self._slot(request, position))
            rows = range(len(token_ids) - count, len(token_ids))
            chosen = list(rows)[0 if all_logits else -1 :] if want_logits else []
            wanted += chosen
            counts.append(len(chosen))
            request.num_computed = end
        states = self._states(work)
        places = torch.tensor(positions)  # [T] or [T, 3]
        batch = LanguageInput(
            token_ids=torch.tensor(token_ids),
            positions=places.t().contiguous(),
            position_end=int(places.max()) + 1,
            slots=torch.tensor(slots),
            attention=self._plan(work),
            logit_rows=torch.tensor(wanted, dtype=torch.int64),
            image_rows=torch.tensor(image_rows) if image_rows else None,
            image_slots=torch.tensor(image_slots) if image_slots else None,
            states=states,
        )
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv_cache, self.image_cache).clone()
        assert logits.dtype is torch.float32 and logits.shape == (len(wanted), self.spec.language.vocab_size)
        return list(logits.split(counts))

    def run(self, request: Request, chunks: Sequence[int]) -> Tensor:
        """Logits of the whole prompt, computed in chunks of these sizes; the last takes what is left."""
        parts = []
        for count in chunks:
            if request.num_left:
                parts += self.step([(request, min(count, request.num_left))], all_logits=True)
        if request.num_left:
            parts += self.step([(request, request.num_left)], all_logits=True)
        return torch.cat(parts)

    def generate(self, request: Request, num_tokens: int, chunks: Sequence[int] = ()) -> list[int]:
        """Greedy tokens."""
        num_prompt = len(request.token_ids)
        logits = self.run(request, chunks)[-1:]
        for _ in range(num_tokens - 1):
            request.token_ids.append(int(logits.argmax()))
            (logits,) = self.step([(request, 1)])
        return [*request.token_ids[num_prompt:], int(logits.argmax())]

    def adopt(self, request: Request, source: Driver) -> None:
        """Goes on with a request that another driver began, over a copy of its KV cache."""
        self.kv_cache.data.copy_(source.kv_cache.data)
        self._free = [block for block in self._free if block not in request.blocks]
        if self.states is not None and source.states is not None:
            self.states.conv.copy_(source.states.conv)
            self.states.recurrent.copy_(source.states.recurrent)
            self._free_places = [place for place in self._free_places if place not in request.places]

    def fork(self, request: Request, source: Request, num_tokens: int) -> None:
        """Lets a new request share the full blocks of another one's first tokens, as a prefix cache does."""
        assert self.states is None, "a prefix of keys and values is worth nothing without the state at its end"
        num_blocks = num_tokens // self.kv_cache.block_size
        request.blocks = source.blocks[:num_blocks]
        request.num_computed = num_blocks * self.kv_cache.block_size

    def _position(self, request: Request, place: int) -> int | list[int]:
        if request.rope is None:
            return place
        if place < request.rope.shape[1]:
            return request.rope[:, place].tolist()
        return [place + request.rope_delta] * 3

    def _plan(self, work: Sequence[tuple[Request, int]]) -> AttentionPlan:
        cu_q, contexts, tables = [0], [], []
        width = max(len(request.blocks) for request, _ in work) + 1
        for request, count in work:
            cu_q.append(cu_q[-1] + count)
            contexts.append(request.num_computed)
            tables.append(request.blocks + [GARBAGE] * (width - len(request.blocks)))
        plan = self.backend.ops.plan_attention
        return plan(*(torch.tensor(values, dtype=torch.int32) for values in (cu_q, contexts, tables)))

    def _states(self, work: Sequence[tuple[Request, int]]) -> States | None:
        """States of a step whose `num_computed` is already advanced. A row's old state stays: it writes to its other
        place."""
        if self.states is None:
            return None
        cu_q = [0]
        for request, count in work:
            cu_q.append(cu_q[-1] + count)
            if not request.places:
                request.places = [self._free_places.pop(), self._free_places.pop()]
        starts = [request.num_computed - count for request, count in work]
        reads, writes = ([request.places[which] for request, _ in work] for which in (0, 1))
        for request, _ in work:
            request.places.reverse()
        rows = StateRows(*(torch.tensor(values) for values in (cu_q, starts, reads, writes)))
        return States(self.states, self.backend.ops.plan_states(rows))

    def _reserve(self, request: Request, num_tokens: int) -> None:
        while len(request.blocks) * self.kv_cache.block_size < num_tokens:
            request.blocks.append(self._free.pop())

    def _slot(self, request: Request, position: int) -> int:
        size = self.kv_cache.block_size
        return request.blocks[position // size] * size + position % size


def _poisoned_states(language: LanguageSpec, dtype: torch.dtype) -> StateCache | None:
    shape = language.delta
    if shape is None:
        return None
    size = (NUM_PLACES, language.num_state_layers)
    conv = torch.full((*size, shape.num_taps - 1, shape.num_channels), float("nan"), dtype=dtype)
    heads = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    return StateCache(conv, torch.full((*size, *heads), float("nan")))
