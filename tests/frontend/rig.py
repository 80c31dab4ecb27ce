"""A dispatcher without processes: tests read what it sends to each instance and say what instances answer.

Time is virtual. Requests are real ones with real handles and a real detokenizer; only the instances are played.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.instances import Topology
from hydra_engine.core.messages import (
    Abort,
    Encode,
    Finished,
    HandOver,
    NeedDecoder,
    NeedImages,
    PixelPayload,
    Submit,
    ToInstance,
    Tokens,
)
from hydra_engine.core.outputs import DelayCause, Departure, FinishReason, Result, StageSpan
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ErrorInfo, HydraError
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.reports import StatusTable
from hydra_engine.frontend.request import ActiveRequest
from hydra_engine.frontend.routing.decode_stealing import DecodeStealing
from hydra_engine.frontend.transitions import Dispatcher
from hydra_engine.preprocess.text.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.virtual_clock import VirtualClock

FIRST_TOKEN = 40  # of the demo model's vocabulary: a plain character
EOS = 2
IMAGE_TOKENS = 4


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(EngineConfig().model_path)


def make_request(
    number: int, *, images: Sequence[int] = (), max_new: int = 4, prompt: int = 8, stop: tuple[str, ...] = ()
) -> Request:
    """`images` are their patches; a picture is known by its request and place."""
    items = tuple(
        ImageItem(
            digest=ImageDigest(bytes([number % 256, index]) * 16),
            width=8,
            height=8,
            num_patches=patches,
            num_tokens=IMAGE_TOKENS,
            start=1 + index * IMAGE_TOKENS,
            grid=(1, 2, 2),
            source=index,
        )
        for index, patches in enumerate(images)
    )
    return Request(
        id=RequestId(number),
        prompt_token_ids=tuple(range(10, 10 + prompt + IMAGE_TOKENS * len(items))),
        sampling=SamplingParams(temperature=0, stop=stop),
        max_new_tokens=max_new,
        seed=0,
        arrival_s=0.0,
        images=items,
        eos_token_ids=(EOS,),
        arrival_index=number,
    )


def token(request_age: int, position: int) -> int:
    """The token of the played model, a function of request and position only."""
    return FIRST_TOKEN + (7 * request_age + 3 * position) % 26


class Rig:
    """A frontend with played instances. With `prefills_at_once` an instance asks at once where a request that it
    prefills goes on, and the answers are in `bound`, not in `sent`."""

    def __init__(self, topology: str, *, up: bool = True, prefills_at_once: bool = True, **cluster: Any) -> None:
        self.clock = VirtualClock(100.0)
        self.config = EngineConfig(topology=topology, cluster=ClusterConfig(**cluster))
        parsed = Topology.parse(topology)
        self.roles = {name: spec.role for name, spec in zip(parsed.names, parsed.instances, strict=True)}
        self.sent: dict[str, list[ToInstance]] = {name: [] for name in self.roles}
        self.bound: dict[int, str] = {}
        self._asking: set[int] = set()
        self._prefills_at_once = prefills_at_once
        self.results: list[tuple[int, Result]] = []
        self.handles: dict[int, Handle] = {}
        self._ids = itertools.count(1000)
        self.dispatcher = Dispatcher(
            self.config, self.roles, send=self._send, next_id=lambda: RequestId(next(self._ids)), report=self._report
        )
        self.stealing = DecodeStealing(self.config, self.dispatcher)
        self.statuses = StatusTable()
        if up:
            for name in self.roles:
                self.up(name)

    def _send(self, name: str, messages: Sequence[ToInstance]) -> None:
        for message in messages:
            if isinstance(message, HandOver) and message.request_id in self._asking:
                self._asking.remove(message.request_id)
                self.bound[message.request_id] = message.target
                continue
            self.sent[name].append(message)
            if self._prefills_at_once and isinstance(message, Submit) and "D" not in message.stages:
                self._asking.add(message.request.id)
                self.dispatcher.on_message(name, NeedDecoder(message.request.id), self.now)

    def _report(self, active: ActiveRequest, result: Result) -> None:
        self.results.append((active.request.arrival_index, result))

    @property
    def now(self) -> float:
        return self.clock.now()

    # ---- the cluster

    def up(self, name: str) -> None:
        self.dispatcher.on_up(name, self.now)
        for other in self.roles:
            if other != name and self.dispatcher.instances[other].is_up:
                self.dispatcher.on_pair(name, other, True, self.now)

    def down(self, name: str, *, restarts: bool = True) -> None:
        """Reports a death as the supervisor does: the pairs first."""
        self.sent[name].clear()
        self.statuses.forget(name)
        for other in sorted(self.dispatcher.instances[name].pairs):
            self.dispatcher.on_pair(name, other, False, self.now)
        self.dispatcher.on_down(name, self.now, restarts=restarts)

    def silent(self, name: str, silent: bool = True, for_s: float = 0.0) -> None:
        self.dispatcher.on_silent(name, self.now - for_s if silent else None, self.now)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.dispatcher.tick(self.now)
        self.stealing.tick(self.now)

    # ---- requests

    def submit(self, number: int, **options: Any) -> Handle:
        request = make_request(number, **options)
        handle = Handle(f"r{number}", lambda: self.dispatcher.cancel(RequestId(number), self.now))
        self.handles[number] = handle
        detokenizer = IncrementalDetokenizer(tokenizer(), request.sampling)
        active = ActiveRequest(request, handle, tokenizer(), detokenizer, ())
        pixels = tuple(PixelPayload(image.digest, 8, 8, bytes(192)) for image in request.images)
        self.dispatcher.submit(active, pixels, self.now)
        return handle

    # ---- what was sent

    def take(self, name: str) -> list[ToInstance]:
        messages, self.sent[name] = self.sent[name], []
        return messages

    def submitted(self, name: str) -> Submit:
        """The only message for that instance."""
        message = self._only(name)
        assert isinstance(message, Submit), message
        return message

    def encode(self, name: str) -> Encode:
        message = self._only(name)
        assert isinstance(message, Encode), message
        return message

    def _only(self, name: str) -> ToInstance:
        messages = self.take(name)
        assert len(messages) == 1, messages
        return messages[0]

    def aborted(self, name: str) -> list[int]:
        messages = self.take(name)
        assert all(isinstance(message, Abort) for message in messages), messages
        return [message.request_id for message in messages if isinstance(message, Abort)]

    # ---- what instances say

    def say(self, name: str, number: int, position: int, *token_ids: int, late: StageSpan | None = None) -> None:
        """`late`: the gap before the first one."""
        for at, token_id in enumerate(token_ids, position):
            gaps = {} if late is None or at > position else {number: late}
            self.dispatcher.on_message(name, Tokens([number], [at], [token_id], self.now, gaps), self.now)

    def speak(self, name: str, request: Request, *positions: int, late: Sequence[str] = ()) -> None:
        """The right tokens at these positions; the first ones came late, 20 ms behind those before, because of that."""
        for position, kind in itertools.zip_longest(positions, late):
            gap = None
            if kind is not None:
                blame = (DelayCause(kind, 0.02),)
                gap = StageSpan("decode_wait", self.now - 0.02, self.now, name, "language", blame=blame)
            self.say(name, request.id, position, token(request.arrival_index, position), late=gap)

    def finish(
        self, name: str, number: int, reason: FinishReason | Departure, num_generated: int = 0, **fields: Any
    ) -> None:
        spans = (StageSpan("decode", self.now, self.now, name, "language"),)
        message = Finished(RequestId(number), reason.value, num_generated, **{"spans": spans, **fields})
        self.dispatcher.on_message(name, message, self.now)

    def refuse(self, name: str, number: int, kind: str = "RequestTooLarge") -> None:
        self.finish(name, number, FinishReason.ERROR, error=ErrorInfo(kind, "told"))

    def need(self, name: str, number: int, *indices: int) -> None:
        self.dispatcher.on_message(name, NeedImages(RequestId(number), indices), self.now)

    # ---- what came out

    def error(self, number: int) -> HydraError | None:
        error = next((result.error for arrival_index, result in self.results if arrival_index == number), None)
        assert error is None or isinstance(error, HydraError)
        return error

    def assert_done(self, number: int, num_tokens: int) -> Result:
        """Checks that it ended once, with the right tokens, each of which the handle's reader has seen once."""
        (result,) = [result for arrival_index, result in self.results if arrival_index == number]
        assert result.error is None, result.error
        assert result.token_ids == tuple(token(number, position) for position in range(num_tokens))
        shown = [piece.token_ids for piece in self.handles[number]]
        assert tuple(itertools.chain(*shown)) == result.token_ids
        return result

    def assert_at_rest(self) -> None:
        """Checks that no request, block or slot is counted any more."""
        assert not self.dispatcher.requests
        assert not self.dispatcher.by_id
        for instance in self.dispatcher.instances.values():
            loads = instance.prefill_tokens, instance.decodes, instance.decode_tokens, instance.patches
            assert loads == (0, 0, 0, 0), (instance.name, loads)
            expected = instance.expected_decodes, instance.expected_tokens, instance.arriving_tokens
            assert expected == (0, 0, 0), (instance.name, expected)
