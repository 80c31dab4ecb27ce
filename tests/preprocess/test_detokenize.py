import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.sampling import SamplingParams
from hydra_engine.preprocess.text.tokenizer import IncrementalDetokenizer, StopMatcher, Tokenizer
from tests.examples import examples

TEXTS = [
    "the cat sat on the mat.",
    "naïve café 日本語の文章 🎉🎈 e\u0301 \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "  leading and  double spaces\n\n\ttabs \n",
    "",
]


def stream(tokenizer: Tokenizer, ids: list[int], **sampling: object) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**sampling))
    pieces = []
    for id in ids:
        pieces.append(detokenizer.decode([id]))
        if detokenizer.stop_string is not None:
            return pieces, detokenizer
    return [*pieces, detokenizer.flush()], detokenizer


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like", "wordpiece"])
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_real_texts_make_the_full_decode(tokenizers: dict[str, Tokenizer], name: str, skip: bool) -> None:
    tokenizer = tokenizers[name]
    for text in TEXTS:
        ids = tokenizer.encode("<|user|>" + text + "<|assistant|>" + text + "</s>")
        pieces, _ = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 80), skip=st.booleans())
def test_pieces_of_random_bytes_make_the_full_decode(
    tokenizers: dict[str, Tokenizer], seed: int, length: int, skip: bool
) -> None:
    tokenizer = tokenizers["byte_level"]
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size + 2) for _ in range(length)]
    pieces, _ = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(0, 40))
@pytest.mark.parametrize("name", ["sentencepiece_like", "wordpiece"])
def test_pieces_of_random_tokens_make_the_full_decode(
    tokenizers: dict[str, Tokenizer], name: str, seed: int, length: int
) -> None:
    tokenizer = tokenizers[name]
    rng = random.Random(seed)
    whole = [id for id in range(tokenizer.vocab_size) if not (tokenizer.token(id) or "").startswith("<0x")]
    ids: list[int] = []
    for _ in range(length):
        if name == "sentencepiece_like" and rng.random() < 0.2:  # a character spelt in bytes, always complete
            ids += [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") or 0 for byte in rng.choice("é語🎉").encode()]
        else:
            ids.append(rng.choice(whole))
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
def test_no_piece_ends_inside_a_character(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode("🦜🦜 ok", add_special_tokens=False)
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == "🦜🦜 ok" and not any("\ufffd" in piece for piece in pieces)
    cut, _ = stream(tokenizer, ids[:2])
    assert "".join(cut[:-1]) == "" and "\ufffd" in cut[-1]  # the flush shows that something was there


def test_endless_broken_bytes_still_come_out(tokenizers: dict[str, Tokenizer]) -> None:
    for name, token in (("byte_level", "Ł"), ("sentencepiece_like", "<0x9F>")):
        tokenizer = tokenizers[name]
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
        pieces = [detokenizer.decode([tokenizer._backend.token_to_id(token) or 0]) for _ in range(100)]
        assert len("".join(pieces)) > 80


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("the cat sat on the mat ", add_special_tokens=False) * 1500
        detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("a" * 200 + "b", "zzz")))
        quarter = len(ids) // 4
        times = []
        for start in range(0, 4 * quarter, quarter):
            begin = time.perf_counter()
            for id in ids[start : start + quarter]:
                detokenizer.decode([id])
            times.append(time.perf_counter() - begin)
        assert min(times[2:]) < 5 * min(times[:2]) + 0.01


def test_a_stop_string_across_tokens_cuts_the_text(tokenizer: Tokenizer) -> None:
    text = "the cat sat on the mat"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for stop in ("sat on", "t sa", "the mat", "t", "mat"):
        pieces, detokenizer = stream(tokenizer, ids, stop=(stop,))
        assert detokenizer.stop_string == stop
        assert "".join(pieces) == text[: text.index(stop)]
        assert detokenizer.decode(ids) == "" and detokenizer.flush() == ""
        pieces, _ = stream(tokenizer, ids, stop=(stop,), include_stop_str_in_output=True)
        assert "".join(pieces) == text[: text.index(stop) + len(stop)]


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAGS = "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        (f"a {FAMILY} b", "\u200d"),
        (f"a {FAMILY} b", FAMILY[2:]),
        (f"a {FAMILY} b", FAMILY[-1] + " b"),
        (f"a {FLAGS} b", FLAGS[1:]),
        (f"a {FLAGS} b", FLAGS[1:3]),
        ("a cafe\u0301 b", "\u0301 b"),
        ("a cafe\u0301 b", "\u0301"),
    ],
)
def test_a_stop_string_may_begin_inside_what_looks_like_one_character(
    tokenizers: dict[str, Tokenizer], name: str, text: str, stop: str
) -> None:
    """A stream of single bytes gives the same as one piece; text before the stop string is not held back for ever."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    before = tokenizer.decode(ids)[: text.index(stop)]
    for kept in (False, True):
        pieces, detokenizer = stream(tokenizer, ids, stop=(stop,), include_stop_str_in_output=kept)
        assert detokenizer.stop_string == stop and "".join(pieces) == before + stop * kept
        whole = IncrementalDetokenizer(tokenizer, SamplingParams(stop=(stop,), include_stop_str_in_output=kept))
        assert whole.decode(ids) + whole.flush() == before + stop * kept
    pieces, detokenizer = stream(tokenizer, ids, stop=(f"{stop}!",))  # begins and does not end
    assert detokenizer.stop_string is None and "".join(pieces) == text


def test_text_that_may_become_a_stop_string_is_held_and_then_given_out(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("cat sings",)))
    pieces = [detokenizer.decode([id]) for id in tokenizer.encode("the cat sat", add_special_tokens=False)]
    assert "".join(pieces) == "the cat sat"
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("cat sings",)))
    first = "".join(detokenizer.decode([id]) for id in tokenizer.encode("the cat si", add_special_tokens=False))
    assert first == "the " and detokenizer.flush() == "cat si"


def test_a_stop_string_completed_by_the_flush_counts(tokenizer: Tokenizer) -> None:
    ids = [
        *tokenizer.encode("ok ", add_special_tokens=False),
        tokenizer._backend.token_to_id("Ł") or 0,
        tokenizer._backend.token_to_id("Ł") or 0,
    ]
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(stop=("\ufffd\ufffd",)))
    partial = tokenizer.encode("🎉", add_special_tokens=False)[:1]
    text = detokenizer.decode([*ids[:-1], *partial]) + detokenizer.flush()
    assert (text, detokenizer.stop_string) == ("ok ", "\ufffd\ufffd")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the the the the", add_special_tokens=False)
    assert len(ids) == 4
    for min_tokens, shown in ((0, ""), (1, ""), (2, "the"), (3, "the the"), (4, "the the the"), (9, "the the the the")):
        pieces, _ = stream(tokenizer, ids, stop=("the", " the"), min_tokens=min_tokens)
        assert "".join(pieces) == shown


def test_special_tokens_are_shown_when_asked_and_may_be_stops(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|user|>b", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids)[0]) == "ab"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)[0]) == "a<|user|>b"
    pieces, detokenizer = stream(tokenizer, ids, skip_special_tokens=False, stop=("<|user|>",))
    assert ("".join(pieces), detokenizer.stop_string) == ("a", "<|user|>")


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the match that ends first, the longest of several."""
    return min(
        ((at + len(stop), at, stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)),
        default=None,
    )


@settings(max_examples=examples(500), deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_matching_does_not_depend_on_how_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected = first_stop(text, stops)
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        certain, stop = matcher.match(piece)
        shown += certain
        if stop is not None:
            assert expected is not None and (shown, stop) == (text[: expected[1]], expected[2])
            return
        held = text[len(shown) :]
        assert text.startswith(shown) and shown + matcher._held == text[: len(shown) + len(matcher._held)], held
    assert expected is None and shown + matcher.flush() == text


def test_hostile_stop_strings_cost_little() -> None:
    stops = ["a" * (255 - index) + "b" for index in range(16)]
    matcher, begin = StopMatcher(stops), time.thread_time()
    for _ in range(500):
        matcher.match("aaaa")
    assert time.thread_time() - begin < 1.0
