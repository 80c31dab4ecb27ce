"""The serving workload that every peer gets: different random pictures, one question, a fixed number of greedy tokens.

Imports nothing of the engine, so that peers can use it from environments of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import resource
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw

QUESTION = "Describe this picture in detail: what is shown, which colours are there, and where is each thing?"


def pictures(count: int, size: int = 336, seed: int = 0) -> list[Image.Image]:
    """Pictures that differ in every patch, so that no cache can help."""
    rng = random.Random(seed)
    images = []
    for _ in range(count):
        picture = Image.effect_noise((size, size), 60).convert("RGB")
        draw = ImageDraw.Draw(picture)
        for _ in range(12):
            x, y, r = rng.randrange(size), rng.randrange(size), rng.randrange(8, size // 4)
            colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        images.append(picture)
    return images


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency level of one system: seconds and tokens per second."""

    concurrency: int
    tokens_per_s: float
    ttft_median_s: float
    ttft_max_s: float
    tpot_median_ms: float
    tokens: int


def point(concurrency: int, wall_s: float, ttfts_s: list[float], tpots_s: list[float], tokens: int) -> Point:
    return Point(
        concurrency=concurrency,
        tokens_per_s=round(tokens / wall_s, 2),
        ttft_median_s=round(statistics.median(ttfts_s), 4) if ttfts_s else float("nan"),
        ttft_max_s=round(max(ttfts_s), 4) if ttfts_s else float("nan"),
        tpot_median_ms=round(statistics.median(tpots_s) * 1e3, 3) if tpots_s else float("nan"),
        tokens=tokens,
    )


def batch_points(run: Callable[[list[Image.Image], int], float], levels: str, tokens: int) -> list[Point]:
    """For systems that take whole batches: `run(pictures, tokens)` gives the seconds of a batch, all requests at once.

    The time to the first token is that of a batch with one token each.
    """
    run(pictures(1, seed=99), 4)
    points = []
    for level in map(int, levels.split(",")):
        images = pictures(level, seed=100 * level)
        first_s, wall_s = run(images, 1), run(images, tokens)
        tpot_s = (wall_s - first_s) / (tokens - 1)
        points.append(point(level, wall_s, [first_s], [tpot_s], level * tokens))
    return points


def peer_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def print_report(system: str, ready_s: float, points: list[Point]) -> None:
    """One JSON line: what `bench/compare.py` reads. Memory is the larger of this process and its largest child."""
    usage = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    document = {
        "system": system,
        "ready_s": round(ready_s, 2),
        "peak_rss_mib": max(usage) // 1024,
        "points": [dataclasses.asdict(p) for p in points],
    }
    print(json.dumps(document), flush=True)
