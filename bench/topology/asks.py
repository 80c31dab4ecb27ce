"""What users ask for, as lengths: the requests of `bench.serve.workload`, one token a word, as the simulator and the
real engine take them.

Both get the same prompts as token ids: a beginning that all share, the picture if there is one, and words. Ids mean
nothing; they are drawn from a seed, so that no cache helps by chance, and questions share pictures as often as their
data sets do. Answers have a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from bench.serve.pictures import jpeg
from bench.serve.workload import Spec, Workload
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.media import ImageItem, PixelPayload
from hydra_engine.core.request import Request, SamplingParams
from hydra_engine.models.specs.base import ModelSpec

FROZEN = SamplingParams(temperature=0.0, ignore_eos=True)
_BEGINNING = 4  # tokens of a chat template before the picture
_PIXEL_BYTES = 1  # a payload must not be empty; its bytes are not read

Picture = tuple[int, int, int]  # width, height, seed


@dataclass(frozen=True, slots=True)
class Ask:
    """`words` are token ids behind the pictures."""

    kind: str
    pictures: tuple[Picture, ...]
    beginning: tuple[int, ...]
    words: tuple[int, ...]
    max_tokens: int

    def prompt(self, spec: ModelSpec) -> list[int]:
        """As a user of the real engine gives it: one placeholder for each picture."""
        return [*self.beginning, *(_placeholder(spec) for _ in self.pictures), *self.words]

    def images(self) -> list[bytes] | None:
        return [jpeg(*picture) for picture in self.pictures] or None


def asks(workload: Workload, count: int, spec: ModelSpec, content: int = 0) -> list[Ask]:
    """`content` changes pictures and words, not sizes."""
    specs = workload.specs(count, content)
    return [ask_of(one, spec, [workload.seed, content, index]) for index, one in enumerate(specs)]


def ask_of(one: Spec, spec: ModelSpec, seed: Sequence[int]) -> Ask:
    num_words = len(one.question.split())
    pictures = () if spec.vision is None else one.pictures
    beginning = _ids(spec, np.random.default_rng(0), _BEGINNING)
    return Ask(one.kind, pictures, beginning, _ids(spec, np.random.default_rng(seed), num_words), one.max_tokens)


def make_ask(spec: ModelSpec, pictures: Sequence[Picture], num_words: int, max_tokens: int, seed: int = 0) -> Ask:
    rng = np.random.default_rng([seed, 0xA5C])
    beginning = _ids(spec, np.random.default_rng(0), _BEGINNING)
    return Ask("made", tuple(pictures), beginning, _ids(spec, rng, num_words), max_tokens)


def request_of(ask: Ask, spec: ModelSpec, number: int, arrival_s: float) -> tuple[Request, tuple[PixelPayload, ...]]:
    """What intake makes of it, without its pixels."""
    prompt = list(ask.beginning)
    images: list[ImageItem] = []
    for source, picture in enumerate(ask.pictures):
        assert spec.vision is not None and spec.image_token_id is not None
        for place, part in enumerate(spec.vision.plan_image(*picture[:2]).parts):
            if isinstance(part, str):
                prompt.append(ask.beginning[0])
                continue
            name = repr((picture, place)).encode()
            images.append(
                ImageItem(
                    digest=ImageDigest(blake2b(name, digest_size=32).digest()),
                    width=picture[0],
                    height=picture[1],
                    num_patches=part.num_patches,
                    num_tokens=part.num_tokens,
                    start=len(prompt),
                    grid=part.grid,
                    whole=part.whole,
                    source=source,
                )
            )
            prompt += [spec.image_token_id] * part.num_tokens
    request = Request(
        id=RequestId(number),
        prompt_token_ids=(*prompt, *ask.words),
        sampling=FROZEN,
        max_new_tokens=ask.max_tokens,
        seed=number,
        arrival_s=arrival_s,
        images=tuple(images),
        eos_token_ids=spec.eos_token_ids,
        age=number,
    )
    return request, tuple(PixelPayload(image.digest, 1, 1, bytes(_PIXEL_BYTES)) for image in images)


def _placeholder(spec: ModelSpec) -> int:
    assert spec.placeholder_id is not None, "a model with a vision tower has a placeholder"
    return spec.placeholder_id


def _ids(spec: ModelSpec, rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """No placeholder among them."""
    taken = {spec.image_token_id, spec.placeholder_id, spec.video_token_id, *spec.eos_token_ids}
    free = [token for token in range(min(spec.language.vocab_size, 4096)) if token not in taken]
    return tuple(rng.choice(free, count).tolist())
