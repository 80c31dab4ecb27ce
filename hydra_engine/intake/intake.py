"""From what a user gives to a validated Request and its pixels, off the event loop.

Ties the room together: messages or prompt -> text -> token ids, pictures -> pixels, placeholders -> spans, and the
checks of counts and lengths, the cheap ones first. Does not know instances, readers or HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import ImageItem, PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.request import Request, SamplingParams, Slo
from hydra_engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from hydra_engine.intake import decode
from hydra_engine.intake.chat import ChatTemplate, Conversation, ImageRef, parse_messages, user_message
from hydra_engine.intake.child import Job
from hydra_engine.intake.fetch import InMemory, MediaFetcher, RemoteImage, Resolve, Source, classify, read_local
from hydra_engine.intake.pool import WorkerPool
from hydra_engine.intake.preprocess import fit_of, payload_of, process
from hydra_engine.intake.sandbox import Sandbox
from hydra_engine.intake.tokenizer import LONG_TEXT_CHARS, Tokenizer
from hydra_engine.specs.base import ImageGeometry, ModelSpec, VisionSpec

MAX_CHARS_PER_TOKEN = 64  # longer prompts are refused before they are tokenised
MAX_WAITING_IMAGES = 2048
MAX_WAITING_TEXTS = 512

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """`pixels` has one entry per image, in prompt order; `spans` are stamped absolutely, on the intake's clock."""

    request: Request
    pixels: tuple[PixelPayload, ...]
    spans: tuple[StageSpan, ...]


@dataclass(frozen=True, slots=True)
class _Picture:
    payload: PixelPayload
    geometry: ImageGeometry
    spans: tuple[StageSpan, ...]


class Intake:
    """One per front process, used on its loop."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        media: MediaConfig,
        max_model_len: int,
        seed: int = 0,
        chat_template_path: str | None = None,
        clock: Clock | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._spec = spec
        self._media = media
        self._max_model_len = max_model_len
        self._seed = seed
        self._num_drawn = 0
        self._clock = clock or MonotonicClock()
        image_token = None if spec.image_token_id is None else tokenizer.token(spec.image_token_id)
        template = tokenizer.chat_template if chat_template_path is None else _read_template(chat_template_path)
        self._template = ChatTemplate(tokenizer, template, image_token)
        self._fetcher = MediaFetcher(media, resolve)
        self._sandbox = Sandbox()
        self._images = WorkerPool("intake-image", num_workers=media.decode_workers, max_waiting=MAX_WAITING_IMAGES)
        self._texts = WorkerPool("intake-text", num_workers=1, max_waiting=MAX_WAITING_TEXTS)
        self._eos_token_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer.eos_ids)))

    async def warm_up(self) -> None:
        """Optional, before the first request: what the first picture would otherwise wait for."""
        if self._spec.vision is not None:
            await self._images.run(self._sandbox.warm_up)

    async def close(self) -> None:
        self._images.close()
        self._texts.close()
        self._sandbox.close()

    async def prepare(
        self,
        request_id: RequestId,
        *,
        sampling: SamplingParams,
        prompt: str | Sequence[int] | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
        images: Any = None,
        raw: bool = False,
        slo: Slo | None = None,
        arrival_s: float | None = None,
        cache_salt: str = "",
    ) -> Prepared:
        """Exactly one of `prompt` (text or token ids) and `messages`. Text goes through the chat template unless `raw`;
        a raw text and token ids hold the image placeholder once per image. Raises RequestError; cancelling it leaves
        nothing behind."""
        arrival_s = self._clock.now() if arrival_s is None else arrival_s
        seed = self._draw_seed() if sampling.seed is None else sampling.seed & _SEED_MASK
        asked = self._asked(prompt, messages, images, raw=raw)
        sources = self._check_images(asked.images)
        started_s = self._clock.now()
        token_ids = await self._tokenize(asked, add_generation_prompt=True)
        spans = [StageSpan("tokenize", started_s, self._clock.now(), tokens=len(token_ids))]
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param=asked.param)
        self._check_placeholders(token_ids, len(asked.images))
        self._check_length(len(token_ids), sampling)  # before any picture is opened
        pictures = await self._load_all(asked.images, sources)
        spans.extend(span for picture in pictures for span in picture.spans)
        token_ids, items = self._expand(token_ids, pictures)
        request = Request(
            id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            max_new_tokens=self._check_length(len(token_ids), sampling),
            seed=seed,
            arrival_s=arrival_s,
            images=items,
            eos_token_ids=self._eos_token_ids,
            slo=slo or Slo(),
            cache_salt=cache_salt,
        )
        return Prepared(request, tuple(picture.payload for picture in pictures), tuple(spans))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a raw prompt or of messages; an image is one placeholder and is not opened."""
        asked = self._asked(prompt, messages, None, raw=True)
        asked.add_special_tokens = add_special_tokens and messages is None
        return await self._tokenize(asked, add_generation_prompt=add_generation_prompt)

    # ---- text

    def _asked(self, prompt: object, messages: object, images: Any, *, raw: bool) -> _Asked:
        if (prompt is None) == (messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if messages is not None:
            if images is not None:
                raise InvalidRequest("with messages, images are parts of the messages", param="images")
            conversation = parse_messages(messages)
            return _Asked(
                conversation.images, conversation=conversation, num_chars=conversation.num_chars, param="messages"
            )
        refs = _image_refs(images)
        if isinstance(prompt, str):
            if raw:
                return _Asked(refs, text=prompt, num_chars=len(prompt), add_special_tokens=True)
            return _Asked(refs, conversation=user_message(prompt, refs), num_chars=len(prompt))
        return _Asked(refs, token_ids=self._check_token_ids(prompt))

    def _check_token_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise InvalidRequest("prompt must be a string or a list of token ids", param="prompt")
        if len(prompt) > self._max_model_len:
            raise self._too_long(len(prompt), 1)
        vocab_size = self._spec.language.vocab_size
        if any(type(id) is not int or not 0 <= id < vocab_size for id in prompt):
            raise InvalidRequest(f"token ids must be integers from 0 to {vocab_size - 1}", param="prompt")
        return list(prompt)

    async def _tokenize(self, asked: _Asked, *, add_generation_prompt: bool) -> list[int]:
        if asked.token_ids is not None:
            return asked.token_ids
        if asked.num_chars > MAX_CHARS_PER_TOKEN * self._max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt has "
                f"{asked.num_chars} characters. Please shorten it.",
                param=asked.param,
            )
        try:
            if asked.num_chars < LONG_TEXT_CHARS:
                token_ids = self._encode(asked, add_generation_prompt)
            else:
                token_ids = await self._texts.run(self._encode, asked, add_generation_prompt)
        except InvalidRequest as error:
            error.param = error.param or asked.param
            raise
        return token_ids

    def _encode(self, asked: _Asked, add_generation_prompt: bool) -> list[int]:
        if asked.conversation is None:
            return self.tokenizer.encode(asked.text, add_special_tokens=asked.add_special_tokens)
        text = self._template.render(asked.conversation, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them

    # ---- pictures

    def _check_images(self, refs: Sequence[ImageRef]) -> list[Source]:
        """Counts and addresses, before anything is opened."""
        if not refs:
            return []
        if self._spec.vision is None or self._spec.image_token_id is None:
            raise InvalidRequest("this model takes no images", param=refs[0].param)
        if len(refs) > self._media.max_images:
            raise InvalidRequest(
                f"the request has {len(refs)} images; at most {self._media.max_images} are allowed",
                code="too_many_images",
                param=refs[self._media.max_images].param,
            )
        sources = []
        for ref in refs:
            try:
                sources.append(classify(ref.value, self._media))
            except InvalidRequest as error:
                error.param = error.param or ref.param
                raise
        return sources

    async def _load_all(self, refs: Sequence[ImageRef], sources: Sequence[Source]) -> list[_Picture]:
        if not sources:
            return []
        turn = asyncio.Semaphore(self._media.decode_workers)  # one request does not fill the queue of all
        return await _all_or_none([self._load(ref, source, turn) for ref, source in zip(refs, sources, strict=True)])

    async def _load(self, ref: ImageRef, source: Source, turn: asyncio.Semaphore) -> _Picture:
        try:
            spans: tuple[StageSpan, ...] = ()
            if isinstance(source, RemoteImage):
                started_s = self._clock.now()
                source = InMemory(await self._fetcher.fetch(source))
                spans = (StageSpan("fetch", started_s, self._clock.now()),)
            async with turn:
                payload, geometry, span = await self._images.run(self._decode, source)
        except InvalidRequest as error:
            error.param = error.param or ref.param
            raise
        return _Picture(payload, geometry, (*spans, span))

    def _decode(self, source: Source) -> tuple[PixelPayload, ImageGeometry, StageSpan]:
        """In a worker thread: a source that needs no network, to pixels."""
        vision = self._spec.vision
        assert vision is not None and not isinstance(source, RemoteImage)
        started_s = self._clock.now()
        value = read_local(source, self._media)
        if isinstance(value, bytes):
            payload, geometry = self._decode_file(value, vision)
        else:
            from_memory = decode.from_pil if isinstance(value, Image.Image) else decode.from_array
            image = from_memory(value, self._media)
            geometry = vision.geometry(image.width, image.height)
            payload = process(image, vision.preprocess, geometry)
        return payload, geometry, StageSpan("preprocess", started_s, self._clock.now(), tokens=geometry.num_patches)

    def _decode_file(self, data: bytes, vision: VisionSpec) -> tuple[PixelPayload, ImageGeometry]:
        """The header here, the pixels in a child process."""
        container = decode.inspected(data, self._media)
        geometry = vision.geometry(*decode.upright_size(container))
        with decode.room_for(container.width * container.height):
            pixels = self._sandbox.render(Job(container, fit_of(vision.preprocess, geometry)))
        return payload_of(pixels, vision.preprocess, geometry), geometry

    # ---- the prompt

    def _check_placeholders(self, token_ids: Sequence[int], num_images: int) -> None:
        if self._spec.image_token_id is None:
            return
        num_placeholders = token_ids.count(self._spec.image_token_id)
        if num_placeholders != num_images:
            raise InvalidRequest(
                f"the prompt has {num_placeholders} image placeholders but {num_images} images were given",
                param="prompt",
            )

    def _expand(self, token_ids: list[int], pictures: Sequence[_Picture]) -> tuple[list[int], tuple[ImageItem, ...]]:
        """Every placeholder becomes as many as its picture has features."""
        image_token_id = self._spec.image_token_id
        expanded: list[int] = []
        items: list[ImageItem] = []
        begin = 0
        for picture in pictures:
            assert image_token_id is not None
            at = token_ids.index(image_token_id, begin)
            expanded += token_ids[begin:at]
            payload, geometry = picture.payload, picture.geometry
            items.append(
                ImageItem(
                    digest=payload.digest,
                    width=payload.width,
                    height=payload.height,
                    num_patches=geometry.num_patches,
                    num_tokens=geometry.num_tokens,
                    start=len(expanded),
                    grid=geometry.grid,
                )
            )
            expanded += [image_token_id] * geometry.num_tokens
            begin = at + 1
        return expanded + token_ids[begin:], tuple(items)

    def _check_length(self, num_prompt: int, sampling: SamplingParams) -> int:
        """How many tokens may be generated."""
        room = self._max_model_len - num_prompt
        wanted = sampling.max_tokens or max(1, sampling.min_tokens)
        if wanted > room:
            raise self._too_long(num_prompt, wanted)
        return sampling.max_tokens or room

    def _too_long(self, num_prompt: int, num_completion: int) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
            f"{num_prompt + num_completion} tokens ({num_prompt} in the prompt, {num_completion} for the completion). "
            "Please shorten the prompt or the completion."
        )

    def _draw_seed(self) -> int:
        """The n-th request without a seed gets the same one in every run with this configuration."""
        self._num_drawn += 1
        drawn = hashlib.blake2b(b"%d/%d" % (self._seed, self._num_drawn), digest_size=8).digest()
        return int.from_bytes(drawn, "little") & _SEED_MASK


_SEED_MASK = (1 << 63) - 1


@dataclass(slots=True)
class _Asked:
    """One of `conversation`, `text` and `token_ids`, with the pictures that go into it."""

    images: list[ImageRef]
    conversation: Conversation | None = None
    text: str = ""
    token_ids: list[int] | None = None
    num_chars: int = 0
    add_special_tokens: bool = False
    param: str = "prompt"


def _image_refs(images: Any) -> list[ImageRef]:
    if images is None:
        return []
    if isinstance(images, list | tuple):
        return [ImageRef(image, f"images[{index}]") for index, image in enumerate(images)]
    return [ImageRef(images, "images")]


async def _all_or_none(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error, or when cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("the chat template file cannot be read", param="chat_template") from error
