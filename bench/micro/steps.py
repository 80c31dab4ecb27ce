"""Language steps of a model that is measured: prompts and decodes, launched one by one or captured as an engine does.

Every request has blocks of its own, shuffled over a cache of random numbers. Does not know time or floors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hydra_engine.backend.base import AttentionPlan, MixedRows, PagedCache
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.language.graphs import MixedSize

if TYPE_CHECKING:
    from bench.micro.subject import Subject

BLOCK = 16


class Row(NamedTuple):
    """A request of a language step: `new` tokens after `start` that are in the cache."""

    start: int
    new: int = 1

    @property
    def num_blocks(self) -> int:
        return -(-(self.start + self.new) // BLOCK)


class Step:
    """A language step. Calling it plans and runs it, as the engine does without graphs, and returns the logits of every
    request's last token."""

    def __init__(self, subject: Subject, rows: Sequence[Row], cache: PagedCache) -> None:
        language, device = subject.spec.language, subject.device
        self._subject, self.rows, self.cache = subject, tuple(rows), cache
        generator = torch.Generator().manual_seed(2)
        needs = [row.num_blocks for row in rows]
        assert sum(needs) <= cache.num_blocks, "each request has blocks of its own"
        order = torch.randperm(cache.num_blocks, generator=generator).to(torch.int32)
        self.tables = torch.zeros((len(rows), max(needs)), dtype=torch.int32)
        for table, count, blocks in zip(self.tables, needs, order[: sum(needs)].split(needs), strict=True):
            table[:count] = blocks
        counts = torch.tensor([row.new for row in rows], dtype=torch.int32)
        self._cu_q = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)])
        self.num_context = torch.tensor([row.start + row.new for row in rows], dtype=torch.int32)
        places = torch.cat([torch.arange(row.start, row.start + row.new) for row in rows])
        owner = torch.repeat_interleave(torch.arange(len(rows)), counts.long())
        slots = self.tables[owner, places // BLOCK].long() * BLOCK + places % BLOCK
        highest = min(language.vocab_size, 1000)
        self.token_ids = torch.randint(10, highest, (len(places),), generator=generator).to(device)
        self.positions = (places if language.rope_sections is None else places.repeat(3, 1)).to(device)
        self.slots, self.last_rows = slots.to(device), (self._cu_q[1:].long() - 1).to(device)

    def __call__(self) -> Tensor:
        return self.forward(self._subject.backend.ops.plan_attention(self._cu_q, self.num_context, self.tables))

    def forward(self, plan: AttentionPlan) -> Tensor:
        return self._subject.model.forward(self._inputs(plan), self.cache, None)

    def _inputs(self, plan: AttentionPlan) -> LanguageInput:
        return LanguageInput(
            token_ids=self.token_ids,
            positions=self.positions,
            slots=self.slots,
            attention=plan,
            logit_rows=self.last_rows,
            position_end=int(self.num_context.max()),
        )

    def graph(self, table_tokens: int = 0) -> Graphed:
        """The step of decodes as one graph of the device, captured by the calling lane. Block tables have room for
        `table_tokens`, from which the splits of contexts are chosen; at least for the longest context."""
        assert all(row.new == 1 for row in self.rows), "graphs are of decodes"
        subject = self._subject
        context, tables = self.num_context.to(subject.device), self._tables_of(len(self.rows), table_tokens)
        return Graphed(subject, partial(self.forward, subject.backend.ops.plan_decode(context, tables)))

    def mixed_graph(self, size: MixedSize, table_tokens: int) -> Graphed:
        """The step as the engine captures steps with prompts: of so many tokens and rows, planned from tensors, where
        any token may take a picture's feature and here none does. The first rows' logits are those of the step."""
        assert all(row.new > 1 for row in self.rows), "a step of prompts"
        subject, num_tokens, num_rows = self._subject, len(self.token_ids), len(self.rows)

        def filled(values: Tensor, count: int, rest: int) -> Tensor:
            return pad(values, (0, count - values.shape[-1]), value=rest).to(subject.device)

        cu_q = filled(self._cu_q, size.rows + 1, num_tokens)
        context = filled(self.num_context, size.rows, 0)
        rows = MixedRows(cu_q, cu_q, context, torch.zeros_like(context), self._tables_of(size.rows, table_tokens))
        plan = subject.backend.ops.plan_mixed(rows, size.tokens, size.chunks)
        inputs = replace(
            self._inputs(plan),
            token_ids=filled(self.token_ids, size.tokens, 0),
            positions=filled(self.positions, size.tokens, 0),
            slots=filled(self.slots, size.tokens, -1),
            logit_rows=filled(self.last_rows, size.rows, 0),
        )
        images = None
        if subject.spec.vision is not None:
            images, every_token = subject.image_cache(1), torch.arange(size.tokens, device=subject.device)
            inputs = replace(inputs, image_rows=every_token, image_slots=torch.full_like(every_token, -1))
        return Graphed(subject, lambda: subject.model.forward(inputs, self.cache, images)[:num_rows])

    def _tables_of(self, num_rows: int, tokens: int) -> Tensor:
        width = max(self.tables.shape[1], -(-tokens // BLOCK))
        tables = pad(self.tables, (0, width - self.tables.shape[1], 0, num_rows - self.tables.shape[0]))
        return tables.to(self._subject.device)


class Graphed:
    """`replay` computes again; `logits` are those of the last replay, until the next graph is replayed."""

    def __init__(self, subject: Subject, compute: Callable[[], Tensor]) -> None:
        found: list[Tensor] = []

        def launch() -> None:
            found[:] = [compute()]

        self._compute = compute  # with the tensors that the graph reads
        self._graph = subject.backend.device.capture(launch)
        self._found = found

    @property
    def logits(self) -> Tensor:
        return self._found[0]

    def replay(self) -> None:
        self._graph.replay()
