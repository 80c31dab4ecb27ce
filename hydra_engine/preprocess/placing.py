"""Pictures into prompts for models whose processors write text around them. Does not know requests or templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydra_engine.models.specs.base import ProcessorSpec
from hydra_engine.preprocess.media.media import Media
from hydra_engine.preprocess.text.quoting import Quoting
from hydra_engine.preprocess.text.tokenizer import Tokenizer


def place_in_text(
    text: str,
    media: Sequence[Media],
    processor: ProcessorSpec,
    tokenizer: Tokenizer,
    *,
    quoting: Quoting | None = None,
    add_special_tokens: bool,
) -> tuple[list[int], list[Media]]:
    """`text` holds the placeholder once per picture, and no image tokens besides, spelled for `quoting` where there is
    one. Returns the token ids, and the pictures without the text that is among these now."""
    image_token = tokenizer.token(processor.image_token_id)
    spelled = (lambda own: own) if quoting is None else quoting.own
    encode = tokenizer.encode if quoting is None else quoting.encode
    pieces = text.split(spelled(processor.placeholder))
    assert image_token is not None and len(pieces) == len(media) + 1, "placeholders were counted"
    written = [pieces[0]]
    for picture, piece in zip(media, pieces[1:], strict=True):
        texts = [part if isinstance(part, str) else image_token for part in picture.plan.parts]
        written += [*map(spelled, texts), piece]
    token_ids = encode("".join(written), add_special_tokens=add_special_tokens)
    return token_ids, [replace(picture, plan=picture.plan._replace(parts=picture.plan.items)) for picture in media]


def place_in_ids(token_ids: Sequence[int], processor: ProcessorSpec) -> list[int]:
    """The same for a prompt that came as token ids; what is around the pictures is tokenised by itself."""
    return [processor.image_token_id if id == processor.placeholder_id else id for id in token_ids]
