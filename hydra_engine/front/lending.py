"""Decodes that move from one instance to another while they run: which ones, and what both sides are told.

The choice is `cluster/stealing.py`'s. Until the victim has handed a request over, it may end it or keep it.
"""

from __future__ import annotations

from hydra_engine.cluster.stealing import Decode, StealPolicy
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import HandOver, Submit
from hydra_engine.core.roles import Role
from hydra_engine.front.dispatch import Dispatcher
from hydra_engine.front.flights import Flight

# A request that is to be handed over goes on until the steps in flight are done; after this many tokens it stays.
MOST_LATE_TOKENS = 32


class Lending:
    def __init__(self, config: EngineConfig, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._policy = StealPolicy(config.scheduler.max_num_seqs) if config.cluster.steal_decodes else None

    def stop(self) -> None:
        """Nothing is lent from now on."""
        self._policy = None

    def tick(self, now: float) -> None:
        """A few times a second."""
        dispatcher = self._dispatcher
        thieves = any(p.usable and p.holds(Role.E) and p.holds(Role.D) for p in dispatcher.places.values())
        if self._policy is None or not thieves or len(dispatcher.places) < 2:
            return
        found = [(flight, decode) for flight in dispatcher.flights.values() if (decode := _decode_of(flight))]
        flights = {decode.request_id: flight for flight, decode in found}
        for plan in self._policy.decide(dispatcher.places, [decode for _, decode in found], now):
            self._hand_over(flights[plan.request_id], plan.thief)

    def _hand_over(self, flight: Flight, thief: str) -> None:
        """The thief is told first, so that it knows what is offered to it."""
        assert flight.attempt is not None
        victim, flight.victim, flight.moved = flight.decoder, flight.decoder, True
        flight.decoder, flight.decoder_spoke, flight.late_victim_tokens = thief, False, 0
        flight.parts.add(thief)
        flight.move_charge(self._dispatcher.places[thief])
        holders = self._dispatcher.holders
        holders.send(thief, [Submit(flight.attempt_request(flight.attempt), part="D", source=victim)])
        holders.send(victim, [HandOver(flight.attempt, thief)])

    def victim_sent(self, flight: Flight, num_tokens: int) -> None:
        """The victim still decodes; if it goes on with that, it did not want to hand the request over."""
        flight.late_victim_tokens += num_tokens
        if flight.late_victim_tokens <= MOST_LATE_TOKENS or flight.decoder_spoke:
            return
        self._dispatcher.drop_part(flight, flight.decoder)
        flight.decoder, flight.decoder_spoke, flight.victim = flight.victim, True, ""
        flight.move_charge(self._dispatcher.places[flight.decoder])


def _decode_of(flight: Flight) -> Decode | None:
    """None unless it decodes, and nothing else of it is under way."""
    settled = flight.prefilled and flight.decoder_spoke and flight.parts == {flight.decoder} and not flight.jobs
    if not settled or flight.closing or flight.attempt is None:
        return None
    request = flight.request
    num_left = request.max_new_tokens - flight.num_known
    return Decode(flight.attempt, flight.decoder, request.num_prompt + flight.num_known, num_left, flight.moved)
