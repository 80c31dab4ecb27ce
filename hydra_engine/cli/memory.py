"""`hydra-engine memory MODEL --topology E+P+D`: what each instance would hold, and what its role saves.

Loads no weights, so the same refusals as at start take a second, also for machines that are not there (`--memory`).
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.cli.summary import columns, size
from hydra_engine.errors import ConfigError

_GIB = 1 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="as if every device had that much; default: what is free here"
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments).engine()
    log.configure(config.log_level, log_format=config.log_format)
    memory: float | None = arguments.memory
    if memory is not None and not 0 < memory < 1e6:
        raise ConfigError("--memory must be a number of GiB above 0", param="memory")
    footprint: Any = import_module("hydra_engine.instance.footprint")  # loads torch
    found = footprint.footprints(config, None if memory is None else int(memory * _GIB))
    sys.stdout.write("\n".join(report_lines(found, Path(config.model_name).name)) + "\n")
    return 0


def report_lines(found: Any, model: str) -> list[str]:
    """`found`: Footprints."""
    rows = [("instance", "role", "device", "weights", "KV cache", "image cache", "in all", "less than EPD")]
    for one, whole in zip(found.instances, found.wholes, strict=True):
        kv = f"{size(one.kv_bytes)} ({one.kv_tokens} tokens)" if one.kv_tokens else "none"
        images = f"{size(one.image_bytes)} ({one.image_rows} rows)" if one.image_rows else "none"
        sizes = (size(one.weights_bytes), kv, images, size(one.total_bytes))
        rows.append((one.name, one.role, one.device, *sizes, _saved(one, whole)))
    lines = [f"{model} ({found.family}), {found.dtype}, topology {found.topology}", *columns(rows)]
    working = [one for one in found.instances if one.working.total_bytes]
    for one in working:
        steps = f"activations about {size(one.working.activation_bytes)}, graphs {size(one.working.graph_bytes)}"
        lines.append(f"  {one.name}: {steps}; measured at start")
    states = sum(one.state_bytes for one in found.instances)
    if states:
        lines.append(f"  {size(states)} of that are recurrent states")
    for device, available in found.memory.items():
        used = sum(one.total_bytes for one in found.instances if one.device == device)
        verdict = "" if used <= available else ": too much, give smaller caches"
        lines.append(f"device {device}: {size(used)} of {size(available)}{verdict}")
    return lines


def _saved(one: Any, whole: Any) -> str:
    """Against an instance that does everything in the same place with the same settings."""
    if one.role == "EPD":
        return ""
    if whole is None:
        return "EPD would not fit"
    parts = []
    for what, less in (
        ("decoder", whole.language_bytes - one.language_bytes),
        ("vision tower", whole.vision_bytes - one.vision_bytes),
        ("KV cache", whole.kv_bytes - one.kv_bytes if not one.kv_bytes else 0),
        ("image cache", whole.image_bytes - one.image_bytes if not one.image_bytes else 0),
        ("states", whole.state_bytes - one.state_bytes),
        ("activations", whole.working.activation_bytes - one.working.activation_bytes),
    ):
        if less > 0:
            parts.append(f"{what} {size(less)}")
    more_tokens = one.kv_tokens - whole.kv_tokens
    if one.kv_tokens and more_tokens > 0:
        parts.append(f"{more_tokens} more tokens of KV")
    percent = round(100 * (1 - one.total_bytes / max(whole.total_bytes, 1)))
    return f"{percent} %: {', '.join(parts)}" if parts else ""
