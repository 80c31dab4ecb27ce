"""Turns a call into a validated Request and its pixels, off the event loop.

Ties the package together: messages or prompt -> text -> token ids, pictures -> pixels, placeholders -> spans, and the
checks of counts and lengths, cheap ones first. Does not know instances, readers or HTTP.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from operator import index

from hydra_engine.clock import Clock
from hydra_engine.config import MAX_LIMIT_S, MAX_PRIORITY
from hydra_engine.core.call import ChatMessage, GenerationCall, MediaPart, Role, TextPart
from hydra_engine.core.fairness import WorkerPool
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.prompting import MAX_PIXEL_BYTES, MediaLimits, TemplateOptions, texts_of
from hydra_engine.core.request import ImageItem, Request, RopeSpan, Slo
from hydra_engine.core.sampling import NO_DEFAULTS, GenerationDefaults, SamplingParams
from hydra_engine.errors import ContextLengthExceeded, InvalidRequest
from hydra_engine.models.specs.base import ItemPlan, ModelSpec, ProcessorSpec, VideoInfo
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.preprocess.media.media import Media, MediaLoader, Planned
from hydra_engine.preprocess.sandbox.grammars import Grammars
from hydra_engine.preprocess.sandbox.texts import MAX_WAITING_TEXTS, SandboxedTexts
from hydra_engine.preprocess.text.tokenizer import LONG_TEXT_CHARS, Tokenizer
from hydra_engine.preprocess.text.writer import Prompt, TextSpec, Writer

MAX_PARTS_KEPT = 4096  # separators whose token ids are cached
MAX_CHARS_PER_TOKEN = 64  # longer prompts are refused before they are tokenised

_COUNTING = SamplingParams(max_tokens=1, seed=0)  # for a call of which only the prompt is needed


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about the call that `Request` does not carry. `number`: the user's request, which several answers share;
    `num_text`: prompt tokens that are not for pictures or videos; `videos`: an entry per picture or video in prompt
    order, None for a picture."""

    number: RequestId
    num_text: int
    videos: tuple[VideoInfo | None, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request and its pixels. `pixels` has one entry per image span, in prompt order; `spans` are absolute, on the
    preprocessor's clock."""

    request: Request
    pixels: tuple[PixelPayload, ...]
    spans: tuple[StageSpan, ...]
    facts: CallFacts | None = None  # None: not made of a call


class Preprocessor:
    """The preprocessor of a frontend process. Use it on the frontend's loop."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        loader: MediaLoader,
        texts: SandboxedTexts,
        clock: Clock,
        max_model_len: int,
        seed: int = 0,
        defaults: GenerationDefaults = NO_DEFAULTS,
        chat_template_path: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenizer_class = spec.tokenizer_class
        self._spec = spec
        self._max_model_len = max_model_len
        self._seed = seed
        self._defaults = defaults
        self._num_drawn = 0
        self._clock = clock
        writer = Writer(tokenizer, TextSpec.from_spec(spec), chat_template_path)
        self._eos_token_ids = writer.eos_token_ids
        self._template, self._tool_template = writer.template, writer.tool_template
        self._texts = texts
        self._loader = loader
        self._expansion = Expansion(spec, self._texts)
        self._decodes = WorkerPool(
            "preprocess-text", num_workers=1, max_waiting=MAX_WAITING_TEXTS, noun="lists of tokens"
        )
        self._known = PromptTokens(spec, tokenizer)
        self._grammars = Grammars(tokenizer.file, self._eos_token_ids)

    @property
    def chat_template(self) -> str | None:
        """The text of the template in use; None if there is none."""
        return self._template.text

    @property
    def tool_template(self) -> str | None:
        return self._tool_template.text

    @property
    def media_limits(self) -> MediaLimits:
        return self._loader.media_limits

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        return await self._texts.generation_prompt(client, options, role)

    async def close(self) -> None:
        self._loader.close()
        self._texts.close()
        self._decodes.close()
        self._grammars.close()

    def forget_pictures(self) -> None:
        self._loader.forget_pictures()

    async def prepare(self, request_id: RequestId, call: GenerationCall, *, arrival_s: float | None = None) -> Prepared:
        """Returns the request of a call. Raises RequestError. Cancelling it leaves nothing behind."""
        sampling = call.sampling
        arrival_s = self._clock.now() if arrival_s is None else arrival_s
        _check_limits(call.slo, call.priority)
        self._check_vocabulary(sampling)
        seed = self._draw_seed() if sampling.seed in (None, -1) else sampling.seed & SEED_MASK
        prompt = self._prompt_of(call)
        sources = self._loader.resolve_sources(prompt.media)
        started_s = self._clock.now()
        token_ids = await self._tokenize(prompt, call.client)
        spans = [StageSpan("tokenize", started_s, self._clock.now(), tokens=len(token_ids))]
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param=prompt.param)
        self._known.check_rows(token_ids, prompt.param)
        is_raw = not prompt.messages and prompt.token_ids is None
        self._known.check_placeholders(token_ids, prompt.media, is_raw=is_raw)
        self._check_length(len(token_ids), sampling, prompt.param)  # before any picture is opened
        if sampling.grammar is not None:
            await self._grammars.check(sampling.grammar, call.client, call.cache_salt)
        num_text = len(token_ids) - len(prompt.media)
        media = await self._loader.load(
            prompt.media,
            sources,
            call.pixels,
            call.cache_salt,
            call.client,
            check=lambda plans: self._check_plans(plans, num_text, sampling, prompt.param),
        )
        spans.extend(span for item in media for span in item.spans)
        facts = CallFacts(request_id, num_text, tuple(item.video for item in media))
        if media and (processor := self._spec.processor) is not None:
            token_ids, media = await self._place_pictures(prompt, token_ids, media, processor, call.client)
        token_ids, items, rope_delta = await self._expansion.expand(token_ids, media, call.client)
        if media:
            self._known.check_rows(token_ids, prompt.param)
        payloads = tuple(payload for item in media for payload in item.payloads)
        _check_pixels(sum(len(payload.data) for payload in payloads), prompt.param)
        request = Request(
            id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            max_new_tokens=self._check_length(len(token_ids), sampling, prompt.param),
            seed=seed,
            arrival_s=arrival_s,
            images=items,
            eos_token_ids=self._eos_token_ids,
            rules=self._defaults.rules,
            slo=call.slo,
            cache_salt=call.cache_salt,
            client=call.client,
            rope_delta=rope_delta,
            priority=call.priority,
        )
        return Prepared(request, payloads, tuple(spans), facts)

    async def prompt_ids(self, request_id: RequestId, call: GenerationCall) -> tuple[int, ...]:
        """Returns the token ids of a call's prompt, image tokens included; opens its pictures. Raises RequestError as
        `prepare` does."""
        prepared = await self.prepare(request_id, replace(call, sampling=_COUNTING))
        return prepared.request.prompt_token_ids

    async def tokenize(self, call: GenerationCall) -> list[int]:
        """Returns the token ids of a call's text, without opening pictures. Checks only the length of the text."""
        return await self._tokenize(self._prompt_of(call), call.client)

    async def detokenize(self, token_ids: Sequence[int], client: str = "") -> str:
        """Returns the text, special tokens included. Raises InvalidRequest for what are no ids of the vocabulary."""
        if not isinstance(token_ids, Sized) or len(token_ids) < LONG_TEXT_CHARS:
            return self._decode(token_ids)
        return await self._decodes.run(client, self._decode, token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        vocab_size = self.tokenizer.vocab_size
        try:
            ids = [index(id) for id in token_ids]
        except TypeError as error:
            raise InvalidRequest("token ids must be a list of integers", param="tokens") from error
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"token ids must be between 0 and {vocab_size - 1}", param="tokens")
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _check_vocabulary(self, sampling: SamplingParams) -> None:
        vocab_size = self._spec.language.vocab_size
        biased = [token for token, _ in sampling.logit_bias]
        for name, token_ids in (("logit_bias", biased), ("allowed_token_ids", sampling.allowed_token_ids)):
            if token_ids and max(token_ids) >= vocab_size:
                raise InvalidRequest(
                    f"{name} names token {max(token_ids)}; this model's token ids go from 0 to {vocab_size - 1}",
                    param=name,
                )

    # ---- text

    def _prompt_of(self, call: GenerationCall) -> Prompt:
        text, messages, media, param = call.prompt, call.messages, list(call.media), "prompt"
        if messages:
            media = [part for message in messages for part in message.media]
            param = messages[-1].param.partition("[")[0]
        elif not isinstance(text, str):
            return Prompt(media, token_ids=self._check_token_ids(text))
        elif call.raw:
            special = call.template.add_special_tokens is not False
            return Prompt(media, text=text, num_chars=len(text), add_special_tokens=special)
        else:
            content = (*media, TextPart(text)) if media else text
            messages = (ChatMessage("user", content, "prompt"),)
        template = self._tool_template if call.template.tools else self._template
        messages = tuple(map(template.with_known_fields, messages))
        num_chars = sum(len(text) for message in messages for _, text in message.texts())
        others = [message.others for message in messages]
        num_chars += sum(map(len, texts_of((others, call.template.tools, call.template.variables))))
        return Prompt(media, messages, num_chars=num_chars, param=param, template=call.template)

    def _check_token_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")
        if len(prompt) > self._max_model_len:
            raise self._too_long(len(prompt), 1, "prompt")
        vocab_size = self._spec.language.vocab_size
        if any(type(id) is not int or not 0 <= id < vocab_size for id in prompt):
            raise InvalidRequest(f"token ids must be integers from 0 to {vocab_size - 1}", param="prompt")
        return list(prompt)

    async def _tokenize(self, prompt: Prompt, client: str) -> list[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        # LiteLLM looks for "maximum context length", LangChain and clients of Anthropic's API for "prompt is too long".
        if prompt.num_chars > MAX_CHARS_PER_TOKEN * self._max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt has "
                f"{prompt.num_chars} characters: the prompt is too long. Please shorten it.",
                param=prompt.param,
            )
        try:
            token_ids = await self._texts.encode(client, prompt)
        except InvalidRequest as error:
            error.param = error.param or prompt.param
            raise
        return token_ids

    async def _place_pictures(
        self, prompt: Prompt, token_ids: list[int], media: Sequence[Media], processor: ProcessorSpec, client: str
    ) -> tuple[list[int], list[Media]]:
        """Returns the token ids with the texts that the processor writes around pictures, and the media without these
        texts."""
        if prompt.token_ids is not None:  # `Expansion` adds the texts
            placeholder, image_token = processor.placeholder_id, processor.image_token_id
            return [image_token if id == placeholder else id for id in token_ids], list(media)
        token_ids = await self._texts.encode_with_media(client, prompt, [picture.plan for picture in media])
        return token_ids, [replace(picture, plan=picture.plan._replace(parts=picture.plan.items)) for picture in media]

    # ---- the prompt

    def _check_plans(self, plans: Sequence[Planned], num_text: int, sampling: SamplingParams, param: str) -> None:
        """Checks pictures and videos that are opened and not decoded. Raises InvalidRequest for too many pixels, and
        ContextLengthExceeded."""
        items = [item for _, plan in plans for item in plan.items]
        _check_pixels(sum(3 * item.num_pictures * item.width * item.height for item in items), param)
        self._check_length(num_text + self._expansion.num_tokens(plans), sampling, param)

    def _check_length(self, num_prompt: int, sampling: SamplingParams, param: str) -> int:
        """Returns how many tokens may be generated. Raises ContextLengthExceeded."""
        room = self._max_model_len - num_prompt
        least = sampling.max_tokens or max(1, sampling.min_tokens)
        if least > room:
            raise self._too_long(num_prompt, least, param)
        if sampling.max_tokens is None and self._defaults.max_tokens is not None:
            return min(room, max(least, self._defaults.max_tokens))
        return sampling.max_tokens or room

    def _too_long(self, num_prompt: int, num_completion: int, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
            f"{num_prompt + num_completion} tokens ({num_prompt} in the prompt, {num_completion} for the completion). "
            "The prompt is too long, or the completion. Please shorten one of them.",
            param=param,
        )

    def _draw_seed(self) -> int:
        """Returns a seed that depends only on the configured seed and the number of seeds drawn before."""
        self._num_drawn += 1
        drawn = hashlib.blake2b(b"%d/%d" % (self._seed, self._num_drawn), digest_size=8).digest()
        return int.from_bytes(drawn, "little") & SEED_MASK


SEED_MASK = (1 << 63) - 1  # seeds count modulo 2^63


def _check_pixels(num_bytes: int, param: str) -> None:
    """Raises InvalidRequest for more bytes of pixels than one message to an instance can hold."""
    if num_bytes > MAX_PIXEL_BYTES:
        raise InvalidRequest(
            f"the pictures and videos of the request have {num_bytes >> 20} MiB of pixels; at most "
            f"{MAX_PIXEL_BYTES >> 20} MiB are allowed: give fewer, or a smaller detail",
            param=param,
        )


def _check_limits(slo: Slo, priority: int) -> None:
    for name in ("ttft_s", "tpot_s"):
        limit = getattr(slo, name)
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (is_number and 0 < limit <= MAX_LIMIT_S):
            raise InvalidRequest(
                f"slo.{name} must be a number of seconds, more than 0 and at most an hour", param="slo"
            )
    if type(priority) is not int or not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be an integer from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}; the smaller one goes first",
            param="priority",
        )


# ---- placeholders in token ids: the model has an embedding for each token, and there is one placeholder per picture
# or video, which becomes the spans of features and the texts around them that its plan asks for


class PromptTokens:
    """Checks of a prompt's token ids: the model has an embedding for each, and placeholders match the media."""

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
    """Replaces placeholders by the spans and texts of media plans, for one model. Use it on one event loop;
    `num_tokens` is thread-safe."""

    def __init__(self, spec: ModelSpec, texts: SandboxedTexts) -> None:
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
