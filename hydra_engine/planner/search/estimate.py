"""What a deployment can do at most, from the work of each stage alone: a bound that needs no simulation.

A request has so many seconds of encode, prefill and decode on each kind of device; a stage is done by the instances
that serve it, and those of several stages, or on one device, divide their time. The largest rate at which all work fits
is the bound; the stage that fills its devices there binds. Queues, batches that do not fill and limits are not in it,
so it is never too low but for decodes, whose batches are taken as the limits allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.core.cost import CostSurface, LanguageLoad, VisionLoad
from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.planner.search.candidates import Candidate
from hydra_engine.planner.simulator.costs import DeviceKind
from hydra_engine.planner.simulator.requests import RequestMaker
from hydra_engine.telemetry.workload import WorkloadRequest

STAGES = (("encode", Role.E), ("prefill", Role.P), ("decode", Role.D))
_BATCH = 64  # decodes of a step, as far as the TPOT limit allows
_LEAST_RATE, _MOST_RATE, _ROUNDS = 1e-4, 1e5, 40  # of the search for the bound


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one device for a request on the mean, stage by stage."""

    encode_s: float
    prefill_s: float
    decode_s: float

    def of(self, stage: Role) -> float:
        return {Role.E: self.encode_s, Role.P: self.prefill_s, Role.D: self.decode_s}[stage]

    @property
    def total_s(self) -> float:
        return self.encode_s + self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests per second, and the stage that fills its devices there."""

    rate: float
    stage: str


def requests_of(spec: ModelSpec, rows: Sequence[WorkloadRequest]) -> list[Request]:
    maker = RequestMaker(spec)
    return [maker.request(row, number, 0.0)[0] for number, row in enumerate(rows, start=1)]


def work_of(surface: CostSurface, requests: Sequence[Request], tpot_s: float | None) -> Work:
    """On a device with these step times. Pictures that come again are encoded once."""
    encode_s = prefill_s = decode_s = 0.0
    seen: set[bytes] = set()
    for request in requests:
        for image in request.images:
            if image.digest not in seen:
                seen.add(image.digest)
                encode_s += surface.vision_s(VisionLoad(image.num_patches, float(image.num_patches**2)))
        tokens, decodes = request.num_prompt, request.max_new_tokens - 1
        prefill_s += surface.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
        if decodes:
            context = tokens + decodes // 2
            batch = _batch(surface, context, tpot_s)
            decode_s += decodes * surface.language_s(LanguageLoad(batch, batch * context)) / batch
    count = len(requests)
    return Work(encode_s / count, prefill_s / count, decode_s / count)


def _batch(surface: CostSurface, context: int, tpot_s: float | None) -> int:
    batch = _BATCH
    while batch > 1 and tpot_s is not None and surface.language_s(LanguageLoad(batch, batch * context)) > tpot_s:
        batch //= 2
    return batch


def bound_of(candidate: Candidate, kinds: Mapping[str, DeviceKind], works: Mapping[str, Work]) -> Bound:
    """`works`: by the name of a kind."""
    low, high = _LEAST_RATE, _MOST_RATE
    if _short_of(candidate, kinds, works, low) is not None:
        high = low
    for _ in range(_ROUNDS):
        rate = (low * high) ** 0.5
        if _short_of(candidate, kinds, works, rate) is None:
            low = rate
        else:
            high = rate
    return Bound(low, _short_of(candidate, kinds, works, high * 1.001) or "none")


def _short_of(
    candidate: Candidate, kinds: Mapping[str, DeviceKind], works: Mapping[str, Work], rate: float
) -> str | None:
    """The first stage that does not fit at this rate, or None. Stages with the fewest devices are placed first, each on
    what is left of its devices, the one with most left first."""
    left = {device: _Left(candidate, device, kinds[device].costs.surface) for device in candidate.devices}
    by_stage = [(name, stage, _devices(candidate, stage)) for name, stage in STAGES]
    for name, stage, devices in sorted(by_stage, key=lambda entry: len(entry[2])):
        amount = rate  # requests per second to place
        for device in sorted(devices, key=lambda device: -left[device].of(stage)):
            seconds = works[kinds[device].name].of(stage)
            if seconds <= 0:
                amount = 0.0
                break
            done = min(amount, left[device].of(stage) / seconds)
            amount -= done
            left[device].take(stage, done * seconds)
        if amount > 1e-9 * rate:
            return name
    return None


class _Left:
    """Of a device: seconds a second of each lane, and of both together, where lanes that run side by side do more than
    one by as much as their slowdowns are less than two."""

    def __init__(self, candidate: Candidate, device: str, surface: CostSurface) -> None:
        roles = [spec.role for spec in candidate.topology.instances if spec.device == device]
        both = any(role.needs_vision for role in roles) and any(role.needs_language for role in roles)
        side_by_side = 1 / surface.decode_slowdown + 1 / surface.vision_slowdown
        self._lanes = {True: 1.0, False: 1.0}  # vision, language
        self._device = max(1.0, side_by_side) if both else 1.0

    def of(self, stage: Role) -> float:
        return min(self._lanes[stage is Role.E], self._device)

    def take(self, stage: Role, seconds: float) -> None:
        self._lanes[stage is Role.E] -= seconds
        self._device -= seconds


def _devices(candidate: Candidate, stage: Role) -> list[str]:
    return list(dict.fromkeys(spec.device for spec in candidate.topology.instances if stage in spec.role))
