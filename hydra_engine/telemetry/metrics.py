"""The metrics page: vLLM's names, for its dashboards, where the meaning is the same, and `hydra:` for our own.

Fed once per finished request and once per HTTP answer; instances' reports are read when the page is requested. Labels
are the served model's name, names and roles of instances, names of API keys and words from fixed lists, never anything
that a client sent. Does not know HTTP or the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hydra_engine import __version__, log
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import Status
from hydra_engine.telemetry.families import LABELS, Families
from hydra_engine.telemetry.http_metrics import HttpTraffic
from hydra_engine.telemetry.instance_metrics import BusyShares, instance_families, status_families
from hydra_engine.telemetry.request_metrics import FinishedRequests

_ENGINE = "0"
_OPENMETRICS = "application/openmetrics-text"
_WITH_COLONS = f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8"  # other escapings lose the colons of our names


class Metrics(Collector):
    """The metrics of one server. Add ended requests to `requests` and HTTP events to `traffic`."""

    def __init__(self, model_name: str) -> None:
        self._make = Families((model_name, _ENGINE))
        self.requests = FinishedRequests()
        self.traffic = HttpTraffic()
        self._busy = BusyShares()
        self._status: Status | None = None
        self._instances: Sequence[InstanceState] = ()
        self._statuses: Mapping[str, Status] = {}
        self._client: str | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files of this process, start included

    def page(
        self,
        accept: str,
        status: Status | None,
        instances: Sequence[InstanceState] = (),
        statuses: Mapping[str, Status] | None = None,
        client: str | None = None,
    ) -> tuple[bytes, str]:
        """Returns the page and its content type: OpenMetrics if `accept`, the HTTP header, asks for it. Gauges come
        from `status`, the sum over all instances, and from `statuses`, by instance name. Series by client are
        restricted to `client`, unless it is None."""
        if status is not None:
            self._busy.update(status)
        self._status = status
        self._instances, self._statuses, self._client = instances, statuses or {}, client
        # The header itself is not passed on: the library fails on some of its words.
        escaping = _WITH_COLONS if _OPENMETRICS in accept.lower() else ""
        encode, content_type = choose_encoder(escaping)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        make = self._make
        yield make.info("hydra:build_info", "Which version serves.", {"version": __version__})
        yield from self.requests.families(make)
        yield from self.traffic.families(make, self._client)
        dropped = "Lines of the log that were dropped since standard error could not be written."
        yield make.counter("hydra:log_lines_dropped", dropped, log.num_dropped())
        if self._status is not None:
            yield from status_families(make, self._status, self._busy, self.requests.cached_tokens)
        yield from instance_families(LABELS, make.labels, self._instances, self._statuses)
