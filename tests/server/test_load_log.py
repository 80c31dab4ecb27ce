"""The line with the load: what it says, when it is silent, and what it says as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from hydra_engine import log
from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, Usage
from hydra_engine.server import loggers
from hydra_engine.server.loggers import Load
from tests.server.conftest import until
from tests.server.stub import StubEngine, example_status

IDLE = {"num_running": 0, "num_waiting": 0, "num_encoding": 0}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """The load logger's lines as JSON; its settings end with the test."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log.JsonFormatter("front"))
    monkeypatch.setattr(loggers.load_log, "handlers", [handler])
    monkeypatch.setattr(loggers.load_log, "propagate", False)
    monkeypatch.setattr(loggers, "EVERY_S", 0.01)
    yield stream
    loggers.load_log.setLevel(logging.NOTSET)


def ended(prompt: int, cached: int, images: int = 0, cached_images: int = 0) -> Result:
    usage = Usage(prompt, 1, num_images=images, cached_tokens=cached, cached_images=cached_images)
    return Result("r", "", (), FinishReason.STOP, usage, RequestMetrics())


def test_a_line_has_rates_of_its_interval_and_gauges_of_its_end() -> None:
    engine = StubEngine(status=example_status(prompt_tokens=1000, generation_tokens=50))
    load = Load(engine.stats, 100.0)
    engine.status = example_status(
        prompt_tokens=1700,
        generation_tokens=80,
        num_running=3,
        num_waiting=2,
        num_encoding=1,
        kv_blocks_used=25,
        kv_blocks_total=100,
        image_blocks_used=1,
        image_blocks_total=8,
    )
    load.add(ended(100, 25, images=2, cached_images=1))
    load.add(ended(100, 75))
    assert load.summarise(110.0) == {
        "prompt_tokens_per_s": 70.0,
        "generation_tokens_per_s": 3.0,
        "running": 3,
        "encoding": 1,
        "waiting": 2,
        "kv_cache_usage": 0.25,
        "image_cache_usage": 0.125,
        "prefix_cache_hit_rate": 0.5,
        "image_cache_hit_rate": 0.5,
    }
    facts = load.summarise(120.0)
    assert facts is not None and (facts["prompt_tokens_per_s"], facts["generation_tokens_per_s"]) == (0.0, 0.0)
    assert "prefix_cache_hit_rate" not in facts and "image_cache_hit_rate" not in facts


def test_nothing_is_said_while_nothing_runs() -> None:
    engine = StubEngine(status=example_status(**IDLE))
    load = Load(engine.stats, 0.0)
    assert load.summarise(10.0) is None
    engine.status = example_status(**IDLE, generation_tokens=example_status().generation_tokens + 1)
    assert load.summarise(20.0) is not None and load.summarise(30.0) is None
    load.add(ended(5, 5))
    assert load.summarise(40.0) is not None and load.summarise(50.0) is None
    engine.status = example_status(**(IDLE | {"num_waiting": 1}))
    assert load.summarise(60.0) is not None
    engine.status = None
    assert load.summarise(70.0) is None


def test_counters_of_an_instance_that_began_anew_are_no_negative_rates() -> None:
    engine = StubEngine(status=example_status(prompt_tokens=1000, generation_tokens=1000))
    load = Load(engine.stats, 0.0)
    engine.status = example_status(prompt_tokens=5, generation_tokens=5)
    facts = load.summarise(10.0)
    assert facts is not None and facts["prompt_tokens_per_s"] == facts["generation_tokens_per_s"] == 0.0


async def test_lines_are_vllms_words_or_facts_until_the_server_ends(
    said: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    engine = StubEngine(status=example_status(num_running=2, num_waiting=0))
    loggers.load_log.addHandler(caplog.handler)
    async with loggers.load_lines(engine):
        engine.report(ended(10, 5))
        await until(lambda: bool(said.getvalue()))
    count = len(said.getvalue().splitlines())
    await asyncio.sleep(0.03)
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert len(lines) == count
    assert lines[0]["running"] == 2 and lines[0]["prefix_cache_hit_rate"] == 0.5 and "message" not in lines[0]
    words = caplog.records[0].getMessage()
    assert words.startswith("Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 2 ")
    assert "Waiting: 0 reqs, KV cache usage: " in words and words.endswith("Prefix cache hit rate: 50.0%")
