"""Two exchanges in one process that play instances on different nodes, with caches of all formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import torch

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.clock import MonotonicClock
from hydra_engine.core.ids import StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.network import BlockNetwork
from hydra_engine.transfer.plans import PullJob, PullResult, StagingResult
from hydra_engine.worker.transfer import Exchange, rows_of
from hydra_nodes.blocks import TcpBlocks
from hydra_nodes.nixl_blocks import NixlBlocks
from hydra_nodes.session import Greeting

SECRET = b"the secret of these tests"
SLOT, WORD = 3, 17
POISON = 0xA5
NUM_BLOCKS = 40
KV_SHAPE = (2, 2, 4, 1, 8)  # of a block
FEATURES_SHAPE = (1, 1, 3, 1, 50)
FORMATS = ("float32", "bfloat16", "int8")


def greeting(node: str, **facts: str) -> Greeting:
    return Greeting("frames", node, name=node, must_agree={"model": "tiny", **facts})


def network(name: str, *, secret: bytes = SECRET, patience_s: float = 5.0, **options: Any) -> TcpBlocks:
    """Returns a network of the kind that the test is for (`each_network`); the others have this one's interface."""
    tcp = TcpBlocks(secret, greeting(name), "127.0.0.1", patience_s=patience_s, **options)
    return cast(TcpBlocks, above(tcp))


def above(tcp: TcpBlocks) -> BlockNetwork:
    return tcp


def nixl_above(tcp: TcpBlocks) -> BlockNetwork:
    return NixlBlocks(tcp, "127.0.0.1", [])


def cache_of(
    backend: Backend, kind: PoolKind, dtype: str, *, is_source: bool, num_blocks: int = NUM_BLOCKS
) -> PagedCache:
    """Random bytes at a source, `POISON` at a target."""
    shape = num_blocks, *(KV_SHAPE if kind is PoolKind.KV else FEATURES_SHAPE)
    numel = torch.Size(shape).numel()
    quantized = dtype == "int8" and kind is PoolKind.KV
    row_dtype = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    num_bytes = numel // shape[-1] * (shape[-1] + 4) if quantized else numel * row_dtype.itemsize
    memory = backend.device.share(num_bytes) if is_source else None
    empty = torch.zeros(num_bytes, dtype=torch.uint8, device=backend.device.torch_device)
    raw = empty if memory is None else memory.tensor()[:num_bytes]
    values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    raw.copy_(values if is_source else torch.full_like(values, POISON))
    if quantized:
        return PagedCache.quantized(raw, shape, row_dtype, memory)
    return PagedCache(raw.view(row_dtype).view(shape), memory)


class Side:
    def __init__(
        self,
        backend: Backend,
        name: str,
        dtype: str = "float32",
        *,
        is_source: bool,
        blocks: TcpBlocks | None = None,
        num_blocks: int = NUM_BLOCKS,
        **options: Any,
    ) -> None:
        self.name = name
        self.caches = {
            kind: cache_of(backend, kind, dtype, is_source=is_source, num_blocks=num_blocks) for kind in PoolKind
        }
        self.results: SimpleQueue[PullResult | StagingResult] = SimpleQueue()
        self.exchange = Exchange(
            backend, self.caches, MonotonicClock(), self.results.put, network=blocks or network(name), **options
        )
        self.exchange.set_word(SLOT, WORD)

    def rows(self, kind: PoolKind) -> np.ndarray[Any, Any]:
        """The bytes of the blocks, copied."""
        cache = self.caches[kind]
        if cache.data.device.type == "cpu":
            return rows_of(cache).copy()
        return np.stack([cache.block_view(block).cpu().numpy() for block in range(cache.num_blocks)])

    def poison(self) -> None:
        for cache in self.caches.values():
            for block in range(cache.num_blocks):
                cache.block_view(block).fill_(POISON)

    def result(self) -> Any:
        return self.results.get(timeout=20)


def connect(target: Side, source: Side) -> None:
    """Opens the source as on another node: no descriptor travels."""
    target.exchange.open_peer(source.name, source.exchange.exports()[0], ())


def job(source: str, kind: PoolKind, blocks: Sequence[int], to: Sequence[int], **rest: Any) -> PullJob:
    rest = {"slot": SLOT, "word": WORD, **rest}
    return PullJob(StepId(9), source, kind, np.array(blocks, np.int32), np.array(to, np.int32), **rest)


def pull(
    target: Side, source: str, kind: PoolKind, blocks: Sequence[int], to: Sequence[int], **rest: Any
) -> PullResult:
    target.exchange.submit_pull(job(source, kind, blocks, to, **rest))
    found = target.result()
    assert isinstance(found, PullResult) and found.step_id == 9
    return found


@contextmanager
def sides(
    source: Backend,
    target: Backend,
    dtype: str = "float32",
    num_blocks: int = NUM_BLOCKS,
    *,
    target_blocks: TcpBlocks | None = None,
    **options: Any,
) -> Iterator[tuple[Side, Side]]:
    """A source and a target that has opened it. `options`: of the source's exchange."""
    one = Side(source, "source", dtype, is_source=True, num_blocks=num_blocks, **options)
    other = Side(target, "target", dtype, is_source=False, num_blocks=num_blocks, blocks=target_blocks)
    try:
        connect(other, one)
        yield one, other
    finally:
        other.exchange.close()
        one.exchange.close()
