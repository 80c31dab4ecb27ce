"""What a result means for the requests of its plan: features, progress, tokens, and who has ended.

The one place where requests make progress. Does not plan, and does not forget anybody: it names those that have ended,
and the scheduler lets them go when no plan names them any more.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import (
    ChunkRow,
    LanguagePlan,
    LanguageResult,
    TokenLogprobs,
    VisionPlan,
    VisionResult,
)
from hydra_engine.core.roles import Role
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.errors import ErrorInfo
from hydra_engine.scheduler.blame import sentence
from hydra_engine.scheduler.book import RequestBook
from hydra_engine.scheduler.decodes import TakenBack
from hydra_engine.scheduler.events import Event, ScoresEvent, TokenEvent, TokensEvent
from hydra_engine.scheduler.timeline import StepTimes


class Progress:
    def __init__(self, book: RequestBook, times: StepTimes) -> None:
        self._book = book
        self._times = times
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.images_encoded = 0

    # ---- vision

    def encoded(self, plan: VisionPlan, result: VisionResult) -> list[RequestState]:
        """Returns the requests of the plan, for some may have ended before or now."""
        book = self._book
        outcomes = {(outcome.request_id, outcome.image_index): outcome for outcome in result.outcomes}
        patches: dict[RequestId, int] = {}
        sharing: dict[RequestId, RequestState] = {}
        for item in plan.items:
            patches[item.request_id] = patches.get(item.request_id, 0) + item.num_patches
            state = book.states[item.request_id]
            error = outcomes[item.request_id, item.image_index].error
            if error is None:
                self.images_encoded += 1
            elif state.ending is None:
                book.end(state, Ending(FinishReason.ERROR, error=error))
            key = state.image_keys[item.image_index]
            users = book.images.finish(key, result.ended_s, failed=error is not None)
            sharing |= {user.request.id: user for user in users}
        for request_id, count in patches.items():
            state = book.states[request_id]
            state.plans_in_flight -= 1
            timeline = book.timelines[request_id]
            more = state.ending is None and state.needs_encode
            timeline.encoded(result.started_s, result.ended_s, batch=len(patches), patches=count, more=more)
            if not more and not state.num_scheduled and not state.needs_pull:
                timeline.images_ready(result.ended_s)
        self._shared(sharing, patches, result.ended_s)
        return [book.states[request_id] for request_id in patches]

    def _shared(self, users: Mapping[RequestId, RequestState], own: Container[RequestId], now: float) -> None:
        """Others had the same picture; some of them may have waited for nothing else."""
        for request_id, state in users.items():
            if request_id not in own and state.ending is None and not state.waits_for_images:
                self._book.images.settled(state, now)

    # ---- transfer

    def pulled(self, state: RequestState, index: int, started_s: float, ended_s: float, *, valid: bool) -> None:
        """Features of an image have been copied, or turned out not to be there any more."""
        key, num_tokens = state.image_keys[index], state.request.images[index].num_tokens
        timeline = self._book.timelines[state.request.id]
        timeline.pulled("pull_features", started_s, ended_s, num_tokens)
        if valid:
            state.images_asked.discard(index)
        users = self._book.images.finish(key, ended_s, failed=not valid)
        self._shared({user.request.id: user for user in users}, (), ended_s)

    # ---- language

    def computed(self, plan: LanguagePlan, result: LanguageResult) -> tuple[list[Event], list[RequestState]]:
        """The tokens, and the requests of the plan that have ended, before or now."""
        failures, logprobs = dict(result.failures), dict(result.logprobs)
        tokens = TokensEvent([], [], [])
        events: list[Event] = []
        ended = self._decodes(plan, result, tokens, events, failures, logprobs)
        for row, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            state = self._book.states[chunk.request_id]
            state.plans_in_flight -= 1
            state.num_scheduled -= len(chunk.token_ids)
            more, count = not chunk.sample, len(chunk.token_ids)
            timeline = self._book.timelines[chunk.request_id]
            timeline.prefilled(result.started_s, result.ended_s, batch=plan.num_rows, tokens=count, more=more)
            if state.ending is None:
                token_id = int(result.token_ids[row])
                self._chunk(state, chunk, token_id, failures.get(row), result.ended_s)
                if chunk.sample and row not in failures:
                    _tell(chunk.request_id, chunk.num_generated, token_id, logprobs.get(row), tokens, events)
            if state.ending is not None:
                ended.append(state)
        if tokens.request_ids:
            events.insert(0, tokens)
        return [*self._scores(plan, result, failures), *events], ended

    def _scores(self, plan: LanguagePlan, result: LanguageResult, failures: Container[int]) -> Iterator[ScoresEvent]:
        """Of chunks that came back sound, whatever else has become of their requests."""
        for row, logprobs in result.scores:
            chunk = plan.chunks[row - len(plan.decodes)]
            if row not in failures:
                yield ScoresEvent(chunk.request_id, chunk.start + 1, logprobs)

    def _chunk(
        self, state: RequestState, chunk: ChunkRow, token_id: int, error: ErrorInfo | None, ended_s: float
    ) -> None:
        if error is not None:
            self._book.end(state, Ending(FinishReason.ERROR, error=error))
            return
        state.num_prefilled += len(chunk.token_ids)
        if chunk.images:
            self._book.images.consume(state, ended_s)
        if chunk.sample:
            assert token_id >= 0, "a row that samples came back without a token"
            if state.num_generated == len(state.request.generated_token_ids):
                self.prompt_tokens += max(0, state.request.num_prompt - state.cached_tokens)
            self.generation_tokens += 1
            state.generated.append(token_id)
            self._sampled(state, chunk.seat, token_id, ended_s)
            self._book.prefixes.owe(state)
            if token_id in state.stop_ids:
                self._book.end(state, Ending(FinishReason.STOP, stop_token_id=token_id))
            elif state.num_generated >= state.request.max_new_tokens:
                self._book.end(state, Ending(FinishReason.LENGTH))
        if state.ending is None and Role.D not in state.part:
            self._book.offer_kv(state, ended_s, self._book.end_of_kv(state) if chunk.sample else None)
        if state.ending is None:
            self._book.place(state)

    def _sampled(self, state: RequestState, seat: int, token_id: int, ended_s: float) -> None:
        """The times of the token that ends a prefill; where the request goes on here, the table of decodes keeps
        them."""
        if Role.D in state.part:
            self._book.decodes.read_chunk(seat, token_id, ended_s)
            return
        timeline = self._book.timelines[state.request.id]
        timeline.last_token_s = ended_s
        if not timeline.first_token_s:
            timeline.first_token_s = ended_s

    def _decodes(
        self,
        plan: LanguagePlan,
        result: LanguageResult,
        tokens: TokensEvent,
        events: list[Event],
        failures: dict[int, ErrorInfo],
        logprobs: dict[int, TokenLogprobs],
    ) -> list[RequestState]:
        """Returns those that have ended."""
        rows, table = plan.decodes, self._book.decodes
        if not len(rows):
            return []
        for row, error in failures.items():
            if row < len(rows) and table.is_member(int(rows.seats[row])):
                state = self._book.states[RequestId(int(rows.request_ids[row]))]
                self._book.end(state, Ending(FinishReason.ERROR, error=error))
        token_ids, batch = result.token_ids[: len(rows)], plan.num_rows
        back = table.take_back(rows, token_ids, ended_s=result.ended_s, batch=batch, gap_s=self._times.gap_s)
        self.generation_tokens += len(back.token_ids)
        if back.late:
            self._explain(back, result.ended_s)
        self._book.prefixes.owe_all(back.filled)
        self._tell_all(back, tokens, events, logprobs)
        for state, stop_token_id in back.ended:
            reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
            self._book.end(state, Ending(reason, stop_token_id=stop_token_id))
        ended = [state for state, _ in back.ended]
        if back.live is not None:
            ended += [self._book.states[RequestId(number)] for number in rows.request_ids[~back.live].tolist()]
        return ended

    def _explain(self, back: TakenBack, ended_s: float) -> None:
        """The timelines of late tokens say what they waited for."""
        book = self._book
        for state, since_s in back.late:
            request_id = state.request.id
            blames = book.log.explain(request_id, since_s, ended_s)
            resumed_s = max(since_s, ended_s - self._times.typical_s)
            book.timelines[request_id].gap(since_s, resumed_s, sentence(blames), blames)
            book.decodes.resume(book.seats.of(request_id), resumed_s)

    def _tell_all(
        self, back: TakenBack, tokens: TokensEvent, events: list[Event], logprobs: dict[int, TokenLogprobs]
    ) -> None:
        if not logprobs:
            tokens.request_ids.extend(back.request_ids)
            tokens.positions.extend(back.positions)
            tokens.token_ids.extend(back.token_ids)
            return
        places = range(len(back.token_ids)) if back.live is None else back.live.nonzero()[0].tolist()
        for place, *token in zip(places, back.request_ids, back.positions, back.token_ids, strict=True):
            _tell(RequestId(token[0]), token[1], token[2], logprobs.get(place), tokens, events)


def _tell(
    request_id: RequestId,
    position: int,
    token_id: int,
    logprobs: TokenLogprobs | None,
    tokens: TokensEvent,
    events: list[Event],
) -> None:
    """Tokens with log probabilities travel alone, all others of a step together."""
    if logprobs is not None:
        events.append(TokenEvent(request_id, position, token_id, logprobs))
        return
    tokens.request_ids.append(request_id)
    tokens.positions.append(position)
    tokens.token_ids.append(token_id)
