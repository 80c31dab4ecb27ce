"""A start without a terminal: one line per phase, whatever the number of instances."""

from __future__ import annotations

import pytest

from hydra_engine.core.messages import Loading
from hydra_engine.frontend.progress import JointProgress, LoadProgress


def test_each_phase_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    joint = JointProgress()
    with LoadProgress(False, told.append) as shown:
        for name, what, done in (
            *(("e0", "weights", 1), ("e0", "weights", 2), ("e0", "warm-up", 1), ("p0", "weights", 1)),
            *(("p0", "weights", 2), ("e0", "warm-up", 2), ("p0", "warm-up", 2), ("p0", "step times", 1)),
        ):
            shown.update(joint.add(name, Loading(what, done, 2)))
    assert told == ["starting", "loading weights", "warm-up", "step times"]
    assert not capsys.readouterr().err


def test_with_bars_or_nobody_to_tell_there_are_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    for shown in (LoadProgress(True, told.append), LoadProgress(False)):
        with shown:
            shown.update(Loading("weights", 1, 2))
    assert not told and "loading weights" in capsys.readouterr().err
