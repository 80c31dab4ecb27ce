"""Two front workers of one engine, all on one loop: what must be one truth is one, and what leaves leaves nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from hydra_engine.cluster.wire import WireError, frames
from hydra_engine.config import ServerConfig
from hydra_engine.core.outputs import FinishReason, Piece, RequestMetrics, Result, Usage
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.errors import InvalidRequest, RequestAborted, RequestFailed, Unavailable
from hydra_engine.server import page, relay_client, relay_link
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.auth import Key
from hydra_engine.server.commons import MAX_VIEWERS
from hydra_engine.server.context import Scope
from hydra_engine.server.relay_client import RelayClient
from hydra_engine.server.relay_link import Link
from hydra_engine.server.remote_commons import RemoteCommons
from hydra_engine.server.remote_engine import RemoteEngine
from tests.server.conftest import chat_body, until
from tests.server.relayed import SPARE_BYTES, Main, Worker, start_worker
from tests.server.stub import StubEngine

StartTwo = Callable[..., Awaitable[tuple[Main, Worker, Worker]]]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def two() -> AsyncIterator[StartTwo]:
    workers: list[Worker] = []

    async def start(**options: Any) -> tuple[Main, Worker, Worker]:
        main = Main(StubEngine(), ServerConfig(**options))
        workers.extend([await start_worker(main), await start_worker(main)])
        return main, workers[0], workers[1]

    yield start
    for worker in workers:
        await worker.close()


def ask(worker: Worker, text: str = "one two three", **options: Any) -> asyncio.Task[tuple[int, str]]:
    headers = options.pop("headers", {})

    async def run() -> tuple[int, str]:
        async with worker.served.post(CHAT, chat_body(text, **options), headers=headers) as response:
            return response.status, (await response.read()).decode()

    return asyncio.create_task(run())


def at_rest(main: Main) -> bool:
    counted = main.commons.lifecycle.num_running or main.commons.bodies.held > 4 * SPARE_BYTES
    return not counted and all(relay.at_rest for relay in main.relays)


# ---- one truth


async def test_answers_at_once_are_counted_over_all_workers(two: StartTwo) -> None:
    main, one, other = await two(max_requests_per_client=3)
    main.engine.prefill_s = 30
    waiting = [ask(one, stream=True), ask(other, n=2)]
    await until(lambda: len(main.engine.submissions) == 2)
    for worker in (one, other):
        status, text = await ask(worker)
        assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "waits for 3 answers" in text
    waiting[0].cancel()
    await until(lambda: len(main.engine.cancelled) == 1)
    main.engine.prefill_s = 0
    await until(lambda: main.commons.lifecycle.num_running == 1)
    assert (await ask(other))[0] == 200
    waiting[1].cancel()
    await until(lambda: at_rest(main))


async def test_requests_a_minute_are_counted_over_all_workers(two: StartTwo) -> None:
    _, one, other = await two(requests_per_minute=3)
    statuses = [(await ask(worker))[0] for worker in (one, other, one, other, one)]
    assert statuses == [200, 200, 200, 429, 429]


async def test_a_full_queue_is_told_with_when(two: StartTwo) -> None:
    main, one, _ = await two()
    main.engine.refusal = Unavailable("full", retry_after_s=7)
    async with one.served.chat() as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")


async def test_bodies_are_bounded_over_all_workers(two: StartTwo) -> None:
    main, one, other = await two(max_body_bytes=2000, max_inflight_body_bytes=3000)
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    readers = []
    for worker in (one, other):
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.served.port)
        writer.write(head.format(1400).encode() + b'"' + b"x" * 1200)
        readers.append((reader, writer))
    await until(lambda: main.commons.bodies.held >= 2402)
    for worker in (one, other):
        for length in (600, None):  # known at once, and when it has come
            size = head.format(700) if length else head.replace("Content-Length: {}", "Transfer-Encoding: chunked")
            reader, writer = await asyncio.open_connection("127.0.0.1", worker.served.port)
            writer.write(size.encode() + (b"" if length else b"320\r\n" + b"x" * 800))
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
            assert answer.startswith(b"HTTP/1.1 503 ") and b'"overloaded"' in answer
            writer.close()
    assert main.commons.bodies.held <= 3000
    for _, writer in readers:
        writer.close()
    await until(lambda: main.commons.bodies.held <= 4 * SPARE_BYTES)


async def test_small_bodies_ask_nobody(two: StartTwo) -> None:
    main, one, _ = await two()
    assert (await ask(one))[0] == 200
    held = main.commons.bodies.held
    assert 0 < held <= 2 * SPARE_BYTES
    main.commons.bodies.most = held  # nothing more can be granted
    assert (await ask(one, "a"))[0] == 200


async def test_any_worker_ends_a_request_of_another(two: StartTwo) -> None:
    main, one, other = await two()
    main.engine.prefill_s = 30
    waiting = ask(one, headers={"X-Request-Id": "mine"})
    await until(lambda: len(main.engine.submissions) == 1)
    for expected in ((200, 1), (404, None)):
        async with other.served.http.delete(other.served.url + "/v1/requests/mine") as response:
            answer = await response.json()
            assert (response.status, answer.get("ended")) == expected
    status, text = await waiting
    assert status == 500 and "stopped before it had finished" in text
    await until(lambda: main.engine.cancelled == ["chatcmpl-mine"] and at_rest(main))
    async with other.served.http.delete(other.served.url + "/v1/requests/%ff%00") as response:
        assert response.status == 404


async def test_load_and_metrics_are_those_of_all(two: StartTwo) -> None:
    main, one, other = await two()
    for worker in (one, other, other):
        assert (await ask(worker))[0] == 200
    assert (await ask(one, temperature=9))[0] == 400
    main.engine.refusal = Unavailable("full")
    assert (await ask(other))[0] == 503
    main.engine.refusal, main.engine.prefill_s = None, 30
    waiting = [ask(one), ask(other)]
    await until(lambda: main.commons.lifecycle.num_running == 2)
    for worker in (one, other):
        async with worker.served.get("/load") as response:
            assert (await response.json())["server_load"] == 2
        async with worker.served.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
            text = await response.text()
            assert "openmetrics" in response.headers["Content-Type"]
        assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="stub"} 3.0' in text
        assert f'route="{CHAT}",status="200"' in text
        (line,) = [found for found in text.splitlines() if f'route="{CHAT}",status="200"' in found]
        assert line.endswith(" 3.0")
        assert 'hydra:admission_rejections_total{engine="0",model_name="stub",reason="overloaded"} 1.0' in text
        assert 'vllm:request_params_n_count{engine="0",model_name="stub"} 3.0' in text
    for task in waiting:
        task.cancel()
    await until(lambda: main.commons.metrics._traffic._lag._sums[()] > 0)  # of both loops, which is one here
    await until(lambda: at_rest(main))


async def test_viewers_are_counted_over_all_workers(two: StartTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 0.01)
    main, one, other = await two()
    main.engine.ring.add("ended", 1.0, ())
    answers = []
    for number in range(MAX_VIEWERS):
        answer = await (one, other)[number % 2].served.get("/ui/events")
        snapshot = json.loads((await answer.content.readuntil(b"\n\n"))[6:])
        assert [found["id"] for found in snapshot["ended"]] == ["ended"] and snapshot["outcomes"]["finished"] == 0
        answers.append(answer)
    for worker in (one, other):
        async with worker.served.get("/ui/events") as answer:
            assert answer.status == 503
    answers.pop().close()
    await until(lambda: main.commons._num_viewers == MAX_VIEWERS - 1)
    answers.append(await one.served.get("/ui/events"))
    assert answers[-1].status == 200
    for answer in answers:
        answer.close()
    await until(lambda: main.commons._num_viewers == 0)


async def test_a_topology_is_changed_once_at_a_time_and_seen_by_all(two: StartTwo) -> None:
    main, one, other = await two(admin_key="boss")
    main.engine.switch_s = 0.2
    headers = {"Authorization": "Bearer boss"}

    async def change(worker: Worker, text: str) -> tuple[int, Any]:
        async with worker.served.post("/admin/topology", {"topology": text}, headers=headers) as response:
            return response.status, await response.json()

    first = asyncio.create_task(change(one, "EP+D"))
    await asyncio.sleep(0.1)
    assert (await change(other, "E+PD"))[0] == 503
    status, answer = await first
    assert (status, answer["topology"]) == (200, "EP+D") and main.engine.switched == ["EP+D"]
    async with other.served.get("/admin/topology", headers=headers) as response:
        assert (await response.json())["topology"] == "EP+D"


async def test_keys_that_change_change_everywhere(two: StartTwo) -> None:
    main, one, other = await two(api_key=("old",))
    for worker in (one, other):
        assert (await ask(worker, headers={"X-Api-Key": "old"}))[0] == 200
        assert (await ask(worker, headers={"X-Api-Key": "new"}))[0] == 401
    tenants = {submission.cache_salt for submission in main.engine.submissions}
    assert len(tenants) == 1 and "" not in tenants  # one client has one salt, wherever it comes in


# ---- the end of a drain, of a worker, of a request


async def test_a_drain_refuses_and_then_ends(two: StartTwo) -> None:
    main, one, other = await two()
    main.engine.prefill_s = 30
    waiting = [ask(one), ask(other, stream=True)]
    await until(lambda: len(main.engine.submissions) == 2)
    main.commons.lifecycle.draining = True
    for worker in (one, other):
        status, text = await ask(worker)
        assert (status, json.loads(text)["error"]["code"]) == (503, "draining")
    main.commons.lifecycle.expire()
    for status, text in await asyncio.gather(*waiting):
        assert status == 503 and '"code":"draining"' in text
    await asyncio.wait_for(main.commons.lifecycle.wait_idle(), 2)
    await until(lambda: len(main.engine.cancelled) == 2 and at_rest(main))


@pytest.mark.parametrize("phase", ["intake_s", "prefill_s", "token_s"])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_left_of_a_worker_that_dies(two: StartTwo, phase: str, stream: bool) -> None:
    main, one, other = await two(max_requests_per_client=4)
    setattr(main.engine, phase, 0.3)
    mine = [ask(one, f"mine {number}", stream=stream) for number in range(2)]
    theirs = [ask(other, f"theirs {number}", stream=stream) for number in range(2)]
    viewer = await one.served.get("/ui/events")
    await until(lambda: main.commons.lifecycle.num_running == 4 and main.commons._num_viewers == 1)
    one.kill()
    await until(lambda: main.commons.lifecycle.num_running == 2 and main.commons._num_viewers == 0)
    for status, text in await asyncio.gather(*theirs):
        assert status == 200 and "theirs" in text
    await until(lambda: at_rest(main))
    assert main.relays[0]._bodies.held == 0
    ended = main.engine.intakes_cancelled + len(main.engine.cancelled)
    assert ended == 2
    for task in mine:
        task.cancel()
    viewer.close()
    assert (await ask(other))[0] == 200


async def test_an_unexpected_error_is_logged_and_told_as_ours(two: StartTwo, caplog: pytest.LogCaptureFixture) -> None:
    main, one, _ = await two()
    for name, error in (("refusal", RuntimeError("hush")), ("error", RuntimeError("hush"))):
        setattr(main.engine, name, error)
        main.engine.fail_after = 1
        status, text = await ask(one)
        assert status == 500 and "internal error" in text and "hush" not in text
        setattr(main.engine, name, None)
    assert caplog.text.count("RuntimeError: hush") == 2 and "relay" in caplog.text
    await until(lambda: at_rest(main))


async def test_errors_keep_their_class_and_fields(two: StartTwo) -> None:
    main, one, _ = await two()
    main.engine.refusal = InvalidRequest("say less", param="messages[3]", code="unsupported_parameter")
    status, text = await ask(one)
    error = json.loads(text)["error"]
    assert status == 400 and (error["message"], error["param"], error["code"]) == (
        *("say less", "messages[3]"),
        "unsupported_parameter",
    )


# ---- what the worker thinks of the engine's process


async def test_a_silent_engine_is_hung(two: StartTwo, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one, _ = await two()
    monkeypatch.setattr(relay_client, "SILENT_S", -1.0)
    async with one.served.get("/health") as response:
        assert response.status == 503 and "no progress" in await response.text()


async def test_what_follows_the_first_frame_at_once_is_not_lost() -> None:
    old, new = Key(b"1", "t", ""), Key(b"2", "t", "")
    config = ServerConfig()
    start = wire.Start("front1", config, "m", 0, b"s", (old,), (b"a",), False, "info", "text", 1)
    state = wire.State(False, "draining", True)
    ours, theirs = socket.socketpair()
    link = Link(wire.decode_to_worker, 1 << 20)
    link.on_closed = lambda: None
    client = RelayClient(link)
    theirs.send(frames(map(wire.encode, (start, wire.KeysHold((new,)), state)), 1 << 20))
    await link.open(ours)
    assert (await client.start).config == config
    assert client.keys.keys == (new,) and client.keys.admin == (b"a",)
    commons = RemoteCommons(client, asks_for_rate=False, spare_bytes=1)
    assert commons.lifecycle.draining
    link.close()
    theirs.close()


# ---- pieces in order, whoever is slow


class Burst:
    """A handle whose pieces come in bursts at once, through `forward` where it can, as those of the front do."""

    id = "burst"
    prompt_usage = Usage(1, 0)

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._taker: Callable[[Piece], bool] | None = None
        self._waiting: list[Piece] = []
        self._more = asyncio.Event()

    def forward(self, take: Callable[[Piece], bool]) -> None:
        self._taker = take

    def cancel(self) -> None:
        pass

    async def play(self) -> None:
        dice = random.Random(7)
        for number, text in enumerate(self._texts):
            piece = Piece(text, (number,)) if dice.random() < 0.8 else Piece(text, (number, 0))
            if self._waiting or self._taker is None or not self._taker(piece):
                self._waiting.append(piece)
                self._more.set()
            if dice.random() < 0.1:
                await asyncio.sleep(0)
        result = Result("burst", "", (), FinishReason.STOP, self.prompt_usage, RequestMetrics())
        self._waiting.append(Piece("", result=result))
        self._more.set()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        playing = asyncio.create_task(self.play())
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                piece = self._waiting.pop(0)
                yield piece
                if piece.result is not None:
                    await playing
                    return


async def test_pieces_stay_in_order_while_the_pipe_is_full_and_empty(
    two: StartTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_link, "_HIGH_BYTES", 1000)
    main, one, _ = await two()
    texts = [f"{number} " + "x" * (50 if number % 50 else 300_000) for number in range(2000)]
    burst: Any = Burst(texts)

    async def asubmit(*_: Any, **__: Any) -> Any:
        return burst

    main.engine.asubmit = asubmit  # type: ignore[method-assign]
    congested = 0
    link = main.links[0]
    pause = link.pause_writing

    def counted() -> None:
        nonlocal congested
        congested += 1
        pause()

    link.pause_writing = counted  # type: ignore[method-assign]
    status, text = await ask(one, stream=True)
    deltas = [json.loads(event[6:])["choices"][0]["delta"].get("content", "") for event in text.split("\n\n")[:-2]]
    assert status == 200 and "".join(deltas) == "".join(texts) and congested > 0
    await until(lambda: at_rest(main))


async def test_no_piece_overtakes_one_that_waits_for_room(two: StartTwo) -> None:
    main, one, _ = await two()
    link, pieces = main.links[0], asyncio.Queue[Piece]()
    takers: list[Callable[[Piece], bool]] = []

    class Waiting:
        id, prompt_usage = "waiting", None

        def forward(self, take: Callable[[Piece], bool]) -> None:
            takers.append(take)

        async def __aiter__(self) -> AsyncIterator[Piece]:
            while True:
                yield await pieces.get()

    waiting: Any = Waiting()
    streaming = asyncio.create_task(one.relay._stream(1, waiting))
    await asyncio.sleep(0)
    link.pause_writing()
    pieces.put_nowait(Piece("first", (1,)))
    await asyncio.sleep(0.01)
    assert pieces.empty() and not takers[0](Piece("second", (2,)))
    link.resume_writing()
    assert not takers[0](Piece("second", (2,)))  # the first one has not been sent yet
    await asyncio.sleep(0.01)
    assert takers[0](Piece("second", (2,)))
    streaming.cancel()


# ---- frames


async def test_random_bytes_close_the_channel_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    closed = asyncio.Event()
    link = Link(wire.decode_to_main, 1000)
    link.on_message, link.on_closed = lambda _: None, closed.set
    await link.open(ours)
    theirs.send(frames([b"\xc1 nothing"], 1000))
    await asyncio.wait_for(closed.wait(), 2)
    assert link.is_closed
    link.send(wire.Hello())  # to nobody
    theirs.close()


def test_what_a_frame_may_hold_follows_from_a_body() -> None:
    assert wire.max_up_bytes(ServerConfig()) > 4 * ServerConfig().max_body_bytes
    huge = ServerConfig(max_body_bytes=1 << 40, max_inflight_body_bytes=1 << 41)
    assert wire.max_up_bytes(huge) == (1 << 32) - 1


def test_wrong_parameters_of_a_worker_are_a_wrong_frame() -> None:
    message = wire.Submit(1, 0, "a", "p", None, SamplingParams(), False, Slo(), "", 0, None, None)
    body = wire.encode(message)
    assert wire.decode_to_main(body) == message
    with pytest.raises(WireError):
        wire.decode_to_main(body.replace(b"\xa1n\x01", b"\xa1n\x00"))  # n: 0


def test_templates_keep_integers_of_any_size() -> None:
    template = TemplateOptions(variables={"a": [-(1 << 64) + 1, (1 << 64) - 1, 0.5, None, True, "x"]})
    assert wire.decode_template(wire.encode_template(template)) == template
    assert wire.decode_template(wire.encode_template(None)) is None


async def test_what_cannot_be_sent_is_the_requests_fault() -> None:
    ours, theirs = socket.socketpair()
    link = Link(wire.decode_to_worker, 1000)
    link.on_closed = lambda: None
    client = RelayClient(link)
    await link.open(ours)
    engine = RemoteEngine(client, "m", 0)
    for messages in ([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": 1 << 70}]):
        with pytest.raises(InvalidRequest):
            await engine.asubmit(messages=messages)
    assert not client._submissions
    link.close()
    theirs.close()


def test_a_result_with_an_error_travels() -> None:
    inner = Result("a", "b", (1,), FinishReason.STOP, Usage(1, 2), RequestMetrics())
    error = RequestFailed("broke", code="numerical_error")
    result = Result("a", "b", (1,), FinishReason.ERROR, Usage(1, 2), RequestMetrics(), error=error, choices=(inner,))
    found = wire.decode_to_worker(wire.encode(wire.Ended(3, result)))
    assert isinstance(found, wire.Ended) and found.result is not None and found.result.choices == (inner,)
    assert isinstance(found.result.error, RequestFailed) and found.result.error.code == "numerical_error"


def test_every_question_and_message_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in (*wire.ToMain.__args__, *wire.Question.__args__)]
    assert len(set(tags)) == len(tags) and all(isinstance(tag, str) for tag in tags)
    assert msgspec.msgpack.decode(wire.encode(wire.Cancel(1)))["type"] == "Cancel"


# ---- scopes


async def test_a_scope_tells_only_what_ended_it() -> None:
    with pytest.raises(RequestAborted, match="first"):
        async with Scope() as scope:
            assert scope.end(RequestAborted("first")) and not scope.end(RequestAborted("second"))
            await asyncio.sleep(5)
    with pytest.raises(TimeoutError):
        async with Scope():
            raise TimeoutError
    with pytest.raises(ZeroDivisionError):
        async with Scope():
            raise ZeroDivisionError
