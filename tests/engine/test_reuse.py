"""Cached prefixes and features are reused, with the same tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from hydra_engine import Engine
from hydra_engine.cluster.channel import FrontendSocket
from hydra_engine.core.outputs import Result
from hydra_engine.errors import InvalidRequest, RequestAborted, RequestFailed
from tests import faults
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.faults import set_fault

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "max_tokens": 12, "ignore_eos": True}
PENALISED: dict[str, Any] = {**SEEDED, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3}
BLOCK = 4  # of the engines of `make_engine`


def stages(result: Result) -> list[str]:
    return [span.stage for span in result.timeline]


def message(text: str, *pictures: Any) -> dict[str, Any]:
    parts = [{"type": "image", "image": one} for one in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def images_encoded(engine: Engine) -> int:
    """Counted by the instance; it reports a few times a second and once more when idle."""
    assert_at_rest(engine)
    before = engine.stats()
    while (status := engine.stats()) is None or status is before:
        time.sleep(0.02)
    return status.images_encoded


@pytest.mark.quick("seeded")
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_the_same_prompt_again_gives_the_same_tokens_from_the_cache(
    make_engine: EngineFactory, sampling: dict[str, Any]
) -> None:
    engine = make_engine()
    first, second = (engine.generate("What is in this picture?", picture(1), **sampling) for _ in range(2))
    assert second.token_ids == first.token_ids
    assert second.logprobs == first.logprobs
    assert (first.usage.cached_tokens, first.usage.cached_images) == (0, 0)
    assert second.usage.cached_tokens == (second.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert second.usage.cached_images == second.usage.num_images == 1
    assert "encode" in stages(first) and "cached" not in stages(first)
    assert "encode" not in stages(second) and "encode_wait" not in stages(second) and "cached" in stages(second)
    prefilled = sum(span.tokens for span in second.timeline if span.stage == "prefill")
    assert prefilled == second.usage.prompt_tokens - second.usage.cached_tokens
    assert images_encoded(engine) == 1


@pytest.mark.quick("True-True")
@pytest.mark.parametrize(("kv", "images"), [(True, True), (False, True), (True, False)])
def test_a_reset_makes_it_compute_again_and_nobody_can_tell(make_engine: EngineFactory, kv: bool, images: bool) -> None:
    engine = make_engine(processes=True) if kv and images else make_engine()
    decoded = engine.frontend.preprocessor._loader._pixels
    first = engine.generate("What is in this picture?", picture(1), **GREEDY)
    engine.reset_caches(kv=kv, images=images)
    assert (decoded.num_bytes == 0) == images
    second = engine.generate("What is in this picture?", picture(1), **GREEDY)
    assert second.token_ids == first.token_ids
    assert (second.usage.cached_tokens == 0) == kv
    assert (second.usage.cached_images == 0) == (kv and images), "KV that is there needs no features"
    assert images_encoded(engine) == (2 if kv and images else 1)


def test_a_prompt_is_counted_with_its_pictures(make_engine: EngineFactory) -> None:
    engine = make_engine()
    for turn in ([message("Hello!")], [message("Compare them.", picture(2), picture(3, 80, 40))]):
        counted = engine.count_tokens(turn)
        assert counted == asyncio.run(engine.acount_tokens(turn))
        assert counted == engine.chat(turn, max_tokens=1).usage.prompt_tokens
    assert counted == engine.count_tokens([message("Compare them.")], [picture(2), picture(3, 80, 40)])
    assert images_encoded(engine) == 2, "counting encodes nothing"


def test_token_ids_of_text_and_of_messages_are_those_of_requests(make_engine: EngineFactory) -> None:
    """A picture is as many placeholders as it has features."""
    engine = make_engine()
    raw = engine.tokenize("Hello!")
    assert raw == asyncio.run(engine.atokenize("Hello!")) and engine.count_tokens("Hello!") == len(raw)
    assert len(raw) == engine.generate("Hello!", max_tokens=1, raw=True).usage.prompt_tokens
    assert engine.detokenize(raw) == asyncio.run(engine.adetokenize(raw)) and engine.detokenize(raw).endswith("Hello!")
    assert engine.detokenize(np.array(raw)) == engine.detokenize(raw)
    for wrong, words in (([1 << 20], "between 0 and"), ([1.5], "a list of integers"), ("a", "a list"), (5, "a list")):
        with pytest.raises(InvalidRequest, match=f"token ids must be {words}"):
            engine.detokenize(wrong)
    turn = [message("What is this?", picture(4))]
    usage = engine.chat(turn, max_tokens=1).usage
    tokens = engine.tokenize(turn)
    placeholder = engine.frontend.preprocessor._spec.placeholder_id
    assert (len(tokens), tokens.count(placeholder)) == (usage.prompt_tokens, usage.image_tokens)
    assert engine.tokenize("<image>What?", picture(4)).count(placeholder) == usage.image_tokens
    num_words = engine.max_model_len + 1
    assert engine.count_tokens([message("one " * num_words)]) > num_words, "a text is counted that no request may have"


def test_the_tokenizer_is_that_of_transformers(make_engine: EngineFactory, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    engine = make_engine(chat_template=str(template))
    tokenizer = engine.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer is engine.tokenizer
    tokenizer("Hello!", truncation=True, max_length=1)  # its settings are not the engine's
    assert tokenizer("Hello!")["input_ids"] == engine.tokenize("Hello!")
    turn = [{"role": "user", "content": "Hello!"}]
    written = tokenizer.apply_chat_template(turn, tokenize=False)
    assert written == "<user>Hello!" and engine.tokenize(turn) == tokenizer(written)["input_ids"]


def test_the_trace_of_the_last_seconds(make_engine: EngineFactory) -> None:
    engine = make_engine()
    result = engine.generate("Hello!", max_tokens=2)
    names = {event["name"] for event in engine.trace_events(60.0) if event["ph"] == "X"}
    assert {span.stage for span in result.timeline} == names
    assert engine.trace_events(1e-9) == []


def test_the_second_turn_of_a_conversation_finds_the_first(make_engine: EngineFactory) -> None:
    engine, plain = make_engine(), make_engine(prefix_caching=False)
    turn = [message("Hello!", picture(2))]
    answers = []
    for _ in range(3):
        result, expected = (e.chat(turn, **GREEDY) for e in (engine, plain))
        assert result.token_ids == expected.token_ids and expected.usage.cached_tokens == 0
        answers.append(result)
        turn = [*turn, {"role": "assistant", "content": result.text}, message("And then?")]
    for before, after in itertools.pairwise(answers):
        # All of the prompt before, save for the last block; how much of the answer depends on the tokenizer.
        assert after.usage.cached_tokens >= (before.usage.prompt_tokens - 1) // BLOCK * BLOCK
        assert after.usage.cached_images == 1
    assert images_encoded(engine) == 1


def test_an_answer_is_found_by_the_prompt_that_repeats_its_tokens(make_engine: EngineFactory) -> None:
    engine = make_engine()
    prompt = list(range(30, 41))
    first = engine.generate(prompt, raw=True, **GREEDY)
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    second = engine.generate(longer, raw=True, **GREEDY)
    assert second.usage.cached_tokens == (len(prompt) + len(first.token_ids) - 1) // BLOCK * BLOCK
    assert second.token_ids == make_engine(prefix_caching=False).generate(longer, raw=True, **GREEDY).token_ids


def test_another_question_about_the_same_picture_needs_no_encode(make_engine: EngineFactory) -> None:
    engine, plain = make_engine(), make_engine(prefix_caching=False)
    cases: list[tuple[str, list[Any]]] = [
        ("What is this?", [picture(3)]),
        ("Quite another question, which comes first.", [picture(3)]),
        ("Compare them.", [picture(4), picture(3), picture(3)]),
    ]
    system = [{"role": "system", "content": "Other words before the picture"}]
    results = []
    for text, pictures in cases:
        messages = [*(system if results else []), message(text, *pictures)]
        result, expected = (e.chat(messages, **GREEDY) for e in (engine, plain))
        assert result.token_ids == expected.token_ids
        results.append(result)
    assert [r.usage.cached_images for r in results] == [0, 1, 2]
    assert (images_encoded(engine), images_encoded(plain)) == (2, 5)


@pytest.mark.slow
def test_a_picture_asked_about_by_many_at_once_is_encoded_once(make_engine: EngineFactory) -> None:
    engine, plain = make_engine(), make_engine(prefix_caching=False)
    asked = [f"Question number {number}" for number in range(6)]
    tokens = []
    for one in (engine, plain):
        handles = [one.submit(text, picture(5), **GREEDY) for text in asked]
        tokens.append([handle.result(60).token_ids for handle in handles])
    assert tokens[0] == tokens[1]
    assert (images_encoded(engine), images_encoded(plain)) == (1, 6)


@pytest.mark.quick("num_kv_blocks")
@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 90, "max_model_len": 300},
        {"num_image_blocks": 1},
        {"token_budget": 7},
        pytest.param({"processes": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_conversations_under_pressure_are_the_same_with_and_without_reuse(
    make_engine: EngineFactory, options: dict[str, Any]
) -> None:
    def run(engine: Engine) -> list[tuple[int, ...]]:
        chats: list[list[dict[str, Any]]] = [[] for _ in range(5)]
        found: list[tuple[int, ...]] = []
        for turn in range(3):
            for index, chat in enumerate(chats):
                chat.append(message(f"Turn {turn} of {index % 2}", *([picture(index % 2)] if turn == 0 else [])))
            handles = [engine.submit(list(chat), **GREEDY) for chat in chats]
            results = [handle.result(120) for handle in handles]
            for chat, result in zip(chats, results, strict=True):
                chat.append({"role": "assistant", "content": result.text})
            found += [result.token_ids for result in results]
        return found

    assert run(make_engine(**options)) == run(make_engine(prefix_caching=False))


def test_a_salt_keeps_tenants_apart(make_engine: EngineFactory) -> None:
    engine = make_engine()
    results = [
        engine.generate("What is this?", picture(6), cache_salt=salt, **GREEDY) for salt in ("one", "other", "one", "")
    ]
    assert len({r.token_ids for r in results}) == 1
    assert [r.usage.cached_tokens > 0 for r in results] == [False, False, True, False]
    assert [r.usage.cached_images for r in results] == [0, 0, 1, 0]
    assert images_encoded(engine) == 3


def test_without_reuse_everything_is_computed_again(make_engine: EngineFactory) -> None:
    engine = make_engine(prefix_caching=False)
    first, second = (engine.generate("What is this?", picture(7), **GREEDY) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert (second.usage.cached_tokens, second.usage.cached_images) == (0, 0)
    assert images_encoded(engine) == 2


@pytest.mark.parametrize("point", ["eng.before_step", "eng.mid_step"])
def test_what_a_poisoned_request_computed_is_never_found(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine(token_budget=8)
    set_fault(engine.frontend, point, "nan", "")
    with pytest.raises(RequestFailed):
        engine.generate("A prompt of several chunks and a picture", picture(8), **GREEDY)
    set_fault(engine.frontend, point, "off")
    again = engine.generate("A prompt of several chunks and a picture", picture(8), **GREEDY)
    assert (again.usage.cached_tokens, again.usage.cached_images) == (0, 1), "the picture was encoded well"


@pytest.mark.slow
def test_a_failed_encode_fails_one_and_the_others_have_the_picture_encoded(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine()
    expected = make_engine().generate("Same picture", picture(9), **GREEDY).token_ids
    set_fault(engine.frontend, "vis.before_step", "raise", "times=1")
    handles = [engine.submit("Same picture", picture(9), **GREEDY) for _ in range(4)]
    outcomes: list[tuple[int, ...] | None] = []
    for handle in handles:
        try:
            outcomes.append(handle.result(60).token_ids)
        except RequestFailed:
            outcomes.append(None)
    assert sorted(outcomes, key=str) == [expected] * 3 + [None]
    assert images_encoded(engine) == 1


@pytest.mark.slow
def test_cancelling_the_request_that_an_encode_was_for_harms_nobody_who_shares_it(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.enable(monkeypatch)
    engine = make_engine()
    expected = make_engine().generate("Same picture", picture(10), **GREEDY).token_ids
    set_fault(engine.frontend, "vis.before_step", "delay", "seconds=0.5 times=1")
    doomed = engine.submit("Doomed", picture(10), **GREEDY)
    time.sleep(0.15)  # in its encode, or still before it: then it is the others' encode
    others = [engine.submit("Same picture", picture(10), **GREEDY) for _ in range(2)]
    doomed.cancel()
    with pytest.raises(RequestAborted):
        doomed.result(30)
    assert [other.result(60).token_ids for other in others] == [expected] * 2
    assert images_encoded(engine) == 1


@pytest.mark.slow
def test_a_picture_is_sent_once_to_a_process_and_encoded_again_from_there(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    write = FrontendSocket._write
    monkeypatch.setattr(FrontendSocket, "_write", lambda end, data: (sent.append(len(data)), write(end, data)))
    engine = make_engine(processes=True, prefix_caching=False)
    results = []
    for _ in range(2):
        sent.clear()
        results.append((engine.generate("What is in this picture?", picture(1, 640, 480), **GREEDY), max(sent)))
    (first, first_bytes), (second, second_bytes) = results
    assert second.token_ids == first.token_ids and "encode" in stages(second)
    assert second_bytes < first_bytes / 2
    assert images_encoded(engine) == 2
