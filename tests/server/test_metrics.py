"""The metrics page: vLLM's names, sums that add up, labels from fixed lists."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from hydra_engine.core.instances import Condition
from hydra_engine.core.outputs import BLAMES, FinishReason, RequestMetrics, Result, SloReport, StageSpan, Usage
from hydra_engine.core.reports import BudgetReport, TransferReport
from hydra_engine.errors import Unavailable
from hydra_engine.telemetry.metrics import Metrics
from tests.server.conftest import Served
from tests.server.stub import example_status, instances_of

NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:iteration_tokens_total_count",
    "vllm:cache_config_info",
    "hydra:request_encode_time_seconds_bucket",
    "hydra:encoder_items_per_batch_sum",
    "hydra:encoder_cache_entries",
    "hydra:stream_busy_ratio",
    "hydra:admission_rejections_total",
    "hydra:media_fetch_seconds_count",
    "hydra:media_decode_seconds_count",
    "hydra:event_loop_lag_seconds_bucket",
    "hydra:http_responses_total",
    "hydra:tpot_limit_seconds",
    "hydra:token_budget",
    "hydra:image_budget_patches",
    "hydra:vision_allowance_seconds",
    "hydra:budget_correction_ratio",
    "hydra:limit_used_ratio",
    "hydra:decode_steps_total",
    "hydra:late_steps_total",
    "hydra:full_steps_total",
    "hydra:stretched_steps_total",
    "hydra:slo_requests_total",
    "hydra:limited_requests_total",
    "hydra:goodput_requests_total",
    "hydra:late_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "http_requests_total",
    "http_request_duration_seconds_bucket",
    "hydra:stage_queue_seconds_bucket",
    "hydra:stage_run_seconds_bucket",
    "hydra:stage_move_seconds_bucket",
    "hydra:request_migrate_time_seconds_bucket",
    "hydra:event_loop_lag_seconds_bucket",
    "hydra:num_requests_decoding",
    "hydra:build_info",
    "process_resident_memory_bytes",
]
VERDICTS = (("ttft", "true"), ("ttft", "false"), ("tpot", "true"), ("tpot", "false"))


def text(metrics: Metrics, *reports: Any) -> bytes:
    return metrics.page("", *reports)[0]


def samples(page: bytes) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(page.decode()) for sample in family.samples]


def value(found: Iterable[Sample], name: str, **labels: str) -> float:
    (match,) = [s for s in found if s.name == name and labels.items() <= s.labels.items()]
    return match.value


def result(reason: FinishReason = FinishReason.STOP, **usage: int) -> Result:
    counts = {"prompt_tokens": 100, "completion_tokens": 11, "image_tokens": 64, "cached_tokens": 40, "num_images": 2}
    counts |= {"cached_images": 1}
    return Result(
        request_id="r",
        text="",
        token_ids=(),
        finish_reason=reason,
        usage=Usage(**(counts | usage)),
        metrics=RequestMetrics(
            ttft_s=0.3, tpot_s=0.02, e2e_s=0.5, queue_s=0.1, encode_s=0.05, prefill_s=0.1, decode_s=0.2
        ),
        timeline=(StageSpan("fetch", 0, 0.01), StageSpan("encode", 0.1, 0.15), StageSpan("prefill", 0.2, 0.3)),
        gaps_s=array("d", [0.01] * 9 + [0.11]),
    )


def test_every_name_is_there() -> None:
    metrics = Metrics("m")
    metrics.traffic.count_answer("/v1/models", 200)
    names = {sample.name for sample in samples(text(metrics, example_status()))}
    assert [name for name in NAMES if name not in names] == []


def test_a_request_is_counted_once_everywhere() -> None:
    metrics = Metrics("m")
    metrics.requests.add(result())
    page = samples(text(metrics, None))
    assert value(page, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(page, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.3)
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 0
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.5") == 1
    assert value(page, "vllm:inter_token_latency_seconds_count") == 10
    assert value(page, "vllm:inter_token_latency_seconds_bucket", le="0.01") == 9
    assert value(page, "vllm:inter_token_latency_seconds_bucket", le="0.1") == 9, "the long one"
    assert value(page, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(page, "vllm:request_inference_time_seconds_sum") == pytest.approx(0.35)
    assert value(page, "vllm:request_prompt_tokens_bucket", le="100.0") == 1
    assert value(page, "vllm:request_prompt_tokens_bucket", le="50.0") == 0
    assert value(page, "vllm:prefix_cache_queries_total") == 100
    assert value(page, "vllm:prefix_cache_hits_total") == 40
    assert value(page, "vllm:mm_cache_queries_total") == 2
    assert value(page, "vllm:mm_cache_hits_total") == 1
    assert value(page, "hydra:request_encode_time_seconds_count") == 1
    assert value(page, "hydra:media_fetch_seconds_sum") == pytest.approx(0.01)


def test_times_of_failed_requests_are_not_counted_and_what_their_prompts_took_is() -> None:
    """A prompt that was never computed counts no cached tokens."""
    metrics = Metrics("m")
    for reason in (FinishReason.ABORT, FinishReason.ERROR):
        metrics.requests.add(result(reason))
        metrics.requests.add(replace(result(reason), metrics=RequestMetrics(e2e_s=0.5)))
    page = samples(text(metrics, example_status(prompt_tokens=120)))
    assert value(page, "vllm:request_success_total", finished_reason="abort") == 2
    assert value(page, "vllm:request_success_total", finished_reason="error") == 2
    assert value(page, "vllm:request_success_total", finished_reason="stop") == 0
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_prefill_kv_computed_tokens"):
        assert value(page, f"vllm:{name}_count") == 0
    assert value(page, "vllm:prefix_cache_queries_total") == 200 and value(page, "vllm:prefix_cache_hits_total") == 80
    assert value(page, "vllm:prompt_tokens_cached_total") == 80 and value(page, "vllm:prompt_tokens_total") == 200
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 80
    assert value(page, "vllm:mm_cache_queries_total") == 4 and value(page, "vllm:mm_cache_hits_total") == 2


def test_gauges_follow_the_status() -> None:
    metrics = Metrics("m")
    page = samples(text(metrics, example_status()))
    assert value(page, "vllm:num_requests_running", model_name="m", engine="0") == 3
    assert value(page, "vllm:num_requests_waiting") == 2
    assert value(page, "vllm:kv_cache_usage_perc") == 0.25
    assert value(page, "vllm:generation_tokens_total") == 100
    assert value(page, "vllm:prompt_tokens_total") == 600
    assert value(page, "vllm:num_preemptions_total") == 5
    assert value(page, "vllm:iteration_tokens_total_sum") == 700
    assert value(page, "vllm:iteration_tokens_total_count") == 70
    assert value(page, "hydra:encoder_items_per_batch_sum") == 12
    assert value(page, "vllm:cache_config_info", num_gpu_blocks="100") == 1
    later = example_status(time_s=14.0, language_busy_s=7.0, vision_busy_s=3.0)
    page = samples(text(metrics, later))
    assert value(page, "hydra:stream_busy_ratio", stream="language") == 0.75
    assert value(page, "hydra:stream_busy_ratio", stream="vision") == 0.25


def test_budgets_follow_the_status() -> None:
    metrics = Metrics("m")
    page = samples(text(metrics, example_status()))
    assert value(page, "hydra:tpot_limit_seconds") == 0 and value(page, "hydra:budget_correction_ratio") == 1
    budget = BudgetReport(
        0.04, 96, 2304, 0.012, 1.25, decode_steps=500, late_steps=3, stretched_steps=2, full_steps=80, limit_used=0.96
    )
    page = samples(text(metrics, example_status(budget=budget)))
    assert value(page, "hydra:tpot_limit_seconds", model_name="m") == 0.04
    assert value(page, "hydra:token_budget") == 96
    assert value(page, "hydra:image_budget_patches") == 2304
    assert value(page, "hydra:vision_allowance_seconds") == 0.012
    assert value(page, "hydra:budget_correction_ratio") == 1.25
    assert value(page, "hydra:limit_used_ratio") == 0.96
    assert value(page, "hydra:decode_steps_total") == 500
    assert value(page, "hydra:late_steps_total") == 3
    assert value(page, "hydra:full_steps_total") == 80 and value(page, "hydra:stretched_steps_total") == 2
    page = samples(text(metrics, example_status(budget=BudgetReport(0.04, vision_s=-1))))
    assert value(page, "hydra:vision_allowance_seconds") == math.inf


def with_limits(slo: SloReport, *timeline: StageSpan, reason: FinishReason = FinishReason.STOP) -> Result:
    plain = result(reason)
    return replace(plain, metrics=replace(plain.metrics, slo=slo), timeline=timeline)


def test_limits_are_counted_by_kind_and_all_together() -> None:
    metrics = Metrics("m")
    metrics.requests.add(result())  # no limits
    metrics.requests.add(with_limits(SloReport(ttft_met=True, tpot_met=True)))
    metrics.requests.add(with_limits(SloReport(ttft_met=True, tpot_met=False)))
    metrics.requests.add(with_limits(SloReport(ttft_met=False)))
    metrics.requests.add(with_limits(SloReport(tpot_met=True)))
    metrics.requests.add(with_limits(SloReport(ttft_met=False), reason=FinishReason.ABORT))
    page = samples(text(metrics, None))
    counts = {(limit, met): value(page, "hydra:slo_requests_total", limit=limit, met=met) for limit, met in VERDICTS}
    assert counts == dict(zip(VERDICTS, (2, 1, 2, 1), strict=True))
    assert value(page, "hydra:limited_requests_total") == 4
    assert value(page, "hydra:goodput_requests_total") == 2


def test_a_late_token_counts_once_for_what_took_most_of_it() -> None:
    metrics = Metrics("m")
    for late_by in ({"encode": 2, "cpu": 1}, {"transfer": 1}):
        metrics.requests.add(with_limits(SloReport(late_gaps=sum(late_by.values()), late_by=late_by)))
    page = samples(text(metrics, None))
    counted = {s.labels["blame"]: s.value for s in page if s.name == "hydra:late_tokens_total"}
    assert counted == dict.fromkeys(BLAMES, 0) | {"encode": 2, "transfer": 1, "cpu": 1}


def test_prompts_count_whole_as_vllm_counts_them() -> None:
    metrics = Metrics("m")
    metrics.requests.add(result())
    page = samples(text(metrics, example_status()))
    assert value(page, "vllm:prompt_tokens_total") == 640
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_compute") == 600
    assert value(page, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 40
    assert value(page, "vllm:request_prefill_kv_computed_tokens_sum") == 60


def test_stages_are_the_phases_of_the_request() -> None:
    metrics = Metrics("m")
    moved = (
        StageSpan("fetch", 0.0, 0.01),
        StageSpan("encode_wait", 0.01, 0.05),
        StageSpan("encode", 0.05, 0.1),
        StageSpan("pull_features", 0.1, 0.12, lane="transfer"),
        StageSpan("prefill_wait", 0.12, 0.2),
        StageSpan("prefill", 0.2, 0.3),
        StageSpan("offered_kv", 0.3, 0.31, lane="transfer"),
        StageSpan("pull_kv", 0.31, 0.34, lane="transfer"),
        StageSpan("decode", 0.34, 0.5),
    )
    metrics.requests.add(replace(result(), timeline=moved))
    text_only = replace(
        result(num_images=0), timeline=(StageSpan("prefill_wait", 0, 0.1), StageSpan("prefill", 0.1, 0.3))
    )
    metrics.requests.add(text_only)
    page = samples(text(metrics, None))
    queues = {s.labels["stage"]: s.value for s in page if s.name == "hydra:stage_queue_seconds_sum"}
    runs = {s.labels["stage"]: (s.value, s.name) for s in page if s.name == "hydra:stage_run_seconds_count"}
    assert queues == pytest.approx({"encode": 0.04, "prefill": 0.18, "decode": 0.0})
    assert {stage: count for stage, (count, _) in runs.items()} == {"encode": 1, "prefill": 2, "decode": 1}
    assert value(page, "hydra:stage_run_seconds_sum", stage="decode") == pytest.approx(0.16)
    assert value(page, "hydra:stage_move_seconds_sum", move="features") == pytest.approx(0.02)
    assert value(page, "hydra:stage_move_seconds_sum", move="kv") == pytest.approx(0.04)
    assert value(page, "hydra:request_migrate_time_seconds_sum") == pytest.approx(0.06)
    assert value(page, "hydra:stage_queue_seconds_bucket", stage="encode", le="0.025") == 0
    assert value(page, "hydra:stage_queue_seconds_bucket", stage="encode", le="0.05") == 1


def test_bounds_grow_and_reach_as_far_as_requests_do() -> None:
    metrics = Metrics("m")
    metrics.traffic.count_answer("/x", 200)
    bounds: dict[str, list[float]] = {}
    for sample in samples(text(metrics, example_status())):
        if sample.name.endswith("_bucket") and sample.labels.get("stage", "encode") == "encode":
            bounds.setdefault(sample.name.removesuffix("_bucket"), []).append(float(sample.labels["le"]))
    for name, found in bounds.items():
        assert len(set(found)) == len(found) or name == "hydra:stage_move_seconds", name
    for name, low, high in (
        ("vllm:time_to_first_token_seconds", 0.001, 60),
        ("vllm:inter_token_latency_seconds", 0.001, 2.5),
        ("vllm:request_prompt_tokens", 1, 128 << 10),
        ("hydra:stage_queue_seconds", 0.001, 60),
    ):
        assert bounds[name][0] <= low and bounds[name][-2] >= high and bounds[name][-1] == math.inf, name


def test_nothing_that_counts_goes_down() -> None:
    metrics, before = Metrics("m"), {}
    for round_number in range(4):
        metrics.requests.add(result() if round_number % 2 else result(FinishReason.ERROR))
        metrics.requests.add_choices(2, 11)
        metrics.traffic.count_answer("/v1/models", 200 + round_number, f"key{round_number}", method="GET", seconds=0.1)
        metrics.traffic.count_refusal("overloaded")
        metrics.traffic.count_lag(0.01)
        grown = dict.fromkeys(("prompt_tokens", "generation_tokens", "language_steps"), 100 * (round_number + 1))
        page = samples(text(metrics, example_status(time_s=float(round_number), **grown)))
        counts = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for s in page
            if s.name.endswith(("_total", "_bucket", "_count", "_sum")) and not s.name.startswith("process_")
        }
        assert before.keys() <= counts.keys() and all(counts[key] >= value for key, value in before.items())
        before = counts


def test_refusals_are_told_apart_and_names_of_keys_are_bounded() -> None:
    metrics = Metrics("m")
    for reason in ("rate_limit_exceeded", "payload_too_large", "something new", None):
        metrics.traffic.count_refusal(reason)
    for number in range(100):
        metrics.traffic.count_answer("/x", 200, f"key{number}", method=f"BREW{number}")
    page = samples(text(metrics, None))
    refused = {s.labels["reason"]: s.value for s in page if s.name == "hydra:admission_rejections_total"}
    assert refused["rate_limit_exceeded"] == refused["payload_too_large"] == 1 and refused["other"] == 2
    clients = {s.labels["client"]: s.value for s in page if s.name == "hydra:client_responses_total"}
    assert len(clients) == 65 and clients["other"] == 36
    assert value(page, "http_requests_total", method="other", handler="/x", status="2xx") == 100


async def test_the_page_over_http(served: Served) -> None:
    served.engine.status = example_status()
    for stream in (False, True):
        async with served.chat(stream=stream) as response:
            await response.read()
    served.engine.refusal = Unavailable("full")
    async with served.chat() as response:
        assert response.status == 503
    async with served.get("/no/such/path-7731") as response:
        assert response.status == 404
    served.engine.state = "draining"
    async with served.get("/health") as response:
        assert response.status == 503
    async with served.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.read()
    page = samples(text)
    assert value(page, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(page, "vllm:time_to_first_token_seconds_count") == 2
    assert value(page, "hydra:admission_rejections_total", reason="overloaded") == 1
    assert value(page, "hydra:admission_rejections_total", reason="draining") == 0
    assert value(page, "hydra:http_responses_total", route="/v1/chat/completions", status="200") == 2
    assert value(page, "hydra:http_responses_total", route="unknown", status="404") == 1
    assert value(page, "vllm:request_params_n_count") == 2
    assert value(page, "vllm:request_params_max_tokens_sum") == 2 * served.engine.max_model_len
    assert value(page, "http_requests_total", handler="/v1/chat/completions", method="POST", status="5xx") == 1
    assert value(page, "http_request_duration_seconds_count", handler="/v1/chat/completions", method="POST") == 3
    assert b"7731" not in text and b"chatcmpl" not in text
    async with served.http.head(served.url + "/metrics") as response:
        assert response.status == 200 and int(response.headers["Content-Length"]) > 1000
        assert await response.read() == b""


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text", "application/openmetrics-text;version=x;escaping=y"]
)
async def test_openmetrics_for_those_who_ask(served: Served, accept: str) -> None:
    async with served.get("/metrics", headers={"Accept": accept}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        text = await response.text()
    names = {sample.name for family in openmetrics.text_string_to_metric_families(text) for sample in family.samples}
    assert {"vllm:request_success_total", "hydra:stage_run_seconds_bucket"} <= names


async def test_the_client_s_words_never_become_labels(served: Served) -> None:
    odd = "zq9 model"
    async with served.chat(model=odd) as response:
        assert response.status == 404
    async with served.get(f"/v1/models/{odd}", headers={"X-Request-Id": "zq9id"}) as response:
        assert response.status == 404
    async with served.get("/metrics") as response:
        assert b"zq9" not in await response.read()


# ---- by instance

BUSY = TransferReport(
    offers=2, staged=5, pulls=3, offered=40, acknowledged=30, withdrawn=5, expired=1, pulled=29, pulled_bytes=1 << 30,
    host_bytes=1 << 29, pull_s=2.5, invalid=4, ignored=6,
)  # fmt: skip


def test_every_instance_has_its_series_beside_the_sums() -> None:
    states = instances_of("E+P+D", d0={"condition": Condition.SILENT, "restarts": 2})
    busy = example_status(num_handing_over=7, num_arriving=8, transfer=BUSY)
    page = samples(text(Metrics("m"), example_status(), states, {"p0": busy, "d0": example_status()}))
    own = {"model_name": "m", "engine_instance": "p0", "role": "P"}
    found = {s.name: s.value for s in page if own.items() <= s.labels.items() and "stream" not in s.labels}
    assert found == {
        "hydra:instance_up": 1,
        "hydra:instance_restarts_total": 0,
        "hydra:instance_num_requests_running": 3,
        "hydra:instance_num_requests_waiting": 2,
        "hydra:instance_num_requests_encoding": 1,
        "hydra:instance_num_requests_handing_over": 7,
        "hydra:instance_num_requests_arriving": 8,
        "hydra:instance_kv_cache_usage_perc": 0.25,
        "hydra:instance_image_cache_usage_perc": 0.5,
        "hydra:transfer_live_offers": 2,
        "hydra:transfer_live_staged": 5,
        "hydra:transfer_live_pulls": 3,
        "hydra:transfer_offered_total": 40,
        "hydra:transfer_acknowledged_total": 30,
        "hydra:transfer_withdrawn_total": 5,
        "hydra:transfer_expired_total": 1,
        "hydra:transfer_pulled_total": 29,
        "hydra:transfer_pulled_bytes_total": 1 << 30,
        "hydra:transfer_host_bytes_total": 1 << 29,
        "hydra:transfer_pull_seconds_total": 2.5,
        "hydra:transfer_invalid_total": 4,
        "hydra:transfer_ignored_total": 6,
    }
    busy_s = {
        s.labels["stream"]: s.value
        for s in page
        if s.name == "hydra:instance_busy_seconds_total" and s.labels["engine_instance"] == "p0"
    }
    assert busy_s == {"vision": 2.0, "language": 4.0}
    assert value(page, "vllm:num_requests_running") == 3  # the sum has no label of an instance


def test_of_an_instance_that_is_down_only_counters_are_left() -> None:
    states = instances_of("E+PD", e0={"condition": Condition.STARTING, "restarts": 2})
    page = samples(text(Metrics("m"), None, states, {"e0": example_status(transfer=BUSY)}))
    names = {s.name for s in page if s.labels.get("engine_instance") == "e0"}
    assert {"hydra:instance_up", "hydra:instance_restarts_total", "hydra:transfer_pulled_total"} <= names
    assert not {"hydra:instance_num_requests_running", "hydra:transfer_live_offers"} & names
    assert value(page, "hydra:instance_up", engine_instance="e0") == 0
    assert value(page, "hydra:instance_up", engine_instance="pd0") == 1
    assert value(page, "hydra:instance_restarts_total", engine_instance="e0") == 2


def test_series_go_with_their_instances() -> None:
    metrics = Metrics("m")
    text(metrics, None, instances_of("64EPD"))
    page = samples(text(metrics, None, instances_of("EP+D")))
    assert {s.labels["engine_instance"] for s in page if "engine_instance" in s.labels} == {"ep0", "d0"}


async def test_instances_over_http(served: Served) -> None:
    served.engine.states = instances_of("EP+D")
    served.engine.reports = {"d0": example_status(num_running=9)}
    async with served.get("/metrics") as response:
        page = samples(await response.read())
    assert value(page, "hydra:instance_num_requests_running", engine_instance="d0", role="D") == 9
    assert value(page, "hydra:instance_up", engine_instance="ep0", role="EP") == 1
