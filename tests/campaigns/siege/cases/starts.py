"""Servers that get a signal at a random moment of their start, and one with few descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
from functools import partial

from tests.campaigns.fuzz import golden_bodies
from tests.campaigns.siege import oracles, processes
from tests.campaigns.siege.clients import CHAT, Client, beside
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.running import Server
from tests.campaigns.siege.stage import Case, Stage

_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_TURNS = 4
_FEW = 64
_ASKED = 50  # times, before an answer is the last one
_POWERLESS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0))
"""
_RUN = "os.execv(sys.argv[1], sys.argv[1:])"
_LIMITED = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({_FEW}, {_FEW})); {_RUN}"


async def _first_child(server: Server) -> None:
    """Waits for it: by then the interpreter has read enough of ours to know what a signal is."""
    for _ in range(3000):
        if server.family() or server.process.poll() is not None:
            return
        await asyncio.sleep(0.02)


async def _one(number: signal.Signals, after_s: float, topology: str, *, at_once: bool) -> list[Finding]:
    """`after_s` counts from the beginning if `at_once`, else from the first child on."""
    server = await asyncio.to_thread(Server, topology=topology, module="hydra_engine")
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
    """Three at once, each by another signal: first as soon as there is a child, then at random moments, at last from
    the beginning of the interpreter on."""
    rng = random.Random(f"{stage.seed}/starts/{turn}")
    topologies = ["EPD", "EP+D", "EPD"]
    max_s = (0.1, 1.0, 3.0, 2.0)[turn]
    ending = [
        _one(number, rng.uniform(0.0, max_s), topology, at_once=turn == _TURNS - 1)
        for number, topology in zip(_SIGNALS, topologies, strict=True)
    ]
    return [finding for findings in await asyncio.gather(*ending) for finding in findings]


async def hangup(_stage: Stage) -> list[Finding]:
    """SIGHUP without a file of keys, again and again from the first moment that there is a child: it ends nobody."""
    server = await asyncio.to_thread(partial(Server, topology="EPD", module="hydra_engine", with_keys=False))
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


async def hangup_with_keys(stage: Stage) -> list[Finding]:
    """SIGHUP under streams: carol's key holds then, alice's does not, and both streams are what they are alone. A file
    without keys changes nothing."""
    server = await asyncio.to_thread(Server, topology="EPD")
    try:
        await asyncio.to_thread(server.wait_ready)
        alice, bob, carol = map(server.client, ("alice", "bob", "carol"))
        body = golden_bodies()[0] | {"max_tokens": 1500}
        right = await bob.stream(body)
        streams = [asyncio.create_task(client.stream(body)) for client in (alice, bob)]
        await asyncio.sleep(stage.rng.uniform(0.1, 0.5))
        server.write_keys("bob", "carol")
        processes.send(server.pid, signal.SIGHUP)
        findings = await _until_models(carol, 200, "carol's new key") + await _until_models(
            alice, 401, "alice's old key"
        )
        server.write_keys()
        processes.send(server.pid, signal.SIGHUP)
        findings += await _until_models(bob, 200, "bob's key, of a file that is empty now")
        for streamed in await asyncio.gather(*streams):
            findings += oracles.bystander(streamed, right.told)
        return findings
    finally:
        server.kill()


async def _until_models(client: Client, status: int, what: str) -> list[Finding]:
    """Asks until the status is this."""
    for _ in range(_ASKED):
        answer = await client.ask(client.wire("GET", "/v1/models"))
        if answer.status == status:
            return []
        await asyncio.sleep(0.1)
    return [Finding("walls", f"{what}: {answer.status} after SIGHUP")]


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


async def unreadable(_stage: Stage) -> list[Finding]:
    """A process of the same user, without root's powers, cannot read the environment of a server with keys."""
    prefix = (sys.executable, "-c", _POWERLESS + _RUN)
    server = await asyncio.to_thread(partial(Server, topology="EPD", prefix=prefix, module="hydra_engine"))
    try:
        await _first_child(server)
        code = f"{_POWERLESS}print(open('/proc/{server.pid}/environ').read())"
        read = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await read.communicate()
        return oracles.secrets_in(output, [server.keys["admin"]], "what another process reads of its environment")
    finally:
        server.kill()


async def full_disk(stage: Stage) -> list[Finding]:
    """A place for packed weights without room: it starts without them."""
    if not stage.has_networks:
        stage.skipped.append("starts/full disk, for nothing can be mounted here")
        return []
    with tempfile.TemporaryDirectory(prefix="siege-full-") as folder:
        await _command("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder)
        server = await asyncio.to_thread(
            partial(Server, "--packed-cache", folder, topology="EPD", module="hydra_engine")
        )
        try:
            await asyncio.to_thread(server.wait_ready)
            return []
        except RuntimeError as error:
            return [Finding("ends", str(error)[-300:])]
        finally:
            server.kill()
            await _command("umount", folder)


async def _command(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    await process.wait()


CASES = [
    *(Case("starts", f"killed {turn}", partial(killed, turn), alone=True) for turn in range(_TURNS)),
    Case("starts", "unreadable", unreadable, alone=True),
    Case("starts", "full disk", full_disk, alone=True),
    Case("starts", "drained", drained, alone=True),
    Case("starts", "SIGHUP", hangup, alone=True),
    Case("starts", "SIGHUP with keys", hangup_with_keys, alone=True),
    Case("starts", "64 descriptors", descriptors, alone=True),
]
