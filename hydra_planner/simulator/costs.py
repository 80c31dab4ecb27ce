"""Costs in simulated time: steps from a profile or a roofline, the rest from constants that were measured once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.units import GIB
from hydra_engine.errors import ConfigError
from hydra_engine.profiler.start import accuracy
from hydra_engine.profiler.store import Profile, problem_of

# A turn of an instance's loop that takes a step back and plans the next one: bench.sched on two cores of an EPYC.
TURN_S = 0.0002
# A message between two processes, until the other one has read it: bench.migrate's round trips, and a thread to wake.
MESSAGE_S = 0.0001
# A pull job besides its bytes (to the lane, the control word, and back), and its bytes: bench.migrate on one machine.
PULL_S = 0.0001
PULL_BYTES_PER_S = 8e9
# From a body to token ids: template and tokenizer; bench.preprocess.
REQUEST_S = 0.001
# Decode and resize of a JPEG picture, one thread: bench.preprocess.
PIXEL_S = 1.2e-8


@dataclass(frozen=True, slots=True)
class Corun:
    """Factors on the seconds of two steps of a GPU that run beside each other, the same for both. An encode beside
    decodes has one of two factors by the ratio of their seconds, and one in between between `ratios`."""

    ratios: tuple[float, float]
    beside_decodes: tuple[float, float]  # of short and of long encodes
    beside_prompts: float  # of encodes
    prompts_beside_decodes: float

    def encode(self, encode_s: float, step_s: float, prompts: float) -> float:
        """Factor of an encode and a language step. Seconds are those alone; `prompts`: their share of the step's."""
        low, high = self.ratios
        place = min(max((encode_s / step_s - low) / (high - low), 0.0), 1.0)
        short, long = self.beside_decodes
        return (1 - prompts) * (short + place * (long - short)) + prompts * self.beside_prompts

    def steps(self, prompts: float, other_prompts: float, alike: float) -> float:
        """Factor of language steps of two instances, by their shares of prompts; `alike`: of two of a kind."""
        unlike = prompts * (1 - other_prompts) + other_prompts * (1 - prompts)
        return alike + unlike * (self.prompts_beside_decodes - alike)


@dataclass(frozen=True, slots=True)
class Costs:
    """Steps on one device, seconds. `cores` and `threads` (of a lane): of a processor; a GPU has (1, 0), where only the
    factors count. `alike`: how many times as long a step takes beside one of another instance on the same lane kind.
    `corun`: factors that depend on both steps, instead of those of `surface`."""

    surface: CostSurface
    submit_s: float = 0.0  # from a plan's submission to an idle lane to the start of its step
    collect_s: float = 0.0  # from the end of a step until its instance knows
    cores: int = 1
    threads: int = 1
    dtype: str = "bfloat16"
    turn_s: float = TURN_S
    alike: float = 1.0
    corun: Corun | None = None
    source: str = "made up"

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device. `link_bytes_per_s`: to and from others, each direction; `copy_bytes_per_s`: within the device.
    `price`: to buy one, in dollars; `hour_price`: for an hour; None: not known. `has_mps`: NVIDIA's multi-process
    service runs on it."""

    name: str
    costs: Costs
    memory_bytes: int = 16 * GIB
    link_bytes_per_s: float = PULL_BYTES_PER_S
    copy_bytes_per_s: float = PULL_BYTES_PER_S
    price: float | None = None
    hour_price: float | None = None
    has_mps: bool = False

    @property
    def time_sliced(self) -> bool:
        """True if processes on the device never compute at the same moment."""
        return not self.on_processor and not self.has_mps

    @property
    def on_processor(self) -> bool:
        """True if the device is the host's processor, whose cores and memory everything on the host shares."""
        return self.costs.threads > 0


@dataclass(frozen=True, slots=True)
class Host:
    """Costs of the host. `cores` 0: the host is the device, and preprocessing takes its cores. `fabric_bytes_per_s`:
    limit of all links together; 0: none."""

    cores: int = 0
    message_s: float = MESSAGE_S
    pull_s: float = PULL_S
    request_s: float = REQUEST_S
    pixel_s: float = PIXEL_S
    fabric_bytes_per_s: float = 0.0


_NOTHING = Curve((0.0,), (0.0,))
UNKNOWN = Costs(CostSurface(_NOTHING, 0.0, 0.0, 0.0, _NOTHING, 0.0), source="not measured")


def costs_of(profile: Profile, source: str) -> Costs:
    identity = profile.identity
    on_processor, surface = identity.device == "cpu", profile.surface
    return Costs(
        surface,
        submit_s=profile.submit_s,
        collect_s=profile.collect_s,
        cores=identity.cores if on_processor else 1,
        threads=identity.threads if on_processor else 0,
        dtype=identity.dtype,
        # Processes take turns on a GPU. On cores of their own they share memory as lanes of different kinds do.
        alike=mean((surface.decode_slowdown, surface.prefill_slowdown)) if on_processor else 2.0,
        source=f"{source}: {identity.processor or identity.device}, {identity.cores} cores, {identity.dtype}; "
        f"{accuracy(surface)}",
    )


def read_profile(path: Path) -> Profile:
    """A file that `hydra-engine profile --output` has written, on whatever machine. Raises ConfigError."""
    try:
        outer = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        profile = msgspec.json.decode(outer["profile"], type=Profile)
    except OSError as error:
        raise ConfigError(f"the profile {path.name} cannot be read: {error.strerror}", param="profile") from error
    except (KeyError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path.name} is no profile of this version of the engine: {error}", param="profile"
        ) from error
    if (wrong := problem_of(profile)) is not None:
        raise ConfigError(f"the profile {path.name} makes no sense: {wrong}", param="profile")
    return profile


def read_costs(path: Path) -> Costs:
    """Reads the costs of a saved profile. Raises ConfigError."""
    profile = read_profile(path)
    return costs_of(profile, f"profile of {profile.measured_at[:10]}")
