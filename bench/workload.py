"""The workload of the closed-loop benchmarks: different random pictures, one question, and the figures of a level."""

from __future__ import annotations

import random
import statistics
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
    """Results of a system at one concurrency: seconds and tokens per second."""

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
