"""Moves of blocks between instances of a simulated deployment, and their gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.instances import Topology
from hydra_engine.core.outputs import StageSpan
from hydra_engine.frontend import transitions
from hydra_engine.frontend.request import Phase, RequestInFlight
from hydra_engine.frontend.transitions import TRANSITIONS, Dispatcher, Event
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.scheduler.handover import pulls
from hydra_planner.simulator.costs import Costs, DeviceKind
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.workload.file import Picture, WorkloadRequest
from tests.planner.sites import SURFACE
from tools.miniatures import make_tiny


@cache
def site(num_devices: int, link_bytes_per_s: float, model: Path | None = None, **limits: int | None) -> Site:
    config = EngineConfig(scheduler=SchedulerConfig(**{"token_budget": 2048, "max_num_seqs": 16} | limits))
    config = config if model is None else replace(config, model=str(model))
    gpu = DeviceKind("gpu", Costs(SURFACE, 2e-5, 3e-5, threads=0), link_bytes_per_s=link_bytes_per_s)
    devices = {f"cuda:{index}": gpu for index in range(num_devices)}
    return Site(load_spec(config.model_path, config.spec_options), config, devices)


def spans_of(deployment: Deployment, stage: str) -> list[StageSpan]:
    (result,) = deployment.results.values()
    return [span for span in result.timeline if span.stage == stage]


# ---- pictures of one request


def eight_pictures() -> tuple[Deployment, float]:
    """The deployment and the TTFT. Links are slow: prefill waits for pictures."""
    deployment = Deployment("4E+P+D", site(6, 2e6))
    pictures = tuple(Picture(448, 448, number) for number in range(8))
    deployment.submit(WorkloadRequest(at_s=0.0, prompt_tokens=20, output_tokens=4, pictures=pictures))
    (record,) = deployment.run()  # raises where anything is held at the end
    assert record.error is None and record.ttft_s is not None
    return deployment, record.ttft_s


@pytest.mark.slow
def test_pictures_of_one_request_are_fetched_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment, together_s = eight_pictures()
    encoders = {span.instance for span in spans_of(deployment, "encode")}
    assert len(encoders) == 4 and len(spans_of(deployment, "pull_features")) == 8
    monkeypatch.setattr(pulls, "MAX_IMAGE_PULLS", 1)
    _, one_by_one_s = eight_pictures()
    assert together_s < one_by_one_s - 1e-3


def one_picture(topology: str, model: Path) -> tuple[Deployment, float]:
    """The deployment and TTFT of a picture of four tiles."""
    deployment = Deployment(topology, site(len(Topology.parse(topology).instances), 1e9, model))
    deployment.submit(WorkloadRequest(at_s=0.0, prompt_tokens=20, output_tokens=4, pictures=(Picture(60, 60, 0),)))
    (record,) = deployment.run()
    assert record.error is None and record.ttft_s is not None
    return deployment, record.ttft_s


@pytest.mark.slow
def test_the_parts_of_one_picture_are_encoded_by_several_instances(tmp_path: Path) -> None:
    """EPD calls this parallel encode of one request: LLaVA-NeXT's square and rows of tiles have no work in common."""
    make_tiny("llava_next", tmp_path, seed=1)
    alone, alone_s = one_picture("E+P+D", tmp_path)
    assert {span.instance for span in spans_of(alone, "encode")} == {"e0"}
    several, several_s = one_picture("3E+P+D", tmp_path)
    assert {span.instance for span in spans_of(several, "encode")} == {"e0", "e1", "e2"}
    assert several_s < 0.9 * alone_s


# ---- KV behind the parts of a prompt


SLOW_LINK = 3e7  # bytes per second: a token is copied in about a quarter of the time in which it is computed


def one_prompt(handover_tokens: int) -> tuple[float, float, list[StageSpan]]:
    """Seconds of the first and the second token, and the copies of KV."""
    deployment = Deployment("P+D", site(2, SLOW_LINK, handover_tokens=handover_tokens))
    deployment.submit(WorkloadRequest(at_s=0.0, prompt_tokens=400, output_tokens=4))
    (record,) = deployment.run()
    assert record.error is None
    return record.stamps[0], record.stamps[1], spans_of(deployment, "pull_kv")


@pytest.mark.slow
def test_one_part_of_a_prompt_is_copied_while_the_next_is_computed() -> None:
    first_s, second_s, (whole,) = one_prompt(0)
    assert whole.start_s > first_s, "all of it waits for the end of the prefill"
    later_s, sooner_s, (hidden, exposed) = one_prompt(128)
    assert hidden.end_s < later_s, "beside the second part"
    assert exposed.end_s - exposed.start_s == pytest.approx((whole.end_s - whole.start_s) / 2, rel=0.05)
    assert sooner_s < second_s - 2e-3, "although the prompt takes two steps"


@pytest.mark.slow
@pytest.mark.parametrize("link_bytes_per_s", [SLOW_LINK, 1e9])
def test_parts_are_as_large_as_measured_copies_and_steps_make_it_worth_while(link_bytes_per_s: float) -> None:
    """Slow copies are hidden after the first ones; where copies are fast, no prompt is split."""
    gaps: dict[int | None, list[float]] = {}
    pulls: dict[int | None, int] = {}
    for handover_tokens in (None, 0):
        deployment = Deployment("P+D", site(2, link_bytes_per_s, handover_tokens=handover_tokens))
        for number in range(6):
            deployment.submit(WorkloadRequest(at_s=0.5 * number, prompt_tokens=400 if number else 8, output_tokens=3))
        gaps[handover_tokens] = [record.gaps()[0] for record in deployment.run()]
        timelines = [result.timeline for result in deployment.results.values()]
        pulls[handover_tokens] = sum(span.stage == "pull_kv" for timeline in timelines for span in timeline)
    assert pulls[0] == 6
    if link_bytes_per_s == SLOW_LINK:
        assert pulls[None] > 6 and gaps[None][-1] < 0.75 * gaps[0][-1]
    else:
        assert pulls[None] == 6 and gaps[None] == gaps[0]


# ---- where a request decodes


def first_gaps(answers: Sequence[int]) -> list[float]:
    """Seconds from the first to the second token of requests with answers of so many tokens that queue for one prefill
    and two decoders with room for three requests each."""
    deployment = Deployment("P+2D", site(3, 1e9, max_num_seqs=3))
    for output_tokens in answers:
        deployment.submit(WorkloadRequest(at_s=0.0, prompt_tokens=200, output_tokens=output_tokens))
    records = deployment.run()  # raises where anything is held at the end
    assert all(record.error is None and record.num_tokens == record.wanted_tokens for record in records)
    return [record.gaps()[0] for record in records]


@pytest.mark.slow
def test_a_decoder_that_is_chosen_when_prefill_begins_is_not_full_while_another_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loads at arrival send all long answers to one of two, which cannot hold them at once."""
    answers = 6 * (80, 3)
    late = first_gaps(answers)
    start = Dispatcher.start

    def start_bound(dispatcher: Dispatcher, in_flight: RequestInFlight, now: float) -> None:
        start(dispatcher, in_flight, now)
        assert in_flight.attempt is not None
        dispatcher.choose_decoder(in_flight, now)

    monkeypatch.setitem(TRANSITIONS[Event.SUBMITTED], Phase.WAITING, (start_bound,))
    early = first_gaps(answers)
    assert sum(gap > 0.1 for gap in early) == 3 and sum(late) < 0.5 * sum(early)


@pytest.mark.slow
def test_what_has_waited_for_room_at_one_decoder_goes_to_another_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five long answers, three of them at one decoder: the other has room again, and that one has none for long."""
    answers = (20, 3, 400, 400, 3, 400, 20, 3, 400, 3, 3, 400)
    again = first_gaps(answers)
    monkeypatch.setattr(transitions, "PATIENCE_S", math.inf)
    once = first_gaps(answers)
    assert max(once) > 1.0 > 2 * max(again)


@pytest.mark.slow
@pytest.mark.parametrize("link_bytes_per_s", [3e5, 1e6, 4e6])
def test_a_second_choice_while_kv_is_copied_loses_no_request(
    link_bytes_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is zero and copies take longer than a tick: either decoder may be the one that has the KV."""
    monkeypatch.setattr(transitions, "PATIENCE_S", 0.0)
    monkeypatch.setattr(transitions, "_has_room", lambda other, full: other.usable)
    deployment = Deployment("2P+3D", site(5, link_bytes_per_s, max_num_seqs=4, handover_tokens=32))
    rows = [WorkloadRequest(at_s=0.02 * i, prompt_tokens=60 + 7 * i, output_tokens=2 + i % 40) for i in range(30)]
    for row in rows:
        deployment.submit(row)
    records = deployment.run()  # raises where anything is held at the end
    assert [record.num_tokens for record in records] == [row.output_tokens for row in rows]
    assert sum(status.transfer.withdrawn for status in deployment.statuses.values()) > 3
