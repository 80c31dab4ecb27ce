"""The long form: mixed traffic under faults for as long as one likes, in pieces that resume and add up.

Each piece has one topology of up to five instances, in an order drawn by the seed, and a server of its own. In the
first hour each topology has three minutes, from then on half an hour, over which memory must stay flat. What a piece
found is added to a file of JSON, so that a run that was ended goes on with its next piece.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from tests.campaigns.siege import oracles, processes
from tests.campaigns.siege.cases.mixed import FAULTS, Traffic, drive
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Stage

PIECE_S = 180.0
LONG_PIECE_S = 1800.0
FAULT_EVERY_S = 2.5
ROUND_S = 60.0  # of traffic between two looks at what is held and how large it is
TOPOLOGIES = (
    *("EPD", "EP+D", "ED+P", "E+PD", "2EPD", "E+P+D"),
    *("2EP+D", "EP+2D", "E+2PD", "ED+2P", "3EPD", "E+P+2D", "2E+P+D", "EPD+EP+D"),
    *("2EP+2D", "2E+P+2D", "E+2P+2D", "5EPD", "2EP+3D", "EP+ED+P+2D"),
)


@dataclass
class Tally:
    """The sums over all pieces."""

    seconds: float = 0.0
    pieces: int = 0
    topologies: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    hostile: int = 0
    cancelled: int = 0
    compared: int = 0  # streams that were right by byte
    wrong: int = 0
    lost: int = 0  # without an answer
    doubled: int = 0  # streams with more than one end
    leaked: int = 0
    server_errors: int = 0  # 5xx but 503, or a fault of ours told as the client's
    refused: Counter[str] = field(default_factory=Counter)  # honest errors
    faults: Counter[str] = field(default_factory=Counter)
    slowest_after_fault_s: float = 0.0
    livez_ms: list[float] = field(default_factory=list)  # the latest ones of all pieces
    front_mib: list[float] = field(default_factory=list)  # after each round
    findings: list[str] = field(default_factory=list)

    def add(self, traffic: Traffic) -> None:
        self.hostile += traffic.hostile
        self.cancelled += traffic.cancelled
        self.compared += traffic.right
        self.doubled += traffic.doubled
        self.requests += traffic.hostile + traffic.cancelled + traffic.right + sum(traffic.errors.values())
        self.refused += traffic.errors
        self.faults += traffic.faults
        self.slowest_after_fault_s = max(self.slowest_after_fault_s, round(traffic.slowest_s, 2))
        self.livez_ms = (self.livez_ms + [round(one, 2) for one in traffic.livez_ms])[-200_000:]
        for finding in traffic.findings:
            self.note(finding)

    def note(self, finding: Finding) -> None:
        if finding.oracle == "blame" and "no answer" in finding.value:
            self.lost += 1
        elif finding.oracle == "blame":
            self.server_errors += 1
        elif finding.oracle == "footprint":
            self.leaked += 1
        elif finding.oracle == "bystander":
            self.wrong += 1
        self.findings.append(f"{finding.oracle}: {finding.value[:400]}")

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.livez_ms) or [0.0]
        livez = {name: ordered[int(q * (len(ordered) - 1))] for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        told = vars(self) | {"livez_ms": livez | {"probes": len(self.livez_ms)}, "front_mib": self.front_mib[-60:]}
        return told | {"findings": self.findings[:50], "clean": not self.findings}


def load(path: Path) -> Tally:
    if not path.exists():
        return Tally()
    saved = json.loads(path.read_text(encoding="utf-8"))
    counted = {name: Counter(saved.pop(name)) for name in ("topologies", "refused", "faults")}
    return Tally(**saved, **counted)


def save(path: Path, tally: Tally) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(vars(tally)), encoding="utf-8")
    beside.replace(path)


async def piece(seed: str, tally: Tally, seconds: float, *, has_networks: bool) -> None:
    """Adds one piece to the tally."""
    rng = random.Random(f"{seed}/{tally.pieces}")
    topology = random.Random(seed).sample(TOPOLOGIES, len(TOPOLOGIES))[tally.pieces % len(TOPOLOGIES)]
    stage, began = Stage(seed, has_networks=has_networks, topology=topology), time.monotonic()
    tally.topologies[topology] += 1
    tally.pieces += 1
    print(f"siege: {topology} for {seconds:.0f} s", flush=True)
    try:
        await stage.start()
        before = oracles.footprints(stage.server)
        is_warm = False
        while (left_s := seconds - (time.monotonic() - began)) > 1.0:
            limit_mib = oracles.MAX_GROWTH_MIB if is_warm else inf
            await _round(stage, tally, rng, min(ROUND_S, left_s), before, limit_mib)
            if not processes.is_running(stage.server.pid):
                break
            if not is_warm:  # the first round fills caches
                now = oracles.footprints(stage.server)
                before = {n: replace(then, resident_mib=now[n].resident_mib) for n, then in before.items() if n in now}
                is_warm = True
            tally.front_mib.append(round(processes.resident_mib(stage.server.pid), 1))
    finally:
        stage.close()
        tally.seconds += round(time.monotonic() - began, 1)


async def _round(
    stage: Stage,
    tally: Tally,
    rng: random.Random,
    seconds: float,
    before: dict[str, oracles.Footprint],
    growth_mib: float,
) -> None:
    faults = tuple(rng.choice(FAULTS) for _ in range(max(int(seconds / FAULT_EVERY_S), 1)))
    log_before = stage.server.log_bytes
    tally.add(await drive(stage, rng, seconds, faults))
    if not processes.is_running(stage.server.pid):
        return
    if not await stage.server.wait_whole(120):
        tally.note(Finding("ends", f"not every instance has come back: {stage.server.log[-300:]!r}"))
    for finding in await oracles.footprint(stage.server, before, log_before, within_s=20.0, growth_mib=growth_mib):
        tally.note(finding)


def run(seed: str, path: Path, seconds: float, *, has_networks: bool) -> bool:
    """Runs the long form; returns True if nothing was found. `seconds` of all pieces, those in the file too."""
    tally = load(path)
    while (left_s := seconds - tally.seconds) > 5.0:
        piece_s = PIECE_S if tally.pieces < len(TOPOLOGIES) else LONG_PIECE_S
        asyncio.run(piece(seed, tally, min(piece_s, left_s), has_networks=has_networks))
        save(path, tally)
        print(f"siege: {json.dumps(tally.summary())}", flush=True)
    return not tally.findings
