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

from hydra_planner.workload.file import Picture
from hydra_planner.workload.generators import MIXED_TEXT_SHARE, Load, draw
from hydra_planner.workload.shapes import MIXED, SHAPES
from hydra_terminal.load.pictures import jpeg

# Short common words: about one token each in most vocabularies.
_TEXT = (
    "the a what is in this picture where are how many red blue green small large thing left right above below near "
    "one two three word text says written on sign book table person street light colour shape side front and or of "
    "please answer tell me about it looks like water tree house car dog cat door hand paper box cup old new open time"
)
_WORDS = tuple(_TEXT.split())

TEXT_SHARE_HELP = "share of requests without a picture (default: a quarter, of papers' loads what they say)"

# Fields beyond OpenAI's that fix the length of an answer and make every token visible.
_FROZEN: dict[str, object] = {"ignore_eos": True, "skip_special_tokens": False}
_DIALECTS: dict[str, dict[str, object]] = {
    "hydra": {**_FROZEN, "return_metrics": True},
    "vllm": _FROZEN,
    "openai": {"ignore_eos": True},
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A request. `pictures`: (width, height, seed) of each."""

    kind: str
    pictures: tuple[tuple[int, int, int], ...]
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

    @classmethod
    def named(cls, text: str, text_share: float | None, scale: float, reuse: bool, seed: int) -> Workload:
        """`text`: mixed, or shapes with commas. `text_share` None: a quarter of a mix of HydraInfer's data sets, as
        the others are what their papers say. Raises ValueError."""
        shapes = MIXED if text == "mixed" else tuple(text.split(","))
        if unknown := [shape for shape in shapes if shape not in SHAPES]:
            raise ValueError(f"no workload is called {unknown[0]!r}; there are mixed, {', '.join(SHAPES)}")
        if text_share is None:
            text_share = MIXED_TEXT_SHARE if set(shapes) <= set(MIXED) else 0.0
        if not (0 <= text_share <= 1 and scale > 0):
            raise ValueError("--text-share is between 0 and 1, --scale above 0")
        return cls(shapes, text_share, scale, reuse, seed)

    def specs(self, count: int, content: int = 0) -> list[Spec]:
        load = Load(tuple(SHAPES[name] for name in self.shapes), self.text_share, self.scale, self.reuse)
        words = np.random.default_rng([self.seed, content, 0x30BD])
        said: dict[int | None, str] = {}  # in each conversation
        specs = []
        for row in draw(load, count, self.seed):
            new = sentence(words, row.prompt_tokens - row.shared_tokens)
            said[row.session] = f"{said[row.session]} {new}" if row.shared_tokens else new
            pictures = tuple((item.width, item.height, self._seed_of(item, content)) for item in row.pictures)
            specs.append(Spec(row.kind, pictures, said[row.session], row.output_tokens))
        return specs

    def _seed_of(self, picture: Picture, content: int) -> int:
        return int(np.random.SeedSequence([self.seed, content, picture.number]).generate_state(1)[0])


def sentence(rng: np.random.Generator, num_words: int) -> str:
    return " ".join(_WORDS[i] for i in rng.integers(len(_WORDS), size=num_words))


def body(spec: Spec, model: str, dialect: str) -> bytes:
    """The JSON body of a streaming chat completion, pictures as data URLs, greedy. With `continuous_usage_stats` (ours
    and vLLM) every event says how many tokens there are so far; servers that do not know it ignore it."""
    content: list[dict[str, object]] = []
    for picture in spec.pictures:
        content.append({"type": "image_url", "image_url": {"url": _data_url(*picture)}})
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
