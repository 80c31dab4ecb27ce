"""Decodes that move: only to whom has nothing to encode, only from whom cannot hold all it has, and only once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, lends_decodes
from hydra_engine.frontend.routing.decode_stealing import (
    CALM_S,
    FEW_DECODES,
    MAX_BORROWED,
    PERIOD_S,
    Decode,
    StealPolicy,
)
from hydra_engine.frontend.routing.instances import InstanceLoad
from tests.examples import examples
from tests.frontend.test_router import status, table

BUSY = status(num_running=60, num_waiting=20, kv_blocks_used=95)


def decode(number: int, instance: str = "pd0", *, left: int = 100, moved: bool = False) -> Decode:
    return Decode(RequestId(number), instance, 50, left, moved)


def busy_table() -> dict[str, InstanceLoad]:
    instances = table("ED+PD")
    instances["ed0"].status, instances["pd0"].status = status(), BUSY
    return instances


def settled(instances: dict[str, InstanceLoad]) -> StealPolicy:
    """Advances the clock until stealing has seen the table for long enough."""
    policy = StealPolicy({"ed0": 64, "pd0": 64})
    assert policy.decide(instances, [decode(1)], 10.0) == []
    return policy


NOW = 10.0 + CALM_S


def test_each_instance_is_full_by_its_own_limit() -> None:
    instances = busy_table()
    instances["pd0"].status = status(num_running=30, num_waiting=5)
    for most, taken in ((64, 0), (32, 1)):
        policy = StealPolicy({"ed0": 8, "pd0": most})
        policy.decide(instances, [decode(1)], 10.0)
        assert len(policy.decide(instances, [decode(1)], NOW)) == taken


def test_an_idle_encoder_takes_a_decode_with_much_left() -> None:
    instances = busy_table()
    plans = settled(instances).decide(instances, [decode(1, left=40), decode(2, left=400), decode(3, left=10)], NOW)
    assert plans == [(decode(2, left=400), "ed0")]


def test_a_queue_that_passes_is_left_alone() -> None:
    instances = busy_table()
    policy = settled(instances)
    instances["pd0"].status = status(num_running=60)
    assert policy.decide(instances, [decode(1)], NOW) == []
    instances["pd0"].status = BUSY
    assert policy.decide(instances, [decode(1)], NOW + 0.1) == []
    assert len(policy.decide(instances, [decode(1)], NOW + 0.2 + CALM_S)) == 1


def test_whoever_has_something_to_encode_takes_nothing() -> None:
    for change in ("patches", "status", "decodes", "pair", "silent"):
        instances = busy_table()
        thief = instances["ed0"]
        match change:
            case "patches":
                thief.patches = 1
            case "status":
                thief.status = status(num_encoding=1)
            case "decodes":
                thief.decodes = FEW_DECODES
            case "pair":
                thief.pairs.clear()
                instances["pd0"].pairs.clear()
            case "silent":
                thief.condition = Condition.SILENT
        assert settled(instances).decide(instances, [decode(1)], NOW) == [], change


def test_a_victim_with_room_keeps_what_it_has() -> None:
    instances = busy_table()
    instances["pd0"].status = status(num_running=20, num_waiting=5, kv_blocks_used=30)
    assert settled(instances).decide(instances, [decode(1)], NOW) == []


def test_what_has_moved_stays_and_no_thief_has_too_many() -> None:
    instances = busy_table()
    policy = settled(instances)
    assert policy.decide(instances, [decode(1, moved=True)], NOW) == []
    borrowed = [decode(100 + i, "ed0", moved=True) for i in range(MAX_BORROWED)]
    assert policy.decide(instances, [decode(1), *borrowed], NOW) == []
    assert len(policy.decide(instances, [decode(1), *borrowed[1:]], NOW)) == 1


def test_one_at_a_time_for_each_thief() -> None:
    instances = busy_table()
    policy = settled(instances)
    assert len(policy.decide(instances, [decode(i) for i in range(9)], NOW)) == 1
    assert policy.decide(instances, [decode(i) for i in range(9)], NOW + PERIOD_S / 2) == []
    assert len(policy.decide(instances, [decode(i) for i in range(9)], NOW + 2 * PERIOD_S)) == 1


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_nothing_moves_twice_or_against_the_order_of_roles(data: st.DataObject) -> None:
    """Draws a whole run with changing queues; hand-overs are carried out as the frontend would."""
    topology = data.draw(st.sampled_from(["ED+PD", "2ED+PD", "ED+2PD", "ED+P+D", "EPD+PD", "2ED+P+2D"]))
    instances = table(topology)
    policy = StealPolicy(dict.fromkeys(instances, 8))
    decoders = [name for name, instance in instances.items() if "D" in instance.role.letters]
    decodes = [decode(i, data.draw(st.sampled_from(decoders)), left=200) for i in range(20)]
    moves: list[int] = []
    now = 0.0
    for _ in range(30):
        now += data.draw(st.sampled_from([0.05, 0.3, 0.6]))
        for instance in instances.values():
            instance.patches = data.draw(st.sampled_from([0, 0, 0, 5]))
            instance.decodes = sum(d.instance == instance.name for d in decodes)
            instance.status = status(
                num_running=8, num_waiting=data.draw(st.sampled_from([0, 3, 3])), kv_blocks_used=90
            )
            if lends_decodes(instance.role, instance.role):
                raise AssertionError("nobody lends to itself")
        for taken, name in policy.decide(instances, decodes, now):
            victim, thief = instances[taken.instance], instances[name]
            assert lends_decodes(victim.role, thief.role)
            assert not thief.patches and thief.usable
            index = decodes.index(taken)
            moves.append(taken.request_id)
            decodes[index] = replace(taken, instance=name, moved=True)
        for name in instances:
            assert sum(d.moved and d.instance == name for d in decodes) <= MAX_BORROWED
    assert len(moves) == len(set(moves))
