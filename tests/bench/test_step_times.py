"""The picture of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import step_times
from hydra_engine.profiler.calibrate import Site, calibrate
from hydra_engine.profiler.fit import Samples, fit
from hydra_engine.profiler.store import Identity, Profile, Reach, save
from tests.profiler.fakes import SIZES, FakeLanes, SquareVision

IDENTITY = Identity("abc", "cpu", "a processor", 2, 2, "throughput", "bfloat16", "native", True, False, 16, "0.1.0")


def profile(*, tower: bool) -> Profile:
    lanes = FakeLanes(noise=0.05)
    vision = SquareVision() if tower else None
    samples: Samples = calibrate(
        Site(lanes, lanes.wake, lanes.clock, SIZES, 500, vision), lambda *_: None, 60.0
    ).samples
    reach = Reach(SIZES.token_budget, SIZES.max_num_seqs, SIZES.image_budget)
    return Profile(IDENTITY, reach, fit(samples), samples, 1e-4, 2e-4, 60, 2, 9.5, "2026-01-02T03:04:05Z")


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "40ms", "0.1ms", "10s"], ids=str)
def test_a_saved_profile_is_drawn_with_and_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    pytest.importorskip("matplotlib")
    file, output = tmp_path / "profile.json", tmp_path / "steps.png"
    for tower in (True, False):
        save(profile(tower=tower), file)
        flags = ["--tpot-slo", limit] if limit is not None else []
        monkeypatch.setattr("sys.argv", ["step_times", str(file), "-o", str(output), *flags])
        step_times.main()
        assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and output.stat().st_size > 20_000
        output.unlink()
