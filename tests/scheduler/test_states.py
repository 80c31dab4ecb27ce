"""Requests with a recurrent state: one slot each while they run, whoever gives way, and no KV of others."""

from __future__ import annotations

import pytest

from tests.scheduler.sim import Img, Simulator, config, make_request, rows_of


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_every_running_request_has_a_slot_of_its_own(num_slots: int) -> None:
    """Few blocks, so that requests give way; the books are checked after every step."""
    settings = config(max_num_seqs=num_slots, token_budget=12)
    sim = Simulator(kv_blocks=12, kv_size=4, image_blocks=6, image_size=4, config=settings, has_states=True)
    for number in range(12):
        sim.submit(make_request(number, 5, Img(6, 20, name="a"), 3 + number % 4, max_new=9, source=0), number * 1e-3)
    sim.abort(3, 0.01)
    sim.run()
    assert len(sim.finished) == 12
    slots: dict[int, set[int]] = {}
    for _, plan in sim.language_plans:
        held = [row.seq_slot for row in rows_of(plan)]
        assert len(set(held)) == len(held) and all(0 <= slot < num_slots for slot in held)
        for row in rows_of(plan):
            if row.start == 0:
                slots[row.request_id] = {row.seq_slot}
            assert slots[row.request_id] == {row.seq_slot}, "a state moved without beginning anew"
    assert sim.preemptions() > 0 or num_slots < 5
    assert sim.scheduler.ledger().state_slots_held == 0
