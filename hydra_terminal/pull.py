"""`hydra-engine pull MODEL`: fetches the files of a hub id that `serve` needs into the Hugging Face cache."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from hydra_engine.config import DEMO_MODEL, SHAPES, EngineConfig
from hydra_engine.config.hub import ModelPaths, find_hub_model, hub_name
from hydra_engine.core.units import size
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.specs.registry import load_spec


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s MODEL [--revision REVISION]"
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="hub id: ORG/NAME, or OWNER/REPO:Q4_K_M for GGUF files, as after llama.cpp's -hf",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit (default: main)")
    parser.add_argument("--mmproj", metavar="NAME", help="mmproj of GGUF files, if not the one that fits best")
    parser.add_argument("--model-impl", default="auto", metavar="NAME", help="as of serve; transformers: any model")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="as of serve; fetches the code that comes with the model too"
    )
    parser.epilog = (
        "HF_HOME and the other variables of huggingface_hub set the cache's place. An interrupted download goes on "
        "with the files that are missing. `hydra-engine list` shows what is there."
    )


def run(arguments: argparse.Namespace) -> int:
    config = EngineConfig(
        model=arguments.model,
        revision=arguments.revision,
        mmproj=arguments.mmproj,
        model_impl=arguments.model_impl,
        trust_remote_code=arguments.trust_remote_code,
    )
    _check_is_fetched(config)
    found = _find_cached(config)
    state = "is there already"
    if found is None:
        state = "is in the Hugging Face cache"
        _fetch_description(config)
        found = find_hub_model(replace(config, download=True))
        assert found is not None
    sys.stdout.write(f"{config.model} {state}: {size(_num_bytes(found))} in {found.folder}\n")
    sys.stdout.write(f"go on: {_next_command(arguments)}\n")
    return 0


def _check_is_fetched(config: EngineConfig) -> None:
    """Raises ConfigError for a MODEL that is no name of the hub and is here."""
    model = config.model
    if model == DEMO_MODEL:
        raise ConfigError("demo ships with the engine: `hydra-engine run demo`")
    if model in SHAPES:
        raise ConfigError(f"{model} ships without weights, for --load-format random; pull fetches ids such as ORG/NAME")
    if os.path.exists(model):
        raise ConfigError(f"{model[:200]!r} is there already: `hydra-engine run {shlex.quote(model[:200])}`")


def _find_cached(config: EngineConfig) -> ModelPaths | None:
    """Returns the model if the cache has all of it, with the mmproj if it is one of GGUF files."""
    try:
        found = find_hub_model(config)
    except CheckpointError:
        if hub_name(config.model) is None:  # no download gives that
            raise
        return None
    return found if found is not None and (not found.gguf or found.mmproj) else None


def _fetch_description(config: EngineConfig) -> None:
    """Fetches the small files of a model of safetensors and raises CheckpointError if it cannot be served, before its
    weights are fetched."""
    named = hub_name(config.model)
    if named is not None and named[1] is not None:  # GGUF files have no others
        return
    found = find_hub_model(replace(config, download=True, load_format="random"))
    if found is not None and not found.gguf:
        load_spec(found.folder, config.spec_options)


def _num_bytes(found: ModelPaths) -> int:
    files = [*found.gguf, *filter(None, [found.mmproj])] or [path for path in found.folder.rglob("*") if path.is_file()]
    return sum(Path(path).stat().st_size for path in files)


def _next_command(arguments: argparse.Namespace) -> str:
    words = ["hydra-engine", "run", arguments.model]
    for flag in ("revision", "mmproj"):
        if value := getattr(arguments, flag):
            words += [f"--{flag}", value]
    if arguments.model_impl != "auto":
        words += ["--model-impl", arguments.model_impl]
    return shlex.join(words) + (" --trust-remote-code" if arguments.trust_remote_code else "")
