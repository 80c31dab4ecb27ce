"""Applies a result to the requests of its plan: features, progress, tokens, and endings.

The only place where requests make progress. Plans nothing. A request that has ended is forgotten (`finish`) when no
plan in flight names it any more.
"""

from __future__ import annotations

import math
from collections import deque

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Delta, Finished, PromptScores, RequestMessage, Tokens
from hydra_engine.core.outputs import FinishReason, StageSpan
from hydra_engine.core.plans import ChunkRow, LanguagePlan, VisionPlan
from hydra_engine.core.results import LanguageResult, TokenLogprobs, VisionResult
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.errors import ErrorInfo
from hydra_engine.scheduler.requests import RequestTable
from hydra_engine.scheduler.step_stats import StepTimes
from hydra_engine.scheduler.timeline import anonymise


class _StepOutput:
    """The messages of a language step: one Delta for each token with log probabilities, one Tokens for all others."""

    __slots__ = "deltas", "logprobs", "tokens"

    def __init__(self, ended_s: float, logprobs: dict[int, TokenLogprobs]) -> None:
        self.tokens = Tokens([], [], [], ended_s)
        self.logprobs = logprobs  # by row
        self.deltas: list[Delta] = []

    def add(self, row: int, request_id: int, position: int, token_id: int) -> None:
        """Adds the token of a row. For a Delta, the gap before the token moves there from `tokens.late`."""
        if (logprobs := self.logprobs.get(row)) is not None:
            key = RequestId(request_id)
            late = self.tokens.late.pop(key, None)
            self.deltas.append(Delta(key, position, (token_id,), self.tokens.time_s, (logprobs,), late))
            return
        self.tokens.request_ids.append(request_id)
        self.tokens.positions.append(position)
        self.tokens.token_ids.append(token_id)


class ResultProcessor:
    """Applies results to requests, and counts tokens and images for the metrics."""

    def __init__(self, requests: RequestTable, times: StepTimes) -> None:
        self._requests = requests
        self._times = times
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.images_encoded = 0
        self.finish_times: deque[float] = deque(maxlen=32)  # when the latest requests were forgotten

    def finish(self, ended: list[RequestState], now: float) -> list[RequestMessage]:
        """Forgets each of these requests that has ended and that no plan in flight names; returns their Finished."""
        messages: list[RequestMessage] = []
        for state in ended:
            ending = state.ending
            if ending is None or self._requests.in_use(state):
                continue
            spans = self._requests.timelines[state.request.id].close(now)
            self._requests.forget(state)
            self.finish_times.append(now)
            messages.append(
                Finished(
                    request_id=state.request.id,
                    reason=ending.reason,
                    num_generated=state.num_generated,
                    stop_token_id=ending.stop_token_id,
                    error=ending.error,
                    spans=spans,
                    num_preemptions=state.num_preemptions,
                    cached_tokens=state.cached_tokens,
                    cached_images=state.cached_images,
                )
            )
        return messages

    # ---- vision

    def on_vision(self, plan: VisionPlan, result: VisionResult) -> list[RequestState]:
        """Records the encoded images, also for requests with the same picture, and ends requests whose image failed.
        Returns all requests of the plan, ended ones included."""
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
            timeline.add_encode(result.started_s, result.ended_s, batch=len(patches), patches=count, more=more)
            if not more and not state.num_scheduled and not state.needs_load:
                timeline.start_wait("queue", result.ended_s)
        requests.images.end_image_waits(sharing.values(), patches, result.ended_s)
        return [requests.states[request_id] for request_id in patches]

    # ---- language

    def on_language(
        self, plan: LanguagePlan, result: LanguageResult
    ) -> tuple[list[RequestMessage], list[RequestState]]:
        """Applies tokens, progress and failures. Returns the messages, and requests for `finish`, among them all of the
        plan that have ended, before or now."""
        failures, deferred = dict(result.failures), set(result.deferred)
        output = _StepOutput(result.ended_s, dict(result.logprobs))
        ended = self._decodes(plan, result, failures, output) if len(plan.decodes) else []
        for row, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            state, count = self._requests.states[chunk.request_id], len(chunk.token_ids)
            state.plans_in_flight -= 1
            state.num_scheduled -= count
            if row not in deferred:
                self._requests.timelines[chunk.request_id].add_prefill(
                    result.started_s, result.ended_s, batch=plan.num_rows, tokens=count, more=not chunk.sample
                )
            if state.ending is None:
                if (error := failures.get(row)) is not None:
                    self._requests.end(state, Ending(FinishReason.ERROR, error=error))
                elif row in deferred:
                    self._requests.defer(state)
                else:
                    token_id = int(result.token_ids[row])
                    late = self._chunk(state, chunk, token_id, result.ended_s)
                    if late is not None:
                        output.tokens.late[chunk.request_id] = late
                    if chunk.sample:
                        output.add(row, chunk.request_id, chunk.num_generated, token_id)
            if state.ending is not None:
                ended.append(state)
        messages: list[RequestMessage] = []
        for row, scores in result.scores:  # scores of chunks without a failure, even if their requests have ended
            if row not in failures:
                chunk = plan.chunks[row - len(plan.decodes)]
                messages.append(PromptScores(chunk.request_id, chunk.start + 1, scores))
        if output.tokens.request_ids:
            messages.append(output.tokens)
        return messages + output.deltas, ended

    def _chunk(self, state: RequestState, chunk: ChunkRow, token_id: int, ended_s: float) -> StageSpan | None:
        """Applies a computed chunk: its progress, consumed images and, if it samples, `token_id` (else -1). Ends the
        request if the token does, else requeues it. Returns the gap before the token if the token came late."""
        late = None
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
            self._requests.prefixes.publish_later([(state, state.num_computed // self._requests.kv.block_size)])
            if (ending := state.ending_with(token_id)) is not None:
                self._requests.end(state, ending)
        if state.ending is None:
            if state.connector_state is not None:
                self._requests.connector.on_computed(state, ended_s, sampled=chunk.sample)
            self._requests.requeue(state)
        return late

    def _sampled(self, state: RequestState, seq_slot: int, token_id: int, ended_s: float) -> StageSpan | None:
        """Records the time of the token that ends a prefill, in the table of decodes if the request decodes here.
        Returns the gap before the token, added to the timeline, if it came late."""
        gap_s = self._times.gap_s
        if Role.D in state.stages:
            since_s = self._requests.decodes.read_chunk(seq_slot, token_id, ended_s, gap_s)
        else:
            since_s = self._requests.timelines[state.request.id].add_prefill_token(ended_s, gap_s)
        return None if since_s is None else self._explained(state, since_s, ended_s)

    def _decodes(
        self, plan: LanguagePlan, result: LanguageResult, failures: dict[int, ErrorInfo], output: _StepOutput
    ) -> list[RequestState]:
        """Applies the results of the decode rows to `output` and the requests; ends those that failed or that a token
        ends. Returns these, and the requests of rows without a new token: ended or moved on before, or deferred."""
        rows, requests, table = plan.decodes, self._requests, self._requests.decodes
        for row, error in failures.items():
            if row < len(rows) and table.is_member(int(rows.seq_slots[row])):
                state = requests.states[RequestId(int(rows.request_ids[row]))]
                requests.end(state, Ending(FinishReason.ERROR, error=error))
        new = table.on_results(
            rows,
            result.token_ids[: len(rows)],
            ended_s=result.ended_s,
            batch=plan.num_rows,
            gap_s=self._times.gap_s,
            deferred=[row for row in result.deferred if row < len(rows)],
        )
        self.generation_tokens += len(new.token_ids)
        for state, since_s in new.late:
            gap = output.tokens.late[state.request.id] = self._explained(state, since_s, result.ended_s)
            table.times.resume(table.index_of(requests.seq_slots.slot_of[state.request.id]), gap.end_s)
        requests.prefixes.publish_later(new.filled)
        if output.logprobs:
            live = range(len(new.token_ids)) if new.live is None else new.live.nonzero()[0].tolist()
            for row, *token in zip(live, new.request_ids, new.positions, new.token_ids, strict=True):
                output.add(row, *token)
        else:
            output.tokens.request_ids.extend(new.request_ids)
            output.tokens.positions.extend(new.positions)
            output.tokens.token_ids.extend(new.token_ids)
        for state, ending in new.ended:
            requests.end(state, ending)
        ended = [state for state, _ in new.ended]
        if new.live is not None:
            ended += [requests.states[RequestId(number)] for number in rows.request_ids[~new.live].tolist()]
        return ended

    def _explained(self, state: RequestState, since_s: float, ended_s: float) -> StageSpan:
        """Adds the gap before a late token, with its causes, to the request's timeline, and returns its span. Causes
        name no other request if this one has a cache salt."""
        timeline = self._requests.timelines[state.request.id]
        tpot_limit_s = timeline.tpot_limit_s if timeline.tpot_limit_s < math.inf else self._times.gap_s
        causes = self._requests.observer.explain(state.request.id, since_s, ended_s, tpot_limit_s)
        if state.request.cache_salt:  # an isolated client: it must not learn of other requests
            causes = anonymise(causes)
        return timeline.gap(since_s, max(since_s, ended_s - self._times.typical_s), causes)
