"""What the front keeps of one request while instances work on it: who has which part under which id, and enough to
start again.

Does not decide anything and sends nothing; `dispatch.py` does. Loads of places are charged and released here, so that
they cannot drift from what is under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from hydra_engine.cluster.places import Place
from hydra_engine.cluster.router import Route
from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.messages import Encode, Finished
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import Request
from hydra_engine.front.active import ActiveRequest
from hydra_engine.observe.live import LiveRequest


@dataclass(frozen=True, slots=True)
class EarlyToken:
    """It overtook one that another instance sampled before it."""

    token_id: int
    time_s: float
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(slots=True, eq=False)
class Charge:
    """A flight's share of a place's load, counted there from the beginning until it is released."""

    place: Place
    prefill: int
    decode: int
    patches: int

    def __post_init__(self) -> None:
        self.place.prefill_tokens += self.prefill
        self.place.patches += self.patches
        if self.decode:
            self.place.decodes += 1
            self.place.decode_tokens += self.decode

    def grow(self, num_tokens: int) -> None:
        """Of what it holds where it decodes."""
        if self.decode:
            self.decode += num_tokens
            self.place.decode_tokens += num_tokens

    def release_prefill(self) -> None:
        self.place.prefill_tokens -= self.prefill
        self.place.patches -= self.patches
        self.prefill = self.patches = 0

    def release(self) -> None:
        self.release_prefill()
        if self.decode:
            self.place.decodes -= 1
            self.place.decode_tokens -= self.decode
            self.decode = 0


@dataclass(slots=True, eq=False)
class Job:
    """Images of a request that instance `name` encodes for it. Nobody else has been asked since for those in
    `pending`."""

    id: RequestId
    name: str
    pending: set[int]
    charge: Charge


@dataclass(slots=True, eq=False)
class Flight:
    """One request from its admission to its result, over all attempts to serve it.

        waiting    no instance has a part of it; `attempt` is None
        running    `parts` have ids of `attempt`, `jobs` have ids of their own
        closing    it is decided how it ends; what still runs has been aborted and its reports are waited for

    Besides, a running one waits with the images in `unserved` for an encoder. `pixels` are kept to the end: until then
    an attempt may have to begin again from nothing.
    """

    active: ActiveRequest
    pixels: tuple[PixelPayload, ...]
    near: str = ""  # who has computed the same prompt for another answer, if anybody has
    attempt: RequestId | None = None
    route: Route | None = None
    base: int = 0  # tokens known when the attempt began
    parts: set[str] = field(default_factory=set)  # instances that have not reported the end of theirs
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    decoder: str = ""  # where it decodes or will
    decoder_spoke: bool = False  # the decoder has sent a token, so it has fetched all that it needs
    victim: str = ""  # who has been told to hand it over
    late_victim_tokens: int = 0  # that the victim has sent since
    moved: bool = False  # handed over once, and never again
    unserved: set[int] = field(default_factory=set)
    early: dict[int, EarlyToken] = field(default_factory=dict)  # by position
    final: Finished | None = None
    closing: bool = False
    deadline_s: float | None = None  # of waiting or closing
    attempts: int = 0
    deaths: int = 0
    replays: int = 0
    cleared: bool = False  # of being what instances die of
    left: frozenset[str] = frozenset()  # instances that it was taken away from lately, and when
    left_s: float = 0.0
    gave_way: bool = False
    reports: list[Finished] = field(default_factory=list)
    charges: list[Charge] = field(default_factory=list)
    decode_charge: Charge | None = None

    @property
    def request(self) -> Request:
        """As the user sent it; its id and age are the front's number of it."""
        return self.active.request

    @property
    def age(self) -> int:
        return self.request.age

    @property
    def num_known(self) -> int:
        return len(self.active.token_ids)

    @property
    def prefilled(self) -> bool:
        """The attempt has had a first token."""
        return self.attempt is not None and self.num_known > self.base

    def goes_on(self, name: str, number: int, position: int) -> bool:
        """Whether a token is like most: the next one, from where the attempt decodes, not its first one, and nothing is
        to be decided about it."""
        return (
            number == self.attempt
            and name == self.decoder
            and position == len(self.active.token_ids)
            and position > self.base
            and self.decoder_spoke
            and name in self.parts
            and self.final is None
            and not (self.closing or self.early or self.victim or self.deaths)
        )

    def needs(self, name: str) -> bool:
        """The attempt cannot go on without what this instance has, or has not told yet."""
        return name in self.parts and (name == self.decoder or not self.decoder_spoke or bool(self.early))

    def moves_between(self, one: str, other: str) -> bool:
        """Its KV is on its way from one to the other."""
        sources = self.parts - {self.decoder}
        return not self.decoder_spoke and any({source, self.decoder} == {one, other} for source in sources)

    def jobs_between(self, one: str, other: str) -> list[Job]:
        """Whose features go from one to the other."""
        target = self.route.prefill if self.route is not None else ""
        return [job for job in self.jobs.values() if {job.name, target} == {one, other}]

    def crosses(self, one: str, other: str) -> bool:
        return self.moves_between(one, other) or bool(self.jobs_between(one, other))

    @property
    def idle(self) -> bool:
        """No instance has anything of it."""
        return not self.parts and not self.jobs

    def is_at(self, name: str) -> bool:
        return name in self.parts or any(job.name == name for job in list(self.jobs.values()))

    def live(self) -> LiveRequest:
        """Where it is now, as far as the front knows."""
        if self.attempt is None or self.route is None:
            stage, where = "queued", ""
        elif self.jobs and not self.prefilled:
            stage, where = "encode", next(iter(self.jobs.values())).name
        elif self.prefilled and self.decoder_spoke:
            stage, where = "decode", self.decoder
        elif self.prefilled:
            stage, where = "migrate", self.victim or self.route.prefill
        else:
            stage, where = "prefill", self.route.prefill
        active = self.active
        return LiveRequest(active.handle.id, self.request.arrival_s, active.first_token_s, self.num_known, stage, where)

    def may_need_images(self) -> bool:
        return self.attempt is not None and not self.prefilled and self.route is not None and self.route.remote_images

    def attempt_request(self, number: RequestId) -> Request:
        return replace(
            self.request,
            id=number,
            generated_token_ids=tuple(self.active.token_ids),
            gave_way=self.gave_way,
        )

    def encode_message(self, number: RequestId, indices: Iterable[int], target: str) -> Encode:
        assert self.attempt is not None
        wanted = tuple(indices)
        images = tuple(self.request.images[index] for index in wanted)
        request = replace(self.request, id=number, prompt_token_ids=(), images=images)
        return Encode(request, tuple(self.pixels[index] for index in wanted), target, self.attempt, wanted)

    def end_of_tokens(self) -> Finished | None:
        """The end that the known tokens already are: its message was lost with an instance. None: more are to come."""
        request, tokens = self.request, self.active.token_ids
        if not tokens:
            return None
        if tokens[-1] in request.stop_ids:
            return Finished(request.id, FinishReason.STOP.value, len(tokens), stop_token_id=tokens[-1])
        if len(tokens) >= request.max_new_tokens:
            return Finished(request.id, FinishReason.LENGTH.value, len(tokens))
        return None

    # ---- loads

    def charge(self, place: Place, *, prefill: int = 0, decode: int = 0, patches: int = 0) -> Charge:
        """`prefill` tokens to compute; `decode` tokens whose KV it holds where it decodes."""
        charge = Charge(place, prefill, decode, patches)
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
        self.charges.clear()
        self.decode_charge = None

    def move_charge(self, place: Place) -> None:
        """It decodes at `place` from now on."""
        if self.decode_charge is not None:
            num_tokens = self.decode_charge.decode
            self.decode_charge.release()
            self.charge(place, decode=num_tokens)

    # ---- the end

    def report_of(self, name: str, finished: Finished) -> Finished:
        """What counts of a part's report: what decodes elsewhere has taken its gaps along, and only who prefills can
        say what was cached."""
        changes: dict[str, int] = {}
        aborted_behind_it = finished.reason == FinishReason.ABORT and name != self.decoder
        if finished.reason == Departure.MOVED or aborted_behind_it:
            changes |= {"late_gaps": 0, "num_gaps": 0}
        if self.route is None or name != self.route.prefill:
            changes |= {"cached_tokens": 0, "cached_images": 0}
        return msgspec.structs.replace(finished, **changes) if changes else finished

    def merged(self, final: Finished) -> Finished:
        """`final` with the spans and counts of all parts, attempts and encode jobs."""
        request, reports = self.request, self.reports
        return msgspec.structs.replace(
            final,
            spans=tuple(span for report in reports for span in report.spans),
            num_preemptions=sum(report.num_preemptions for report in reports),
            cached_tokens=min(sum(report.cached_tokens for report in reports), request.num_prompt),
            cached_images=min(sum(report.cached_images for report in reports), request.num_media),
            late_gaps=sum(report.late_gaps for report in reports),
            num_gaps=sum(report.num_gaps for report in reports),
        )
