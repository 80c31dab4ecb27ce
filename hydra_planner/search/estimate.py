"""An upper bound of a deployment's rate, from the work of each stage alone, without simulation.

A request has so many seconds of encode, prefill and decode on each kind of device; a stage is done by the instances
that serve it, and instances of several stages, or on one device, divide their time. The largest rate at which all work
fits is the bound; the stage that fills its devices there binds. Queues, batches that do not fill and limits are not in
it, so it is never too low but for decodes, whose batches are taken as the limits allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.instances import Role
from hydra_engine.core.plans import LanguageLoad
from hydra_planner.search.candidates import Candidate
from hydra_planner.simulator.costs import DeviceKind
from hydra_planner.work import DECODES, RequestSeconds, Work, decode_seconds, prefill_seconds, vision_seconds

STAGES = (("encode", Role.E), ("prefill", Role.P), ("decode", Role.D))
_MIN_RATE, _MAX_RATE, _ROUNDS = 1e-4, 1e5, 40  # of the search for the bound


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests per second, and the stage that fills its devices there."""

    rate: float
    stage: str


def seconds_of(surface: CostSurface, asked: Sequence[Work], tpot_limit_s: float | None = None) -> RequestSeconds:
    """Seconds of the mean request on a device with these step times; decodes in batches as large as the limit
    allows."""
    count = len(asked)
    return RequestSeconds(
        sum(vision_seconds(surface, work) for work in asked) / count,
        sum(prefill_seconds(surface, work) for work in asked) / count,
        sum(decode_seconds(surface, work, _batch(surface, work, tpot_limit_s)) for work in asked) / count,
    )


def _batch(surface: CostSurface, work: Work, tpot_limit_s: float | None) -> int:
    batch, context = DECODES, work.prompt + work.output // 2
    while (
        batch > 1
        and tpot_limit_s is not None
        and surface.language_s(LanguageLoad(batch, batch * context)) > tpot_limit_s
    ):
        batch //= 2
    return batch


def bound_of(candidate: Candidate, kinds: Mapping[str, DeviceKind], seconds: Mapping[str, RequestSeconds]) -> Bound:
    """`seconds`: of a request, by the name of a kind."""
    low, high = _MIN_RATE, _MAX_RATE
    if _short_of(candidate, kinds, seconds, low) is not None:
        high = low
    for _ in range(_ROUNDS):
        rate = (low * high) ** 0.5
        if _short_of(candidate, kinds, seconds, rate) is None:
            low = rate
        else:
            high = rate
    return Bound(low, _short_of(candidate, kinds, seconds, high * 1.001) or "none")


def _short_of(
    candidate: Candidate, kinds: Mapping[str, DeviceKind], seconds: Mapping[str, RequestSeconds], rate: float
) -> str | None:
    """The first stage that does not fit at this rate, or None. Stages with the fewest devices are placed first, each on
    what is left of its devices, the one with most left first."""
    left = {device: _Left(candidate, device, kinds[device]) for device in candidate.devices}
    by_stage = [
        (name, stage, _devices(candidate, stage))
        for name, stage in STAGES
        if any(_of(stage, one) > 0 for one in seconds.values())  # one without work needs no device
    ]
    for name, stage, devices in sorted(by_stage, key=lambda entry: len(entry[2])):
        amount = rate  # requests per second to place
        for device in sorted(devices, key=lambda device: -left[device].seconds_for(stage)):
            each_s = _of(stage, seconds[kinds[device].name])
            done = min(amount, left[device].seconds_for(stage) / each_s)
            amount -= done
            left[device].take(stage, done * each_s)
        if amount > 1e-9 * rate:
            return name
    return None


def _of(stage: Role, seconds: RequestSeconds) -> float:
    return {Role.E: seconds.vision, Role.P: seconds.prefill, Role.D: seconds.decode}[stage]


class _Left:
    """Seconds per second that a device has left for each lane, and for both together: lanes side by side do more than
    one lane by as much as their slowdowns are below two, and those of instances that take turns do not."""

    def __init__(self, candidate: Candidate, device: str, kind: DeviceKind) -> None:
        roles = [spec.role for spec in candidate.topology.instances if spec.device == device]
        both = any(role.needs_vision and role.needs_language for role in roles)
        if not kind.time_sliced:
            both = any(role.needs_vision for role in roles) and any(role.needs_language for role in roles)
        surface = kind.costs.surface
        side_by_side = 1 / surface.decode_slowdown + 1 / surface.vision_slowdown
        self._lanes = {True: 1.0, False: 1.0}  # vision, language
        self._device = max(1.0, side_by_side) if both else 1.0

    def seconds_for(self, stage: Role) -> float:
        return min(self._lanes[stage is Role.E], self._device)

    def take(self, stage: Role, seconds: float) -> None:
        self._lanes[stage is Role.E] -= seconds
        self._device -= seconds


def _devices(candidate: Candidate, stage: Role) -> list[str]:
    return list(dict.fromkeys(spec.device for spec in candidate.topology.instances if stage in spec.role))
