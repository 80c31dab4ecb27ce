"""Late tokens over every topology: as many gaps are counted and explained as the times between tokens say.

On simulated devices: dispatcher, schedulers, migration and caches are the real ones, steps take time that nobody waits
for. Caches are small, so that requests give way; users lose interest and instances die.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Delta, PixelPayload, ToFrontend, Tokens
from hydra_engine.core.outputs import FinishReason, Result, StageSpan
from hydra_engine.core.request import Request, Slo
from hydra_engine.frontend.request import ActiveRequest
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.telemetry.metrics import FinishedRequests
from hydra_engine.telemetry.timeline import phases
from hydra_planner.simulator.cluster import NOTICED_S
from hydra_planner.simulator.costs import Costs, DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.workload.file import Picture, WorkloadRequest
from tests.examples import examples
from tests.planner.sites import SURFACE

TOPOLOGIES = ["EPD", "EP+D", "ED+P", "E+PD", "E+P+D", "2EPD", "2E+P+2D", "2ED+2P", "2EP+2D", "2E+2P+2D"]
LIMITS_S = (0.0005, 0.004, 0.008, 0.02, 0.1)  # a step of one decode takes 4 ms


@cache
def site(num_kv_blocks: int) -> Site:
    scheduler = SchedulerConfig(token_budget=64, max_num_seqs=8)
    cache_config = CacheConfig(num_kv_blocks=num_kv_blocks, num_image_blocks=4, block_size=4)
    config = EngineConfig(scheduler=scheduler, cache=cache_config, max_model_len=34 * 4)
    kind = DeviceKind("made up", Costs(SURFACE, 2e-5, 3e-5, threads=0))
    devices = {f"cuda:{index}": kind for index in range(6)}
    host = Host(cores=8, request_s=0.0, pixel_s=0.0)
    return Site(load_spec(config.model_path, config.spec_options), config, devices, host)


def row(at_s: float, words: int, tokens: int, pictures: Sequence[int] = ()) -> WorkloadRequest:
    """`pictures` are numbers of small ones."""
    small = tuple(Picture(64, 64, number) for number in pictures)
    return WorkloadRequest(at_s=at_s, prompt_tokens=words, output_tokens=tokens, pictures=small)


class LimitedRequests(RequestMaker):
    """Requests with limits of their own, by number."""

    def __init__(self, spec: ModelSpec, limits_s: Mapping[int, float]) -> None:
        super().__init__(spec)
        self._limits_s = limits_s

    def request(self, row: WorkloadRequest, number: int, arrival_s: float) -> tuple[Request, tuple[PixelPayload, ...]]:
        request, pixels = super().request(row, number, arrival_s)
        return replace(request, slo=Slo(tpot_s=self._limits_s[number])), pixels


class LateDeployment(Deployment):
    """Writes down when the tokens of every request came, by the numbers that the messages carry and by nothing else."""

    def __init__(self, topology: str, num_kv_blocks: int) -> None:
        self.limits_s: dict[int, float] = {}
        self.times: dict[int, dict[int, float]] = defaultdict(dict)  # by request and position
        self.finished = FinishedRequests()
        super().__init__(topology, site(num_kv_blocks))
        self._maker = LimitedRequests(site(num_kv_blocks).spec, self.limits_s)

    def ask(self, row: WorkloadRequest, tpot_limit_s: float) -> None:
        self.submit(row)
        self.limits_s[len(self._rows)] = tpot_limit_s

    def _report(self, active: ActiveRequest, result: Result) -> None:
        super()._report(active, result)
        self.finished.add(result)

    def on_messages(self, name: str, messages: Sequence[ToFrontend]) -> None:
        for message in messages:
            assert not isinstance(message, Delta)
            if isinstance(message, Tokens):
                for number, position in zip(message.request_ids, message.positions, strict=True):
                    in_flight = self.dispatcher.by_id.get(RequestId(number))
                    if in_flight is not None and in_flight.attempt_at(name, RequestId(number)):
                        self.times[in_flight.arrival_index].setdefault(position, message.time_s)
        super().on_messages(name, messages)

    def cancel_at(self, number: int, at_s: float) -> None:
        self.agenda.schedule_at(
            self._open_s + at_s, lambda: self.dispatcher.cancel(RequestId(number), self.agenda.now())
        )


def late_of(deployment: LateDeployment, number: int) -> int:
    """Number of late gaps, from the times of the tokens and the limit alone."""
    times = [deployment.times[number][position] for position in range(len(deployment.results[number].token_ids))]
    return sum(later - time_s > deployment.limits_s[number] for time_s, later in pairwise(times))


def explained(result: Result) -> list[StageSpan]:
    return [span for span in result.timeline if span.blame]


def check(deployment: LateDeployment) -> Counter[str]:
    """Returns late gaps by what most of each went to, of requests that ended well."""
    by_kind: Counter[str] = Counter()
    for number, result in deployment.results.items():
        slo, gaps, tpot_limit_s = result.metrics.slo, explained(result), deployment.limits_s[number]
        assert slo.late_gaps == late_of(deployment, number), f"request {number}: counted"
        assert len(gaps) == slo.late_gaps, f"request {number}: explained"
        assert Counter(gap.blame[0].kind for gap in gaps) == slo.late_by
        assert slo.num_gaps == max(0, len(result.token_ids) - 1)
        assert all(gap.cause and sum(blame.seconds for blame in gap.blame) > 0 for gap in gaps)
        assert (slo.reason is not None) == (slo.tpot_met is False)
        assert sum(phases(result.timeline, result.metrics.e2e_s).values()) == pytest.approx(result.metrics.e2e_s)
        assert tpot_limit_s == slo.tpot_limit_s
        if result.finish_reason is not FinishReason.ABORT:
            by_kind.update(slo.late_by)
    counted = {kind: count for kind, count in deployment.finished._totals.late.items() if count}
    assert counted == by_kind, "what /metrics shows"
    return by_kind


def load(deployment: LateDeployment, random: Random, count: int) -> None:
    now = 0.0
    for number in range(count):
        now += random.choice((0.0, 0.002, 0.03))
        pictures = [random.randint(0, 3)] * random.choice((0, 0, 1, 2))
        num_tokens = random.choice((1, 2, 6, 24))
        deployment.ask(row(now, random.choice((1, 20, 60)), num_tokens, pictures), random.choice(LIMITS_S))
        if random.random() < 0.15:
            deployment.cancel_at(number + 1, now + random.uniform(0.001, 0.3))
    for name in [name for name in deployment.topology.names if name.endswith("1")]:
        if random.random() < 0.5:
            deployment.kill(name, random.uniform(0.0, now + 0.2), None)


def one(topology: str, num_tokens: int, tpot_limit_s: float, kill_s: float = 0.0) -> tuple[LateDeployment, Result]:
    """A request about a picture alone in its deployment, whose first decoder may die."""
    deployment = LateDeployment(topology, num_kv_blocks=200)
    deployment.ask(row(0.0, 20, num_tokens, [1]), tpot_limit_s)
    if kill_s:
        decoders = (name for name, node in deployment.cluster.nodes.items() if Role.D in node.role)
        deployment.kill(next(decoders), kill_s, None)
    deployment.run()
    check(deployment)
    return deployment, deployment.results[1]


@pytest.mark.parametrize("topology", ["EP+D", "ED+P", "E+P+D", "2E+2P+2D"])
def test_a_token_that_is_late_because_its_kv_moved_says_so(topology: str) -> None:
    _, result = one(topology, 6, tpot_limit_s=0.0043)
    (gap,) = explained(result)
    assert gap.start_s == result.metrics.ttft_s and gap.blame[0].kind == "transfer" and gap.cause == "transfer"
    assert result.metrics.slo.late_by == {"transfer": 1}
    (pull,) = [span for span in result.timeline if span.stage == "pull_kv" and span.end_s > gap.start_s]
    assert gap.start_s < pull.end_s < gap.end_s


@pytest.mark.parametrize("topology", ["EP+2D", "2E+2P+2D"])
def test_a_prefill_whose_decoder_is_lost_is_given_back_by_the_prefiller_before_the_frontend_is_told(
    topology: str,
) -> None:
    deployment, result = one(topology, 60, tpot_limit_s=0.0043, kill_s=0.01)
    assert len(result.token_ids) == 60 and not [span for span in result.timeline if span.stage == "lost"]
    assert (result.metrics.ttft_s or 1.0) < 0.01 + NOTICED_S and not deployment.dispatcher.requests


@pytest.mark.parametrize(("topology", "kill_s"), [("2EPD", 0.01), ("2EPD", 0.2), ("EP+2D", 0.2), ("2E+2P+2D", 0.2)])
def test_what_an_instance_that_was_lost_took_along_is_told_and_the_gap_over_it_blamed(
    topology: str, kill_s: float
) -> None:
    _, result = one(topology, 60, tpot_limit_s=0.0043, kill_s=kill_s)
    (lost, *others) = [span for span in result.timeline if span.stage == "lost"][::-1]
    assert lost.cause == "instance lost, tried again" and lost.end_s == pytest.approx(kill_s + NOTICED_S, abs=0.01)
    assert len(others) == (kill_s == 0.2 and topology == "2EPD"), "its prefill, where tokens came of it"
    seconds = phases(result.timeline, result.metrics.e2e_s, ttft_s=result.metrics.ttft_s)
    assert seconds["other"] == 0.0
    if kill_s == 0.2:
        (gap,) = [gap for gap in explained(result) if gap.blame[0].kind == "lost"]
        assert gap.start_s == lost.start_s and gap.end_s > lost.end_s
        decodes = [span for span in result.timeline if span.stage == "decode"]
        assert len({span.instance for span in decodes}) == 2, "tokens that came before are decodes, whoever tells"


@pytest.mark.quick("1-2E+P+2D", "1-EP+D", "1-ED+P")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 2 + examples(10)))])
def test_as_many_gaps_are_counted_and_explained_as_the_times_of_tokens_say(topology: str, seed: int) -> None:
    random = Random(f"{topology} {seed}")
    deployment = LateDeployment(topology, num_kv_blocks=random.choice((34, 40, 200)))
    load(deployment, random, 24)
    deployment.run()
    assert check(deployment).total() >= 5
