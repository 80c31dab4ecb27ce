"""A migration with fault points in the instance's own thread, where an exception ends the instance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hydra_engine.instance.migration import Migration
from tests.faults.points import AFTER_ACK, AFTER_OFFER, AFTER_RESERVE, BEFORE_ACK, BEFORE_FREE, FaultPoints

if TYPE_CHECKING:
    from hydra_engine.core.ids import RequestId
    from hydra_engine.core.messages import Encode, RequestMessage, Submit
    from hydra_engine.core.request import Request
    from hydra_engine.instance.ports import PeerPort
    from hydra_engine.transfer.messages import TransferMessage
    from hydra_engine.transfer.offers import Owner
    from hydra_engine.transfer.plans import PullJob, PullResult


class FaultyMigration(Migration):
    def __init__(self, *, faults: FaultPoints, **parts: Any) -> None:
        super().__init__(**parts)
        self._faults = faults
        self._requests: dict[RequestId, Request] = {}
        self._pulled: RequestId | None = None  # the request whose pull ends
        self._peers = _FaultyPeers(self._peers, self)  # type: ignore[assignment]
        self._submit_job = self._moves.submit
        self._moves.submit = self._submit_faulty  # type: ignore[method-assign]

    def hit(self, point: str, request_id: RequestId | None) -> None:
        request = None if request_id is None else self._requests.get(request_id)
        if request is not None:
            self._faults.hit(point, [request])

    # ---- requests

    def on_accepted(self, message: Submit | Encode) -> None:
        self._requests[message.request.id] = message.request
        super().on_accepted(message)

    def hand_over(self, request: Request, target: str, now: float) -> None:
        self._requests[request.id] = request
        super().hand_over(request, target, now)

    def on_finished(self, request_id: RequestId) -> None:
        super().on_finished(request_id)
        self._requests.pop(request_id, None)

    # ---- points

    def _send(self, owner: Owner, now: float) -> None:
        super()._send(owner, now)
        if owner not in self._unsent:
            self.hit(AFTER_OFFER, owner[0])

    def _release(self, owner: Owner | None, now: float) -> list[RequestMessage]:
        if owner is not None:
            self.hit(BEFORE_FREE, owner[0])
        return super()._release(owner, now)

    def _submit_faulty(self, job: PullJob, incarnation: int, now: float) -> None:
        self.hit(AFTER_RESERVE, self._plans[job.step_id].request_id)
        self._submit_job(job, incarnation, now)

    def _ended(self, result: PullResult, now: float) -> list[RequestMessage]:
        self._pulled = self._plans[result.step_id].request_id
        return super()._ended(result, now)

    def hit_ack(self, point: str) -> None:
        self.hit(point, self._pulled)


class _FaultyPeers:
    """Peers with a fault point before and after each acknowledgement of a pull."""

    def __init__(self, peers: PeerPort, migration: FaultyMigration) -> None:
        self._peers, self._migration = peers, migration

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peers, name)

    def send(self, peer: str, messages: Iterable[TransferMessage]) -> None:
        messages = list(messages)
        acknowledges = any(type(message).__name__ == "Ack" for message in messages)
        if acknowledges:
            self._migration.hit_ack(BEFORE_ACK)
        self._peers.send(peer, messages)
        if acknowledges:
            self._migration.hit_ack(AFTER_ACK)
