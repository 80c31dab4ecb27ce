"""Decodes that move from one instance to another while they run: which ones, and what both sides are told.

The choice is `frontend/routing/steal_policy.py`'s. Until the victim has handed a request over, it may
end it or keep it.
"""

from __future__ import annotations

from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import HandOver, Submit
from hydra_engine.core.roles import Role
from hydra_engine.frontend.attempt import Attempt
from hydra_engine.frontend.dispatch import Dispatcher
from hydra_engine.frontend.in_flight import Phase, RequestInFlight
from hydra_engine.frontend.routing.steal_policy import Decode, StealPolicy

# A request that is to be handed over goes on until the steps in flight are done; after this many tokens it stays.
MOST_LATE_TOKENS = 32


class DecodeStealing:
    def __init__(self, config: EngineConfig, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._policy = StealPolicy(config.scheduler.max_num_seqs) if config.cluster.steal_decodes else None

    def stop(self) -> None:
        """No decode is stolen from now on."""
        self._policy = None

    def tick(self, now: float) -> None:
        """A few times a second."""
        dispatcher = self._dispatcher
        thieves = any(p.usable and p.serves(Role.E) and p.serves(Role.D) for p in dispatcher.instances.values())
        if self._policy is None or not thieves or len(dispatcher.instances) < 2:
            return
        decoding = [
            (in_flight, decode) for in_flight in dispatcher.requests.values() if (decode := _decode_of(in_flight))
        ]
        by_id = {decode.request_id: in_flight for in_flight, decode in decoding}
        for plan in self._policy.decide(dispatcher.instances, [decode for _, decode in decoding], now):
            self._hand_over(by_id[plan.request_id], plan.thief)

    def _hand_over(self, in_flight: RequestInFlight, thief: str) -> None:
        """The thief is told first, so that it knows what is offered to it."""
        attempt = in_flight.attempt
        assert attempt is not None
        victim, attempt.victim, in_flight.moved = attempt.decoder, attempt.decoder, True
        attempt.decoder, attempt.decoder_ready, attempt.late_victim_tokens = thief, False, 0
        attempt.instances.add(thief)
        attempt.move_charge(self._dispatcher.instances[thief])
        in_flight.advance()
        attempt_index = self._dispatcher.attempt_index
        attempt_index.send(thief, [Submit(in_flight.attempt_request(attempt.id), part="D", source=victim)])
        attempt_index.send(victim, [HandOver(attempt.id, thief)])

    def victim_sent(self, in_flight: RequestInFlight, attempt: Attempt, num_tokens: int) -> None:
        """The victim still decodes; if it goes on with that, it did not want to hand the request over."""
        attempt.late_victim_tokens += num_tokens
        if attempt.late_victim_tokens <= MOST_LATE_TOKENS or attempt.decoder_ready:
            return
        self._dispatcher.drop_part(in_flight, attempt.decoder)
        attempt.decoder, attempt.decoder_ready, attempt.victim = attempt.victim, True, ""
        attempt.move_charge(self._dispatcher.instances[attempt.decoder])
        in_flight.advance()


def _decode_of(in_flight: RequestInFlight) -> Decode | None:
    """None unless the request decodes, and no other instance works on it."""
    attempt, request = in_flight.attempt, in_flight.request
    if in_flight.phase is not Phase.DECODING or attempt is None or attempt.holders() != {attempt.decoder}:
        return None
    num_left = request.max_new_tokens - in_flight.num_known
    num_tokens = request.num_prompt + in_flight.num_known
    return Decode(attempt.id, attempt.decoder, num_tokens, num_left, in_flight.moved)
