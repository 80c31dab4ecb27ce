"""Real engines over random miniatures: what every engine test shares, and the barrier that each of them ends with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hydra_engine import Engine
from tools.miniatures import make_tiny

EngineFactory = Callable[..., Engine]
# Each decode worker is a process.
SMALL: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "token_budget": 64, "decode_workers": 1}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaVA miniature; float32, so that equality has no excuse."""
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=7)
    return directory


@pytest.fixture(scope="module")
def engine_of_module(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine(tiny_model, **SMALL)
    yield engine
    engine.close()


@pytest.fixture
def engine(engine_of_module: Engine) -> Iterator[Engine]:
    """The engine of the module, for calls whose result does not depend on those before; must hold nothing at the end of
    the test."""
    yield engine_of_module
    assert_at_rest(engine_of_module)


@pytest.fixture
def make_engine(tiny_model: Path) -> Iterator[EngineFactory]:
    """Engines with small caches; at the end of the test each must hold nothing."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engine = Engine(options.pop("model", tiny_model), **(SMALL | options))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if not engine._closed:
            if engine.health()[1] != "instance_lost":
                assert_at_rest(engine)
            engine.close()


def assert_at_rest(engine: Engine, within_s: float = 60.0) -> None:
    """The barrier: every block, every pixel and every request is accounted for and free."""
    deadline = time.monotonic() + within_s
    while True:
        report = engine.ledger()
        if report.at_rest and engine.frontend.num_active == 0:
            return
        assert time.monotonic() < deadline, f"not at rest: {report}, {engine.frontend.num_active} active in front"
        time.sleep(0.01)


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    rng = random.Random(seed)
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
