"""Traffic of every kind under faults: streams that must be right, hostile requests, cancels, processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.campaigns.hostile import Case as Hostile
from tests.campaigns.hostile import cases
from tests.campaigns.siege import oracles, processes
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

FAULTS = ("kill child", "stop child", "kill instance", "stop instance", "kill instance", "kill child")
STOPS_S = (0.1, 3.0)

_CLEAR = (b"instance_lost", b"not_ready", b"request_poisoned", b"overloaded")
_PROBE_S = 0.1
_AGAIN_S = 0.2


@dataclass
class Traffic:
    """Counts of requests and their ends."""

    right: int = 0
    hostile: int = 0
    cancelled: int = 0
    doubled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    livez_ms: list[float] = field(default_factory=list)
    slowest_s: float = 0.0  # from a fault to the answer or refusal of a request that ran then
    fault_s: float = 0.0  # when the latest one was


async def streams(stage: Stage, traffic: Traffic, rng: random.Random, until_s: float) -> None:
    """Bob's, one after another; each must be right or end with an error of ours."""
    while (began_s := time.monotonic()) < until_s:
        try:
            streamed, right = await stage.golden(rng.randrange(4))
        except OSError as error:
            traffic.findings.append(Finding("blame", f"no answer to bob's stream: {type(error).__name__}"))
            await asyncio.sleep(_AGAIN_S)
            continue
        if began_s < traffic.fault_s:
            traffic.slowest_s = max(traffic.slowest_s, time.monotonic() - max(began_s, traffic.fault_s))
        traffic.doubled += streamed.raw.count(b"data: [DONE]") > 1
        clear = [code.decode() for code in _CLEAR if code in streamed.raw]
        if streamed.ended and streamed.told == right:
            traffic.right += 1
        elif streamed.status in (200, 503) and clear:
            traffic.errors[f"{streamed.status} {clear[0]}"] += 1
            await asyncio.sleep(_AGAIN_S)
        else:
            what = Finding("bystander", f"no end: {streamed.error} {streamed.raw[-200:]!r}")
            traffic.findings += oracles.bystander(streamed, right) or [what]


async def strangers(stage: Stage, traffic: Traffic, rng: random.Random, until_s: float) -> None:
    """Malformed requests with alice's key. Their answers are those that each may get, or 503."""
    key = b"Host: localhost\r\nAuthorization: Bearer " + stage.server.keys["alice"].encode()
    while time.monotonic() < until_s:
        for case in cases(rng.randrange(1 << 30), 40):
            if time.monotonic() > until_s:
                return
            await _stranger(stage, traffic, case, case.wire.replace(b"Host: localhost", key, 1))


async def _stranger(stage: Stage, traffic: Traffic, case: Hostile, wire: bytes) -> None:
    traffic.hostile += 1
    if case.half:
        with contextlib.suppress(TimeoutError, OSError):
            await stage.alice.send(wire, within_s=0.3)
        return
    answer = await stage.alice.ask(wire, within_s=60.0)
    if answer.status not in case.allowed | {401, 503}:  # 401: the routes of the administrator
        what = "no answer" if answer.status < 0 else f"{answer.status} {answer.body[:200]!r} to {wire[-200:]!r}"
        traffic.findings.append(Finding("blame", f"{case.name}: {what}"))


async def cancels(stage: Stage, traffic: Traffic, rng: random.Random, until_s: float) -> None:
    while time.monotonic() < until_s:
        asked = asyncio.create_task(stage.golden(rng.randrange(4)))
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        traffic.cancelled += 1


async def probes(stage: Stage, traffic: Traffic, _rng: random.Random, until_s: float) -> None:
    nobody = stage.server.client("")
    while time.monotonic() < until_s:
        began = time.monotonic()
        answer = await nobody.ask(nobody.wire("GET", "/livez"), within_s=30)
        traffic.livez_ms.append((time.monotonic() - began) * 1e3)
        if answer.status != 200:
            traffic.findings.append(Finding("blame", f"/livez: {answer.status}"))
        await asyncio.sleep(_PROBE_S)


async def hurt(stage: Stage, traffic: Traffic, rng: random.Random, fault: str) -> None:
    what, _, whom = fault.partition(" ")
    pids = list(stage.server.instances().values()) if whom == "instance" else stage.server.children()
    if not pids:
        return
    pid = rng.choice(pids)
    traffic.faults[fault] += 1
    traffic.fault_s = time.monotonic()
    if what == "kill":
        processes.send(pid, signal.SIGKILL)
    else:
        processes.send(pid, signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(*STOPS_S))
        processes.send(pid, signal.SIGCONT)


async def drive(stage: Stage, rng: random.Random, seconds: float, faults: tuple[str, ...]) -> Traffic:
    traffic, until_s = Traffic(), time.monotonic() + seconds
    running = [
        asyncio.create_task(client(stage, traffic, random.Random(rng.random()), until_s))
        for client in (streams, streams, streams, strangers, strangers, cancels, probes)
    ]
    running.append(asyncio.create_task(_faults(stage, traffic, rng, seconds, faults)))
    over = asyncio.gather(*running)
    while not over.done() and processes.is_running(stage.server.pid):
        await asyncio.wait([over], timeout=1.0)
    if over.done():
        await over
    else:
        traffic.findings.insert(0, Finding("ends", f"the server has ended: {stage.server.log[-1000:]!r}"))
        over.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return traffic


async def _faults(stage: Stage, traffic: Traffic, rng: random.Random, seconds: float, faults: tuple[str, ...]) -> None:
    for fault in faults:
        await asyncio.sleep(seconds / (len(faults) + 1) * rng.uniform(0.5, 1.0))
        await hurt(stage, traffic, rng, fault)


async def mixed(stage: Stage) -> list[Finding]:
    traffic = await drive(stage, stage.rng, stage.seconds, FAULTS)
    findings = list(traffic.findings)
    if not traffic.right:
        findings.append(Finding("bystander", f"no stream was right: {traffic.errors}"))
    if not await stage.server.wait_whole(90):
        findings.append(Finding("ends", "not every instance has come back"))
    return findings


CASES = [Case("mixed", "traffic with faults", mixed)]
