"""A server under siege, as a campaign holds it: started, asked, watched from /proc, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import ROOT
from tests.campaigns.siege import processes, turn_log
from tests.campaigns.siege.clients import Client

START_S = 120.0
END_S = 30.0
KEPT_LOG_BYTES = 1 << 20
_INSTANCE = re.compile(r"(?:cluster\.process|siege\.instance) --name (\S+)")
SMALL = ("--threads", "1", "--pixel-cache-mib", "8", "--shutdown-timeout", "2")


class Server:
    """Has two API keys, alice's and bob's, and an administrator's; carol's is no key before it is written. Raises
    RuntimeError where it does not start."""

    def __init__(
        self,
        *arguments: str,
        model: str = "demo",
        topology: str = "EP+D",
        prefix: Sequence[str] = (),
        module: str = "tests.campaigns.siege.server",
        with_keys: bool = True,
    ) -> None:
        """`prefix`: of the command. `module` "hydra_engine": not watched. `with_keys` False: asks for none."""
        self._folder = TemporaryDirectory(prefix="siege-")
        self.folder = Path(self._folder.name)
        self.keys = {name: f"sk-{name}-{secrets.token_hex(12)}" for name in ("alice", "bob", "carol", "admin")}
        self.key_file = self.folder / "keys"
        self.write_keys("alice", "bob")
        self.log = ""
        self.log_bytes = 0
        self.arguments = ("serve", model, "--port", "0", "--topology", topology, *SMALL, *arguments)
        environment = dict(os.environ, HYDRA_ADMIN_KEY=self.keys["admin"], PYTHONPATH=str(ROOT))
        environment[turn_log.FOLDER] = str(self.folder)
        keys = ("--api-key-file", str(self.key_file)) if with_keys else ()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *self.arguments, *keys],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.port = 0

    def write_keys(self, *names: str) -> None:
        """The file of keys has those of these clients from now on."""
        self.key_file.write_text("".join(f"{name}:{self.keys[name]}\n" for name in names))
        self.key_file.chmod(0o600)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log_bytes += len(line)
            if len(self.log) < KEPT_LOG_BYTES:
                self.log += line.decode(errors="replace")
            if line.startswith(b"ready on "):
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        if not self._ready.wait(START_S) or not (found := re.search(r"^ready on \S+:(\d+)", self.log, re.MULTILINE)):
            log = self.log
            self.kill()
            raise RuntimeError(f"the server has not started: {log[-2000:]}")
        self.port = int(found[1])

    def client(self, name: str) -> Client:
        """`name` "" for one without a key."""
        return Client(self.port, self.keys.get(name, ""))

    # ---- what it consists of

    def family(self) -> list[processes.Process]:
        return processes.descendants(self.pid)

    def instances(self) -> dict[str, int]:
        """Process ids by name."""
        found = {}
        for process in self.family():
            if process.state != "Z" and (name := _INSTANCE.search(processes.command(process.pid))):
                found[name[1]] = process.pid
        return found

    def children(self, module: str = "sandbox.") -> list[int]:
        """Sandboxed processes whose command has `module`."""
        return [p.pid for p in self.family() if p.state != "Z" and module in processes.command(p.pid)]

    async def state(self, *, reset: bool = False, within_s: float = 60.0) -> dict[str, Any]:
        """Counters of `tests.campaigns.siege.server`. Raises TimeoutError if its loop does not answer."""
        answer = await self.client("bob").get("/siege" + "?reset=1" * reset, within_s=within_s)
        shown: dict[str, Any] = json.loads(answer.body)
        return shown

    async def wait_whole(self, within_s: float = 90.0) -> bool:
        """Waits until all instances are ready; returns False if they are not in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                answer = await self.client("bob").get("/health", within_s=10)
                health = json.loads(answer.body)
                if answer.status == 200 and not health["degraded"]:
                    return True
            await asyncio.sleep(0.1)
        return False

    # ---- its end

    def end(self) -> int:
        """Ends it by SIGTERM and returns its exit code. Raises subprocess.TimeoutExpired."""
        processes.send(self.pid, signal.SIGTERM)
        try:
            return self.process.wait(END_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all of it, whatever it does."""
        family = [process.pid for process in self.family()]
        self.process.kill()
        self.process.wait()
        for pid in family:
            processes.send(pid, signal.SIGKILL)
        self._reader.join(5)
        processes.reap(family)
        self._folder.cleanup()
