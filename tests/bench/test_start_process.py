"""A process that a benchmark starts is ended, also by a signal that comes while it starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench import common

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture(autouse=True)
def exits() -> Iterator[None]:
    """The handler of benchmarks, for the length of a test."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_ended_by_a_signal_that_comes_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit, match="143"):
        common.start_process(SLEEPS)
    assert started[0].returncode == -signal.SIGKILL


def test_the_handler_is_the_same_behind_it() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    process = common.start_process(SLEEPS)
    assert process.poll() is None and signal.getsignal(signal.SIGTERM) is handler
    with pytest.raises(FileNotFoundError):
        common.start_process(["no-such-program"])
    assert signal.getsignal(signal.SIGTERM) is handler
    process.kill()
    process.wait()
