"""GET /openapi.json: it has every route and no other, its references lead somewhere, and what it says is so."""

from __future__ import annotations

import html
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.core.reports import InstanceSummary
from hydra_engine.server import openapi
from hydra_engine.server.app import build_app
from hydra_engine.server.operations import OPERATIONS
from hydra_engine.server.protocol.other_fields import other_names_of
from hydra_engine.server.protocol.responses import ResponsesRequest
from tests.server.conftest import Serve, Served
from tests.server.stub import StubEngine
from tests.server.test_info import summary

Json = dict[str, Any]
KEYED = {"Authorization": "Bearer open-api"}
ADMIN = {"Authorization": "Bearer open-admin"}
FILLED = {"{model}": "stub", "{id}": "nobody-s"}  # what stands in paths


def everything() -> Json:
    return openapi.document(OPERATIONS, has_api_keys=True, has_admin_key=True)


def validator(document: Json, schema: Json) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from nodes(item)
    elif isinstance(value, list):
        for item in value:
            yield from nodes(item)


def test_it_has_every_route_and_no_other() -> None:
    app = build_app(StubEngine(), ServerConfig(admin_key="open-admin"))
    routes = openapi.routes_of(app)
    assert set(routes) == set(OPERATIONS) and len(routes) == len(set(routes))
    assert {(m.upper(), path) for path, item in everything()["paths"].items() for m in item} == set(OPERATIONS)


async def test_what_is_not_there_is_not_in_it(serve: Serve) -> None:
    served = await serve()
    async with served.get("/openapi.json") as response:
        assert response.status == 200 and response.content_type == "application/json"
        document = await response.json()
    assert not {"/admin/topology", "/debug/trace", "/reset_mm_cache", "/debug/ledger"} & document["paths"].keys()
    assert "securitySchemes" not in document["components"]
    assert not any("security" in operation for item in document["paths"].values() for operation in item.values())


async def test_keys_are_asked_for_where_it_says_so(serve: Serve) -> None:
    served = await serve(api_key=("open-api",), admin_key="open-admin")
    async with served.get("/openapi.json", headers=KEYED) as response:
        document = await response.json()
    assert document["components"]["securitySchemes"].keys() == {"bearer", "x_api_key", "admin"}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            wanted = {name for one in operation.get("security", ()) for name in one}
            for header, opens in (({}, False), (KEYED, "bearer" in wanted), (ADMIN, "admin" in wanted)):
                async with served.http.request(method, url_of(served, path), headers=header) as response:
                    assert (response.status == 401) == (bool(wanted) and not opens), (method, path, header)


def url_of(served: Served, path: str) -> str:
    for name, value in FILLED.items():
        path = path.replace(name, value)
    return served.url + path


async def test_the_page_for_people_has_every_route_and_its_command_works(serve: Serve) -> None:
    served = await serve(api_key=("open-api",))
    async with served.get("/docs") as response:
        assert response.status == 401
    async with served.get("/docs", headers=KEYED) as response:
        assert response.status == 200 and response.content_type == "text/html"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        page = await response.text()
    commands = re.findall(r"<h3><code>(\w+) (.+)</code></h3><p>.+<pre>(.+)</pre>", page)
    assert {(method, path) for method, path, _ in commands} == set(openapi.routes_of(served.app))
    assert re.findall("<h2>(.+?)</h2>", page) == ["generation", "tokens", "models", "server"]
    (command,) = [shlex.split(html.unescape(words)) for _, path, words in commands if path == "/v1/chat/completions"]
    assert command[:3] == ["curl", "-s", f"{served.url}/v1/chat/completions"]
    headers = dict(header.split(": ") for flag, header in itertools.pairwise(command) if flag == "-H")
    assert headers.pop("Authorization") == "Bearer KEY"
    async with served.http.post(command[2], data=command[command.index("-d") + 1], headers=headers | KEYED) as response:
        assert response.status == 200


def test_all_references_lead_somewhere() -> None:
    document = everything()
    references = {node["$ref"] for node in nodes(document) if "$ref" in node}
    assert len(references) > 50
    for reference in references:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    named = {reference.rpartition("/")[2] for reference in references}
    assert document["components"]["schemas"].keys() <= named  # and nothing lies about
    assert not any("." in name for name in document["components"]["schemas"])


def test_every_schema_is_one() -> None:
    document = everything()
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]}), name
    assert document["openapi"] == "3.1.0" and document["info"]["version"]
    identifiers = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(identifiers) == len(set(identifiers)) == len(OPERATIONS)


BODIES = [(path, body) for (_, path), operation in OPERATIONS.items() for body in operation.examples]


def test_every_body_has_an_example() -> None:
    assert all(operation.examples for operation in OPERATIONS.values() if operation.body is not None)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_examples_are_what_the_schema_says_and_work(serve: Serve, path: str, body: Json) -> None:
    document = everything()
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert body in [example["value"] for example in content["examples"].values()]
    validator(document, content["schema"]).validate(body)
    served = await serve(admin_key="open-admin")
    async with served.post(path, body, headers=ADMIN) as response:
        assert response.status == 200
        answered = operation["responses"]["200"]["content"][response.content_type]
        data = await response.read()
    if response.content_type == "application/json":
        validator(document, answered["schema"]).validate(json.loads(data))
        return
    events = [block.rpartition("data: ")[2] for block in data.decode().strip().split("\n\n")]
    assert (events[-1] == "[DONE]") == OPERATIONS["POST", path].done
    form = answered["schema"]["properties"]["data"]
    checks = validator(document, form.get("oneOf", [form])[-1]["contentSchema"])
    assert len(events) > 2
    for event in events:
        if event != "[DONE]":
            checks.validate(json.loads(event))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_answers_with_everything_in_them(served: Served, path: str) -> None:
    document = everything()
    body = {
        **OPERATIONS["POST", path].examples[0],
        "return_metrics": True,
        "ttft_ms": 1,
        "tpot_ms": 2,
    }
    if path != "/v1/messages":
        body["top_logprobs"] = 2
    if path == "/v1/chat/completions":
        body["logprobs"] = True
    async with served.post(path, body) as response:
        answer = await response.json()
    schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(document, schema).validate(answer)
    assert "metrics" in answer


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "temperature": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "audio": {"voice": "ash"}}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/responses", {"input": "a", "request_id": "a b"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "tools": [{}]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_what_the_schema_refuses_the_server_refuses(served: Served, path: str, wrong: Json) -> None:
    document = everything()
    operation = document["paths"][path]["post"]
    assert not validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).is_valid(wrong)
    async with served.post(path, wrong) as response:
        assert response.status == 400
        answer = await response.json()
    [name] = operation["responses"]["400"].values()
    error = document["components"]["responses"][name.rpartition("/")[2]]
    validator(document, error["content"]["application/json"]["schema"]).validate(answer)


async def test_answers_without_a_body(serve: Serve) -> None:
    served = await serve(admin_key="open-admin")
    summaries: tuple[InstanceSummary, ...] = (summary("epd0", "EPD"),)
    served.engine.summaries = summaries
    document = everything()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if "requestBody" in operation:
                continue
            async with served.http.request(method, url_of(served, path), headers=ADMIN) as response:
                described = operation["responses"][str(response.status)]
                if "$ref" in described:
                    described = document["components"]["responses"][described["$ref"].rpartition("/")[2]]
                schema = described["content"][response.content_type]["schema"]
                if response.content_type == "application/json":
                    validator(document, schema).validate(await response.json())
                assert response.status == 200 or path == "/v1/requests/{id}", path


def test_fields_that_are_refused_are_named_with_what_they_may_be() -> None:
    properties = everything()["components"]["schemas"]["ResponsesRequest"]["properties"]
    refused = other_names_of(ResponsesRequest).refused
    assert refused.keys() <= properties.keys() and "store" not in refused
    assert properties["background"] == {"enum": [None, "", [], {}, False]}
