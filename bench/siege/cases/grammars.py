"""Grammars that compile slowly: nobody else waits for them, neither in a queue nor between two tokens."""

from __future__ import annotations

import random
from typing import Any

from bench.siege import oracles
from bench.siege.clients import CHAT, beside
from bench.siege.oracles import Finding
from bench.siege.stage import Case, Stage


def slow(number: int) -> dict[str, Any]:
    """Half a second to a second of processor time, of 139 bytes."""
    schema = {"type": "integer", "multipleOf": number}
    return {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "guided_json": schema}


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def slow_ones(rng: random.Random, count: int) -> list[dict[str, Any]]:
    primes = [number for number in range(50_001, 70_000, 2) if _is_prime(number)]
    return [slow(number) for number in rng.sample(primes, count)]


async def stream_beside(stage: Stage) -> list[Finding]:
    """Eight at once; bob has streams all the while."""
    findings: list[Finding] = []
    async with beside((stage.alice.post(CHAT, body) for body in slow_ones(stage.rng, 8)), 0.0) as others:
        rounds = 0
        while not all(other.done() for other in others) or rounds < 2:
            findings += oracles.bystander(*await stage.golden(0, watched=True))
            rounds += 1
        return list(dict.fromkeys(findings)) + oracles.theirs([await other for other in others])


async def own_grammar(stage: Stage) -> list[Finding]:
    """66 at once; bob has one, which takes no time."""
    body = {"model": "demo", "max_tokens": 6, "messages": [{"role": "user", "content": "x"}]}
    body["guided_regex"] = f"[a-z]{{{stage.rng.randrange(3, 9)}}}[0-9]"
    async with beside(stage.alice.post(CHAT, one) for one in slow_ones(stage.rng, 66)):
        answer = await stage.bob.post(CHAT, body)
    findings = [] if answer.status == 200 else [Finding("blame", f"{answer.status} {answer.body[:200]!r}")]
    return findings + await stage.turns("grammar")


async def private(stage: Stage) -> list[Finding]:
    """What alice has had checked is checked again for bob, or its time would tell."""
    [body] = slow_ones(stage.rng, 1)
    first = await stage.alice.post(CHAT, body)
    again = await stage.alice.post(CHAT, body)
    await stage.begin()
    second = await stage.bob.post(CHAT, body)
    seen = await stage.turns("grammar")
    return oracles.theirs([first, again, second]) + [Finding("walls", finding.value) for finding in seen]


CASES = [
    Case("grammars", "a stream beside eight", stream_beside),
    Case("grammars", "one's own beside 66", own_grammar),
    Case("grammars", "private", private),
]
