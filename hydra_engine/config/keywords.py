"""Options as keywords of `Engine`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from os import PathLike
from typing import Any, TypedDict

from hydra_engine.config.engine import (
    PARTS,
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    MediaConfig,
    SchedulerConfig,
)
from hydra_engine.config.fields import Option
from hydra_engine.config.options import MEDIA_LIMITS, all_options, media_limits, options_by_name
from hydra_engine.config.other_engines import Spelling, reason_ignored, unknown_name
from hydra_engine.config.server import ServerConfig
from hydra_engine.config.values import value_from_object
from hydra_engine.core.sampling import PARAMETERS
from hydra_engine.errors import ConfigError

logger = logging.getLogger(__name__)

_LIMITS = MEDIA_LIMITS.replace("-", "_")
_SHOWN = 60  # characters of an unknown keyword that its message quotes
_PROGRESS = Option("progress", "progress", object, bool, None, "", optional=True)
_PROCESSES = Option("processes", "processes", object, bool, False, "")


class EngineOptions(TypedDict, total=False):
    """Keywords of `Engine`, by the section of a configuration file to which they belong; docs/options.md explains them.
    At run time each also takes the text that its flag takes, such as "4k" or "off"."""

    # engine
    mmproj: str | PathLike[str] | None
    revision: str | None
    download: bool
    device: str
    dtype: str
    topology: str
    instance_limits: str | None
    max_model_len: int | None
    threads: int | None
    lane_priority: str
    sm_split: str
    attention_backend: str
    deterministic: bool | None
    model_impl: str
    load_format: str
    packed_cache: str | PathLike[str] | None
    quantization: str
    trust_remote_code: bool
    backend: str
    enforce_eager: bool
    cuda_graph_sizes: Sequence[int]
    encoder_cuda_graph_sizes: Sequence[int]
    seed: int
    chat_template: str | PathLike[str] | None
    generation_config: str
    override_generation_config: str | Mapping[str, Any] | None
    profile_dir: str | PathLike[str] | None
    log_level: str
    log_format: str
    # scheduler
    tpot_slo: float | str | None
    ttft_slo: float | str | None
    token_budget: int | None
    image_budget: int
    handover_tokens: int | None
    max_num_seqs: int | None
    max_queue: int
    scheduling_policy: str
    encode_policy: str
    max_bypass: int
    look_ahead: bool | None
    # cache
    kv_cache_gib: float | None
    image_cache_gib: float | None
    block_size: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    num_kv_blocks: int | None
    num_image_blocks: int | None
    prefix_caching: bool
    # media
    max_images: int | None
    max_image_bytes: int
    max_image_pixels: int
    max_aspect_ratio: float
    max_videos: int
    max_video_bytes: int
    max_video_frames: int
    max_video_pixels: int
    fetch_timeout_s: float
    max_fetched_bytes: int
    allow_private_media: bool
    allowed_media_domains: Sequence[str]
    allowed_media_path: str | PathLike[str] | None
    decode_workers: int
    pixel_cache_mib: int
    min_pixels: int | None
    max_pixels: int | None
    # cluster
    launcher: str | None
    ray_address: str | None
    cluster_tls: str | PathLike[str] | None
    transfer_backend: str
    router: str
    lease_s: float
    suspect_s: float
    fence_s: float
    recovery_s: float
    max_attempts: int
    steal_decodes: bool
    prefetch_features: bool
    early_kv: bool
    transport: str
    check_transfers: bool
    # whole sections, whose fields may be given as keywords too
    scheduler: SchedulerConfig
    cache: CacheConfig
    media: MediaConfig
    cluster: ClusterConfig
    # names of vLLM
    allowed_local_media_path: str | PathLike[str] | None
    cudagraph_capture_sizes: Sequence[int]
    enable_prefix_caching: bool
    limit_mm_per_prompt: Mapping[str, int]
    max_num_batched_tokens: int | None
    num_gpu_blocks_override: int | None


def config_from_options(model: object, options: Mapping[str, Any]) -> EngineConfig:
    """Builds an EngineConfig for the embedded engine from flat options: fields of the config itself and of its parts,
    also under vLLM's names, and the parts. Local pictures may be opened, because they are the caller's own, unless
    `media` is given. Raises ConfigError for a wrong type, name or value."""
    # `cluster` is also the option of this name: cluster="ray".
    names = [name for name in PARTS if name not in _keywords() or not isinstance(options.get(name), str)]
    parts = {name: options[name] for name in names if name in options}
    chosen: dict[str, Any] = {"model": value_from_object(options_by_name()["model"], model, "model")}
    written: dict[str, str] = {}  # the keyword that has set a field
    for name, value in options.items():
        if (reason := reason_ignored(name.replace("_", "-"), value)) is not None:
            logger.warning("%s changes nothing here: %s", name, reason)
        elif name not in parts and name != _LIMITS:
            option = _option(name)
            if (other := written.setdefault(option.field, name)) != name:
                raise ConfigError(f"{name} and {other} mean the same; give one of them", param=option.field)
            chosen[option.field] = value_from_object(option, value, name)
    if (limits := options.get(_LIMITS)) is not None:
        for field, count in media_limits(limits, _LIMITS).items():
            if chosen.setdefault(field, count) != count:
                raise ConfigError(f"{_LIMITS} and {field} contradict each other; give one", param=field)
    config = EngineConfig(**({"media": MediaConfig(local_files=True)} | parts))
    for name, part in (*((name, getattr(config, name)) for name in PARTS), ("", config)):
        given = {f.name: chosen[f.name] for f in fields(part) if f.name in chosen}
        if given:
            config = replace(config, **({name: replace(part, **given)} if name else given))
    return config


def check_start(progress: object, processes: object) -> tuple[bool | None, bool]:
    """Returns the two keywords of `Engine` that are no options. Raises ConfigError for a wrong type."""
    return value_from_object(_PROGRESS, progress, "progress"), value_from_object(_PROCESSES, processes, "processes")


@cache
def _keywords() -> dict[str, Option]:
    """Options of the engine by the keywords that set them."""
    engine = [option for option in all_options() if option.owner is not ServerConfig and not option.positional]
    names = ((name, option) for option in engine for name in (option.field, option.name, *option.aliases))
    return {name.replace("-", "_"): option for name, option in names}


def _option(name: str) -> Option:
    """Returns the option that a keyword sets. Raises ConfigError if there is none."""
    if (option := _keywords().get(name)) is not None:
        return option
    written = name[:_SHOWN]
    if (other := options_by_name().get(name.replace("_", "-"))) is not None:
        sentence = f"{written} is an option of the server, `hydra-engine serve {other.flag}`"
    elif name in PARAMETERS:
        sentence = f"{written} is set for each request: generate(.., {written}=..)"
    else:
        known = [name.replace("_", "-") for name in (*_keywords(), *PARTS, _LIMITS)]
        sentence = unknown_name(name, known, written, Spelling.KEYWORD)
        sentence += "" if ":" in sentence or ";" in sentence else " of Engine; `hydra-engine serve --help` lists all"
    raise ConfigError(sentence, param=name)
