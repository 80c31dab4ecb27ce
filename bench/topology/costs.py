"""What everything costs that a simulation does not compute: steps from a profile of a real machine, the rest constants.

A profile is what `hydra-engine profile MODEL` measures and saves; without a saved one it is measured here. Nothing of
it is scaled: simulated devices are as fast as the machine of the profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from hydra_engine.config import EngineConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.planner.store import Profile, problem_of

# A turn of an instance's loop that takes a step back and plans the next one: bench.sched on two cores of an EPYC.
TURN_S = 0.0002
# A message between two processes, until the other one has read it: bench.migrate's round trips, and a thread to wake.
MESSAGE_S = 0.0001
# A pull job besides its bytes (to the lane, the control word, and back), and its bytes: bench.migrate on one machine.
PULL_S = 0.0001
PULL_BYTES_PER_S = 8e9


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. `cores` and `threads` (of a lane): of the machine that was profiled."""

    surface: CostSurface
    submit_s: float = 0.0  # from a plan's submission to an idle lane to the start of its step
    collect_s: float = 0.0  # from the end of a step until its instance knows
    cores: int = 1
    threads: int = 1
    dtype: str = "bfloat16"
    turn_s: float = TURN_S
    message_s: float = MESSAGE_S
    pull_s: float = PULL_S
    pull_bytes_per_s: float = PULL_BYTES_PER_S
    source: str = "made up"

    def pulled_s(self, num_bytes: int) -> float:
        return self.pull_s + num_bytes / self.pull_bytes_per_s

    def document(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


_NOTHING = Curve((0.0,), (0.0,))
UNKNOWN = Costs(CostSurface(_NOTHING, 0.0, 0.0, 0.0, _NOTHING, 0.0), source="not measured")


def costs_of(profile: Profile, source: str) -> Costs:
    identity = profile.identity
    return Costs(
        profile.surface,
        submit_s=profile.submit_s,
        collect_s=profile.collect_s,
        cores=identity.cores,
        threads=identity.threads,
        dtype=identity.dtype,
        source=f"{source}: {identity.processor or identity.device}, {identity.cores} cores, {identity.dtype}",
    )


def read_profile(path: Path) -> Profile:
    """A file that `hydra-engine profile --output` has written, on whatever machine. Raises ValueError."""
    try:
        outer = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        profile = msgspec.json.decode(outer["profile"], type=Profile)
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise ValueError(f"{path.name} is no profile of this version of the engine: {error}") from error
    if (problem := problem_of(profile)) is not None:
        raise ValueError(f"{path.name} makes no sense: {problem}")
    return profile


def read_costs(path: Path) -> Costs:
    """Of a profile in a file. Raises ValueError."""
    profile = read_profile(path)
    return costs_of(profile, f"profile of {profile.measured_at[:10]}")


def machine_costs(config: EngineConfig, deadline_s: float | None = None) -> Costs:
    """Of this machine: the saved profile where it still holds, measured otherwise, with a bar."""
    from hydra_engine.instance.build import profile_instance  # loads torch

    with tqdm(unit="step", disable=None, leave=False) as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar.set_description_str(what)
            bar.total, bar.n = total, done
            bar.refresh()

        measured = profile_instance(config, progress, fresh=False, deadline_s=deadline_s)
    return costs_of(measured.profile, measured.source)
