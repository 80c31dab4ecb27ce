"""A script of tests/gpu that has a process of its own there, here line by line on the emulated device."""

from __future__ import annotations

import sys

import pytest

from tests.emulated.cuda import Torch
from tests.emulated.streams import Streams
from tests.gpu import test_device


def test_a_launch_that_cannot_be_captured_spoils_no_other_one(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = test_device._UNCAPTURABLE.replace('"cuda:0"', 'torch.device("cuda:0")')
    monkeypatch.setitem(sys.modules, "torch", Torch(streams))  # type: ignore[arg-type]
    exec(script, {})
    refused, counted = capsys.readouterr().out.splitlines()
    assert refused.startswith("said: the device ") and " failed: " in refused
    assert counted == "said: 8.0", "6 on a GPU: this device computes while it captures, too"


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_capture_that_runs_out_of_memory_says_so_and_spoils_no_other_one(
    streams: Streams, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails_at: int
) -> None:
    script = test_device._LARGE.format(fails_at=fails_at).replace('"cuda:0"', 'torch.device("cuda:0")')
    large = 'torch.empty(2 * device.memory()[1], dtype=torch.uint8, device=torch.device("cuda:0"))'
    assert large in script  # which the host would have to find first
    monkeypatch.setitem(sys.modules, "torch", Torch(streams))  # type: ignore[arg-type]
    exec(script.replace(large, 'raise torch.OutOfMemoryError("no memory")'), {})
    refused, counted = capsys.readouterr().out.splitlines()
    assert refused == "said: OutOfMemoryError"
    assert counted == f"said: {8 + fails_at}.0", "7 on a GPU: this device computes while it captures, too"
