"""Files that a killed process leaves on the machine are removed by the process that reaps it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra_engine.cluster.member import Pace
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Condition
from tests.cluster.recorder import Recorder
from tests.cluster.stand_in import COMMAND

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pages are files on Linux only")


def page_of(pid: int) -> Path:
    """The page that LLVM's OpenMP would make in that process."""
    return Path(f"/dev/shm/__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")


def exists(page: Path) -> bool:
    return page.exists()


def make_page(pid: int) -> None:
    page_of(pid).touch()


@pytest.fixture
def bystander() -> Iterator[Path]:
    page = page_of(os.getpid())
    existed = page.exists()
    page.touch()
    yield page
    if not existed:
        page.unlink()


async def test_pages_of_killed_instances_go_and_those_of_others_stay(bystander: Path) -> None:
    supervisor, recorder = Supervisor(EngineConfig(), processes=True, pace=Pace(), command=COMMAND), Recorder()
    await supervisor.start(recorder)
    pids = []
    try:
        for sent in (signal.SIGKILL, None):
            pid = supervisor.states()[0].pid
            assert pid is not None
            pids.append(pid)
            make_page(pid)
            if sent is not None:
                os.kill(pid, sent)
                await recorder.until(lambda: supervisor.states()[0].restarts == 1)
                await recorder.until(lambda: supervisor.states()[0].condition is Condition.READY)
    finally:
        await supervisor.stop()
    assert len(set(pids)) == 2 and not any(exists(page_of(pid)) for pid in pids)
    assert exists(bystander)
