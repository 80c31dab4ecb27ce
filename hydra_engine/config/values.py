"""Values of options: from text, YAML and Python objects, for all places by the same rules; the configuration classes
check ranges."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

from hydra_engine.config.fields import Option, declared_options
from hydra_engine.errors import ConfigError

MAX_LIMIT_S = 3600.0  # upper bound of a latency limit
MAX_GRAPHS = 256  # sizes for which steps of a kind are captured
MAX_GRAPH_SIZE = 4096  # rows of decodes
MAX_ENCODE_SIZE = 1 << 16  # patches
MAX_SM_SPLITS = 4  # each has its own set of captured language steps
MAX_TEXT = 65536  # characters of a value
_MAX_INT = (1 << 63) - 1
_MAX_ITEMS = 1024
_SHOWN = 40  # characters of a wrong value that its message quotes
_MULTIPLE = re.compile(r"([0-9]{1,18})([kmgKMG])")  # as in vLLM: 4k is 4000, 4K is 4096
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_WHOLE = re.compile(r"[0-9]{1,9}")
_SM_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?(ms|s|m|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}


def check_values(config: Any) -> None:
    """Converts the fields of a configuration that is being made. Raises ConfigError for a value of a wrong type, and
    for one that is no choice."""
    cls: type = type(config)
    for option in declared_options(cls):
        value = getattr(config, option.field)
        if value is not option.default and (converted := value_from_object(option, value, option.field)) is not value:
            object.__setattr__(config, option.field, converted)


def value_from_text(option: Option, text: str, where: str) -> Any:
    """Parses the value of an option; `where` is the flag, variable, key or keyword as the user wrote it. Raises
    ConfigError."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{where} is too long", param=option.field)
    if option.kind is bool:
        if (switch := _WORDS.get(text.strip().lower())) is None:
            raise wrong_value(option, where, "on or off (1, 0, true, false, yes, no)", text)
        return switch
    if option.form == "seconds":
        return parse_seconds(text, where, param=option.field)
    if option.kind in (int, float):
        return _number(option, text, where)
    if option.kind is tuple:
        return _checked_list(option, _list_from_text(option, text, where), where)
    return _choice(option, text, where)


def value_from_flags(option: Option, given: Any) -> Any:
    """Converts argparse's value: True or False, a text, or the texts of a repeated flag. A text of a repeated flag is
    one item, commas included, unless it is a JSON list. Raises ConfigError."""
    where = option.flag
    if isinstance(given, bool):
        return given
    if isinstance(given, list):
        items: list[Any] = []
        for text in given:
            items.extend(_list_from_text(option, text, where) if text.lstrip().startswith("[") else [text])
        return _checked_list(option, items, where)
    return value_from_text(option, given, where)


def value_from_object(option: Option, value: Any, where: str) -> Any:
    """Converts a value of YAML, which reads 1e-3 as text, or of Python. A text means what it means as a flag, scalars
    of numpy are numbers, dtypes of torch and paths are texts. Raises ConfigError."""
    value = _plain(value)
    if value is None and option.optional:
        return None
    if isinstance(value, str):
        return value_from_text(option, value, where)
    if option.form == "seconds":
        return parse_seconds(value, where, param=option.field)
    if option.form == "json" and isinstance(value, Mapping):
        return _json_text(option, value, where)
    if option.kind is bool:
        if not isinstance(value, bool):
            raise wrong_value(option, where, "true or false", value)
        return value
    if option.kind in (int, float):
        return _number(option, value, where)
    if option.kind is tuple:
        return _checked_list(option, value, where)
    if option.choices is None and isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong_value(option, where, "text; put it in quotes", value)
    return _choice(option, value, where)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if isinstance(value, PathLike) and isinstance(path := fspath(value), str):
        return path
    return value


def _json_text(option: Option, value: Mapping[Any, Any], where: str) -> str:
    try:
        return json.dumps(value if isinstance(value, dict) else dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise wrong_value(option, where, "a JSON object", value) from error


def _list_from_text(option: Option, text: str, where: str) -> list[Any]:
    """Splits comma-separated text, or parses a JSON list, vLLM's form. Raises ConfigError."""
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} begins like a JSON list but is not one", param=option.field) from error
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(option: Option, value: object, where: str) -> int | float:
    expected = "a whole number" if option.kind is int else "a number"
    if option.kind is int and isinstance(value, str) and (multiple := _MULTIPLE.fullmatch(value.strip())):
        value = int(multiple[1]) * _FACTORS[multiple[2]]
    number = _read_number(value)
    if number is None:
        raise wrong_value(option, where, expected, value)
    if abs(number) > _MAX_INT:
        raise wrong_value(option, where, "a smaller number", value)
    if option.kind is float:
        return float(number)
    if number != int(number):
        raise wrong_value(option, where, expected, value)
    return int(number)


def _read_number(value: object) -> int | float | None:
    """Parses a finite number; None if it is none."""
    if isinstance(value, str) and len(value) <= _SHOWN:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                value = kind(value)
                break
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _checked_list(option: Option, value: Any, where: str) -> tuple[Any, ...]:
    """Returns the items, each a text or what the option has. Raises ConfigError."""
    items = tuple(map(_plain, value)) if isinstance(value, list | tuple) else (None,)
    if option.item is int:
        words = [word for item in items for word in (item.split(",") if isinstance(item, str) else (item,))]
        items = tuple(int(word) if isinstance(word, str) and _WHOLE.fullmatch(word.strip()) else word for word in words)
    if any(type(item) is not option.item for item in items):
        expected = "a list of texts; put numbers in quotes" if option.item is str else "a list of whole numbers"
        wrong = next(item for item in items if type(item) is not option.item)
        raise wrong_value(option, where, expected, wrong if isinstance(value, list | tuple) else value)
    if len(items) > _MAX_ITEMS or any(isinstance(item, str) and len(item) > MAX_TEXT for item in items):
        raise ConfigError(f"{where} has too many or too long values", param=option.field)
    return items


def _choice(option: Option, value: Any, where: str) -> str:
    """Returns a text, which must be one of the option's choices if it has some. Raises ConfigError."""
    if isinstance(value, str):
        chosen = option.other_choices.get(value, value)
        if option.choices is None or chosen in option.choices:
            return chosen
        if (reason := option.refused_choices.get(value)) is not None:
            raise ConfigError(f"{where} cannot be {value} here: {reason}", param=option.field)
    if option.choices is None:
        raise wrong_value(option, where, "text", value)
    *others, last = option.choices
    raise wrong_value(option, where, f"{', '.join(others)} or {last}" if others else last, value)


def wrong_value(option: Option, where: str, expected: str, value: object) -> ConfigError:
    """Returns the error for a wrong value, which quotes it unless the option is secret."""
    shown = "" if option.secret else f", not {_quoted(value)}"
    return ConfigError(f"{where} must be {expected}{shown}", param=option.field)


def _quoted(value: object) -> str:
    if value is None or isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= _MAX_INT):
        text = repr(value)
        return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    kind = {dict: "mapping", int: "huge number"}.get(type(value), type(value).__name__[:_SHOWN])
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def parse_seconds(value: object, name: str, *, param: str | None = None) -> float:
    """Returns a latency limit in seconds, from a number of seconds or a text with a unit (40ms, 1.5s, 2m). Raises
    ConfigError with `name`, the option as the user wrote it, unless it is more than 0 and less than an hour."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else None
    else:
        seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if seconds is None:
        raise ConfigError(f"{name} must be a time such as 40ms, 1.5s or 2m, not {_quoted(value)}", param=param)
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


def check_graph_sizes(given: Iterable[int], name: str, limit: int) -> tuple[int, ...]:
    """Returns ascending sizes without repeats. `name` is the option, for the error. Raises ConfigError unless they are
    up to 256 numbers from 1 to `limit`."""
    sizes = sorted(set(given))
    if len(sizes) > MAX_GRAPHS or any(not 1 <= size <= limit for size in sizes):
        raise ConfigError(f"{name} must be at most {MAX_GRAPHS} numbers between 1 and {limit}", param=name)
    return tuple(sizes)
