"""The record of one HTTP request for the access log, the metrics and traces: sizes, times, counts and codes. No
prompts, answers, paths or keys. Does not know who reads it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from aiohttp import web

from hydra_engine import log
from hydra_engine.core.outputs import Result, Usage
from hydra_engine.server.context import CLIENT, REQUEST_ID

logger = logging.getLogger("hydra_engine.access")

_MAX_METHOD = 16  # characters of a word that a client chooses


@dataclass(slots=True)
class Access:
    """Times on the monotonic clock. `results` as they came, with when: of a stream one for each answer, of a whole
    answer one that has them all."""

    began_s: float
    ended_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    error_code: str | None = None
    prompt: Usage | None = None
    results: list[tuple[Result, float]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.results.append((result, time.monotonic()))

    @property
    def answers(self) -> list[tuple[Result, float]]:
        """Each alone, and when it was known."""
        return [(answer, known_s) for result, known_s in self.results for answer in (result.choices or (result,))]

    @property
    def ttft_s(self) -> float | None:
        return min(
            (answer.metrics.ttft_s for answer, _ in self.answers if answer.metrics.ttft_s is not None), default=None
        )

    @property
    def completion_tokens(self) -> int:
        return sum(answer.usage.completion_tokens for answer, _ in self.answers)

    @property
    def finish_reasons(self) -> list[str]:
        return list(dict.fromkeys(answer.finish_reason.value for answer, _ in self.answers))


ACCESS = web.RequestKey("access", Access)


def route_of(request: web.Request) -> str:
    """The pattern of its route, never its path."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"


def turn_on(form: str) -> None:
    """`form`: text or json, whatever the level of the rest of the log. JSON lines are whole lines of standard error,
    also where the rest is text."""
    logger.setLevel(logging.INFO)
    if form == "json":
        log.write_json(logger)


def write_line(request: web.Request, status: int, access: Access) -> None:
    facts: dict[str, object] = {
        "request_id": request[REQUEST_ID],
        "client": request.get(CLIENT) or request.remote or "unknown",
        "method": request.method[:_MAX_METHOD],
        "route": route_of(request),
        "status": status,
        "bytes_in": access.bytes_in,
        "bytes_out": access.bytes_out,
        "duration_s": round(access.ended_s - access.began_s, 6),
    }
    if access.prompt is not None:
        facts["prompt_tokens"] = access.prompt.prompt_tokens
        facts["image_tokens"] = access.prompt.image_tokens
    if access.results:
        facts["completion_tokens"] = access.completion_tokens
        facts["finish_reason"] = ",".join(access.finish_reasons)
        if (ttft_s := access.ttft_s) is not None:
            facts["ttft_s"] = round(ttft_s, 6)
    if access.error_code is not None:
        facts["error_code"] = access.error_code
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    logger.info("%s", text, extra={log.FACTS: facts})
