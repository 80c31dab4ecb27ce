"""What each request of an instance that gets no tokens waits for at this moment, for a person who watches. Decides
nothing.
"""

from __future__ import annotations

from itertools import islice

from hydra_engine.core.messages import StageReport
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.request_table import RequestTable

MAX_REPORTS = 100


def stage_reports(requests: RequestTable) -> tuple[StageReport, ...]:
    """Of the requests that came first, at most `MAX_REPORTS`."""
    waiting = (state for state in requests.states.values() if state.ending is None and not state.decodes)
    return tuple(_report(requests, state) for state in islice(waiting, MAX_REPORTS))


def _report(requests: RequestTable, state: RequestState) -> StageReport:
    request = state.request
    if state.waits_for_images:
        pairs = zip(request.images, state.images, strict=True)
        lacking = {image.source for image, progress in pairs if progress <= ImageProgress.ENCODING}
        return StageReport(request.id, _stage_of_images(state), request.num_media - len(lacking), request.num_media)
    if state.is_encode_job or state.hands_over or state.arrival is not None:
        return StageReport(request.id, "transfer")
    if state.is_decode:
        return StageReport(request.id, "decode")
    if request.id not in requests.kv.tables:
        return StageReport(request.id, "queue")
    return StageReport(request.id, "prefill", state.num_prefilled, state.num_tokens)


def _stage_of_images(state: RequestState) -> str:
    if ImageProgress.ENCODING not in state.images:
        return "queue"
    return "transfer" if state.pulls_image else "encode"
