"""Blocks that go through host memory, by the lanes of two processors. The same on devices: tests/emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.pools import PoolKind
from hydra_engine.worker.transfer import piece_of
from tests.worker.pulling import num_descriptors, num_mappings
from tests.worker.staging import BLOCK_BYTES, SLOT, WORD, Side, moves_blocks, pull, sides, stage


def cpu() -> Backend:
    return create_backend("cpu", torch.float32, threads=1)


@pytest.fixture
def staged() -> Iterator[tuple[Side, Side]]:
    with sides(cpu(), cpu(), through_host=True, staging_bytes=8 * BLOCK_BYTES + 100) as found:
        yield found


def test_blocks_arrive_and_only_they(staged: tuple[Side, Side]) -> None:
    moves_blocks(*staged)


def test_where_memory_is_mapped_nothing_is_staged() -> None:
    with sides(cpu(), cpu()) as (source, target):
        exports, descriptors = source.exchange.exports()
        assert not exports.staging and not source.exchange.staging_blocks and len(descriptors) == 2
        assert target.exchange.piece_blocks("source", PoolKind.KV) == 0
        assert pull(target, (30,), (2,)).valid
        assert torch.equal(target.cache.data[2], source.cache.data[30])


def test_the_word_decides_after_the_copy(staged: tuple[Side, Side]) -> None:
    source, target = staged
    stage(source, (1,), (0,))
    source.exchange.set_word(SLOT, WORD + 1)
    assert not pull(target, (0,), (1,)).valid


def test_a_wrong_byte_in_host_memory_is_noticed(staged: tuple[Side, Side]) -> None:
    source, target = staged
    checksums = source.exchange.checksums(PoolKind.KV, [1, 2])
    source.faults.arm("src.after_staging", "corrupt", "times=1")
    assert stage(source, (1, 2), (4, 5)).problem is None
    assert "checksums differ" in (pull(target, (4, 5), (1, 2), checksums=checksums).problem or "")
    stage(source, (1, 2), (4, 5))
    assert pull(target, (4, 5), (1, 2), checksums=checksums).problem is None


def test_blocks_that_are_not_there_are_a_problem_and_the_lane_goes_on(staged: tuple[Side, Side]) -> None:
    source, target = staged
    for blocks, staging in (((40,), (0,)), ((1,), (8,)), ((-1,), (0,))):
        assert "could not be copied" in (stage(source, blocks, staging).problem or "")
    assert stage(source, (1,), (0,)).problem is None and pull(target, (0,), (0,)).valid


def test_pools_are_small_and_nothing_stays_open() -> None:
    before = num_descriptors(), num_mappings()
    with sides(cpu(), cpu(), through_host=True) as (source, target):
        assert source.exchange.staging_blocks == {PoolKind.KV: 40}, "no more than the cache has"
        assert target.exchange.piece_blocks("source", PoolKind.KV) == piece_of(40) == 5
        assert num_mappings() == before[1] + 2  # the words and the staging pool, to be read only
        stage(source, (1,), (0,))
    del source, target
    assert (num_descriptors(), num_mappings()) == before
    with sides(cpu(), cpu(), through_host=True, staging_bytes=1) as (source, _):
        assert source.exchange.staging_blocks == {PoolKind.KV: 1}, "room for one block, however large"
