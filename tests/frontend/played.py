"""Instances that keep to the protocol between frontend and instance, played in one thread with channels of their own.

Each has an inbox and an outbox; nothing happens until the test says what happens next, so messages of different
instances meet the frontend in any order. The model is `rig.token`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import (
    Abort,
    Encode,
    Finished,
    HandOver,
    NeedDecoder,
    NeedImages,
    Submit,
    ToFrontend,
    ToInstance,
    Tokens,
)
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.request import Request
from tests.frontend.rig import token


@dataclass
class Part:
    request: Request
    stages: str
    source: str
    missing: set[int]
    tokens: list[int]
    target: str = ""
    asked: bool = False
    asked_decoder: bool = False
    decodes: bool = False
    offered: bool = False


@dataclass
class Played:
    name: str
    inbox: deque[ToInstance] = field(default_factory=deque)
    outbox: deque[ToFrontend] = field(default_factory=deque)
    parts: dict[RequestId, Part] = field(default_factory=dict)
    jobs: dict[RequestId, Encode] = field(default_factory=dict)
    aborted: set[RequestId] = field(default_factory=set)

    @property
    def idle(self) -> bool:
        return not (self.inbox or self.outbox or self.parts or self.jobs)

    def awaits(self, number: RequestId) -> bool:
        """A part of it is on its way here; until then an offer for it is kept."""
        return any(isinstance(message, Submit) and message.request.id == number for message in self.inbox)

    # ---- messages

    def receive(self) -> None:
        match self.inbox.popleft():
            case Submit(request, _, stages, remote, source):
                assert request.id not in self.parts, "an id was given twice"
                self.aborted.discard(request.id)  # it may come back to where it was aborted once
                tokens = list(request.generated_token_ids)
                self.parts[request.id] = Part(request, stages, source, set(remote), tokens)
            case Encode() as job:
                assert job.request.id not in self.jobs
                assert len(job.pixels) == len(job.indices) == len(job.request.images)
                self.jobs[job.request.id] = job
            case HandOver(request_id, target):
                part = self.parts.get(request_id)
                if part is not None and part.decodes:
                    part.target, part.offered, part.decodes = target, True, False
                elif part is not None and "D" not in part.stages:
                    part.target = target
            case Abort(request_id):
                self.aborted.add(request_id)
                known = self.parts.pop(request_id, None) or self.jobs.pop(request_id, None)
                if known is not None:
                    self.outbox.append(Finished(request_id, FinishReason.ABORT.value, 0))
            case other:
                raise AssertionError(other)

    def end(self, number: RequestId, reason: FinishReason | Departure) -> None:
        part = self.parts.pop(number, None)
        self.jobs.pop(number, None)
        num_generated = 0 if part is None else len(part.tokens)
        self.outbox.append(Finished(number, reason.value, num_generated))

    # ---- work

    def work(self, number: RequestId, others: dict[str, Played]) -> None:
        """Runs one step of a part or job."""
        if (job := self.jobs.get(number)) is not None:
            self.encode(number, job, others)
            return
        part = self.parts[number]
        if "D" not in part.stages and not part.asked_decoder:
            part.asked_decoder = True
            self.outbox.append(NeedDecoder(number))
        elif part.offered:
            self.hand_over(number, part, others)
        elif part.missing:
            if not part.asked:
                part.asked = True
                self.outbox.append(NeedImages(number, tuple(sorted(part.missing))))
        elif part.decodes or "P" in part.stages:
            self.sample(number, part)

    def sample(self, number: RequestId, part: Part) -> None:
        position = len(part.tokens)
        part.tokens.append(token(part.request.arrival_index, position))
        self.outbox.append(Tokens([number], [position], [part.tokens[-1]], 0.0))
        if len(part.tokens) >= part.request.max_new_tokens:
            self.end(number, FinishReason.LENGTH)
        elif "D" in part.stages:
            part.decodes = True
        else:
            part.offered = True

    def encode(self, number: RequestId, job: Encode, others: dict[str, Played]) -> None:
        target = others.get(job.target)
        if target is None:  # nobody is there to fetch the features
            self.end(number, Departure.WITHDRAWN)
            return
        part = target.parts.get(job.target_request)
        if part is not None:
            part.missing.difference_update(job.indices)
        self.end(number, Departure.MOVED)

    def hand_over(self, number: RequestId, part: Part, others: dict[str, Played]) -> None:
        target = others.get(part.target)
        if target is None:
            return
        theirs = target.parts.get(number)
        if theirs is None:
            if number in target.aborted and not target.awaits(number):
                self.end(number, Departure.MOVED)  # refused
            return
        assert theirs.source == self.name and theirs.stages == "D"
        assert part.tokens[: len(theirs.tokens)] == theirs.tokens, "the target got other tokens"
        theirs.tokens = list(part.tokens)
        theirs.decodes = True
        self.end(number, Departure.MOVED)
