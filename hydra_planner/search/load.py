"""A workload at some rate: windows of its requests, their gaps stretched.

A window keeps the order of requests and the pattern of their gaps, bursts and lulls; seeds begin at different places.
What is longer than the workload goes round it again, with pictures and sessions that nobody has seen yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from hydra_planner.workload.file import Picture, Video, WorkloadRequest


def window(rows: Sequence[WorkloadRequest], count: int, rate: float | None, seed: int = 0) -> list[WorkloadRequest]:
    """`count` requests at `rate` requests per second; None: all at once. Seed 0 begins where the workload does."""
    start = 0 if not seed else int(np.random.default_rng([seed, 0x10AD]).integers(len(rows)))
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(rows)]
    span_s = rows[-1].at_s - rows[0].at_s
    gaps.append(span_s / max(len(rows) - 1, 1))  # from the last one to the first of the next round
    chosen = [(start + index) % len(rows) for index in range(count)]
    rounds = [(start + index) // len(rows) for index in range(count)]
    between = [gaps[place] for place in chosen[:-1]]
    total_s = sum(between)
    if rate is None:
        scale = 0.0
    elif total_s > 0:
        scale = (count - 1) / rate / total_s
    else:
        between, scale = [1 / rate] * len(between), 1.0
    found, at_s = [], 0.0
    for place, turn, gap in zip(chosen, rounds, [*between, 0.0], strict=True):
        found.append(_again(rows[place], at_s, turn, len(rows)))
        at_s += gap * scale
    return found


def _again(row: WorkloadRequest, at_s: float, turn: int, num_rows: int) -> WorkloadRequest:
    if not turn:
        return msgspec.structs.replace(row, at_s=at_s)
    away = turn << 32
    pictures = tuple(Picture(one.width, one.height, one.number + away) for one in row.pictures)
    videos = tuple(Video(one.width, one.height, one.frames, one.fps, one.number + away) for one in row.videos)
    session = None if row.session is None else row.session + turn * num_rows
    return msgspec.structs.replace(row, at_s=at_s, pictures=pictures, videos=videos, session=session)


def repeats(rows: Sequence[WorkloadRequest]) -> bool:
    """True if caches can hit: a picture is repeated, or prompts share a beginning."""
    numbers = [one.number for row in rows for one in row.pictures] + [one.number for row in rows for one in row.videos]
    return len(set(numbers)) < len(numbers) or any(row.shared_tokens for row in rows)


def rate_of(rows: Sequence[WorkloadRequest]) -> float | None:
    """Requests per second; None where all come at once."""
    span_s = rows[-1].at_s - rows[0].at_s
    return (len(rows) - 1) / span_s if span_s > 0 else None
