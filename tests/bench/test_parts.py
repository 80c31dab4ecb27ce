"""Long checks in parts: real processes that end well, fail, hang, are missing something, or come too late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.micro.parts import Outcome, Part, Runner

ROOT = Path(__file__).parents[2]


def script(name: str, code: str, **options: object) -> Part:
    settings: dict[str, object] = {"limit_s": 20.0, "min_s": 0.1} | options
    return Part(name, (sys.executable, "-c", code), **settings)  # type: ignore[arg-type]


def run(folder: Path, *parts: Part, budget_s: float = 60.0) -> tuple[dict[str, Outcome], str]:
    said: list[str] = []
    runner = Runner(folder, budget_s, say=said.append)
    runner.run(parts)
    return runner.outcomes, "\n".join(said)


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Ended; one that nobody has asked for its status yet counts."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_part_that_fails_takes_nothing_from_the_others(tmp_path: Path) -> None:
    outcomes, said = run(
        tmp_path,
        script("first", "print('all well')"),
        script("second", "print('so far'); raise SystemExit('it broke')"),
        script("third", "import os; print(os.environ['HYDRA_X'])", environment={"HYDRA_X": "told"}),
    )
    assert [(o.state, o.said) for o in outcomes.values()] == [
        ("ok", "all well"),
        ("failed", "it broke"),
        ("ok", "told"),
    ]
    assert "| so far" in said and "| all well" not in said
    assert (tmp_path / "second.log").read_text() == "so far\nit broke\n"


@pytest.mark.slow
def test_a_part_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    """The part and its child ignore SIGTERM."""
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(os.getpid(), child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    outcomes, _ = run(tmp_path, script("hangs", code, limit_s=1.5), script("after", "print('here')"))
    assert outcomes["hangs"].state == "out of time" and outcomes["hangs"].seconds < 15
    assert outcomes["after"].state == "ok"
    pids = [int(word) for word in (tmp_path / "hangs.log").read_text().split()]
    assert len(pids) == 2 and all(map(gone, pids))


def test_a_part_whose_program_is_not_there_takes_nothing_from_the_others(tmp_path: Path) -> None:
    outcomes, _ = run(tmp_path, Part("absent", ("/no/such/program",), 9.0), script("after", "print('here')"))
    assert [outcome.state for outcome in outcomes.values()] == ["failed", "ok"]
    assert "cannot be run: " in outcomes["absent"].said and "/no/such/program" in outcomes["absent"].said


def test_what_a_part_leaves_running_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    outcomes, _ = run(tmp_path, script("leaves", code))
    assert outcomes["leaves"].state == "ok" and gone(int(outcomes["leaves"].said))


def test_what_cannot_be_run_is_not_begun(tmp_path: Path) -> None:
    outcomes, _ = run(
        tmp_path,
        script("breaks", "raise SystemExit(3)"),
        script("follows", "print('no')", after="breaks"),
        script("lacks", "print('no')", packages=("json", "no_such_module_here", "nor_this")),
        script("long", "print('no')", min_s=1000.0),
        script("short", "print('yes')"),
    )
    assert [(o.name, o.state) for o in outcomes.values()] == [
        ("breaks", "failed"),
        ("follows", "not run"),
        ("lacks", "not run"),
        ("long", "not run"),
        ("short", "ok"),
    ]
    assert outcomes["follows"].said == "breaks: failed"
    assert outcomes["lacks"].said == "needs no_such_module_here, nor_this, not installed"
    assert "it needs 1000" in outcomes["long"].said
    assert not (tmp_path / "follows.log").exists()


@pytest.mark.slow
def test_no_part_outlives_the_budget(tmp_path: Path) -> None:
    began = time.monotonic()
    sleeps = [script(f"sleeps-{i}", "import time; time.sleep(30)", min_s=0.8) for i in range(3)]
    outcomes, _ = run(tmp_path, *sleeps, budget_s=2.0)
    assert time.monotonic() - began < 12
    assert [o.state for o in outcomes.values()] == ["out of time", "not run", "not run"]


def test_the_last_line_of_a_document_is_no_message(tmp_path: Path) -> None:
    outcomes, _ = run(tmp_path, script("bench", "print('a   row'); print('{\"rows\": []}')"))
    assert outcomes["bench"].said == "a row"


def test_who_is_asked_to_end_ends_the_running_part_too(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom bench.micro.parts import Part, Runner\n"
        "inner = (sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)')\n"
        f"Runner(Path({str(tmp_path)!r}), 60.0).run([Part('inner', inner, 50.0)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "inner.log", time.monotonic() + 20
    while not (log.exists() and log.read_text().strip()):
        assert time.monotonic() < deadline and outer.poll() is None
        time.sleep(0.02)
    pid = int(log.read_text())
    os.kill(outer.pid, signal.SIGTERM)
    assert outer.wait(20) != 0
    assert gone(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_mean_afterwards_what_they_meant_before(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(number)
    run(tmp_path, script("one", "pass"))
    assert signal.getsignal(number) is before


def limits(folder: Path, *parts: Part, budget_s: float) -> list[int]:
    """Seconds that the parts were given, read from the output."""
    _, said = run(folder, *parts, budget_s=budget_s)
    return [int(line.rpartition("at most ")[2].split()[0]) for line in said.splitlines() if "at most" in line]


def test_what_is_planned_for_later_parts_is_kept_for_them(tmp_path: Path) -> None:
    """Seconds that a part leaves over may be used by the next one."""
    first = script("first", "pass", limit_s=80.0, planned_s=10.0)
    second = script("second", "pass", limit_s=80.0, planned_s=30.0)
    third = script("third", "pass", limit_s=20.0, planned_s=15.0)
    assert limits(tmp_path, first, second, third, budget_s=60.4) == [15, 45, 20]
    late = script("late", "pass", limit_s=80.0, planned_s=5.0)
    assert limits(tmp_path, late, replace(second, planned_s=90.0), budget_s=30.4) == [5, 30], "its own for certain"


def test_a_part_is_repeated_only_where_it_went_wrong(tmp_path: Path) -> None:
    outcomes, _ = run(
        tmp_path,
        script("well", "pass"),
        script("well-again", "pass", unless="well"),
        script("breaks", "import os; os.kill(os.getpid(), 9)"),
        script("breaks-again", "pass", unless="breaks"),
    )
    assert [(o.name, o.state, o.said) for o in outcomes.values()] == [
        ("well", "ok", ""),
        ("breaks", "failed", "ended by SIGKILL"),
        ("breaks-again", "ok", ""),
    ]
