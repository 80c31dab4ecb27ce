"""`--devices` of `hydra-engine plan`: parses kinds of devices, with step times from measurements or a roofline."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_engine import log
from hydra_engine.backend import devices
from hydra_engine.config import EngineConfig
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.profiler.other_load import busy_note
from hydra_planner.commands.profile import progress_line

if TYPE_CHECKING:
    from hydra_engine.profiler.start import StepCosts
    from hydra_engine.profiler.store import Profile
    from hydra_planner.simulator.costs import Costs, DeviceKind, Host

MAX_DEVICES = 64
_PART = re.compile(r"(?:(?P<count>[0-9]{1,4})\s*[x*]\s*)?(?P<kind>\S.*)")
_HOST_CORES = 16  # of a host with devices that are not here


def devices_of(
    text: str, profile: Path | None, config: EngineConfig, spec: ModelSpec
) -> tuple[dict[str, DeviceKind], Host]:
    """(devices by name, costs of the host). Raises ConfigError for an invalid text, an unknown kind, and a profile of
    another model."""
    from hydra_planner.simulator.costs import Host

    if text.strip().isdigit():
        count = _checked(int(text), text)
        kind = _like_here(profile, config, spec)
        if kind.on_processor and count == 1:
            return {devices.CPU: kind}, Host()
        return {f"cuda:{index}": kind for index in range(count)}, Host(cores=0 if kind.on_processor else _HOST_CORES)
    if profile is not None:
        raise ConfigError(
            f"--profile holds for devices like the one it was measured on; write --devices 8, not {text[:40]}",
            param="profile",
        )
    kinds: list[DeviceKind] = []
    for part in text.split("+"):
        count, kind = _part(part.strip(), text, config, spec)
        kinds += [kind] * count
    _checked(len(kinds), text)
    return {f"cuda:{index}": kind for index, kind in enumerate(kinds)}, Host(cores=_HOST_CORES)


def with_mps(kinds: Mapping[str, DeviceKind]) -> dict[str, DeviceKind]:
    """Returns the kinds with MPS running on each. Raises ConfigError if they are a processor."""
    if any(kind.on_processor for kind in kinds.values()):
        raise ConfigError("--mps is for GPUs, and this plan is for a processor; leave it out", param="mps")
    return {name: replace(kind, has_mps=True) for name, kind in kinds.items()}


def with_prices(kinds: Mapping[str, DeviceKind], texts: Sequence[str]) -> dict[str, DeviceKind]:
    """Returns the kinds with these prices for an hour, each A100=1.29 or, of all devices, 1.29, in place of all that is
    known of the price of a kind. Raises ConfigError."""
    from hydra_planner.hardware.devices import find_device

    found, names = dict(kinds), {kind.name for kind in kinds.values()}
    for text in texts:
        name, equals, dollars = text.rpartition("=")
        chosen = name.strip() if name.strip() in names or not equals else find_device(name.strip()).name
        if equals and chosen not in names:
            raise ConfigError(
                f"--price {text[:40]}: the plan has no {chosen}, only {', '.join(sorted(names))}", param="price"
            )
        try:
            price = float(dollars.strip().removeprefix("$"))
        except ValueError:
            price = math.nan
        if not 0 < price < math.inf:
            raise ConfigError(
                f"--price {text[:40]}: write dollars for an hour of one device, for example A100=1.29", param="price"
            )
        for device, kind in found.items():
            if not equals or kind.name == chosen:
                found[device] = replace(kind, price=None, hour_price=price)
    return found


def _part(part: str, text: str, config: EngineConfig, spec: ModelSpec) -> tuple[int, DeviceKind]:
    from hydra_planner.hardware.devices import find_device
    from hydra_planner.hardware.roofline import device_kind

    match = _PART.fullmatch(part)
    if match is None:
        raise ConfigError(
            f"cannot read --devices {text[:40]!r}; write for example 8, 8xH200 or 2xA100+2xRTX4090", param="devices"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
    return int(match["count"] or 1), device_kind(spec, find_device(match["kind"].strip()), dtype)


def _checked(count: int, text: str) -> int:
    if not 1 <= count <= MAX_DEVICES:
        raise ConfigError(f"--devices {text[:40]}: plan for 1 to {MAX_DEVICES} devices", param="devices")
    return count


def _like_here(path: Path | None, config: EngineConfig, spec: ModelSpec) -> DeviceKind:
    from hydra_engine.profiler.store import model_identity
    from hydra_planner.simulator.costs import costs_of, read_profile

    if path is None:
        log.log_always("step times: looking for a saved profile of this model here, else measuring one")
        measured = _measured_here(config)
        profile, source = measured.profile, measured.source
    else:
        profile = read_profile(path)
        source = f"profile of {profile.measured_at[:10]}"
        if profile.identity.model != model_identity(config.model_path):
            raise ConfigError(
                f"the profile {path.name} was measured with another model than {config.model_name}; measure one with "
                f"`hydra-engine profile {config.model} --output FILE`",
                param="profile",
            )
        _check_settings(path, profile, config, spec)
        if (busy := busy_note(profile.other_load)) is not None:
            raise ResourceError(
                f"no plan from {path.name}, for its step times would mislead: {busy}. End the other programs, then "
                f"measure with `hydra-engine profile {config.model} --output FILE`",
                param="profile",
            )
    return _kind(profile, costs_of(profile, source))


def _check_settings(path: Path, profile: Profile, config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError if the profile was measured with other settings of the kernels than the plan's."""
    identity = profile.identity
    wanted = {
        "dtype": identity.dtype if config.dtype == "auto" else config.dtype,
        "kv_cache_dtype": "int8" if config.cache.kv_cache_dtype == "int8" else "",
        "quantization": "" if spec.at_load is None else config.quantization,
    }
    for field, value in wanted.items():
        measured, flag = getattr(identity, field) or "none", f"--{field.replace('_', '-')}"
        if (value or "none") != measured:
            raise ConfigError(
                f"the profile {path.name} was measured with {flag} {measured}, and this plan has {value or 'none'}; "
                f"measure one with the plan's {flag}: `hydra-engine profile {config.model} --output FILE`",
                param="profile",
            )


def _measured_here(config: EngineConfig) -> StepCosts:
    """Step times of this machine, saved or new; measured again if the machine was busy. Raises ResourceError if it
    still is."""
    hooks: Any = import_module("hydra_engine.instance.hooks")  # loads torch
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in instances
    for fresh in (False, True):
        measured: StepCosts = hooks.profile_instance(config, progress_line(), fresh=fresh)
        if (busy := busy_note(measured.profile.other_load)) is None:
            return measured
        log.log_always(f"step times: {busy}")
    raise ResourceError(
        f"no plan, for step times measured on this machine now would mislead: {busy}. End the other programs, or take "
        "step times measured before with --profile FILE"
    )


def _kind(profile: Profile, costs: Costs) -> DeviceKind:
    """The device of a profile. A GPU's memory and links come from its datasheet; without one, memory is what the driver
    reports, and links are the slowest known, which is logged. Raises ConfigError if such a GPU is not here."""
    from hydra_planner.hardware.devices import LINK_SHARE, find_device, is_known, slowest_ways
    from hydra_planner.simulator.costs import DeviceKind

    if costs.threads:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DeviceKind(profile.identity.processor or "this processor", costs, memory_bytes=free)
    gpu = profile.identity.gpu
    here = next((info for info in devices.probe().devices if info.name == gpu), None)
    if not is_known(gpu) and here is not None:
        host_link, copies = slowest_ways()
        log.log_always(
            f"the planner has no datasheet of {gpu}: its memory is what the driver reports, its links to others are "
            f"taken for {host_link.name}, and copies within it for the slowest known"
        )
        return DeviceKind(
            gpu,
            costs,
            memory_bytes=here.memory_bytes,
            link_bytes_per_s=host_link.bytes_per_s,
            copy_bytes_per_s=copies,
        )
    device = find_device(gpu)
    return DeviceKind(
        device.name,
        costs,
        memory_bytes=device.memory_bytes,
        link_bytes_per_s=LINK_SHARE * device.link_bytes_per_s,
        copy_bytes_per_s=device.copy_bytes_per_s,
        price=device.price,
        hour_price=device.hour_price,
    )


def check_here(kinds: Mapping[str, DeviceKind], *, mps: bool = False) -> None:
    """Raises ConfigError if this machine does not have all of these devices, or no MPS on one where the plan is for
    `mps`, before anything is simulated."""
    here = devices.names()
    missing = [name for name in kinds if name not in here]
    if missing:
        raise ConfigError(
            f"--launch needs {len(kinds)} devices, and this machine has {', '.join(here)}; plan for those, or leave "
            "--launch out",
            param="launch",
        )
    if mps and (without := [name for name in kinds if devices.is_time_sliced(name)]):
        raise ConfigError(
            f"--mps: MPS does not run on {', '.join(without)}; docs/gpu.md says how to start it, or leave --mps out",
            param="mps",
        )
