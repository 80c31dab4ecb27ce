"""Placeholders in a prompt, and what takes their places: as plans say, spans of features and text around them. Does not
know texts or requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hydra_engine.core.media import ImageItem, RopeSpan
from hydra_engine.models.specs.base import ItemPlan, ModelSpec
from hydra_engine.models.specs.positions import place_spans
from hydra_engine.preprocess.media.media import Media, Planned
from hydra_engine.preprocess.text.tokenizer import Tokenizer

MAX_PARTS_KEPT = 4096  # separators whose token ids are remembered


class Expansion:
    """Safe from any thread."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self._known: dict[str, list[int]] = {}

    def num_tokens(self, plans: Sequence[Planned]) -> int:
        """How many tokens take the placeholders' places."""
        return sum(
            part.num_tokens if isinstance(part, ItemPlan) else len(part)
            for parts in self._parts(plans)
            for part in parts
        )

    def expand(self, token_ids: list[int], media: Sequence[Media]) -> tuple[list[int], tuple[ImageItem, ...], int]:
        """Every placeholder becomes what its picture's plan says. Also returns the request's `rope_delta`."""
        expanded: list[int] = []
        spans: list[tuple[int, ItemPlan]] = []
        begin = 0
        plans = [(source.kind, source.plan) for source in media]
        for (kind, _), parts in zip(plans, self._parts(plans), strict=True):
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
                    expanded += part
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
                whole=item.whole,
                source=source,
            )
            for (start, item), rope, (source, size, payload) in zip(spans, ropes, payloads, strict=True)
        )
        return expanded, items, rope_delta

    def _parts(self, plans: Iterable[Planned]) -> Iterator[list[ItemPlan | list[int]]]:
        """Those of one picture or video after another, texts as token ids."""
        seen: Counter[str] = Counter()
        for kind, plan in plans:
            parts = plan.parts_of(seen[kind])
            yield [self._ids_of(part) if isinstance(part, str) else part for part in parts]
            seen[kind] += 1

    def _ids_of(self, text: str) -> list[int]:
        """Separators between spans come again and again."""
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= MAX_PARTS_KEPT:  # timestamps of videos have no end
                self._known.clear()
            known = self._known[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return known
