"""Log probabilities of answers are consistent: the bytes of all tokens are the text's, whole and in a stream, for every
kind of vocabulary."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.messages import Finished
from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.request import activate
from hydra_engine.preprocess.preprocessor import Prepared
from hydra_engine.preprocess.text.tokenizer import Tokenizer
from hydra_engine.server.generate import Answer, Identity
from hydra_engine.server.openai.chat import ChatAnswer
from hydra_engine.server.openai.completions import CompletionAnswer, Echo
from hydra_engine.server.protocol.chat import ChatCompletionRequest, Message
from hydra_engine.server.protocol.completions import CompletionRequest, TextOffset
from tests.examples import examples
from tests.frontend.rig import make_request
from tests.preprocess.conftest import BUILDERS, wrap

KINDS = ("byte_level", "sentencepiece_like")
LETTERS = "the cat é日本🎉\n  "
IDENTITY = Identity("x", 0, "m")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(wrap(BUILDERS[name]())) for name in KINDS}


def whole_tokens(tokenizer: Tokenizer, dice: random.Random) -> list[int]:
    """Tokens of words and of single bytes, of which each character has all, and special ones in between."""
    ids: list[int] = []
    for _ in range(dice.randrange(1, 20)):
        text = "".join(dice.choice(LETTERS) for _ in range(dice.randrange(1, 6)))
        match dice.randrange(3):
            case 0:
                ids.append(dice.choice(sorted(tokenizer.special_ids)))
            case 1 if not tokenizer.is_byte_level:
                ids += [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") or 0 for byte in text.encode()]
            case _:
                ids += tokenizer.encode(text, add_special_tokens=False)
    return [token_id for token_id in ids if token_id != tokenizer._backend.token_to_id("<unk>")]


def answered(
    tokenizer: Tokenizer, ids: list[int], dice: random.Random, *, skip: bool, pieces: bool
) -> tuple[list[Piece], Result]:
    """The frontend's output for these tokens, of which the last one ends the answer by its id."""
    sampling = SamplingParams(logprobs=2, skip_special_tokens=skip, stop_token_ids=(ids[-1],))
    request = replace(make_request(1, max_new=len(ids)), sampling=sampling, eos_token_ids=())
    handle = Handle("x", lambda: None)
    handle.expect(pieces=pieces)
    active = activate(Prepared(request, (), ()), handle, tokenizer, SchedulerConfig())
    found, at = [], 0
    while at < len(ids):
        some = ids[at : at + dice.randrange(1, 4)]
        entries = [TokenLogprobs(one, -0.5, 1, ((one, -0.5), ((7 * one + 1) % 300, -1.5))) for one in some]
        piece = active.on_tokens(at, tuple(some), 0.0, entries)
        assert piece is not None
        found.append(piece)
        at += len(some)
    last = active.on_finished(Finished(request.id, FinishReason.STOP.value, len(ids), stop_token_id=ids[-1]), 1.0)
    assert last.result is not None
    return [*found, last], last.result


def choices_of(data: bytes | Iterator[bytes]) -> list[dict[str, Any]]:
    events = (data if isinstance(data, bytes) else b"".join(data)).decode().split("\n\n")[:-1]
    return [choice for event in events for choice in msgspec.json.decode(event.removeprefix("data: "))["choices"]]


def whole(answer: Answer, result: Result) -> dict[str, Any]:
    data = answer.slices.encode(answer.full_answer(result))
    (choice,) = msgspec.json.decode(data if isinstance(data, bytes) else b"".join(data))["choices"]
    found: dict[str, Any] = choice
    return found


def chat_answer() -> ChatAnswer:
    asked = ChatCompletionRequest(messages=[Message("user", "a")], logprobs=True, top_logprobs=2)
    return ChatAnswer(asked, IDENTITY, asked.tool_use())


def text_answer() -> CompletionAnswer:
    return CompletionAnswer(CompletionRequest(prompt="a", logprobs=2), IDENTITY, [Echo()])


CASES: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "kind": st.sampled_from(KINDS),
    "skip": st.booleans(),
    "cut": st.booleans(),
}


@settings(max_examples=examples(40), deadline=None)
@given(**CASES)
def test_bytes_of_all_tokens_are_the_text(tokenizers: dict[str, Tokenizer], **case: Any) -> None:
    assert_bytes_are_the_text(tokenizers[case.pop("kind")], **case)


@pytest.mark.slow
@settings(max_examples=examples(2000), deadline=None)
@given(**CASES)
def test_bytes_of_all_tokens_are_the_text_in_thousands_of_answers(
    tokenizers: dict[str, Tokenizer], **case: Any
) -> None:
    assert_bytes_are_the_text(tokenizers[case.pop("kind")], **case)


def assert_bytes_are_the_text(tokenizer: Tokenizer, *, seed: int, skip: bool, cut: bool) -> None:
    dice = random.Random(seed)
    ids = [*whole_tokens(tokenizer, dice), tokenizer._backend.token_to_id("</s>") or 0]
    if cut and tokenizer.is_byte_level:  # what is no text in the end, too
        ids = [dice.randrange(tokenizer.vocab_size) for _ in ids]
        ids = [one for one in ids if one != ids[-1]] + ids[-1:]
    _, result = answered(tokenizer, ids, dice, skip=skip, pieces=False)
    choice = whole(chat_answer(), result)
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"] == result.text
    assert len(content) == len(ids) and content[-1]["bytes"] == []
    for entry in content:
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        if entry["token"].startswith("bytes:") and entry["bytes"]:
            assert entry["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
        elif entry["bytes"]:
            assert bytes(entry["bytes"]).decode() == entry["token"]

    told = whole(text_answer(), result)["logprobs"]
    assert [*zip(told["tokens"], told["token_logprobs"], strict=True)] == [(e["token"], e["logprob"]) for e in content]
    before = b""
    for entry, offset in zip(content, told["text_offset"], strict=True):
        if not cut:
            assert offset == len(before.decode("utf-8", "ignore"))
        before += bytes(entry["bytes"])

    # A stream says the same in pieces.
    pieces, last = answered(tokenizer, ids, dice, skip=skip, pieces=True)
    assert last.logprobs is None and last.text == result.text
    for answer, name in ((chat_answer(), "content"), (text_answer(), "text_offset")):
        chunks = [chunk for piece in pieces for chunk in choices_of(answer.events(piece))]
        parts = [chunk["logprobs"][name] for chunk in chunks if chunk["logprobs"]]
        assert [entry for part in parts for entry in part] == (content if name == "content" else told[name])


def test_a_part_of_a_character_has_its_byte(tokenizers: dict[str, Tokenizer]) -> None:
    for kind, tokenizer in tokenizers.items():
        ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "ñ".encode()]
        if kind == "byte_level":
            ids = [next(id for id in range(300) if tokenizer.token_bytes(id) == bytes([byte])) for byte in "ñ".encode()]
        _, result = answered(tokenizer, [*ids, 1], random.Random(1), skip=True, pieces=False)
        first, second, _ = whole(chat_answer(), result)["logprobs"]["content"]
        assert (first["token"], first["bytes"], second["bytes"]) == ("bytes:\\xc3", [195], [177])
        assert second["top_logprobs"][0]["bytes"] == [177] and second["token"] == "bytes:\\xb1"
        assert whole(text_answer(), result)["logprobs"]["text_offset"] == [0, 0, 1]


def test_a_text_that_is_repeated_begins_at_its_own_first_character() -> None:
    """Tokens that a tokenizer adds before the text do not count."""
    for beginning, raws, offsets in (
        ("Hello you", (b"<s>", b" Hello", b" you"), [0, 0, 5]),
        ("<s>Hi", (b"<s>", b"Hi"), [0, 3]),
        ("é!", (b"", b"\xc3", b"\xa9", b"!"), [0, 0, 0, 1]),
    ):
        offset = TextOffset(beginning=beginning)
        assert [offset.advance(raw) for raw in raws] == offsets


def test_entries_are_copied(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["byte_level"].encode("the cat é🎉")
    _, result = answered(tokenizers["byte_level"], ids, random.Random(1), skip=True, pieces=False)
    assert result.logprobs is not None and len(result.logprobs) == len(ids)
    for other in (pickle.loads(pickle.dumps(result)).logprobs, tuple(result.logprobs)):
        assert (
            result.logprobs == other and result.logprobs[-1] == other[-1] and result.logprobs[1:3] == tuple(other[1:3])
        )
    with pytest.raises(IndexError):
        result.logprobs[len(ids)]
