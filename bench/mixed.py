"""A fixed mixture of requests, and what each of them yields when it runs alone: the yardstick of equality.

Text, one and many pictures, pictures that several requests share, long and short prompts, seeded draws, penalties, stop
strings, log probabilities, and requests that their owner gives up. Works with every model; what the words say does not
matter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from PIL import Image

from hydra_engine import Engine, SamplingParams
from hydra_engine.core.outputs import Result
from hydra_engine.errors import RequestAborted
from hydra_engine.frontend.handle import Handle

WORDS = [
    "red",
    "blue",
    "green",
    "small",
    "large",
    "square",
    "circle",
    "left",
    "right",
    "above",
    "below",
    "between",
    "seven",
    "three",
    "old",
    "new",
]
GIVES_UP_AFTER = 3  # tokens, of requests that are aborted


@dataclass(frozen=True)
class Mixed:
    prompt: str
    pictures: tuple[int, ...]  # seeds; equal seeds are equal pictures
    sampling: SamplingParams
    gives_up: bool = False

    def images(self, side: int) -> list[Image.Image] | None:
        return [picture(seed, side) for seed in self.pictures] or None


@dataclass(frozen=True)
class Outcome:
    """Fields that are compared. Of an aborted request only the first tokens count."""

    token_ids: tuple[int, ...]
    text: str = ""
    reason: str = "abort"
    logprobs: tuple[float, ...] = ()


def picture(seed: int, side: int = 64) -> Image.Image:
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))


def mixture(count: int = 64, tokens: int = 16, seed: int = 1) -> list[Mixed]:
    rng = random.Random(seed)
    return [_request(index, tokens, rng) for index in range(count)]


def _request(index: int, tokens: int, rng: random.Random) -> Mixed:
    words = rng.choices(WORDS, k=rng.choice((2, 9, 9, 40)))
    if index % 5 == 4:  # a beginning that others have too
        words = [*WORDS, *WORDS, *words]
    pictures: tuple[int, ...] = ()
    match index % 4:
        case 1:
            pictures = (index,)
        case 2:
            pictures = tuple(1000 + index + i for i in range(rng.choice((2, 3))))
        case 3 if index % 8 == 3:
            pictures = (7, 8)[: 1 + index % 2]  # seen before by others
    options: dict[str, Any] = {"max_tokens": tokens if index % 7 else 1, "ignore_eos": True, "temperature": 0.0}
    if index % 3 == 1:
        options |= {"temperature": 1.0, "top_p": 0.9, "seed": index}
    if index % 6 == 5:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    if index % 9 == 2:
        options |= {"logprobs": 2}
    if index % 10 == 6:
        options |= {"stop": ("e", "a"), "ignore_eos": False}
    return Mixed(" ".join(words), pictures, SamplingParams(**options), gives_up=index % 16 == 13)


def alone(engine: Engine, requests: list[Mixed], side: int = 64) -> list[Outcome]:
    """Outcomes of requests that run one after another, to their ends."""
    return [_outcome(submit(engine, request, side).result(120)) for request in requests]


def together(engine: Engine, requests: list[Mixed], side: int = 64) -> list[Outcome]:
    handles = [submit(engine, request, side) for request in requests]
    return [_follow(handle, request) for handle, request in zip(handles, requests, strict=True)]


def submit(engine: Engine, request: Mixed, side: int = 64) -> Handle:
    return engine.submit(request.prompt, request.images(side), sampling=request.sampling)


def _follow(handle: Handle, request: Mixed) -> Outcome:
    if not request.gives_up:
        return _outcome(handle.result(120))
    token_ids: list[int] = []
    try:
        for piece in handle:
            token_ids += piece.token_ids
            if len(token_ids) >= GIVES_UP_AFTER:
                handle.cancel()
    except RequestAborted:
        pass
    return Outcome(tuple(token_ids))


def _outcome(result: Result) -> Outcome:
    logprobs = tuple(round(entry.logprob, 4) for entry in result.logprobs or ())
    return Outcome(result.token_ids, result.text, result.finish_reason.value, logprobs)


def agrees(request: Mixed, found: Outcome, expected: Outcome) -> bool:
    if request.gives_up:
        return found.token_ids == expected.token_ids[: len(found.token_ids)] and bool(found.token_ids)
    return found == expected
