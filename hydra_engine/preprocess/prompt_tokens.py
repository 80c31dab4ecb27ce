"""A prompt's token ids: checked, and their placeholders expanded to the spans of features, and the text around them,
that media plans ask for.

The model has an embedding for each token, and there is one placeholder per picture and video. Does not know texts or
requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hydra_engine.core.call import MediaPart
from hydra_engine.core.request import ImageItem, RopeSpan
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import ItemPlan, ModelSpec, ProcessorSpec
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.preprocess.media.media import Media, Planned
from hydra_engine.preprocess.sandbox.texts import Texts
from hydra_engine.preprocess.text.tokenizer import Tokenizer

MAX_PARTS_KEPT = 4096  # separators whose token ids are cached


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


class Expansion:
    """The expansion for one model. Use it on one event loop; `num_tokens` is thread-safe."""

    def __init__(self, spec: ModelSpec, texts: Texts) -> None:
        self._spec, self._texts = spec, texts
        self._known: dict[str, list[int]] = {}

    def num_tokens(self, plans: Sequence[Planned]) -> int:
        """A lower bound of the tokens that replace the placeholders: a text that is not cached counts as one."""
        known = self._known
        return sum(
            len(known.get(part, " ")) if isinstance(part, str) else part.num_tokens
            for parts in _parts(plans)
            for part in parts
        )

    async def expand(
        self, token_ids: list[int], media: Sequence[Media], client: str
    ) -> tuple[list[int], tuple[ImageItem, ...], int]:
        """Replaces every placeholder by the spans and texts of its plan. Returns (token ids, images in prompt order,
        the request's `rope_delta`)."""
        expanded: list[int] = []
        spans: list[tuple[int, ItemPlan]] = []
        begin = 0
        plans = [(source.kind, source.plan) for source in media]
        texts = await self._ids_of([part for parts in _parts(plans) for part in parts if isinstance(part, str)], client)
        for (kind, _), parts in zip(plans, _parts(plans), strict=True):
            token = self._spec.video_token_id if kind == "video" else self._spec.image_token_id
            assert token is not None
            at = token_ids.index(token, begin)
            expanded += token_ids[begin:at]
            begin = at + 1
            for part in parts:
                if isinstance(part, ItemPlan):
                    spans.append((len(expanded), part))
                    expanded += [token] * part.num_tokens
                else:
                    expanded += texts[part]
        expanded += token_ids[begin:]
        ropes: Sequence[RopeSpan | None] = [None] * len(spans)
        rope_delta = 0
        if self._spec.language.rope_sections is not None:
            ropes, rope_delta = place_spans(spans)
        payloads = ((index, source.size, payload) for index, source in enumerate(media) for payload in source.payloads)
        items = tuple(
            ImageItem(
                digest=payload.digest,
                width=size[0],
                height=size[1],
                num_patches=item.num_patches,
                num_tokens=item.num_tokens,
                start=start,
                grid=item.grid,
                rope=rope,
                bidirectional=item.bidirectional,
                source=source,
            )
            for (start, item), rope, (source, size, payload) in zip(spans, ropes, payloads, strict=True)
        )
        return expanded, items, rope_delta

    async def _ids_of(self, texts: Sequence[str], client: str) -> Mapping[str, list[int]]:
        """Token ids of these texts, cached since separators repeat."""
        found = {text: self._known[text] for text in texts if text in self._known}
        new = [text for text in dict.fromkeys(texts) if text not in found]
        if new:
            read = dict(zip(new, await self._texts.parts(client, new), strict=True))
            if len(self._known) >= MAX_PARTS_KEPT:  # timestamps of videos are unbounded in number
                self._known.clear()
            self._known |= read
            found |= read
        return found


def _parts(plans: Iterable[Planned]) -> Iterator[tuple[str | ItemPlan, ...]]:
    """Yields the texts and spans of each picture or video."""
    seen: Counter[str] = Counter()
    for kind, plan in plans:
        yield plan.numbered_parts(seen[kind])
        seen[kind] += 1


def without_texts(media: Iterable[Media]) -> list[Media]:
    """Returns the media with plans of spans only, for prompts whose token ids include the texts."""
    return [replace(picture, plan=picture.plan._replace(parts=picture.plan.items)) for picture in media]


def place_in_ids(token_ids: Sequence[int], processor: ProcessorSpec) -> list[int]:
    """Replaces placeholders by image tokens in a prompt of token ids; `Expansion` adds the texts around them."""
    return [processor.image_token_id if id == processor.placeholder_id else id for id in token_ids]
