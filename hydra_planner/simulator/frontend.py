"""Requests on the frontend's side of a simulation: tokens are counted and stamped, and become no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role
from hydra_engine.core.messages import Delta, Tokens
from hydra_engine.core.outputs import Piece
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.request import ActiveRequest
from hydra_engine.frontend.routing.router import Router
from hydra_engine.frontend.transitions import Dispatcher, Event


class Stamped(Handle):
    """A handle without a reader, which records when tokens reach the frontend."""

    def __init__(self, name: str, now: Callable[[], float]) -> None:
        super().__init__(name, lambda: None)
        self.stamps: list[float] = []
        self._now = now
        self._several: dict[int, int] = {}  # by stamp: how many tokens came, where that was not one

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of tokens that came with each stamp."""
        counts = [1] * len(self.stamps)
        for index, count in self._several.items():
            counts[index] = count
        return tuple(counts)

    def feed(self, piece: Piece) -> None:
        if piece.token_ids:
            if len(piece.token_ids) > 1:
                self._several[len(self.stamps)] = len(piece.token_ids)
            self.stamps.append(self._now())
        if piece.result is not None:
            super().feed(piece)


class _NoText:
    """A detokenizer of tokens without meaning."""

    stop_string: str | None = None

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""

    def decode_one(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def active_of(request: Request, handle: Stamped) -> ActiveRequest:
    no_text: Any = _NoText()
    return ActiveRequest(request, handle, cast(Any, None), no_text, ())


class _OneEncoder(Router):
    """A router that does not divide the images of a request among encoders."""

    def encoders(self, target: str, images: Sequence[tuple[int, ImageItem]]) -> dict[str, list[int]] | Role:
        largest = max(images, key=lambda pair: pair[1].num_patches, default=None)
        chosen = super().encoders(target, [] if largest is None else [largest])
        return chosen if isinstance(chosen, Role) else {name: [index for index, _ in images] for name in chosen}


class TextlessDispatcher(Dispatcher):
    """Does what its base does with tokens about which nothing is to be decided, without pieces and text, in one loop:
    no other code runs as often in a simulation."""

    def encode_together(self, policy: str) -> None:
        """Has all images of a request encoded by one instance. `policy`: the router's."""
        self._router = _OneEncoder(self.instances, policy)

    def _on_tokens(self, name: str, message: Tokens, now: float) -> None:
        columns = message.request_ids, message.positions, message.token_ids
        find, time_s, late = cast(dict[int, Any], self.by_id).get, message.time_s, message.late
        load = self.instances[name]
        for number, position, token_id in zip(*columns, strict=True):
            in_flight = find(number)
            if in_flight is None or number in late or not in_flight.is_plain_next_token(name, number, position):
                delta = Delta(RequestId(number), position, (token_id,), time_s, late=late.get(RequestId(number)))
                self._fire_for_attempt(Event.TOKENS, name, delta.request_id, now, name, delta)
                continue
            active = in_flight.active
            active.gaps_s.append(time_s - active.last_token_s)
            active.last_token_s = time_s
            active.token_ids.append(token_id)
            active.handle.stamps.append(now)
            in_flight.attempt.decode_charge.decode_tokens += 1
            load.decode_tokens += 1  # the charge is one of the instance where it decodes
