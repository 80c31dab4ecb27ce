"""Load of other programs: real ones, and what the kernel would count."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_engine.profiler.other_load import OtherLoad, busy_note

CORES = sorted(os.sched_getaffinity(0))


def counted(path: Path, ticks: list[tuple[int, int, int]]) -> None:
    """(user, idle, steal) of each usable core; another core is not ours."""
    lines = [
        f"cpu{core} {user} 0 0 {idle} 0 0 0 {steal} 0 0" for core, (user, idle, steal) in zip(CORES, ticks, strict=True)
    ]
    path.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9 9 9", *lines, "cpu9999 99999 0 0 0 0 0 0 0 0 0", "intr 1", ""]))


def test_time_of_others_and_of_the_hypervisor_counts_and_idle_time_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = os.sysconf("SC_CLK_TCK")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counted(tmp_path / "stat", [(0, 0, 0)] * len(CORES))
    other = OtherLoad(tmp_path / "stat")
    now[0] += 100.0
    counted(tmp_path / "stat", [(30 * second, 60 * second, 10 * second)] * len(CORES))
    assert other.share() == pytest.approx(0.4, abs=0.05)  # less what this process took
    counted(tmp_path / "stat", [(0, 100 * second, 0)] * len(CORES))
    assert other.share() == 0.0


def test_without_such_a_file_nothing_is_said(tmp_path: Path) -> None:
    assert OtherLoad(tmp_path / "none").share() == 0.0 and busy_note(0.0) is None


def test_programs_beside_are_seen() -> None:
    """Starts as many programs as there are cores; whatever else runs here only adds to them."""
    other = OtherLoad()
    spin = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    programs = [subprocess.Popen([sys.executable, "-c", spin]) for _ in CORES]
    try:
        time.sleep(0.3)
        share = other.share()
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert busy_note(share) == f"busy, measure again: other programs took {share:.0%} of the cores meanwhile"


def test_own_work_is_no_other_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counted(tmp_path / "stat", [(0, 0, 0)] * len(CORES))
    other, before = OtherLoad(tmp_path / "stat"), time.process_time()
    while time.process_time() - before < 0.3:
        pass
    now[0] += 1.0
    taken = round((time.process_time() - before) * os.sysconf("SC_CLK_TCK"))
    counted(tmp_path / "stat", [(taken, 0, 0), *[(0, 0, 0)] * (len(CORES) - 1)])
    assert other.share() == pytest.approx(0.0, abs=0.05)
