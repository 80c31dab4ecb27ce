"""An instance that encodes and decodes takes decodes over from a busy one, and not a token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.mixed import Mixed, alone, mixture, together
from hydra_engine import Engine
from tests.engine.conftest import EngineFactory, assert_at_rest
from tests.engine.test_topologies import differences


def long_answers() -> list[Mixed]:
    """Requests, more than an instance has slots for, with answers long enough that lending is worth it."""
    some = mixture(140, tokens=250)
    return [r for r in some if not r.pictures and not r.gives_up and len(r.prompt) < 120 and r.sampling.max_tokens > 1]


# The router hands no decodes over here, so those that move were lent.
OPTIONS: dict[str, Any] = {"topology": "ED+PD", "router": "round-robin"}


@pytest.mark.slow
def test_decodes_that_are_lent_go_on_with_the_same_tokens(make_engine: EngineFactory, tiny_model: Path) -> None:
    requests = long_answers()
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=2048) as engine:
        golden = alone(engine, requests)
    engine = make_engine(**OPTIONS, max_num_seqs=6)
    assert differences(requests, together(engine, requests), golden) == []
    assert engine.statuses()["ed0"].transfer.pulled > 0, "nothing was lent"
    assert_at_rest(engine)


@pytest.mark.slow
def test_nothing_is_lent_when_that_is_switched_off(make_engine: EngineFactory) -> None:
    requests = long_answers()
    engine = make_engine(**OPTIONS, max_num_seqs=4, steal_decodes=False)
    together(engine, requests)
    assert engine.statuses()["ed0"].transfer.pulled == 0
