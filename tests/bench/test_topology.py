"""The simulator of topologies: it repeats itself, loses nothing, adds up, and its commands run; the real side too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from bench.serve.workload import Workload
from bench.topology.asks import Ask, asks, make_ask
from bench.topology.figures import breakdown, exposed_s, point, sample_of
from bench.topology.ratios import ratios
from bench.topology.timeline import early
from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.cost import CostSurface, Curve, LanguageLoad, VisionLoad
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.roles import Topology
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.planner.records import Record, quantile
from hydra_engine.planner.simulator.agenda import Agenda
from hydra_engine.planner.simulator.costs import Costs, read_costs
from hydra_engine.planner.simulator.deployment import Cluster
from hydra_engine.planner.simulator.machine import LANGUAGE, VISION, Job, Machine
from hydra_engine.planner.simulator.node import Site
from hydra_engine.planner.slo import Limits
from hydra_engine.planner.workload.arrivals import Arrivals

ROOT = Path(__file__).parents[2]
WORKLOAD = Workload(("textcaps", "pope", "mme"), text_share=0.25, scale=0.25)
SURFACE = CostSurface(
    rows=Curve((1.0, 16.0, 512.0), (0.004, 0.006, 0.08)),
    per_key_s=1e-7,
    per_pair_s=1e-8,
    per_chunk_s=1e-4,
    patches=Curve((4.0, 256.0), (0.01, 0.05)),
    per_patch_pair_s=1e-8,
    decode_slowdown=2.0,
    prefill_slowdown=2.0,
    vision_slowdown=2.0,
)
COSTS = Costs(SURFACE, submit_s=2e-5, collect_s=3e-5, cores=2, threads=2)


@cache
def site(**cache_sizes: int) -> Site:
    config = EngineConfig(
        scheduler=SchedulerConfig(token_budget=128, max_num_seqs=16), cache=CacheConfig(**cache_sizes)
    )
    return Site(load_spec(config.model_path, config.spec_options), config, COSTS)


def load(count: int) -> list[Ask]:
    return asks(WORKLOAD, count, site().spec)


def run(
    topology: str, rate: float, count: int = 60, at: Site | None = None, **options: Any
) -> tuple[Cluster, list[Record]]:
    cluster = Cluster(topology, at or site(), **options)
    for ask, time_s in zip(load(count), Arrivals().times(rate, count, 0).tolist(), strict=True):
        cluster.submit(ask, time_s)
    return cluster, cluster.run()


# ---- time and machines


def test_events_happen_in_order_and_those_of_one_moment_as_they_were_scheduled() -> None:
    agenda, seen = Agenda(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.at(time_s, lambda name=name: seen.append((agenda.now(), name)))
    agenda.at(1.0, lambda: agenda.at(0.5, lambda: seen.append((agenda.now(), "late"))))
    while agenda.step():
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c")]


def job(ended: dict[str, float], agenda: Agenda, name: str, kind: str, seconds: float, **rest: Any) -> Job:
    return Job(name, kind, seconds, {VISION: 2.0, LANGUAGE: 3.0}, lambda _: ended.update({kind: agenda.now()}), **rest)


def test_lanes_of_one_device_slow_each_other_by_the_measured_factors() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda)
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(job(ended, agenda, "a", LANGUAGE, 1.0))
    while agenda.step():
        pass
    # Language takes twice as long beside vision; vision has done 2/3 by then and the rest alone.
    assert ended == {LANGUAGE: pytest.approx(2.0), VISION: pytest.approx(2.0 + 1 / 3)}


def test_cores_are_never_shared_out_twice() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda, cores=2, threads=2)
    for number in range(4):
        alone = Job(f"i{number}", LANGUAGE, 1.0, {LANGUAGE: 1.0}, lambda j: ended.update({j.instance: agenda.now()}))
        machine.run(alone)
    while agenda.step():
        pass
    assert list(ended.values()) == [pytest.approx(4.0)] * 4


def test_vision_waits_at_the_gate_when_its_seconds_are_used_up() -> None:
    agenda, ended = Agenda(), {}
    machine = Machine(agenda)
    step = job(ended, agenda, "a", LANGUAGE, 1.0, allowance_s=0.5)
    machine.run(job(ended, agenda, "a", VISION, 1.0))
    machine.run(step)
    while agenda.step():
        pass
    # Half a second side by side does a quarter of the step and a sixth of the encode; then the step runs alone.
    assert step.vision_s == 0.5
    assert ended == {LANGUAGE: pytest.approx(0.5 + 0.75), VISION: pytest.approx(1.25 + 5 / 6)}


# ---- the whole


@pytest.mark.quick("1E1P1D")
@pytest.mark.parametrize("topology", ["2ED1P", "1E1P1D"])
def test_equal_runs_are_equal(topology: str) -> None:
    first, second = (run(topology, 12.0)[1] for _ in range(2))
    assert first == second


@pytest.mark.quick("sizes0-1E1P2D", "sizes1-2EP1D")
@pytest.mark.parametrize("topology", ["2EP1D", "2ED2P", "1E1P2D"])
@pytest.mark.parametrize("sizes", [{}, {"num_kv_blocks": 34, "num_image_blocks": 4, "block_size": 4}])
def test_every_request_ends_once_with_all_its_tokens_and_nothing_is_held(topology: str, sizes: dict[str, int]) -> None:
    """Also where caches are so small that requests give way; `run` raises if one ends twice or anything is held."""
    at = site(**sizes)
    if sizes:
        at = replace(at, config=replace(at.config, max_model_len=34 * 4))
    cluster, records = run(topology, 20.0, count=40, at=at)
    assert [record.num_tokens for record in records] == [ask.max_tokens for ask in load(40)]
    assert not any(record.error for record in records)
    assert len(cluster._ledgers) == len(Topology.parse(topology).instances)
    assert all(ledger.at_rest for ledger in cluster._ledgers.values())
    moved = sum(status.transfer.pulled for status in cluster.statuses.values())
    assert (moved > 0) == (topology != "EPD")


def lonely(topology: str, ask: Ask) -> Record:
    """One request in an idle deployment of lanes that do not slow each other."""
    alone = replace(SURFACE, decode_slowdown=1.0, prefill_slowdown=1.0, vision_slowdown=1.0)
    cluster = Cluster(topology, replace(site(), costs=replace(COSTS, surface=alone)))
    cluster.submit(ask, 0.0)
    (record,) = cluster.run()
    return record


def step_s(work_s: float) -> float:
    """From a plan to its result, on an idle lane."""
    return COSTS.turn_s + COSTS.submit_s + work_s + COSTS.collect_s


@pytest.mark.parametrize("topology", ["EPD", "E+PD", "EP+D", "E+P+D"])
def test_an_idle_deployment_takes_the_sum_of_its_parts(topology: str) -> None:
    picture_first = replace(make_ask(site().spec, [(64, 64, 1)], 20, 5), beginning=())
    vision = site().spec.vision
    assert vision is not None
    (item,) = vision.plan_image(64, 64).items
    tokens = item.num_tokens + 20
    encode_s = SURFACE.vision_s(VisionLoad(item.num_patches, float(item.num_patches**2)))
    prefill_s = SURFACE.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
    expected_s = step_s(encode_s) + step_s(prefill_s) + 2 * COSTS.message_s
    if topology.startswith("E+"):  # needed, encode, offer: three messages more, and a copy
        width = vision.num_planes * vision.feature_size * 2
        blocks = -(-item.num_tokens // site().config.cache.image_block_size)
        pull_s = COSTS.pulled_s(blocks * site().config.cache.image_block_size * width)
        expected_s += 3 * COSTS.message_s + step_s(pull_s)
    record = lonely(topology, picture_first)
    assert record.ttft_s == pytest.approx(expected_s, rel=1e-6)


def test_what_moves_decodes_on_elsewhere_with_one_longer_gap() -> None:
    text = make_ask(site().spec, [], 30, 6)
    here, there = lonely("EPD", text).gaps(), lonely("P+D", text).gaps()
    assert there[1:] == pytest.approx(here[1:])
    # The first one has an offer and a copy in it, and the message that brought the token before is on its way too.
    assert here[0] < there[0] < here[0] + 0.01


@pytest.mark.quick("1E1PD")
@pytest.mark.parametrize("topology", ["1EP1D", "1E1PD"])
def test_more_load_does_not_shorten_the_tail(topology: str) -> None:
    tails = [quantile([r.ttft_s or 0.0 for r in run(topology, rate)[1]], 0.99) or 0.0 for rate in (2.0, 20.0, 80.0)]
    assert tails[0] < tails[1] < tails[2]


def test_instances_on_one_machine_disturb_each_other() -> None:
    apart, together = (run("2EPD", 12.0, one_machine=shared)[1] for shared in (False, True))
    mean = [sum(record.latency_s for record in records) / len(records) for records in (apart, together)]
    assert mean[1] > 1.2 * mean[0]


def test_limits_are_told_to_the_instances_and_kept_where_that_is_easy() -> None:
    limits = Limits(2.0, 0.03)
    told = replace(site().config.scheduler, ttft_slo=limits.ttft_s, tpot_slo=limits.tpot_s)
    limited = replace(site(), config=replace(site().config, scheduler=told))
    found = point(run("3EPD", 4.0, at=limited)[1], limits)
    assert (found["attainment"], found["errors"]) == (1.0, 0)
    assert found["gap_ms"]["p99"] < 30.0 and found["tpot_ms"]["p50"] <= found["tpot_ms"]["p99"]


def test_phases_of_simulated_requests_add_up() -> None:
    cluster, records = run("1E1P1D", 10.0)
    samples = [sample_of(result) for result in cluster.results.values()]
    found = breakdown(samples)
    assert sum(found["phases_ms"].values()) == pytest.approx(found["latency_ms"], rel=1e-3)
    assert found["latency_ms"] == pytest.approx(1e3 * sum(r.latency_s for r in records) / len(records), rel=1e-3)
    assert 0 < found["exposed_share"] < 0.2 and found["pulled_ms"] > 0
    assert found["phases_ms"]["other"] < 0.01 * found["latency_ms"]


def test_moving_is_exposed_while_nothing_else_of_the_request_runs() -> None:
    spans = (
        StageSpan("encode", 0.0, 1.0), StageSpan("offered", 1.0, 1.5), StageSpan("pull_features", 1.25, 1.5),
        StageSpan("prefill", 1.5, 3.0), StageSpan("pull_kv", 2.0, 3.25), StageSpan("decode", 4.0, 5.0),
    )  # fmt: skip
    assert exposed_s(spans) == 0.75  # between encode and prefill, and what the copy needs behind the prefill


# ---- the rest


def test_eight_devices_have_forty_three_topologies_that_can_be_read() -> None:
    found = ratios(8)
    assert {family: len(texts) for family, texts in found.items()} == {
        **dict.fromkeys(("EP+D", "ED+P", "E+PD"), 7), "EPD": 1, "E+P+D": 21,
    }  # fmt: skip
    every = [text for texts in found.values() for text in texts]
    assert all(len(Topology.parse(text).instances) == 8 for text in every) and len(set(every)) == 43
    assert all(set(few) <= set(found[family]) for family, few in ratios(8, quick=True).items())


def test_early_copies_are_those_that_began_before_what_they_copy_was_complete() -> None:
    spans = (
        StageSpan("encode", 0.0, 1.0), StageSpan("pull_features", 1.1, 1.2), StageSpan("encode", 1.0, 2.0),
        StageSpan("pull_features", 2.1, 2.2), StageSpan("prefill", 2.0, 3.0), StageSpan("pull_kv", 3.1, 3.2),
    )  # fmt: skip
    found = early(spans)
    assert found["pull_features"] == {"early": 1, "all": 2, "ms": 200.0}
    assert (found["pull_kv"]["early"], found["pull_kv"]["all"]) == (0, 1)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ("", "{}", '{"digest": "", "profile": {"surface": 1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no profile"):
            read_costs(path)


# ---- from the command line


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `hydra-engine profile --output` writes it, of a made-up machine."""
    identity = {"model": "m", "device": "cpu", "processor": "made up", "cores": 2, "threads": 2, "dtype": "bfloat16"}
    identity |= {"lane_priority": "balanced", "backend": "b", "deterministic": True, "sliced": True, "block_size": 16}
    body = {
        "identity": {**identity, "engine": "0"},
        "reach": {"rows": 512, "decodes": 64, "patches": 512},
        "surface": asdict(SURFACE),
        "samples": {"language": [], "vision": [], "corun": []},
        **{"submit_s": 1e-5, "collect_s": 1e-5, "num_points": 1, "num_left": 0, "seconds": 1.0},
        "measured_at": "2026-01-01T00:00:00Z",
    }
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_bytes(msgspec.json.encode({"digest": "", "profile": body}))
    assert read_costs(path).surface == SURFACE
    return path


def command(mode: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Its document, which is all of its standard output."""
    words = [sys.executable, "-m", "bench.topology", mode, "--quick", "--pictures", str(tmp_path), *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["bench"], document["mode"]) == ("topology", mode)
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert picture.width > 500
    return document


@pytest.mark.slow
def test_simulate_prints_a_point_for_every_topology_and_rate(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("matplotlib")
    document = command("simulate", tmp_path, "--profile", str(profile), "--devices", "3", "--requests", "6")
    result = document["result"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"topology-ratios.png", "topology-goodput.png"}
    assert len(result["topologies"]) == 8 and len(result["rates"]) == 2
    for row in result["topologies"]:
        assert [one["rate"] for one in row["points"]] == result["rates"]
        assert all((one["requests"], one["errors"]) == (6, 0) for one in row["points"])
        assert all(one["ttft_ms"]["p99"] >= one["ttft_ms"]["p50"] > 0 for one in row["points"])


@pytest.mark.slow
def test_simulate_says_the_same_again(tmp_path: Path, profile: Path) -> None:
    """In another process, with other hashes of strings."""
    pytest.importorskip("matplotlib")
    arguments = ("simulate", tmp_path, "--profile", str(profile), "--devices", "3", "--requests", "12")
    assert command(*arguments)["result"] == command(*arguments)["result"]


@pytest.mark.slow
def test_real_measures_and_predicts_the_same_requests(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--topologies", "EPD,E+P+D", "--requests", "4", "--rate", "10", "--threads", "1")
    document = command("real", tmp_path, "--profile", str(profile), *flags)
    assert (tmp_path / "topology-phases.png").exists()
    alone, apart = document["result"]["topologies"]
    assert alone["moved_bytes"] == 0 < apart["moved_bytes"]
    for row in (alone, apart):
        assert row["errors"] == 0
        assert all(row[side][name] > 0 for side in ("measured", "simulated") for name in ("ttft_ms", "tpot_ms"))
        assert row["error"]["ttft_ms"] == pytest.approx(
            row["simulated"]["ttft_ms"] / row["measured"]["ttft_ms"] - 1, abs=1e-3
        )
    assert alone["measured"]["breakdown"]["exposed_share"] == 0


@pytest.mark.slow
def test_timeline_shows_two_pictures_on_their_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document = command("timeline", tmp_path, "--threads", "1", "--tokens", "4")
    assert (tmp_path / "topology-timeline.png").exists()
    stages = {span["stage"] for span in document["result"]["spans"]}
    assert {"encode", "pull_features", "prefill", "pull_kv", "decode"} <= stages
    assert document["result"]["early"]["pull_features"]["all"] == 2
