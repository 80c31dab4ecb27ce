"""Fields at their limit and beyond it: cases made from the types of the requests, so a new field has some too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from hydra_engine.server.openai.tokenize import DetokenizeRequest, TokenizeRequest
from hydra_engine.server.protocol.anthropic import MessagesRequest
from hydra_engine.server.protocol.chat import ChatCompletionRequest
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.protocol.responses import ResponsesRequest
from tests.server.conftest import Served

REQUESTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
MAX_BYTES = 1 << 18  # of a value that is really sent
Case = tuple[bool, Any]  # whether it is within the bounds, and the value


def cases(kind: inspect.Type) -> Iterator[Case]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            assert kind.ge is not None and kind.le is not None
            step = 1 if isinstance(kind, inspect.IntType) else 0.001
            yield from ((True, kind.ge), (True, kind.le), (False, kind.ge - step), (False, kind.le + step))
            yield from ((False, wrong) for wrong in (1 << 70, -(1 << 70), [kind.ge]))
            if isinstance(kind, inspect.IntType):
                yield from ((False, 1.5), (False, True))
        case inspect.StrType(max_length=most) if most is not None and most <= MAX_BYTES:
            yield from ((True, "x" * most), (False, "x" * (most + 1)))
            if kind.min_length:
                yield False, "x" * (kind.min_length - 1)
        case inspect.StrType(pattern=pattern) if pattern is not None:
            yield from ((False, ""), (False, "x" * 1000), (False, "1\n"))
        case inspect.ListType():
            yield from lists(kind)
        case inspect.DictType(value_type=inspect.AnyType()):
            return  # JSON for compilers and templates, see test_schema.py
        case inspect.DictType():
            key, value = "1", next(value for ok, value in cases(kind.value_type) if ok)
            assert kind.max_length is not None
            yield True, {str(index): value for index in range(kind.max_length)}
            yield False, {str(index): value for index in range(kind.max_length + 1)}
            yield from ((False, {key: wrong}) for ok, wrong in cases(kind.value_type) if not ok)
            yield from ((False, {wrong: value}) for ok, wrong in cases(kind.key_type) if not ok and wrong != key)
        case inspect.UnionType():
            yield from unions(kind)


def lists(kind: inspect.ListType) -> Iterator[Case]:
    assert kind.max_length is not None
    good = next((value for ok, value in cases(kind.item_type) if ok), None)
    if good is None:
        return
    if kind.max_length * len(str(good)) <= MAX_BYTES:
        yield from ((True, [good] * kind.max_length), (False, [good] * (kind.max_length + 1)))
    if kind.min_length:
        yield False, [good] * (kind.min_length - 1)
    yield from ((False, [wrong]) for ok, wrong in cases(kind.item_type) if not ok)


def unions(kind: inspect.UnionType) -> Iterator[Case]:
    """A value that is wrong for one member of a union may be right for another."""
    others = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    if len(others) < len(kind.types):
        yield True, None
    for one in others:
        sized = isinstance(one, inspect.StrType | inspect.ListType)
        yield from ((ok, value) for ok, value in cases(one) if ok or sized or len(others) == 1)


def all_cases(path: str) -> list[tuple[str, bool, Any]]:
    kind, _ = REQUESTS[path]
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return [(field.encode_name, ok, value) for field in info.fields for ok, value in cases(field.type)]


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_field_at_and_beyond_its_limits(served: Served, path: str) -> None:
    kind, base = REQUESTS[path]
    num_refused: dict[str, int] = {}
    for name, ok, value in all_cases(path):
        body = json.dumps(base | {name: value}).encode()
        if ok:
            msgspec.json.decode(body, type=kind)
            continue
        async with served.http.post(
            served.url + path, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 400, (name, str(value)[:80])
            error = (await response.json())["error"]
        # Anthropic's errors have no `param`; their messages begin with it.
        assert (error.get("param") or error["message"]).startswith(name), (name, str(value)[:80], error)
        assert len(error["message"]) < 500
        num_refused[name] = num_refused.get(name, 0) + 1
    assert served.engine.submissions == []
    assert sum(num_refused.values()) > (100 if path.startswith("/v1") else 0)


def test_there_are_cases_for_what_clients_send_most() -> None:
    names = {name for name, ok, _ in all_cases("/v1/chat/completions") if not ok}
    wanted = {"n", "stop", "stop_token_ids", "logit_bias", "max_tokens", "top_logprobs", "temperature", "model", "seed"}
    assert wanted | {"cache_salt", "request_id", "priority", "allowed_token_ids"} <= names
