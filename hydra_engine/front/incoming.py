"""What instances say about requests, and what follows: tokens for the reader, the end, another attempt, encodes.

Tokens are taken by attempt and position. An id that is not an attempt or a job of that instance is not known here,
whatever it once was: what comes under it is dropped, and its sender told so once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Delta, Finished, NeedImages, PromptScores, Tokens
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.errors import RequestFailed, from_info
from hydra_engine.front.dispatch import Dispatcher
from hydra_engine.front.flights import EarlyToken, Flight, Job
from hydra_engine.front.lending import Lending


class Incoming:
    """Part of the front; `name` is the instance that a message came from."""

    def __init__(self, dispatcher: Dispatcher, lending: Lending) -> None:
        self._dispatcher = dispatcher
        self._lending = lending
        self._holders = dispatcher.holders

    # ---- tokens

    def on_tokens(self, name: str, message: Tokens, now: float) -> None:
        columns = message.request_ids, message.positions, message.token_ids
        find, time_s = self._holders.find, message.time_s
        for number, position, token_id in zip(*columns, strict=True):
            flight = find(RequestId(number))
            if flight is None or not flight.goes_on(name, number, position):
                self._take(name, RequestId(number), position, (token_id,), time_s, (), now)
            else:
                self._feed_next(flight, token_id, time_s, now)

    def on_delta(self, name: str, delta: Delta, now: float) -> None:
        self._take(name, delta.request_id, delta.position, delta.token_ids, delta.time_s, delta.logprobs, now)

    def on_scores(self, name: str, scores: PromptScores) -> None:
        flight = self._holders.find(scores.request_id)
        if flight is None or scores.request_id != flight.attempt or name not in flight.parts:
            self._holders.stray(name, scores.request_id)
        elif not flight.closing:
            flight.active.on_scores(scores.start, scores.logprobs)

    def _take(
        self,
        name: str,
        number: RequestId,
        position: int,
        token_ids: Sequence[int],
        time_s: float,
        logprobs: Sequence[TokenLogprobs],
        now: float,
    ) -> None:
        flight = self._holders.find(number)
        if flight is None or number != flight.attempt or name not in flight.parts:
            self._holders.stray(name, number)
            return
        if flight.closing:
            return
        if name == flight.decoder:
            flight.decoder_spoke = True
        if position == flight.num_known:
            self._feed(flight, token_ids, time_s, logprobs, now)
        elif not self._keep(flight, position, token_ids, time_s, logprobs):
            error = RequestFailed("an instance contradicted tokens that had been sent before; the request was ended")
            self._dispatcher.fail(flight, error, now)
            return
        if flight.early and not flight.closing:
            self._feed_early(flight, now)
            if flight.early and flight.parts == {flight.decoder}:
                self._dispatcher.fail(flight, _skipped(), now)
                return
        if flight.decoder_spoke:
            self._dispatcher.suspects.spoke(flight)
        if flight.victim == name and not flight.closing:
            self._lending.victim_sent(flight, len(token_ids))

    def _keep(
        self,
        flight: Flight,
        position: int,
        token_ids: Sequence[int],
        time_s: float,
        logprobs: Sequence[TokenLogprobs],
    ) -> bool:
        """Tokens that do not come next: early ones are kept, known ones must be those of this attempt. False: they are
        not."""
        known = flight.active.token_ids
        for place, token_id in enumerate(token_ids, position):
            if place < len(known):
                if place < flight.base or known[place] != token_id:
                    return False
                continue
            index = place - position
            early = EarlyToken(token_id, time_s, tuple(logprobs[index : index + 1]))
            if flight.early.setdefault(place, early).token_id != token_id:
                return False
        return True

    def _feed_early(self, flight: Flight, now: float) -> None:
        while not flight.closing and (early := flight.early.pop(flight.num_known, None)) is not None:
            self._feed(flight, (early.token_id,), early.time_s, early.logprobs, now)

    def _feed(
        self,
        flight: Flight,
        token_ids: Sequence[int],
        time_s: float,
        logprobs: Sequence[TokenLogprobs],
        now: float,
    ) -> None:
        active, first = flight.active, not flight.prefilled
        if first and active.lacks_scores:
            self._dispatcher.fail(flight, _skipped(), now)
            return
        piece = active.on_tokens(flight.num_known, token_ids, time_s, logprobs)
        if first:
            flight.release_prefill()
        if flight.decode_charge is not None:
            flight.decode_charge.grow(len(token_ids))
        if piece is not None:
            active.handle.feed(piece)
        if active.stop_string is not None:
            self._dispatcher.close(flight, now)
        elif flight.final is not None:
            self._settle(flight, now)

    def _feed_next(self, flight: Flight, token_id: int, time_s: float, now: float) -> None:
        """What `_take` comes to for most tokens of all."""
        active = flight.active
        active.handle.feed(active.on_next_token(token_id, time_s))
        if flight.decode_charge is not None:
            flight.decode_charge.grow(1)
        if active.stop_string is not None:
            self._dispatcher.close(flight, now)

    # ---- the end of a part

    def on_finished(self, name: str, finished: Finished, now: float) -> None:
        number = finished.request_id
        flight = self._holders.find(number)
        if flight is not None and number == flight.attempt and name in flight.parts:
            self._part_ended(flight, name, finished, now)
        elif flight is not None and (job := flight.jobs.get(number)) is not None and job.name == name:
            self._job_ended(flight, job, finished, now)
        elif (owner := self._holders.ended(name, number)) is not None:
            # Of an attempt that was given up: it has cost time, but nothing of it was used.
            owner.reports.append(msgspec.structs.replace(finished, cached_tokens=0, cached_images=0))

    def _part_ended(self, flight: Flight, name: str, finished: Finished, now: float) -> None:
        flight.parts.discard(name)
        flight.reports.append(flight.report_of(name, finished))
        if flight.closing:
            self._dispatcher.conclude_if_idle(flight, now)
            return
        match finished.reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                flight.final = finished
                self._settle(flight, now)
            case Departure.MOVED:
                self._moved(flight, name, now)
            case Departure.RETURNED:
                flight.gave_way = True
                self._dispatcher.replay(flight, now)
            case Departure.WITHDRAWN:
                self._dispatcher.replay(flight, now)
            case _:
                self._fail(flight, finished, now)

    def _moved(self, flight: Flight, name: str, now: float) -> None:
        """Whoever has fetched it goes on; if that one is gone, or was never told, nobody does."""
        if flight.final is not None:
            self._settle(flight, now)
        elif name == flight.decoder or flight.decoder not in flight.parts:
            self._dispatcher.replay(flight, now)
        elif flight.early and flight.parts == {flight.decoder}:
            self._dispatcher.fail(flight, _skipped(), now)

    def _settle(self, flight: Flight, now: float) -> None:
        """The last token was sampled; some before it may still be on their way from another instance."""
        assert flight.final is not None
        if flight.num_known >= flight.final.num_generated:
            self._dispatcher.close(flight, now)
        elif not flight.parts:
            self._dispatcher.fail(flight, _skipped(), now)

    def _job_ended(self, flight: Flight, job: Job, finished: Finished, now: float) -> None:
        self._dispatcher.end_job(flight, job)
        # A picture that no encode was needed for is counted; the job has no prompt and no tokens.
        flight.reports.append(msgspec.structs.replace(finished, cached_tokens=0, late_gaps=0, num_gaps=0))
        if flight.closing:
            self._dispatcher.conclude_if_idle(flight, now)
        elif finished.reason == FinishReason.ERROR:
            self._fail(flight, finished, now)
        elif finished.reason != Departure.MOVED:
            self._dispatcher.encode_again(flight, [job], now)

    def _fail(self, flight: Flight, finished: Finished, now: float) -> None:
        error = from_info(finished.error) if finished.error else RequestFailed("the request ended without a reason")
        self._dispatcher.fail(flight, error, now)

    # ---- images

    def on_need(self, name: str, need: NeedImages, now: float) -> None:
        flight = self._holders.find(need.request_id)
        if flight is None or need.request_id != flight.attempt or name not in flight.parts:
            self._holders.stray(name, need.request_id)
            return
        if flight.closing:
            return
        for job in flight.jobs.values():
            job.pending.difference_update(need.indices)
        self._dispatcher.encode(flight, need.indices, now)


def _skipped() -> RequestFailed:
    return RequestFailed("an instance skipped tokens or their scores; the request was ended")
