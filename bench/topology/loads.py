"""The requests of `hydra_terminal.load.workload` as rows of a workload for the simulator, and as real prompts.

Both get the same token ids: a beginning that all share, the pictures if there are some, and words, one token each. Ids
mean nothing, and answers have a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hydra_engine.core.sampling import SamplingParams
from hydra_planner.simulator.requests import FROZEN, RequestMaker
from hydra_planner.workload.file import Picture, WorkloadRequest
from hydra_terminal.load.pictures import jpeg
from hydra_terminal.load.workload import Spec, Workload


class Call(NamedTuple):
    """Arguments of `Engine.submit`."""

    prompt: list[int]
    images: list[bytes] | None
    sampling: SamplingParams


def rows(workload: Workload, times_s: Sequence[float], content: int = 0) -> list[WorkloadRequest]:
    """A request of the workload for each time. `content` changes pictures, not sizes."""
    specs = workload.specs(len(times_s), content)
    return [row_of(spec, time_s) for spec, time_s in zip(specs, times_s, strict=True)]


def row_of(spec: Spec, at_s: float) -> WorkloadRequest:
    return WorkloadRequest(
        at_s=at_s,
        prompt_tokens=len(spec.question.split()),
        output_tokens=spec.max_tokens,
        pictures=tuple(Picture(*picture) for picture in spec.pictures),
        kind=spec.kind,
    )


def calls(load: Sequence[WorkloadRequest], maker: RequestMaker) -> list[Call]:
    """Calls of all rows of a load, numbered from 1."""
    return [call_of(row, number, maker) for number, row in enumerate(load, start=1)]


def call_of(row: WorkloadRequest, number: int, maker: RequestMaker) -> Call:
    images = [jpeg(picture.width, picture.height, picture.number) for picture in row.pictures]
    return Call(maker.placeholders(row, number), images or None, replace(FROZEN, max_tokens=row.output_tokens))
