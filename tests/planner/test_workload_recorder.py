"""Records of requests that end: sizes, times and numbers in the order of arrival, and nothing of their contents."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.outputs import FinishReason, RequestMetrics, Result, Usage
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.preprocess.preprocessor import CallFacts
from hydra_planner.workload import recorder as workload_recorder
from hydra_planner.workload.file import Picture, Video, WorkloadRequest, header_line, read_workload
from hydra_planner.workload.recorder import BLOCK_TOKENS, WorkloadRecorder
from tests.examples import examples
from tests.frontend.rig import make_request

IMAGE_TOKENS = 4
BEGAN_S = 100.0
FILM = VideoInfo(640, 360, 240, 23.976)


class Recorder:
    """Requests by number, and the rows that have come."""

    def __init__(self, key: bytes = b"key") -> None:
        self.recorder = WorkloadRecorder(key, BEGAN_S)
        self.lines: list[bytes] = []

    def ended(
        self,
        number: int,
        at_s: float,
        text: list[int] | None = None,
        pictures: tuple[str | VideoInfo, ...] = (),
        tokens: int = 5,
        salt: str = "",
        secret: str = "",
    ) -> None:
        """`pictures` stand behind the first token; a string names what is in a picture."""
        text = text if text is not None else [1, 2, 3]
        request = prompt(number, at_s, text, pictures, salt)
        videos = tuple(item if isinstance(item, VideoInfo) else None for item in pictures)
        self.recorder.record_request(request, CallFacts(RequestId(number), len(text), videos), result(tokens, secret))

    def release(self, oldest_s: float = math.inf) -> list[WorkloadRequest]:
        lines = self.recorder.release(oldest_s)
        self.lines += lines
        return rows(lines)


def rows(lines: list[bytes]) -> list[WorkloadRequest]:
    return [msgspec.json.decode(line, type=WorkloadRequest) for line in lines]


def prompt(
    number: int, at_s: float, text: list[int], pictures: tuple[str | VideoInfo, ...] = (), salt: str = ""
) -> Request:
    """A picture is two spans of features, as tiles are."""
    ids, items = text[:1], []
    for source, name in enumerate(pictures):
        for part in range(2):
            item = ImageItem(
                digest=ImageDigest(f"{name}{part}".encode().ljust(32)[:32]),
                width=64 + source,
                height=48,
                num_patches=4,
                num_tokens=IMAGE_TOKENS,
                start=len(ids),
                grid=(1, 2, 2),
                source=source,
            )
            items.append(item)
            ids = ids + [0] * IMAGE_TOKENS
    return replace(
        make_request(number),
        prompt_token_ids=(*ids, *text[1:]),
        images=tuple(items),
        arrival_s=BEGAN_S + at_s,
        cache_salt=salt,
    )


def result(tokens: int, text: str = "", reason: FinishReason = FinishReason.LENGTH) -> Result:
    return Result(f"req-{text}", text, tuple(range(tokens)), reason, Usage(99, tokens), RequestMetrics())


def test_sizes_and_times_are_told() -> None:
    recorder = Recorder()
    recorder.ended(1, 0.25, list(range(10)), ("cat",), tokens=7)
    recorder.ended(2, 0.5, list(range(90)), (FILM,))
    recorder.ended(3, 0.75, [], ("dog", "cat"))
    first, second, third = recorder.release()
    assert first == WorkloadRequest(at_s=0.25, prompt_tokens=10, output_tokens=7, pictures=(Picture(64, 48, 0),))
    assert second.videos == (Video(640, 360, 240, 23.976, 1),) and second.prompt_tokens == 90 and not second.pictures
    assert third.prompt_tokens == 1, "a picture alone"
    assert third.pictures == (Picture(64, 48, 2), Picture(65, 48, 0)), "the second one has been here before"


def test_lines_come_in_the_order_of_arrival_when_all_earlier_ones_have_ended() -> None:
    recorder = Recorder()
    recorder.ended(3, 3.0)
    recorder.ended(2, 2.0)
    assert recorder.release(BEGAN_S + 1.0) == [], "one that came earlier runs"
    assert [row.at_s for row in recorder.release(BEGAN_S + 2.5)] == [2.0]
    recorder.ended(4, 4.0)
    assert [row.at_s for row in recorder.release(BEGAN_S + 4.0)] == [3.0], "two may come at one time"
    assert [row.at_s for row in recorder.release()] == [4.0]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=30))
def test_whatever_the_order_of_the_ends_the_file_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    """(arrival, time until its end) of requests; after each end what can be released is."""
    recorder = Recorder()
    ends = sorted((at_s + takes_s, number, at_s) for number, (at_s, takes_s) in enumerate(spans))
    for place, (_, number, at_s) in enumerate(ends):
        recorder.ended(number, at_s, list(range(number * 10)))
        recorder.release(BEGAN_S + min((at_s for *_, at_s in ends[place + 1 :]), default=math.inf))
    assert len(recorder.lines) == len(spans)
    if spans:
        path = tmp_path_factory.mktemp("load") / "load.jsonl"
        path.write_bytes(b"\n".join([header_line(), *recorder.lines]) + b"\n")
        assert len(read_workload(path)) == len(spans)


def test_what_has_no_tokens_or_came_before_has_no_line() -> None:
    recorder = Recorder()
    recorder.ended(1, 1.0, tokens=0)
    recorder.ended(2, -0.5)
    recorder.ended(3, 2.0, pictures=(FILM._replace(fps=math.inf),))
    assert recorder.release() == []
    recorder.ended(4, 0.0)
    assert [row.at_s for row in recorder.release()] == [0.0]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_was_cut_off_has_what_was_generated(reason: FinishReason) -> None:
    recorder = Recorder()
    recorder.recorder.record_request(prompt(1, 0.0, [1]), CallFacts(RequestId(1), 1, ()), result(3, reason=reason))
    assert [row.output_tokens for row in recorder.release()] == [3]


def test_several_answers_are_one_request_with_the_longest() -> None:
    recorder = Recorder()
    for answer, tokens in ((10, 4), (11, 9), (12, 6)):
        request = replace(prompt(1, 1.0, [1, 2]), id=RequestId(answer))
        recorder.recorder.record_request(request, CallFacts(RequestId(1), 2, ()), result(tokens))
        assert recorder.release(BEGAN_S + 1.0) == []
    assert [row.output_tokens for row in recorder.release()] == [9]


def test_a_request_that_too_many_overtake_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_recorder, "MAX_WAITING", 3)
    recorder = Recorder()
    for number in range(1, 6):
        recorder.ended(number, float(number))
    assert [row.at_s for row in recorder.release(BEGAN_S)] == [1.0, 2.0]
    recorder.ended(0, 0.0)
    assert [row.at_s for row in recorder.release()] == [3.0, 4.0, 5.0]


def test_a_file_gets_no_more_lines_than_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_recorder, "MAX_REQUESTS", 2)
    recorder = Recorder()
    for number in range(5):
        recorder.ended(number, float(number))
    assert len(recorder.release()) == 2 and recorder.recorder.full
    recorder.ended(5, 5.0)
    assert recorder.release() == []


# ---- what came before


def shared(*texts: list[int], **options: Any) -> list[tuple[int | None, int]]:
    """(session, tokens shared) of requests with these prompts."""
    recorder = Recorder()
    for number, text in enumerate(texts):
        recorder.ended(number, float(number), text, **options)
    return [(row.session, row.shared_tokens) for row in recorder.release()]


def test_a_conversation_is_a_session_that_shares_what_it_had() -> None:
    turn, other = list(range(100)), list(range(1000, 1100))
    assert shared(turn, other, turn + other, turn + other + turn, [5] * 10) == [
        (0, 0),
        (1, 0),
        (0, BLOCK_TOKENS),
        (0, 3 * BLOCK_TOKENS),
        (None, 0),
    ]


def test_a_block_counts_only_behind_all_that_was_before_it() -> None:
    block, other = list(range(BLOCK_TOKENS)), list(range(500, 500 + BLOCK_TOKENS))
    assert shared(block + other, other + block, other) == [(0, 0), (1, 0), (1, BLOCK_TOKENS)]
    assert shared(block, block[:-1]) == [(0, 0), (None, 0)]


def test_other_pictures_or_another_salt_share_nothing() -> None:
    text = list(range(3 * BLOCK_TOKENS))
    recorder = Recorder()
    for number, (picture, salt) in enumerate((("cat", ""), ("cat", ""), ("dog", ""), ("cat", "tenant"))):
        recorder.ended(number, float(number), text, (picture,), salt=salt)
    found = recorder.release()
    assert [(row.session, row.shared_tokens) for row in found] == [(0, 0), (0, 3 * BLOCK_TOKENS), (1, 0), (2, 0)]
    assert [row.pictures[0].number for row in found] == [0, 0, 1, 2]


def test_a_picture_changes_what_is_behind_it_alone() -> None:
    """The picture stands behind the text's first block and in front of the second."""
    text = list(range(2 * BLOCK_TOKENS))
    recorder = Recorder()
    for number, name in enumerate("ab"):
        base = prompt(number, float(number), text, (name,))
        spans = [replace(item, start=item.start - 1 + BLOCK_TOKENS) for item in base.images]
        ids = [*text[:BLOCK_TOKENS], *[0] * 2 * IMAGE_TOKENS, *text[BLOCK_TOKENS:]]
        request = replace(base, prompt_token_ids=tuple(ids), images=tuple(spans))
        recorder.recorder.record_request(request, CallFacts(RequestId(number), len(text), (None,)), result(1))
    assert [(row.session, row.shared_tokens) for row in recorder.release()] == [(0, 0), (0, BLOCK_TOKENS)]


def test_what_is_remembered_is_bounded_and_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_recorder, "MAX_PICTURES", 2)
    monkeypatch.setattr(workload_recorder, "MAX_BLOCKS", 2)
    recorder = Recorder()
    for number, name in enumerate("abacab"):
        recorder.ended(number, float(number), [ord(name)] * BLOCK_TOKENS, (name,))
    found = recorder.release()
    assert [row.pictures[0].number for row in found] == [0, 1, 0, 2, 0, 3]
    assert [(row.session, row.shared_tokens > 0) for row in found] == [
        *((0, False), (1, False), (0, True)),
        *((2, False), (0, True), (3, False)),
    ]
    assert len(recorder.recorder._numbers) == len(recorder.recorder._sessions) == 2


# ---- nothing of what is in them


def test_nothing_of_what_is_in_a_request_is_told() -> None:
    """Two runs over quite different contents of equal sizes write the same bytes, under whatever key."""
    recorded = []
    for key, word, first in ((b"one key", "attack at dawn", 31_337), (b"another", "nothing at all", 77_001)):
        recorder = Recorder(key)
        text = list(range(first, first + 200))
        recorder.ended(1, 0.5, text, (word,), tokens=11, salt=f"{word} salt", secret=word)
        recorder.ended(2, 0.75, text + text, (word,), tokens=12, salt=f"{word} salt", secret=word)
        recorder.ended(3, 0.75, text[:64], (word, f"2 {word}", FILM), tokens=13, secret=word)
        recorder.release()
        recorded.append(b"\n".join(recorder.lines))
        assert key not in recorded[-1]
    assert recorded[0] == recorded[1]
    assert json.loads(recorded[0].splitlines()[1]) == {
        "at_s": 0.75,
        "prompt_tokens": 400,
        "output_tokens": 12,
        "pictures": [[64, 48, 0]],
        "session": 0,
        "shared_tokens": 192,
    }


def test_equal_contents_have_other_keys_in_another_run() -> None:
    texts = list(range(BLOCK_TOKENS))
    keys = []
    for key in (b"one", b"two"):
        recorder = Recorder(key)
        recorder.ended(1, 0.0, texts, ("cat",))
        recorder.release()
        keys.append({*recorder.recorder._numbers, *recorder.recorder._sessions})
    assert len(keys[0] | keys[1]) == 4
