"""The metrics page: under vLLM's names for dashboards where the meaning is the same, and under `hydra:` for our own.

Fed once per finished request and once per HTTP answer; what instances report is read when the page is asked for. Labels
are the served model's name, names and roles of instances, names of API keys and words from fixed lists, never anything
a client sent. Does not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hydra_engine import __version__
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import Status
from hydra_engine.core.outputs import Result
from hydra_engine.observe.families import LABELS, Families
from hydra_engine.observe.http_metrics import HttpTraffic
from hydra_engine.observe.instance_metrics import instance_families
from hydra_engine.observe.request_metrics import FinishedRequests, Outcomes
from hydra_engine.observe.status_metrics import BusyShares, status_families

_ENGINE = "0"
_OPENMETRICS = "application/openmetrics-text"
_WITH_COLONS = f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8"  # other escapings lose those of our names


@dataclass(frozen=True, slots=True)
class FrontWorkersReport:
    """Processes that serve HTTP for this one. `cpu_s` of all, those that have ended included."""

    num_up: int
    restarts: int
    cpu_s: float


class Metrics(Collector):
    """One per server."""

    def __init__(self, model_name: str) -> None:
        self._make = Families((model_name, _ENGINE))
        self._requests = FinishedRequests()
        self._traffic = HttpTraffic()
        self._busy = BusyShares()
        self.front_workers: Callable[[], FrontWorkersReport] | None = None  # set where there are any
        self._status: Status | None = None
        self._instances: Sequence[InstanceState] = ()
        self._statuses: Mapping[str, Status] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files of this process, start included

    # ---- feeding

    def observe(self, result: Result) -> None:
        """A request has ended, or one of its answers where it asked for several."""
        self._requests.add(result)

    def generated(self, num_choices: int, most_tokens: int) -> None:
        """A whole request has ended well: of its answers the longest has `most_tokens`."""
        self._requests.add_choices(num_choices, most_tokens)

    def rejected(self, code: str | None) -> None:
        """A request was refused because of the server's state or one of its limits."""
        self._traffic.refused(code)

    def answered(
        self, route: str, status: int, client: str | None = None, *, method: str = "GET", seconds: float = 0.0
    ) -> None:
        """`route` is a route's pattern, never a path; `client` what the operator calls an API key."""
        self._traffic.answered(route, status, client, method, seconds)

    def lagged(self, seconds: float) -> None:
        """The event loop ran a timer that much later than planned."""
        self._traffic.lagged(seconds)

    # ---- reading

    @property
    def outcomes(self) -> Outcomes:
        return self._requests.outcomes

    def text(
        self,
        status: Status | None,
        instances: Sequence[InstanceState] = (),
        statuses: Mapping[str, Status] | None = None,
    ) -> bytes:
        """`page` in Prometheus' text format."""
        return self.page("", status, instances, statuses)[0]

    def page(
        self,
        accept: str,
        status: Status | None,
        instances: Sequence[InstanceState] = (),
        statuses: Mapping[str, Status] | None = None,
    ) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics where `accept`, as HTTP has it, asks for that. Gauges are as of
        `status`, the sum over all instances, and of `statuses`, by their names."""
        if status is not None:
            self._busy.put(status)
        self._status = status
        self._instances, self._statuses = instances, statuses or {}
        # Only what this line finds goes on: the library trips over other words in a header.
        wanted = _WITH_COLONS if _OPENMETRICS in accept.lower() else ""
        encode, content_type = choose_encoder(wanted)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        make = self._make
        yield make.info("hydra:build_info", "Which version serves.", {"version": __version__})
        yield from self._requests.families(make)
        yield from self._traffic.families(make)
        if self.front_workers is not None:
            report = self.front_workers()
            yield make.gauge("hydra:front_workers_up", "Front workers that take connections.", report.num_up)
            yield make.counter("hydra:front_worker_restarts", "How often one was started again.", report.restarts)
            yield make.counter("hydra:front_worker_cpu_seconds", "CPU seconds of all front workers.", report.cpu_s)
        if self._status is not None:
            yield from status_families(make, self._status, self._busy, self._requests.cached_tokens)
        yield from instance_families(LABELS, make.labels, self._instances, self._statuses)
