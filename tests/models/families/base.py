"""The frame of every family's parity tests: what a family must tell, transformers' side, and both sides as a pair.

A prompt is made with our spec, our views and our positions; transformers gets the same token ids and the pixels of its
own processor. So geometry, pixels, positions, features and logits are all compared.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.core.request import RopeSpan
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, VideoInfo
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.preprocess.media.images import render
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.models.driver import Driver, Request, Span
from tools.miniatures import make_tiny
from tools.miniatures.base import BOS_ID

Size = tuple[int, int]  # width, height


@dataclass(frozen=True, slots=True)
class Clip:
    """A video: its frames as pictures, at `fps` frames a second."""

    frames: tuple[Image.Image, ...]
    fps: float


Media = Image.Image | Clip
Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FamilyCase:
    """`inputs(model_dir, media)` is what transformers' own processing gives the model besides token ids, for these
    pictures and videos in order; `features(model, inputs)` lists per picture or video the planes of its features, each
    [tokens, C] in prompt order. `sizes` are ordinary pictures of this miniature with different token counts, `extreme`
    very long or very small ones. `around` is what the family's chat template writes before and behind each of them.
    `reference`: the subfolder of a checkpoint with the same model as transformers reads it.
    """

    family: str  # of make_tiny
    variants: Mapping[str, Mapping[str, Any]]  # overrides for make_tiny; the first one is "plain"
    sizes: Sequence[Size]
    extreme: Sequence[Size]
    inputs: Callable[[Path, Sequence[Media]], Inputs]
    features: Callable[[Any, Inputs], list[tuple[Tensor, ...]]]
    clips: Sequence[tuple[Size, int, float]] = ()  # videos: size, frames, frames a second
    around: tuple[str, str] = ("", "")
    quick: bool = True  # its first variant is among the quick tests, else in that of logits alone
    reference: str = ""
    reference_from: str = "5.17"  # of transformers: the first release whose module is known to run
    load: Callable[[Path, torch.dtype], Any] | None = None  # a reference that is not a class of transformers


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as they are computed, with what stands where."""

    token_ids: list[int]
    media: list[Media]
    spans: list[tuple[int, ItemPlan]]
    ropes: tuple[RopeSpan, ...] = ()
    rope_delta: int = 0
    token_types: list[int] = field(default_factory=list)  # 0 text, 1 picture, 2 video

    def followed_by(self, token_ids: Sequence[int]) -> Prompt:
        """The same with text behind it."""
        types = [*self.token_types, *(0 for _ in token_ids)]
        return replace(self, token_ids=[*self.token_ids, *token_ids], token_types=types)

    def key(self) -> Hashable:
        """Equal for prompts with equal tokens, pictures and videos."""
        frames = [(one,) if isinstance(one, Image.Image) else (*one.frames, one.fps) for one in self.media]
        pixels = tuple(
            (picture.size, picture.tobytes()) if isinstance(picture, Image.Image) else picture
            for pictures in frames
            for picture in pictures
        )
        return tuple(self.token_ids), pixels

    def rope(self) -> Tensor:
        """[3, T], straight from the definition of `RopeSpan`."""
        places = torch.arange(len(self.token_ids)).expand(3, -1).clone()
        for (start, item), rope in zip(self.spans, self.ropes, strict=True):
            end = start + item.num_tokens
            for offset in range(item.num_tokens):
                row, column = divmod(offset, rope.columns)
                places[:, start + offset] = torch.tensor([rope.time, rope.row + row, rope.column + column])
            places[:, end:] = torch.arange(end, len(self.token_ids)) + rope.text_delta
        return places


class Reference:
    """transformers, in float32 unless said otherwise. What it has computed for a prompt it knows from then on,
    because several backends are compared with it."""

    _known: ClassVar[dict[tuple[Path, torch.dtype], Reference]] = {}

    def __init__(self, case: FamilyCase, model_dir: Path, dtype: torch.dtype) -> None:
        self.case, self.model_dir = case, model_dir / case.reference
        self._logits: dict[Hashable, Tensor] = {}
        self._generated: dict[Hashable, list[int]] = {}
        if case.load is not None:
            self.model = case.load(model_dir, dtype)
            return
        auto = transformers.AutoModelForImageTextToText
        self.model = auto.from_pretrained(self.model_dir, dtype=dtype, attn_implementation="sdpa").eval()

    @classmethod
    def of(cls, case: FamilyCase, model_dir: Path, dtype: torch.dtype = torch.float32) -> Reference:
        key = model_dir, dtype
        if key not in cls._known:
            cls._known[key] = cls(case, *key)
        return cls._known[key]

    @torch.inference_mode()
    def features(self, media: Sequence[Media]) -> list[tuple[Tensor, ...]]:
        return self.case.features(self.model, self.case.inputs(self.model_dir, media))

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> Tensor:
        """[T, V] float32"""
        key = prompt.key()
        if key not in self._logits:
            self._logits[key] = self.model(**self._inputs(prompt)).logits[0].float()
        return self._logits[key]

    @torch.inference_mode()
    def logits_of(self, token_ids: Sequence[int], prompt: Prompt) -> Tensor:
        """[N, V] float32: what was said where each of these stands behind the prompt. They are text, also those that
        would be placeholders in a prompt: BOS stands in for all of them and gets their embeddings."""
        embed = self.model.get_input_embeddings()
        behind = token_ids[:-1]
        rows = embed(torch.tensor([behind]))

        def replace_rows(_module: Any, _args: Any, output: Tensor) -> Tensor:
            return torch.cat([output[:, : -len(behind)], rows], dim=1)

        handle = embed.register_forward_hook(replace_rows)
        try:
            outputs = self.model(**self._inputs(prompt.followed_by([BOS_ID] * len(behind))))
        finally:
            handle.remove()
        return outputs.logits[0, len(prompt.token_ids) - 1 :].float()

    @torch.inference_mode()
    def embeddings(self, prompt: Prompt) -> Tensor:
        """[T, C]: what goes into the first layer."""
        seen: list[Tensor] = []

        def keep(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            seen.append(kwargs["inputs_embeds"])

        handle = self.model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            self.model(**self._inputs(prompt))
        finally:
            handle.remove()
        return seen[0][0]

    @torch.inference_mode()
    def generate(self, prompt: Prompt, num_tokens: int) -> list[int]:
        key = prompt.key(), num_tokens
        if key in self._generated:
            return self._generated[key]
        settings = {"max_new_tokens": num_tokens, "min_new_tokens": 0, "eos_token_id": None, "do_sample": False}
        ids = self.model.generate(**self._inputs(prompt), **settings)
        self._generated[key] = ids[0, len(prompt.token_ids) :].tolist()
        return self._generated[key]

    @torch.inference_mode()
    def rope(self, prompt: Prompt) -> tuple[Tensor, int]:
        """[3, T] and what is added behind the prompt; for models with multimodal rotary positions."""
        inputs = self._inputs(prompt)
        wanted = ("input_ids", "mm_token_type_ids", "attention_mask", "image_grid_thw", "video_grid_thw")
        known = {name: inputs[name] for name in (*wanted, "second_per_grid_ts") if name in inputs}
        positions, delta = self.model.model.get_rope_index(**known)
        return positions[:, 0], int(delta)

    def _inputs(self, prompt: Prompt) -> Inputs:
        ids = torch.tensor([prompt.token_ids])
        inputs: Inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.media:
            inputs |= {
                name: value.to(self.model.dtype) if value.is_floating_point() else value
                for name, value in self.case.inputs(self.model_dir, prompt.media).items()
            }
        if self.model.config.model_type.startswith("qwen"):
            inputs["mm_token_type_ids"] = torch.tensor([prompt.token_types])
        return inputs


class Pair:
    """The same checkpoint in both implementations, with prompts for it."""

    def __init__(self, case: FamilyCase, variant: str, model_dir: Path, backend: Backend, **driver: Any) -> None:
        self.case, self.model_dir = case, model_dir
        self.reference = Reference.of(case, model_dir)
        self.driver = Driver(model_dir, backend, **driver)
        self.tokenizer = load_tokenizer(model_dir)
        assert self.driver.spec.vision is not None
        self.spec, self.vision = self.driver.spec, self.driver.spec.vision

    def plan(self, media: Media) -> tuple[MediaPlan, list[Image.Image], Size]:
        if isinstance(media, Image.Image):
            return self.vision.plan_image(*media.size), [media], media.size
        size = media.frames[0].size
        video = self.vision.plan_video(VideoInfo(*size, len(media.frames), media.fps))
        return video.media, [media.frames[index] for index in video.frames], size

    def spans(self, media: Sequence[Media]) -> list[Span]:
        found = []
        for one in media:
            plan, sources, size = self.plan(one)
            data = np.frombuffer(render(sources, plan.views, self.vision.preprocess.resample), np.uint8)
            for item in plan.items:
                shape = (item.num_pictures, item.height, item.width, 3)
                pixels, data = data[: int(np.prod(shape))], data[int(np.prod(shape)) :]
                found.append(Span(torch.tensor(pixels).view(shape), size, item.grid, item.num_tokens))
            assert data.size == 0
        return found

    def prompt(self, *parts: Sequence[int] | Media) -> Prompt:
        """Text as token ids, pictures and videos, in order."""
        ids: list[int] = []
        types: list[int] = []
        spans: list[tuple[int, ItemPlan]] = []
        seen: Counter[type] = Counter()
        before, behind = (self.tokenizer.encode(text, add_special_tokens=False) for text in self.case.around)
        for part in parts:
            if not isinstance(part, Image.Image | Clip):
                ids += part
                continue
            is_image = isinstance(part, Image.Image)
            token = self.spec.image_token_id if is_image else self.spec.video_token_id
            assert token is not None
            plan = self.plan(part)[0]
            ids += before
            for piece in plan.numbered_parts(seen[type(part)]):
                types += [0] * (len(ids) - len(types))
                if isinstance(piece, str):
                    ids += self.tokenizer.encode(piece, add_special_tokens=False)
                else:
                    spans.append((len(ids), piece))
                    ids += [token] * piece.num_tokens
                    types += [1 if is_image else 2] * piece.num_tokens
            seen[type(part)] += 1
            ids += behind
        types += [0] * (len(ids) - len(types))
        media = [part for part in parts if isinstance(part, Image.Image | Clip)]
        ropes: tuple[RopeSpan, ...] = ()
        delta = 0
        if self.spec.language.rope_sections is not None:
            ropes, delta = place_spans(spans)
        return Prompt(ids, media, spans, ropes, delta, types)

    def prompt_of_ids(self, token_ids: Sequence[int], media: Sequence[Media]) -> Prompt:
        """A prompt from a rendered conversation with one placeholder for each of `media`."""
        parts: list[Sequence[int] | Media] = []
        left = list(token_ids)
        for one in media:
            token = self.spec.image_token_id if isinstance(one, Image.Image) else self.spec.video_token_id
            assert token is not None
            at = left.index(token)
            before, behind = (self.tokenizer.encode(t, add_special_tokens=False) for t in self.case.around)
            text, left = left[:at], left[at + 1 :]
            if before and text[-len(before) :] == before and left[: len(behind)] == behind:
                text, left = text[: -len(before)], left[len(behind) :]
            parts += [text, one]
        return self.prompt(*parts, left)

    def request(self, prompt: Prompt) -> Request:
        slots = self.driver.encode(self.spans(prompt.media)) if prompt.media else []
        starts = [start for start, _ in prompt.spans]
        rope = prompt.rope() if prompt.ropes else None
        return self.driver.request(
            prompt.token_ids, list(zip(starts, slots, strict=True)), rope=rope, rope_delta=prompt.rope_delta
        )


class Checkpoints:
    """Directories of miniatures, made once per run."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, case: FamilyCase, variant: str) -> Path:
        directory = self._root / f"{case.family}-{variant}"
        if not directory.exists():
            make_tiny(case.family, directory, seed=sum(variant.encode()) + 1, **case.variants[variant])
        return directory


def picture(size: Size, seed: int = 0) -> Image.Image:
    """Smooth colours with noise, so that resizing and normalising matter."""
    rng = np.random.default_rng(seed + size[0] * 1000 + size[1])
    width, height = size
    waves = np.sin(np.linspace(0, 6, width)[None, :, None] * rng.uniform(1, 3, 3) + rng.uniform(0, 6, 3))
    waves = waves * np.cos(np.linspace(0, 5, height)[:, None, None] * rng.uniform(1, 3, 3))
    pixels = 127 + 90 * waves + rng.uniform(-30, 30, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def clip(size: Size, num_frames: int, fps: float) -> Clip:
    return Clip(tuple(picture(size, seed=7 + index) for index in range(num_frames)), fps)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 200) for _ in range(count)]


def conversations(case: FamilyCase, pair: Pair) -> dict[str, Prompt]:
    """The kinds of prompt that every family must answer like transformers."""
    sizes = list(case.sizes)
    one, cycle = picture(sizes[0]), itertools.cycle(sizes)
    many = [picture(next(cycle), seed) for seed in range(3)]
    found = {
        "text only": pair.prompt([BOS_ID, *words(1, 17)]),
        "one image": pair.prompt([BOS_ID, *words(2, 5)], one, words(3, 6)),
        "image first": pair.prompt(one, words(4, 7)),
        "many images": pair.prompt([BOS_ID], many[0], many[1], words(5, 3), many[2], words(6, 4)),
        "same size twice": pair.prompt([BOS_ID], one, words(7, 2), one, words(8, 3)),
        "two turns": pair.prompt([BOS_ID, *words(9, 4)], many[1], words(10, 30), many[2], words(11, 5)),
    }
    for size in case.extreme:
        found[f"extreme {size[0]}x{size[1]}"] = pair.prompt([BOS_ID, *words(12, 3)], picture(size), words(13, 3))
    for size, num_frames, fps in case.clips:
        video = clip(size, num_frames, fps)
        name = f"video {size[0]}x{size[1]} of {num_frames} at {fps:g}"
        found[name] = pair.prompt([BOS_ID, *words(14, 3)], video, words(15, 4))
        found[f"{name} and a picture"] = pair.prompt([BOS_ID, *words(16, 3)], one, words(17, 2), video, words(18, 4))
    return found
