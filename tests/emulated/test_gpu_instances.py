"""The cases of tests/gpu/test_instances.py on emulated devices, so that none of them meets a GPU untried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hydra_engine.cluster.supervisor import Supervisor
from tests.emulated.cuda import emulated_cuda
from tests.emulated.process import FINDINGS
from tests.gpu import test_instances as cases

pytestmark = [pytest.mark.slow, pytest.mark.drawn]

expected, hybrid, tiny = cases.expected, cases.hybrid, cases.tiny
for _name, _case in vars(cases).items():
    if _name.startswith("test_"):
        globals()[_name] = _case


@pytest.fixture
def num_devices() -> int:
    return 1


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Instances are processes, each with a device of its own, that shares a processor with those of the others."""
    monkeypatch.setitem(Supervisor.__init__.__kwdefaults__, "command", [sys.executable, "-m", "tests.emulated.process"])
    monkeypatch.setenv(FINDINGS, str(tmp_path))
    monkeypatch.setattr(cases, "LIMIT_S", 1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1 << 30, 1 << 30))
    with emulated_cuda():
        yield
