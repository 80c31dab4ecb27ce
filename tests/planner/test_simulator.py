"""The simulator of deployments: it repeats itself, loses nothing, adds up; devices, pictures and roles count."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.topology.figures import breakdown, sample_of
from hydra_engine.core.instances import Topology
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.core.units import GIB
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.frontend.transitions import Dispatcher
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.records import Record, quantile
from hydra_planner.simulator import deployment as deployment_module
from hydra_planner.simulator.costs import DeviceKind, Host, read_costs
from hydra_planner.simulator.deployment import Deployment, assign_devices, simulate
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.slo import Limits
from hydra_planner.workload.file import Picture, Video, WorkloadRequest
from tests.planner.sites import COSTS, CPU_COSTS, DEVICE, SURFACE, deployed, gpus, load, row, run, site


@pytest.mark.quick("1E1P1D")
@pytest.mark.parametrize("topology", ["2ED1P", "1E1P1D"])
def test_equal_runs_are_equal(topology: str) -> None:
    first, second = (run(topology, 12.0, count=24)[1] for _ in range(2))
    assert first == second


@pytest.mark.quick("sizes0-1E1P2D", "sizes1-2EP1D")
@pytest.mark.parametrize("topology", ["2EP1D", "2ED2P", "1E1P2D"])
@pytest.mark.parametrize("sizes", [{}, {"num_kv_blocks": 34, "num_image_blocks": 4, "block_size": 4}])
def test_every_request_ends_once_with_all_its_tokens_and_nothing_is_held(topology: str, sizes: dict[str, int]) -> None:
    """Caches may be so small that requests are preempted; `run` raises if one ends twice or anything is held."""
    at = site(**sizes)
    if sizes:
        at = replace(at, config=replace(at.config, max_model_len=34 * 4))
    deployment, records = run(topology, 20.0, count=40, at=at)
    assert [record.num_tokens for record in records] == [request.output_tokens for request in load(20.0, 40)]
    assert not any(record.error for record in records)
    assert len(deployment._ledgers) == len(Topology.parse(topology).instances)
    assert all(ledger.at_rest for ledger in deployment._ledgers.values())
    assert sum(status.transfer.pulled for status in deployment.statuses.values()) > 0


# ---- what an idle deployment takes


def lonely(topology: str, request: WorkloadRequest) -> Record:
    """The record of one request, pictures first, in an idle deployment of lanes that do not slow each other."""
    alone = replace(SURFACE, decode_slowdown=1.0, prefill_slowdown=1.0, vision_slowdown=1.0)
    kind = replace(DEVICE, costs=replace(COSTS, surface=alone))
    deployment = Deployment(topology, replace(site(), devices=gpus(3, kind)))
    deployment._maker.beginning = ()
    deployment.submit(request)
    (record,) = deployment.run()
    return record


def step_s(work_s: float) -> float:
    """Seconds from a plan to its result on an idle lane."""
    return COSTS.turn_s + COSTS.submit_s + work_s + COSTS.collect_s


@pytest.mark.parametrize("topology", ["EPD", "E+PD", "EP+D", "E+P+D"])
def test_an_idle_deployment_takes_the_sum_of_its_parts(topology: str) -> None:
    at, vision = site(), site().spec.vision
    assert vision is not None
    (item,) = vision.plan_image(64, 64).items
    tokens = item.num_tokens + 16  # the beginning of the chat template is computed while the picture is encoded
    encode_s = SURFACE.vision_s(VisionLoad(item.num_patches, float(item.num_patches**2)))
    prefill_s = SURFACE.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
    preprocess_s = at.host.request_s + 64 * 64 * at.host.pixel_s
    expected_s = preprocess_s + step_s(encode_s) + step_s(prefill_s) + 2 * at.host.message_s
    if topology.startswith("E+"):  # needed, encode, offer: three messages more, and a copy
        width = vision.num_planes * vision.feature_size * 2
        blocks = -(-item.num_tokens // at.config.cache.image_block_size)
        num_bytes = blocks * at.config.cache.image_block_size * width
        expected_s += 3 * at.host.message_s + step_s(at.host.pull_s + num_bytes / DEVICE.link_bytes_per_s)
    record = lonely(topology, row(0.0, 20, 5, [(64, 64)]))
    assert record.ttft_s == pytest.approx(expected_s, rel=1e-6)


def test_the_token_behind_moved_kv_costs_what_a_decode_does() -> None:
    """The token is a chunk by name; the extra cost of a chunk does not apply to it."""
    kind = replace(DEVICE, costs=replace(COSTS, surface=replace(SURFACE, per_chunk_s=0.5)))
    (record,) = simulate("EP+D", replace(site(), devices=gpus(2, kind)), [row(0.0, 20, 4)])
    assert record.ttft_s is not None and record.ttft_s > 0.5
    assert max(record.gaps()) < 0.1


def test_what_moves_decodes_on_elsewhere_with_one_longer_gap() -> None:
    text = row(0.0, 30, 6)
    here, there = lonely("EPD", text).gaps(), lonely("P+D", text).gaps()
    assert there[1:] == pytest.approx(here[1:])
    # The first one has an offer and a copy in it, and the message that brought the token before is on its way too.
    assert here[0] < there[0] < here[0] + 0.01


# ---- loads


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1EP1D", "1E1PD"])
def test_more_load_does_not_shorten_the_tail(topology: str) -> None:
    tails = [
        quantile([r.ttft_s or 0.0 for r in run(topology, rate, count=24)[1]], 0.99) or 0.0 for rate in (2.0, 20.0, 80.0)
    ]
    assert tails[0] < tails[1] < tails[2]


def test_limits_are_told_to_the_instances_and_kept_where_that_is_easy() -> None:
    limits = Limits(2.0, 0.03)
    told = replace(site().config.scheduler, ttft_slo=limits.ttft_s, tpot_slo=limits.tpot_limit_s)
    deployment, records = run("3EPD", 4.0, count=20, at=replace(site(), config=replace(site().config, scheduler=told)))
    assert limits.attainment(records) == 1.0
    assert all(result.metrics.slo.tpot_limit_s == limits.tpot_limit_s for result in deployment.results.values())
    assert (quantile([gap for record in records for gap in record.gaps()], 0.99) or 1.0) < limits.tpot_limit_s


def test_phases_of_simulated_requests_add_up() -> None:
    deployment, records = run("1E1P1D", 10.0)
    found = breakdown([sample_of(result) for result in deployment.results.values()])
    assert sum(found["phases_ms"].values()) == pytest.approx(found["latency_ms"], rel=1e-3)
    assert found["latency_ms"] == pytest.approx(1e3 * sum(r.latency_s for r in records) / len(records), rel=1e-3)
    assert 0 < found["exposed_share"] < 0.2 and found["pulled_ms"] > 0
    assert found["phases_ms"]["other"] < 0.01 * found["latency_ms"]


def test_lanes_are_busy_for_as_long_as_their_steps_took() -> None:
    deployment, records = run("1E1P2D", 10.0)
    span_s = max(record.end_s for record in records)
    busy = deployment.busy()
    assert {name: busy[name].vision > 0 for name in busy} == {"e0": True, "p0": False, "d0": False, "d1": False}
    for name, shares in busy.items():
        assert 0 <= shares.vision <= 1 and 0 <= shares.language <= 1
        status = deployment.statuses[name]
        assert shares.vision * span_s == pytest.approx(status.vision_busy_s)
        assert shares.language * span_s == pytest.approx(status.language_busy_s)


# ---- devices


def test_instances_get_devices_of_their_own_in_order_or_share_the_only_one() -> None:
    def names(topology: str, num_devices: int) -> tuple[str, ...]:
        return assign_devices(Topology.parse(topology), site(num_devices).devices)

    assert names("E+2PD", 4) == ("cuda:0", "cuda:1", "cuda:2")
    assert names("E+2PD", 1) == ("cuda:0",) * 3 and names("E+2PD", 0) == ("cpu",) * 3
    assert names("E@cuda:1+P+D@cuda:1", 3) == ("cuda:1", "cuda:0", "cuda:1")
    with pytest.raises(ConfigError, match="names cuda:7; there are cuda:0, cuda:1"):
        names("E@cuda:7+PD", 2)
    with pytest.raises(ConfigError, match="3 instances without a device, and 2 devices are left"):
        names("E+P+D", 2)
    with pytest.raises(ConfigError, match="1 instances without a device, and 0 devices are left"):
        names("E@cuda:0+PD@cuda:1+PD", 2)


@pytest.mark.slow
def test_instances_on_one_processor_disturb_each_other() -> None:
    mean_s = []
    for devices in ({"cuda:0": DEVICE, "cuda:1": DEVICE}, {"cpu": DeviceKind("cpu", CPU_COSTS)}):
        records = run("2EPD", 12.0, count=24, at=replace(site(2), devices=devices))[1]
        mean_s.append(sum(record.latency_s for record in records) / len(records))
    assert mean_s[1] > 1.2 * mean_s[0]


def test_instances_that_share_a_device_slow_each_other_and_divide_its_memory() -> None:
    at = replace(site(), devices=gpus(2, replace(DEVICE, memory_bytes=4 * GIB)))
    requests = [
        WorkloadRequest(at_s=0.04 * index, prompt_tokens=20, output_tokens=30, pictures=(Picture(64, 64, index),))
        for index in range(16)
    ]
    apart, together = (deployed(f"E@cuda:0+PD@cuda:{index}", at, requests) for index in (1, 0))
    records = [each.run() for each in (apart, together)]
    gaps_s = [[gap for record in one for gap in record.gaps()] for one in records]
    assert sum(gaps_s[1]) > 1.1 * sum(gaps_s[0]), "decodes beside encodes"
    encoding_s = [each.statuses["e0"].vision_busy_s for each in (apart, together)]
    assert 1.1 * encoding_s[0] < encoding_s[1] <= SURFACE.vision_slowdown * encoding_s[0], "encodes beside decodes"
    blocks = [deployment.cluster.nodes["pd0"].sizes.plan.num_kv_blocks for deployment in (apart, together)]
    assert blocks[1] < 0.8 * blocks[0]


def test_processes_that_share_a_gpu_take_turns_unless_mps_runs() -> None:
    """Lanes of one process do not."""
    surface = replace(SURFACE, decode_slowdown=1.1, prefill_slowdown=1.1, vision_slowdown=1.1)
    shared = replace(DEVICE, memory_bytes=4 * GIB, costs=replace(COSTS, surface=surface))
    requests = [
        WorkloadRequest(at_s=0.04 * index, prompt_tokens=20, output_tokens=30, pictures=(Picture(64, 64, index),))
        for index in range(12)
    ]
    mean_s = {}
    for topology in ("E@cuda:0+PD@cuda:0", "EPD@cuda:0"):
        for has_mps in (False, True):
            records = deployed(
                topology, replace(site(), devices=gpus(1, replace(shared, has_mps=has_mps))), requests
            ).run()
            mean_s[topology, has_mps] = sum(record.latency_s for record in records) / len(records)
    assert mean_s["E@cuda:0+PD@cuda:0", False] > 1.1 * mean_s["E@cuda:0+PD@cuda:0", True]
    assert mean_s["EPD@cuda:0", False] == mean_s["EPD@cuda:0", True]


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ("", "{}", '{"digest": "", "profile": {"surface": 1}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no profile"):
            read_costs(path)


def test_a_model_that_does_not_fit_a_device_is_refused() -> None:
    with pytest.raises(ResourceError):
        Deployment("EPD", replace(site(), devices=gpus(1, replace(DEVICE, memory_bytes=GIB >> 10))))


@pytest.mark.slow
def test_the_slower_of_two_devices_has_longer_steps() -> None:
    rows = replace(SURFACE.rows, seconds=tuple(3 * seconds for seconds in SURFACE.rows.seconds))
    slow = replace(DEVICE, costs=replace(COSTS, surface=replace(SURFACE, rows=rows)))
    at = replace(site(), devices={"cuda:0": DEVICE, "cuda:1": slow})
    deployment, records = run("2EPD", 6.0, at=at)
    per_step = {
        name: status.language_busy_s / status.language_steps
        for name, status in deployment.statuses.items()
        if status.language_steps
    }
    assert per_step["epd1"] > 2 * per_step["epd0"]
    assert not any(record.error for record in records)


# ---- pictures and videos


def test_several_pictures_cost_what_their_patches_cost() -> None:
    at = site()
    one, three = (simulate("E+PD", at, [row(0.0, 10, 4, [(64, 64)] * count)])[0] for count in (1, 3))
    vision = at.spec.vision
    assert vision is not None
    assert three.prompt_tokens - one.prompt_tokens == 2 * vision.plan_image(64, 64).num_tokens
    assert (three.ttft_s or 0.0) > (one.ttft_s or 1.0) + 2 * 64 * 64 * at.host.pixel_s
    assert (one.num_tokens, three.num_tokens) == (4, 4)


def test_a_picture_that_was_encoded_lately_is_not_encoded_again() -> None:
    requests = [row(at_s, 10, 4, [(64, 64)]) for at_s in (0.0, 1.0, 2.0)]
    deployment = deployed("E+PD", site(), requests)
    first, *others = deployment.run()
    assert all((other.ttft_s or 1.0) < (first.ttft_s or 0.0) - SURFACE.patches.seconds[0] for other in others)
    assert deployment.statuses["e0"].images_encoded == 1


def test_what_a_session_shares_is_found_in_the_cache() -> None:
    shared = [row(float(at_s), 200, 4, session=at_s // 2, shared_tokens=150) for at_s in range(4)]
    found = [record.cached_tokens for record in simulate("EPD", site(), shared)]
    assert found == [0, 144, 0, 144]  # whole blocks of 16, with the four tokens of the template


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A small Qwen2.5-VL, which takes videos."""
    path = tmp_path_factory.mktemp("qwen")
    vision = {"depth": 4, "in_chans": 3, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"temporal_patch_size": 2, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128}
    vision |= {"out_hidden_size": 64, "window_size": 112, "fullatt_block_indexes": [3], "tokens_per_second": 2}
    config = {
        **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_act": "silu"},
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}, "max_position_embeddings": 8192},
        **{"image_token_id": 501, "video_token_id": 502, "vision_start_token_id": 503, "vision_end_token_id": 504},
        **{"eos_token_id": 505, "bos_token_id": 506, "tie_word_embeddings": True, "vision_config": vision},
    }
    processor = {"min_pixels": 3136, "max_pixels": 200704, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    processor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    for name, content in (("config", config), ("preprocessor_config", processor)):
        (path / f"{name}.json").write_text(json.dumps(content))
    return load_spec(path)


def test_a_video_is_many_pictures(qwen: ModelSpec) -> None:
    assert qwen.vision is not None
    at = replace(site(), spec=qwen)
    picture = WorkloadRequest(at_s=0.0, prompt_tokens=20, output_tokens=4, pictures=(Picture(224, 224, 0),))
    videos = [
        WorkloadRequest(at_s=0.0, prompt_tokens=20, output_tokens=4, videos=(Video(224, 224, 24 * seconds, 24.0, 0),))
        for seconds in (2, 8)
    ]
    still, short, long = (simulate("E+PD", at, [request])[0] for request in (picture, *videos))
    assert not any(record.error for record in (still, short, long))
    assert still.prompt_tokens < short.prompt_tokens < long.prompt_tokens
    assert (still.ttft_s or 0.0) < (short.ttft_s or 0.0) < (long.ttft_s or 0.0)


def test_a_model_without_a_vision_tower_takes_no_pictures(qwen: ModelSpec) -> None:
    blind = replace(qwen, vision=None)
    with pytest.raises(ConfigError, match="no vision tower"):
        simulate("PD", replace(site(), spec=blind), [row(0.0, 10, 4, [(64, 64)])])


# ---- preprocessing


def decoded_s(num_requests: int, host: Host, pixel_cache_mib: int = 256, same: bool = False) -> float:
    """Seconds until the first tokens of all requests, with one large picture each, have come."""
    base = site(1)
    media = replace(base.config.media, pixel_cache_mib=pixel_cache_mib, decode_workers=2)
    at: Site = replace(base, config=replace(base.config, media=media), host=host)
    picture = [Picture(2000, 2000, 0 if same else number) for number in range(num_requests)]
    requests = [WorkloadRequest(at_s=0.0, prompt_tokens=8, output_tokens=1, pictures=(one,)) for one in picture]
    return max(record.stamps[0] for record in simulate("EPD", at, requests))


def test_pictures_are_decoded_by_as_many_threads_as_there_are_and_once() -> None:
    """Pixels are so slow that nothing else counts."""
    host = Host(cores=2, pixel_s=1e-6)
    work_s = 4e6 * host.pixel_s
    assert decoded_s(2, host) == pytest.approx(work_s, rel=0.1)
    assert decoded_s(4, host) == pytest.approx(2 * work_s, rel=0.1)
    assert decoded_s(2, replace(host, cores=1)) == pytest.approx(2 * work_s, rel=0.1)
    assert decoded_s(4, host, same=True) == pytest.approx(work_s, rel=0.1)
    assert decoded_s(4, host, pixel_cache_mib=0, same=True) == pytest.approx(2 * work_s, rel=0.1)


# ---- roles at run time


@pytest.mark.quick("2EPD-EP+D")
@pytest.mark.parametrize(("before", "after"), [("2EPD", "EP+D"), ("2EPD", "ED+P"), ("3EPD", "E+P+D")])
def test_roles_are_switched_while_requests_are_served(before: str, after: str) -> None:
    requests = load(20.0, 60)
    deployment = deployed(before, site(), requests)
    deployment.switch(after, at_s=1.0)
    records = deployment.run()
    assert [record.num_tokens for record in records] == [request.output_tokens for request in requests]
    roles = Counter(deployment.dispatcher.instances[name].role for name in deployment.topology.names)
    assert roles == Counter(spec.role for spec in Topology.parse(after).instances)
    assert sum(status.transfer.pulled for status in deployment.statuses.values()) > 0, "stages are apart from then on"


# ---- shortcuts change nothing


@pytest.mark.quick("E+P+2D")
@pytest.mark.parametrize("topology", ["2EPD", "E+P+2D"])
def test_tokens_that_become_no_text_are_counted_as_the_serving_frontend_counts_them(
    topology: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instances die and requests are preempted meanwhile."""
    at = site(num_kv_blocks=40, num_image_blocks=4, block_size=4)
    at = replace(at, config=replace(at.config, max_model_len=34 * 4))

    def served() -> tuple[list[Record], dict[int, object], int]:
        deployment = deployed(topology, at, load(40.0, 24))
        deployment.kill(deployment.topology.names[-1], 0.2, back_s=0.3)
        records = deployment.run()
        instances = deployment.dispatcher.instances.values()
        return records, {**deployment.results}, sum(instance.decode_tokens for instance in instances)

    quickly = served()
    monkeypatch.setattr(deployment_module, "TextlessDispatcher", Dispatcher)
    assert served() == quickly and quickly[2] == 0


def test_prompts_differ_unless_a_session_shares_them() -> None:
    maker, other = RequestMaker(site().spec), RequestMaker(site().spec, content=1)
    alone = row(0.0, 40, 1)
    prompts = {maker.words(alone, number)[:16] for number in range(10_000)}
    assert len(prompts) == 10_000 and maker.words(alone, 3) == maker.words(alone, 3) != other.words(alone, 3)
    sessions = [
        row(0.0, 40, 1, session=session, shared_tokens=shared) for session, shared in ((5, 0), (5, 30), (6, 30))
    ]
    first, second, third = (maker.words(request, number) for number, request in enumerate(sessions))
    # Of the tokens that are shared the first four are the beginning, which is before pictures.
    assert first[:26] == second[:26] != third[:26] and first[26:] != second[26:]
    assert len(maker.words(row(0.0, 200_000, 1), 9)) == 200_000 - 4
