"""Places pictures in prompts for models whose processors write text around them. Does not know requests or
templates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hydra_engine.models.specs.base import MediaPlan, ProcessorSpec
from hydra_engine.preprocess.text.quoting import Quoting
from hydra_engine.preprocess.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hydra_engine.preprocess.media.media import Media


def place_in_text(
    text: str,
    plans: Sequence[MediaPlan],
    processor: ProcessorSpec,
    tokenizer: Tokenizer,
    *,
    quoting: Quoting | None = None,
    add_special_tokens: bool,
) -> list[int]:
    """Returns the token ids of `text`, in which each placeholder is replaced by the texts and image tokens of a plan.
    `text` has one placeholder per picture and no image tokens, all spelled for `quoting` if given."""
    image_token = tokenizer.token(processor.image_token_id)
    spelled = (lambda own: own) if quoting is None else quoting.spell
    encode = tokenizer.encode if quoting is None else quoting.encode
    pieces = text.split(spelled(processor.placeholder))
    assert image_token is not None and len(pieces) == len(plans) + 1, "placeholders were counted"
    written = [pieces[0]]
    for plan, piece in zip(plans, pieces[1:], strict=True):
        texts = [part if isinstance(part, str) else image_token for part in plan.parts]
        written += [*map(spelled, texts), piece]
    return encode("".join(written), add_special_tokens=add_special_tokens)


def without_texts(media: Iterable[Media]) -> list[Media]:
    """Returns the media with plans of spans only, for prompts whose token ids include the texts."""
    return [replace(picture, plan=picture.plan._replace(parts=picture.plan.items)) for picture in media]


def place_in_ids(token_ids: Sequence[int], processor: ProcessorSpec) -> list[int]:
    """Replaces placeholders by image tokens in a prompt of token ids; `Expansion` adds the texts around them."""
    return [processor.image_token_id if id == processor.placeholder_id else id for id in token_ids]
