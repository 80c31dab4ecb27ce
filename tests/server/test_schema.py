"""Bounds of every field, and a fuzzer: whatever is sent, the answer is never the server's fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hydra_engine.config import ServerConfig
from hydra_engine.errors import CODES, InvalidRequest
from hydra_engine.server import strict_json
from hydra_engine.server.app import build_app
from hydra_engine.server.protocol import names
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from hydra_engine.server.runner import listen
from tests.server.stub import StubEngine

REQUESTS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def unbounded(kind: msgspec.inspect.Type, path: str) -> list[str]:
    """Paths of numbers and arrays without a maximum."""
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return [] if kind.ge is not None and kind.le is not None else [path]
        case msgspec.inspect.ListType():
            own = [] if kind.max_length is not None else [path]
            return own + unbounded(kind.item_type, f"{path}[]")
        case msgspec.inspect.UnionType():
            return [found for one in kind.types for found in unbounded(one, path)]
        case msgspec.inspect.StructType():
            return [found for field in kind.fields for found in unbounded(field.type, f"{path}.{field.name}")]
        case msgspec.inspect.DictType():
            return [path]
    return []


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_number_and_array_has_a_maximum(kind: type) -> None:
    assert unbounded(msgspec.inspect.type_info(kind), "") == []


def test_the_check_finds_an_unbounded_field() -> None:
    class Loose(msgspec.Struct):
        a: list[int]

    assert unbounded(msgspec.inspect.type_info(Loose), "") == [".a", ".a[]"]


def test_no_field_is_both_known_and_refused() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest):
        assert not set(kind.__struct_fields__) & (names.UNSUPPORTED.keys() | names.IGNORED)
    assert not names.UNSUPPORTED.keys() & names.IGNORED


@pytest.mark.parametrize("depth", [strict_json.MAX_DEPTH, strict_json.MAX_DEPTH + 1])
def test_depth_limit_is_exact(depth: int) -> None:
    body = b'{"tokens":[],"x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    if depth <= strict_json.MAX_DEPTH:
        assert strict_json.parse(body, DetokenizeRequest)[1] == {"tokens", "x"}
    else:
        with pytest.raises(InvalidRequest, match="nested deeper"):
            strict_json.parse(body, DetokenizeRequest)


json_text = st.text(max_size=12) | st.sampled_from(["\\", '"', '\\"', "\\\\", "\\u0000", "{", "}]", "a\\"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | json_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(json_text, inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, database=None)
@given(st.dictionaries(json_text, json_values, max_size=5), st.booleans())
def test_structure_check_agrees_with_the_standard_parser(document: dict[str, Any], ascii: bool) -> None:
    body = json.dumps(document, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    if "\\u0000" in body.decode("utf-8", "replace") and any(chr(0) in text for text in _texts(document)):
        with pytest.raises(InvalidRequest):
            strict_json._check_structure(body)
        return
    assert strict_json._check_structure(body) == set(document)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in (*value, *value.values()) for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list) else []


# ---- fuzz over HTTP

_numbers = st.sampled_from([-1, 0, 1, 2, 1.5, 16, 20, 21, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, 10**30, 1e308])
_odd = st.none() | st.booleans() | _numbers | json_text | json_values
_parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "video_url", "image"]) | _odd},
    optional={"text": json_text, "image_url": json_text | st.dictionaries(json_text, _odd, max_size=2) | _odd},
)
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]) | _odd},
        optional={"content": json_text | st.lists(_parts | _odd, max_size=3) | _odd, "tool_calls": _odd},
    )
    | _odd,
    max_size=3,
)
_names = sorted(
    {
        *ChatCompletionRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
        *names.UNSUPPORTED,
        *names.IGNORED,
    }
    - {"messages", "prompt", "model"}
)
_fields = st.dictionaries(st.sampled_from(_names) | json_text, _odd, max_size=4)
_documents = st.tuples(st.sampled_from(["messages", "prompt", "tokens"]), _messages | _odd, _fields).map(
    lambda parts: {parts[0]: parts[1], **parts[2]}
)
_paths = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
_edits = st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=2)), max_size=2)


def _mutated(document: dict[str, Any], edits: list[tuple[int, bytes]]) -> bytes:
    body = bytearray(json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    for position, data in edits:
        position %= len(body)
        body[position : position + 1] = data
    return bytes(body)


def test_no_body_makes_the_server_fail() -> None:
    """2,000 bodies, valid and broken: 200 or a 4xx with a code from the table."""
    seen: dict[int, int] = {}

    async def send(http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            answer = await response.read()
        seen[response.status] = seen.get(response.status, 0) + 1
        assert response.status == 200 or 400 <= response.status < 500, (response.status, answer, body)
        if response.status != 200:
            assert json.loads(answer)["error"]["code"] in CODES | {None}

    with asyncio.Runner() as runner:
        app = build_app(StubEngine(), ServerConfig())
        listening = runner.run(listen(app, "127.0.0.1", 0))
        http = runner.run(_session())

        @settings(
            max_examples=2000,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(_paths, _documents, _edits)
        def check(path: str, document: dict[str, Any], edits: list[tuple[int, bytes]]) -> None:
            runner.run(send(http, listening.url + path, _mutated(document, edits)))

        check()
        runner.run(http.close())
        runner.run(listening.close())
    assert seen[200] > 20 and seen[400] > 200


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
