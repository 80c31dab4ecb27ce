"""The instance as a process of its own: same answers, and nobody outlives the other in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydra_engine import Engine
from hydra_engine.errors import CheckpointError, Unavailable
from tests.engine.conftest import EngineFactory

OPTIONS = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def instance_pid(engine: Engine) -> int:
    (instance,) = engine.instances()
    assert instance.pid is not None
    return instance.pid


def test_a_killed_instance_is_started_again_and_its_requests_go_on(make_engine: EngineFactory) -> None:
    engine = make_engine(processes=True, recovery_s=30.0)
    expected = engine.generate("Hello", **OPTIONS).token_ids
    handle = engine.submit("Hello", **OPTIONS)
    next(iter(handle))
    os.kill(instance_pid(engine), signal.SIGKILL)
    result = handle.result(60)
    assert result.token_ids == expected
    (instance,) = engine.instances()
    assert instance.restarts == 1
    assert engine.health() == (True, "ok")
    *_, lost = [span for span in result.timeline if span.stage == "lost"]
    assert (lost.instance, lost.cause) == (instance.name, "instance lost, tried again")
    (gap,) = [span for span in result.timeline if span.blame and span.blame[0].kind == "lost"]
    assert gap.start_s == lost.start_s and gap.end_s > lost.end_s > result.metrics.ttft_s
    assert result.metrics.slo.late_by["lost"] == 1


@pytest.mark.usefixtures("started_in_full")
@pytest.mark.slow
def test_requests_do_not_wait_for_a_killed_instance_for_ever(make_engine: EngineFactory) -> None:
    engine = make_engine(processes=True, recovery_s=0.2)
    handle = engine.submit("Hello", **OPTIONS)
    next(iter(handle))
    os.kill(instance_pid(engine), signal.SIGKILL)
    with pytest.raises(Unavailable) as caught:
        handle.result(30)
    assert caught.value.code == "instance_lost"
    assert engine.health() == (False, "instance_lost")
    while not engine.health()[0]:
        time.sleep(0.05)


@pytest.mark.slow
def test_killing_the_frontend_ends_the_instance(tiny_model: Path) -> None:
    code = (
        "import sys\nfrom hydra_engine import Engine\n"
        f"e = Engine({str(tiny_model)!r}, processes=True, threads=1)\n"
        "h = e.submit('Hello', temperature=0, max_tokens=400, ignore_eos=True)\n"
        "next(iter(h))\nprint(e.instances()[0].pid, flush=True)\nimport time; time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    frontend = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert frontend.stdout is not None
    pid = int(frontend.stdout.readline())
    assert alive(pid)
    frontend.kill()
    killed = time.monotonic()
    frontend.wait()
    frontend.stdout.close()
    while alive(pid):
        assert time.monotonic() - killed < 30, "the instance outlived its frontend"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("started_in_full")
def test_signals_to_the_group_are_left_to_the_frontend(make_engine: EngineFactory) -> None:
    engine = make_engine(processes=True)
    assert (
        b"--name\0epd0" in Path(f"/proc/{instance_pid(engine)}/cmdline").read_bytes()
    )  # whoever lists them sees which
    os.kill(instance_pid(engine), signal.SIGINT)
    os.kill(instance_pid(engine), signal.SIGTERM)
    assert len(engine.generate("Hello", temperature=0, max_tokens=3, ignore_eos=True).token_ids) == 3


def test_a_checkpoint_error_of_the_instance_reaches_the_caller(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        if not file.name.endswith(".safetensors"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="safetensors"):
        Engine(tmp_path, processes=True)


def test_closing_leaves_no_process(make_engine: EngineFactory) -> None:
    engine = make_engine(processes=True)
    pid = instance_pid(engine)
    engine.close()
    assert not alive(pid)


@pytest.mark.slow
def test_nothing_listens(make_engine: EngineFactory) -> None:
    engine = make_engine(processes=True)
    for pid in (os.getpid(), instance_pid(engine)):
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                columns = line.split()
                assert not (columns[3] == "0A" and columns[9] in inodes), f"process {pid} listens: {columns[1]}"
