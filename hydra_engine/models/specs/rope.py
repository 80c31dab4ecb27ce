"""Rotary positions: the settings of a text config, and the multimodal positions of a prompt with spans, in integers.

Reads both generations of layouts, scaling types and sections of multimodal positions, and returns the settings as
numbers; `models/layers/decoder.py` turns them into angles.

Multimodal positions (M-RoPE; Qwen2-VL, section 2.1): text advances all three axes alike. A span begins at the next
position, from which its rows, columns and temporal patches count. The next text, or generated token, follows the
largest position on any axis. In transformers 5.3 to 5.24 text after a video of Qwen2-VL or Qwen2.5-VL follows its rows
and columns only, so results differ if a video lasts longer than it is wide. The models were trained with the paper's
rule, which is implemented here. Qwen3-VL and Qwen3.5 write times into the prompt: every temporal patch is a span at
time 0, for which both rules agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.request import RopeSpan
from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import ItemPlan
from hydra_engine.models.specs.fields import ELSEWHERE, LARGEST, Fields

logger = logging.getLogger(__name__)

Sections = tuple[int, int, int]  # pairs that turn by time, row and column

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary settings. `parameters` always has rope_type ("default", "linear", "llama3" or "yarn") and rope_theta, then
    the type's own. `sections` None: one position per token."""

    parameters: dict[str, object]
    theta: float
    sections: Sections | None
    axes: tuple[int, ...]  # of every rotated pair, as in `pair_axes`; () without sections
    stretched: int  # positions that yarn reaches; 0 elsewhere
    rotary_dim: int  # of a head's numbers


def rope_settings(
    config: Fields,
    *,
    head_dim: int,
    theta: float,
    sections: Sections | None,
    interleaved: bool,
    max_position: int,
    share: float | None = None,
    mrope: bool = False,
) -> Rope:
    """Reads `rope_section` and the fields beside it; keywords are the model type's defaults. `share` is the rotated
    fraction of a head, None if the type always rotates whole heads. Without `mrope` there is one position per token,
    for which sections change nothing: they are not read."""
    values = rope_section(config)
    kind = values.text("rope_type", values.text("type", "default"))
    if kind == "mrope":  # old name of the default in configs with sections
        kind = "default"
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"rope type {kind[:40]!r} is not supported; supported are {', '.join(ROPE_TYPES)}{ELSEWHERE}"
        )
    if layer_type := next((name for name, value in values.values.items() if isinstance(value, dict)), None):
        raise CheckpointError(
            f"{values.where} has settings for layers of type {layer_type[:40]}; supported are the same ones for all"
            + ELSEWHERE
        )
    rotary_dim = _rotary_dim(config, values, head_dim, share)
    theta = values.number("rope_theta", config.number("rope_theta", theta))
    _say_what_is_left_out(config, theta)
    # Dynamic scaling begins past max_position_embeddings, where it would make a row's angles depend on the longest row
    # of its batch; a context ends before that.
    parameters: dict[str, object] = {"rope_type": "default" if kind == "dynamic" else kind, "rope_theta": theta}
    if kind in ("linear", "llama3"):
        parameters["factor"] = values.number("factor")
    if kind == "llama3":
        parameters |= {name: values.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        parameters["original_max_position_embeddings"] = _original_length(config, values, max_position)
    stretched = 0
    if kind == "yarn":
        original = _original_length(config, values, max_position)
        factor = values.number("factor", max_position / original)
        stretched = int(min(factor * original, LARGEST))
        parameters |= {"factor": factor, "original_max_position_embeddings": original, **_yarn(values, theta, factor)}
    if not mrope:
        return Rope(parameters, theta, None, (), stretched, rotary_dim)
    found = _sections(values, rotary_dim, sections)
    mixed = _interleaved(values, interleaved)
    axes = () if found is None else pair_axes(found, interleaved=mixed)
    return Rope(parameters, theta, found, axes, stretched, rotary_dim)


def pair_axes(sections: Sections, *, interleaved: bool) -> tuple[int, ...]:
    """Returns the axis that turns each pair: 0 time, 1 row, 2 column. Sections are contiguous (Qwen2-VL), or
    interleaved, with time in the pairs that rows and columns leave (Qwen3-VL)."""
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(
        axis if axis and index < 3 * sections[axis] else 0 for index in range(sum(sections)) for axis in (index % 3,)
    )


def rope_section(config: Fields) -> Fields:
    """Returns `rope_scaling`, the older name, else `rope_parameters`. If a config has both, `rope_scaling` was added by
    hand, and transformers prefers it too."""
    names = [name for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    return config.section(names[0]) if names else Fields({}, config.where)


def _say_what_is_left_out(config: Fields, theta: float) -> None:
    """Warns if rope_theta is in the ignored section, where transformers loses it too."""
    other = config.get("rope_parameters")
    if config.get("rope_scaling") and isinstance(other, dict) and other.get("rope_theta") not in (None, theta):
        logger.warning(
            "%s has rope_scaling, which counts, and rope_parameters, which does not: rope_theta is %g and not %s; move "
            "it into rope_scaling if that is wrong",
            *(config.where, theta, str(other["rope_theta"])[:40]),
        )


def _rotary_dim(config: Fields, values: Fields, head_dim: int, share: float | None) -> int:
    whole = 1.0 if config.is_null("partial_rotary_factor") else share or 1.0
    fraction = values.number("partial_rotary_factor", config.number("partial_rotary_factor", whole))
    if share is None and fraction != 1.0:
        raise CheckpointError(f"partial_rotary_factor other than 1 is not supported{ELSEWHERE}")
    turning = int(head_dim * fraction)
    if not 0 < fraction <= 1 or turning % 2 or not turning:
        raise CheckpointError(
            f"partial_rotary_factor {fraction:g} turns {turning} of a head's {head_dim} numbers; "
            "it must be pairs of them"
        )
    return turning


def _original_length(config: Fields, values: Fields, max_position: int) -> int:
    """Context length of the training without scaling."""
    name = "original_max_position_embeddings"
    return (config if name in config else values).integer(name, max_position)


def _yarn(values: Fields, theta: float, factor: float) -> dict[str, object]:
    """Returns the ramp between kept and slowed pairs, and the factor of cosines and sines (YaRN, section 3.4)."""
    fast, slow = values.number("beta_fast", 32.0), values.number("beta_slow", 1.0)
    if fast < slow or theta <= 1:
        raise CheckpointError(f"yarn in {values.where} needs beta_fast not below beta_slow and rope_theta above 1")
    if "attention_factor" in values:
        attention = values.number("attention_factor")
    elif "mscale" in values and "mscale_all_dim" in values:
        attention = _magnitude(factor, values.number("mscale")) / _magnitude(factor, values.number("mscale_all_dim"))
    else:
        attention = _magnitude(factor, 1.0)
    truncate = values.flag("truncate", True)
    return {"attention_factor": attention, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}


def _magnitude(factor: float, share: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _sections(values: Fields, rotary_dim: int, default: Sections | None) -> Sections | None:
    if "mrope_section" not in values and default is None:
        return None
    sections = values.get("mrope_section") if "mrope_section" in values else list(default or ())
    if not isinstance(sections, list) or len(sections) != 3 or any(type(n) is not int or n < 0 for n in sections):
        raise values.wrong_value("mrope_section", "a list of three whole numbers")
    if sum(sections) != rotary_dim // 2:
        raise CheckpointError(
            f"mrope_section {sections} of {values.where} has {sum(sections)} pairs, but a head turns {rotary_dim // 2}"
        )
    time, row, column = sections
    return time, row, column


def _interleaved(values: Fields, of_type: bool) -> bool:
    """Returns the model type's value. Raises CheckpointError if the config contradicts it."""
    if values.flag("mrope_interleaved", of_type) is not of_type:
        raise values.wrong_value("mrope_interleaved", f"{str(of_type).lower()} for this text model type")
    return of_type


def place_spans(spans: Sequence[tuple[int, ItemPlan]]) -> tuple[tuple[RopeSpan, ...], int]:
    """Returns the positions of `spans`, (first token in the prompt, plan) in order, and the offset from a token's index
    to its position after the last span."""
    placed: list[RopeSpan] = []
    end = origin = following = 0  # index after the last span; its origin; position of the next token
    for start, item in spans:
        if not item.continues:
            origin = following + start - end
            following = origin
        following = max(following, origin + max(item.rows, item.columns, item.time + 1))
        end = start + item.num_tokens
        placed.append(RopeSpan(origin + item.time, origin, origin, item.columns, following - end))
    return tuple(placed), following - end
