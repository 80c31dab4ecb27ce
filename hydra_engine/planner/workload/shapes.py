"""What the requests of five data sets look like, as distributions: picture sizes, prompt lengths, output lengths.

HydraInfer evaluates on TextCaps, POPE, MME, TextVQA and VizWiz (section 5.1) but prints the workload as a picture
without figures (Figure 9), so these are recipes of our own: picture sizes are those of the pictures' sources (COCO for
POPE and much of MME, Open Images for TextCaps and TextVQA, 4:3 phone cameras for VizWiz), questions per picture those
of the data sets, outputs frozen at 2 to 128 tokens as the answers' kind suggests. Does not know how a request is made.
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
    """One kind of request. `sizes`: (width, height, weight). `questions`: how many in a row of the data set share a
    picture, on average."""

    name: str
    sizes: tuple[tuple[int, int, float], ...]
    text: Lengths
    output: Lengths
    questions: float = 1.0

    def draw_size(self, rng: np.random.Generator, scale: float = 1.0) -> tuple[int, int]:
        weights = np.array([weight for _, _, weight in self.sizes])
        width, height, _ = self.sizes[rng.choice(len(self.sizes), p=weights / weights.sum())]
        return max(round(width * scale), 16), max(round(height * scale), 16)


_COCO = ((640, 480, 0.6), (480, 640, 0.25), (640, 427, 0.15))
_OPEN_IMAGES = ((1024, 768, 0.6), (768, 1024, 0.25), (1024, 683, 0.15))
_PHONE = ((1440, 1920, 0.5), (1080, 1440, 0.3), (1920, 1440, 0.2))

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("textcaps", _OPEN_IMAGES, Lengths(16, 0.3, 8, 32), Lengths(128, 0.3, 4, 256)),
        Shape("pope", _COCO, Lengths(16, 0.2, 8, 32), Lengths(8, 0.2, 2, 16), questions=6),
        Shape("mme", (*_COCO, (1024, 768, 0.4)), Lengths(32, 0.4, 8, 64), Lengths(2, 0.0, 2, 2), questions=2),
        Shape("textvqa", _OPEN_IMAGES, Lengths(24, 0.3, 8, 64), Lengths(16, 0.5, 2, 48), questions=1.6),
        Shape("vizwiz", _PHONE, Lengths(32, 0.5, 8, 64), Lengths(64, 0.5, 4, 192)),
    )
}
# Requests without a picture, mixed in by --text-share.
TEXT = Shape("text", ((0, 0, 1.0),), Lengths(48, 0.5, 8, 256), Lengths(96, 0.5, 8, 256))

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
