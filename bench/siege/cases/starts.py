"""Servers that get a signal at a random moment of their start, and one with few descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from functools import partial

from bench.siege import oracles, processes
from bench.siege.clients import CHAT, beside
from bench.siege.oracles import Finding
from bench.siege.running import Server
from bench.siege.stage import Case, Stage

_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_FEW = 64
_LIMITED = (
    f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({_FEW}, {_FEW})); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


async def _first_child(server: Server) -> None:
    """Waits for it: by then the interpreter has read enough of ours to know what a signal is."""
    for _ in range(3000):
        if server.family() or server.process.poll() is not None:
            return
        await asyncio.sleep(0.02)


async def _one(number: signal.Signals, after_s: float, topology: str, *, at_once: bool) -> list[Finding]:
    """`after_s` counts from the beginning if `at_once`, else from the first child on."""
    server = await asyncio.to_thread(Server, topology=topology)
    try:
        if not at_once:
            await _first_child(server)
        await asyncio.sleep(after_s)
        family = [process.pid for process in server.family()]
        used = {pid: processes.cpu_s(pid) for pid in (server.pid, *family)}
        processes.send(server.pid, number)
        findings = await oracles.ends([server.pid, *family], used)
        if family:
            code, when = server.process.poll(), f"{number.name} {after_s:.1f} s after the start"
            if number is signal.SIGTERM and code not in (0, None):
                findings.append(Finding("ends", f"{when}: exit code {code}"))
            if "Traceback" in server.log:
                findings.append(Finding("ends", f"{when}: {server.log[-300:]!r}"))
        return findings
    finally:
        server.kill()


async def killed(turn: int, stage: Stage) -> list[Finding]:
    """Three at once, each by another signal."""
    rng = random.Random(f"{stage.seed}/starts/{turn}")
    topologies = ["EPD", "EP+D", "EPD"]
    ending = [
        _one(number, rng.uniform(0.05, 2.5), topology, at_once=turn == 0)
        for number, topology in zip(_SIGNALS, topologies, strict=True)
    ]
    return [finding for findings in await asyncio.gather(*ending) for finding in findings]


async def hangup(_stage: Stage) -> list[Finding]:
    """SIGHUP, again and again from the first moment that there is a child: it ends nobody."""
    server = await asyncio.to_thread(Server, topology="EPD")
    try:
        await _first_child(server)
        while not server.is_ready and server.process.poll() is None:
            processes.send(server.pid, signal.SIGHUP)
            await asyncio.sleep(0.3)
        if (code := server.process.poll()) is not None:
            return [Finding("ends", f"SIGHUP ended the start: {code}")]
        await asyncio.to_thread(server.wait_ready)
        processes.send(server.pid, signal.SIGHUP)
        await asyncio.sleep(0.3)
        answer = await server.client("bob").ask(server.client("bob").wire("GET", "/health"))
        return [] if answer.status == 200 else [Finding("ends", f"after SIGHUP: {answer.status}")]
    finally:
        server.kill()


async def drained(stage: Stage) -> list[Finding]:
    """SIGTERM under streams that would go on for long: exit code 0, and nobody is left."""
    server = await asyncio.to_thread(Server, topology="EP+D")
    try:
        await asyncio.to_thread(server.wait_ready)
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1900, "ignore_eos": True, "n": 16}
        async with beside((server.client("alice").post(CHAT, body) for _ in range(4)), stage.rng.uniform(0.0, 1.0)):
            family = [process.pid for process in server.family()]
            processes.send(server.pid, signal.SIGTERM)
            findings = await oracles.ends([server.pid, *family], {}, cpu_s=oracles.ENDS_S)
            if (code := server.process.poll()) not in (0, None):
                findings.append(Finding("ends", f"exit code {code} after SIGTERM under load"))
        return findings
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
    Case("starts", "drained", drained, alone=True),
    Case("starts", "SIGHUP", hangup, alone=True),
    Case("starts", "64 descriptors", descriptors, alone=True),
]
