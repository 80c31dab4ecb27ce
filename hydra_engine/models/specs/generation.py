"""From generation_config.json, as the model's authors ship it, to the sampling of requests that do not say.

Special tokens, which are in the same file, are read in `decoder.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import CheckpointError, ConfigError, HydraError, InvalidRequest
from hydra_engine.models.specs.fields import read_json_if_present

_FILE = "generation_config.json"
_OVERRIDE = "override_generation_config"
# The file's names of the fields of SamplingParams.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_DO_SAMPLE = "do_sample"


def default_sampling(model_dir: Path, override: str | None = None, *, use_file: bool = True) -> SamplingParams:
    """What requests are sampled with where they do not say. `override` is a JSON object that wins over the file.

    `do_sample: false` is temperature 0, unless a temperature is given over it. Raises CheckpointError and, for the
    override, ConfigError, each naming the file or the option, the key and the value.
    """
    fields = read_json_if_present(model_dir, _FILE) if use_file else None
    shipped = _checked({} if fields is None else fields.values, _wrong_in_file)
    overrides = _checked(_parsed(override), _wrong_in_override)
    greedy = overrides.get(_DO_SAMPLE, shipped.get(_DO_SAMPLE) if "temperature" not in overrides else None) is False
    values = {_FIELDS[key]: value for key, value in (shipped | overrides).items() if key != _DO_SAMPLE}
    return SamplingParams(**(values | ({"temperature": 0.0} if greedy else {})))


def _parsed(override: str | None) -> dict[str, Any]:
    if override is None:
        return {}
    try:
        values = json.loads(override)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        example = '\'{"temperature": 0.7, "top_p": 0.9}\''
        raise ConfigError(f"{_OVERRIDE} must be a JSON object such as {example}", param=_OVERRIDE)
    if unknown := [key for key in values if key not in (*_FIELDS, _DO_SAMPLE)]:
        names = ", ".join(_FIELDS)
        raise ConfigError(f"{_OVERRIDE} takes {names} and {_DO_SAMPLE}, not {unknown[0][:40]!r}", param=_OVERRIDE)
    return values


def _checked(values: dict[str, Any], wrong: Callable[[str, object], HydraError]) -> dict[str, Any]:
    """The keys that say how to sample and are not null."""
    fields = {key: values[key] for key in (*_FIELDS, _DO_SAMPLE) if values.get(key) is not None}
    for key, value in fields.items():
        if key == _DO_SAMPLE:
            if not isinstance(value, bool):
                raise wrong("do_sample must be true or false", value)
            continue
        try:
            SamplingParams(**{_FIELDS[key]: value})
        except InvalidRequest as error:
            raise wrong(error.message.replace(_FIELDS[key], key), value) from None
    return fields


def _wrong_in_file(sentence: str, value: object) -> HydraError:
    return CheckpointError(
        f"{_FILE}: {sentence}, not {str(value)[:40]!r}; --generation-config none leaves its sampling out"
    )


def _wrong_in_override(sentence: str, value: object) -> HydraError:
    return ConfigError(f"{_OVERRIDE}: {sentence}, not {str(value)[:40]!r}", param=_OVERRIDE)
