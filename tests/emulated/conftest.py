"""Fixtures of an emulated device, and the places where the engine may wait for it.

Torch takes the emulated device for the one of the process, which a process with a GPU must not have: there these tests
are left out, as tests/gpu has the device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend.select import create_backend
from tests.emulated.graphs import CUDAGraph
from tests.emulated.streams import Streams
from tests.worker.fakes import Rig
from tests.worker.test_real_model import make_rig
from tools.miniatures import make_tiny

collect_ignore_glob = ["test_*.py"] if torch.cuda.is_available() else []

# Where a lane may wait for the device besides `Device.fetch` and `Device.finish`, and why.
MAY_WAIT = {
    "worker/language/step.py PromptScoring._take": "logits of prompt tokens come in slices, so that they fit",
    "worker/transfer.py checksums_of": "checksums are for those who check transfers",
}
Rigs = Callable[..., Rig]

HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID_SIZES = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Makes `device="cuda"` an emulated device during a test."""
    from tests.emulated.cuda import emulated_cuda  # torch learns of the device

    with emulated_cuda() as streams:
        yield streams
        monkeypatch.undo()  # or it would put parts of the emulated device back, after this is over


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("cache")
    return folder


@pytest.fixture(autouse=True)
def kept_measurements(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts keep what they measured, but not among the user's: what a test finds does not depend on earlier runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


class Models:
    """Miniatures by family, made when they are first asked for; "hybrid" keeps recurrent states."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[str, Path] = {}

    def __call__(self, family: str) -> Path:
        if family not in self._made:
            options: dict[str, Any] = {}
            if family == "hybrid":
                options = {"text_type": "qwen3_5_text", "text": HYBRID | HYBRID_SIZES}
            directory: Path = self._factory.mktemp(f"tiny-{family}")
            make_tiny("minicpmv4_6" if family == "hybrid" else family, directory, seed=7, **options)
            self._made[family] = directory
        return self._made[family]


@pytest.fixture
def on_device(streams: Streams, models: Models) -> Any:
    """Rigs that serve."""
    made: list[Rig] = []

    def make(family: str, *, sm_split: tuple[int, ...] = (), **options: Any) -> Rig:
        backend = create_backend("cuda", torch.float32, threads=1, sm_split=sm_split)
        options = {"num_seq_slots": 12, "token_budget": 24, "cuda_graph_sizes": (1, 2, 8), **options}
        rig = make_rig(models(family), "", asynchronous=True, backend=backend, **options)
        made.append(rig)
        rig.worker.warm_up(lambda done, total: None)
        rig.worker.capture_graphs(lambda done, total: None)
        streams.serving = True
        return rig

    yield make
    streams.working.set()
    for rig in made:
        rig.worker.close()
    assert_clean(streams)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CUDAGraph]:
    seen: list[CUDAGraph] = []
    replay = CUDAGraph.replay

    def seen_replay(self: CUDAGraph) -> None:
        seen.append(self)
        replay(self)

    monkeypatch.setattr(CUDAGraph, "replay", seen_replay)
    return seen


def assert_clean(streams: Streams) -> None:
    wrong = [f"{f.place}: {f.what} ({n} times)" for f, n in streams.findings.items() if f.function not in MAY_WAIT]
    assert not wrong, "\n".join(wrong)
