"""Checks that must hold whatever a case does. None of it depends on how fast the machine is: processor time is compared
with that of a piece of work which the same process does then.

lag: the loop's thread takes little processor time between two of its turns. bystander: another client's stream is the
same by byte, and the instance spends little time on others between two of its tokens. turn: while a client's job waits,
at most two of each other client begin in that queue. blame: a fault of ours is never reported as the client's, nor the
other way round. footprint: at rest nothing is held and nothing has grown. ends: a process that is asked to end does,
with all its processes. walls: nothing of one client, of this machine or of its secrets reaches another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from tests.campaigns.siege import processes
from tests.campaigns.siege.clients import Answer, Streamed
from tests.campaigns.siege.running import Server

MAX_LAG_MS = 100.0  # where the reference takes as long as this:
REFERENCE_MS = 3.2
# Between two tokens, in all threads of the instance: up to 0.5 s beside twelve grammars, as slow as allowed, that other
# processes compile; 1.3 to 3.5 s where the lane compiles them.
MAX_OTHERS_CPU_S = 0.7
MAX_BEGUN = 2
MAX_GROWTH_MIB = 64.0
MAX_LOG_BYTES = 64 << 10
# Pools of bounded size fill up in their own time: so many threads of the front and of an instance are no growth.
MAX_THREADS, INSTANCE_THREADS = 48, 16
MORE_DESCRIPTORS = 6  # of the front: sandboxed children are started when they are needed, with a socket and a memfd
ENDS_CPU_S = 1.0  # of those that are left, since they were asked to end
ENDS_S = 20.0  # on a machine that does much else


@dataclass(frozen=True)
class Finding:
    oracle: str
    value: str


def lag(lag_ms: float, reference_ms: float) -> list[Finding]:
    """`reference_ms`: of `server.reference_s`, in the same process."""
    max_ms = MAX_LAG_MS * max(1.0, reference_ms / REFERENCE_MS)
    if lag_ms <= max_ms:
        return []
    return [Finding("lag", f"{lag_ms} ms of processor time in one turn of the loop; at most {max_ms:.0f} here")]


def bystander(found: Streamed, right: bytes) -> list[Finding]:
    findings = []
    if found.told != right or not found.ended:
        what = found.error or f"{found.told[:300]!r} instead of {right[:300]!r}"
        findings.append(Finding("bystander", f"status {found.status}, {what}"))
    if found.longest_cpu_s > MAX_OTHERS_CPU_S:
        findings.append(
            Finding("bystander", f"{found.longest_cpu_s:.2f} s of the instance's processor time for a token")
        )
    return findings


def turn(events: Iterable[tuple[str, str, str]], client: str, queues: Iterable[str]) -> list[Finding]:
    """`queues`: words of the names of those that a job of `client` must have gone through."""
    waiting: dict[str, int] = {}  # jobs of the client
    begun: dict[str, dict[str, int]] = {}  # of others, while its next job waits
    seen: set[str] = set()
    worst: dict[str, int] = {}
    for queue, what, whose in events:
        if whose == client:
            seen.add(queue)
            if what == "push":
                waiting[queue] = waiting.get(queue, 0) + 1
                if waiting[queue] == 1:
                    begun[queue] = {}
            elif waiting.get(queue) and what in ("begin", "remove"):
                waiting[queue] -= 1
                begun[queue] = {}
        elif what == "begin" and waiting.get(queue):
            counts = begun[queue]
            counts[whose] = counts.get(whose, 0) + 1
            worst[queue] = max(worst.get(queue, 0), counts[whose])
    findings = [
        Finding("turn", f"{count} jobs of another client began in {queue!r} while one waited")
        for queue, count in worst.items()
        if count > MAX_BEGUN
    ]
    missing = [word for word in queues if not any(word in queue for queue in seen)]
    return findings + [
        Finding("turn", f"no job of this client took turns for {word!r}: {sorted(seen)}") for word in missing
    ]


def ours(answers: Iterable[Answer]) -> list[Finding]:
    """A good request whose answer suffered from a fault of ours: 200 or 503, nothing else."""
    wrong = [f"{a.status} {a.code} {a.body[:200]!r}" for a in answers if a.status not in (200, 503)]
    return [Finding("blame", f"a fault of ours was reported as {told}") for told in wrong]


def theirs(answers: Iterable[Answer]) -> list[Finding]:
    """Findings on faults of clients: each has an answer, never 5xx but 503, and no internal error inside a stream."""
    wrong = [
        f"{a.status} {a.code} {a.body[:200]!r}"
        for a in answers
        if (a.status >= 500 and a.status != 503) or a.status < 0 or b'"code":"internal_error"' in a.body
    ]
    return [Finding("blame", f"a client's request was answered by {told}") for told in wrong]


# ---- footprint


@dataclass(frozen=True)
class Footprint:
    descriptors: int
    memfds: int
    threads: int
    resident_mib: float

    @classmethod
    def of(cls, pid: int, *, front: bool) -> Footprint:
        threads = processes.num_entries(pid, "task")
        return cls(
            processes.num_entries(pid, "fd"),
            processes.num_memfds(pid),
            max(threads, MAX_THREADS if front else INSTANCE_THREADS),
            processes.resident_mib(pid),
        )


def footprints(server: Server) -> dict[str, Footprint]:
    found = {name: Footprint.of(pid, front=False) for name, pid in server.instances().items()}
    return found | {"front": Footprint.of(server.pid, front=True)}


def _grown(before: dict[str, Footprint], after: dict[str, Footprint], growth_mib: float) -> list[str]:
    grown = []
    for name, now in after.items():
        if (then := before.get(name)) is None:
            continue
        more = MORE_DESCRIPTORS if name == "front" else 0
        counts = [(now.memfds, then.memfds + more), (now.descriptors, then.descriptors + 2 * more)]
        if any(a > b for a, b in [*counts, (now.threads, then.threads)]):
            grown.append(f"{name} has {now}, before {then}")
        elif now.resident_mib > then.resident_mib + growth_mib:
            grown.append(f"{name} has {now.resident_mib:.0f} MiB, before {then.resident_mib:.0f}")
    return grown


async def footprint(
    server: Server,
    before: dict[str, Footprint],
    log_before: int,
    *,
    within_s: float = 15.0,
    growth_mib: float = MAX_GROWTH_MIB,
) -> list[Finding]:
    deadline = time.monotonic() + within_s
    while True:
        problems = await _held(server) + _grown(before, footprints(server), growth_mib)
        problems += [f"zombie {processes.command(p.pid)}" for p in server.family() if p.state == "Z"]
        if not problems or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if (written := server.log_bytes - log_before) > MAX_LOG_BYTES:
        problems.append(f"{written} bytes of log")
    return [Finding("footprint", problem) for problem in problems]


async def _held(server: Server) -> list[str]:
    client = server.client("bob")
    try:
        ledger = await client.get("/debug/ledger", within_s=10)
        load = await client.get("/load", within_s=10)
        report = json.loads(ledger.body)
        if ledger.status == 200 and not report.get("at_rest"):
            return [f"held: {ledger.body[:300]!r}"]
        running = json.loads(load.body)["server_load"]
        return [f"{running} requests that never ended"] if running else []
    except (TimeoutError, OSError, ValueError, KeyError) as error:
        return [f"the server does not say what it holds: {type(error).__name__}"]


# ---- ends


async def ends(pids: Iterable[int], told_at_cpu_s: dict[int, float], *, cpu_s: float = ENDS_CPU_S) -> list[Finding]:
    """Waits for processes that were asked to end. `told_at_cpu_s`: the seconds that each had used then."""
    left, deadline = set(pids), time.monotonic() + ENDS_S
    while True:
        left = {pid for pid in left if processes.is_running(pid)}
        used_s = {pid: processes.cpu_s(pid) - told_at_cpu_s.get(pid, 0.0) for pid in left}
        late = {pid for pid in left if used_s[pid] > cpu_s or time.monotonic() > deadline}
        if late or not left:
            return [
                Finding("ends", f"{processes.command(pid)[:120]} is left after {used_s[pid]:.2f} s of processor time")
                for pid in late
            ]
        await asyncio.sleep(0.05)


# ---- walls


def secrets_in(text: bytes, secrets: Iterable[str], where: str) -> list[Finding]:
    return [Finding("walls", f"{where} has {secret!r}") for secret in secrets if secret.encode() in text]


def written(server: Server) -> list[Finding]:
    """Findings of keys in the log, or in the environment or command line of a process of the server."""
    keys = list(server.keys.values())
    findings = secrets_in(server.log.encode(), keys, "the log")
    for process in server.family():
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError), open(f"/proc/{process.pid}/{name}", "rb") as file:
                findings += secrets_in(file.read(), keys, f"{name} of {processes.command(process.pid)[:80]}")
    return findings
