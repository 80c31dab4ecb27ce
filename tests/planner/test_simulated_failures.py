"""Instances that die in a simulation: what they did is done again elsewhere, they come back empty, nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from hydra_engine.core.instances import Role
from hydra_planner.simulator.cluster import NOTICED_S
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.workload.file import WorkloadRequest
from tests.examples import examples
from tests.planner.sites import COSTS, DEVICE, SURFACE, deployed, gpus, load, row, site

TOPOLOGIES = ["2EPD", "EP+2D", "2E+PD", "E+2P+2D", "2ED+2P", "2E+2P+2D"]


def check(deployment: Deployment, requests: Sequence[WorkloadRequest]) -> None:
    """`run` has seen that ledgers balance and that nothing ended twice."""
    records = deployment.run()
    assert [record.error for record in records] == [None] * len(requests)
    assert [record.num_tokens for record in records] == [request.output_tokens for request in requests]
    assert all(ledger.at_rest for ledger in deployment._ledgers.values())
    for status in deployment.statuses.values():
        assert (status.transfer.offers, status.transfer.pulls, status.kv_blocks_used) == (0, 0, 0)


@pytest.mark.quick("2EPD-0", "2E+2P+2D-1")
@pytest.mark.parametrize("place", [0, 1, 5])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_requests_of_an_instance_that_dies_are_done_again(topology: str, place: int) -> None:
    requests = load(20.0, 40)
    deployment = deployed(topology, site(), requests)
    name = deployment.topology.names[place % len(deployment.topology.names)]
    for at_s in (0.3, 1.2):
        deployment.kill(name, at_s, back_s=0.5)
    check(deployment, requests)
    assert deployment.cluster.nodes[name].incarnation == 3 and deployment.cluster.complete
    busy = deployment.busy()[name]
    assert busy.vision + busy.language > 0


@pytest.mark.parametrize("topology", ["2E+2P+2D", pytest.param("2ED+2P", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(examples(12)))
def test_instances_die_at_any_moment_two_at_once_too(topology: str, seed: int) -> None:
    """Caches are small, so that requests are preempted and wait for each other as well."""
    random = Random(f"{topology} {seed}")
    at = site(num_kv_blocks=40, num_image_blocks=4, block_size=4)
    at = replace(at, config=replace(at.config, max_model_len=34 * 4))
    requests = load(40.0, 24)
    deployment = deployed(topology, at, requests)
    for name in random.sample(deployment.topology.names, 2):
        deployment.kill(name, random.uniform(0.0, 0.8), random.choice((0.0, 0.1, 0.6)))
    check(deployment, requests)


def test_nobody_is_told_before_the_end_has_been_noticed() -> None:
    deployment = deployed("PD", site(), [row(0.0, 20, 200)])
    deployment.kill("pd0", 0.1, back_s=0.4)
    (record,) = deployment.run()
    before = [stamp for stamp in record.stamps if stamp < 0.1 + 0.001]
    assert record.num_tokens == 200 and 5 < len(before) < 200
    after = record.stamps[len(before)]
    assert after > 0.5, "nothing comes of an instance that is down"
    result = deployment.results[1]
    lost = [span for span in result.timeline if span.stage == "lost"]
    assert lost[-1].end_s == pytest.approx(0.5, abs=0.01), "until it is back, for there is no other"
    assert len(result.token_ids) == 200


def test_another_instance_goes_on_as_soon_as_the_end_is_noticed() -> None:
    deployment = deployed("2PD", site(), [row(0.0, 20, 200)])
    deployment.kill("pd0", 0.1, back_s=None)
    (record,) = deployment.run()
    longest_s = max(record.gaps())
    assert NOTICED_S < longest_s < NOTICED_S + 0.03
    assert [*deployment.cluster.nodes] == ["pd1"] and not deployment.cluster.complete


def test_a_restarted_instance_has_empty_caches() -> None:
    requests = [row(at_s, 60, 4, [(64, 64)], session=0, shared_tokens=60) for at_s in (0.0, 1.0, 2.0)]
    deployment = deployed("E+PD", site(), requests)
    deployment.kill("e0", 1.5, back_s=0.2)
    deployment.kill("pd0", 1.5, back_s=0.2)
    first, cached, again = deployment.run()
    assert (first.cached_tokens, again.cached_tokens) == (0, 0) and cached.cached_tokens > 0
    assert cached.latency_s < first.latency_s - SURFACE.patches.seconds[0]
    assert again.latency_s == pytest.approx(first.latency_s, abs=0.003)


def test_what_dies_while_roles_are_switched_comes_back_with_its_new_role() -> None:
    requests = load(20.0, 40)
    deployment = deployed("3EPD", site(), requests)
    deployment.switch("E+P+D", at_s=0.5)
    deployment.kill("epd1", 1.5, back_s=0.3)
    check(deployment, requests)
    roles = {name: load.role for name, load in deployment.dispatcher.instances.items()}
    assert set(roles.values()) == {Role.E, Role.P, Role.D}
    for name, node in deployment.cluster.nodes.items():
        assert node.instance._scheduler._limits.role == roles[name]


def test_a_neighbour_has_the_device_to_itself_while_an_instance_is_down() -> None:
    at = replace(site(), devices=gpus(1, replace(DEVICE, memory_bytes=4 << 30, costs=replace(COSTS, alike=2.0))))
    requests = [row(0.0, 20, 150) for _ in range(2)]
    ends = []
    for kill in (False, True):
        deployment = deployed("2PD", at, requests)
        if kill:
            deployment.kill("pd0", 0.1, back_s=None)
        check(deployment, requests)
        ends.append(max(deployment._ended_s.values()))
    assert ends[1] < 0.9 * ends[0]


def test_killing_what_is_down_changes_nothing() -> None:
    requests = load(20.0, 12)
    once, twice = deployed("2EPD", site(), requests), deployed("2EPD", site(), requests)
    for deployment in (once, twice):
        deployment.kill("epd0", 0.2, back_s=0.4)
    for at_s in (0.21, 0.5):
        twice.kill("epd0", at_s, back_s=0.9)
    assert once.run() == twice.run()
