"""Requests that no client should send, as the bytes that go over the wire: a seeded generator, by class.

Classes are about bodies (wrong JSON, wrong fields, pictures that are none) and about HTTP itself (chunks, lengths,
headers). Each case says what may come back. Does not know who sends them or what becomes of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.campaigns.hostile import bodies, pictures, wire
from tests.campaigns.hostile.case import CLOSED, Case, Made

__all__ = ["CLOSED", "Case", "cases"]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yields cases of all classes in turn, in a random order that the seed determines."""
    rng = random.Random(seed)
    names: list[str] = []
    for _ in range(count):
        if not names:
            names = rng.sample(sorted(_MAKERS), len(_MAKERS))
        name = names.pop()
        data, allowed = _MAKERS[name](rng)
        yield Case(name, data, allowed, half=name in _HALF)


_HALF = ("half requests", "half waited for")
_MAKERS: dict[str, Callable[[random.Random], Made]] = {
    "NUL": bodies.nul,
    "half surrogates": bodies.surrogate,
    "numbers that do not fit": bodies.number,
    "deep nesting": bodies.deep,
    "repeated keys": bodies.twice,
    "not JSON": bodies.not_json,
    "too many values": bodies.many_values,
    "out of range": bodies.out_of_range,
    "wrong types": bodies.wrong_types,
    "wrong messages": bodies.messages,
    "too long": bodies.long,
    "wrong grammars": bodies.grammar,
    "changed bytes": bodies.mutated,
    "picture bombs": pictures.bombs,
    "truncated pictures": pictures.truncated,
    "damaged pictures": pictures.damaged,
    "wrong base64": pictures.wrong_base64,
    "wrong addresses": pictures.urls,
    "odd shapes": pictures.odd_shapes,
    "too many pictures": pictures.many_pictures,
    "wrong content types": wire.content_types,
    "compressed bodies": wire.compressed,
    "wrong routes": wire.routes,
    "wrong chunks": wire.chunking,
    "wrong lengths": wire.lengths,
    "too large": wire.large,
    "wrong headers": wire.headers,
    "wrong start lines": wire.start_lines,
    "pipelined": wire.pipelined,
    "half requests": wire.half,
    "half waited for": wire.half_read,
}
