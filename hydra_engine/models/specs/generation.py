"""Default sampling parameters and token rules from generation_config.json, as the model's authors ship it.

Special tokens, which are in the same file, are read in `decoder.py`. Settings that would change an answer and are not
supported here are listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra_engine.core.sampling import SamplingParams, TokenRules
from hydra_engine.errors import CheckpointError, ConfigError, HydraError, InvalidRequest
from hydra_engine.models.specs.fields import Fields, read_json_if_present

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
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_DO_SAMPLE = "do_sample"
_BAD_WORDS = "bad_words_ids"
# Lists of token ids, or one id, and the fields of TokenRules that they fill.
_RULES = {"suppress_tokens": "never", "begin_suppress_tokens": "not_first", "forced_eos_token_id": "last"}
_KEYS = (*_FIELDS, _DO_SAMPLE, *_RULES, _BAD_WORDS)
# Settings that transformers supports and this engine does not, with the values that change nothing.
_UNFOLLOWED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "penalty_alpha"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "token_healing"), (0,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "sequence_bias", "forced_bos_token_id", "top_h"), ()),
    **dict.fromkeys(("force_words_ids", "constraints", "watermarking_config", "dola_layers", "max_time"), ()),
}
_OF_DRAWS = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")  # without effect on greedy answers
_MAX_LENGTH, _UNSET_LENGTH = "max_length", 20  # transformers' default


class Generation(NamedTuple):
    """Sampling defaults of a model. `unfollowed`: unsupported keys that would change an answer, of
    generation_config.json or, without that file, of config.json."""

    sampling: SamplingParams
    rules: TokenRules
    unfollowed: tuple[str, ...] = ()


def read_generation(model_dir: Path, override: str | None = None, *, use_file: bool = True) -> Generation:
    """Reads generation_config.json. `override` is a JSON object that takes precedence over the file.

    `do_sample: false` means temperature 0, unless the override sets a temperature. Raises CheckpointError for the file
    and ConfigError for the override; each names the file or the option, the key and the value."""
    fields = read_json_if_present(model_dir, _FILE) if use_file else None
    shipped = _checked({} if fields is None else fields.values, _wrong_in_file)
    overrides = _checked(_parsed(override), _wrong_in_override)
    greedy = overrides.get(_DO_SAMPLE, shipped.get(_DO_SAMPLE) if "temperature" not in overrides else None) is False
    chosen = shipped | overrides
    values = {_FIELDS[key]: value for key, value in chosen.items() if key in _FIELDS}
    if values.get("min_tokens", 0) > (values.get("max_tokens") or values.get("min_tokens", 0)):
        del values["min_tokens"]  # ends are masked up to the end that max_new_tokens is
    sampling = SamplingParams(**(values | ({"temperature": 0.0} if greedy else {})))
    unfollowed = _unfollowed(model_dir, fields, chosen) if use_file else []
    if any(len(word) > 1 for word in chosen.get(_BAD_WORDS, ())):
        unfollowed.append(_BAD_WORDS)
    return Generation(sampling, _rules(chosen, fields), tuple(unfollowed))


def _rules(chosen: Mapping[str, Any], fields: Fields | None) -> TokenRules:
    """Builds the token rules. Like transformers, ignores bad words that are an end of sequence."""
    found = {name: chosen.get(key, ()) for key, name in _RULES.items()}
    ends = () if fields is None else fields.token_ids("eos_token_id") or ()
    found["last"] = tuple(sorted(found["last"])[:1])  # which it would choose of several
    words = [word[0] for word in chosen.get(_BAD_WORDS, ()) if len(word) == 1 and word[0] not in ends]
    return TokenRules(**{**found, "never": tuple(dict.fromkeys((*found["never"], *words)))})


def _unfollowed(model_dir: Path, fields: Fields | None, chosen: Mapping[str, Any]) -> list[str]:
    """Unsupported keys that would change an answer. Without generation_config.json the keys of config.json count, as
    before transformers 5."""
    config = read_json_if_present(model_dir, "config.json") or Fields({}, "config.json")
    text = config.section_if_present("text_config") or config
    found = []
    for source in (config, text) if fields is None else (fields,):
        values = source.values
        found += [
            key
            for key, neutral in _UNFOLLOWED.items()
            if values.get(key) not in (None, [], {}, *neutral)
            and not (key in _OF_DRAWS and chosen.get(_DO_SAMPLE) is False)
        ]
        if fields is None:
            found += [key for key in (*_RULES, _BAD_WORDS) if values.get(key) not in (None, [])]
        most, context = values.get(_MAX_LENGTH), text.get("max_position_embeddings")
        longest = context if isinstance(context, int) else 0
        if fields is not None and most not in (None, _UNSET_LENGTH) and "max_new_tokens" not in chosen:
            found += [_MAX_LENGTH] if not isinstance(most, int) or not longest or most < longest else []
    return list(dict.fromkeys(found))


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
    if unknown := [key for key in values if key not in _KEYS]:
        raise ConfigError(f"{_OVERRIDE} takes {', '.join(_KEYS)}; not {unknown[0][:40]!r}", param=_OVERRIDE)
    return values


def _checked(values: dict[str, Any], wrong: Callable[[str, object], HydraError]) -> dict[str, Any]:
    """Returns the supported keys that are not null, with rules as tuples of token ids."""
    fields = {key: values[key] for key in _KEYS if values.get(key) is not None}
    for key, value in fields.items():
        if key == _DO_SAMPLE:
            if not isinstance(value, bool):
                raise wrong("do_sample must be true or false", value)
        elif key == _BAD_WORDS:
            if not isinstance(value, list) or any(not isinstance(word, list) or not word for word in value):
                raise wrong(f"{key} must be a list of lists of token ids", value)
            fields[key] = [_token_ids(key, word, wrong) for word in value]
        elif key in _RULES:
            fields[key] = _token_ids(key, value if isinstance(value, list) else [value], wrong)
        elif key == "stop_strings" and not isinstance(value, str | list):
            raise wrong(f"{key} must be a string or a list of strings", value)
        else:
            name = _FIELDS[key]
            try:
                SamplingParams(**{name: value})
            except InvalidRequest as error:
                said = error.message
                sentence = f"{key}{said.removeprefix(name)}" if said.startswith(name) else f"{key}: {said}"
                raise wrong(sentence, value) from None
    return fields


def _token_ids(key: str, values: list[Any], wrong: Callable[[str, object], HydraError]) -> tuple[int, ...]:
    """Checks token ids and drops -1, which means none."""
    if any(type(token) is not int or not -1 <= token < 1 << 31 for token in values):
        raise wrong(f"{key} must hold token ids", values)
    return tuple(token for token in values if token >= 0)


def _wrong_in_file(sentence: str, value: object) -> HydraError:
    return CheckpointError(
        f"{_FILE}: {sentence}, not {str(value)[:40]!r}; --generation-config none leaves its sampling out"
    )


def _wrong_in_override(sentence: str, value: object) -> HydraError:
    return ConfigError(f"{_OVERRIDE}: {sentence}, not {str(value)[:40]!r}", param=_OVERRIDE)
