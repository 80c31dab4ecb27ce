"""schemathesis over the served /openapi.json, on a real socket: what the document says is what the server does.

Each operation gets data that its schema allows and data that it does not. No answer is a 5xx but 503, every status,
header, content type and body is one that the document has, and what its schema forbids is refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.operations import OPERATIONS
from tests.examples import examples
from tests.server.stub import StubEngine
from tests.server.test_info import summary

ADMIN = {"Authorization": "Bearer contract-admin"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NUM_EXAMPLES = examples(12)
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ROUTES = sorted(OPERATIONS.keys() - {("GET", "/openapi.json")})  # which schemathesis leaves out
CASES = [(*route, POSITIVE) for route in ROUTES]
CASES += [(*route, NEGATIVE) for route in ROUTES if OPERATIONS[route].body is not None]


@pytest.fixture(scope="module")
def engine() -> StubEngine:
    return StubEngine(summaries=(summary("epd0", "EPD"),))


@pytest.fixture(scope="module")
def url(engine: StubEngine) -> Iterator[str]:
    """A server on a loop of its own, in a thread of its own."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    found: list[Any] = []

    async def start() -> None:
        config = ServerConfig(admin_key="contract-admin", keepalive_s=60.0)
        found.append(await listen(build_app(engine, config), "127.0.0.1", 0))
        started.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(found[0].close())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    yield found[0].url
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.fixture(scope="module")
def schema(url: str) -> Any:
    return schemathesis.openapi.from_url(url + "/openapi.json")


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def test_all_operations_are_in_it(schema: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in schema.get_all_operations()}
    assert found == set(ROUTES)


@pytest.mark.quick("POST-/v1/chat/completions", "GET-")
@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=lambda value: str(getattr(value, "value", value)))
def test_what_the_document_says(
    schema: Any, session: requests.Session, method: str, path: str, mode: GenerationMode
) -> None:
    """A request that its schema allows may still be refused: for fields that exclude each other, and in a topology
    where nothing decodes."""
    operation = schema[path][method]
    checks = CHECKS + ([negative_data_rejection] if mode is NEGATIVE else [])

    @settings(
        max_examples=NUM_EXAMPLES if OPERATIONS[method, path].body is not None else 2,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if mode is POSITIVE and isinstance(case.body, dict):
            case.body.pop("model", None)  # another one than is served is not found
        response = case.call(session=session, headers=ADMIN, timeout=20)
        if response.status_code == 503:
            return
        case.validate_response(response, checks=checks, headers=ADMIN)

    check()


EXAMPLES = [(*route, body) for route in ROUTES for body in OPERATIONS[route].examples]


@pytest.mark.parametrize(("method", "path", "body"), EXAMPLES)
def test_an_example_is_answered_as_the_document_says(
    schema: Any, session: requests.Session, method: str, path: str, body: dict[str, Any]
) -> None:
    """The requests drawn above need not include one that is served: hypothesis draws from the modules that are
    imported, so alone and after other tests it draws other values."""
    case = schema[path][method].Case(body=body, media_type="application/json")
    response = case.call(session=session, headers=ADMIN, timeout=20)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=CHECKS, headers=ADMIN)


def test_a_failure_is_noticed(schema: Any, session: requests.Session, engine: StubEngine) -> None:
    engine.refusal = ValueError("oops")
    try:
        case = schema["/v1/completions"]["POST"].Case(body={"prompt": "a"}, media_type="application/json")
        with pytest.raises(FailureGroup, match="Server error"):
            case.validate_response(case.call(session=session), checks=CHECKS)
    finally:
        engine.refusal = None
