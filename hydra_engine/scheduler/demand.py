"""What there is to do when a language step is planned, summed up for the budgets.

Looks at no more requests than `MAX_SEEN` of a queue, so its cost does not grow with how many wait.
"""

from __future__ import annotations

import math
from itertools import islice

from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.budget import Demand, stretch
from hydra_engine.scheduler.decodes import Ready

MAX_SEEN = 16


def demand_of(book: RequestBook, ready: Ready, patches_in_flight: int, *, can_start: bool, now: float) -> Demand:
    """`ready`: the decodes that are in the step. `can_start`: a waiting request may find a seat."""
    prefills = [state for state in islice(book.prefilling, MAX_SEEN) if _computable(state)]
    if can_start:
        prefills += islice(book.waiting.by_urgency(), MAX_SEEN)
    table = book.decodes
    limit_s = stretch_s = math.inf
    if table.times.has_limits and ready.num_rows:
        limits = table.times.limits(ready.places)
        limit_s, stretch_s = float(limits.min()), stretch(limits, *table.pace(ready))
    due = book.next_due(now)
    due_tokens, due_patches = _before_due(book, due) if due is not None else (0, 0)
    return Demand(
        now=now,
        num_decodes=ready.num_rows,
        decode_context=ready.num_keys,
        decode_limit_s=limit_s,
        stretch_s=stretch_s,
        prefill_tokens=sum(map(_computable, prefills)),
        num_prefills=len(prefills),
        prefill_context=prefills[0].num_planned if prefills else 0,
        encode_patches=book.images.patches_waiting + patches_in_flight,
        ttft_due_s=math.inf if due is None else due.due_s,
        due_tokens=due_tokens,
        due_patches=due_patches,
    )


def _computable(state: RequestState) -> int:
    return state.num_computable - state.num_planned


def _before_due(book: RequestBook, due: RequestState) -> tuple[int, int]:
    """Tokens and patches that the first token of `due` waits for: its own, those of the running prefills that go first
    and, if it has not started, those of more urgent requests."""
    first = [due]
    if due.request.id in book.kv.tables:
        first += (state for state in islice(book.prefilling, MAX_SEEN) if state.order < due.order)
    else:
        first += islice(book.prefilling, MAX_SEEN)
        first += (state for state in islice(book.waiting.by_urgency(), MAX_SEEN) if state.urgency < due.urgency)
    tokens = sum(state.num_tokens - state.num_planned for state in first if state.arrival is None)
    return tokens, sum(map(_patches, first)) if due.waits_for_images else 0


def _patches(state: RequestState) -> int:
    """That are encoded here."""
    images = enumerate(zip(state.request.images, state.images, strict=True))
    waiting = ((i, image) for i, (image, progress) in images if progress <= ImageProgress.ENCODING)
    return sum(image.num_patches for i, image in waiting if i not in state.remote_images)
