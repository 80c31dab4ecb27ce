"""Counters of the HTTP surface: answers, refusals by reason, and the event loop's lag.

Labels are routes, statuses, known methods, reasons from a fixed list and the operator's names of API keys, at most
`MAX_CLIENTS` of them; no label is chosen by a client. Does not know HTTP itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from hydra_engine.telemetry.families import Families, Histogram

MAX_CLIENTS = 64  # keys with their own series; further ones share `OTHER`
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_REASONS = (
    *("overloaded", "draining", "not_ready", "instance_lost"),  # 503
    *("rate_limit_exceeded", "request_timeout", "payload_too_large", "unsupported_media_type", "invalid_api_key"),
    OTHER,
)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class HttpTraffic:
    """The counters of one server."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()
        self._by_route: Counter[tuple[str, ...]] = Counter()  # route, status
        self._by_client: Counter[tuple[str, ...]] = Counter()  # client, status
        self._by_class: Counter[tuple[str, ...]] = Counter()  # method, route, status in hundreds
        self._clients: set[str] = set()
        self._seconds = Histogram(
            "http_request_duration_seconds", "Time to an answer's end, by route.", _SECONDS, ("method", "handler")
        )
        self._lag = Histogram(
            "hydra:event_loop_lag_seconds", "How late the event loop ran a timer, ten times a second.", _LAG_SECONDS
        )

    def count_refusal(self, reason: str | None) -> None:
        """Counts a request refused because of the server's state or one of its limits."""
        self._refused[reason if reason in _REASONS else OTHER] += 1

    def count_answer(
        self, route: str, status: int, client: str | None = None, *, method: str = "GET", seconds: float = 0.0
    ) -> None:
        """Counts an answer. `route` is a route's pattern, never a path; `client` is the operator's name of an API
        key."""
        method = method if method in _METHODS else OTHER
        self._by_route[route, str(status)] += 1
        self._by_class[method, route, f"{status // 100}xx"] += 1
        self._seconds.observe(seconds, method, route)
        if client is not None:
            self._by_client[self._known(client), str(status)] += 1

    def count_lag(self, seconds: float) -> None:
        """Counts a timer that the event loop ran `seconds` late."""
        self._lag.observe(seconds)

    def _known(self, client: str) -> str:
        if client not in self._clients:
            if len(self._clients) >= MAX_CLIENTS:
                return OTHER
            self._clients.add(client)
        return client

    def families(self, make: Families, client: str | None = None) -> Iterator[Metric]:
        """Yields the families. Series by client are restricted to `client`, unless it is None."""
        refused = "Requests refused because of the server's state or a limit, by reason."
        yield make.counter_by("hydra:admission_rejections", refused, "reason", _REASONS, self._refused)
        answers = "HTTP answers by route and status."
        yield make.counter_by_labels("hydra:http_responses", answers, ("route", "status"), dict(self._by_route))
        by_client: dict[tuple[str, ...], float] = {
            labels: count for labels, count in self._by_client.items() if client in (None, labels[0])
        }
        by_key = "HTTP answers by API key and status."
        yield make.counter_by_labels("hydra:client_responses", by_key, ("client", "status"), by_client)
        in_hundreds = "HTTP answers by method, route and status in hundreds."
        yield make.counter_by_labels(
            "http_requests", in_hundreds, ("method", "handler", "status"), dict(self._by_class)
        )
        yield self._seconds.family(make.labels)
        yield self._lag.family(make.labels)
