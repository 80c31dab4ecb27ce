"""Processes are killed and stopped from outside: that is nobody's request's fault, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.campaigns.hostile.pictures import data_url, noise
from tests.campaigns.siege import oracles, processes
from tests.campaigns.siege.clients import CHAT
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.running import Server
from tests.campaigns.siege.stage import Case, Stage

_MESSAGES = [{"role": "user", "content": "x"}]
_GIVEN_S = 0.5  # a request has reached its child by then; a stopped child is given up later than that


def _picture(rng: random.Random) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(noise(rng, 50, 50))}}
    return {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}


def _grammar(rng: random.Random) -> dict[str, Any]:
    words = [f"w{rng.randrange(1 << 40)}" for _ in range(4)]
    return {"model": "demo", "max_tokens": 8, "messages": _MESSAGES, "guided_choice": words}


KINDS: dict[str, tuple[str, Callable[[random.Random], dict[str, Any]]]] = {
    "image": ("sandbox.image_child", _picture),
    "grammar": ("sandbox.grammar_child", _grammar),
}


async def hurt(kind: str, number: signal.Signals, stage: Stage) -> list[Finding]:
    """Stops all children of a kind, and good requests that need them follow. SIGKILL comes when they have been given
    those jobs: an idle child that is killed is noticed before the next job, more often than not."""
    module, make = KINDS[kind]
    rng = stage.rng
    await stage.bob.post(CHAT, make(rng))  # there is one
    pids = stage.server.children(module)
    if not pids:
        return [Finding("ends", f"there is no process with {module}")]
    for pid in pids:
        processes.send(pid, signal.SIGSTOP)
    requests = asyncio.gather(*(stage.bob.post(CHAT, make(rng)) for _ in range(3)))
    if number is signal.SIGKILL:
        await asyncio.sleep(_GIVEN_S)
        for pid in pids:
            processes.send(pid, number)
    answers = await requests
    after = await stage.bob.post(CHAT, make(rng))
    for pid in pids:
        processes.send(pid, signal.SIGCONT)
    findings = oracles.ours(answers)
    if after.status != 200:
        findings.append(Finding("blame", f"after a fault of {kind} children: {after.status} {after.body[:200]!r}"))
    return findings


async def killed_at_work(stage: Stage) -> list[Finding]:
    """Children of both kinds are killed again and again while good requests need them."""
    rng, over = stage.rng, asyncio.Event()

    async def killer() -> None:
        for _ in range(8):
            await asyncio.sleep(rng.uniform(0.02, 0.4))
            if pids := stage.server.children("sandbox."):
                processes.send(rng.choice(pids), signal.SIGKILL)
        over.set()

    killing, answers = asyncio.create_task(killer()), []
    while not over.is_set():
        bodies = [make(rng) for _, make in KINDS.values() for _ in range(3)]
        answers += await asyncio.gather(*(stage.bob.post(CHAT, body) for body in bodies))
    await killing
    return oracles.ours(answers)


async def contained(stage: Stage) -> list[Finding]:
    """Sandboxed processes cannot gain privileges, and may make few system calls where the kernel has seccomp."""
    expected = {"NoNewPrivs": "1"}
    if processes.has_seccomp():
        expected["Seccomp"] = "2"
    findings = []
    for module, make in KINDS.values():
        await stage.bob.post(CHAT, make(stage.rng))
        for pid in stage.server.children(module):
            status = processes.status(pid)
            findings += [
                Finding("walls", f"{module} has {name} {status.get(name)}")
                for name, value in expected.items()
                if status.get(name) != value
            ]
    return findings


async def zombies(stage: Stage) -> list[Finding]:
    """Idle ones that were killed are reaped without anybody asking for one; the footprint is looked at by the stage."""
    for module, make in KINDS.values():
        await stage.bob.post(CHAT, make(stage.rng))
        for pid in stage.server.children(module):
            processes.send(pid, signal.SIGKILL)
    return []


async def instance(number: signal.Signals, stage: Stage) -> list[Finding]:
    """The one that decodes, under streams: they end with what is right or with an honest error."""
    streams = [asyncio.create_task(stage.golden(index % 4)) for index in range(6)]
    await asyncio.sleep(stage.rng.uniform(0.0, 0.4))
    pid = stage.decoder
    processes.send(pid, number)
    findings = []
    for streamed, right in await asyncio.gather(*streams):
        broken = not streamed.ended or b'"error"' in streamed.raw or streamed.status == 503
        if broken and b"instance_lost" not in streamed.raw and b"not_ready" not in streamed.raw:
            findings.append(Finding("blame", f"{streamed.status} {streamed.raw[-300:]!r}"))
        elif not broken and streamed.told != right:
            findings += oracles.bystander(streamed, right)
    if not await stage.server.wait_whole(90):
        findings.append(Finding("ends", f"the instance that got {number.name} has not been replaced"))
    return findings


async def stopped_while_it_starts(stage: Stage) -> list[Finding]:
    """An instance that hangs in its start is replaced."""
    dead = stage.decoder
    processes.send(dead, signal.SIGKILL)
    pid = await _successor(stage.server, dead)
    await asyncio.sleep(stage.rng.uniform(0.1, 0.5))
    processes.send(pid, signal.SIGSTOP)
    whole = await stage.server.wait_whole(90)
    if processes.is_running(pid) or not whole:
        processes.send(pid, signal.SIGCONT)
        return [Finding("ends", "an instance that was stopped while it started has not been replaced")]
    return []


async def killed_again(_stage: Stage) -> list[Finding]:
    """The only one that decodes dies four times while it serves: it is started at once every time, for nobody serves
    meanwhile."""
    server = await asyncio.to_thread(Server)
    try:
        await asyncio.to_thread(server.wait_ready)
        gaps_s, pid = [], server.instances()["d0"]
        for _ in range(4):
            began = time.monotonic()
            processes.send(pid, signal.SIGKILL)
            pid = await _successor(server, pid)
            gaps_s.append(time.monotonic() - began)
            if not await server.wait_whole(90):
                return [Finding("ends", "the instance has not come back")]
        if gaps_s[-1] > 2.0 + 3 * gaps_s[0]:
            told = ", ".join(f"{gap:.1f}" for gap in gaps_s)
            return [Finding("ends", f"seconds without a process that decodes: {told}")]
        return []
    finally:
        server.kill()


async def _successor(server: Server, pid: int) -> int:
    for _ in range(2400):
        found = server.instances().get("d0", pid)
        if found != pid:
            return found
        await asyncio.sleep(0.025)
    raise TimeoutError("nobody has replaced the instance")


async def stand_in(_stage: Stage) -> list[Finding]:
    """Two that can all, of which one only decodes now, dies: the other one decodes meanwhile."""
    server = await asyncio.to_thread(lambda: Server("--recovery-s", "0.3", topology="2EPD"))
    try:
        await asyncio.to_thread(server.wait_ready)
        admin, bob = server.client("admin"), server.client("bob")
        switched = await admin.post("/admin/topology", {"topology": "EP+D"})
        health = json.loads((await bob.get("/health")).body)
        name = next(one["name"] for one in health["instances"] if one["role"].upper() == "D")
        processes.send(server.instances()[name], signal.SIGKILL)
        body = {"model": "demo", "max_tokens": 8, "messages": _MESSAGES}
        answers = [await bob.post(CHAT, body) for _ in range(4)]
        wrong = [f"{answer.status} {answer.code}" for answer in answers if answer.status != 200]
        return [Finding("ends", f"topology {switched.status}; nobody stood in: {one}") for one in wrong]
    finally:
        server.kill()


async def front(stage: Stage) -> list[Finding]:
    """Children are stopped, the front is killed: nobody outlives it."""
    server = stage.drop()
    client = server.client("bob")
    try:
        for _, make in KINDS.values():
            await client.post(CHAT, make(stage.rng))
        for pid in server.children():
            processes.send(pid, signal.SIGSTOP)
        family = [process.pid for process in server.family()]
        used = {pid: processes.cpu_s(pid) for pid in family}
        processes.send(server.pid, signal.SIGKILL)
        server.process.wait()
        return await oracles.ends(family, used)
    finally:
        server.kill()


CASES = [
    *(
        Case("children", f"{kind} {number.name}", partial(hurt, kind, number))
        for kind in KINDS
        for number in (signal.SIGKILL, signal.SIGSTOP)
    ),
    Case("children", "killed at work", killed_at_work),
    Case("children", "contained", contained),
    Case("children", "zombies", zombies),
    Case("children", "instance killed", partial(instance, signal.SIGKILL)),
    Case("children", "stopped while it starts", stopped_while_it_starts),
    Case("children", "stand-in", stand_in, alone=True),
    Case("children", "killed again", killed_again, alone=True),
    Case("children", "front killed, children stopped", front),
]
