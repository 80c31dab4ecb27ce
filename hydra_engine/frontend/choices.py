"""Several answers to one prompt behind one handle: their requests, when each starts, and how all of them end.

The first answer starts alone. At its first token the whole prompt's KV is in the prefix cache of the instance that
computed it; the other answers start there and prefill only the rest of the last block. Downstream each answer is an
ordinary request; if one fails, all fail. Does not know instances, messages or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hydra_engine.clock import Clock
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.outputs import Piece, Result, StageSpan
from hydra_engine.core.request import Request
from hydra_engine.errors import HydraError, RequestAborted
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.request import activate
from hydra_engine.frontend.transitions import Dispatcher
from hydra_engine.preprocess.preprocessor import SEED_MASK, Prepared
from hydra_engine.preprocess.text.tokenizer import Tokenizer


class Choices:
    """The running requests with more than one answer, by the user's request number."""

    def __init__(
        self, dispatcher: Dispatcher, config: SchedulerConfig, clock: Clock, next_id: Callable[[], RequestId]
    ) -> None:
        self.num_waiting = 0  # answers that are admitted and have not started
        self.dispatcher = dispatcher
        self.config = config
        self.clock = clock
        self._next_id = next_id
        self._open: dict[RequestId, _Group] = {}

    def submit(self, prepared: Prepared, handle: Handle, tokenizer: Tokenizer) -> None:
        """Starts the first answer, whose request has the user's number."""
        numbers = [prepared.request.id, *(self._next_id() for _ in range(prepared.request.sampling.n - 1))]
        group = self._open[numbers[0]] = _Group(self, prepared, handle, tokenizer, numbers)
        self.num_waiting += len(numbers)
        group.begin(0, 1)

    def cancel(self, number: RequestId) -> bool:
        """Cancels all answers of a request. False if no request with several answers has that number."""
        group = self._open.get(number)
        if group is not None:
            group.fail(RequestAborted("the request was cancelled"))
        return group is not None

    def remove(self, number: RequestId) -> None:
        del self._open[number]


class _Group:
    """The answers to one prompt. `numbers[i]` is the request of answer i."""

    def __init__(
        self, choices: Choices, prepared: Prepared, handle: Handle, tokenizer: Tokenizer, numbers: list[RequestId]
    ) -> None:
        self.handle = handle
        self._choices = choices
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._numbers = numbers
        sampling = prepared.request.sampling
        self._first_sampling = sampling.for_one_answer(scores_prompt=True)  # the prompt is scored once
        self._sampling = sampling.for_one_answer(scores_prompt=False)
        self._num_begun = 0
        self._submitted_s = choices.clock.now()
        self._first: Piece | None = None  # of answer 0
        self._results: dict[int, Result] = {}

    def begin(self, start: int, end: int) -> None:
        """Starts answers [start, end), until one of them fails. All but the first go to the instance that prefilled the
        first."""
        dispatcher, now = self._choices.dispatcher, self._choices.clock.now()
        first = dispatcher.requests.get(self._numbers[0])
        preferred = first.attempt.route.prefill if first is not None and first.attempt is not None else ""
        with dispatcher.instances.gathered():
            for index in range(start, end):
                if self.handle.done:
                    return
                self._num_begun += 1
                self._choices.num_waiting -= 1
                waited = StageSpan("prefill_wait", self._submitted_s, now, cause="first answer")
                spans = (waited,) if index else self._prepared.spans
                prepared = replace(self._prepared, request=self._request(index), spans=spans)
                active = activate(prepared, _Answer(self, index), self._tokenizer, self._choices.config)
                dispatcher.submit(active, prepared.pixels, now, preferred=preferred)

    def _request(self, index: int) -> Request:
        request = self._prepared.request
        sampling = self._sampling if index else self._first_sampling
        return replace(request, id=self._numbers[index], seed=(request.seed + index) & SEED_MASK, sampling=sampling)

    # ---- pieces and errors of answers

    def feed(self, index: int, piece: Piece) -> None:
        if self.handle.done:
            return  # it has failed
        if self._first is None:
            self._first = piece
        prompt_logprobs = self._first.prompt_logprobs
        if piece.prompt_token_ids:
            piece = replace(piece, prompt_logprobs=prompt_logprobs)
        if piece.result is not None:
            result = self._results[index] = replace(piece.result, prompt_logprobs=prompt_logprobs)
            piece = replace(piece, result=result)
        complete = len(self._results) == len(self._numbers)
        self.handle.show(replace(piece, index=index), self._joint() if complete else None)
        if complete:
            self._choices.remove(self._numbers[0])
        elif self._num_begun == 1:
            self.begin(1, len(self._numbers))

    def fail(self, error: HydraError) -> None:
        """Fails all answers, started or not."""
        if self.handle.done:
            return
        self.handle.fail(error)
        self._choices.num_waiting -= len(self._numbers) - self._num_begun
        self._choices.remove(self._numbers[0])
        for number in self._numbers[: self._num_begun]:
            self._choices.dispatcher.cancel(number, self._choices.clock.now())

    def _joint(self) -> Result:
        answers = tuple(self._results[index] for index in range(len(self._numbers)))
        num_tokens = sum(answer.usage.completion_tokens for answer in answers)
        return replace(answers[0], choices=answers, usage=replace(answers[0].usage, completion_tokens=num_tokens))


class _Answer:
    def __init__(self, group: _Group, index: int) -> None:
        self.id = f"{group.handle.id}:{index}" if index else group.handle.id
        self._group = group
        self._index = index

    @property
    def done(self) -> bool:
        return self._group.handle.done

    @property
    def takes_pieces(self) -> bool:
        return self._group.handle.takes_pieces

    def feed(self, piece: Piece) -> None:
        self._group.feed(self._index, piece)

    def fail(self, error: HydraError) -> None:
        self._group.fail(error)
