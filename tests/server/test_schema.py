"""Bounds of every field, and a fuzzer: whatever is sent, the answer is never the server's fault."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Annotated, Any

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
from hydra_engine.server.protocol.messages import CountTokensRequest, MessagesRequest
from hydra_engine.server.protocol.responses import ResponsesRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from hydra_engine.server.runner import listen
from tests.server.conftest import Serve
from tests.server.stub import StubEngine

REQUESTS = (
    *(ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, CountTokensRequest),
    *(TokenizeRequest, DetokenizeRequest),
)


def unbounded(kind: msgspec.inspect.Type, path: str) -> list[str]:
    """Paths of numbers, texts, arrays and objects without a maximum."""
    match kind:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return [] if kind.ge is not None and kind.le is not None else [path]
        case msgspec.inspect.StrType():
            return [] if kind.max_length is not None or _has_length(kind.pattern) else [path]
        case msgspec.inspect.RawType() | msgspec.inspect.AnyType():
            return [path]
        case msgspec.inspect.ListType():
            own = [] if kind.max_length is not None else [path]
            return own + (unbounded(kind.item_type, f"{path}[]") if kind.max_length != 0 else [])
        case msgspec.inspect.UnionType():
            return [found for one in kind.types for found in unbounded(one, path)]
        case msgspec.inspect.StructType():
            return [found for field in kind.fields for found in unbounded(field.type, f"{path}.{field.name}")]
        case msgspec.inspect.DictType():
            own = [] if kind.max_length is not None else [path]
            inner = ((kind.key_type, f"{path}{{key}}"), (kind.value_type, f"{path}{{}}"))
            return own + [found for one, where in inner for found in unbounded(one, where)]
    return []


def _has_length(pattern: str | None) -> bool:
    """`$` would let one more character through."""
    return pattern is not None and re.fullmatch(r"\^\[.*\]\{\d+,\d+\}\\Z", pattern) is not None


# JSON that goes to a compiler or a template as it is. The code that takes it bounds its characters and its depth.
JSON_FIELDS = re.compile(
    r"\.(schema|response_format\.value|guided_json|structured_outputs\.json|parameters|arguments|chat_template_kwargs|mm_processor_kwargs)"
    r"(\{key\}|\{\})?"
)


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_number_text_and_array_has_a_maximum(kind: type) -> None:
    found = unbounded(msgspec.inspect.type_info(kind), "")
    assert [path for path in found if not JSON_FIELDS.search(path)] == []


@pytest.mark.parametrize("field", ["guided_json", "response_format", "tools", "chat_template_kwargs"])
@pytest.mark.parametrize("shape", ["deep", "long"])
async def test_json_for_compilers_and_templates_is_bounded(field: str, shape: str, serve: Serve) -> None:
    value: Any = {"type": "string", "description": "x" * 200_000}
    if shape == "deep":
        value = {"type": "string"}
        for _ in range(40):
            value = {"type": "object", "properties": {"a": value}}
    served = await serve()
    wrapped = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": value}}],
    }
    async with served.chat(**{field: wrapped.get(field, value)}) as response:
        assert response.status == 400


def test_the_check_finds_an_unbounded_field() -> None:
    class Loose(msgspec.Struct):
        a: list[int]
        b: str
        c: dict[str, float]
        d: Annotated[str, msgspec.Meta(pattern="^[a-z]{1,8}$")]
        e: Any
        f: list[str] | None = None

    found = unbounded(msgspec.inspect.type_info(Loose), "")
    assert found == [".a", ".a[]", ".b", ".c", ".c{key}", ".c{}", ".d", ".e", ".f", ".f[]"]


def test_no_field_is_both_known_and_refused() -> None:
    """What one endpoint knows another may refuse."""
    chat, completions = (set(kind.__struct_fields__) for kind in (ChatCompletionRequest, CompletionRequest))
    assert not chat & completions & names.UNSUPPORTED.keys()
    assert not (chat | completions) & names.IGNORED
    for kind in (ResponsesRequest, MessagesRequest, CountTokensRequest):
        assert not set(kind.__struct_fields__) & kind.UNSUPPORTED.keys()
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
        *ResponsesRequest.__struct_fields__,
        *MessagesRequest.__struct_fields__,
        *names.UNSUPPORTED,
        *ResponsesRequest.UNSUPPORTED,
        *MessagesRequest.UNSUPPORTED,
        *names.IGNORED,
    }
    - {"messages", "prompt", "model", "input"}
)
_fields = st.dictionaries(st.sampled_from(_names) | json_text, _odd, max_size=4)
_main = st.sampled_from(["messages", "prompt", "tokens", "input"])
_documents = st.tuples(_main, _messages | _odd, _fields).map(lambda parts: {parts[0]: parts[1], **parts[2]})
_paths = st.sampled_from(
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/tokenize", "/detokenize"),
    ]
)
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

    async def send(http: aiohttp.ClientSession, url: str, path: str, body: bytes) -> None:
        async with http.post(url + path, data=body, headers={"Content-Type": "application/json"}) as response:
            answer = await response.read()
        seen[response.status] = seen.get(response.status, 0) + 1
        assert response.status == 200 or 400 <= response.status < 500, (response.status, answer, body)
        if response.status != 200:
            error = json.loads(answer)["error"]
            if path.startswith("/v1/messages"):
                assert set(error) == {"type", "message"}
            else:
                assert error["code"] in CODES | {None}

    with asyncio.Runner() as runner:
        app = build_app(StubEngine(), ServerConfig())
        listening = runner.run(listen(app, "127.0.0.1", 0))
        http = runner.run(_session())

        @settings(
            max_examples=800,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(_paths, _documents, _edits)
        def check(path: str, document: dict[str, Any], edits: list[tuple[int, bytes]]) -> None:
            runner.run(send(http, listening.url, path, _mutated(document, edits)))

        check()
        runner.run(http.close())
        runner.run(listening.close())
    assert seen[200] > 20 and seen[400] > 200


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
