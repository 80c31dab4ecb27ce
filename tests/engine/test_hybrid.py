"""A decoder that keeps a recurrent state per request, through the whole engine: chunks, company, preemption, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydra_engine import Engine, SamplingParams
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.errors import RequestFailed
from tests import faults
from tests.calls import asked
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.faults import set_fault
from tools.miniatures import make_tiny

HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
PROMPTS: list[tuple[str, int]] = [
    ("What is this?", 0),
    ("One picture.", 1),
    ("A long text without any picture in it, " * 4, 0),
    ("Two of them: compare.", 2),
    ("x", 0),
]


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-hybrid")
    text = {**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("minicpmv4_6", directory, seed=7, text_type="qwen3_5_text", text=text)
    return directory


@pytest.fixture(scope="module")
def qwen3_5_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures have positions on three axes, and what follows them others than its indices."""
    directory = tmp_path_factory.mktemp("tiny-qwen3_5")
    make_tiny("qwen3_5", directory, seed=7, text={"max_position_embeddings": 2048})
    return directory


def sampling(index: int, tokens: int = 20) -> SamplingParams:
    if index % 2:
        return SamplingParams(temperature=1.0, seed=index, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def pictures(index: int) -> list[Any] | None:
    count = PROMPTS[index][1]
    return [picture(10 * index + i) for i in range(count)] or None


def together(engine: Engine) -> list[tuple[int, ...]]:
    handles = [
        engine.submit(prompt, pictures(index), sampling=sampling(index)) for index, (prompt, _) in enumerate(PROMPTS)
    ]
    return [handle.result(120).token_ids for handle in handles]


@pytest.fixture(scope="module")
def golden(hybrid_model: Path) -> list[tuple[int, ...]]:
    return alone(hybrid_model)


def alone(hybrid_model: Path, **options: Any) -> list[tuple[int, ...]]:
    """Answers to every prompt alone and unchunked."""
    options = {"block_size": 4, "num_kv_blocks": 512, "token_budget": 512, **options}
    with Engine(hybrid_model, threads=1, **options) as engine:
        found = [
            engine.generate(prompt, pictures(index), sampling=sampling(index)).token_ids
            for index, (prompt, _) in enumerate(PROMPTS)
        ]
    assert len(set(found)) == len(found) and all(len(set(tokens)) > 3 for tokens in found)
    return found


@pytest.mark.quick("token_budget")
@pytest.mark.parametrize(
    "options",
    [{}, {"token_budget": 5}, {"threads": 2}, {"max_num_seqs": 2}],
    ids=str,
)
def test_together_in_chunks_equals_alone_in_one_piece(
    make_engine: EngineFactory, hybrid_model: Path, golden: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    engine = make_engine(model=hybrid_model, **options)
    found = together(engine)
    assert found == golden
    assert found == together(engine)  # the same slots again, in another order


@pytest.mark.slow
def test_int8_keys_and_values_beside_states_keep_the_same_promise(
    make_engine: EngineFactory, hybrid_model: Path
) -> None:
    """Only the layers of attention are quantized; the states of the others are as they were."""
    expected = alone(hybrid_model, kv_cache_dtype="int8")
    for options in ({"token_budget": 5}, {"threads": 2, "max_num_seqs": 2}):
        engine = make_engine(model=hybrid_model, kv_cache_dtype="int8", **options)
        assert any("int8" in note for note in engine.summary.notes)
        assert together(engine) == expected
        assert_at_rest(engine)


@pytest.mark.slow
def test_the_reference_ops_keep_the_same_promise(make_engine: EngineFactory, hybrid_model: Path) -> None:
    engine = make_engine(model=hybrid_model, backend="reference", token_budget=9)
    assert together(engine) == alone(hybrid_model, backend="reference")


@pytest.mark.slow
def test_preemption_loses_nothing(make_engine: EngineFactory, hybrid_model: Path) -> None:
    engine = make_engine(model=hybrid_model, num_kv_blocks=100, token_budget=64, max_model_len=80, max_images=1)
    settings = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[40 + number, 41, 42] for number in range(8)]  # ids reach the instance together
    expected = [engine.generate(prompt, sampling=settings).token_ids for prompt in prompts]
    results = [handle.result(120) for handle in [engine.submit(prompt, sampling=settings) for prompt in prompts]]
    assert [result.token_ids for result in results] == expected
    assert sum(result.metrics.num_preemptions for result in results) > 0
    assert_at_rest(engine)


def test_a_cancelled_request_gives_its_slot_back(make_engine: EngineFactory, hybrid_model: Path) -> None:
    """Requests are twice as many as slots, and some are cancelled while they run."""
    engine = make_engine(model=hybrid_model, max_num_seqs=2, token_budget=16)
    settings = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in range(2):
        handles = [engine.submit("abc", sampling=settings) for _ in range(4)]
        next(iter(handles[0]))
        handles[0].cancel()
        handles[2].cancel()
        rest = [handles[index].result(120).token_ids for index in (1, 3)]
        assert rest[0] == rest[1] and len(rest[0]) == 40
        assert_at_rest(engine)
    assert engine.ledger().state_slots_total == 2 + 2 * 2, "and two snapshots each"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["eng.before_step", "eng.mid_step"])
def test_a_step_that_raised_is_run_again(
    make_engine: EngineFactory, hybrid_model: Path, golden: list[tuple[int, ...]], monkeypatch: Any, point: str
) -> None:
    """State that a step had written before it raised is not read by the rows that are run again."""
    faults.enable(monkeypatch)
    engine = make_engine(model=hybrid_model, token_budget=32)
    doomed, handle = engine.frontend.open_handle()
    set_fault(engine.frontend, point, "raise", f"request={doomed}")
    call = asked("to fail", sampling=sampling(0))
    handles = [
        engine.submit(prompt, pictures(index), sampling=sampling(index)) for index, (prompt, _) in enumerate(PROMPTS)
    ]
    engine._wait(engine.frontend.submit(doomed, handle, call))
    with pytest.raises(RequestFailed):
        handle.result(60)
    assert [handle.result(120).token_ids for handle in handles] == golden
    assert_at_rest(engine)


LOOK = "Look: twice, and say what you see there."


def message(text: str, *shown: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": one} for one in shown]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_the_same_prompt_again_continues_behind_its_state(make_engine: EngineFactory, hybrid_model: Path) -> None:
    engine, plain = make_engine(model=hybrid_model), make_engine(model=hybrid_model, prefix_caching=False)
    first, second = (engine.generate(LOOK, [picture(1)], sampling=sampling(0)) for _ in range(2))
    expected = plain.generate(LOOK, [picture(1)], sampling=sampling(0))
    assert first.token_ids == second.token_ids == expected.token_ids
    assert second.usage.cached_tokens == (first.usage.prompt_tokens - 1) // 4 * 4 > 0
    assert (first.usage.cached_tokens, second.usage.cached_images, expected.usage.cached_tokens) == (0, 1, 0)
    engine.reset_caches()
    third = engine.generate(LOOK, [picture(1)], sampling=sampling(0))
    assert third.token_ids == first.token_ids and third.usage.cached_tokens == 0
    assert any("snapshots of recurrent states" in note for note in engine.summary.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid_model", "qwen3_5_model"])
def test_the_tenth_turn_computes_its_own_tokens_and_encodes_one_picture(
    make_engine: EngineFactory, request: pytest.FixtureRequest, name: str
) -> None:
    """Ten turns of one screenshot each, whose prompts repeat the tokens of the turns before."""
    model = request.getfixturevalue(name)
    engine = make_engine(model=model, max_images=10, block_size=2, num_kv_blocks=1024)
    turn = [message("Turn 0", picture(0))]
    answers: list[tuple[int, ...]] = []
    before = 0
    for number in range(1, 11):
        result = engine.chat(turn, sampling=sampling(0))
        answers.append(result.token_ids)
        usage = result.usage
        computed = sum(span.tokens for span in result.timeline if span.stage == "prefill")
        assert computed == usage.prompt_tokens - usage.cached_tokens
        assert usage.num_images - usage.cached_images == 1, "one picture is encoded"
        if number > 1:
            own = usage.prompt_tokens - before
            assert own <= computed <= own + 2, "its own tokens, aligned down to a block"
        before = usage.prompt_tokens
        turn = [
            *turn,
            {"role": "assistant", "content": "Ok."},
            message(f"Turn {number}", picture(number)),
        ]
    plain = make_engine(model=model, max_images=10, prefix_caching=False, num_kv_blocks=1024)
    assert plain.chat(turn[:19], sampling=sampling(0)).token_ids == answers[9]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 90, "max_model_len": 300},
        {"token_budget": 7},
        {"max_num_seqs": 2},
        {"backend": "reference"},
        {"processes": True},
        {"backend": "reference", "cuda_graph_sizes": (1, 2, 5), "token_budget": 24},
    ],
    ids=str,
)
@pytest.mark.slow
def test_conversations_under_pressure_are_the_same_with_and_without_reuse(
    make_engine: EngineFactory, hybrid_model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "asynchronous", "cuda_graph_sizes" in options)  # steps are planned ahead

    def run(engine: Engine) -> tuple[list[tuple[int, ...]], int]:
        chats: list[list[dict[str, Any]]] = [[] for _ in range(5)]
        found, cached = [], 0
        for turn in range(3):
            for index, chat in enumerate(chats):
                chat.append(message(f"Turn {turn} of {index % 2}", *([picture(index % 2)] if turn == 0 else [])))
            handles = [engine.submit(list(chat), sampling=sampling(i, 12)) for i, chat in enumerate(chats)]
            results = [handle.result(120) for handle in handles]
            for chat, result in zip(chats, results, strict=True):
                chat.append({"role": "assistant", "content": result.text})
                cached += result.usage.cached_tokens
            found += [result.token_ids for result in results]
        return found, cached

    engine = make_engine(model=hybrid_model, **options)
    plain = make_engine(model=hybrid_model, prefix_caching=False, **options)
    (found, cached), (expected, none) = run(engine), run(plain)
    assert found == expected and cached > none == 0
