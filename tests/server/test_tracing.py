"""Traces as a collector gets them: one per generation with a span per stage, a client's trace continued; a collector
that is away is nobody's problem.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from hydra_engine.config import ServerConfig
from hydra_engine.core.outputs import StageSpan
from hydra_engine.errors import ConfigError, Unavailable
from hydra_engine.server.app import build_app
from hydra_engine.server.loggers import TRACER
from hydra_engine.telemetry import otel
from tests.server.conftest import Serve, Served, chat_body
from tests.server.stub import StubEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Listens on loopback; `answer` is the status that it gives."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.service = ""
        self.paths: list[str] = []
        self.answer = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.take(self.path, body)
                self.send_response(outer.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service = facts(resource.resource)["service.name"]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def facts(holder: Any) -> dict[str, Any]:
    found = {}
    for pair in holder.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def ask(served: Served, headers: dict[str, str], text: str = "a", **fields: Any) -> Any:
    return served.post("/v1/chat/completions", chat_body(text, **fields), headers=headers)


async def flush(served: Served) -> None:
    await asyncio.to_thread(served.app[TRACER]._provider.force_flush)


async def traced(serve: Serve, collector: Collector, **options: Any) -> Served:
    return await serve(otlp_endpoint=collector.url, **options)


async def test_a_request_is_a_trace_with_its_stages(serve: Serve, collector: Collector) -> None:
    served = await traced(serve, collector)
    served.engine.late_spans = (StageSpan("decode", 0.2, 0.5, "d0", "language", 4, 11, cause=None),)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    before_ns = time.time_ns()
    async with ask(served, headers, "one two three") as response:
        await response.read()
    await flush(served)
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"POST /v1/chat/completions", "fetch", "prefill", "decode"}
    root = by_name["POST /v1/chat/completions"]
    assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == PARENT and root.trace_state == "vendor=1"
    assert root.kind == Span.SPAN_KIND_SERVER and root.status.code == 0
    assert abs(root.start_time_unix_nano - before_ns) < 5e9 and root.end_time_unix_nano > root.start_time_unix_nano
    told = facts(root)
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "stub"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 3)
    assert told["gen_ai.response.finish_reasons"] == ["stop"] and told["http.response.status_code"] == 200
    assert told["gen_ai.latency.time_to_first_token"] == 0.2 and told["http.route"] == "/v1/chat/completions"
    for name in ("fetch", "prefill", "decode"):
        assert by_name[name].parent_span_id == root.span_id and by_name[name].trace_id == root.trace_id
    decode = by_name["decode"]
    assert (decode.end_time_unix_nano - decode.start_time_unix_nano) == pytest.approx(0.3e9, abs=1e3)
    assert decode.start_time_unix_nano - by_name["prefill"].start_time_unix_nano == pytest.approx(0.1e9, abs=1e3)
    assert facts(decode) == {
        **{"hydra.instance": "d0", "hydra.lane": "language"},
        **{"hydra.batch_size": 4, "hydra.tokens": 11},
    }
    assert collector.paths == ["/v1/traces"] and collector.service == "hydra-engine"
    everything = " ".join(str(span) for span in collector.spans)
    assert "one" not in [word.strip('"') for word in everything.split()]


@pytest.mark.parametrize("odd", ["", "00-zz-11-01", "x" * 5000, f"00-{TRACE}-{'0' * 16}-01"])
async def test_an_odd_parent_begins_a_new_trace(serve: Serve, collector: Collector, odd: str) -> None:
    served = await traced(serve, collector)
    async with ask(served, {"traceparent": odd}, stream=True, n=2) as response:
        await response.read()
    await flush(served)
    (root,) = [span for span in collector.spans if span.name.startswith("POST")]
    assert not root.parent_span_id and root.trace_id.hex() != TRACE
    assert facts(root)["gen_ai.usage.output_tokens"] == 2
    assert len([span for span in collector.spans if span.name == "prefill"]) == 2  # of each answer


async def test_what_a_client_does_not_sample_is_not_sent(serve: Serve, collector: Collector) -> None:
    served = await traced(serve, collector)
    async with ask(served, {"traceparent": f"00-{TRACE}-{PARENT}-00"}) as response:
        assert response.status == 200
    await flush(served)
    assert collector.spans == []


async def test_failures_say_whose_they_are(serve: Serve, collector: Collector) -> None:
    served = await traced(serve, collector)
    async with served.chat(max_tokens=0) as response:
        assert response.status == 400
    served.engine.refusal = Unavailable("full", code="overloaded")
    async with served.chat() as response:
        assert response.status == 503
    for path in ("/health", "/metrics", "/nowhere"):
        async with served.get(path) as response:
            await response.read()
    await flush(served)
    wrong, full = collector.spans
    assert wrong.status.code == 0 and facts(wrong)["http.response.status_code"] == 400
    assert full.status.code == 2 and facts(full)["error.type"] == "overloaded"


async def test_long_timelines_are_cut(serve: Serve, collector: Collector) -> None:
    served = await traced(serve, collector)
    served.engine.late_spans = tuple(StageSpan("decode", i / 1e3, i / 1e3) for i in range(500))
    async with served.chat("a") as response:
        await response.read()
    await flush(served)
    assert len(collector.spans) == 1 + otel.MAX_STAGE_SPANS
    (root,) = [span for span in collector.spans if span.name.startswith("POST")]
    assert facts(root)["hydra.stages_left_out"] == 502 - otel.MAX_STAGE_SPANS


async def test_a_collector_that_is_away_is_nobodys_problem(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_CLOSE_S", 0.2)
    monkeypatch.setattr(otel, "_EXPORT_S", 600)
    served = await serve(otlp_endpoint="http://127.0.0.1:9")  # nothing listens there
    for _ in range(5):
        async with served.chat() as response:
            assert response.status == 200
    began_s = time.monotonic()
    await served.close()
    assert time.monotonic() - began_s < 30


async def test_an_unwilling_collector_is_nobodys_problem(serve: Serve, collector: Collector) -> None:
    collector.answer = 400
    served = await traced(serve, collector)
    async with served.chat() as response:
        assert response.status == 200
    await flush(served)
    assert collector.paths


def test_without_the_library_the_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk") as caught:
        build_app(StubEngine(), ServerConfig(otlp_endpoint="http://127.0.0.1:4318"))
    assert caught.value.exit_code == 2
    build_app(StubEngine(), ServerConfig())  # nobody else needs it


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://x", "http://", "http://x:99999", "http://u:p@x"])
def test_odd_endpoints_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint must"):
        ServerConfig(otlp_endpoint=url)


def test_the_path_of_the_protocol_is_added_where_there_is_none() -> None:
    assert otel._traces_url("http://h:4318") == otel._traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert otel._traces_url("https://h/api/otlp") == "https://h/api/otlp"
