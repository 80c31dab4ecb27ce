"""Requests of a run: what each asks for, drawn from shapes by a seed, and the body that goes over the wire.

The seed fixes sizes, lengths and which requests share a picture; `content` fixes the pixels and words. So a load can be
repeated at another rate without the server finding in its caches what an earlier run left there, and servers that are
compared get equal bytes. Output lengths are frozen: `ignore_eos` and `max_tokens`, as HydraInfer does (section 5.1).
Does not know when a request is sent or which server takes it beyond its dialect.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.serve.pictures import jpeg
from hydra_engine.planner.workload.shapes import SHAPES, TEXT, Shape

# Short common words: about one token each in most vocabularies.
_TEXT = (
    "the a what is in this picture where are how many red blue green small large thing left right above below near "
    "one two three word text says written on sign book table person street light colour shape side front and or of "
    "please answer tell me about it looks like water tree house car dog cat door hand paper box cup old new open time"
)
_WORDS = tuple(_TEXT.split())

# Fields beyond OpenAI's that fix the length of an answer and make every token visible.
_FROZEN: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
_DIALECTS: dict[str, dict[str, object]] = {
    "hydra": {**_FROZEN, "return_metrics": True},
    "vllm": _FROZEN,
    "openai": {"ignore_eos": True},
}


@dataclass(frozen=True, slots=True)
class Spec:
    """One request. `picture`: (width, height, seed), or None for text alone."""

    kind: str
    picture: tuple[int, int, int] | None
    question: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """`shapes` are drawn with equal chances; `text_share` of the requests have no picture. `scale` shrinks picture
    sides, prompts and outputs for small models; `reuse` lets questions share pictures as in the data sets."""

    shapes: tuple[str, ...] = ("textcaps",)
    text_share: float = 0.0
    scale: float = 1.0
    reuse: bool = True
    seed: int = 0

    def specs(self, count: int, content: int = 0) -> list[Spec]:
        rng = np.random.default_rng([self.seed, 0x5EED])
        words = np.random.default_rng([self.seed, content, 0x30BD])
        pictures = _Pictures(self, content)
        specs = []
        for index in range(count):
            shape = SHAPES[self.shapes[rng.integers(len(self.shapes))]]
            with_text_alone = rng.random() < self.text_share
            if with_text_alone:
                shape = TEXT
            num_words, max_tokens = shape.text.draw(rng, self.scale), shape.output.draw(rng, self.scale)
            picture = None if with_text_alone else pictures.next(shape, rng, index)
            specs.append(Spec(shape.name, picture, sentence(words, num_words), max_tokens))
        # Questions about one picture stand together in a data set; a sample of it has them apart.
        return [specs[index] for index in rng.permutation(count)]


class _Pictures:
    """Hands out pictures, each for as many questions in a row as its data set asks about it."""

    def __init__(self, workload: Workload, content: int) -> None:
        self._workload = workload
        self._content = content
        self._current: dict[str, tuple[int, int, int]] = {}

    def next(self, shape: Shape, rng: np.random.Generator, index: int) -> tuple[int, int, int]:
        shared = rng.random() >= 1 / shape.questions and self._workload.reuse
        size = shape.draw_size(rng, self._workload.scale)
        if not shared or shape.name not in self._current:
            seed = int(np.random.SeedSequence([self._workload.seed, self._content, index]).generate_state(1)[0])
            self._current[shape.name] = (*size, seed)
        return self._current[shape.name]


def sentence(rng: np.random.Generator, num_words: int) -> str:
    return " ".join(_WORDS[i] for i in rng.integers(len(_WORDS), size=num_words))


def body(spec: Spec, model: str, dialect: str) -> bytes:
    """The JSON body of a streaming chat completion, pictures as data URLs, greedy. With `continuous_usage_stats` (ours
    and vLLM) every event says how many tokens there are so far; servers that do not know it ignore it."""
    content: list[dict[str, object]] = []
    if spec.picture is not None:
        content.append({"type": "image_url", "image_url": {"url": _data_url(*spec.picture)}})
    content.append({"type": "text", "text": spec.question})
    options: dict[str, object] = {"include_usage": True}
    if dialect != "openai":
        options["continuous_usage_stats"] = True
    document: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": spec.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": options,
        **_DIALECTS[dialect],
    }
    return json.dumps(document).encode()


def bodies(specs: Sequence[Spec], model: str, dialect: str) -> list[bytes]:
    return [body(spec, model, dialect) for spec in specs]


@lru_cache(maxsize=512)
def _data_url(width: int, height: int, seed: int) -> str:
    """Cached, because questions share pictures and servers that are compared get the same ones."""
    return "data:image/jpeg;base64," + base64.b64encode(jpeg(width, height, seed)).decode()
