"""`timeline`: one request with two pictures through E, P and D, as a picture and as text: what was moved while
something else still ran.

Real processes. Features of the first picture are pulled while the second is encoded, KV group by group behind the
prefill; small steps make that visible.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.gantt import draw_gantt
from bench.serve.harness import say
from bench.topology.loads import call_of
from hydra_engine import Engine
from hydra_engine.core.outputs import Result, StageSpan
from hydra_engine.telemetry.timeline import draw
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.workload.file import Picture, WorkloadRequest

_SIZE = (640, 480)
_TOKEN_BUDGET = 128  # several chunks a prompt
_WIDTH = 96
_ANSWER_S = 120.0


def run(options: argparse.Namespace, site: Site) -> dict[str, Any]:
    scheduler = replace(site.config.scheduler, token_budget=_TOKEN_BUDGET, image_budget=1)  # a picture a step
    config = replace(site.config, topology=options.topology, scheduler=scheduler)
    maker = RequestMaker(site.spec)
    with Engine.from_config(config, processes=True, progress=False) as engine:
        for number in (1, 2):  # the first request of a process is slow
            _answer(engine, maker, number, options)
        result = _answer(engine, maker, 3, options)
    return {
        "topology": options.topology,
        "words": options.words,
        "tokens": options.tokens,
        "ttft_ms": round(1e3 * (result.metrics.ttft_s or 0.0), 3),
        "latency_ms": round(1e3 * result.metrics.e2e_s, 3),
        "early": early(result.timeline),
        "text": draw(result.timeline, width=_WIDTH),
        "spans": [_span(span) for span in result.timeline],
    }


def _answer(engine: Engine, maker: RequestMaker, number: int, options: argparse.Namespace) -> Result:
    """Submits a request and waits for its result. Each `number` has other pictures and words."""
    pictures = tuple(Picture(*_SIZE, 10 * number + place) for place in range(2))
    row = WorkloadRequest(at_s=0.0, prompt_tokens=options.words, output_tokens=options.tokens, pictures=pictures)
    call = call_of(row, number, maker)
    return engine.submit(call.prompt, call.images, sampling=call.sampling).result(_ANSWER_S)


def early(timeline: tuple[StageSpan, ...]) -> dict[str, Any]:
    """Counts copies, and those of them that began before the stage that makes their data had ended."""
    found: dict[str, Any] = {}
    for stage, made_by in (("pull_features", "encode"), ("pull_kv", "prefill")):
        ends = [span.end_s for span in timeline if span.stage == made_by]
        pulls = [span for span in timeline if span.stage == stage]
        found[stage] = {
            "early": sum(bool(ends) and span.start_s < max(ends) for span in pulls),
            "all": len(pulls),
            "ms": round(1e3 * sum(span.end_s - span.start_s for span in pulls), 3),
        }
    return found


def _span(span: StageSpan) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(span)
    return {**fields, "start_s": round(span.start_s, 6), "end_s": round(span.end_s, 6)}


def report(result: dict[str, Any]) -> None:
    say(f"{result['topology']}: first token after {result['ttft_ms']:.1f} ms, all after {result['latency_ms']:.1f} ms")
    for line in result["text"]:
        say(line)
    say("\neach span, ms")
    for span in result["spans"]:
        begin, end = 1e3 * span["start_s"], 1e3 * span["end_s"]
        cause = f"  ({span['cause']})" if span["cause"] else ""
        say(f"  {begin:9.2f} {end:9.2f}  {span['instance']:6} {span['lane']:9} {span['stage']}{cause}")
    for stage, found in result["early"].items():
        say(f"{stage}: {found['early']} of {found['all']} copies began early, {found['ms']:.2f} ms in all")


def picture(result: dict[str, Any], path: Path) -> Path:
    spans = msgspec.convert(result["spans"], tuple[StageSpan, ...])
    draw_gantt([("two pictures", 0.0, spans)], path, title=f"One request through {result['topology']}")
    return path
