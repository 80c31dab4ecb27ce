"""The times of decodes by their places: what a member waited before it joined goes with it, wherever it sits."""

from __future__ import annotations

import numpy as np
import pytest

from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.decodes import DecodeTimes
from hydra_engine.scheduler.timeline import Timeline
from tests.scheduler.sim import make_request


def times_of(*latest_token_s: float) -> tuple[DecodeTimes, list[Timeline]]:
    """Members with a limit of 50 ms whose latest steps ended at 1.0 and whose latest tokens came at these times."""
    times, timelines = DecodeTimes(4), []
    for number, token_s in enumerate(latest_token_s):
        state = RequestState.new(make_request(number, 4), number, 0.0)
        timelines.append(timeline := Timeline("here", 0.0, has_images=False, tpot_limit_s=0.05))
        timeline.first_token_s, timeline.last_token_s, timeline.last_s = 0.5, token_s, 1.0
        times.join(state, timeline)
    return times, timelines


@pytest.mark.parametrize("alone", [slice(0, 1), np.array([0])], ids=["the first", "one of them"])
def test_what_a_member_waited_before_it_joined_is_kept_until_its_first_token(alone: slice | np.ndarray) -> None:
    times, _ = times_of(1.0, 0.9)
    times.tick(alone, 1.02, batch=1, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 0]
    times.tick(slice(0, 2), 1.04, batch=2, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 1], "0.1 s before its latest step, and 0.04 s behind"
    times.tick(slice(0, 2), 1.08, batch=2, gap_s=9.0)
    assert times.elapsed(slice(0, 2))[1].tolist() == [0, 1], "counted once"


def test_the_last_member_takes_its_times_along_to_the_place_of_who_left() -> None:
    times, timelines = times_of(1.0, 1.0, 0.9)
    times.leave(0)
    times.tick(slice(0, 2), 1.04, batch=2, gap_s=9.0)
    for place in (0, 0):
        times.leave(place)
    assert [timeline.late_gaps for timeline in timelines] == [0, 0, 1]
    assert [timeline.last_s for timeline in timelines] == [1.0, 1.04, 1.04]
    assert [timeline.last_token_s for timeline in timelines] == [1.0, 1.04, 1.04]


def test_who_leaves_before_a_token_came_leaves_the_time_of_its_latest_one_as_it_was() -> None:
    times, (timeline,) = times_of(0.7)
    times.leave(0)
    assert (timeline.last_token_s, timeline.last_s) == (0.7, 1.0)
