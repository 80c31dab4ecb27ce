"""The limits and deadlines of the requests at hand, which latency budgets add to the pending work of a step."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np

from hydra_engine.core.plans import Int64s
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.budget import PendingWork
from hydra_engine.scheduler.decodes import ReadyDecodes
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step import MAX_SEEN
from hydra_engine.scheduler.timeline import Seconds

# A request keeps its TPOT limit if 90 % of its gaps do; half of the rest may be spent on purpose.
STRETCHED_SHARE = 0.05


def with_limits(
    pending: PendingWork, requests: RequestTable, ready: ReadyDecodes, due: RequestState | None
) -> PendingWork:
    """`pending` with the limits of the decodes `ready`, and with what has to be computed before the first token of
    `due`, the request with the earliest deadline (None: there is none). Counts at most `MAX_SEEN` requests of a queue.
    """
    table = requests.decodes
    if table.times.num_limited and len(ready.starts):
        limits_s = table.times.limits(ready.indices)
        stretch_s = stretch(limits_s, *table.pace(ready))
        pending = pending._replace(tpot_limit_s=float(limits_s.min()), stretch_s=stretch_s)
    if due is not None:
        due_tokens, due_patches = _before_due(requests, due)
        pending = pending._replace(ttft_due_s=due.due_s, due_tokens=due_tokens, due_patches=due_patches)
    return pending


def stretch(limits_s: Seconds, elapsed_s: Seconds, num_gaps: Int64s, late_gaps: Int64s) -> float:
    """Longest duration in seconds of the next step, with the pause before it, that puts no running decode's TPOT limit
    at risk, for `PendingWork.stretch_s`. Infinite without decodes.

    Entry i of each [B] array belongs to one running decode: its limit (infinite: none), the seconds between its first
    and its latest token, the number of gaps between them, and how many of these were longer than the limit. A request
    may have a step longer than its limit if its late gaps, this one included, stay within 5 % and its mean gap within
    the limit. Otherwise the step may last as long as the limit.
    """
    if not len(limits_s):
        return math.inf
    gaps = num_gaps + 1
    spare = limits_s * gaps - elapsed_s
    spare[late_gaps + 1 > STRETCHED_SHARE * gaps] = 0.0
    return float(np.maximum(spare, limits_s).min())


def _before_due(requests: RequestTable, due: RequestState) -> tuple[int, int]:
    """(tokens, patches) to compute before the first token of `due`: for itself, for the running prefills ahead of it
    and, if it has not started, for more urgent requests. No patches if `due` waits for no image."""
    first = [due]
    if due.request.id in requests.kv.tables:
        first += (state for state in islice(requests.prefilling, MAX_SEEN) if state.order < due.order)
    else:
        first += islice(requests.prefilling, MAX_SEEN)
        first += (state for state in islice(requests.waiting.by_urgency(), MAX_SEEN) if state.urgency < due.urgency)
    tokens = sum(state.num_tokens - state.num_planned for state in first if not state.external_kv)
    return tokens, sum(map(_patches, first)) if due.waits_for_images else 0


def _patches(state: RequestState) -> int:
    """Patches of a request that are still to be encoded here."""
    images = enumerate(zip(state.request.images, state.images, strict=True))
    waiting = ((i, image) for i, (image, progress) in images if progress <= ImageProgress.ENCODING)
    return sum(image.num_patches for i, image in waiting if i not in state.external_images)
