"""Converts the rotary settings of a GGUF text model to the rope_parameters of config.json, as in llama.cpp's loader.

Every key below `rope.scaling.` has a meaning, so unknown keys are refused: they would change the answer.
"""

from __future__ import annotations

import math
from typing import Any

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.fields import Fields

_YARN = ("ext_factor", "attn_factor", "beta_fast", "beta_slow", "log_multiplier")
_SCALING = {
    *("type", "factor", "attn_factor", "original_context_length", *(f"yarn_{name}" for name in _YARN)),
    "finetuned",  # a label
}


def rope_parameters(settings: Fields, architecture: str, head_dim: int, divisors: tuple[float, ...]) -> dict[str, Any]:
    """Returns rope_parameters. `divisors`: the values of rope_freqs.weight, which divide the frequencies."""
    prefix = f"{architecture}.rope."
    _check_scaling(settings, f"{prefix}scaling.")
    theta = settings.number(f"{prefix}freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = settings.text(f"{prefix}scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise settings.wrong_value(f"{prefix}scaling.type", "none, linear or yarn")
    factor = 1.0 if kind == "none" else _factor(settings, prefix)
    magnitude = 1.0
    for name in ("attn_factor", "yarn_attn_factor"):
        magnitude *= settings.number(f"{prefix}scaling.{name}", 1.0)
    if kind == "yarn" and _is_ramped(settings, f"{prefix}scaling.yarn_ext_factor"):
        rope |= _yarn(settings, prefix, factor, magnitude)
    elif magnitude != 1:
        raise CheckpointError(
            f"{settings.where} has {prefix}scaling.attn_factor or yarn_attn_factor other than 1 beside rotary scaling "
            f"{kind}; supported are they beside yarn"
        )
    elif factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    if divisors:
        if rope["rope_type"] != "default":
            raise CheckpointError(
                f"{settings.where} scales rotary frequencies twice, by {prefix}scaling.factor and by rope_freqs.weight"
            )
        rope |= _llama3(settings, theta, head_dim, divisors)
    sections = settings.get(f"{prefix}dimension_sections")
    if isinstance(sections, list):
        rope["mrope_section"] = sections[:3]
    return rope


def _check_scaling(settings: Fields, prefix: str) -> None:
    names = [name for name in settings.values if name.startswith(prefix)]
    settings.get(*names)  # so that none of them counts as unread
    if unknown := [name for name in names if name.removeprefix(prefix) not in _SCALING]:
        raise CheckpointError(f"{settings.where} scales rotary positions by {unknown[0][:120]}, which is not supported")


def _factor(settings: Fields, prefix: str) -> float:
    """Returns the linear scaling factor, 1.0 if it is absent or 0."""
    for name in (f"{prefix}scaling.factor", f"{prefix}scale_linear"):
        if name in settings:
            return settings.number(name) if settings.get(name) != 0 else 1.0
    return 1.0


def _is_ramped(settings: Fields, name: str) -> bool:
    """True if pairs of high frequency are kept (YaRN's ramp); absent or negative values mean the type's default."""
    share = settings.get(name)
    if share is None or share == 1 or (isinstance(share, float) and share < 0):
        return True
    if share != 0:
        raise settings.wrong_value(name, "0 or 1")
    return False


def _yarn(settings: Fields, prefix: str, factor: float, magnitude: float) -> dict[str, Any]:
    scaling = f"{prefix}scaling."
    length = settings.integer(f"{prefix.removesuffix('rope.')}context_length")
    rope: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = settings.integer(f"{scaling}original_context_length", length)
    for name in ("beta_fast", "beta_slow"):
        if f"{scaling}yarn_{name}" in settings:
            rope[name] = settings.number(f"{scaling}yarn_{name}")
    share = settings.get(f"{scaling}yarn_log_multiplier") or 0.0
    if magnitude != 1 or share:
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise settings.wrong_value(f"{scaling}yarn_log_multiplier", "a number from 0")
        grown = 0.1 * math.log(factor) if factor > 1 else 0.0
        rope["attention_factor"] = magnitude * (1 + grown) / (1 + grown * share)
    return rope


def _llama3(settings: Fields, theta: float, head_dim: int, factors: tuple[float, ...]) -> dict[str, Any]:
    """Returns the parameters of the published Llama 3 models if they give these factors; the file has only the
    factors."""
    rope = {"rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    expected = llama3_factors(theta, head_dim, max(factors), 8192)
    if len(factors) != len(expected) or any(abs(a - b) > 1e-5 * b for a, b in zip(factors, expected, strict=True)):
        raise CheckpointError(
            f"{settings.where} scales rotary frequencies (rope_freqs.weight) in a way that is not Llama 3's"
        )
    return rope


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> list[float]:
    """Llama 3.1's divisors of the head_dim / 2 frequencies, with low and high factors of 1 and 4."""
    found = []
    for pair in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (pair / head_dim)
        smooth = (original / length - 1.0) / 3.0
        found.append(
            1.0 if length < original / 4 else factor if length > original else 1 / ((1 - smooth) / factor + smooth)
        )
    return found
