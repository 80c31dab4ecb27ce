"""Grammars that compile slowly: nobody else waits for them, neither in a queue nor between two tokens."""

from __future__ import annotations

import random
from typing import Any

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT, Answer, beside
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

_COMPILED_MIB = 256.0  # twice what instances keep for later, by their own estimate


def slow(number: int) -> dict[str, Any]:
    """Half a second to a second of processor time, of 139 bytes."""
    schema = {"type": "integer", "multipleOf": number}
    return {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}], "guided_json": schema}


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))


def slow_ones(rng: random.Random, count: int) -> list[dict[str, Any]]:
    primes = [number for number in range(70_001, 85_000, 2) if _is_prime(number)]
    return [slow(number) for number in rng.sample(primes, count)]


async def twelve_twice(stage: Stage) -> list[Finding]:
    """Twelve at once; bob has streams all the while. Then all again, which are checked by now and too large to
    have been kept in the instances, and bob has a grammar of his own."""
    findings: list[Finding] = []
    bodies = slow_ones(stage.rng, 12)
    async with beside((stage.alice.post(CHAT, body) for body in bodies), 0.0) as others:
        rounds = 0
        while not all(other.done() for other in others) or rounds < 2:
            findings += oracles.bystander(*await stage.golden(0, watched=True))
            rounds += 1
        findings += oracles.theirs([await other for other in others])
    async with beside((stage.alice.post(CHAT, body) for body in bodies), 0.3):
        answer = await stage.bob.post(CHAT, _quick(stage.rng))
    return list(dict.fromkeys(findings)) + _is_200(answer) + await stage.turns("front: grammars", "instance")


async def own_grammar(stage: Stage) -> list[Finding]:
    """66 at once; bob has one, which takes no time."""
    async with beside(stage.alice.post(CHAT, one) for one in slow_ones(stage.rng, 66)):
        answer = await stage.bob.post(CHAT, _quick(stage.rng))
    return _is_200(answer) + await stage.turns("grammar")


def _quick(rng: random.Random) -> dict[str, Any]:
    body = {"model": "demo", "max_tokens": 6, "messages": [{"role": "user", "content": "x"}]}
    return body | {"guided_regex": f"[a-z]{{3}}[0-9]|{rng.getrandbits(64):x}"}  # which nobody has had before


def _is_200(answer: Answer) -> list[Finding]:
    return [] if answer.status == 200 else [Finding("blame", f"{answer.status} {answer.body[:200]!r}")]


_AMBIGUOUS = 'start: s\ns: s s | s s s | A | ""\nA: /(?s:.)/'


async def dear_masks(stage: Stage) -> list[Finding]:
    """48 answers, which leave room for others: each of their tokens takes up to a tenth of a second to find out what
    may come next. Bob has streams all the while, and a grammar of his own."""
    body = {
        "model": "demo",
        "max_tokens": 400,
        "ignore_eos": True,
        "guided_grammar": _AMBIGUOUS,
        "messages": [{"role": "user", "content": "x"}],
    }
    findings: list[Finding] = []
    async with beside((stage.alice.post(CHAT, body) for _ in range(48)), 2.0) as others:
        for index in range(2):
            findings += oracles.bystander(*await stage.golden(index, watched=True))
        answer = await stage.bob.post(CHAT, _quick(stage.rng))
        if all(other.done() for other in others):
            findings.append(Finding("turn", "nobody was beside bob's streams"))
    return list(dict.fromkeys(findings)) + _is_200(answer) + await stage.turns("grammars")


async def private(stage: Stage) -> list[Finding]:
    """A grammar that alice has had compiled is compiled again for bob, or its time would reveal hers. A small one,
    which instances keep."""
    body = _quick(stage.rng)
    first = await stage.alice.post(CHAT, body)
    again = await stage.alice.post(CHAT, body)
    await stage.begin()
    second = await stage.bob.post(CHAT, body)
    seen = await stage.turns("front: grammars", "instance")
    return oracles.theirs([first, again, second]) + [Finding("walls", finding.value) for finding in seen]


CASES = [
    Case("grammars", "twelve, twice", twelve_twice, growth_mib=_COMPILED_MIB),
    Case("grammars", "one's own beside 66", own_grammar, growth_mib=_COMPILED_MIB),
    Case("grammars", "48 with dear masks", dear_masks, growth_mib=_COMPILED_MIB),
    Case("grammars", "private", private),
]
