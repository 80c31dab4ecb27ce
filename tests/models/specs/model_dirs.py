"""Model directories without weights, for tests of specs: JSON files as published, one field changed at a time."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec

Json = dict[str, Any]
Size = tuple[int, int]  # width, height


class ModelDir:
    def __init__(self, path: Path, files: Json) -> None:
        self.path = path
        for name, content in files.items():
            self.write(name, content)

    def write(self, name: str, content: Json) -> None:
        (self.path / name).write_text(json.dumps(content))

    def spec(self) -> ModelSpec:
        return load_spec(self.path)

    def refusal(self) -> str:
        """The one sentence with which the directory is refused."""
        with pytest.raises(CheckpointError) as caught:
            self.spec()
        message = caught.value.message
        assert "\n" not in message and str(self.path.parent) not in message and len(message) < 450
        return message


def changed(config: Json, path: str, value: Any) -> Json:
    """A copy with the value at "a.b" replaced; `...` removes it."""
    result = copy.deepcopy(config)
    *sections, name = path.split(".")
    place = result
    for section in sections:
        place = place[section]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return result


def awkward_sizes(side: int, count: int, seed: int) -> list[Size]:
    """Sizes of all orders of magnitude, around multiples of `side`, around simple aspects, and extreme ones."""
    rng = random.Random(seed)

    def length() -> int:
        return int(2 ** rng.uniform(0, 14))

    sizes = [(1, 1), (1, 10000), (10000, 1), (1, 2), (2, 1), (16384, 16384), (side, side)]
    while len(sizes) < count:
        sizes.append((length(), length()))
        sizes.append((rng.randint(1, 8) * side + rng.randint(-1, 1), rng.randint(1, 8) * side + rng.randint(-1, 1)))
        unit, columns, rows = length() // 4 + 1, rng.randint(1, 12), rng.randint(1, 12)
        sizes.append((unit * columns, unit * rows))
        sizes.append((unit * columns + rng.randint(0, 1), max(unit * rows - rng.randint(0, 1), 1)))
    return sizes
