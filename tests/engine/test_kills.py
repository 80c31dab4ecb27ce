"""Kill an instance of each role while requests run: each request ends with its tokens or a clear error; no leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.kills import campaign


@pytest.mark.parametrize(
    ("topology", "targets"),
    [("E+P+D", "e"), ("E+P+D", "p"), ("E+P+D", "d"), ("EP+D", "ep"), ("ED+P", "ed"), ("2EPD", "epd")],
)
def test_a_killed_instance_takes_nothing_with_it(tiny_model: Path, topology: str, targets: str) -> None:
    tally = campaign(tiny_model, topology, 2, targets=targets, concurrency=8)
    assert tally.kills == 2
    assert tally.right > 0
    assert tally.clean, tally


def test_a_stopped_instance_that_wakes_up_does_no_harm(tiny_model: Path) -> None:
    tally = campaign(tiny_model, "E+P+D", 6, stops=True, concurrency=8, seed=3)
    assert tally.stops > 0
    assert tally.clean, tally
