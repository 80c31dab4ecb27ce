"""Handles instances' messages about requests: tokens for the reader, ends, new attempts, encodes.

Tokens are matched by attempt and position. A message under an id that is not a current attempt or job of its sender is
dropped, and the sender is sent one abort for that id.
"""

from __future__ import annotations

import logging
from typing import cast

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Delta, Finished, NeedDecoder, NeedImages, PromptScores, ToFrontend, Tokens
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.errors import RequestFailed, from_info
from hydra_engine.frontend.request import Attempt, Job, Phase, RequestInFlight
from hydra_engine.frontend.routing.decode_stealing import DecodeStealing
from hydra_engine.frontend.transitions import Dispatcher

logger = logging.getLogger(__name__)


class Incoming:
    """The handlers of messages. `name` is the instance that sent one."""

    def __init__(self, dispatcher: Dispatcher, stealing: DecodeStealing) -> None:
        self._dispatcher = dispatcher
        self._stealing = stealing
        self._instances = dispatcher.instances

    def take(self, name: str, message: ToFrontend, now: float) -> None:
        match message:
            case Tokens():
                self._on_tokens(name, message, now)
            case Delta():
                self._on_delta(name, message, now)
            case Finished():
                self._on_finished(name, message, now)
            case PromptScores():
                self._on_scores(name, message)
            case NeedImages():
                self._on_need(name, message, now)
            case NeedDecoder(number):
                self._on_need_decoder(name, number, now)
            case _:
                logger.error("unexpected message %s of instance %s", type(message).__name__, name)

    # ---- tokens

    def _on_tokens(self, name: str, message: Tokens, now: float) -> None:
        columns = message.request_ids, message.positions, message.token_ids
        find, time_s, late = cast(dict[int, RequestInFlight], self._dispatcher.by_id).get, message.time_s, message.late
        for number, position, token_id in zip(*columns, strict=True):
            in_flight = find(number)
            if in_flight is None or number in late or not in_flight.is_plain_next_token(name, number, position):
                self._on_delta(
                    name, Delta(RequestId(number), position, (token_id,), time_s, late=late.get(number)), now
                )
            else:
                self._feed_next(in_flight, token_id, time_s, now)

    def _on_scores(self, name: str, scores: PromptScores) -> None:
        in_flight = self._dispatcher.by_id.get(scores.request_id)
        if in_flight is None or in_flight.attempt_at(name, scores.request_id) is None:
            self._instances.reject(name, scores.request_id)
        elif in_flight.running:
            in_flight.active.on_scores(scores.start, scores.logprobs)

    def _on_delta(self, name: str, delta: Delta, now: float) -> None:
        in_flight = self._dispatcher.by_id.get(delta.request_id)
        attempt = None if in_flight is None else in_flight.attempt_at(name, delta.request_id)
        if in_flight is None or attempt is None:
            self._instances.reject(name, delta.request_id)
            return
        if not in_flight.running:
            return
        for other in self._dispatcher.late_decoder.superseded(in_flight, attempt, name):
            self._dispatcher.abort_at(in_flight, other)
        if name == attempt.decoder:
            attempt.decoder_ready = True
        if delta.position == in_flight.num_known:
            self._feed(in_flight, attempt, delta, now)
        elif not self._keep(in_flight, attempt, delta):
            error = RequestFailed("an instance contradicted tokens that had been sent before; the request was ended")
            self._dispatcher.fail(in_flight, error, now)
        while in_flight.running and (early := attempt.early.pop(in_flight.num_known, None)) is not None:
            self._feed(in_flight, attempt, early, now)
        if not in_flight.running:
            return
        if attempt.overtaken:
            self._dispatcher.fail(in_flight, _skipped(), now)
            return
        in_flight.advance()
        if attempt.decoder_ready:
            self._dispatcher.poison_guard.on_token(in_flight)
        if attempt.victim == name:
            self._stealing.victim_sent(in_flight, attempt, len(delta.token_ids))

    def _keep(self, in_flight: RequestInFlight, attempt: Attempt, delta: Delta) -> bool:
        """Keeps tokens that come early. Returns False if they contradict known ones."""
        known = in_flight.active.token_ids
        for index, token_id in enumerate(delta.token_ids):
            position = delta.position + index
            if position < len(known):
                if position < attempt.base or known[position] != token_id:
                    return False
                continue
            late = None if index else delta.late
            logprobs = delta.logprobs[index : index + 1]
            early = Delta(delta.request_id, position, (token_id,), delta.time_s, logprobs, late)
            if attempt.early.setdefault(position, early).token_ids != (token_id,):
                return False
        return True

    def _feed(self, in_flight: RequestInFlight, attempt: Attempt, delta: Delta, now: float) -> None:
        active, first = in_flight.active, not in_flight.prefilled
        if first and active.lacks_scores:
            self._dispatcher.fail(in_flight, _skipped(), now)
            return
        if delta.late is not None:
            active.on_late(delta.late)
        piece = active.on_tokens(in_flight.num_known, delta.token_ids, delta.time_s, delta.logprobs)
        if first:
            attempt.prefilled_s = delta.time_s
            attempt.release_prefill()
        attempt.decode_charge.grow(len(delta.token_ids))
        if piece is not None:
            active.handle.feed(piece)
        if active.stop_string is not None:
            self._dispatcher.close(in_flight, now)
        elif attempt.final is not None:
            self._settle(in_flight, attempt, attempt.final, now)

    def _feed_next(self, in_flight: RequestInFlight, token_id: int, time_s: float, now: float) -> None:
        """Fast path of `_on_delta`, for most tokens: `RequestInFlight.is_plain_next_token` is true."""
        active, attempt = in_flight.active, in_flight.attempt
        assert attempt is not None
        active.handle.feed(active.on_next_token(token_id, time_s))
        attempt.decode_charge.grow(1)
        if active.stop_string is not None:
            self._dispatcher.close(in_flight, now)

    # ---- the end of a part

    def _on_finished(self, name: str, finished: Finished, now: float) -> None:
        number = finished.request_id
        in_flight = self._dispatcher.by_id.get(number)
        attempt = None if in_flight is None else in_flight.attempt
        if in_flight is not None and in_flight.attempt_at(name, number) is not None:
            self._part_ended(in_flight, name, finished, now)
        elif in_flight and attempt and (job := attempt.jobs.get(number)) is not None and job.name == name:
            self._job_ended(in_flight, job, finished, now)
        else:
            owner = self._instances[name].stale.pop(number, None)
            given_up = None if owner is None else self._dispatcher.requests.get(owner)
            if given_up is not None:  # its time counts, but nothing of that attempt was used
                spans = () if number in given_up.lost_attempts else finished.spans
                report = msgspec.structs.replace(finished, spans=spans, cached_tokens=0, cached_images=0)
                given_up.reports.append(report)

    def _part_ended(self, in_flight: RequestInFlight, name: str, finished: Finished, now: float) -> None:
        attempt = in_flight.attempt
        assert attempt is not None
        attempt.instances.discard(name)
        if name != attempt.route.prefill:  # only the prefilling instance knows cache hits
            finished = msgspec.structs.replace(finished, cached_tokens=0, cached_images=0)
        in_flight.reports.append(finished)
        if in_flight.phase is Phase.CLOSING:
            self._dispatcher.conclude_if_idle(in_flight, now)
            return
        match finished.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                attempt.final = finished
                self._settle(in_flight, attempt, finished, now)
            case Departure.MOVED:
                self._moved(in_flight, attempt, name, now)
            case Departure.RETURNED:
                in_flight.preempted = True
                self._dispatcher.replay(in_flight, now, "preemption")
            case Departure.WITHDRAWN:
                self._dispatcher.replay(in_flight, now)
            case _:
                self._fail(in_flight, finished, now)

    def _moved(self, in_flight: RequestInFlight, attempt: Attempt, name: str, now: float) -> None:
        """Continues on the instance that has pulled the KV; starts again if that is gone or was never chosen."""
        if attempt.final is not None:
            self._settle(in_flight, attempt, attempt.final, now)
        elif name == attempt.decoder or attempt.decoder not in attempt.instances:
            self._dispatcher.replay(in_flight, now)
        elif attempt.overtaken:
            self._dispatcher.fail(in_flight, _skipped(), now)

    def _settle(self, in_flight: RequestInFlight, attempt: Attempt, final: Finished, now: float) -> None:
        """Closes the request, whose last token has been sampled, or waits for earlier tokens of another instance."""
        if in_flight.num_known >= final.num_generated:
            self._dispatcher.close(in_flight, now)
        elif not attempt.instances:
            self._dispatcher.fail(in_flight, _skipped(), now)
        else:
            in_flight.advance()

    def _job_ended(self, in_flight: RequestInFlight, job: Job, finished: Finished, now: float) -> None:
        self._dispatcher.end_job(in_flight, job)
        # Image cache hits count; the job has no prompt.
        in_flight.reports.append(msgspec.structs.replace(finished, cached_tokens=0))
        if in_flight.phase is Phase.CLOSING:
            self._dispatcher.conclude_if_idle(in_flight, now)
        elif finished.reason == FinishReason.ERROR:
            self._fail(in_flight, finished, now)
        elif finished.reason != Departure.MOVED:
            self._dispatcher.encode_again(in_flight, [job], now)

    def _fail(self, in_flight: RequestInFlight, finished: Finished, now: float) -> None:
        error = from_info(finished.error) if finished.error else RequestFailed("the request ended without a reason")
        self._dispatcher.fail(in_flight, error, now)

    # ---- requests for other instances

    def _on_need_decoder(self, name: str, number: RequestId, now: float) -> None:
        in_flight = self._dispatcher.by_id.get(number)
        attempt = None if in_flight is None else in_flight.attempt_at(name, number)
        if in_flight is None or attempt is None:
            self._instances.reject(name, number)
        elif in_flight.running and not attempt.decoder:
            self._dispatcher.choose_decoder(in_flight, attempt, now)

    def _on_need(self, name: str, need: NeedImages, now: float) -> None:
        in_flight = self._dispatcher.by_id.get(need.request_id)
        attempt = None if in_flight is None else in_flight.attempt_at(name, need.request_id)
        if in_flight is None or attempt is None:
            self._instances.reject(name, need.request_id)
        elif in_flight.running:
            for job in attempt.jobs.values():
                job.pending.difference_update(need.indices)
            self._dispatcher.encode(in_flight, attempt, need.indices, now)


def _skipped() -> RequestFailed:
    return RequestFailed("an instance skipped tokens or their scores; the request was ended")
