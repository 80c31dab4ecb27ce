"""Streams of server-sent events to stamped tokens, however the bytes were cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_terminal.load.events import parse


def event(text: str | None = None, tokens: int | None = None, **rest: Any) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": rest.pop("finish", None)}
    document: dict[str, Any] = {"choices": [choice], **rest}
    if tokens is not None:
        document["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def final(tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % tokens


def test_running_usage_says_how_many_tokens_an_event_has() -> None:
    stream = parse(
        [(1.0, event("", 1)), (2.0, event("ab", 3)), (3.0, event(None, 3, finish="length")), (3.0, final(3))]
    )
    assert stream.stamps == (1.0, 2.0) and stream.counts == (1, 2)
    assert stream.finish_reason == "length" and stream.ended and stream.error is None
    assert stream.text == "ab"


def test_tokens_held_back_until_the_end_are_counted_there() -> None:
    stream = parse([(1.0, event("a", 1)), (5.0, event(None, 4, finish="length") + final(4))])
    assert stream.stamps == (1.0, 5.0) and stream.counts == (1, 3)


def test_without_running_usage_each_text_is_a_token_and_the_rest_is_spread() -> None:
    chunks = [(float(i), event("x")) for i in range(4)]
    assert parse([*chunks, (9.0, final(4))]).counts == (1, 1, 1, 1)
    assert parse([*chunks, (9.0, final(6))]).counts == (2, 1, 2, 1)
    assert parse([*chunks, (9.0, final(13))]).counts == (4, 3, 3, 3)
    assert parse(chunks).counts == (1, 1, 1, 1)
    assert not parse(chunks).ended


def test_an_event_without_text_is_no_token() -> None:
    chunks = [(1.0, event("")), (2.0, event("a")), (3.0, event(None, finish="stop")), (3.0, final(1))]
    assert parse(chunks).stamps == (2.0,)


def test_reasoning_is_tokens_and_no_part_of_the_text() -> None:
    reasoning = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    stream = parse([(1.0, reasoning), (2.0, event("a")), (3.0, final(2))])
    assert stream.text == "a" and stream.stamps == (1.0, 2.0)


def test_errors_comments_metrics_and_line_ends() -> None:
    stream = parse(
        [
            (1.0, b": keep-alive\n\n"),
            (2.0, event("a", 1, metrics={"e2e_s": 1.5}).replace(b"\n", b"\r\n")),
            (3.0, b'data: {"error": {"message": "gone"}}\n\n'),
        ]
    )
    assert stream.stamps == (2.0,) and stream.metrics == {"e2e_s": 1.5}
    assert stream.error is not None and "gone" in stream.error and not stream.ended


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 7\n\n"])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse([(1.0, data)])


_SENT = b"".join([event("é", 1), b": hm\r\n\r\n", event("ab", 3), event(None, 3, finish="length"), final(3)])


@given(st.lists(st.integers(0, len(_SENT)), max_size=12))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(_SENT)]
    chunks = [(float(end), _SENT[begin:end]) for begin, end in itertools.pairwise(places)]
    stream = parse(chunks)
    assert stream.counts == (1, 2) and stream.ended
    first_event_end = _SENT.index(b"\n\n") + 2
    assert stream.stamps[0] == min(end for end in places if end >= first_event_end)
