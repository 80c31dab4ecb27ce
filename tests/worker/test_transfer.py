"""Blocks that one worker pulls from another: what arrives, what counts, and what goes wrong stays with its job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.errors import TransferError
from hydra_engine.transfer.plans import PullJob
from tests.worker.fakes import BLOCK, Rig
from tests.worker.pulling import VALID, connect, job, make_rig, num_descriptors, num_mappings, pull
from tools.miniatures import make_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=3)
    return directory


# ---- single jobs


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> Iterator[tuple[Rig, Rig]]:
    source, target = make_rig(model_dir, "EP"), make_rig(model_dir, "PD")
    connect(target, "source", source)
    yield source, target
    source.worker.close()
    target.worker.close()


@pytest.fixture
def ready(pair: tuple[Rig, Rig]) -> tuple[Rig, Rig]:
    """Blocks full of different bytes, a target full of NaN, a valid word in slot 0, nothing armed."""
    source, target = pair
    generator = torch.Generator().manual_seed(1)
    for cache in (source.kv_cache, source.image_cache):
        cache.data.copy_(torch.randn(cache.data.shape, generator=generator))
    for cache in (target.kv_cache, target.image_cache):
        cache.data.fill_(float("nan"))
    source.exchange.set_word(0, VALID)
    for point in ("dst.mid_copy", "dst.after_copy"):
        target.worker.faults.arm(point, "off")
    return source, target


def written(cache: PagedCache) -> list[int]:
    return (~cache.data.isnan().flatten(1).all(1)).nonzero().flatten().tolist()


@pytest.mark.parametrize("pool", list(PoolKind))
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_blocks_arrive_and_only_they(ready: tuple[Rig, Rig], pool: PoolKind, count: int) -> None:
    source, target = ready
    theirs, ours = (rig.kv_cache if pool is PoolKind.KV else rig.image_cache for rig in (source, target))
    pairs = [(3 * i + 1, 40 - 5 * i) for i in range(count)]
    result = pull(target, pool, pairs)
    assert result.valid and result.problem is None and result.num_bytes == count * ours.block_bytes
    assert written(ours) == sorted(to for _, to in pairs)
    for block, to in pairs:
        assert torch.equal(ours.data[to], theirs.data[block])


def test_an_offer_that_is_gone_is_not_valid(ready: tuple[Rig, Rig]) -> None:
    source, target = ready
    for wrong in ({"word": VALID + 1}, {"slot": 1}):
        result = pull(target, PoolKind.KV, [(1, 2)], **wrong)
        assert not result.valid and result.problem is None
    source.exchange.set_word(0, VALID & ~0xFF)
    assert not pull(target, PoolKind.KV, [(1, 2)]).valid
    source.exchange.set_word(4095, VALID)
    assert pull(target, PoolKind.KV, [(1, 2)], slot=4095).valid


@pytest.mark.quick("dst.mid_copy")
@pytest.mark.parametrize("point", ["dst.mid_copy", "dst.after_copy"])
def test_blocks_that_are_overwritten_during_the_copy_do_not_count(ready: tuple[Rig, Rig], point: str) -> None:
    """Checksums of what was offered do not make a lost race a problem: the bytes are nobody's any more."""
    source, target = ready
    target.worker.faults.arm(point, "delay", "seconds=0.4 times=1")
    wanted = job(target, PoolKind.KV, [(1, 2), (2, 3)], checksums=source.exchange.checksums(PoolKind.KV, [1, 2]))
    target.exchange.submit_pull(wanted)
    time.sleep(0.1)
    source.exchange.set_word(0, 0)
    source.kv_cache.data[1:3] = 5.0
    result = target.wait(wanted.step_id)
    assert not result.valid and result.problem is None
    assert (point == "dst.mid_copy") == bool((target.kv_cache.data[3] == 5.0).all())


@pytest.mark.parametrize("point", ["dst.mid_copy", "dst.after_copy"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_wrong_byte_is_caught_where_transfers_are_checked(ready: tuple[Rig, Rig], point: str, count: int) -> None:
    source, target = ready
    pairs = [(i + 1, 2 * i) for i in range(count)]
    checksums = source.exchange.checksums(PoolKind.KV, [block for block, _ in pairs])
    assert len(set(checksums)) == count
    assert pull(target, PoolKind.KV, pairs, checksums=checksums).problem is None
    target.worker.faults.arm(point, "corrupt", "times=2")
    result = pull(target, PoolKind.KV, pairs, checksums=checksums)
    assert (
        result.valid
        and result.problem == "kv blocks of instance source are not what it offered: their checksums differ"
    )
    unchecked = pull(target, PoolKind.KV, pairs)
    assert unchecked.valid and unchecked.problem is None
    assert pull(target, PoolKind.KV, pairs, checksums=checksums).problem is None


def test_checksums_of_other_blocks_or_too_few_do_not_pass(ready: tuple[Rig, Rig]) -> None:
    source, target = ready
    for blocks in ([2, 1], [1], [1, 2, 3]):
        checksums = source.exchange.checksums(PoolKind.KV, blocks)
        assert "checksums differ" in (pull(target, PoolKind.KV, [(1, 5), (2, 6)], checksums=checksums).problem or "")


def test_a_job_that_fails_says_so_and_the_lane_goes_on(ready: tuple[Rig, Rig]) -> None:
    _, target = ready
    uneven = replace(job(target, PoolKind.KV, [(1, 2)]), target_blocks=np.arange(2, dtype=np.int32))
    target.worker.faults.arm("dst.after_copy", "raise", "times=1")
    wrong: list[tuple[PullJob, str]] = [
        (job(target, PoolKind.KV, [(1, 2)]), "could not be copied; the log says why"),
        (job(target, PoolKind.KV, [(64, 2)]), "could not be copied"),
        (job(target, PoolKind.KV, [(1, -1)]), "could not be copied"),
        (job(target, PoolKind.KV, [(1, 2)], slot=4096), "could not be copied"),
        (uneven, "could not be copied"),
        (job(target, PoolKind.KV, [(1, 2)], peer="nobody"), "instance nobody is not connected"),
    ]
    for bad, _ in wrong:
        target.exchange.submit_pull(bad)
    for bad, problem in wrong:
        result = target.wait(bad.step_id)
        assert not result.valid and result.num_bytes == 0 and problem in (result.problem or "")
    assert pull(target, PoolKind.KV, [(1, 2)]).valid


def test_what_a_peer_does_not_export_cannot_be_pulled(model_dir: Path) -> None:
    encoder, target = make_rig(model_dir, "E"), make_rig(model_dir, "PD")
    connect(target, "source", encoder)
    encoder.exchange.set_word(0, VALID)
    assert pull(target, PoolKind.KV, []).problem == "instance source lets nobody read its kv blocks"
    assert pull(target, PoolKind.FEATURES, [(0, 1)]).valid
    encoder.worker.close()
    target.worker.close()


# ---- peers that come and go


def test_a_peer_is_closed_behind_its_jobs_and_its_name_can_come_back(model_dir: Path) -> None:
    source, target = make_rig(model_dir, "EP"), make_rig(model_dir, "D")
    source.kv_cache.data.fill_(3.0)
    source.exchange.set_word(0, VALID)
    before = num_descriptors(), num_mappings()
    for turn in range(2):
        connect(target, "source", source)
        assert num_mappings() == before[1] + 2  # the words and KV: a decoder takes no features
        target.worker.faults.arm("dst.mid_copy", "delay", "seconds=0.3 times=1")
        jobs = [job(target, PoolKind.KV, [(5, 2 * turn), (6, 2 * turn + 1)]) for _ in range(2)]
        for wanted in jobs:
            target.exchange.submit_pull(wanted)
        target.exchange.close_peer("source")
        target.exchange.close_peer("source")
        late = job(target, PoolKind.KV, [(5, 9)])
        target.exchange.submit_pull(late)
        assert all(target.wait(wanted.step_id).valid for wanted in jobs)
        assert target.wait(late.step_id).problem == "instance source is not connected"
        assert (target.kv_cache.data[2 * turn : 2 * turn + 2] == 3.0).all()
        assert (num_descriptors(), num_mappings()) == before
    source.worker.close()
    target.worker.close()


def test_an_owner_that_ends_first_leaves_its_peers_what_they_read(model_dir: Path) -> None:
    before = num_descriptors(), num_mappings()
    source, target = make_rig(model_dir, "P"), make_rig(model_dir, "D")
    source.kv_cache.data.fill_(3.0)
    source.exchange.set_word(0, VALID)
    connect(target, "source", source)
    source.worker.close()
    source.worker.close()
    del source
    result = pull(target, PoolKind.KV, [(1, 2)])
    assert result.valid and bool((target.kv_cache.data[2] == 3.0).all())
    target.worker.close()
    target.worker.close()
    assert (num_descriptors(), num_mappings()) == before


def with_pool(exports: Exports, index: int, layout: dict[str, Any] | None = None, **changes: Any) -> Exports:
    pools = list(exports.pools)
    pools[index] = replace(pools[index], layout=replace(pools[index].layout, **(layout or {})), **changes)
    return replace(exports, pools=tuple(pools))


BAD = {
    "another size": (lambda e: with_pool(e, 1, num_bytes=e.pools[1].num_bytes + 4096), "where .* were announced"),
    "more blocks": (lambda e: with_pool(e, 1, {"num_blocks": 65}), "65 kv blocks of .* do not lie in"),
    "no blocks": (lambda e: with_pool(e, 1, {"num_blocks": 0}), "0 kv blocks"),
    "another dtype": (lambda e: with_pool(e, 1, {"dtype": "float16"}), "kv blocks of the peer are .* float16, ours"),
    "another block": (lambda e: with_pool(e, 1, {"block_bytes": 32}), "kv blocks of the peer"),
    "no descriptor": (lambda e: with_pool(e, 1, descriptor=3), "descriptor 3 of the 3"),
    "the wrong one": (lambda e: with_pool(e, 1, descriptor=0), "where .* were announced"),
    "no words": (lambda e: replace(e, words=-1), "descriptor -1 of the 3"),
    "another count of words": (lambda e: replace(e, num_words=7), "where 56 were announced"),
    "another transport": (lambda e: with_pool(e, 1, transport="cuda-ipc"), "cannot be mapped by a processor"),
}


QUICK = {"another size", "another block", "no descriptor", "another count of words"}


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in BAD]
)
def test_exports_that_cannot_be_right_are_refused_and_nothing_stays_open(pair: tuple[Rig, Rig], case: str) -> None:
    source, target = pair
    change, message = BAD[case]
    exports, descriptors = source.exchange.exports()
    before = num_descriptors(), num_mappings()
    with pytest.raises(TransferError, match=message):
        target.exchange.open_peer("other", change(exports), [os.dup(descriptor) for descriptor in descriptors])
    assert (num_descriptors(), num_mappings()) == before
    assert "not connected" in (pull(target, PoolKind.KV, [], peer="other").problem or "")


def test_instances_whose_blocks_differ_do_not_exchange_them(model_dir: Path) -> None:
    source = make_rig(model_dir, "P")
    for options in ({"dtype": torch.bfloat16}, {"block": 2 * BLOCK}):
        target = make_rig(model_dir, "D", **options)
        with pytest.raises(TransferError, match="give both instances the same model, dtype and block sizes"):
            connect(target, "source", source)
        target.worker.close()
    source.worker.close()
