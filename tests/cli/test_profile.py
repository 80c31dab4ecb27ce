"""`hydra-engine profile` as a person types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Here

ROOT = Path(__file__).parents[2]


def profile(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hydra_engine", "profile", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)


@pytest.mark.slow
def test_the_demo_is_measured_saved_and_shown_again(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "p.json"
    options = ("demo", "--tpot-slo", "40ms", "--seconds", "4", "--threads", "1")
    done = profile(*options, "--output", str(output), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("language steps alone", "vision steps alone", "both lanes at once"):
        assert words in done.stdout
    assert ("a limit of 40.00 ms" in done.stdout) != ("no limits from this: busy, measure again" in done.stdout)
    (saved,) = (tmp_path / "hydra-engine" / "profiles").iterdir()
    assert saved.read_bytes() == output.read_bytes() and str(saved) in done.stdout

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    again = here("profile", *options, "--cached")
    assert again.returncode == 0, again.stderr
    assert "saved profile" in again.stdout and "measured just now" not in again.stdout


@pytest.mark.slow
def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for arguments, code, words in (
        (("no-such-folder",), 3, "no model directory"),
        (("demo", "--seconds", "0"), 2, "--seconds"),
        (("demo", "--tpot-slo", "soon"), 2, "40ms"),
        (("demo", "--seconds", "0.1", "--output", str(tmp_path / ("x" * 300))), 2, "cannot be written"),
    ):
        done = profile(*arguments, cache=tmp_path)
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.strip().splitlines()[-1].startswith("hydra-engine: ") and words in done.stderr
        assert "Traceback" not in done.stderr
