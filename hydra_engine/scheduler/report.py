"""The scheduler's part of an instance's status: counts, and the stage of each request that gets no tokens now."""

from __future__ import annotations

from itertools import islice

from hydra_engine.core.reports import BudgetReport, StageReport, Status, StepSpeeds
from hydra_engine.core.state import ImageProgress, RequestPhase, RequestState
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.results import ResultProcessor

MAX_REPORTS = 100


def scheduler_status(
    requests: RequestTable, results: ResultProcessor, budget: BudgetReport, speeds: StepSpeeds
) -> Status:
    """The fields of a Status that the scheduler knows; the others keep their defaults."""
    status = Status(
        num_running=len(requests.prefilling) + len(requests.decoding),
        num_waiting=len(requests.waiting) + len(requests.held),
        num_encoding=len(requests.encoding),
        kv_blocks_used=requests.kv.pool.num_held,
        kv_blocks_total=requests.kv.pool.num_blocks,
        image_blocks_used=requests.features.pool.num_held,
        image_blocks_total=requests.features.pool.num_blocks,
        num_preemptions=requests.num_preemptions,
        prompt_tokens=results.prompt_tokens,
        generation_tokens=results.generation_tokens,
        images_encoded=results.images_encoded,
        num_decoding=len(requests.decoding),
        budget=budget,
        speeds=speeds,
        stages=_stage_reports(requests),
    )
    return requests.connector.with_counts(status)


def _stage_reports(requests: RequestTable) -> tuple[StageReport, ...]:
    """Stages of the requests that are neither decoding nor ended, for a user who watches; the first `MAX_REPORTS` by
    arrival here."""
    calm = RequestPhase.DECODING, RequestPhase.ENDED
    waiting = (state for state in requests.states.values() if state.phase not in calm)
    return tuple(_stage_report(requests, state) for state in islice(waiting, MAX_REPORTS))


def _stage_report(requests: RequestTable, state: RequestState) -> StageReport:
    """The stage of one request. Progress is counted in pictures while some have no features, in tokens in a prefill."""
    request, loads = state.request, state.connector_state is not None
    if state.waits_for_images:
        pairs = zip(request.images, state.images, strict=True)
        lacking = {image.source for image, progress in pairs if progress <= ImageProgress.ENCODING}
        stage = "queue"
        if ImageProgress.ENCODING in state.images:
            stage = "transfer" if loads and requests.connector.loads_images(state) else "encode"
        return StageReport(request.id, stage, request.num_media - len(lacking), request.num_media)
    if state.phase is RequestPhase.PARKED or state.external_kv:
        return StageReport(request.id, "transfer")
    if state.is_decode:
        return StageReport(request.id, "decode")
    if state.phase in (RequestPhase.WAITING, RequestPhase.HELD):
        return StageReport(request.id, "queue")
    return StageReport(request.id, "prefill", state.num_prefilled, state.num_tokens)
