"""Bodies that are not plain JSON, and fields that are wrong. Does not know pictures."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from tests.campaigns.hostile.case import (
    BODIES,
    CHAT,
    COMPLETIONS,
    EITHER,
    GENERATING,
    MAIN,
    MESSAGES,
    REFUSED,
    RESPONSES,
    USER,
    Made,
    as_json,
    http,
    some_request,
)


def _text_body(rng: random.Random, middle: bytes) -> bytes:
    """A right body with one more member."""
    path, body = some_request(rng)
    return http(path, json.dumps(body).encode()[:-1] + b"," + middle + b"}")


def nul(rng: random.Random) -> Made:
    """Texts may hold it, names and keys may not, and JSON must not."""
    wrong = [b'"x":"a\0b"', b'"\\u0000":1', b'"x":{"a\\u0000":1}', b'"model":"\\u0000"']
    if rng.random() < 0.7:
        return _text_body(rng, rng.choice(wrong)), REFUSED
    path = rng.choice((COMPLETIONS, "/tokenize"))
    return as_json(path, BODIES[path] | {"prompt": rng.choice(["\0", "a\0b", "\0" * 100])}), EITHER


def surrogate(rng: random.Random) -> Made:
    half = rng.choice([b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xed\xa0\x80"', b'"a\\udc00b"'])
    body = b'{"messages":[{"role":"user","content":' + half + b'}],"max_tokens":2}'
    return http(CHAT, body), REFUSED


def number(rng: random.Random) -> Made:
    value = rng.choice(["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * rng.randint(400, 5000), "1e", "0x10"])
    name = rng.choice(["temperature", "top_p", "seed", "presence_penalty"])
    path, body = some_request(rng, (CHAT, COMPLETIONS))
    body.pop(name, None)
    return http(path, json.dumps(body).encode()[:-1] + f',"{name}":{value}}}'.encode()), REFUSED


def deep(rng: random.Random) -> Made:
    depth = rng.choice([65, 100, 1_000, 10_000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    closed = rng.choice([closing * depth, b""])
    return _text_body(rng, b'"x":' + opening * depth + b"1" + closed), REFUSED


def twice(rng: random.Random) -> Made:
    path, body = some_request(rng)
    name = rng.choice(sorted(body))
    escaped = "".join(f"\\u{ord(c):04x}" for c in name) if rng.random() < 0.5 else name
    return http(path, json.dumps(body).encode()[:-1] + f',"{escaped}":{json.dumps(body[name])}}}'.encode()), REFUSED


def not_json(rng: random.Random) -> Made:
    path, body = some_request(rng)
    whole = json.dumps(body).encode()
    return http(
        path,
        rng.choice(
            [
                whole[: rng.randrange(len(whole))],
                whole + whole,
                whole[:-1] + b",}",
                b"\xef\xbb\xbf" + whole,
                whole.decode().encode("utf-16"),
                whole.replace(b'"', b"'"),
                b"[" + whole + b"]",
                rng.randbytes(rng.randint(1, 500)),
                rng.choice([b"null", b"0", b'""', b"[]", b"true"]),
            ]
        ),
    ), REFUSED


def many_values(rng: random.Random) -> Made:
    return _text_body(rng, _list_of(rng.choice([b"[]", b'""', b"{}"]))), REFUSED


@cache
def _list_of(item: bytes) -> bytes:
    return b'"x":[' + b",".join([item] * 600_000) + b"]"


# ---- wrong fields

_WRONG: tuple[Any, ...] = (
    *(-1, 1 << 31, 1 << 63, 1 << 70, -(1 << 70), 1.5, 1e308, True, "", "1", [], {}, [[]], {"a": None}, "x" * 300),
    *([None], [True], [{"type": "text"}], ["a"] * 70, list(range(100))),
)
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 2.1, 1e308, "1", True, [], {}),
    "top_p": (-1, 1.5, "x", True),
    "top_k": (-2, 1.5, 1 << 40, "x", True),
    "seed": (1 << 63, 0.5, "x", True, []),
    "min_p": (2, -1, True),
    "min_tokens": (-1, 1 << 31, 1.5, True),
    "presence_penalty": (3, "x", True),
    "repetition_penalty": (0, 11, "x"),
    "logit_bias": ({"x": 1}, {"1": 101}, {"-1": 0}, [], {"1": None}, {str(i): 1 for i in range(1100)}),
    "stop_token_ids": ([-1], [1 << 31], list(range(65)), "x", [1.5]),
    "allowed_token_ids": ([], [-1], "x", [True]),
    "priority": (1 << 31, 1.5, "x"),
    "ttft_ms": (0, -1, 1e12, "1"),
    "request_id": ("a b", "", "x" * 129, "a\n", 5),
    "cache_salt": ("", "x" * 300, 5),
    "stream": ("yes", 1, []),
    "model": (5, [], "x" * 300),
}


def out_of_range(rng: random.Random) -> Made:
    path, body = some_request(rng, GENERATING)
    name = rng.choice(sorted(_NUMBERS))
    return as_json(path, body | {name: rng.choice(_NUMBERS[name])}), REFUSED | {404}


def wrong_types(rng: random.Random) -> Made:
    path, body = some_request(rng)
    # A list of messages is no prompt and the other way round, so that all of these are wrong.
    wrong = [value for value in _WRONG if not (isinstance(value, str) or (path == "/detokenize" and value == []))]
    if path == COMPLETIONS:
        wrong = [value for value in wrong if not isinstance(value, list)] + [[], [None], [True], [[]], [-1], ["a", 1]]
    if path == "/detokenize":
        wrong = [value for value in wrong if value != list(range(100))]
    return as_json(path, body | {MAIN[path]: rng.choice(wrong)}), REFUSED


def messages(rng: random.Random) -> Made:
    path = rng.choice((CHAT, MESSAGES))
    part: dict[str, Any] = rng.choice(
        [
            {"type": "text"},
            {"type": "text", "text": 5},
            {"type": "input_audio"},
            {"type": "image_url"},
            {"type": "image_url", "image_url": {}},
            {"type": "image_url", "image_url": 5},
            {"type": "image", "source": {"type": "base64", "media_type": "image/svg+xml", "data": "AAAA"}},
            {"type": "image", "source": 5},
            {"type": "wizard"},
            {},
        ]
    )
    message: Any = rng.choice(
        [
            {"role": rng.choice(["wizard", "", "User", "system\n", None, 5]), "content": "a"},
            {"role": "user", "content": [part]},
            {"role": "user", "content": [[]]},
            {"role": "user", "content": rng.choice([5, {}, True])},
            {"content": "a"},
            *("user", None, []),
        ]
    )
    messages = rng.choice([[], [message], [USER, message], [message] * 5000])
    return as_json(path, BODIES[path] | {"messages": messages}), REFUSED


def long(rng: random.Random) -> Made:
    """A request with more text than any context has, up to 10 MB."""
    path = rng.choice((CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/tokenize"))
    text = _text(rng.choice(["x", "word ", "é", "\U0001f600", "\\\\ "]), rng.choice([300_000, 1_000_000]))
    main = MAIN[path].encode()
    if main in (b"messages", b"input"):
        text = b'[{"role":"user","content":' + text + b"}]"
    return http(path, b'{"max_tokens":2,"' + main + b'":' + text + b"}"), REFUSED


@cache
def _text(piece: str, count: int) -> bytes:
    return json.dumps(piece * count).encode()


def grammar(rng: random.Random) -> Made:
    wrong: dict[str, Any] = rng.choice(
        [
            {"guided_regex": rng.choice(["(", "[", "(?<=a)b"])},
            {"guided_grammar": rng.choice(["start: x", "", "%ignore", "start: /(/"])},
            {"guided_json": rng.choice([{"type": "wizard"}, {"$ref": "#/nowhere"}, 5, {"type": ["object", 3]}])},
            {"guided_choice": rng.choice([[], [1], "x"])},
            {"response_format": rng.choice([{"type": "xml"}, {"type": "json_schema"}, {}, 5])},
            {"guided_regex": "a", "guided_choice": ["b"]},
        ]
    )
    path, body = some_request(rng, (CHAT, COMPLETIONS))
    return as_json(path, body | wrong), REFUSED


def mutated(rng: random.Random) -> Made:
    """A request whose valid body has one to four places with changed, missing or added bytes."""
    path, body = some_request(rng)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
    return http(path, bytes(data)), EITHER | {404}
