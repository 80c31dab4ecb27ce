"""The cases of drawn tests that are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_commit_draws_a_third_of_the_slow_cases_and_leaves_every_other_test() -> None:
    every, first, again, other = (
        collected(*options, commit=commit)
        for options, commit in (([], "a"), (["--drawn"], "a"), (["--drawn"], "a"), (["--drawn"], "b"))
    )
    drawn = {name for name in every if "test_it_ends_with_a_document" in name}
    assert first == again != other and len(drawn) == 20
    for some in (first, other):
        assert len(some & drawn) == 7 and some - drawn == every - drawn


def collected(*options: str, commit: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, "tests/bench/test_commands.py"]
    environment = os.environ | {"BENCH_COMMIT": commit}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line for line in done.stdout.splitlines() if "::" in line}
