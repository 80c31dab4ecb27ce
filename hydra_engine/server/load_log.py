"""Logs the load every ten seconds while requests run: running and waiting requests, tokens in and out, caches and hits.

Lines have vLLM's wording, which users know and search for. Does not know where lines go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from hydra_engine import log
from hydra_engine.core.messages import Status
from hydra_engine.core.outputs import Result, Usage
from hydra_engine.server.port import EnginePort

EVERY_S = 10.0
logger = logging.getLogger("hydra_engine.load")

_WORDS = (
    ("prompt_tokens_per_s", "Avg prompt throughput: {:.1f} tokens/s"),
    ("generation_tokens_per_s", "Avg generation throughput: {:.1f} tokens/s"),
    ("running", "Running: {} reqs"),
    ("encoding", "Encoding: {} reqs"),
    ("waiting", "Waiting: {} reqs"),
    ("kv_cache_usage", "KV cache usage: {:.1%}"),
    ("image_cache_usage", "Image cache usage: {:.1%}"),
    ("prefix_cache_hit_rate", "Prefix cache hit rate: {:.1%}"),
    ("image_cache_hit_rate", "Image cache hit rate: {:.1%}"),
)


class Load:
    """Counts the load between two calls of `summarise`. `stats` is `Engine.stats`; `add` receives every result."""

    def __init__(self, stats: Callable[[], Status | None], now_s: float) -> None:
        self._stats = stats
        self._ended: list[Usage] = []  # usage of the requests that ended in this interval
        self._began_s = now_s
        self._before = self._totals(stats())

    def add(self, result: Result) -> None:
        self._ended.append(result.usage)

    def summarise(self, now_s: float) -> dict[str, object] | None:
        """The facts of the interval since the last call; None if nothing ran. Hit rates count the requests that ended
        in it."""
        status, ended, span_s = self._stats(), self._ended, max(now_s - self._began_s, 1e-9)
        totals = self._totals(status)
        # Totals shrink when an instance restarts.
        prompt, generated = (max(now - before, 0) for now, before in zip(totals, self._before, strict=True))
        self._ended, self._began_s, self._before = [], now_s, totals
        if status is None or not (
            prompt or generated or ended or status.num_running or status.num_encoding or status.num_waiting
        ):
            return None
        facts: dict[str, object] = {
            "prompt_tokens_per_s": round(prompt / span_s, 3),
            "generation_tokens_per_s": round(generated / span_s, 3),
            "running": status.num_running,
            "encoding": status.num_encoding,
            "waiting": status.num_waiting,
            "kv_cache_usage": round(status.kv_used, 6),
        }
        if status.image_blocks_total:
            facts["image_cache_usage"] = round(status.image_cache_used, 6)
        if prompt_tokens := sum(usage.prompt_tokens for usage in ended):
            facts["prefix_cache_hit_rate"] = round(sum(usage.cached_tokens for usage in ended) / prompt_tokens, 6)
        if images := sum(usage.num_images for usage in ended):
            facts["image_cache_hit_rate"] = round(sum(usage.cached_images for usage in ended) / images, 6)
        return facts

    @staticmethod
    def _totals(status: Status | None) -> tuple[int, int]:
        return (0, 0) if status is None else (status.prompt_tokens, status.generation_tokens)


@contextlib.asynccontextmanager
async def load_lines(engine: EnginePort) -> AsyncIterator[None]:
    """Logs the load during the `async with`, regardless of the log level."""
    load = Load(engine.stats, time.monotonic())
    engine.add_observer(load.add)
    logger.setLevel(logging.INFO)

    async def write() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if (facts := load.summarise(time.monotonic())) is not None:
                words = (form.format(facts[name]) for name, form in _WORDS if name in facts)
                logger.info("%s", ", ".join(words), extra={log.FACTS: facts})

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
