"""The cost surface of an instance that is about to serve: the saved one if it is still valid, else measured and saved.

Decides whether to measure and logs the reason; `calibrate.py` measures. Knows neither tensors nor budgets.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hydra_engine import __version__
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.models.specs.base import ModelSpec, VisionSpec
from hydra_engine.models.specs.registry import FAMILIES
from hydra_engine.profile_file import Refused
from hydra_engine.profiler.calibrate import DEADLINE_S, Lanes, Site, calibrate
from hydra_engine.profiler.fit import fit
from hydra_engine.profiler.grid import Sizes
from hydra_engine.profiler.other_load import OtherLoad, busy_note
from hydra_engine.profiler.store import Identity, Profile, Reach, file_name, load, model_identity, save

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_CACHE_SHARE = 0.25  # of the weights' bytes: so many keys and values do measured steps read at most
_MIN_CACHE_BYTES = 64 << 20
_STATE_STEPS = 4  # as many full steps may bring a slot's state to its context
_EVEN = 2.0  # two lanes that share a device evenly


@dataclass(frozen=True, slots=True)
class Subject:
    """An assembled instance that does not serve yet. `fill_cache(n)` writes finite noise into the first n KV blocks:
    pages that were never written are not mapped to memory, and reading them costs nothing."""

    lanes: Lanes
    wake: threading.Event
    clock: Clock
    spec: ModelSpec
    device: str
    dtype: str
    backend: str
    threads: int
    num_kv_blocks: int
    num_image_blocks: int
    kv_token_bytes: int
    weights_bytes: int
    fill_cache: Callable[[int], None]
    kv_cache_dtype: str = ""  # as in `Identity`
    role: str = "EPD"  # what it computes
    gpu: str = ""  # as in `Identity`
    attention: str = ""
    sm_split: tuple[int, ...] = ()
    graph_sizes: tuple[int, ...] = ()  # of decode steps that were captured
    captured_patches: int = 0  # of the largest encode that was
    captured_tokens: int = 0  # of the largest step with prompts that was


class StepCosts(NamedTuple):
    """The cost surface of an instance. `source`: its origin in a few words; `notes`: for the start-up summary; `state`:
    what has happened to `file`, its name to follow."""

    surface: CostSurface
    notes: tuple[str, ...]
    source: str
    profile: Profile
    file: Path
    state: str = "saved in"


def surface_for(
    config: EngineConfig, subject: Subject, progress: Progress, *, fresh: bool = False, deadline_s: float | None = None
) -> StepCosts:
    """Loads or measures the cost surface. `config` has no "auto" that decides a size of a step or cache.
    `fresh`: measure even if a valid profile is saved; one of an idle machine is then not replaced by one of a busy
    machine. `deadline_s` None: `DEADLINE_S`.

    Raises BackendError when the model cannot run a step, ConfigError where there is no folder for profiles. A file that
    cannot be read or written is logged, not an error.
    """
    sizes = _sizes(config, subject)
    identity = _identity(config, subject)
    reach = Reach(sizes.token_budget, sizes.max_num_seqs, sizes.image_budget)
    file = config.profile_folder / file_name(config.model_path, identity)
    saved = None if fresh else _saved(file, identity, reach)
    if saved is not None:
        notes = (f"step times: measured on {saved.measured_at[:10]}, {accuracy(saved.surface)}", *saved.notes)
        return StepCosts(saved.surface, notes, "saved profile", saved, file)
    profile = _measured(subject, sizes, identity, reach, progress, DEADLINE_S if deadline_s is None else deadline_s)
    state = StepCosts._field_defaults["state"]
    kept = _idle(file, identity, reach) if fresh and busy_note(profile.other_load) else None
    if kept is not None and kept.num_left <= profile.num_left:
        state = f"not saved, the machine was busy: what was measured on {kept.measured_at[:10]} stays in"
    else:
        try:
            save(profile, file)
        except OSError as error:
            logger.warning(
                "the measured step times could not be saved: %s; they are used for this start only", error.strerror
            )
            state = "could not be saved in"
    source = f"measured just now in {profile.seconds:.1f} s"
    notes = (f"step times: {source}, {accuracy(profile.surface)}", *profile.notes)
    return StepCosts(profile.surface, notes, source, profile, file, state)


def _idle(file: Path, identity: Identity, reach: Reach) -> Profile | None:
    """The saved profile if it is valid and was measured on an idle machine."""
    try:
        saved = load(file, identity, reach)
    except Refused:
        return None
    return None if saved is None or busy_note(saved.other_load) else saved


def _saved(file: Path, identity: Identity, reach: Reach) -> Profile | None:
    try:
        return load(file, identity, reach)
    except Refused as reason:
        logger.warning("the saved profile of this model is not used: %s; step times are measured again", reason)
        return None


def _measured(
    subject: Subject, sizes: Sizes, identity: Identity, reach: Reach, progress: Progress, deadline_s: float
) -> Profile:
    spec = subject.spec
    vision = spec.vision if subject.num_image_blocks else None
    generic = vision is not None and vision.processor is not None
    subject.fill_cache(sizes.kv_tokens // sizes.block_size)
    site = Site(
        lanes=subject.lanes,
        wake=subject.wake,
        clock=subject.clock,
        sizes=sizes,
        vocab_size=spec.language.vocab_size,
        vision=None if generic else vision,
        stateful=spec.language.has_states,
    )
    other = OtherLoad()
    done = calibrate(site, progress, deadline_s)
    other_load = other.share()
    surface = fit(done.samples)
    notes = [f"{note}; `hydra-engine profile` measures for the next start"] if (note := busy_note(other_load)) else []
    if done.num_left:
        notes.append(f"{done.num_left} of {done.num_points} kinds of steps were not measured within {deadline_s:g} s")
    if vision is not None and not done.samples.vision:
        surface = _with_estimated_vision(surface, spec, vision, reach)
        why = "there are no synthetic pictures for this model" if generic else "there was no time to measure one"
        notes.append(f"vision steps are estimated from their FLOPs: {why}")
    if vision is not None and not done.samples.corun:
        surface = replace(
            surface, decode_slowdown=_EVEN, prefill_slowdown=_EVEN, vision_slowdown=_EVEN, corun_error=1.0
        )
        notes.append("steps of both lanes at once were not measured; each lane is assumed to run at half its speed")
    if len({point.partition for point in done.samples.corun}) < sizes.num_partitions > 1:
        surface = replace(surface, splits=())
        notes.append("the device is not divided: steps on its partitions were not all measured")
    return Profile(
        identity=identity,
        reach=reach,
        surface=surface,
        samples=done.samples,
        submit_s=done.submit_s,
        collect_s=done.collect_s,
        num_points=done.num_points,
        num_left=done.num_left,
        seconds=done.seconds,
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        notes=tuple(notes),
        other_load=other_load,
    )


def _sizes(config: EngineConfig, subject: Subject) -> Sizes:
    block_size, token_budget = config.cache.block_size, config.scheduler.max_step_tokens
    affordable = max(_MIN_CACHE_BYTES, int(_CACHE_SHARE * subject.weights_bytes)) // max(subject.kv_token_bytes, 1)
    if subject.spec.language.has_states:
        affordable = min(affordable, _STATE_STEPS * token_budget)
    max_model_len = config.max_model_len or subject.spec.max_model_len
    held = max(min(affordable // block_size, subject.num_kv_blocks), 1)
    return Sizes(
        max_num_seqs=config.scheduler.max_running_requests,
        token_budget=token_budget,
        image_budget=config.scheduler.image_budget,
        max_model_len=max_model_len,
        kv_tokens=held * block_size,
        block_size=block_size,
        num_image_blocks=subject.num_image_blocks,
        image_block_size=config.cache.image_block_size,
        num_partitions=1 + len(subject.sm_split),
    )


def _identity(config: EngineConfig, subject: Subject) -> Identity:
    return Identity(
        model=model_identity(config.model_path),
        device=subject.device,
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        threads=subject.threads,
        lane_priority=config.lane_order,
        dtype=subject.dtype,
        backend=subject.backend,
        deterministic=bool(config.deterministic),
        sliced=config.scheduler.slices_layers,
        block_size=config.cache.block_size,
        engine=__version__,
        role=subject.role,
        gpu=subject.gpu,
        attention=subject.attention,
        sm_split=_listed(subject.sm_split),
        graphs=_graphs(captured=bool(subject.graph_sizes), chosen=config.cuda_graph_sizes),
        model_impl="" if subject.spec.family in FAMILIES else subject.spec.family,
        kv_cache_dtype=subject.kv_cache_dtype,
        encode_graphs=_graphs(captured=subject.captured_patches > 0, chosen=config.encoder_cuda_graph_sizes),
        step_graphs=subject.captured_tokens,
        quantization="" if subject.spec.at_load is None else config.quantization,
    )


def _graphs(*, captured: bool, chosen: Sequence[int]) -> str:
    """Graph sizes as part of the identity. Default sizes need no numbers: they follow from `Reach`."""
    if not captured:
        return ""
    return _listed(chosen) or "default"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def processor_name() -> str:
    """The processor's model name from /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _with_estimated_vision(surface: CostSurface, spec: ModelSpec, vision: VisionSpec, reach: Reach) -> CostSurface:
    """Estimates encodes from the FLOP rate of a full prefill step."""
    tokens, patches = reach.rows, max(reach.patches, 1)
    full_s = surface.language_s(LanguageLoad(0, 0, tokens, tokens * (tokens + 1) / 2, 1))
    rate = tokens * spec.language.flops_per_token(tokens // 2) / full_s
    seconds = vision.flops(patches) / rate
    return replace(surface, patches=Curve((0.0, float(patches)), (0.0, seconds)), vision_error=1.0)


def accuracy(surface: CostSurface) -> str:
    """The 90th percentile of prediction errors. 0: no step of the kind was measured."""
    errors = (("language", surface.language_error), ("vision", surface.vision_error), ("both", surface.corun_error))
    shown = ", ".join(f"{lane} {error:.0%}" if error else f"{lane} n/a" for lane, error in errors)
    return f"90th-percentile prediction error: {shown}"
