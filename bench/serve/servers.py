"""The servers under test: started here on a free port, or running already. Does not know loads.

A started server writes its log to a file and says `ready on URL` on standard error, as `hydra-engine serve` and
`bench.peers.transformers_server` do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import start_process
from hydra_terminal.load.target import ServerFailed, Target, identify

ROOT = Path(__file__).parents[2]
_READY = "ready on "
_START_S = 600.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure: `command` starts it, or it runs already at `base_url`. `takes_limits`: it is this engine and
    gets --tpot-slo and --ttft-slo."""

    name: str
    command: tuple[str, ...] = ()
    base_url: str = ""
    key: str | None = None
    takes_limits: bool = False

    def document(self) -> dict[str, Any]:
        # Paths say nothing to others; the flags do.
        words = [Path(word).name if word.startswith("/") else word for word in self.command]
        return {"name": self.name, "command": shlex.join(words) or None, "base_url": self.base_url or None}


def ours(name: str, model: str, flags: str = "", *, baseline: str = "") -> Server:
    """`hydra-engine serve` of this source tree, or one of `bench.baselines`."""
    words = ("bench.baselines", baseline) if baseline else ("hydra_engine", "serve")
    command = (sys.executable, "-m", *words, model, "--port", "0", *shlex.split(flags))
    return Server(name, command, takes_limits=True)


@contextlib.contextmanager
def running(server: Server, extra: tuple[str, ...] = ()) -> Iterator[Target]:
    """Starts it where that is to be done, with `extra` flags, and ends it afterwards. Raises ServerFailed."""
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    if server.base_url:
        yield identify(server.name, server.base_url, headers)
        return
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.NamedTemporaryFile(prefix="bench-serve-", suffix=".log") as log:
        process = start_process(
            [*server.command, *extra], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, cwd=ROOT
        )
        try:
            yield identify(server.name, _wait_ready(server, process, Path(log.name)), headers)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the server says; shows what it has said of its start, as memory and graphs."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(_READY):
                print("\n".join([f"{server.name}:", *lines[:number]]), file=sys.stderr, flush=True)
                return line.removeprefix(_READY).strip()
        if process.poll() is not None:
            raise ServerFailed(f"{server.name} ended with code {process.returncode}:\n{text[-1500:]}")
        time.sleep(0.05)
    raise ServerFailed(f"{server.name} was not ready within {_START_S:.0f} s:\n{text[-1500:]}")
