"""Two real instances with limits of their own: what each reports, and the same tokens as one instance gives."""

from __future__ import annotations

from typing import Any

from tests.engine.conftest import EngineFactory

LIMITS = "EP:token_budget=24,image_budget=64;D:max_num_seqs=3;d0:num_kv_blocks=96"


def test_each_instance_serves_with_its_own_limits(make_engine: EngineFactory) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    prompts = [[7 + number] * 40 for number in range(6)]
    alone = make_engine().generate(prompts, **options)
    engine = make_engine(topology="EP+D", instance_limits=LIMITS, max_num_seqs=8)
    found = {s.name: (s.token_budget, s.max_num_seqs, s.num_kv_blocks, s.image_budget) for s in engine.summaries}
    assert found["ep0"] == (24, 8, 512, 64)
    assert found["d0"][:3] == (64, 3, 96)
    assert [result.token_ids for result in engine.generate(prompts, **options)] == [r.token_ids for r in alone]
    statuses = engine.statuses()
    assert (statuses["ep0"].kv_blocks_total, statuses["d0"].kv_blocks_total) == (512, 96)
