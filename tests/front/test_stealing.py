"""Decodes that move: only to whom has nothing to encode, only from whom cannot hold all it has, and only once."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.cluster.places import Place
from hydra_engine.cluster.stealing import CALM_S, FEW_DECODES, MOST_BORROWED, PERIOD_S, Decode, StealPolicy
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition
from hydra_engine.core.roles import lends_decodes
from tests.examples import examples
from tests.front.test_router import status, table

BUSY = status(num_running=60, num_waiting=20, kv_blocks_used=95)


def decode(number: int, place: str = "pd0", *, left: int = 100, moved: bool = False) -> Decode:
    return Decode(RequestId(number), place, 50, left, moved)


def busy_table() -> dict[str, Place]:
    places = table("ED+PD")
    places["ed0"].status, places["pd0"].status = status(), BUSY
    return places


def settled(places: dict[str, Place]) -> StealPolicy:
    """It has seen this table for long enough."""
    policy = StealPolicy(64)
    assert policy.decide(places, [decode(1)], 10.0) == []
    return policy


NOW = 10.0 + CALM_S


def test_an_idle_encoder_takes_a_decode_with_much_left() -> None:
    places = busy_table()
    plans = settled(places).decide(places, [decode(1, left=40), decode(2, left=400), decode(3, left=10)], NOW)
    assert [(plan.request_id, plan.victim, plan.thief) for plan in plans] == [(2, "pd0", "ed0")]


def test_a_queue_that_passes_is_left_alone() -> None:
    places = busy_table()
    policy = settled(places)
    places["pd0"].status = status(num_running=60)
    assert policy.decide(places, [decode(1)], NOW) == []
    places["pd0"].status = BUSY
    assert policy.decide(places, [decode(1)], NOW + 0.1) == []
    assert len(policy.decide(places, [decode(1)], NOW + 0.2 + CALM_S)) == 1


def test_whoever_has_something_to_encode_takes_nothing() -> None:
    for change in ("patches", "status", "decodes", "pair", "silent"):
        places = busy_table()
        thief = places["ed0"]
        match change:
            case "patches":
                thief.patches = 1
            case "status":
                thief.status = status(num_encoding=1)
            case "decodes":
                thief.decodes = FEW_DECODES
            case "pair":
                thief.pairs.clear()
                places["pd0"].pairs.clear()
            case "silent":
                thief.condition = Condition.SILENT
        assert settled(places).decide(places, [decode(1)], NOW) == [], change


def test_a_victim_with_room_keeps_what_it_has() -> None:
    places = busy_table()
    places["pd0"].status = status(num_running=20, num_waiting=5, kv_blocks_used=30)
    assert settled(places).decide(places, [decode(1)], NOW) == []


def test_what_has_moved_stays_and_no_thief_has_too_many() -> None:
    places = busy_table()
    policy = settled(places)
    assert policy.decide(places, [decode(1, moved=True)], NOW) == []
    borrowed = [decode(100 + i, "ed0", moved=True) for i in range(MOST_BORROWED)]
    assert policy.decide(places, [decode(1), *borrowed], NOW) == []
    assert len(policy.decide(places, [decode(1), *borrowed[1:]], NOW)) == 1


def test_one_at_a_time_for_each_thief() -> None:
    places = busy_table()
    policy = settled(places)
    assert len(policy.decide(places, [decode(i) for i in range(9)], NOW)) == 1
    assert policy.decide(places, [decode(i) for i in range(9)], NOW + PERIOD_S / 2) == []
    assert len(policy.decide(places, [decode(i) for i in range(9)], NOW + 2 * PERIOD_S)) == 1


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_nothing_moves_twice_or_against_the_order_of_roles(data: st.DataObject) -> None:
    """Over a whole run with changing queues: plans are carried out as the front would."""
    topology = data.draw(st.sampled_from(["ED+PD", "2ED+PD", "ED+2PD", "ED+P+D", "EPD+PD", "2ED+P+2D"]))
    places = table(topology)
    policy = StealPolicy(8)
    decoders = [name for name, place in places.items() if "D" in place.role.letters]
    decodes = [decode(i, data.draw(st.sampled_from(decoders)), left=200) for i in range(20)]
    moves: list[int] = []
    now = 0.0
    for _ in range(30):
        now += data.draw(st.sampled_from([0.05, 0.3, 0.6]))
        for place in places.values():
            place.patches = data.draw(st.sampled_from([0, 0, 0, 5]))
            place.decodes = sum(d.place == place.name for d in decodes)
            place.status = status(num_running=8, num_waiting=data.draw(st.sampled_from([0, 3, 3])), kv_blocks_used=90)
            if lends_decodes(place.role, place.role):
                raise AssertionError("nobody lends to itself")
        for plan in policy.decide(places, decodes, now):
            victim, thief = places[plan.victim], places[plan.thief]
            assert lends_decodes(victim.role, thief.role)
            assert not thief.patches and thief.usable
            index = next(i for i, d in enumerate(decodes) if d.request_id == plan.request_id)
            assert decodes[index].place == plan.victim
            moves.append(plan.request_id)
            decodes[index] = replace(decodes[index], place=plan.thief, moved=True)
        for name in places:
            assert sum(d.moved and d.place == name for d in decodes) <= MOST_BORROWED
    assert len(moves) == len(set(moves))
