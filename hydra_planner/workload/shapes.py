"""Distributions of requests: picture sizes and numbers, prompt lengths, output lengths.

HydraInfer evaluates on TextCaps, POPE, MME, TextVQA and VizWiz (section 5.1) but prints the workload as a picture
without figures (Figure 9), so these are recipes of our own: picture sizes are those of the pictures' sources (COCO for
POPE and much of MME, Open Images for TextCaps and TextVQA, 4:3 phone cameras for VizWiz), questions per picture those
of the data sets, outputs frozen at 2 to 128 tokens as the answers' kind suggests.

EPD's loads are synthetic and given in full (sections 4 and 5): 22 tokens of text, 10 of output, several pictures of one
size. EPD-Serve gives averages of its two samples (section 4.1): 802x652 pixels and 9.6 tokens for ShareGPT-4o, 1280x720
and 63.1 for VisualWebInstruct, half of which has no picture; outputs have 64 tokens. HeteroServe (section 6.1) has
pictures of COCO described, with at most 128 tokens. Does not know how a request is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal number of tokens, rounded and held between `least` and `most`."""

    median: float
    spread: float  # standard deviation of the logarithm
    least: int
    most: int

    def draw(self, rng: np.random.Generator, scale: float = 1.0) -> int:
        """`scale` shortens all of them alike, never below `least`."""
        length = self.median * scale * np.exp(self.spread * rng.standard_normal())
        return int(np.clip(round(length), self.least, max(self.most * scale, self.least)))


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request. `sizes`: (width, height, weight) of pictures. `questions`: mean number of consecutive requests
    of the data set that share a picture. `pictures`: pictures of each request; a share of `text_share` has none.
    `turns`: mean turns of a conversation; each repeats what was said before, pictures included."""

    name: str
    sizes: tuple[tuple[int, int, float], ...]
    text: Lengths
    output: Lengths
    questions: float = 1.0
    pictures: int = 1
    text_share: float = 0.0
    turns: float = 1.0

    def draw_size(self, rng: np.random.Generator, scale: float = 1.0) -> tuple[int, int]:
        weights = np.array([weight for _, _, weight in self.sizes])
        width, height, _ = self.sizes[rng.choice(len(self.sizes), p=weights / weights.sum())]
        return max(round(width * scale), 16), max(round(height * scale), 16)


_COCO = ((640, 480, 0.6), (480, 640, 0.25), (640, 427, 0.15))
_OPEN_IMAGES = ((1024, 768, 0.6), (768, 1024, 0.25), (1024, 683, 0.15))
_PHONE = ((1440, 1920, 0.5), (1080, 1440, 0.3), (1920, 1440, 0.2))
_NONE = ((0, 0, 1.0),)


def _exactly(tokens: int) -> Lengths:
    return Lengths(tokens, 0.0, tokens, tokens)


def _epd(name: str, pictures: int, width: int, height: int) -> Shape:
    return Shape(name, ((width, height, 1.0),), _exactly(22), _exactly(10), pictures=pictures)


# One picture is the offline load of section 5.4, 2 to 8 are Figure 4, 10 with three sizes is Table 3.
_EPD = (
    *(_epd(f"epd-{pictures}", pictures, 4032, 3024) for pictures in (1, 2, 4, 6, 8, 10)),
    *(_epd(f"epd-10-{width}x{height}", 10, width, height) for width, height in ((313, 234), (787, 444))),
)

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("textcaps", _OPEN_IMAGES, Lengths(16, 0.3, 8, 32), Lengths(128, 0.3, 4, 256)),
        Shape("pope", _COCO, Lengths(16, 0.2, 8, 32), Lengths(8, 0.2, 2, 16), questions=6),
        Shape("mme", (*_COCO, (1024, 768, 0.4)), Lengths(32, 0.4, 8, 64), Lengths(2, 0.0, 2, 2), questions=2),
        Shape("textvqa", _OPEN_IMAGES, Lengths(24, 0.3, 8, 64), Lengths(16, 0.5, 2, 48), questions=1.6),
        Shape("vizwiz", _PHONE, Lengths(32, 0.5, 8, 64), Lengths(64, 0.5, 4, 192)),
        *_EPD,
        Shape("sharegpt-4o", ((802, 652, 1.0),), Lengths(9.2, 0.3, 4, 24), _exactly(64)),
        Shape("visualwebinstruct", ((1280, 720, 1.0),), Lengths(56, 0.5, 8, 256), _exactly(64), text_share=0.5),
        Shape("coco-describe", _COCO, _exactly(7), _exactly(128)),
        # Not a paper's: conversations without and with a picture, for caches of prefixes.
        Shape("chat", _NONE, Lengths(64, 0.6, 8, 512), Lengths(128, 0.5, 16, 512), pictures=0, turns=4),
        Shape("picture-chat", _OPEN_IMAGES, Lengths(24, 0.4, 8, 96), Lengths(64, 0.5, 8, 256), turns=3),
    )
}
# HydraInfer's five data sets: what a mixed load is made of.
MIXED = ("textcaps", "pope", "mme", "textvqa", "vizwiz")
# Requests without a picture, mixed in by --text-share.
TEXT = Shape("text", _NONE, Lengths(48, 0.5, 8, 256), Lengths(96, 0.5, 8, 256), pictures=0)

# HydraInfer, Table 3: seconds to the first token and between tokens, for a 7B model on one H800 per instance.
TABLE_3 = {
    "llava-1.5-7b": {
        "vizwiz": (8.0, 0.04),
        "textvqa": (0.25, 0.04),
        "mme": (0.25, 0.06),
        "pope": (0.25, 0.04),
        "textcaps": (0.25, 0.04),
    },
    "llava-next-7b": {
        "vizwiz": (8.0, 0.12),
        "textvqa": (8.0, 0.12),
        "mme": (8.0, 0.14),
        "pope": (8.0, 0.06),
        "textcaps": (8.0, 0.08),
    },
    "qwen2-vl-7b": {
        "vizwiz": (8.0, 0.14),
        "textvqa": (1.0, 0.12),
        "mme": (1.0, 0.14),
        "pope": (1.0, 0.04),
        "textcaps": (1.0, 0.14),
    },
}
