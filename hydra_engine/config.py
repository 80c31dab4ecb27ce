"""The frozen configuration tree. The command line, the config file and the embedded API are generated from it.

`resolve()` (in `instance/build.py`, where the model is known) turns "auto" into values in a new object; nothing
mutates one. Field metadata: `help`, `flag` (name on the command line, in the environment and in a file, default the
field name with dashes), `aliases` (the same, as others call it), `choices`, `kind` ("seconds": takes 40ms, 1.5s or 2m
too; "file" and "folder": paths), `secret` (never shown).
Environment variables are read here and nowhere else: HYDRA_* (HYDRA_FAULTS, HYDRA_API_KEY and HYDRA_ADMIN_KEY wherever
an engine runs; the others only for the command line), XDG_CACHE_HOME and XDG_STATE_HOME.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hydra_engine.core.options import SpecOptions
from hydra_engine.core.roles import Topology
from hydra_engine.errors import ConfigError

DEMO_MODEL = "demo"
SECRET_VARIABLES = frozenset({"HYDRA_API_KEY", "HYDRA_ADMIN_KEY"})  # which only the front process needs
MAX_LIMIT_S = 3600.0  # of a latency limit
MAX_PRIORITY = (1 << 31) - 1  # of a request, and as far below zero
LOG_FORMATS = ("text", "json")
ACCESS_LOGS = ("off", *LOG_FORMATS)
TOOL_PARSERS = ("auto", "hermes", "json", "none")

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?(ms|s|m|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def _opt(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the stage batcher. With a TPOT limit, what a step may hold follows from measured step times and the
    budgets given here are upper bounds; without one they are taken as they are."""

    tpot_slo: float | None = _opt(
        None, "limit for the time between two tokens, for example 40ms; budgets are derived from it", kind="seconds"
    )
    ttft_slo: float | None = _opt(None, "limit for the time to the first token, for example 1s", kind="seconds")
    token_budget: int = _opt(
        512,
        "most tokens of one language step (decodes and prefill chunks together)",
        aliases=("max-num-batched-tokens",),
    )
    image_budget: int = _opt(0, "most patches of one vision step; 0: two images of the largest size, at most 16384")
    max_num_seqs: int = _opt(64, "most requests that hold KV blocks at once")
    max_queue: int = _opt(512, "most requests accepted and not finished; beyond it 503")
    encode_patience_ms: int = _opt(
        2000, "an image that has waited this long is encoded next even when cheaper work would go first"
    )
    max_bypass: int = _opt(16, "how many later requests may overtake a waiting one before room is saved for it")
    schedule: str = _opt(
        "stage",
        "stage: encodes, prefill chunks and decodes are scheduled separately; request: whole requests, first all "
        "their encodes, then their whole prompt, while others wait (to compare with)",
        choices=("stage", "request"),
    )
    lanes: bool = _opt(True, "run both models side by side; off: one step at a time (to compare with)")
    vision_slicing: bool = _opt(
        True, "pause the vision model between layers where a language step would be late (to compare with off)"
    )
    look_ahead: bool = _opt(
        False, "plan the next language step while one runs; on a CPU it gains little and costs goodput under mixed load"
    )

    @property
    def slices_layers(self) -> bool:
        """Encodes can pause inside layers and not only between them, which costs something."""
        return self.vision_slicing and self.tpot_slo is not None

    def __post_init__(self) -> None:
        """Durations may come as text; here they become seconds."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.metadata.get("kind") == "seconds" and value is not None:
                name = f"{f.name} (--{f.name.replace('_', '-')})"
                object.__setattr__(self, f.name, parse_seconds(value, name, param=f.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes hold for each instance that has such a cache."""

    kv_cache_gib: float | None = _opt(
        None, "memory of each instance's KV cache in GiB; default: room for max_num_seqs, bounded"
    )
    image_cache_gib: float | None = _opt(
        None, "memory of each instance's image cache in GiB; default: room for 16 large images"
    )
    block_size: int = _opt(16, "tokens per KV block")
    image_block_size: int = _opt(64, "feature rows per image-cache block")
    num_kv_blocks: int | None = _opt(
        None, "number of KV blocks, instead of kv_cache_gib (tests)", aliases=("num-gpu-blocks-override",)
    )
    num_image_blocks: int | None = _opt(None, "number of image blocks, instead of image_cache_gib (tests)")
    prefix_caching: bool = _opt(
        True,
        "reuse KV of equal beginnings of prompts, and features of equal pictures",
        aliases=("enable-prefix-caching",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits that hold before bytes or pixels exist."""

    max_images: int = _opt(16, "most images of one request")
    max_image_bytes: int = _opt(20 << 20, "most bytes of one encoded image")
    max_image_pixels: int = _opt(40_000_000, "most pixels of one image, known from its header")
    max_aspect_ratio: float = _opt(200.0, "longest side over shortest side of an image")
    max_videos: int = _opt(1, "most videos of one request; 0: none")
    max_video_bytes: int = _opt(64 << 20, "most bytes of one encoded video")
    max_video_frames: int = _opt(7200, "most frames of one video, all those that its file has")
    max_video_pixels: int = _opt(4_000_000_000, "most pixels of all frames of one video together")
    fetch_timeout_s: float = _opt(10.0, "total time to fetch one image by URL")
    max_fetched_bytes: int = _opt(
        1 << 30, "most bytes of images and videos that were fetched and are not decoded yet; beyond it 503"
    )
    allow_private_media: bool = _opt(False, "fetch images from private network addresses too")
    allowed_media_domains: tuple[str, ...] = _opt((), "fetch images from these hosts only")
    allowed_media_path: str | None = _opt(
        None,
        "folder below which file:// images may be read by the server",
        aliases=("allowed-local-media-path",),
        kind="folder",
    )
    local_files: bool = _opt(False, "open plain paths and file:// anywhere (the embedded engine; never the server)")
    decode_workers: int = _opt(2, "threads that decode and resize images")
    pixel_cache_mib: int = _opt(256, "memory for processed pixels, so that a repeated image is decoded once; 0: none")
    min_pixels: int | None = _opt(None, "enlarge smaller images to this many pixels (models with dynamic resolution)")
    max_pixels: int | None = _opt(None, "shrink larger images to this many pixels (models with dynamic resolution)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How several instances work together and what happens when one of them fails. Seconds."""

    router: str = _opt(
        "least-loaded",
        "least-loaded: where the least work is; affinity: where a prompt or picture was before, unless that is much "
        "busier; round-robin",
        choices=("least-loaded", "affinity", "round-robin"),
    )
    lease_s: float = _opt(10.0, "blocks offered to another instance are taken back when it is silent for this long")
    suspect_s: float = _opt(2.0, "an instance that is silent for this long gets no work; its requests go elsewhere")
    fence_s: float = _opt(10.0, "an instance that is silent for this long is killed and started again")
    recovery_s: float = _opt(5.0, "how long a request waits for an instance that can go on with it, then it fails")
    max_attempts: int = _opt(3, "a request is tried again when its instance dies, at most so often in all")
    steal_decodes: bool = _opt(
        True, "instances that encode and decode take decodes over from busy ones while they have nothing to encode"
    )
    check_transfers: bool = _opt(False, "compare checksums of all blocks that move between instances (slow)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that makes an engine. `model` is a Hugging Face directory or the word `demo`."""

    model: str = _opt(DEMO_MODEL, "Hugging Face model directory, or `demo` for the model that ships with the engine")
    device: str = _opt("auto", "auto, cpu or cuda:N")
    dtype: str = _opt("auto", "weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    topology: str = _opt(
        "EPD",
        "instances and the stages that each serves: EPD is one for all; EP+D keeps decodes apart; 1E3P4D is one that "
        "encodes, three that prefill and four that decode; E@cuda:0+PD@cuda:1 says on which device",
    )
    max_model_len: int | None = _opt(None, "longest prompt plus output; default: what the model allows")
    threads: int | None = _opt(None, "CPU threads per lane; default: all cores that this process may use")
    lane_priority: str = _opt(
        "auto",
        "which lane goes first where both compete for cores: throughput lets encodes finish and decodes batch up, "
        "latency keeps tokens flowing beside encodes, balanced shares evenly; auto: balanced with a TPOT limit, whose "
        "budgets say how long encodes run beside tokens, else throughput",
        choices=("auto", "throughput", "balanced", "latency"),
    )
    deterministic: bool = _opt(True, "batch-invariant ops: a request's tokens do not depend on its neighbours")
    model_impl: str = _opt(
        "auto",
        "auto or native: the engine's own models; transformers: its modules inside our stages (slower, any "
        "image-text-to-text model that it can load)",
        choices=("auto", "native", "transformers"),
    )
    load_format: str = _opt(
        "auto",
        "auto: the directory's safetensors files; random: weights drawn from a seed, to measure a model's shape",
        choices=("auto", "random"),
    )
    trust_remote_code: bool = _opt(
        False, "with --model-impl transformers: run the Python code that comes with the model"
    )
    backend: str = _opt(
        "auto", "which CPU implementation of the ops to take", choices=("auto", "native", "torch", "reference")
    )
    seed: int = _opt(0, "seeds the draws of requests that bring no seed of their own")
    chat_template: str | None = _opt(None, "file with a chat template that replaces the model's", kind="file")
    profile_dir: str | None = _opt(
        None, "folder of measured step times; default: hydra-engine/profiles in the user's cache folder", kind="folder"
    )
    log_level: str = _opt("warning", "least serious lines to log", choices=("debug", "info", "warning", "error"))
    log_format: str = _opt(
        "text", "text: lines for people; json: an object a line, the lines at start too", choices=LOG_FORMATS
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        Topology.parse(self.topology)
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format must be {' or '.join(LOG_FORMATS)}", param="log_format")
        if self.scheduler.schedule not in (schedules := _choices(SchedulerConfig, "schedule")):
            raise ConfigError(f"schedule must be {' or '.join(schedules)}", param="schedule")
        _positive(self.scheduler, "token_budget", "max_num_seqs", "max_queue", "max_bypass")
        _positive(self.cache, "block_size", "image_block_size")
        _positive(self.media, "max_images", "max_image_bytes", "max_image_pixels", "decode_workers")
        _positive(self.media, "max_video_bytes", "max_video_frames", "max_video_pixels", "fetch_timeout_s")
        if self.media.max_fetched_bytes < max(self.media.max_image_bytes, self.media.max_video_bytes):
            raise ConfigError(
                "max_fetched_bytes must have room for max_image_bytes and max_video_bytes", param="max_fetched_bytes"
            )
        if self.media.allowed_media_path is not None and not self.media.allowed_media_path.strip():
            raise ConfigError("allowed_media_path must name a folder", param="allowed_media_path")
        _positive(self.cluster, "lease_s", "suspect_s", "fence_s", "recovery_s", "max_attempts")
        if self.cluster.router not in (routers := _choices(ClusterConfig, "router")):
            raise ConfigError(f"router must be {', '.join(routers)}", param="router")
        low, high = self.media.min_pixels, self.media.max_pixels
        if (low is not None and low < 1) or (high is not None and high < (low or 1)):
            raise ConfigError("min_pixels and max_pixels must be at least 1 and in order", param="max_pixels")
        if self.trust_remote_code and self.model_impl != "transformers":
            raise ConfigError(
                "trust_remote_code needs model_impl transformers; the native models run no code of a checkpoint",
                param="trust_remote_code",
            )
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise ConfigError("threads must be between 1 and 1024", param="threads")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError("max_model_len must be at least 2", param="max_model_len")

    @property
    def model_path(self) -> Path:
        if self.model == DEMO_MODEL:
            return Path(__file__).parent / "demo" / "model"
        return Path(self.model)

    @property
    def spec_options(self) -> SpecOptions:
        return SpecOptions(
            model_impl=self.model_impl,
            trust_remote_code=self.trust_remote_code,
            min_pixels=self.media.min_pixels,
            max_pixels=self.media.max_pixels,
        )

    @property
    def profile_folder(self) -> Path:
        """Where measured step times are kept. Raises ConfigError where the user has no folder for such things."""
        if self.profile_dir is not None:
            return Path(self.profile_dir)
        folder = _user_folder("XDG_CACHE_HOME", "~/.cache")
        if folder is None:
            raise ConfigError("this user has no home directory; set profile_dir", param="profile_dir")
        return folder / "profiles"

    @property
    def lane_order(self) -> str:
        """`lane_priority` without "auto"."""
        if self.lane_priority != "auto":
            return self.lane_priority
        return "balanced" if self.scheduler.tpot_slo is not None else "throughput"

    @property
    def model_name(self) -> str:
        """What the API calls the model unless --served-model-name says otherwise."""
        return self.model if self.model == DEMO_MODEL else self.model.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = _opt("127.0.0.1", "address to listen on; anything but loopback is reachable by others")
    port: int = _opt(8000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = _opt(None, "model name that the API shows and accepts; default: MODEL")
    api_key: tuple[str, ...] = _opt(
        (),
        "accepted API keys (also HYDRA_API_KEY, several with commas); none here nor in a file: no key is asked for. "
        "Others on this machine can read a command line",
        secret=True,
    )
    api_key_file: str | None = _opt(
        None,
        "file of API keys, KEY or NAME:KEY a line, # for comments; read again on SIGHUP (also HYDRA_API_KEY_FILE)",
        kind="file",
    )
    admin_key: str | None = _opt(
        None,
        "the key that opens /admin (also HYDRA_ADMIN_KEY), which an API key does not; none: no /admin",
        secret=True,
    )
    share_caches: bool = _opt(
        False, "let requests of different API keys find each other's prompts and pictures in the caches"
    )
    max_requests_per_client: int = _opt(
        0, "most answers that one API key (without keys: one address) may wait for at once, beyond it 429; 0: no limit"
    )
    requests_per_minute: int = _opt(
        0, "most requests that one API key (without keys: one address) may send a minute, beyond it 429; 0: no limit"
    )
    shutdown_timeout_s: float = _opt(30.0, "how long SIGTERM lets running requests finish", flag="shutdown-timeout")
    max_body_bytes: int = _opt(64 << 20, "largest request body")
    max_inflight_body_bytes: int = _opt(
        1 << 30, "most bytes of all request bodies that are read or being answered; beyond it 503"
    )
    body_timeout_s: float = _opt(30.0, "how long a request body may take to arrive")
    keepalive_s: float = _opt(
        15.0,
        "a comment line keeps idle streams open this often",
        flag="sse-keep-alive",
        aliases=("sse-keep-alive-interval",),
    )
    allow_origins: tuple[str, ...] = _opt((), "CORS origins; none by default", aliases=("allowed-origins",))
    enable_log_requests: bool = _opt(False, "one log line per request")
    access_log: str = _opt(
        "off",
        "one line per HTTP request with sizes, times, counts and who asked, never what: text or json, at any log level",
        choices=ACCESS_LOGS,
    )
    otlp_endpoint: str | None = _opt(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318): a trace per request with a "
        "span per stage; needs hydra-engine[otel]",
    )
    server_timing: bool = _opt(
        False, "a Server-Timing header on every whole answer, asked for or not; tells clients how busy the server is"
    )
    tool_parser: str = _opt(
        "auto",
        "how the model writes tool calls: hermes (<tool_call>), json (a bare object), none; auto: hermes if the chat "
        "template has <tool_call>, else none",
        choices=TOOL_PARSERS,
    )
    ui: bool = _opt(True, "the web page at /: chat, timelines and a live view of the instances")

    def __post_init__(self) -> None:
        if self.tool_parser not in TOOL_PARSERS:
            raise ConfigError(f"tool_parser must be {', '.join(TOOL_PARSERS)}", param="tool_parser")
        if self.access_log not in ACCESS_LOGS:
            raise ConfigError(f"access_log must be {', '.join(ACCESS_LOGS)}", param="access_log")
        if self.otlp_endpoint is not None:
            _check_endpoint(self.otlp_endpoint)
        _positive(self, "max_body_bytes", "body_timeout_s")
        for name in ("max_requests_per_client", "requests_per_minute"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative; 0 means no limit", param=name)
        if self.max_inflight_body_bytes < self.max_body_bytes:
            raise ConfigError(
                "max_inflight_body_bytes must have room for one body of max_body_bytes",
                param="max_inflight_body_bytes",
            )


def config_from_options(model: str, options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig for the embedded engine from flat options: fields of the config itself and of its parts. Local
    pictures may be opened, for they are the caller's own. Raises ConfigError naming an option that does not exist."""
    left = dict(options)
    config = EngineConfig(
        model=model,
        scheduler=left.pop("scheduler", SchedulerConfig()),
        cache=left.pop("cache", CacheConfig()),
        media=left.pop("media", MediaConfig(local_files=True)),
        cluster=left.pop("cluster", ClusterConfig()),
    )
    for part in ("", "scheduler", "cache", "media", "cluster"):
        target = getattr(config, part) if part else config
        chosen = {f.name: left.pop(f.name) for f in fields(target) if f.name in left}
        if chosen:
            config = replace(config, **({part: replace(target, **chosen)} if part else chosen))
    if left:
        raise ConfigError(f"unknown option {next(iter(left))!r}; see `hydra-engine serve --help`")
    return config


def parse_seconds(value: object, name: str, *, param: str | None = None) -> float:
    """A latency limit in seconds from what a flag, a file or a caller gives: a number of seconds, or text with a unit
    (40ms, 1.5s, 2m). Raises ConfigError, in which `name` is what the user wrote, unless it is more than 0 and less
    than an hour."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        seconds = float(found[1]) * _UNITS[found[2]] if found else None
    else:
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if seconds is None:
        raise ConfigError(f"{name} must be a time such as 40ms, 1.5s or 2m, not {str(value)[:40]!r}", param=param)
    if not 0 < seconds < MAX_LIMIT_S:
        raise ConfigError(f"{name} must be more than 0 seconds and less than an hour", param=param)
    return float(seconds)


def environment_settings() -> dict[str, str]:
    """All HYDRA_* variables that have a value, by their whole names."""
    return {name: value for name, value in os.environ.items() if name.startswith("HYDRA_") and value}


def state_folder() -> Path | None:
    """Where the command line remembers what was typed; None where the user has no home directory."""
    return _user_folder("XDG_STATE_HOME", "~/.local/state")


def _user_folder(variable: str, default: str) -> Path | None:
    folder = Path(os.environ.get(variable, ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser(default))
    return folder / "hydra-engine" if folder.is_absolute() else None


def environment_api_keys() -> tuple[str, ...]:
    return tuple(key for key in os.environ.get("HYDRA_API_KEY", "").split(",") if key)


def environment_api_key_file() -> str | None:
    return os.environ.get("HYDRA_API_KEY_FILE") or None


def environment_admin_key() -> str | None:
    return os.environ.get("HYDRA_ADMIN_KEY") or None


def fault_points_enabled() -> bool:
    """Fault points answer only where a test has asked for them before start."""
    return os.environ.get("HYDRA_FAULTS", "") == "1"


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # an odd port or address
        known = False
    if not known:
        raise ConfigError("otlp_endpoint must be a URL such as http://127.0.0.1:4318", param="otlp_endpoint")
    if "@" in parts.netloc:
        raise ConfigError(
            "otlp_endpoint must not hold a password; OTEL_EXPORTER_OTLP_HEADERS is the place", param="otlp_endpoint"
        )


def _choices(cls: type, name: str) -> tuple[str, ...]:
    return next(f.metadata["choices"] for f in fields(cls) if f.name == name)


def _positive(group: object, *names: str) -> None:
    for name in names:
        if getattr(group, name) <= 0:
            raise ConfigError(f"{name} must be positive", param=name)
