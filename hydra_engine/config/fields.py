"""Declaration of options and parsing of their values, shared by all groups of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any

from hydra_engine.errors import ConfigError

# Names that vLLM and SGLang use for KV cache types.
KV_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
LOAD_FORMAT_NAMES = {"dummy": "random"}  # names that vLLM uses for load formats
MAX_LIMIT_S = 3600.0  # upper bound of a latency limit
LOG_FORMATS = ("text", "json")
MAX_GRAPHS = 256  # sizes for which steps of a kind are captured
MAX_GRAPH_SIZE = 4096  # rows of decodes
MAX_ENCODE_SIZE = 1 << 16  # patches
MAX_SM_SPLITS = 4  # each has its own set of captured language steps

_SM_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?(ms|s|m|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def opt(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **metadata})


def check_choices(config: object) -> None:
    for f in fields(config):  # type: ignore[arg-type]
        choices = f.metadata.get("choices", ())
        if choices and getattr(config, f.name) not in choices:
            *others, last = choices
            raise ConfigError(f"{f.name} must be {', '.join(others)} or {last}", param=f.name)


def positive(group: object, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) is not None and value <= 0:
            raise ConfigError(f"{name} must be positive", param=name)


def parse_seconds(value: object, name: str, *, param: str | None = None) -> float:
    """Returns a latency limit in seconds, from a number of seconds or a text with a unit (40ms, 1.5s, 2m). Raises
    ConfigError with `name`, the option as the user wrote it, unless it is more than 0 and less than an hour."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else None
    else:
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if seconds is None:
        raise ConfigError(f"{name} must be a time such as 40ms, 1.5s or 2m, not {str(value)[:40]!r}", param=param)
    if not 0 < seconds < MAX_LIMIT_S:
        raise ConfigError(f"{name} must be more than 0 seconds and less than an hour", param=param)
    return float(seconds)


def parse_sm_split(text: str) -> tuple[int, ...]:
    """Returns numbers of SMs; empty for "off", and for "auto", which is resolved when the device is known. Raises
    ConfigError for anything but up to 4 such numbers."""
    if text.strip().lower() in ("off", "auto"):
        return ()
    counts = [part.strip() for part in text.split(",", MAX_SM_SPLITS)]
    if len(counts) > MAX_SM_SPLITS or not all(_SM_COUNT.fullmatch(count) for count in counts):
        raise ConfigError(
            f"sm_split must be auto, off or at most {MAX_SM_SPLITS} numbers of multiprocessors, such as 32,64",
            param="sm_split",
        )
    return tuple(map(int, counts))


def parse_graph_sizes(given: Iterable[object], name: str, limit: int) -> tuple[int, ...]:
    """Returns ascending sizes without repeats, from numbers or comma-separated texts. `name` is the option, for the
    error. Raises ConfigError unless they are up to 256 numbers from 1 to `limit`."""
    words = [word for item in given for word in str(item).split(",")]
    try:
        sizes = sorted({int(word) for word in words})
    except ValueError:
        sizes = [0]
    if len(words) > MAX_GRAPHS or any(not 1 <= size <= limit for size in sizes):
        raise ConfigError(
            f"{name} must be at most {MAX_GRAPHS} numbers between 1 and {limit}",
            param=name,
        )
    return tuple(sizes)
