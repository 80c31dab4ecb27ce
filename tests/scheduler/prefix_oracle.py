"""The contents of the KV cache by brute force: every block's whole content as a plain tuple, no hash and no name.

Watches a scheduler from outside. A request that starts must begin with blocks that hold exactly its own beginning, and
with as many of them as there are.
"""

from __future__ import annotations

from collections.abc import Collection

from hydra_engine.cache.blocks import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguagePlan
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.scheduler.sim import rows_of

Content = tuple[object, ...]


class PrefixOracle:
    """`look()` after every call on the scheduler; `language_ends` before a language result is given back."""

    def __init__(self, scheduler: StageScheduler, reuse: bool) -> None:
        self._requests = scheduler._requests
        self._size = self._requests.kv.block_size
        self._reuse = reuse
        self._content: dict[int, Content] = {}  # block -> all that its chain says, from the first token on
        self._seen: dict[RequestId, tuple[BlockTable, int]] = {}  # table, blocks of it that are known
        self._lent: dict[RequestId, int] = {}
        self.num_found = 0

    def language_ends(self, plan: LanguagePlan, bad: Collection[int]) -> None:
        """Rows that sample and do not fail prove what they have computed; the first block with a content keeps it."""
        for row in rows_of(plan):
            state = self._requests.states[row.request_id]
            if not row.sample or row.request_id in bad or state.ending is not None or not self._reuse:
                continue
            content = _content(state)
            full = (row.start + len(row.token_ids)) // self._size
            for index in range(self._lent[row.request_id], full):
                chain = content[: (index + 1) * self._size + 1]
                if chain not in self._content.values():
                    self._content[int(row.block_ids[index])] = chain
            self._lent[row.request_id] = max(full, self._lent[row.request_id])

    def look(self) -> None:
        tables = self._requests.kv.tables
        self._seen = {r: seen for r, seen in self._seen.items() if tables.get(r) is seen[0]}
        started = [r for r in tables if r not in self._seen]
        for request_id in started:
            state, blocks = self._requests.states[request_id], tables[request_id].blocks()
            content, num_found = _content(state), state.num_published
            assert state.num_computed == num_found * self._size
            for index, block in enumerate(blocks[:num_found]):
                chain = content[: (index + 1) * self._size + 1]
                assert self._content.get(block) == chain, f"request {request_id} starts on a block with other content"
            self._seen[request_id] = tables[request_id], num_found
            self._lent[request_id] = num_found
            self.num_found += num_found
        for request_id, (table, known) in self._seen.items():
            for block in table.blocks()[known:]:
                self._content.pop(block, None)  # it will be written
            self._seen[request_id] = table, table.num_blocks
        for request_id in started if self._requests.checkpoints is None else ():  # else it may have no state
            self._check_longest(self._requests.states[request_id])

    def reset(self) -> None:
        """Content that nobody holds was forgotten."""
        held = {block for table in self._requests.kv.tables.values() for block in table.blocks()}
        self._content = {block: chain for block, chain in self._content.items() if block in held}

    def _check_longest(self, state: RequestState) -> None:
        """Checks that the longest prefix was found. The cache has not changed since the request started."""
        content = _content(state)
        usable = [
            n
            for n in range((state.num_tokens - 1) // self._size + 1)
            if not any(i.bidirectional and i.start < n * self._size < i.end for i in state.request.images)
        ]
        there = set(self._content.values())
        for n in usable:
            if n > state.num_published:
                chains = (content[: (index + 1) * self._size + 1] for index in range(n))
                assert not all(chain in there for chain in chains), (
                    f"{n} blocks were there, {state.num_published} taken"
                )


def _content(state: RequestState) -> Content:
    """The salt, then what each token is: an id, or a place in a picture."""
    found: list[object] = [*state.tokens(0, state.num_tokens)]
    for image in state.request.images:
        for offset in range(image.num_tokens):
            found[image.start + offset] = (image.digest, offset)
    return (state.request.cache_salt, *found)
