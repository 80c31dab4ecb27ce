"""Fault points: silent unless armed, and exact about whom they hit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_engine.errors import ConfigError
from tests.faults.points import KILLED_EXIT_CODE, FaultPoints, InjectedFault
from tests.worker.fakes import make_request

REQUESTS = [make_request(1, [5, 6]), make_request(2, [7, 8])]


def test_what_is_not_armed_hits_nobody() -> None:
    assert FaultPoints().hit("eng.before_step", REQUESTS) == frozenset()


@pytest.mark.parametrize(
    ("point", "action", "argument"),
    [
        ("eng.nowhere", "raise", ""),
        ("eng.mid_step", "explode", ""),
        ("eng.mid_step", "raise", "token=x"),
        ("eng.mid_step", "raise", "who=1"),
        ("eng.mid_step", "raise", "token"),
        ("eng.mid_step", "corrupt", ""),
        ("dst.mid_copy", "nan", ""),
        ("dst.mid_copy", "raise", "request=3"),
        ("dst.after_copy", "delay", "token=3"),
        ("dst.before_ack", "nan", ""),
        ("src.after_offer", "corrupt", ""),
    ],
)
def test_unknown_words_are_refused(point: str, action: str, argument: str) -> None:
    with pytest.raises(ConfigError):
        FaultPoints().arm(point, action, argument)


def test_a_fault_hits_what_matches_and_only_there() -> None:
    faults = FaultPoints()
    faults.arm("eng.mid_step", "nan", "token=8")
    assert faults.hit("eng.mid_step", REQUESTS) == {2}
    assert faults.hit("eng.mid_step", REQUESTS[:1]) == frozenset()
    assert faults.hit("eng.before_step", REQUESTS) == frozenset()
    faults.arm("eng.mid_step", "nan", "request=1")
    assert faults.hit("eng.mid_step", REQUESTS) == {1}
    faults.arm("eng.mid_step", "nan")
    assert faults.hit("eng.mid_step", REQUESTS) == {1, 2}
    faults.arm("eng.mid_step", "off")
    assert faults.hit("eng.mid_step", REQUESTS) == frozenset()


def test_times_counts_the_steps_that_matched() -> None:
    faults = FaultPoints()
    faults.arm("vis.before_step", "raise", "token=5 times=2")
    faults.hit("vis.before_step", REQUESTS[1:])
    for _ in range(2):
        with pytest.raises(InjectedFault):
            faults.hit("vis.before_step", REQUESTS)
    assert faults.hit("vis.before_step", REQUESTS) == frozenset()


def test_delay_sleeps() -> None:
    faults = FaultPoints()
    faults.arm("eng.before_step", "delay", "seconds=0.05 times=1")
    began = time.monotonic()
    faults.hit("eng.before_step", REQUESTS)
    assert time.monotonic() - began >= 0.05


def test_faults_of_copies_hit_any_copy_and_tell_only_corruption() -> None:
    faults = FaultPoints()
    assert not faults.hit_copy("dst.mid_copy")
    faults = FaultPoints()
    faults.arm("dst.mid_copy", "corrupt", "times=2")
    faults.arm("dst.after_copy", "delay", "seconds=0 times=1")
    assert faults.is_armed("dst.after_copy") and not faults.hit_copy("dst.after_copy")
    assert not faults.is_armed("dst.after_copy")
    assert [faults.hit_copy("dst.mid_copy") for _ in range(3)] == [True, True, False]
    faults.arm("dst.after_copy", "raise")
    for _ in range(2):
        with pytest.raises(InjectedFault):
            faults.hit_copy("dst.after_copy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "hit",
    [
        "faults.hit('eng.mid_step', [make_request(1, [5])])",
        pytest.param("faults.hit_copy('dst.mid_copy')", marks=pytest.mark.slow),
    ],
)
def test_kill_ends_the_process_at_once(hit: str) -> None:
    code = (
        "from tests.faults.points import FaultPoints\n"
        "from tests.worker.fakes import make_request\n"
        "faults = FaultPoints()\n"
        "faults.arm('eng.mid_step', 'kill', 'token=5')\n"
        "faults.hit('eng.mid_step', [make_request(1, [4])])\n"
        "print('alive', flush=True)\n"
        "faults.arm('dst.mid_copy', 'kill')\n"
        f"{hit}\n"
        "print('still alive', flush=True)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (KILLED_EXIT_CODE, "alive\n"), done.stderr
