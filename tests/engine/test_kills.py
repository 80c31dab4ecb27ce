"""Kill an instance of each role while requests run: each request ends with its tokens or a clear error; no leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.kills import campaign


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "kills"), [("E+P+D", 4), ("2EPD", 2)])
def test_a_killed_instance_takes_nothing_with_it(tiny_model: Path, topology: str, kills: int) -> None:
    tally = campaign(tiny_model, topology, kills, concurrency=8)
    assert tally.kills == kills
    assert tally.right > 0
    assert tally.clean, tally


@pytest.mark.slow
def test_a_killed_instance_takes_nothing_with_it_where_blocks_go_through_host_memory(tiny_model: Path) -> None:
    tally = campaign(tiny_model, "E+P+D", 6, concurrency=8, transport="host")
    assert tally.kills == 6 and tally.right > 0
    assert tally.clean, tally


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "host"])
def test_a_stopped_instance_that_wakes_up_does_no_harm(tiny_model: Path, transport: str) -> None:
    tally = campaign(tiny_model, "E+P+D", 4, stops=True, concurrency=8, seed=3, transport=transport)
    assert tally.stops > 0
    assert tally.clean, tally
