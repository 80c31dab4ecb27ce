"""Several answers to one prompt: one prefill, each as if it had been asked for alone, and one end for all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hydra_engine import Engine
from hydra_engine.core.outputs import Result
from hydra_engine.errors import InvalidRequest, RequestAborted, RequestFailed, Unavailable
from tests import faults
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.engine.test_processes import instance_pid
from tests.engine.test_reuse import BLOCK, images_encoded, stages
from tests.faults import set_fault

SEED = 41
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 12, "ignore_eos": True}
TEXT = "Say something about this picture, and take your time."


def alone(engine: Engine, count: int = 3) -> list[tuple[int, ...]]:
    """Generates each answer as a request of its own."""
    return [engine.generate(TEXT, picture(1), seed=SEED + i, **SEEDED).token_ids for i in range(count)]


def together(engine: Engine, count: int = 3, **options: Any) -> Result:
    result: Result = engine.generate(TEXT, picture(1), n=count, seed=SEED, **(SEEDED | options))
    return result


def tokens(answers: Sequence[Result]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[tuple[int, ...]]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=512, prefix_caching=False) as engine:
        found = alone(engine)
    assert len(set(found)) == 3, "seeds that give equal answers would prove nothing"
    return found


@pytest.mark.quick("}-2EPD")
@pytest.mark.parametrize("topology", ["EPD", pytest.param("E+P+D", marks=pytest.mark.slow), "2EPD"])
@pytest.mark.parametrize("options", [{"token_budget": 7}], ids=str)
def test_every_answer_is_that_of_its_seed_and_finds_the_prompt_computed(
    make_engine: EngineFactory, golden: list[tuple[int, ...]], topology: str, options: dict[str, Any]
) -> None:
    engine = make_engine(topology=topology, **options)
    reported: list[Result] = []
    engine.add_observer(reported.append)
    result = together(engine)
    assert tokens(result.choices) == golden
    first, *others = result.choices
    num_prompt = result.usage.prompt_tokens
    assert [answer.usage.cached_tokens for answer in result.choices] == [0, *[(num_prompt - 1) // BLOCK * BLOCK] * 2]
    assert (result.usage.completion_tokens, result.usage.cached_tokens) == (36, 0)
    assert [answer.usage.completion_tokens for answer in result.choices] == [12] * 3
    assert "encode" in stages(first) and not any("encode" in stages(other) for other in others)
    prefills = [[span.instance for span in answer.timeline if span.stage == "prefill"] for answer in result.choices]
    assert len({instances[0] for instances in prefills}) == 1, "the others follow the first"
    assert (result.token_ids, result.text, result.request_id) == (first.token_ids, first.text, first.request_id)
    assert images_encoded(engine) == 1
    assert sorted(tokens(reported)) == sorted(golden), "each answer is reported once"
    assert len({answer.request_id for answer in reported}) == 3


@pytest.mark.parametrize(
    "options",
    [{"prefix_caching": False}, {"max_num_seqs": 1}, {"look_ahead": True}, {"num_kv_blocks": 24, "max_model_len": 88}],
    ids=str,
)
@pytest.mark.slow
def test_whatever_the_cache_and_the_room(
    make_engine: EngineFactory, golden: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    engine = make_engine(**options)
    handles = [engine.submit(TEXT, picture(1), n=3, seed=SEED, **SEEDED) for _ in range(2)]
    assert [tokens(handle.result(60).choices) for handle in handles] == [golden] * 2
    assert_at_rest(engine)


def test_pieces_of_all_answers_come_mixed(engine: Engine, golden: list[tuple[int, ...]]) -> None:
    pieces = list(engine.stream(TEXT, picture(1), n=3, seed=SEED, logprobs=1, **SEEDED))
    for index in range(3):
        own = [piece for piece in pieces if piece.index == index]
        assert tuple(token for piece in own for token in piece.token_ids) == golden[index]
        results = [piece.result for piece in own if piece.result is not None]
        assert len(results) == 1 and own[-1].result is results[0]
        assert "".join(piece.text for piece in own) == results[0].text
        assert tuple(entry for piece in own for entry in piece.logprobs) == results[0].logprobs
        assert [bool(piece.prompt_token_ids) for piece in own] == [True] + [False] * (len(own) - 1)
    indices = [piece.index for piece in pieces]
    assert indices[0] == 0 and indices != sorted(indices)


def test_a_slow_reader_finds_each_answer_whole(engine: Engine) -> None:
    handle = engine.submit("Hello", n=4, **(SEEDED | {"max_tokens": 100}))
    result = handle.result(60)
    assert len(handle._pieces) <= 64 + 2 * 4
    for index, answer in enumerate(result.choices):
        found = [piece for piece in handle._pieces if piece.index == index]
        assert tuple(token for piece in found for token in piece.token_ids) == answer.token_ids


def test_lists_batches_and_async(make_engine: EngineFactory, golden: list[tuple[int, ...]]) -> None:
    engine = make_engine(max_queue=8)
    results = engine.generate([TEXT] * 4, [picture(1)] * 4, n=3, seed=SEED, **SEEDED)
    assert [tokens(result.choices) for result in results] == [golden] * 4

    async def run() -> Result:
        return await engine.submit(TEXT, picture(1), n=3, seed=SEED, **SEEDED)

    assert tokens(asyncio.run(run()).choices) == golden


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    result = engine.generate("Hello", n=4, **SEEDED)
    assert len(set(tokens(result.choices))) == 4


def test_the_queue_counts_every_answer(make_engine: EngineFactory) -> None:
    engine = make_engine(max_queue=4)
    long = {"temperature": 0, "max_tokens": 400, "ignore_eos": True}
    handle = engine.submit("Hello", n=3, **long)
    next(iter(handle))
    with pytest.raises(Unavailable, match="3 requests are queued or running, the limit"):
        engine.generate("Hello", n=2, **long)
    with pytest.raises(InvalidRequest, match="ask for fewer"):
        engine.generate("Hello", n=5, **long)
    assert engine.generate("Hello", temperature=0, max_tokens=2).token_ids
    handle.cancel()


@pytest.mark.quick("True")
@pytest.mark.parametrize("begun", [False, True])
def test_cancelling_ends_all_answers(make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    faults.enable(monkeypatch)
    engine = make_engine()
    reported: list[Result] = []
    engine.add_observer(reported.append)
    if not begun:
        set_fault(engine.frontend, "eng.before_step", "delay", "seconds=0.3 times=1")
    handle = engine.submit("Hello", n=3, **(SEEDED | {"max_tokens": 400}))
    if begun:
        seen = set()
        for piece in handle:
            seen.add(piece.index)
            if len(seen) == 3:
                break
    else:
        time.sleep(0.1)
    handle.cancel()
    with pytest.raises(RequestAborted):
        handle.result(30)
    assert_at_rest(engine)
    assert [type(result.error) for result in reported] == [RequestAborted] * (3 if begun else 1)


@pytest.mark.parametrize("index", [0, 1])
def test_an_answer_that_fails_takes_the_others_with_it(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine()
    reported: list[Result] = []
    engine.add_observer(reported.append)
    set_fault(engine.frontend, "eng.mid_step", "nan", f"request={1 + index}")
    handle = engine.submit("Hello", n=3, **(SEEDED | {"max_tokens": 400}))
    with pytest.raises(RequestFailed, match="finite"):
        handle.result(20)
    assert_at_rest(engine)
    errors = [type(result.error) for result in reported]
    assert errors.count(RequestFailed) == 1 and len(errors) == (3 if index else 1)
    set_fault(engine.frontend, "eng.mid_step", "off")
    assert len(engine.generate("Hello", n=2, **SEEDED).choices) == 2


@pytest.mark.slow
def test_answers_begin_although_the_first_one_s_instance_dies(
    make_engine: EngineFactory, golden: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(processes=True, recovery_s=30.0)
    set_fault(engine.frontend, "eng.before_step", "delay", "seconds=20")
    handle = engine.submit(TEXT, picture(1), n=3, seed=SEED, **SEEDED)
    time.sleep(0.3)
    os.kill(instance_pid(engine), signal.SIGKILL)
    assert tokens(handle.result(60).choices) == golden
