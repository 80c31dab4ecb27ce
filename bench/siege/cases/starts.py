"""Servers that get a signal at a random moment of their start, and one with few descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from functools import partial

from bench.siege import oracles, processes
from bench.siege.oracles import Finding
from bench.siege.running import Server
from bench.siege.stage import Case, Stage

_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_AT_ONCE = 3
_FEW = 64
_LIMITED = (
    f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({_FEW}, {_FEW})); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


async def _one(number: signal.Signals, after_s: float, topology: str) -> list[Finding]:
    server = await asyncio.to_thread(Server, topology=topology)
    try:
        await asyncio.sleep(after_s)
        family = [process.pid for process in server.family()]
        used = {pid: processes.cpu_s(pid) for pid in (server.pid, *family)}
        processes.send(server.pid, number)
        findings = await oracles.ends([server.pid, *family], used)
        code = server.process.poll()
        if number is signal.SIGTERM and code not in (0, None):
            findings.append(Finding("ends", f"SIGTERM {after_s:.1f} s after the start: exit code {code}"))
        if "Traceback" in server.log:
            findings.append(Finding("ends", f"{number.name} {after_s:.1f} s after the start: {server.log[-400:]!r}"))
        return findings
    finally:
        server.kill()


async def killed(turn: int, stage: Stage) -> list[Finding]:
    """Three at once, each by another signal."""
    rng = random.Random(f"{stage.seed}/starts/{turn}")
    topologies = ["EPD", "EP+D", "EPD"]
    ending = [_one(number, rng.uniform(0.05, 4.0), topologies[i]) for i, number in enumerate(_SIGNALS[:_AT_ONCE])]
    return [finding for findings in await asyncio.gather(*ending) for finding in findings]


async def hangup(stage: Stage) -> list[Finding]:
    """SIGHUP ends nobody, at whatever moment."""
    server = await asyncio.to_thread(Server, topology="EPD")
    try:
        await asyncio.sleep(stage.rng.uniform(0.5, 2.0))
        deadline = time.monotonic() + 60
        while not server.port and time.monotonic() < deadline:
            # In the first moments there is no handler yet, in any program.
            processes.send(server.pid, signal.SIGHUP)
            await asyncio.sleep(0.5)
            if server.process.poll() is not None:
                return [Finding("ends", f"SIGHUP ended the start: {server.process.returncode}")]
            with contextlib.suppress(RuntimeError):
                if "ready on" in server.log:
                    await asyncio.to_thread(server.wait_ready)
        await asyncio.sleep(0.5)
        answer = await server.client("bob").get("/health")
        return [] if answer.status == 200 else [Finding("ends", f"after SIGHUP: {answer.status}")]
    finally:
        server.kill()


async def descriptors(_stage: Stage) -> list[Finding]:
    """A limit of 64: more sockets than that wait or are refused, the log stays short, and it serves again."""
    server = await asyncio.to_thread(partial(Server, topology="EPD", prefix=(sys.executable, "-c", _LIMITED)))
    opened: list[asyncio.StreamWriter] = []
    try:
        await asyncio.to_thread(server.wait_ready)
        before = server.log_bytes
        for _ in range(100):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    opened.append((await asyncio.open_connection("127.0.0.1", server.port))[1])
        await asyncio.sleep(2.0)
        written = server.log_bytes - before
        for writer in opened:
            writer.transport.abort()
        findings = []
        if written > oracles.MAX_LOG_BYTES:
            findings.append(Finding("footprint", f"{written} bytes of log with {_FEW} descriptors"))
        try:
            answer = await server.client("bob").get("/health", within_s=30)
            if answer.status != 200:
                findings.append(Finding("ends", f"after {_FEW} descriptors were used up: {answer.status}"))
        except (OSError, TimeoutError) as error:
            findings.append(Finding("ends", f"after {_FEW} descriptors were used up: {type(error).__name__}"))
        return findings
    finally:
        server.kill()


CASES = [
    *(Case("starts", f"killed {turn}", partial(killed, turn), alone=True) for turn in range(4)),
    Case("starts", "SIGHUP", hangup, alone=True),
    Case("starts", "64 descriptors", descriptors, alone=True),
]
