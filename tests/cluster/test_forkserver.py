"""Processes that the tests fork from one that has torch loaded are what they would be if started in full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forkserver

PROBE = (sys.executable, "-m", "tests.cluster.probe")


@pytest.mark.parametrize("arguments", [("facts",), ("exit", "7"), ("fail",), ("words",)], ids="-".join)
def test_a_forked_process_is_like_one_that_starts_in_full(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "HYDRA_WORD": "spring", "PYTHONPATH": str(forkserver.ROOT)}
    read, write = os.pipe()
    found = []
    for in_full in (False, True):
        if in_full:
            monkeypatch.setenv(forkserver.EXEC_VARIABLE, "1")
        done = subprocess.run(
            [*PROBE, *arguments, str(write)],
            input="given\n",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            pass_fds=[write],
            start_new_session=True,
        )
        last_words = done.stderr.strip().splitlines()[-1:]
        found.append((done.returncode, done.stdout, last_words, os.read(read, 100) if arguments == ("facts",) else b""))
    os.close(read)
    os.close(write)
    assert found[0] == found[1]


def test_a_signal_is_how_it_ended() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen([*PROBE, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as one:
            assert one.stdout is not None and one.stdout.readline() == "waiting\n"
            assert one.poll() is None
            one.send_signal(number)
            assert one.wait(30) == -number
