"""What a result means for the requests of its plan: features, progress, tokens, and who has ended.

The one place where requests make progress. Does not plan, and does not forget anybody: it names those that have ended,
and the scheduler lets them go when no plan names them any more.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Delta, PromptScores, RequestMessage, Tokens
from hydra_engine.core.outputs import FinishReason, StageSpan
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
from hydra_engine.scheduler.decodes import NewTokens
from hydra_engine.scheduler.request_table import RequestTable
from hydra_engine.scheduler.timeline import StepTimes


class Progress:
    def __init__(self, requests: RequestTable, times: StepTimes) -> None:
        self._requests = requests
        self._times = times
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.images_encoded = 0

    # ---- vision

    def encoded(self, plan: VisionPlan, result: VisionResult) -> list[RequestState]:
        """Returns the requests of the plan, for some may have ended before or now."""
        requests = self._requests
        patches: dict[RequestId, int] = {}
        sharing: dict[RequestId, RequestState] = {}
        for item, error in zip(plan.items, result.errors, strict=True):
            patches[item.request_id] = patches.get(item.request_id, 0) + item.num_patches
            state = requests.states[item.request_id]
            if error is None:
                self.images_encoded += 1
            elif state.ending is None:
                requests.end(state, Ending(FinishReason.ERROR, error=error))
            key = state.image_keys[item.image_index]
            users = requests.images.finish(key, result.ended_s, failed=error is not None)
            sharing |= {user.request.id: user for user in users}
        for request_id, count in patches.items():
            state = requests.states[request_id]
            state.plans_in_flight -= 1
            timeline = requests.timelines[request_id]
            more = state.ending is None and state.needs_encode
            timeline.encoded(result.started_s, result.ended_s, batch=len(patches), patches=count, more=more)
            if not more and not state.num_scheduled and not state.needs_pull:
                timeline.images_ready(result.ended_s)
        requests.images.settle_others(sharing.values(), patches, result.ended_s)
        return [requests.states[request_id] for request_id in patches]

    # ---- language

    def computed(self, plan: LanguagePlan, result: LanguageResult) -> tuple[list[RequestMessage], list[RequestState]]:
        """The tokens, and the requests of the plan that have ended, before or now."""
        failures, logprobs = dict(result.failures), dict(result.logprobs)
        tokens = Tokens([], [], [], result.ended_s)
        messages: list[RequestMessage] = []
        ended = self._decodes(plan, result, tokens, messages, failures, logprobs)
        for row, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            state = self._requests.states[chunk.request_id]
            state.plans_in_flight -= 1
            state.num_scheduled -= len(chunk.token_ids)
            more, count = not chunk.sample, len(chunk.token_ids)
            timeline = self._requests.timelines[chunk.request_id]
            timeline.prefilled(result.started_s, result.ended_s, batch=plan.num_rows, tokens=count, more=more)
            if state.ending is None:
                token_id = int(result.token_ids[row])
                late = self._chunk(state, chunk, token_id, failures.get(row), result.ended_s)
                if late is not None:
                    tokens.late[chunk.request_id] = late
                if chunk.sample and row not in failures:
                    _tell(chunk.request_id, chunk.num_generated, token_id, logprobs.get(row), tokens, messages)
            if state.ending is not None:
                ended.append(state)
        if tokens.request_ids:
            messages.insert(0, tokens)
        return [*self._scores(plan, result, failures), *messages], ended

    def _scores(self, plan: LanguagePlan, result: LanguageResult, failures: Container[int]) -> Iterator[PromptScores]:
        """Of chunks that came back sound, whatever else has become of their requests."""
        for row, logprobs in result.scores:
            chunk = plan.chunks[row - len(plan.decodes)]
            if row not in failures:
                yield PromptScores(chunk.request_id, chunk.start + 1, logprobs)

    def _chunk(
        self, state: RequestState, chunk: ChunkRow, token_id: int, error: ErrorInfo | None, ended_s: float
    ) -> StageSpan | None:
        """Returns the gap before its token if that came late."""
        late = None
        if error is not None:
            self._requests.end(state, Ending(FinishReason.ERROR, error=error))
            return None
        state.num_prefilled += len(chunk.token_ids)
        if chunk.images:
            self._requests.images.consume(state, ended_s)
        if chunk.sample:
            assert token_id >= 0, "a row that samples came back without a token"
            if state.num_generated == len(state.request.generated_token_ids):
                self.prompt_tokens += max(0, state.request.num_prompt - state.cached_tokens)
            self.generation_tokens += 1
            state.generated.append(token_id)
            late = self._sampled(state, chunk.seq_slot, token_id, ended_s)
            self._requests.prefixes.publish_later(state)
            if (ending := state.ending_with(token_id)) is not None:
                self._requests.end(state, ending)
        if state.ending is None:
            self._requests.connector.on_computed(state, ended_s, sampled=chunk.sample)
            self._requests.requeue(state)
        return late

    def _sampled(self, state: RequestState, seq_slot: int, token_id: int, ended_s: float) -> StageSpan | None:
        """The times of the token that ends a prefill; where the request goes on here, the table of decodes keeps them.
        Returns the gap before it if it came late."""
        gap_s = self._times.gap_s
        if Role.D in state.stages:
            since_s = self._requests.decodes.read_chunk(seq_slot, token_id, ended_s, gap_s)
        else:
            since_s = self._requests.timelines[state.request.id].prefill_sampled(ended_s, gap_s)
        return None if since_s is None else self._explained(state, since_s, ended_s)

    def _decodes(
        self,
        plan: LanguagePlan,
        result: LanguageResult,
        tokens: Tokens,
        messages: list[RequestMessage],
        failures: dict[int, ErrorInfo],
        logprobs: dict[int, TokenLogprobs],
    ) -> list[RequestState]:
        """Returns those that have ended."""
        rows, table = plan.decodes, self._requests.decodes
        if not len(rows):
            return []
        for row, error in failures.items():
            if row < len(rows) and table.is_member(int(rows.seq_slots[row])):
                state = self._requests.states[RequestId(int(rows.request_ids[row]))]
                self._requests.end(state, Ending(FinishReason.ERROR, error=error))
        token_ids, batch = result.token_ids[: len(rows)], plan.num_rows
        back = table.take_back(rows, token_ids, ended_s=result.ended_s, batch=batch, gap_s=self._times.gap_s)
        self.generation_tokens += len(back.token_ids)
        for state, since_s in back.late:
            gap = tokens.late[state.request.id] = self._explained(state, since_s, result.ended_s)
            table.resume(self._requests.seq_slots.of(state.request.id), gap.end_s)
        self._requests.prefixes.publish_all_later(back.filled)
        self._tell_all(back, tokens, messages, logprobs)
        for state, ending in back.ended:
            self._requests.end(state, ending)
        ended = [state for state, _ in back.ended]
        if back.live is not None:
            ended += [self._requests.states[RequestId(number)] for number in rows.request_ids[~back.live].tolist()]
        return ended

    def _explained(self, state: RequestState, since_s: float, ended_s: float) -> StageSpan:
        """The gap before a token that came late, as its timeline tells it."""
        timeline = self._requests.timelines[state.request.id]
        limit_s = timeline.limit_s if timeline.limit_s < math.inf else self._times.gap_s
        causes = self._requests.observer.explain(state.request.id, since_s, ended_s, limit_s)
        return timeline.gap(since_s, max(since_s, ended_s - self._times.typical_s), causes)

    def _tell_all(
        self, back: NewTokens, tokens: Tokens, messages: list[RequestMessage], logprobs: dict[int, TokenLogprobs]
    ) -> None:
        if not logprobs:
            tokens.request_ids.extend(back.request_ids)
            tokens.positions.extend(back.positions)
            tokens.token_ids.extend(back.token_ids)
            return
        rows = range(len(back.token_ids)) if back.live is None else back.live.nonzero()[0].tolist()
        for row, *token in zip(rows, back.request_ids, back.positions, back.token_ids, strict=True):
            _tell(RequestId(token[0]), token[1], token[2], logprobs.get(row), tokens, messages)


def _tell(
    request_id: RequestId,
    position: int,
    token_id: int,
    logprobs: TokenLogprobs | None,
    tokens: Tokens,
    messages: list[RequestMessage],
) -> None:
    """Tokens with log probabilities travel alone, all others of a step together."""
    if logprobs is not None:
        late = tokens.late.pop(request_id, None)
        messages.append(Delta(request_id, position, (token_id,), tokens.time_s, (logprobs,), late))
        return
    tokens.request_ids.append(request_id)
    tokens.positions.append(position)
    tokens.token_ids.append(token_id)
