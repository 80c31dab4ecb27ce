"""One attempt to serve a request: which instances work on it, under which ids, and what it counts for in their loads.

Dropped as a whole when the attempt ends. Decides nothing and sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Delta, Finished
from hydra_engine.frontend.routing.instance_load import InstanceLoad
from hydra_engine.frontend.routing.router import Route


@dataclass(slots=True, eq=False)
class Charge:
    """A request's share of an instance's load, counted from the beginning until it is released."""

    instance: InstanceLoad
    prefill: int
    decode: int
    patches: int

    def __post_init__(self) -> None:
        self.instance.prefill_tokens += self.prefill
        self.instance.patches += self.patches
        if self.decode:
            self.instance.decodes += 1
            self.instance.decode_tokens += self.decode

    def grow(self, num_tokens: int) -> None:
        """The request has so many more tokens at the instance where it decodes."""
        if self.decode:
            self.decode += num_tokens
            self.instance.decode_tokens += num_tokens

    def release_prefill(self) -> None:
        self.instance.prefill_tokens -= self.prefill
        self.instance.patches -= self.patches
        self.prefill = self.patches = 0

    def release(self) -> None:
        self.release_prefill()
        if self.decode:
            self.instance.decodes -= 1
            self.instance.decode_tokens -= self.decode
            self.decode = 0


@dataclass(slots=True, eq=False)
class Job:
    """Images of a request that instance `name` encodes. No other instance has been asked since for those in
    `pending`."""

    id: RequestId
    name: str
    pending: set[int]
    charge: Charge


@dataclass(slots=True, eq=False)
class Attempt:
    """`base` tokens were known when it began at `began_s`. `decoder` is where it decodes or will."""

    id: RequestId
    route: Route
    base: int
    began_s: float
    decoder: str = field(init=False)
    decoder_ready: bool = field(init=False)  # the decoder has fetched all that it needs: it has sent a token
    instances: set[str] = field(init=False)  # have not reported the end of their part
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    unserved: set[int] = field(default_factory=set)  # images that wait for an encoder
    early: dict[int, Delta] = field(default_factory=dict)  # by position: a token that overtook another instance's
    prefilled_s: float = 0.0  # the time of its first token
    victim: str = ""  # the instance that was asked to hand it over to `decoder`
    late_victim_tokens: int = 0  # that the victim has sent since
    final: Finished | None = None  # its end, though tokens before it may still be missing
    charges: list[Charge] = field(default_factory=list)
    decode_charge: Charge | None = None

    def __post_init__(self) -> None:
        self.decoder, self.decoder_ready = self.route.decode, not self.route.moves
        self.instances = {self.route.prefill, self.route.decode}

    @property
    def complete(self) -> bool:
        """The decoder goes on alone: no token, no KV block and no end is on its way."""
        return self.decoder_ready and not self.early and self.final is None

    @property
    def idle(self) -> bool:
        """No instance works on it."""
        return not self.instances and not self.jobs

    def holders(self) -> set[str]:
        """The instances that work on it or on its images."""
        return {*self.instances, *(job.name for job in list(self.jobs.values()))}

    def needs(self, name: str) -> bool:
        """The attempt cannot go on without the KV of this instance, or without tokens that it has not sent yet."""
        return name in self.instances and (name == self.decoder or not self.decoder_ready or bool(self.early))

    def moves_between(self, pair: set[str]) -> bool:
        """Its KV is on its way from one instance of the pair to the other."""
        sources = self.instances - {self.decoder}
        return not self.decoder_ready and any({source, self.decoder} == pair for source in sources)

    def jobs_between(self, pair: set[str]) -> list[Job]:
        """The encode jobs whose features go from one instance of the pair to the other."""
        return [job for job in self.jobs.values() if {job.name, self.route.prefill} == pair]

    # ---- loads

    def charge(self, instance: InstanceLoad, *, prefill: int = 0, decode: int = 0, patches: int = 0) -> Charge:
        """`prefill`: tokens to compute there; `decode`: tokens whose KV it holds where it decodes."""
        charge = Charge(instance, prefill, decode, patches)
        self.charges.append(charge)
        if decode:
            self.decode_charge = charge
        return charge

    def release_prefill(self) -> None:
        for charge in self.charges:
            charge.release_prefill()

    def release(self) -> None:
        for charge in self.charges:
            charge.release()

    def move_charge(self, instance: InstanceLoad) -> None:
        """It decodes at `instance` from now on."""
        if self.decode_charge is not None:
            num_tokens = self.decode_charge.decode
            self.decode_charge.release()
            self.charge(instance, decode=num_tokens)
