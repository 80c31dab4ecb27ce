"""Malformed requests and the valid ones that they are made from. Does not know what can be wrong."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

CLOSED = 0  # instead of a status: the connection was closed without an answer

REFUSED = frozenset({400})
NOT_HTTP = frozenset({400, CLOSED})
SIZE = frozenset({400, 413})
EITHER = frozenset({200, 400})  # what a random change makes of a request may be a request

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
USER = {"role": "user", "content": "What is two plus three?"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2, "temperature": 0},
    COMPLETIONS: {"prompt": "What is", "max_tokens": 2, "temperature": 0},
    RESPONSES: {"input": [USER], "max_output_tokens": 2, "temperature": 0},
    MESSAGES: {"messages": [USER], "max_tokens": 2, "temperature": 0},
    MESSAGES + "/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "What is"},
    "/detokenize": {"tokens": [72, 105]},
}
MAIN = {path: next(iter(body)) for path, body in BODIES.items()}
GENERATING = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


@dataclass(frozen=True)
class Case:
    """`wire` is sent unchanged. `half`: the client leaves without waiting, so nothing has to come back."""

    name: str
    wire: bytes
    allowed: frozenset[int]
    half: bool = False


Made = tuple[bytes, frozenset[int]]


def http(path: str, body: bytes, *extra: str, kind: str = "application/json", method: str = "POST") -> bytes:
    """A request after which the connection ends."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"Content-Type: {kind}", *extra]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def as_json(path: str, body: Any) -> bytes:
    return http(path, json.dumps(body).encode())


def some_request(rng: random.Random, paths: tuple[str, ...] = tuple(BODIES)) -> tuple[str, dict[str, Any]]:
    path = rng.choice(paths)
    return path, dict(BODIES[path])
