"""Requests that are wrong before their bodies are: routes, types, encodings, and HTTP that is none."""

from __future__ import annotations

import gzip
import json
import random
import zlib

from tests.campaigns.hostile.case import (
    BODIES,
    CHAT,
    CLOSED,
    COMPLETIONS,
    GENERATING,
    MESSAGES,
    NOT_HTTP,
    RESPONSES,
    SIZE,
    Made,
    as_json,
    http,
    some_request,
)

_GZIP_BOMB = gzip.compress(b"\0" * 5_000_000)
_EMPTY_MEMBERS = gzip.compress(b"") * 50_000


def content_types(rng: random.Random) -> Made:
    path, body = some_request(rng)
    kind = rng.choice(
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "x", "a/b"]
    )
    return http(path, json.dumps(body).encode(), kind=kind), frozenset({415})


def compressed(rng: random.Random) -> Made:
    path, body = some_request(rng)
    plain = json.dumps(body).encode()
    data, name = rng.choice(
        [
            (gzip.compress(plain), "gzip"),
            (_GZIP_BOMB, "gzip"),
            (_EMPTY_MEMBERS, "gzip"),
            (zlib.compress(plain), "deflate"),
            (plain, "br"),
            (plain, "identity, gzip"),
        ]
    )
    return http(path, data, f"Content-Encoding: {name}"), frozenset({415})


def routes(rng: random.Random) -> Made:
    method, path = rng.choice(
        [
            ("GET", CHAT),
            ("PUT", MESSAGES),
            ("PATCH", "/tokenize"),
            *(
                ("POST", path)
                for path in ("/v1", "/v1/chat", "//v1/completions", "/v1/completions/", "/admin/topology")
            ),
            *(("POST", path) for path in ("/%2e%2e/etc/passwd", "/v1/%00", "/v1/models/..%2f", "/x" * 2000, "/ü")),
            ("DELETE", "/v1/requests/" + "x" * 300),
            ("TRACE", "/"),
            ("BREW", "/v1/models"),
        ]
    )
    wire = http(path, b"{}", method=method)
    return wire, frozenset({400, 404, 405})


# ---- HTTP that is none

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_GOOD = json.dumps(BODIES[COMPLETIONS]).encode()


def chunking(rng: random.Random) -> Made:
    chunk = b"%x\r\n%s\r\n" % (len(_GOOD), _GOOD)
    bad = rng.choice(
        [
            b"zz\r\n{}\r\n0\r\n\r\n",
            b"-1\r\n{}\r\n",
            b"2\r\n{}xx0\r\n\r\n",
            b"ffffffffffffffffff\r\n{}\r\n",
            b"2;" + b"a" * 70_000 + b"\r\n{}\r\n0\r\n\r\n",
        ]
    )
    return _HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + rng.choice([b"", chunk]) + bad, NOT_HTTP


def lengths(rng: random.Random) -> Made:
    headers = rng.choice(
        [
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            b"Content-Length: 5\r\nContent-Length: 6\r\n",
            b"Content-Length: -5\r\n",
            b"Content-Length: 5x\r\n",
            b"Content-Length: " + b"9" * 30 + b"\r\n",
            b"Transfer-Encoding: chunked, chunked\r\n",
            b"Transfer-Encoding: x\r\n",
            b"Content-Length : 5\r\n",
        ]
    )
    return _HEAD + b"Connection: close\r\n" + headers + b"\r\n" + b"0\r\n\r\n", NOT_HTTP


def large(rng: random.Random) -> Made:
    length = rng.choice([(64 << 20) + 1, 1 << 40])
    return _HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n{}" % length, SIZE


def headers(rng: random.Random) -> Made:
    bad = rng.choice(
        [
            b"X: " + b"a" * 70_000 + b"\r\n",
            b"X: a\r\n" * 10_000,
            b"Bad Header\r\n",
            b": empty\r\n",
            b"X\0Y: a\r\n",
            b"X: a\0b\r\n",
            b" folded: a\r\n",
            b"X: " + b"\xff" * 20_000 + b"\r\n",
        ]
    )
    return b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + bad + b"\r\n", NOT_HTTP


def start_lines(rng: random.Random) -> Made:
    line = rng.choice(
        [
            b"hello",
            b"GET / HTTP/9.9",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
            b"GET  HTTP/1.1",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM",
            b"G\xffT / HTTP/1.1",
            b"GET / HTTP/1.1 x",
        ]
    )
    return line + b"\r\n\r\n", NOT_HTTP | {404}


def pipelined(rng: random.Random) -> Made:
    """Several in one go, the last one wrong or the end of the connection."""
    good = _HEAD + b"Content-Length: %d\r\n\r\n" % len(_GOOD) + _GOOD
    last = rng.choice([b"nonsense\r\n\r\n", http(COMPLETIONS, b"{"), http("/nowhere", b"")])
    return good * rng.randint(1, 3) + last, frozenset({200, 400, 404, CLOSED})


def half(rng: random.Random) -> Made:
    """Sent in part; then the client leaves."""
    path, body = some_request(rng, GENERATING)
    wire = as_json(path, body | {"stream": rng.random() < 0.5})
    return wire[: rng.randrange(1, len(wire))], frozenset({CLOSED, 400})


def half_read(rng: random.Random) -> Made:
    """Sent whole; the client leaves at once."""
    path, body = some_request(rng, GENERATING)
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 200
    return as_json(path, body | {"stream": rng.random() < 0.5, "ignore_eos": True}), frozenset({CLOSED, 200})
