"""Loads against a small OpenAI-like server: what is sent, when, and what is kept of the answers."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from bench.serve.page import figures, growth, readings
from bench.serve.servers import Server, running
from hydra_engine.errors import ConfigError, RequestFailed
from hydra_terminal.load import command
from hydra_terminal.load.loops import closed_loop, open_loop
from hydra_terminal.load.target import ServerFailed, Target
from hydra_terminal.load.workload import Spec


class Stub:
    """Answers a question that is a number with so many tokens, one event each; `fail` with 503, `cut` by closing early,
    `hang` never. Runs on a thread with a loop of its own."""

    def __init__(self, owned_by: str) -> None:
        self._owned_by = owned_by
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.under_way = self.max_under_way = self.pages = 0
        self.url = ""

    def start(self) -> None:
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "stub", "owned_by": self._owned_by}]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.pages += 1
        text = f'# TYPE steps counter\nsteps_total{{lane="a"}} {self.pages}\nsteps_total{{lane="b"}} 10\nused 0.5\n'
        return web.Response(text=text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        word = body["messages"][0]["content"][-1]["text"]
        if word == "fail":
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        try:
            if word == "hang":
                await asyncio.sleep(60)
            for index in range(1 if word == "cut" else int(word)):
                await response.write(_event({"choices": [{"delta": {"content": "x"}}], "usage": _usage(index + 1)}))
                await asyncio.sleep(0.01)
            if word != "cut":
                closing = {"choices": [{"delta": {}, "finish_reason": "length"}], "metrics": {"e2e_s": 1.0}}
                await response.write(_event(closing) + b"data: [DONE]\n\n")
        finally:
            self.under_way -= 1
        return response


def _usage(tokens: int) -> dict:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 4}}


def _event(document: dict) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub("vllm")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def target(stub: Stub) -> Iterator[Target]:
    with running(Server("stub", base_url=stub.url + "/v1/", key="secret")) as found:
        yield found


def spec(question: str, max_tokens: int = 3) -> Spec:
    return Spec("text", (), question, max_tokens)


def test_a_running_server_is_asked_what_it_serves(stub: Stub, target: Target) -> None:
    assert target == Target("stub", stub.url, "stub", "vllm", {"Authorization": "Bearer secret"})
    assert stub.keys == ["Bearer secret"]


def test_an_open_loop_sends_at_fixed_times_and_keeps_every_token(stub: Stub, target: Target) -> None:
    run = open_loop(target, [spec("3"), Spec("pope", ((32, 24, 1),), "3", 3), spec("3")], [0.0, 0.1, 0.2])
    assert [record.planned_s for record in run.records] == [0.0, 0.1, 0.2]
    assert [record.kind for record in run.records] == ["text", "pope", "text"]
    for record in run.records:
        assert record.ok and record.counts == (1, 1, 1) and record.metrics == {"e2e_s": 1.0}
        assert (record.prompt_tokens, record.cached_tokens, record.wanted_tokens) == (7, 4, 3)
        assert record.planned_s <= record.sent_s <= record.stamps[0] <= record.stamps[-1] <= record.end_s
        assert record.ttft_s == record.stamps[0] - record.planned_s
    assert [len(body["messages"][0]["content"]) for body in stub.asked] == [1, 2, 1]
    assert all(body["model"] == "stub" and body["ignore_eos"] for body in stub.asked)


def test_the_command_sends_a_load_and_prints_its_table(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    questions = iter(["3", "2", "3", "3"])  # one answer is short; the last question is the one before the load
    monkeypatch.setattr(command, "sentence", lambda *_: next(questions))
    path = tmp_path / "load.json"
    sizes = ("--num-prompts", "3", "--output-len", "3", "--images", "2", "--image-size", "40x30")
    given = ["--url", stub.url, *sizes, "--max-concurrency", "2", "--api-key", "secret", "--output"]
    with pytest.raises(ConfigError, match="there is no folder"):
        command.run([*given, str(tmp_path / "no" / "load.json")])
    assert command.run([*given, str(path)]) == 0
    figures = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if ":" in line)
    assert figures["Successful requests:"] == "3" and figures["Answers shorter than asked:"] == "1"
    assert (figures["Total input tokens:"], figures["Total generated tokens:"]) == ("21", "8")
    assert 10 <= float(figures["Median ITL (ms):"]) < 100 and float(figures["Mean TTFT (ms):"]) > 0
    kinds = [part["type"] for part in stub.asked[1]["messages"][0]["content"]]
    assert stub.max_under_way == 2 and kinds == ["image_url", "image_url", "text"]
    document = json.loads(path.read_text())
    assert len(document["records"]) == 3 and document["load"]["image_size"] == [40, 30]
    assert "secret" not in path.read_text() and stub.keys == ["Bearer secret"]


@pytest.mark.slow
def test_the_command_names_what_failed(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["3", "fail", "3", "3", "fail"])
    monkeypatch.setattr(command, "sentence", lambda *_: next(questions))
    assert command.run(["--url", stub.url, "--num-prompts", "2", "--output-len", "3", "--request-rate", "50"]) == 1
    assert '1 of 2 failed; the first one: HTTP 503: {"error": {"message": "full"}}' in capsys.readouterr().err
    with pytest.raises(RequestFailed, match="the first request failed, so no load was sent: HTTP 503"):
        command.run(["--url", stub.url, "--num-prompts", "1", "--output-len", "3"])


@pytest.mark.slow
def test_what_goes_wrong_is_counted_and_named(target: Target) -> None:
    specs = [spec("fail"), spec("cut"), spec("2"), spec("hang"), spec("3")]
    run = open_loop(target, specs, [0.0] * 5, drain_s=0.5)
    fail, cut, short, hang, fine = run.records
    assert fail.error is not None and fail.error.startswith("HTTP 503") and "full" in fail.error
    assert cut.error == "the stream did not end with [DONE]" and cut.num_tokens == 1
    assert short.error == "2 tokens instead of 3"
    assert hang.error == "not finished when the run ended" and hang.ttft_s is None
    assert fine.ok
    assert run.document()["errors"] == 4 and json.dumps(run.document())


def test_a_closed_loop_keeps_so_many_under_way(stub: Stub, target: Target) -> None:
    run = closed_loop(target, [spec("3")] * 8, 3, with_pages=True)
    assert len(run.records) == 8 and all(record.ok for record in run.records)
    assert stub.max_under_way == 3
    assert all(record.planned_s == record.sent_s for record in run.records)
    assert growth(run.pages, "steps_total") == stub.pages - 1 and growth(run.pages, "absent_total") is None
    assert readings(run.pages, "used") == [0.5] * len(run.pages)


@pytest.mark.slow
def test_a_closed_loop_leaves_out_what_was_under_way_at_its_end(target: Target) -> None:
    run = closed_loop(target, [spec("3"), spec("hang")], 2, seconds=0.5)
    assert [record.index for record in run.records] == [0]


def test_a_page_is_summed_over_labels() -> None:
    assert figures('a_total{x="1"} 2\na_total{x="2"} 3\n') == {"a_total": 5.0}


def test_a_server_that_cannot_be_asked_is_an_error() -> None:
    with pytest.raises(ServerFailed, match="does not answer"), running(Server("gone", base_url="http://127.0.0.1:9")):
        pass


def test_a_server_that_ends_early_is_an_error_with_its_log() -> None:
    command = (sys.executable, "-c", "print('no such flag'); raise SystemExit(3)")
    with pytest.raises(ServerFailed, match=r"(?s)ended with code 3.*no such flag"), running(Server("bad", command)):
        pass


def test_a_started_server_is_ended(stub: Stub, tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    script = (
        "import pathlib, signal, sys, time\n"
        f"def end(*_):\n    pathlib.Path({str(mark)!r}).touch(); sys.exit()\n"
        f"signal.signal(signal.SIGTERM, end)\nprint('ready on {stub.url}', flush=True)\ntime.sleep(60)\n"
    )
    with running(Server("started", (sys.executable, "-c", script))) as target:
        assert target.base_url == stub.url and not mark.exists()
    assert mark.exists()
