"""Flags from the table of options (`config/options.py`). `sources.py` reads their values and chooses between sources.
Imports no torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from hydra_engine.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    MediaConfig,
    SchedulerConfig,
    ServerConfig,
)
from hydra_engine.config.fields import Option, options_of
from hydra_engine.config.options import (
    MEDIA_LIMIT_FIELDS,
    MEDIA_LIMITS,
    SECTIONS,
    all_options,
    described_default,
    options_by_name,
)
from hydra_engine.core.sampling import PARAMETERS, SamplingParams

DEFAULT_URL = "http://127.0.0.1:8000"  # a server with default options

# Groups of the help. Options that are not named here come last in their class's group.
_GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        *(
            "revision",
            "download",
            "dtype",
            "device",
            "max_model_len",
            "chat_template",
            "generation_config",
            "override_generation_config",
        ),
        *("load_format", "packed_cache", "model_impl", "trust_remote_code"),
    ),
    "where stages run": (
        *("topology", "instance_limits", "threads", "lane_priority", "sm_split"),
        *("router", "steal_decodes", "prefetch_features", "early_kv", "transport", "handover_tokens"),
        *("launcher", "ray_address", "cluster_tls", "transfer_backend"),
    ),
    "latency and batching": (
        *("tpot_slo", "ttft_slo", "max_num_seqs", "token_budget", "image_budget", "look_ahead"),
        *("scheduling_policy", "encode_policy"),
    ),
    "memory": (
        "gpu_memory_utilization",
        "kv_cache_gib",
        "kv_cache_dtype",
        "image_cache_gib",
        "prefix_caching",
        "pixel_cache_mib",
    ),
    "pictures and videos": (),
    "address and access": ("host", "port", "served_model_name", "api_key", "admin_key", "allow_origins"),
    "requests": ("max_queue", "max_body_bytes", "body_timeout_s", "keepalive_s", "shutdown_timeout_s"),
    "when instances fail": (),
    "logging": (
        *("log_level", "log_format", "disable_log_stats", "access_log", "enable_log_requests", "server_timing"),
        *("otlp_endpoint", "record_workload"),
    ),
    "kernels and tests": (
        *("deterministic", "backend", "check_transfers"),
        *("num_kv_blocks", "num_image_blocks", "attention_backend", "enforce_eager", "cuda_graph_sizes"),
        "encoder_cuda_graph_sizes",
    ),
}
_GROUP_OF_CLASS: dict[type, str] = {
    EngineConfig: "model",
    SchedulerConfig: "latency and batching",
    CacheConfig: "memory",
    MediaConfig: "pictures and videos",
    ClusterConfig: "when instances fail",
    ServerConfig: "requests",
}
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", tuple: "VALUE"}
_METAVARS_OF_KINDS = {"seconds": "TIME", "json": "JSON", "file": "FILE", "folder": "FOLDER"}


class GivenOnce(argparse.Action):
    """An action for a value given as a positional argument or as a flag, but not as two different values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest, None)
        if values is None:  # no positional argument
            return
        if before not in (None, values):
            parser.error(f"{before[:60]!r} and {values[:60]!r} are given for one {self.metavar}; give one of them")
        setattr(namespace, self.dest, values)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    option = options_by_name()["model"]
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{option.help} (default: {option.default}); also HYDRA_MODEL, or `model` in the file",
        action=GivenOnce,
    )
    parser.add_argument("--model", metavar="MODEL", dest="model", help="the same", action=GivenOnce)


def add_engine_options(
    parser: argparse.ArgumentParser, skip: frozenset[str] = frozenset(), also: frozenset[str] = frozenset()
) -> None:
    """Adds the options of the engine. `skip`: fields whose flag means something else in this command; `also`: fields of
    the server."""
    others = frozenset(option.field for option in options_of(ServerConfig)) - also
    _add_options(parser, tuple(SECTIONS.values()), skip | others)


def add_all_options(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, tuple(SECTIONS.values()), frozenset())


def grouped_options(offered: Mapping[str, Option]) -> Iterator[tuple[str, list[Option]]]:
    """Yields the groups of the help with their options, of those in `offered`, which are by field."""
    grouped = {name for names in _GROUPS.values() for name in names}
    for title, names in _GROUPS.items():
        rest = [n for n, o in offered.items() if n not in grouped and _GROUP_OF_CLASS[o.owner] == title]
        if given := [offered[name] for name in (*names, *rest) if name in offered]:
            yield title, given


def _add_options(parser: argparse.ArgumentParser, classes: tuple[type, ...], skip: frozenset[str]) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with flag names as keys; HYDRA_* variables and flags win over it"
    )
    offered = {o.field: o for o in all_options() if o.owner in classes and not o.positional and o.field not in skip}
    for title, given in grouped_options(offered):
        group = parser.add_argument_group(title)
        for option in given:
            _add_option(group, option)
        if any(option.field in MEDIA_LIMIT_FIELDS.values() for option in given):
            text = '--max-images and --max-videos as vLLM writes them: \'{"image": 4, "video": 0}\''
            group.add_argument(f"--{MEDIA_LIMITS}", metavar="JSON", help=text)


class _Shown(tuple[str, ...]):
    """Choices that argparse shows and `sources.py` checks, for there are other names for some."""

    def __contains__(self, name: object) -> bool:
        return True


_LONGEST_CHOICES = 70  # characters; longer lists are in the help and not in the usage


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    """Adds one option. Values stay text; `sources.py` parses them with the rules for the environment."""
    text = option.help
    choices = ", ".join(option.choices or ())
    if len(choices) > _LONGEST_CHOICES:
        text += f"; one of {choices}"
    if default := described_default(option):
        text += f" (default: {default})"
    if option.aliases:
        text += f" (also --{', --'.join(option.aliases)})"
    shown_as: dict[str, Any] = {"dest": option.field, "help": text.replace("%", "%%")}
    for name in (option.name, *option.aliases):
        flag = "--" + name
        if option.kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **shown_as)
        elif option.choices is not None:
            metavar = "NAME" if len(choices) > _LONGEST_CHOICES else None
            group.add_argument(flag, choices=_Shown(option.choices), metavar=metavar, **shown_as)
        else:
            action = "append" if option.kind is tuple else "store"
            metavar = _METAVARS_OF_KINDS.get(option.form) or _METAVARS.get(option.kind, "VALUE")
            group.add_argument(flag, action=action, metavar=metavar, **shown_as)
        shown_as["help"] = argparse.SUPPRESS  # the help of the name lists its aliases


_SAMPLING = [parameter for parameter in PARAMETERS.values() if parameter.flag]


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Defaults are those of the model's generation_config.json.")
    for parameter in _SAMPLING:
        flag = "--" + parameter.name.replace("_", "-")
        shown_as: dict[str, Any] = {"dest": parameter.name, "help": parameter.help}
        if parameter.kind is bool:
            group.add_argument(flag, action="store_true", default=None, **shown_as)
        elif parameter.kind is tuple:
            group.add_argument(flag, action="append", default=[], metavar="TEXT", **shown_as)
        else:
            group.add_argument(flag, type=parameter.kind, metavar=_METAVARS[parameter.kind], **shown_as)


def sampling_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """The given sampling options. Raises InvalidRequest for an invalid value, before a model is loaded."""
    chosen = {p.name: value for p in _SAMPLING if (value := getattr(arguments, p.name)) is not None}
    chosen["stop"] = tuple(arguments.stop)
    SamplingParams(**chosen)
    return chosen
