"""Hill climbing over the fields of requests: which of them together make the loop work longest in one turn?

Starts from the commit's seed, changes one to three fields at a time and keeps what takes longer. The best point is
printed with what it took, and `--replay` runs it alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

_CALM_S = 4.0  # a request that takes longer than this is not climbed from; others would have no time

Size = tuple[int, int]  # of a field: at least, at most

FIELDS: dict[str, tuple[Size, Callable[[int], dict[str, Any]]]] = {
    "prompts": ((1, 128), lambda n: {"prompt": ["x y z"] * n}),
    "prompt words": ((1, 900), lambda n: {"prompt": "word " * n}),
    "prompt ids": ((1, 1900), lambda n: {"prompt": [7 + i % 600 for i in range(n)]}),
    "n": ((1, 64), lambda n: {"n": n}),
    "max_tokens": ((1, 64), lambda n: {"max_tokens": n}),
    "stops": ((0, 16), lambda n: {"stop": [f"{i:03d}" + "x" * 253 for i in range(n)]}),
    "stop ids": ((0, 64), lambda n: {"stop_token_ids": [9 + i for i in range(n)]}),
    "allowed ids": ((1, 65_536), lambda n: {"allowed_token_ids": [7 + i % 600 for i in range(n)]}),
    "bias": ((0, 634), lambda n: {"logit_bias": {str(7 + i): 1 for i in range(n)}}),
    "logprobs": ((0, 20), lambda n: {"logprobs": n}),
    "prompt_logprobs": ((0, 20), lambda n: {"prompt_logprobs": n}),
    "echo": ((0, 1), lambda n: {"echo": bool(n)}),
    "choices": ((1, 2000), lambda n: {"guided_choice": [f"choice {i}" for i in range(n)]}),
    "user": ((0, 256), lambda n: {"user": "u" * n}),
    "salt": ((1, 256), lambda n: {"cache_salt": "s" * n}),
    "stream": ((0, 1), lambda n: {"stream": bool(n)}),
    "unknown": ((0, 900), lambda n: {f"unknown{i}": i for i in range(n)}),
}
CHAT_FIELDS: dict[str, tuple[Size, Callable[[int], dict[str, Any]]]] = {
    "messages": ((1, 4096), lambda n: {"messages": [{"role": "user", "content": "x"}] * n}),
    "parts": ((1, 1024), lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}]}),
    "characters": ((1, 2000), lambda n: {"messages": [{"role": "user", "content": "<image>"[: n % 7] * n}]}),
    "tools": ((0, 128), lambda n: {"tools": [_tool(i) for i in range(n)]} if n else {}),
    "variables": ((0, 64), lambda n: {"chat_template_kwargs": {f"v{i}": [i] * 50 for i in range(n)}}),
    "top_logprobs": ((0, 20), lambda n: {"logprobs": True, "top_logprobs": n}),
    **{name: FIELDS[name] for name in ("n", "max_tokens", "stops", "allowed ids", "bias", "stream", "unknown")},
}


def _tool(index: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", "description": "d" * 100} for i in range(12)}
    return {
        "type": "function",
        "function": {"name": f"f{index}", "parameters": {"type": "object", "properties": properties}},
    }


def request(point: Mapping[str, int], *, chat: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "demo", "max_tokens": 2}
    body |= {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    for name, size in point.items():
        body |= (CHAT_FIELDS if chat else FIELDS)[name][1](size)
    return CHAT if chat else "/v1/completions", body


def _changed(point: Mapping[str, int], rng: random.Random, *, chat: bool) -> dict[str, int]:
    fields = CHAT_FIELDS if chat else FIELDS
    changed = dict(point)
    for name in rng.sample(sorted(fields), rng.randint(1, 3)):
        (least, most), _ = fields[name]
        how = rng.random()
        if how < 0.3:
            changed[name] = most
        elif how < 0.4:
            changed.pop(name, None)
        else:
            now = changed.get(name, least)
            changed[name] = min(max(rng.choice([now * 2, now // 2, rng.randint(least, most)]), least), most)
    return changed


async def climb(stage: Stage) -> list[Finding]:
    """Climbs for as long as the group may; with `stage.point` tries that point alone."""
    rng, findings, deadline = stage.rng, [], time.monotonic() + stage.seconds
    if stage.point:
        point = dict(stage.point)
        path, body = request(point, chat=bool(point.pop("chat")))
        return oracles.theirs([await stage.alice.post(path, body)])
    best: dict[bool, tuple[float, dict[str, int]]] = {False: (0.0, {}), True: (0.0, {})}
    while time.monotonic() < deadline:
        chat = rng.random() < 0.4
        lag_ms, start = best[chat]
        point = _changed(start if rng.random() < 0.8 else {}, rng, chat=chat)
        await stage.begin()
        path, body = request(point, chat=chat)
        began = time.monotonic()
        answer = await stage.alice.post(path, body)
        state = await stage.server.state()
        found_ms = state["lag_ms"]
        wrong = oracles.theirs([answer]) + oracles.lag(found_ms, state["reference_ms"])
        if wrong:
            stage.found = {"chat": int(chat), **point}
            return wrong
        if found_ms > lag_ms and time.monotonic() - began < _CALM_S:
            best[chat] = found_ms, point
    stage.found = {"best": {str(lag_ms): point for lag_ms, point in best.values()}}
    return findings


CASES = [Case("climb", "fields", climb)]
