"""Traces for OpenTelemetry: a span per request, and below it a span per stage that it went through.

Names and attributes are OpenTelemetry's where they exist, those for generative AI included; `gen_ai.latency.*` are
vLLM's; `hydra.*` are our own. Spans are made when a request has ended and exported on a thread of the library, through
a queue that drops what does not fit: a slow or absent collector delays no request. Prompts and answers never appear in
them. The library is imported only if traces are enabled, and reads the OTEL_* variables itself. Does not know HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hydra_engine import __version__, log
from hydra_engine.core.outputs import Result, StageSpan
from hydra_engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context

MAX_STAGE_SPANS = 200  # per answer; the rest is only counted
_QUEUE = 2048  # spans that wait for export
_BATCH = 256
_EXPORT_S = 5.0  # for one batch, retries included
_CLOSE_S = 3.0  # for the last spans
_PARENTS = ("traceparent", "tracestate")

Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Traced:
    """A request that has ended; times are on the monotonic clock. `answers`: (result, time at which it was known);
    `failed`: the error in a word if the server is at fault; `parent`: headers of W3C Trace Context."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value]
    answers: Sequence[tuple[Result, float]] = ()
    failed: str | None = None
    parent: Mapping[str, str] | None = None


class Tracer:
    """An exporter of spans. Use it from one thread. Raises ConfigError unless the extra otel is installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "otlp_endpoint needs OpenTelemetry: "
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
                param="otlp_endpoint",
            ) from error
        log.adopt_logger("opentelemetry")
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=_EXPORT_S)
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "hydra-engine"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=_QUEUE, max_export_batch_size=_BATCH)
        )
        self._tracer = self._provider.get_tracer("hydra_engine", __version__)

    def export(self, request: Traced) -> None:
        """Queues the request's spans; never waits for the collector. Exports none if the parent is not sampled."""
        trace = self._trace
        offset_ns = time.time_ns() - time.monotonic_ns()  # from the monotonic to the wall clock, which spans are on
        parent = self._parent(request.parent or {})
        span = self._tracer.start_span(
            request.name,
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=dict(request.attributes),
            start_time=offset_ns + _ns(request.began_s),
        )
        if span.is_recording():
            below = trace.set_span_in_context(span)
            for result, known_s in request.answers:
                arrival_s = max(known_s - result.metrics.e2e_s, request.began_s)
                left_out = self._add_stages(result.timeline, offset_ns + _ns(arrival_s), below)
                if left_out:
                    span.set_attribute("hydra.stages_left_out", left_out)
            if request.failed is not None:
                span.set_attribute("error.type", request.failed)
                span.set_status(trace.StatusCode.ERROR)
        span.end(offset_ns + _ns(request.ended_s))

    def _parent(self, headers: Mapping[str, str]) -> Context:
        from opentelemetry.context import Context

        parent = {name: headers[name] for name in _PARENTS if name in headers}
        return self._propagator.extract(parent, context=Context())

    def _add_stages(self, timeline: Sequence[StageSpan], arrival_ns: int, below: Context) -> int:
        for stage in timeline[:MAX_STAGE_SPANS]:
            span = self._tracer.start_span(
                stage.stage, context=below, attributes=_facts(stage), start_time=arrival_ns + _ns(stage.start_s)
            )
            span.end(arrival_ns + _ns(stage.end_s))
        return max(len(timeline) - MAX_STAGE_SPANS, 0)

    def close(self) -> None:
        """Exports the queued spans for up to `_CLOSE_S`; what the collector has not accepted by then is lost."""
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        sending.join(_CLOSE_S)
        if sending.is_alive():
            self._exporter.shutdown()  # ends its retries


def answer_attributes(answers: Iterable[tuple[Result, float]]) -> dict[str, Value]:
    """Returns the span attributes of a request with these answers: tokens of all, finish reasons, and the latencies of
    the first."""
    results = [result for result, _ in answers]
    if not results:
        return {}
    first = results[0]
    metrics, usage = first.metrics, first.usage
    values: dict[str, Value] = {
        "gen_ai.response.id": first.request_id,
        "gen_ai.response.finish_reasons": [result.finish_reason.value for result in results],
        "gen_ai.usage.output_tokens": sum(result.usage.completion_tokens for result in results),
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.latency.e2e": metrics.e2e_s,
        "gen_ai.latency.time_in_queue": metrics.queue_s,
        "gen_ai.latency.time_in_model_prefill": metrics.prefill_s,
        "gen_ai.latency.time_in_model_decode": metrics.decode_s,
        "hydra.images": usage.num_images,
    }
    if metrics.ttft_s is not None:
        values["gen_ai.latency.time_to_first_token"] = metrics.ttft_s
    return values


def _facts(stage: StageSpan) -> dict[str, Any]:
    facts: dict[str, Any] = {"hydra.instance": stage.instance, "hydra.lane": stage.lane}
    if stage.batch:
        facts["hydra.batch_size"] = stage.batch
    if stage.tokens:
        facts["hydra.patches" if stage.lane == "vision" else "hydra.tokens"] = stage.tokens
    if stage.cause:
        facts["hydra.cause"] = stage.cause
    return facts


def _traces_url(endpoint: str) -> str:
    """Returns the URL, with the protocol's path if it has none."""
    return endpoint.rstrip("/") + "/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
