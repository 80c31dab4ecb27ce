"""Checks a prompt's token ids: the model has an embedding for each, and there is one placeholder per picture and video.
Does not know texts or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.core.call import MediaPart
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.preprocess.text.tokenizer import Tokenizer


class PromptTokens:
    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self._num_rows = spec.language.vocab_size
        # Features replace these, so they need no embedding.
        self._replaced = {spec.placeholder_id, spec.video_token_id, spec.image_token_id}

    def placeholder(self, kind: str) -> int | None:
        """The token that stands for one picture or video in a prompt."""
        return self._spec.video_token_id if kind == "video" else self._spec.placeholder_id

    def check_rows(self, token_ids: Sequence[int], param: str) -> None:
        """Raises InvalidRequest for a token that the tokenizer knows and the model has no embedding for."""
        if not token_ids or max(token_ids) < self._num_rows:
            return
        lacking = (id for id in token_ids if id >= self._num_rows and id not in self._replaced)
        if (id := next(lacking, None)) is not None:
            raise InvalidRequest(
                f"the prompt holds the token {self._tokenizer.token(id)!r} (id {id}), for which the model has no "
                f"embedding: its ids go from 0 to {self._num_rows - 1}; leave it out",
                param=param,
            )

    def check_placeholders(self, token_ids: Sequence[int], media: Sequence[MediaPart], *, is_raw: bool) -> None:
        """Raises InvalidRequest unless placeholders match the media in number and order, and image tokens (where they
        are not placeholders) are absent."""
        needed = [self.placeholder(part.kind) for part in media]
        placeholders = (self.placeholder("image"), self.placeholder("video"))
        present = [id for id in token_ids if id in placeholders]
        for token, kind in zip(placeholders, ("image", "video"), strict=True):
            if token is not None and present.count(token) != needed.count(token):
                hint = f"; in a raw prompt {self._tokenizer.token(token)} stands for one" if is_raw else ""
                raise InvalidRequest(
                    f"the prompt has {present.count(token)} {kind} placeholders but {needed.count(token)} {kind}s were "
                    f"given{hint}",
                    param="prompt",
                )
        feature = self._spec.image_token_id
        if feature is not None and feature not in placeholders and feature in token_ids:
            raise InvalidRequest(
                f"the prompt holds the model's image token {self._tokenizer.token(feature)}; leave it out",
                param="prompt",
            )
        if present != needed:
            raise InvalidRequest("pictures and videos come in another order than their placeholders", param="prompt")
