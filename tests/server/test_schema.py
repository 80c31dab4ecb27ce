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
from hydra_engine.server.app import build_app
from hydra_engine.server.http import strict_json
from hydra_engine.server.http.listening import listen
from hydra_engine.server.protocol.anthropic import CountTokensRequest, MessagesRequest
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.other_fields import IGNORED, REFUSED, other_names_of
from hydra_engine.server.protocol.responses import ResponsesRequest
from hydra_engine.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.examples import examples
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
    r"\.(schema|input_schema|content\[\]\.input|response_format\.value|json_schema|guided_json|structured_outputs\.json|parameters|arguments|chat_template_kwargs|mm_processor_kwargs)"
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
    if field == "tools":
        tool = {"type": "function", "name": "f", "parameters": value}
        async with served.post("/v1/responses", {"input": "a", "tools": [tool]}) as response:
            assert response.status == 400
        turn = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "input_schema": value}]}
        for path, fields in (("/v1/messages", {"max_tokens": 9}), ("/v1/messages/count_tokens", {})):
            async with served.post(path, turn | fields) as response:
                assert response.status == 400
    assert served.engine.submissions == [] and served.engine.counted == []


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
    """An endpoint may refuse what another knows."""
    for kind in REQUESTS:
        place, own = other_names_of(kind), frozenset(kind.__struct_fields__)
        assert not own & (place.refused.keys() | place.ignored)
        assert not place.refused.keys() & place.ignored
    assert not REFUSED.keys() & IGNORED


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


@settings(max_examples=examples(200), deadline=None, database=None)
@given(st.dictionaries(json_text, json_values, max_size=5), st.booleans())
def test_structure_check_agrees_with_the_standard_parser(document: dict[str, Any], ascii: bool) -> None:
    body = json.dumps(document, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    if any("\0" in key for key in _keys(document)):
        with pytest.raises(InvalidRequest, match="a key of the request body holds a NUL"):
            strict_json._check_structure(body)
        return
    assert strict_json._check_structure(body) == set(document)


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in _keys(item))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list) else []


class Repeated(Exception):
    pass


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise Repeated
    return dict(pairs)


@settings(
    max_examples=examples(300),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.dictionaries(json_text, json_values, max_size=5),
    st.sampled_from([None, 1]),
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([b'"', b"\\", b"{", b"[", b"}", b":", b" ", b'"a":']))),
    st.integers(1, 9),
)
def test_it_agrees_in_slices_of_any_size_and_after_any_edits(
    monkeypatch: pytest.MonkeyPatch,
    document: dict[str, Any],
    indent: int | None,
    edits: list[tuple[int, bytes]],
    slice_bytes: int,
) -> None:
    """The check says nothing of text that is no JSON; the parser refuses it."""
    monkeypatch.setattr(strict_json, "_SLICE", slice_bytes)
    body = json.dumps(document, indent=indent, separators=(",", " :\n" if indent else ":")).encode()
    for place, data in edits:
        body = body[: place % len(body)] + data + body[place % len(body) :]
    try:
        msgspec.json.decode(body)
        expected = json.loads(body, object_pairs_hook=unique)
    except msgspec.DecodeError:
        return
    except Repeated:
        with pytest.raises(InvalidRequest, match=r"appears twice|NUL"):
            strict_json._check_structure(body)
        return
    if any("\0" in key for key in _keys(expected)):
        with pytest.raises(InvalidRequest, match="NUL"):
            strict_json._check_structure(body)
    else:
        assert strict_json._check_structure(body) == (set(expected) if isinstance(expected, dict) else set())


def test_repeated_keys_and_values_are_found_in_small_and_large_bodies() -> None:
    padding = '"pad":"' + "x" * strict_json._SLICE + '",'
    for inside, words in (
        ('"a":1,"a":2', "'a' appears twice"),
        ('"a":1,"\\u0061":2', "'a' appears twice"),
        ('"x":[{"b":1},{"b":2,"c":{"b":3}}]', ""),
        ('"x":[{"b":1},{"b":2,"b" \n:3}]', "'b' appears twice"),
        ('"x":{"\\"":1,"\\u0022":2}', "appears twice"),
        ('"x":"a\\\\","x":1', "'x' appears twice"),
        ('"a\\u0000":1', "NUL"),
        (",".join(f'"k{index}":1' for index in range(strict_json.MAX_FIELDS - 2)), ""),
        (",".join(f'"k{index}":1' for index in range(strict_json.MAX_FIELDS)), "more than 1024 fields"),
        ('"x":[' + ",".join(["{}"] * (strict_json.MAX_VALUES - 7)) + "]", ""),
        ('"x":[' + ",".join(["{}"] * strict_json.MAX_VALUES) + "]", "more than 250000 values"),
        ('"x":"' + '\\"[' * (2 * strict_json.MAX_VALUES) + '"', ""),
    ):
        for head in ("{" + padding, "{"):
            body = (head + '"tokens":[],' + inside + "}").encode()
            if words:
                with pytest.raises(InvalidRequest, match=words):
                    strict_json.parse(body, DetokenizeRequest)
            else:
                assert {"tokens"} < strict_json.parse(body, DetokenizeRequest)[1]


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
    }
    - {"messages", "prompt", "model", "input"}
)
_other_names = sorted({*REFUSED, *IGNORED}.difference(_names))
_any_name = st.sampled_from(_names) | st.sampled_from(_names) | st.sampled_from(_other_names) | json_text
_fields = st.just({}) | st.dictionaries(_any_name, _odd, max_size=4)
_main = st.sampled_from(["messages", "prompt", "tokens", "input"])
_valid = [
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9},
    *({"prompt": "a"}, {"input": "a"}, {"tokens": [1]}),
]
_odd_documents = st.tuples(_main, _messages | _odd, _fields).map(lambda parts: {parts[0]: parts[1], **parts[2]})
_documents = _odd_documents | st.tuples(st.sampled_from(_valid), _fields).map(lambda parts: parts[0] | parts[1])
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


@pytest.mark.slow
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
    assert seen[200] > 5 and seen[400] > 80


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()
