"""Engines on a processor that says its work ends behind the call: the tokens of an engine that waits for every step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine import Engine
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.device import Graph
from hydra_engine.cli.summary import start_lines
from hydra_engine.core.messages import Loading
from hydra_engine.core.units import size
from hydra_engine.errors import RequestAborted, Unavailable
from hydra_engine.worker.language.graphs import DecodeGraphs
from hydra_engine.worker.vision.graphs import EncodeGraphs
from tests import faults
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.faults import set_fault

ENDLESS = {"max_tokens": 24, "ignore_eos": True}
ASKED: list[tuple[str, Any, dict[str, Any]]] = [
    ("one text", None, {"temperature": 0}),
    ("another one, which is longer than the first", None, {"temperature": 1.0, "seed": 3, "top_p": 0.9}),
    ("see", picture(1), {"temperature": 0}),
    ("look", [picture(2), picture(3)], {"temperature": 0.8, "seed": 4, "top_k": 12, "min_p": 0.01}),
]
SPECIAL: list[tuple[str, Any, dict[str, Any]]] = [
    ("with logprobs", None, {"temperature": 0, "logprobs": 2}),
    ("with penalties", None, {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "min_tokens": 4}),
    ("scored", None, {"temperature": 0, "prompt_logprobs": 1}),
]
FORMS = {
    "native": {"backend": "native"},
    "eager": {"backend": "reference", "enforce_eager": True},
    "graphs": {"backend": "reference", "max_num_seqs": 6, "cuda_graph_sizes": (1, 2, 4, 6)},
}


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "asynchronous", True)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each."""
    seen: list[int] = []
    replay = DecodeGraphs.replay

    def counting(self: DecodeGraphs, *arguments: Any) -> Any:
        seen.append(len(arguments[1]))
        return replay(self, *arguments)

    monkeypatch.setattr(DecodeGraphs, "replay", counting)
    return seen


@pytest.fixture
def encodes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns for each encode that could be replayed whether it was."""
    seen: list[bool] = []
    replay = EncodeGraphs.replay

    def counting(self: EncodeGraphs, *arguments: Any) -> bool:
        seen.append(replay(self, *arguments))
        return seen[-1]

    monkeypatch.setattr(EncodeGraphs, "replay", counting)
    return seen


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, tuple[int, ...]]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=512, token_budget=64) as engine:
        return {text: answer(engine, text, image, options) for text, image, options in ASKED + SPECIAL}


def answer(engine: Engine, text: str, image: Any, options: dict[str, Any]) -> tuple[int, ...]:
    return engine.generate(text, image, **(ENDLESS | options)).token_ids


@pytest.mark.quick("graphs-True")
@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_request_gets_the_same_tokens(
    make_engine: EngineFactory,
    behind: None,
    replays: list[int],
    encodes: list[bool],
    expected: dict[str, tuple[int, ...]],
    form: str,
    look_ahead: bool,
) -> None:
    engine = make_engine(look_ahead=look_ahead, **FORMS[form])
    for asked in (ASKED, ASKED + SPECIAL):
        handles = {text: engine.submit(text, image, **(ENDLESS | options)) for text, image, options in asked}
        assert {text: handle.result(60).token_ids for text, handle in handles.items()} == {
            text: expected[text] for text in handles
        }
        assert_at_rest(engine)
    assert bool(replays) == any(encodes) == (form == "graphs")
    assert form != "graphs" or all(encodes)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["native", "graphs"])
def test_preempted_and_aborted_requests(
    make_engine: EngineFactory, behind: None, expected: dict[str, tuple[int, ...]], form: str
) -> None:
    engine = make_engine(look_ahead=True, prefix_caching=False, **(FORMS[form] | {"num_kv_blocks": 48}))
    rng = random.Random(3)
    handles = []
    for number in range(16):
        text, image, options = ASKED[number % 2]
        handles.append((text, engine.submit(text, image, **(ENDLESS | options))))
        if number % 4 == 3:
            handles[rng.randrange(len(handles))][1].cancel()
        time.sleep(rng.random() * 0.005)
    ended = {"done": 0, "aborted": 0}
    for text, handle in handles:
        try:
            assert handle.result(60).token_ids == expected[text]
            ended["done"] += 1
        except RequestAborted:
            ended["aborted"] += 1
    assert all(ended.values())
    assert_at_rest(engine)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["native", "graphs"])
def test_without_memory_one_request_is_told_to_come_again(
    make_engine: EngineFactory,
    behind: None,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, tuple[int, ...]],
    form: str,
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(**FORMS[form])
    handles = {text: engine.submit(text, image, **(ENDLESS | options)) for text, image, options in ASKED}
    number = 1 + len(handles)
    set_fault(engine.frontend, "eng.mid_step", "oom", f"request={number}")
    with pytest.raises(Unavailable, match="not enough memory") as caught:
        engine.generate("too much", **ENDLESS)
    assert caught.value.status == 503 and caught.value.retry_after_s
    assert {text: handle.result(60).token_ids for text, handle in handles.items()} == {
        text: expected[text] for text in handles
    }
    set_fault(engine.frontend, "eng.mid_step", "off", "")
    assert answer(engine, *ASKED[0]) == expected[ASKED[0][0]]


def test_what_was_captured_is_told(make_engine: EngineFactory, behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = CpuDevice.capture

    def sized(self: CpuDevice, launch: Callable[[], None]) -> Graph:
        graph = capture(self, launch)
        graph.num_bytes = 1 << 20
        return graph

    monkeypatch.setattr(CpuDevice, "capture", sized)
    seen: list[Loading] = []
    monkeypatch.setattr(
        "hydra_engine.frontend.frontend.Frontend.on_progress", lambda self, name, loading: seen.append(loading)
    )
    engine = make_engine(**FORMS["graphs"])
    assert [loading.total for loading in seen if loading.what == "capturing graphs"][-1] == 8
    assert 15 << 20 < engine.summary.graph_bytes < 16 << 20 and engine.summary.captured_patches > 0
    (line,) = (line for line in start_lines([engine.summary]) if "captured decode steps" in line)
    assert f" {size(engine.summary.graph_bytes)} " in line
    assert "decode steps, steps with prompts of up to 64 tokens and encodes of" in line
