"""The ledger: it names the holders of blocks, blocks of the dead and broken books."""

from __future__ import annotations

from hydra_engine.cache.blocks import CacheManager, SlotPool
from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.ledger import MAX_LINES, Ledger
from hydra_engine.cache.snapshots import StateSnapshots
from hydra_engine.core.ids import FeatureKey, RequestId


def ledger() -> tuple[Ledger, CacheManager, FeatureCache, SlotPool]:
    kv: CacheManager[RequestId] = CacheManager(300, 4)
    features, seq_slots = FeatureCache(CacheManager(4, 4)), SlotPool(300)
    return Ledger(kv, features, seq_slots), kv, features, seq_slots


PICTURE = FeatureKey(b"picture")


def test_the_ledger_names_holders_and_is_empty_at_rest() -> None:
    books, kv, features, seq_slots = ledger()
    kv.grow(RequestId(3), 9, capacity=20)
    seq_slots.allocate(RequestId(3))
    features.need((RequestId(3), 1), PICTURE, 4)
    features.need((RequestId(4), 0), PICTURE, 4)
    features.reserve(PICTURE)
    snapshot = books.report([RequestId(3), RequestId(4)])
    assert (snapshot.num_requests, snapshot.kv_blocks_held, snapshot.image_blocks_held) == (2, 3, 1)
    shared = ("request 3 image 1: 1 blocks", "request 4 image 0: 1 blocks")
    assert snapshot.holders == ("request 3: 3 KV blocks", *shared)
    assert not snapshot.problems
    kv.free(RequestId(3))
    seq_slots.free(RequestId(3))
    features.drop((RequestId(3), 1), PICTURE)
    features.drop((RequestId(4), 0), PICTURE)
    assert books.report([]).holders == ("an encode that no request waits for any more: 1 blocks",)
    features.finish(PICTURE, failed=False)
    rest = books.report([])
    assert (rest.kv_blocks_held, rest.image_blocks_held, rest.holders, rest.problems) == (0, 0, (), ())
    assert (rest.kv_blocks_total, rest.image_blocks_total) == (300, 4)


def test_the_ledger_reports_blocks_of_the_dead_and_broken_books() -> None:
    books, kv, features, seq_slots = ledger()
    kv.grow(RequestId(1), 4, capacity=4)
    seq_slots.allocate(RequestId(1))
    features.need((RequestId(2), 0), PICTURE, 4)
    features.reserve(PICTURE)
    dead = ("request 1 is gone and holds KV blocks", "request 2 is gone and holds image 0")
    assert books.problems([]) == (*dead, "request 1 is gone and holds a sequence slot")
    kv.pool.allocate(1)
    (problem,) = books.problems([RequestId(1), RequestId(2)])
    assert problem == "KV cache: the pool holds blocks that no table has"


def test_whoever_holds_blocks_has_a_slot_and_states_are_counted_by_slots() -> None:
    _, kv, features, seq_slots = ledger()
    books = Ledger(kv, features, seq_slots, has_states=True)
    seq_slots.allocate(RequestId(1))
    snapshot = books.report([RequestId(1)])
    assert snapshot.problems == ("sequence slots and KV blocks are not held by the same requests",)
    assert (snapshot.state_slots_held, snapshot.state_slots_total) == (1, 300)


def test_snapshots_of_the_dead_and_those_that_nobody_holds_are_found() -> None:
    _, kv, features, seq_slots = ledger()
    snapshots = StateSnapshots(kv, 3, first_slot=600)
    books = Ledger(kv, features, seq_slots, has_states=True, snapshots=snapshots)
    snapshots.start(RequestId(1), [])
    assert snapshots.reserve(RequestId(1), 0, 4, in_prompt=True) == 600
    report = books.report([])
    assert (report.state_slots_held, report.state_slots_total) == (1, 303)
    assert report.problems == ("request 1 is gone and holds snapshots of its state",)
    snapshots.pool.allocate(1)
    assert books.problems([RequestId(1)]) == ("state snapshots: holders and counts differ",)


def test_a_long_list_of_holders_is_cut_with_a_count() -> None:
    books, kv, _, _ = ledger()
    for number in range(250):
        kv.grow(RequestId(number), 1, capacity=1)
    holders = books.report([RequestId(n) for n in range(250)]).holders
    assert len(holders) == MAX_LINES and holders[-1] == "and 51 more"
