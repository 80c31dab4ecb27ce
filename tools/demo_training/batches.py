"""Training batches: many questions about one picture in one row, without seeing each other.

A row is a prefix (system prompt and picture) and then conversations that all continue it: each one
attends to the prefix and to itself only, and its positions go on where the prefix ended. That is
exactly what the model sees at inference, but the picture is encoded once for all of them.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from tools.demo_training.scenes import (
    CELLS,
    COLOURS,
    KINDS,
    NUMBERS,
    PICTURE_ASKERS,
    QUESTION_KINDS,
    TEXT_ASKERS,
    Scene,
    ask,
    draw,
    invent_for,
)
from tools.demo_training.tokenizer import (
    ASSISTANT,
    BOS,
    END,
    IMAGE,
    IMAGE_SIZE,
    IMAGE_TOKENS,
    SYSTEM,
    SYSTEM_PROMPTS,
    USER,
    casual,
)

ROW_TOKENS = 80  # a row takes conversations until it is this long
TEXT_ROWS = 0.1  # share of the rows without a picture
CASUAL = 0.1  # share of the questions typed without capitals and punctuation
FOLLOW_UP = 0.12  # chance that a conversation goes on for another turn
SYSTEM_SHARE = 0.1  # share of the rows that begin with a system prompt
# Pictures are drawn at these sizes and then shrunk as the processor will do it.
DRAWN_SIZES, DRAWN_SHARES = (84, 168, 252, 336), (6, 2, 1, 1)
# What a question can name, and what can answer it.
NAMES = (*COLOURS, *KINDS, *(f"{kind}s" for kind in KINDS), *CELLS)
FINDINGS = (*NAMES, *NUMBERS, "nothing", "no", "yes")
# Most answer tokens are mere form; a wrong finding is a wrong answer.
FINDING_WEIGHT = 10.0
HINT_WEIGHT = 10.0


class Mixture:
    """Draws kinds of questions in proportion to their error rates."""

    FLOOR = 0.05
    MEMORY = 0.98

    def __init__(self) -> None:
        self.errors = dict.fromkeys(QUESTION_KINDS, 1.0)

    def pick(self, rng: random.Random, kinds: Iterable[str]) -> str:
        choices = list(kinds)
        return rng.choices(choices, [self.FLOOR + self.errors[kind] for kind in choices])[0]

    def update(self, kinds: list[str], right: list[bool]) -> None:
        """Take in which answers of a batch were right as a whole."""
        for kind in set(kinds):
            results = [r for k, r in zip(kinds, right, strict=True) if k == kind]
            error = 1 - sum(results) / len(results)
            self.errors[kind] += (1 - self.MEMORY) * (error - self.errors[kind])


@dataclass
class Batch:
    """Tensors of a batch. `rows` to `weights` have one entry for each prediction to be made."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    pixel_values: torch.Tensor | None
    rows: torch.Tensor
    columns: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    answers: torch.Tensor  # which answer the token belongs to; the hints, at the end, have none
    kinds: list[str]  # the question kind of each answer


@dataclass
class Row:
    """A row under construction."""

    tokens: list[int]
    segments: list[int] = field(init=False)  # 0 is the prefix, which all other segments see
    positions: list[int] = field(init=False)
    targets: list[tuple[int, int, int]] = field(default_factory=list)  # (column, label, answer)
    hints: list[tuple[int, int]] = field(default_factory=list)  # (column, label)
    kinds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefix = len(self.tokens)
        self.segments = [0] * self.prefix
        self.positions = list(range(self.prefix))

    def extend(self, tokens: list[int], segment: int, answer: int | None = None) -> None:
        """Append tokens; those of an answer are predicted, each from the token before it."""
        for token in tokens:
            if answer is not None:
                self.targets.append((len(self.tokens) - 1, token, answer))
            starts = self.segments[-1] != segment
            self.positions.append(self.prefix if starts else self.positions[-1] + 1)
            self.segments.append(segment)
            self.tokens.append(token)

    def hint(self, hint: tuple[int, int] | None) -> None:
        """Note what to predict at a place of the tokens that are appended next."""
        if hint is not None:
            place, label = hint
            self.hints.append((len(self.tokens) + place, label))


def to_pixels(images: list[Image.Image]) -> torch.Tensor:
    """Resizes and normalises square pictures as the processor does, [N, 3, size, size]."""
    small = [
        im if im.width == IMAGE_SIZE else im.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC) for im in images
    ]
    values = np.stack([np.asarray(im, dtype=np.float32) for im in small]) / 255.0
    mean, deviation = np.array([OPENAI_CLIP_MEAN, OPENAI_CLIP_STD], dtype=np.float32)
    values = (values - mean) / deviation
    return torch.from_numpy(values.transpose(0, 3, 1, 2).copy())


def draw_training_picture(rng: random.Random, scene: Scene) -> Image.Image:
    return draw(scene, rng.choices(DRAWN_SIZES, DRAWN_SHARES)[0])


class Packer:
    """Makes batches of freshly invented training scenes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, mixture: Mixture) -> None:
        self.encode = lru_cache(maxsize=65_536)(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
        self.mixture = mixture
        self.pad = tokenizer.pad_token_id
        self.names = {self.encode(f" {word}")[0] for word in NAMES}
        words = [form for word in FINDINGS for form in (f" {word}", word.capitalize())]
        words += [form for digit in range(10) for form in (f"{digit}", f" {digit}")]
        self.findings = {ids[0] for word in words if len(ids := self.encode(word)) == 1}
        self.weights = torch.ones(len(tokenizer))
        self.weights[list(self.findings)] = FINDING_WEIGHT

    def batch(self, rng: random.Random, rows: int) -> Batch:
        """A batch of this many rows."""
        made, pictures = [], []
        for _ in range(rows):
            scene = None if rng.random() < TEXT_ROWS else invent_for(rng, held_out=False)
            if scene is not None:
                pictures.append(draw_training_picture(rng, scene))
            made.append(self._row(rng, scene))
        return self._collate(made, pictures)

    def _row(self, rng: random.Random, scene: Scene | None) -> Row:
        system = f"{SYSTEM}{rng.choice(SYSTEM_PROMPTS)}{END}" if rng.random() < SYSTEM_SHARE else ""
        picture = f"{IMAGE * IMAGE_TOKENS}\n" if scene is not None else ""
        row = Row(list(self.encode(f"{BOS}{system}{USER}{picture}")))
        segment = 0
        while len(row.tokens) < ROW_TOKENS:
            segment += 1
            self._turn(rng, row, segment, scene)
            while rng.random() < FOLLOW_UP:
                row.extend(self.encode(USER), segment)
                self._turn(rng, row, segment, scene)
        return row

    def _turn(self, rng: random.Random, row: Row, segment: int, scene: Scene | None) -> None:
        asked = None
        while asked is None:
            kind = self.mixture.pick(rng, TEXT_ASKERS if scene is None else PICTURE_ASKERS)
            asked = ask(kind, rng, scene)
        question, answer = asked
        if rng.random() < CASUAL:
            question = casual(question)
        asking, answering = self.encode(f"{question}{END}{ASSISTANT}"), self.encode(f"{answer}{END}")
        row.hint(self._hint(asking, answering))
        row.extend(asking, segment)
        row.extend(answering, segment, answer=len(row.kinds))
        row.kinds.append(kind)

    def _hint(self, asking: list[int], answering: list[int]) -> tuple[int, int] | None:
        """The place in a question of the last thing it names, and the finding to be made there.

        Looking something up is learnt much sooner if the word that is looked up must find the
        answer itself than if the answer must first gather that word from the question.
        """
        named = [place for place, token in enumerate(asking) if token in self.names]
        tokens = [token for token in answering if token in self.findings and token not in asking]
        return (named[-1], tokens[0]) if named and tokens else None

    def _collate(self, rows: list[Row], pictures: list[Image.Image]) -> Batch:
        length = max(len(row.tokens) for row in rows)

        def padded(lists: list[list[int]], value: int) -> torch.Tensor:
            return torch.tensor([items + [value] * (length - len(items)) for items in lists])

        segments = padded([row.segments for row in rows], -1)
        keys = segments[:, None, :]
        mask = torch.ones(length, length, dtype=torch.bool).tril() & ((keys == 0) | (keys == segments[:, :, None]))
        targets, hints = [], []
        kinds: list[str] = []
        for number, row in enumerate(rows):
            targets += [(number, column, label, len(kinds) + answer) for column, label, answer in row.targets]
            hints += [(number, column, label) for column, label in row.hints]
            kinds += row.kinds
        row_numbers, columns, labels, answers = torch.tensor(targets).unbind(1)
        hint_rows, hint_columns, hint_labels = torch.tensor(hints).reshape(-1, 3).unbind(1)
        return Batch(
            input_ids=padded([row.tokens for row in rows], self.pad),
            position_ids=padded([row.positions for row in rows], 0),
            attention_mask=mask[:, None],
            pixel_values=to_pixels(pictures) if pictures else None,
            rows=torch.cat([row_numbers, hint_rows]),
            columns=torch.cat([columns, hint_columns]),
            labels=torch.cat([labels, hint_labels]),
            weights=torch.cat([self.weights[labels], torch.full((len(hints),), HINT_WEIGHT)]),
            answers=answers,
            kinds=kinds,
        )
