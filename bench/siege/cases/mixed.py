"""Traffic of every kind under faults: streams that must be right, hostile requests, cancels, processes that die."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

from bench.hostile import Case as Hostile
from bench.hostile import cases
from bench.siege import oracles, processes
from bench.siege.oracles import Finding
from bench.siege.stage import Case, Stage

_CLEAR = (b"instance_lost", b"not_ready", b"request_poisoned", b"overloaded", b'"status":503')
_FAULTS = ("kill child", "stop child", "kill instance", "stop instance", "kill instance", "kill child")


@dataclass
class Traffic:
    """What went over the wire and how it ended."""

    right: int = 0
    hostile: int = 0
    cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    slowest_s: float = 0.0  # from a fault to the answer or refusal of a request that ran then
    fault_s: float = 0.0  # when the latest one was


async def streams(stage: Stage, traffic: Traffic, rng: random.Random, until_s: float) -> None:
    """Bob's, one after another; each must be right or end with an error of ours."""
    while (began_s := time.monotonic()) < until_s:
        streamed, right = await stage.golden(rng.randrange(4))
        if began_s < traffic.fault_s:
            traffic.slowest_s = max(traffic.slowest_s, time.monotonic() - max(began_s, traffic.fault_s))
        if streamed.ended and streamed.told == right:
            traffic.right += 1
        elif streamed.status in (200, 503) and any(code in streamed.raw for code in _CLEAR):
            traffic.errors["instance_lost"] += 1
            await asyncio.sleep(0.2)
        else:
            traffic.findings += oracles.bystander(streamed, right) or [
                Finding("bystander", f"no end: {streamed.raw[-200:]!r}")
            ]


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
    try:
        answer = await stage.alice.send(wire, within_s=0.3 if case.half else 60.0)
    except TimeoutError:
        if not case.half:
            traffic.findings.append(Finding("blame", f"{case.name}: no answer"))
        return
    except OSError as error:
        traffic.findings.append(Finding("blame", f"{case.name}: {type(error).__name__}"))
        await asyncio.sleep(0.5)
        return
    if not case.half and answer.status not in case.allowed | {503}:
        traffic.findings.append(Finding("blame", f"{case.name}: {answer.status} {answer.body[:200]!r}"))


async def cancels(stage: Stage, traffic: Traffic, rng: random.Random, until_s: float) -> None:
    while time.monotonic() < until_s:
        asked = asyncio.create_task(stage.golden(rng.randrange(4)))
        await asyncio.sleep(rng.uniform(0.0, 0.3))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        traffic.cancelled += 1


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
        await asyncio.sleep(rng.uniform(0.1, 3.0))
        processes.send(pid, signal.SIGCONT)


async def mixed(stage: Stage) -> list[Finding]:
    traffic = await drive(stage, stage.rng, stage.seconds, _FAULTS)
    findings = list(traffic.findings)
    if not traffic.right:
        findings.append(Finding("bystander", f"no stream was right: {traffic.errors}"))
    if not await stage.server.wait_whole(90):
        findings.append(Finding("ends", "not every instance has come back"))
    return findings


async def drive(stage: Stage, rng: random.Random, seconds: float, faults: tuple[str, ...]) -> Traffic:
    traffic, until_s = Traffic(), time.monotonic() + seconds
    running = [
        asyncio.create_task(client(stage, traffic, random.Random(rng.random()), until_s))
        for client in (streams, streams, streams, strangers, strangers, cancels)
    ]
    for fault in faults:
        await asyncio.sleep(max(seconds / (len(faults) + 1) * rng.uniform(0.5, 1.0), 0.0))
        await hurt(stage, traffic, rng, fault)
    await asyncio.gather(*running)
    return traffic


CASES = [Case("mixed", "traffic with faults", mixed)]
