"""`hydra-engine memory MODEL --topology E+P+D`: the memory of each instance, and the savings of its role.

Loads no weights, so errors that a start would raise take a second, also for other machines (`--memory`).
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.summary import columns
from hydra_engine.core.units import GIB, size
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.preprocess.model_files import find_model_files


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of every device; default: what is free on this machine"
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = find_model_files(read_settings(arguments).engine())
    log.configure(config.log_level, log_format=config.log_format)
    memory: float | None = arguments.memory
    if memory is not None and not 0 < memory < 1e6:
        raise ConfigError("--memory must be a number of GiB above 0", param="memory")
    footprint: Any = import_module("hydra_planner.footprint")  # loads torch
    footprints = footprint.footprints(config, None if memory is None else int(memory * GIB))
    sys.stdout.write("\n".join(report_lines(footprints, config.model_name)) + "\n")
    fits = all(_used(footprints, device) <= available for device, available in footprints.memory.items())
    return 0 if fits else ResourceError.exit_code


def report_lines(footprints: Any, model: str) -> list[str]:
    """The lines of the report; `footprints` is a `Footprints`."""
    rows = [("instance", "role", "device", "weights", "KV cache", "image cache", "in all", "less than EPD")]
    for instance, whole in zip(footprints.instances, footprints.wholes, strict=True):
        plan = instance.plan
        kv = f"{size(plan.kv_bytes)} ({instance.kv_tokens} tokens)" if instance.kv_tokens else "none"
        images = f"{size(plan.image_bytes)} ({instance.image_rows} rows)" if instance.image_rows else "none"
        sizes = (size(plan.weights_bytes), kv, images, size(plan.total_bytes))
        rows.append((instance.name, instance.role, instance.device, *sizes, _saved(instance, whole)))
    lines = [f"{model} ({footprints.family}), {footprints.dtype}, topology {footprints.topology}", *columns(rows)]
    for instance in footprints.instances:
        working = instance.plan.working
        if working.total_bytes:
            steps = f"  {instance.name}: activations about {size(working.activation_bytes)}"
            if instance.device == "cpu":
                lines.append(steps)
                continue
            reach = f"up to {working.captured_tokens} tokens" if working.captured_tokens else "none"
            of_prompts = f" (steps with prompts: {reach})" if instance.kv_tokens else ""
            lines.append(f"{steps}, graphs {size(working.graph_bytes)}{of_prompts}; measured at start")
    states = sum(instance.plan.state_bytes for instance in footprints.instances)
    if states:
        lines.append(f"  {size(states)} of that are recurrent states")
    for device, available in footprints.memory.items():
        used = _used(footprints, device)
        verdict = "" if used <= available else ": too much, give smaller caches"
        lines.append(f"device {device}: {size(used)} of {size(available)}{verdict}")
    return lines


def _used(footprints: Any, device: str) -> int:
    return sum(instance.plan.total_bytes for instance in footprints.instances if instance.device == device)


def _saved(instance: Any, whole: Any) -> str:
    """The saving compared with an EPD instance on the same device with the same settings."""
    if instance.role == "EPD":
        return ""
    if whole is None:
        return "EPD would not fit"
    parts, own, all_of = [], instance.plan, whole.plan
    for what, saved in (
        ("decoder", all_of.language_weights_bytes - own.language_weights_bytes),
        ("vision tower", all_of.vision_weights_bytes - own.vision_weights_bytes),
        ("KV cache", all_of.kv_bytes - own.kv_bytes if not own.kv_bytes else 0),
        ("image cache", all_of.image_bytes - own.image_bytes if not own.image_bytes else 0),
        ("states", all_of.state_bytes - own.state_bytes),
        ("activations", all_of.working.activation_bytes - own.working.activation_bytes),
    ):
        if saved > 0:
            parts.append(f"{what} {size(saved)}")
    more_tokens = instance.kv_tokens - whole.kv_tokens
    if instance.kv_tokens and more_tokens > 0:
        parts.append(f"{more_tokens} more tokens of KV")
    percent = round(100 * (1 - own.total_bytes / max(all_of.total_bytes, 1)))
    return f"{percent} %: {', '.join(parts)}" if parts else ""
