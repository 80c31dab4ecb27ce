"""Thousands of malformed requests against a served model; what becomes of them and of others.

None may be answered by a 500, and nothing that an answer says may come from inside the server. Four golden streams run
all the while, over and over; each has to bring the tokens that it brought when it ran alone. Afterwards nothing may be
held and no process may have grown. Writes a tally to bench/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bench.common import ROOT, card, emit, start_process
from hydra_engine.errors import CODES
from tests.campaigns.hostile import CLOSED, Case, cases
from tests.campaigns.hostile.pictures import data_url, noise
from tests.campaigns.restless import Footprint, footprint
from tests.faults.server import COMMAND

ANSWER_S = 60.0  # a request without an answer for this long is lost
WARM_UP = 300  # malformed requests before footprints are taken, at most
LARGE_BYTES = 1 << 20  # of a request; reading and parsing more takes its time, whatever is wrong with it
MAX_GROWTH_MIB = 64  # of the memory of all processes after the first tenth, some of which is what bodies left unused
MAX_THREADS = 24  # of the front, whose pools of bounded size fill up in their own time
RESULT = ROOT / "bench" / "results" / "fuzz.json"
_DEMO = ROOT / "hydra_engine" / "demo"
_INSIDE = re.compile(
    rb"0x[0-9a-f]{6}|Traceback|\.py\b|hydra_engine|/(?:home|root|tmp|usr|opt)\b|msgspec|aiohttp|PIL\b|site-packages"
)


# ---- the server


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    log: list[str]

    @property
    def pids(self) -> list[int]:
        """The front and its instances. Children that decode come and go."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        instances = [p for p in children if b"hydra_engine.cluster" in Path(f"/proc/{p}/cmdline").read_bytes()]
        return [self.process.pid, *map(int, instances)]


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """`hydra-engine serve demo`, with its route for tests. It ends with the caller's block, however that ends. Raises
    RuntimeError if it does not end well."""
    command = [*COMMAND, *arguments]
    process = start_process(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        log: list[str] = []
        url = ""
        for line in process.stderr:
            log.append(line)
            if line.startswith("ready on "):
                url = line.split()[-1]
                break
        rest = process.stderr
        reader = threading.Thread(target=lambda: log.extend(rest), daemon=True)
        reader.start()
        if not url:
            raise RuntimeError("the server has not started: " + "".join(log))
        yield Server(process, int(url.rpartition(":")[2]), log)
    finally:
        code = _end(process)
    reader.join(10)
    rest.close()
    if code != 0:
        raise RuntimeError(f"the server ended with {code}: " + "".join(log[-20:]))


def _end(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(60)
    finally:  # also after a timeout
        process.kill()
        process.wait()


# ---- one request


@dataclass(frozen=True)
class Answer:
    """`statuses` of all answers on one connection; () when it was closed without one. Seconds from the beginning until
    all was handed to the kernel, and until the first byte came; 0 for what never happened."""

    statuses: tuple[int, ...]
    data: bytes
    sent_s: float
    first_s: float

    @property
    def waited_s(self) -> float:
        """Seconds until the first byte, from the last byte sent, or from the start if the answer came before it."""
        return self.first_s - self.sent_s if 0 < self.sent_s < self.first_s else self.first_s


_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


async def exchange(port: int, wire: bytes, *, half: bool = False) -> Answer:
    """Sends `wire` and reads to the end. Raises TimeoutError when that does not come."""
    began = time.monotonic()
    sent_s, first_s, data = 0.0, 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        nonlocal sent_s
        with contextlib.suppress(ConnectionError):
            writer.write(wire)
            await writer.drain()
            sent_s = time.monotonic() - began

    try:
        async with asyncio.timeout(ANSWER_S):
            sending = asyncio.ensure_future(send())
            if half:
                await sending
            while not half and (read := await reader.read(1 << 16)):
                first_s = first_s or time.monotonic() - began
                data += read
            await sending
    except ConnectionError:
        pass  # refused before all was sent: what came until then counts
    finally:
        writer.transport.abort()
    return Answer(tuple(map(int, _STATUS.findall(data))), data, sent_s, first_s)


async def get(port: int, path: str) -> Any:
    answer = await exchange(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return json.loads(answer.data.partition(b"\r\n\r\n")[2])


# ---- those who have nothing to do with it


def golden_bodies() -> list[dict[str, Any]]:
    """Two of text and two of pictures; of each kind one at temperature 0 and one that is drawn."""
    questions = json.loads((_DEMO / "questions.json").read_text(encoding="utf-8"))
    bodies = []
    for index, asked in enumerate([questions[3], questions[3], questions[0], questions[1]]):
        parts: list[dict[str, Any]] = [{"type": "text", "text": asked["question"]}]
        if asked["picture"]:
            url = data_url((_DEMO / asked["picture"]).read_bytes())
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 48,
            "ignore_eos": True,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": index % 2,
        }
        bodies.append(body | ({"seed": 11 + index} if index % 2 else {}))
    return bodies


async def golden(port: int, body: dict[str, Any]) -> bytes:
    """The whole content of the stream: texts, tokens, log probabilities and end."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return told_by(await exchange(port, head.encode() + data))


def told_by(answer: Answer) -> bytes:
    told: list[Any] = list(answer.statuses)
    for line in answer.data.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            told.append("done")
            continue
        event = json.loads(line[6:])
        if "error" in event:
            told.append(event["error"])
        for choice in event.get("choices", ()):
            told.append(choice["delta"].get("content") or "")
            told += (choice["logprobs"] or {}).get("content") or ()
            told += [choice["finish_reason"]] if choice["finish_reason"] else []
    text = "".join(one for one in told if isinstance(one, str))
    return json.dumps([text, [one for one in told if not isinstance(one, str)]]).encode()


# ---- the campaign


@dataclass
class Tally:
    requests: int = 0
    seconds: float = 0.0
    by_class: dict[str, Counter[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)  # statuses that a class must not get, answers that tell
    lost: list[str] = field(default_factory=list)
    refusal_ms: dict[str, float] = field(default_factory=dict)  # `Answer.waited_s`, beside the golden streams
    small_refusal_ms: dict[str, float] = field(default_factory=dict)  # of requests up to LARGE_BYTES
    large_refusal_ms: dict[str, float] = field(default_factory=dict)  # of larger ones
    refusal_ms_by_class: dict[str, dict[str, float]] = field(default_factory=dict)  # the slowest first
    livez_ms: dict[str, float] = field(default_factory=dict)
    bystanders: int = 0
    changed: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)  # of all processes, before and after each tenth
    log: list[str] = field(default_factory=list)  # lines that speak of a bug

    @property
    def clean(self) -> bool:
        return not (self.unexpected or self.lost or self.changed or self.leaks or self.log) and self.bystanders > 0

    @property
    def statuses(self) -> Counter[str]:
        return sum(self.by_class.values(), Counter[str]())


class Campaign:
    """`concurrency` connections at a time."""

    def __init__(self, server: Server, concurrency: int) -> None:
        self.tally = Tally()
        self._server = server
        self._concurrency = concurrency
        self._refused: dict[str, list[tuple[int, float]]] = {}  # by class: bytes sent, seconds waited
        self._livez_s: list[float] = []
        self._over = asyncio.Event()

    async def run(self, seed: int, count: int) -> Tally:
        port = self._server.port
        bodies = golden_bodies()
        alone = [await golden(port, body) for body in bodies]
        await self._start_children()
        await self._attack(cases(seed + 1_000_003, min(WARM_UP, count // 3)))  # other cases, which count for nothing
        await asyncio.gather(*(golden(port, body) for body in bodies * 2))
        self.tally.leaks += await self._at_rest()
        before = self._footprints()
        self.tally.by_class.clear()
        self._refused.clear()
        began = time.monotonic()
        others = [asyncio.create_task(self._stand_by(body, right)) for body, right in zip(bodies, alone, strict=True)]
        others.append(asyncio.create_task(self._probe()))
        self.tally.memory_mib = [self._memory_mib()]
        source = cases(seed, count)
        for _ in range(10):
            await self._attack(islice(source, count // 10))
            self.tally.memory_mib.append(self._memory_mib())
        await self._attack(source)
        self._over.set()
        await asyncio.gather(*others)
        self.tally.requests, self.tally.seconds = count, round(time.monotonic() - began, 1)
        refused = [pair for pairs in self._refused.values() for pair in pairs]
        self.tally.refusal_ms = _quantiles([waited_s for _, waited_s in refused])
        self.tally.small_refusal_ms = _quantiles([waited_s for size, waited_s in refused if size <= LARGE_BYTES])
        self.tally.large_refusal_ms = _quantiles([waited_s for size, waited_s in refused if size > LARGE_BYTES])
        by_class = {name: _quantiles([waited_s for _, waited_s in pairs]) for name, pairs in self._refused.items()}
        self.tally.refusal_ms_by_class = dict(sorted(by_class.items(), key=lambda one: -one[1]["p99"]))
        self.tally.livez_ms = _quantiles(self._livez_s)
        self.tally.leaks += await self._at_rest()
        await self._grown(before)
        self.tally.log = [line.strip() for line in self._server.log if re.search(r"Traceback|unexpected|ERROR", line)]
        return self.tally

    async def _start_children(self) -> None:
        """The one that compiles grammars, and all that decode: they are started when they are needed first."""
        rng = random.Random(0)
        body: dict[str, Any] = {"stream": True, "max_tokens": 1, "guided_regex": "[a-z]{3}"}
        bodies = []
        for _ in range(16):
            part = {"type": "image_url", "image_url": {"url": data_url(noise(rng, 400, 400))}}
            bodies.append(body | {"messages": [{"role": "user", "content": [part]}]})
        await asyncio.gather(*(golden(self._server.port, one) for one in bodies))

    async def _attack(self, source: Iterator[Case]) -> None:
        async def client() -> None:
            for case in source:  # shared: each takes the next one
                await self._one(case)

        await asyncio.gather(*(client() for _ in range(self._concurrency)))

    async def _one(self, case: Case) -> None:
        try:
            answer = await exchange(self._server.port, case.wire, half=case.half)
        except TimeoutError:
            self.tally.lost.append(f"{case.name}: no answer after {ANSWER_S:.0f} s: {case.wire[:300]!r}")
            return
        statuses = answer.statuses or (CLOSED,)
        counted = self.tally.by_class.setdefault(case.name, Counter())
        counted["left" if case.half else "closed" if statuses == (CLOSED,) else str(statuses[-1])] += 1
        if case.half:
            return
        if statuses != (CLOSED,) and 400 <= statuses[0] < 500:
            self._refused.setdefault(case.name, []).append((len(case.wire), answer.waited_s))
        wrong = [status for status in statuses if status not in case.allowed]
        if wrong or (why := _tells(answer)):
            found = f"status {wrong}" if wrong else why
            self.tally.unexpected.append(f"{case.name}: {found}: {case.wire[-300:]!r} got {answer.data[-300:]!r}")

    async def _stand_by(self, body: dict[str, Any], right: bytes) -> None:
        while not self._over.is_set():
            found = await golden(self._server.port, body)
            self.tally.bystanders += 1
            if found != right:
                self.tally.changed.append(f"{found[:500]!r} instead of {right[:500]!r}")

    async def _probe(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            await get(self._server.port, "/livez")
            self._livez_s.append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    async def _at_rest(self, within_s: float = 10.0) -> list[str]:
        deadline = time.monotonic() + within_s
        while not (report := await get(self._server.port, "/debug/ledger")).get("at_rest"):
            if time.monotonic() > deadline:
                return [f"held after the last request: {report}"]
            await asyncio.sleep(0.05)
        load = await get(self._server.port, "/load")
        return [f"requests that never ended: {load}"] if load["server_load"] else []

    async def _grown(self, before: dict[int, Footprint]) -> None:
        deadline = time.monotonic() + 10
        while True:
            after = self._footprints()
            grown = [f"{after[pid]}, before {before[pid]}" for pid in before if after[pid].grown(before[pid])]
            if not grown or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.tally.leaks += grown
        first, last = self.tally.memory_mib[1], self.tally.memory_mib[-1]
        if last - first > MAX_GROWTH_MIB:
            self.tally.leaks.append(f"memory grew from {first} to {last} MiB")

    def _footprints(self) -> dict[int, Footprint]:
        found = {pid: footprint(pid) for pid in self._server.pids}
        front = self._server.process.pid
        return found | {front: replace(found[front], threads=max(found[front].threads, MAX_THREADS))}

    def _memory_mib(self) -> float:
        """Resident in the front and its instances."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._server.pids)
        return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def _tells(answer: Answer) -> str:
    """The fault of an answer that leaks something or has an error outside the table; empty without one."""
    body = answer.data.rpartition(b"\r\n\r\n")[2]
    if answer.statuses and answer.statuses[-1] >= 400:
        if leak := _INSIDE.search(body):
            return f"the answer names {leak[0]!r}"
        if body:
            error = json.loads(body)["error"]
            if error.get("code") not in CODES | {None}:
                return f"unknown code {error['code']}"
    return ""


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    pick = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(q * (len(ordered) - 1))] * 1e3, 1) for name, q in pick.items()}


def campaign(requests: int, *, seed: int = 0, concurrency: int = 8) -> Tally:
    with serving() as server:
        return asyncio.run(Campaign(server, concurrency).run(seed, requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--no-save", action="store_true", help="print the tally only")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the server ends too
    tally = campaign(arguments.requests, seed=arguments.seed, concurrency=arguments.concurrency)
    for name, counts in sorted(tally.by_class.items()):
        refusal = tally.refusal_ms_by_class.get(name, {})
        told = f"  refused in {refusal['p50']} ms, p99 {refusal['p99']} ms" if refusal else ""
        print(f"{name:26} " + ", ".join(f"{status}: {n}" for status, n in sorted(counts.items())) + told)
    document = {
        "bench": "fuzz",
        "seed": arguments.seed,
        "clean": tally.clean,
        **vars(tally),
        "statuses": dict(sorted(tally.statuses.items())),
        "card": card(),
    }
    if not arguments.no_save:
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    emit(document)


if __name__ == "__main__":
    main()
