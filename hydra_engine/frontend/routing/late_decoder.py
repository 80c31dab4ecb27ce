"""Chooses the decoder of a request that another instance prefills: when prefill begins, and once more if the computed
KV has waited for room while another instance has some.

After the second choice either decoder may turn out to have the KV, since the source may have handed it over before it
heard. The first to send a token has it; the other is aborted. Decides over the table of instances, sends the messages,
and has no clock.
"""

from __future__ import annotations

from hydra_engine.core.messages import HandOver, Submit
from hydra_engine.core.roles import Role
from hydra_engine.frontend.request import Attempt, Phase, RequestInFlight
from hydra_engine.frontend.routing.instances import InstanceLoad, Instances
from hydra_engine.frontend.routing.router import Router

# From the first token on: most transfers have ended by then; a longer wait is for room.
PATIENCE_S = 0.25


class LateDecoder:
    def __init__(self, instances: Instances, router: Router) -> None:
        self._instances = instances
        self._router = router

    def choose_decoder(self, in_flight: RequestInFlight, attempt: Attempt) -> bool:
        """Chooses the decoder and informs it. Returns False if no instance can decode the request."""
        chosen = self._router.decoder(attempt.route.prefill, in_flight.num_tokens)
        attempt.asks_decoder = isinstance(chosen, Role)
        if isinstance(chosen, Role):
            return False
        self._send_to(in_flight, attempt, chosen)
        return True

    def look_again(self, in_flight: RequestInFlight, now: float) -> None:
        """Chooses another decoder if the first has had no room for `PATIENCE_S`. Call it a few times a second."""
        attempt = in_flight.attempt
        if attempt is None or in_flight.phase is not Phase.MOVING or attempt.replaced or not attempt.route.moves:
            return
        source, full = attempt.route.prefill, attempt.decoder
        waits = source in attempt.instances and full and not attempt.decoder_ready and not attempt.early
        if not waits or attempt.final is not None or now - attempt.prefilled_s < PATIENCE_S:
            return
        chosen = self._router.decoder(source, in_flight.num_tokens)
        if isinstance(chosen, Role) or chosen == full or not _has_room(self._instances[chosen], self._instances[full]):
            return
        attempt.replaced = full
        self._send_to(in_flight, attempt, chosen)

    def _send_to(self, in_flight: RequestInFlight, attempt: Attempt, chosen: str) -> None:
        """Informs the decoder, then the source, so that the decoder knows the offer when it arrives."""
        source = attempt.route.prefill
        attempt.instances.add(chosen)
        attempt.decode_at(self._instances[chosen], in_flight.num_tokens, ready=False)
        self._instances.send(chosen, [Submit(attempt.request, stages="D", source=source)])
        self._instances.send(source, [HandOver(attempt.id, chosen)])

    def superseded(self, in_flight: RequestInFlight, attempt: Attempt, name: str) -> list[str]:
        """Returns the instances to abort after instance `name` has sent a token, which settles the choice of
        decoder."""
        if not attempt.replaced or name not in (attempt.decoder, attempt.replaced):
            return []
        replaced, attempt.replaced = attempt.replaced, ""
        if name == attempt.decoder:
            return [replaced]
        others = [attempt.decoder, attempt.route.prefill]  # which may still offer it to the other one
        attempt.decode_at(self._instances[name], in_flight.num_tokens, ready=True)
        return others


def _has_room(other: InstanceLoad, full: InstanceLoad) -> bool:
    """True if no request queues at `other`, and it has fewer decodes than `full`."""
    status = other.status
    queues = status is None or status.num_waiting + status.num_arriving > 0
    return other.usable and not queues and not other.nearly_full and other.decodes < full.decodes
