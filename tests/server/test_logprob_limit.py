"""Log probabilities cost what a request's fields give multiplied: the product is bounded, what is kept is small, and no
answer is made in one go."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hydra_engine.config import SchedulerConfig, ServerConfig
from hydra_engine.core.logprobs import Logprobs
from hydra_engine.core.messages import Finished
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ConfigError
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.request import ActiveRequest, activate
from hydra_engine.preprocess.preprocessor import Prepared
from hydra_engine.server.http import answers
from hydra_engine.server.http.answers import ENTRIES, Slices
from hydra_engine.server.protocol import chat as chat_protocol
from tests.frontend.rig import make_request, tokenizer
from tests.server.conftest import Serve, Served, chat_body, until

CHAT = chat_body("a", logprobs=True, top_logprobs=20)
NUM_TOKENS = 700


async def asked(served: Served, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with served.post(route, body) as response:
        return response.status, json.loads(await response.read())


# ---- the bound


@pytest.mark.parametrize(
    ("route", "body", "param", "count"),
    [
        (
            "/v1/chat/completions",
            CHAT | {"n": 32, "max_tokens": 2000, "ignore_eos": True},
            "top_logprobs",
            32 * 2000 * 21,
        ),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 49_933}, "top_logprobs", 49_933 * 21),
        (
            "/v1/completions",
            {"prompt": ["a"] * 128, "n": 4, "max_tokens": 342, "logprobs": 5},
            "logprobs",
            512 * 342 * 6,
        ),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1 << 20, "logprobs": 1}, "logprobs", 1 << 21),
        ("/v1/responses", {"input": "a", "max_output_tokens": 50_000, "top_logprobs": 20}, "top_logprobs", 1_050_000),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_product_that_is_too_large_is_refused(
    served: Served, route: str, body: dict[str, Any], param: str, count: int, stream: bool
) -> None:
    status, answer = await asked(served, route, body | {"stream": stream})
    assert (status, answer["error"]["param"]) == (400, param)
    assert f"up to {count} log probabilities" in answer["error"]["message"]
    assert "at most 1048576" in answer["error"]["message"] and f"or {param}" in answer["error"]["message"]
    assert served.engine.submissions == []


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": "a b c d", "logprobs": 2, "max_tokens": 0, "echo": True, "n": 2}),
        ("/v1/completions", {"prompt": ["a b", "c d"], "prompt_logprobs": 4, "max_tokens": 1}),
        ("/v1/chat/completions", chat_body("a b c d", prompt_logprobs=4)),
    ],
)
async def test_a_prompt_counts_once_it_is_known(serve: Serve, route: str, body: dict[str, Any]) -> None:
    served = await serve(max_logprob_entries=19)
    status, answer = await asked(served, route, body)
    assert status == 400 and "log probabilities" in answer["error"]["message"]
    assert len(served.engine.cancelled) == len(served.engine.submissions) > 0
    larger = await serve(max_logprob_entries=100)
    assert (await asked(larger, route, body))[0] == 200


async def test_an_answer_without_an_end_gets_one(serve: Serve) -> None:
    served = await serve(max_logprob_entries=1000)
    served.engine.max_model_len = 4096
    assert (await asked(served, "/v1/chat/completions", CHAT | {"n": 2}))[0] == 200
    assert (await asked(served, "/v1/chat/completions", chat_body("a", max_tokens=5000)))[0] == 200
    assert [one.sampling.max_tokens for one in served.engine.submissions] == [1000 // 42, 5000]
    served.engine.default_sampling_params = SamplingParams(max_tokens=16)  # that ends it sooner
    assert (await asked(served, "/v1/chat/completions", CHAT | {"n": 2}))[0] == 200
    assert served.engine.submissions[-1].sampling.max_tokens is None
    served.engine.default_sampling_params = SamplingParams()
    served.engine.max_model_len = 20  # and so does that
    assert (await asked(served, "/v1/chat/completions", CHAT))[0] == 200
    assert served.engine.submissions[-1].sampling.max_tokens is None
    status, answer = await asked(served, "/v1/chat/completions", CHAT | {"n": 48})
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")
    with pytest.raises(ConfigError, match="max_logprob_entries"):
        ServerConfig(max_logprob_entries=0)


# ---- what is kept


def active(handle: Handle, num_tokens: int) -> ActiveRequest:
    request = replace(make_request(1, max_new=num_tokens), sampling=SamplingParams(logprobs=20))
    found = activate(Prepared(request, (), ()), handle, tokenizer(), SchedulerConfig())
    top = tuple((300 + place, -1.0 - place) for place in range(20))
    for position in range(num_tokens):
        piece = found.on_tokens(position, (300,), 0.0, [TokenLogprobs(300, -0.5, 1, top)])
        assert piece is not None and len(piece.logprobs) == 1
        handle.feed(piece)
    return found


def test_of_a_stream_nothing_is_kept_that_was_sent() -> None:
    handle = Handle("x", lambda: None)
    handle.expect(pieces=True)
    found = active(handle, 100)
    assert len(found.logprobs) == 0
    last = found.on_finished(Finished(found.request.id, FinishReason.LENGTH.value, 100), 1.0)
    assert last.result is not None and last.result.logprobs is None
    waiting = list(handle._pieces)
    assert sum(len(piece.logprobs) for piece in waiting) == 100, "nobody has read them"
    assert max(len(piece.logprobs) for piece in waiting) <= 32


def test_of_a_whole_answer_arrays_are_kept_and_no_pieces() -> None:
    handle = Handle("x", lambda: None)
    handle.expect(pieces=False)
    found = active(handle, 500)
    assert not handle._pieces
    kept = found.logprobs
    assert isinstance(kept, Logprobs) and len(kept._ids) == 500 * 21
    arrays = [getattr(kept, name) for name in Logprobs.__slots__]
    num_bytes = sum(sys.getsizeof(one) for one in arrays if isinstance(one, array | bytearray))
    assert num_bytes < 16 * len(kept._ids)
    assert [one.logprob for one in kept[499].top] == [-1.0 - place for place in range(20)]


# ---- how it is written


def test_slices_give_what_encoding_gives() -> None:
    class Answer(msgspec.Struct):
        text: str
        lists: list[Any]
        end: str = 'x\x00"\\'

    for sizes in ([0], [1], [ENTRIES], [ENTRIES + 1], [ENTRIES // 2] * 5, [1000, 0, 63, 2, 200]):
        lists = [[{"a": place, "b": "é\x00"} for place in range(size)] for size in sizes]
        slices = Slices()
        for _ in range(2):  # the events of one stream
            data = slices.encode(
                Answer("\x00" + "0\x00", [slices.defer(len(one), lambda one=one: one) for one in lists])
            )
            parts = [data] if isinstance(data, bytes) else list(data)
            assert b"".join(parts) == msgspec.json.encode(Answer("\x00" + "0\x00", lists))
            assert isinstance(data, bytes) == (sum(sizes) <= ENTRIES)


@contextmanager
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of entries made in each turn of the loop."""
    made = [0]
    make = chat_protocol._token_logprob

    def counted(entry: Any) -> Any:
        made[-1] += 1
        return make(entry)

    async def tick() -> None:
        while True:
            made.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(chat_protocol, "_token_logprob", counted)
    ticking = asyncio.create_task(tick())
    yield made
    ticking.cancel()


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", chat_body("a", logprobs=True, top_logprobs=2, n=3)),
        ("/v1/responses", {"input": "a", "top_logprobs": 2}),
        ("/v1/responses", {"input": "a", "top_logprobs": 2, "stream": True}),
    ],
)
async def test_no_answer_is_made_in_one_go(
    served: Served, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    served.engine.pieces = ["x"] * NUM_TOKENS
    with turns(monkeypatch) as made:
        async with served.post(route, body) as response:
            assert response.status == 200
            text = await response.text()
    assert sum(made) >= NUM_TOKENS * body.get("n", 1) and max(made) <= ENTRIES
    if body.get("stream"):
        events = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n")[:-1]]
        whole = events[-1]["response"]
        assert whole["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert whole["output"][0]["content"][0]["logprobs"] == [one for part in deltas for one in part]
    elif "choices" in (answer := json.loads(text)):
        assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [NUM_TOKENS] * 3
        assert answer["usage"]["completion_tokens"] == 3 * NUM_TOKENS
        assert response.headers["Content-Type"].startswith("application/json")
    else:
        assert len(answer["output"][0]["content"][0]["logprobs"]) == NUM_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_with_a_long_prompt_in_slices(served: Served, stream: bool) -> None:
    prompt = "a" * 500
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "n": 2, "stream": stream, "prompt_logprobs": 2}
    served.engine.pieces = ["xy"] * 300
    body["max_tokens"] = 300
    async with served.post("/v1/completions", body) as response:
        assert response.status == 200
        text = await response.text()
    answers = [json.loads(event[6:]) for event in text.split("\n\n")[:-2]] if stream else [json.loads(text)]
    for index in range(2):
        parts = [choice for answer in answers for choice in answer["choices"] if choice["index"] == index]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        joined = {name: [one for part in told for one in part[name]] for name in told[0]}
        assert joined["tokens"] == ["a"] * 500 + ["xy"] * 300
        assert joined["text_offset"] == [*range(500), *range(500, 1100, 2)]
        assert joined["top_logprobs"][0] is None and joined["top_logprobs"][-1] == {"xy": -0.5}
        assert len(joined["token_logprobs"]) == 800
        assert sum(len(part.get("prompt_logprobs") or ()) for part in parts) == 500
        assert "".join(part["text"] for part in parts) == prompt + "xy" * 300


async def test_whoever_does_not_read_slices_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.2)
    served.engine.pieces = ["x" * 20_000] * 2000
    body = json.dumps(chat_body("a", logprobs=True)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Type: application/json"]
    writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    await until(lambda: "slow_reader" in caplog.text, 10)
    assert served.lifecycle.num_running == 0
    writer.close()
