"""Loads by name: requests drawn from shapes by a seed, with the times at which they come.

The seed fixes sizes, lengths, which requests share a picture and which continue a conversation; the rate only stretches
the times. Does not know contents, servers or models.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hydra_engine.errors import ConfigError
from hydra_planner.workload.arrivals import Arrivals
from hydra_planner.workload.file import MAX_REQUESTS, Picture, WorkloadRequest, read_workload
from hydra_planner.workload.shapes import MIXED, SHAPES, TEXT, Shape

MIXED_TEXT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """`shapes` are drawn with equal chances; `text_share` of the requests have no picture. `scale` shrinks picture
    sides, prompts and outputs for small models; `reuse` lets questions share pictures as in the data sets."""

    shapes: tuple[Shape, ...]
    text_share: float = 0.0
    scale: float = 1.0
    reuse: bool = True


LOADS = {
    "mixed": Load(tuple(SHAPES[name] for name in MIXED), MIXED_TEXT_SHARE),
    "text": Load((TEXT,)),
    **{name: Load((shape,)) for name, shape in SHAPES.items()},
}


def make_load(
    name: str, count: int, rate: float | None, seed: int, arrivals: Arrivals | None = None, scale: float = 1.0
) -> tuple[WorkloadRequest, ...]:
    """`rate`: requests a second; None: all are there at the start. Arrivals are Poisson unless given. Raises
    ConfigError."""
    if name not in LOADS:
        raise _unknown(name)
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError(f"a workload has between 1 and {MAX_REQUESTS} requests, not {count}", param="workload")
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"the rate of a workload is more than 0 requests a second, not {rate}", param="workload")
    if not 0 < scale < math.inf:
        raise ConfigError(f"the scale of a workload is more than 0, not {scale}", param="workload")
    load = LOADS[name]
    rows = draw(Load(load.shapes, load.text_share, scale, load.reuse), count, seed)
    if rate is None:
        return tuple(rows)
    times_s = (arrivals or Arrivals()).times(rate, count, seed)
    return tuple(msgspec.structs.replace(row, at_s=float(at_s)) for row, at_s in zip(rows, times_s, strict=True))


def read_or_make(text: str, count: int, seed: int) -> tuple[WorkloadRequest, ...]:
    """The requests of a file, or `count` of a load given as NAME@RATE, or as NAME where all are there at the start. A
    file that is called like a load needs a folder before its name. Raises ConfigError."""
    name, has_rate, rate = text.partition("@")
    if name in LOADS:
        return make_load(name, count, _rate(text, rate) if has_rate else None, seed)
    path = Path(text)
    if path.exists() or len(path.parts) > 1 or (path.suffix and not has_rate):
        return read_workload(path)
    raise _unknown(name)


def draw(load: Load, count: int, seed: int) -> list[WorkloadRequest]:
    """Draws `count` requests in their order, all at time 0. Equal pictures have equal numbers."""
    rng = np.random.default_rng([seed, 0x5EED])
    drawing = _Drawing(load, count, rng)
    rows = [drawing.next(index) for index in range(count)]
    # Questions about one picture stand together in a data set; a sample of it has them apart.
    return _in_turns([rows[index] for index in rng.permutation(count)])


class _Drawing:
    """Hands out pictures, each for as many questions in a row as its data set asks about it, and turns of
    conversations, as many in a row as these have."""

    def __init__(self, load: Load, count: int, rng: np.random.Generator) -> None:
        self._load = load
        self._count = count
        self._rng = rng
        self._shown: dict[str, tuple[Picture, ...]] = {}
        self._said: dict[str, WorkloadRequest] = {}  # the latest turns
        self._num_sessions = 0

    def next(self, index: int) -> WorkloadRequest:
        load, rng = self._load, self._rng
        shape = load.shapes[rng.integers(len(load.shapes))]
        if rng.random() < load.text_share:
            shape = TEXT
        num_text, num_output = shape.text.draw(rng, load.scale), shape.output.draw(rng, load.scale)
        row = WorkloadRequest(at_s=0.0, prompt_tokens=num_text, output_tokens=num_output, kind=shape.name)
        if shape.pictures and not (shape.text_share and rng.random() < shape.text_share):
            row = msgspec.structs.replace(row, pictures=self._pictures(shape, index))
        return row if shape.turns == 1 else self._turn(shape, row)

    def _pictures(self, shape: Shape, index: int) -> tuple[Picture, ...]:
        shared = self._rng.random() >= 1 / shape.questions and self._load.reuse
        sizes = [shape.draw_size(self._rng, self._load.scale) for _ in range(shape.pictures)]
        if not shared or shape.name not in self._shown:
            numbered = enumerate(sizes)
            self._shown[shape.name] = tuple(Picture(*size, index + place * self._count) for place, size in numbered)
        return self._shown[shape.name]

    def _turn(self, shape: Shape, row: WorkloadRequest) -> WorkloadRequest:
        """Makes the row the next turn of its conversation (what was said, its answer, the new question), or the first
        turn of another one."""
        before = self._said.get(shape.name)
        if before is None or self._rng.random() < 1 / shape.turns:
            row = msgspec.structs.replace(row, session=self._num_sessions)
            self._num_sessions += 1
        else:
            row = msgspec.structs.replace(
                row,
                prompt_tokens=before.prompt_tokens + before.output_tokens + row.prompt_tokens,
                pictures=before.pictures,
                session=before.session,
                shared_tokens=before.prompt_tokens,
            )
        self._said[shape.name] = row
        return row


def _in_turns(rows: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """The same, with the turns of each conversation in order, at the places that they have together."""
    turns: dict[int, list[WorkloadRequest]] = {}
    for row in rows:
        if row.session is not None:
            turns.setdefault(row.session, []).append(row)
    following = {session: iter(sorted(found, key=_length)) for session, found in turns.items()}
    return [row if row.session is None else next(following[row.session]) for row in rows]


def _length(row: WorkloadRequest) -> int:
    return row.prompt_tokens


def _rate(text: str, rate: str) -> float:
    try:
        return float(rate)
    except ValueError:
        problem = f"the workload {text[:60]!r} needs requests a second behind its @, as in textcaps@4"
        raise ConfigError(problem, param="workload") from None


def _unknown(name: str) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), LOADS, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"give a file, or one of {', '.join(LOADS)}"
    return ConfigError(f"there is no workload {name[:60]!r}; {advice}", param="workload")
