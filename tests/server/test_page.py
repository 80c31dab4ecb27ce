"""The page's files and its stream of snapshots, over HTTP: headers, keys, bounds, and nothing of what was asked."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.core.instances import Condition
from hydra_engine.core.outputs import StageSpan, Usage
from hydra_engine.core.prompting import MediaLimits
from hydra_engine.core.reports import StepReport
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from hydra_engine.server.page import events as page
from hydra_engine.server.page.events import MAX_VIEWERS
from hydra_engine.server.state import STATE
from hydra_engine.telemetry.trace import LiveRequest, TraceRing
from tests.server.conftest import Serve, Served, until
from tests.server.stub import StubEngine, example_status, instances_of

STATIC = Path(page.__file__).parent / "static"
SPANS = (
    StageSpan("prefill", 0.1, 0.2, "epd0", "language", 3, 40),
    StageSpan("decode", 0.2, 0.5, "epd0", "language", 2, 9),
)


async def snapshots(served: Served, path: str = "/ui/events", **options: Any) -> AsyncIterator[dict[str, Any]]:
    async with served.get(path, **options) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def first(served: Served, path: str = "/ui/events", **options: Any) -> dict[str, Any]:
    async for snapshot in snapshots(served, path, **options):
        return snapshot
    raise AssertionError("a stream without an event")


async def test_files_come_with_strict_headers_and_are_asked_for_again(served: Served) -> None:
    own = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.*") if "LICENSE" not in path.name]
    samples = ["samples/questions.json", "samples/pictures/stars.png"]
    for path in ("/", *(f"/ui/{name}" for name in [*own, *samples] if not name.endswith(".md"))):
        async with served.get(path) as answer:
            assert answer.status == 200
            assert (
                answer.headers["Cache-Control"] == "no-cache" and answer.headers["X-Content-Type-Options"] == "nosniff"
            )
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            policy = answer.headers["Content-Security-Policy"]
            tag = answer.headers["ETag"]
            body = await answer.read()
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        if "/vendor/" not in path:  # whose addresses stand in comments and messages; the policy lets nothing out
            assert not re.search(rb"https?://(?!www\.w3\.org|127\.0\.0\.1)[a-z]", body), "an outside resource"
        async with served.get(path, headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304 and await answer.read() == b""
        async with served.get(path, headers={"If-None-Match": '"other"'}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("name", ["absent.js", "..%2fpage.py", "%2e%2e%2fapp.py", "static", "."])
async def test_only_the_pages_own_files_are_there(served: Served, name: str) -> None:
    async with served.get("/ui/" + name) as answer:
        assert answer.status == 404 and b"import" not in await answer.read()


async def test_off_with_a_flag(serve: Serve) -> None:
    served = await serve(ui=False)
    for path in ("/", "/ui/app.js", "/ui/events", "/ui/"):
        async with served.get(path) as answer:
            assert answer.status == 404


async def test_files_need_no_key_and_events_do(serve: Serve) -> None:
    served = await serve(api_key=("k",))
    for path, headers, status in (
        ("/", {}, 200),
        ("/ui/app.js", {}, 200),
        ("/ui/events", {}, 401),
        ("/ui/events", {"Authorization": "Bearer x"}, 401),
        ("/ui/nothing.js", {}, 404),
    ):
        async with served.get(path, headers=headers) as answer:
            assert answer.status == status
    assert (await first(served, headers={"Authorization": "Bearer k"}))["state"] == "ok"


async def test_a_snapshot_has_gauges_counts_and_stages(served: Served) -> None:
    engine = served.engine
    status = example_status(language_step=StepReport(True, 9.5, 4, 1, 0, 68), num_decoding=2)
    engine.states = instances_of("E+PD", pd0={"status": status, "restarts": 1, "condition": Condition.SILENT})
    engine.running = [LiveRequest("chatcmpl-1", 3.0, None, 0, "encode", "e0", 1, 2)]
    engine.ring.add("chatcmpl-0", 1.5, SPANS, Usage(600, 9, 576, 0, 2))
    found = await first(served)
    assert (found["model"], found["state"], found["number"]) == ("stub", "ok", 1)
    assert [(i["name"], i["role"], i["condition"], i["restarts"]) for i in found["instances"]] == [
        ("e0", "E", "ready", 0),
        ("pd0", "PD", "silent", 1),
    ]
    shown = found["instances"][1]["status"]
    assert shown["kv_blocks_used"] == 25 and shown["num_decoding"] == 2
    assert shown["language_step"] | {"since_s": 0} == {
        **{"running": True, "since_s": 0, "decodes": 4, "prefills": 1, "images": 0, "tokens": 68}
    }
    assert found["ended"] == [
        {
            "id": "chatcmpl-0",
            "arrival_s": 1.5,
            "spans": [
                ["prefill", 0.1, 0.2, "epd0", "language", 3, 40, None],
                ["decode", 0.2, 0.5, "epd0", "language", 2, 9, None],
            ],
            **{"pictures": 2, "prompt_tokens": 600, "tokens": 9},
        }
    ]
    assert found["running"][0] == {
        **{"id": "chatcmpl-1", "arrival_s": 3.0, "first_token_s": None, "num_tokens": 0, "stage": "encode"},
        **{"instance": "e0", "done": 1, "of": 2},
    }


async def test_a_snapshot_tells_what_can_be_attached(served: Served) -> None:
    served.engine.media_limits = MediaLimits(1, 10, 2, 30)
    found = await first(served)
    assert found["media"] == {"max_images": 1, "max_image_bytes": 10, "max_videos": 2, "max_video_bytes": 30}
    assert found["max_body_bytes"] == ServerConfig().max_body_bytes
    served.engine.state = "loading"
    assert (await first(served))["media"] is None


@pytest.mark.parametrize(
    ("name", "served_name", "title"),
    [
        ("{}/deep/model/", None, "model"),
        ("{}/deep/../deep/model", None, "model"),
        ("{}/a.gguf", None, "a.gguf"),
        ("ORG/NAME", None, "ORG/NAME"),
        ("{}/deep/model", "{}/deep/model", "{}/deep/model"),
    ],
)
def test_the_title_is_the_folder_of_a_path(tmp_path: Path, name: str, served_name: str | None, title: str) -> None:
    (tmp_path / "deep" / "model").mkdir(parents=True)
    (tmp_path / "a.gguf").touch()
    config = ServerConfig(served_model_name=None if served_name is None else served_name.format(tmp_path))
    app = build_app(StubEngine(model_name=name.format(tmp_path)), config)
    assert app[page.TITLE] == title.format(tmp_path)


async def test_a_key_sees_its_own_requests_and_the_admin_key_all(serve: Serve) -> None:
    served = await serve(api_key=("a", "b"), admin_key="all")
    for key in ("a", "b"):
        async with served.post("/v1/completions", {"prompt": "x"}, headers={"X-Api-Key": key}) as answer:
            assert answer.status == 200
    clients = [submission.client for submission in served.engine.submissions]
    for number in range(300):  # more than one event holds
        served.engine.ring.add(f"ended-{number % 2}", 1.0, SPANS, client=clients[number % 2])
    for number, client in enumerate(clients):
        served.engine.running.append(LiveRequest(f"runs-{number}", 2.0, None, 0, "decode", "epd0"))
        served.engine.clients[f"runs-{number}"] = client
    for key, numbers in (("a", {"0"}), ("b", {"1"}), ("all", {"0", "1"})):
        found = await first(served, headers={"Authorization": f"Bearer {key}"})
        assert {request["id"][-1] for request in found["ended"]} == numbers and len(found["ended"]) == 100
        assert {request["id"][-1] for request in found["running"]} == numbers


async def test_only_what_is_new_comes_again_and_after_a_break_what_was_missed(served: Served, monkeypatch: Any) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 0.01)
    engine = served.engine
    engine.ring.add("one", 1.0, SPANS)
    stream = snapshots(served)
    assert [r["id"] for r in (await anext(stream))["ended"]] == ["one"]
    engine.ring.add("two", 2.0, SPANS)
    seen = []
    async for snapshot in stream:
        seen += [r["id"] for r in snapshot["ended"]]
        if seen:
            break
    await stream.aclose()
    assert seen == ["two"]
    engine.ring.add("three", 3.0, SPANS)
    assert [r["id"] for r in (await first(served, "/ui/events?since=2"))["ended"]] == ["three"]
    assert [r["id"] for r in (await first(served, "/ui/events?since=99"))["ended"]] == ["one", "two", "three"]
    for wrong in ("-1", "x", "1e3", "9" * 16, "²"):
        async with served.get("/ui/events", params={"since": wrong}) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == "since"


async def test_what_is_asked_and_answered_is_in_no_event(served: Served) -> None:
    async with served.chat("a secret word", return_metrics=True) as answer:
        assert answer.status == 200
    found = await first(served)
    assert "secret" not in json.dumps(found)
    assert found["outcomes"] == {
        **{"finished": 1, "failed": 0, "cancelled": 0, "limited": 0, "good": 0},
        "verdicts": {"ttft": [0, 0], "tpot": [0, 0]},
    }


async def test_attainment_is_counted_by_limit(served: Served) -> None:
    for limits in ({"ttft_ms": 500}, {"ttft_ms": 100}, {"tpot_ms": 500}):
        async with served.chat(**limits) as answer:
            assert answer.status == 200
    outcomes = (await first(served))["outcomes"]
    assert (outcomes["limited"], outcomes["good"]) == (3, 1)
    assert outcomes["verdicts"] == {"ttft": [1, 2], "tpot": [0, 1]}


async def test_eight_may_watch_and_who_leaves_makes_room(served: Served) -> None:
    streams = [snapshots(served) for _ in range(MAX_VIEWERS)]
    for stream in streams:
        await anext(stream)
    async with served.get("/ui/events") as answer:
        assert answer.status == 503 and "Retry-After" in answer.headers
        assert "watching" in (await answer.json())["error"]["message"]
    await streams.pop().aclose()
    async with asyncio.timeout(30):
        while True:
            async with served.get("/ui/events") as answer:
                if answer.status == 200:
                    break
    for stream in streams:
        await stream.aclose()


async def test_who_does_not_read_is_dropped(serve: Serve, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 0.001)
    monkeypatch.setattr(page, "STALL_S", 0.2)
    served = await serve()
    served.engine.running = [LiveRequest("x" * 128, 0.0, None, 0, "decode", "epd0")] * 100
    sock = socket.create_connection(("127.0.0.1", served.port))
    sock.sendall(b"GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: "slow_reader" in caplog.text, limit_s=30.0)
    sock.close()


async def test_a_loading_server_says_so(served: Served) -> None:
    served.engine.state = "loading"
    found = await first(served)
    assert found["state"] == "loading" and found["instances"] == [] and found["model"] == "stub"


async def test_the_end_of_the_server_ends_the_stream() -> None:
    app = build_app(StubEngine(), ServerConfig())
    listening = await listen(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http, http.get(listening.url + "/ui/events") as answer:
        await answer.content.readuntil(b"\n\n")
        app[STATE].lifecycle.draining = True
        while b'"state":"draining"' not in await answer.content.readuntil(b"\n\n"):
            pass
        closing = asyncio.create_task(listening.close())
        await answer.content.read()  # to its proper end: a cut connection would raise
        await closing


def test_the_ring_numbers_what_it_has_seen() -> None:
    ring = TraceRing(capacity=3)
    assert ring.added_since(0, 10) == (0, [])
    for number in range(5):
        ring.add(f"r{number}", float(number), SPANS)
    number, found = ring.added_since(0, 10)
    assert number == 5 and [id for id, *_ in found] == ["r2", "r3", "r4"]
    assert [id for id, *_ in ring.added_since(3, 10)[1]] == ["r3", "r4"]
    assert [id for id, *_ in ring.added_since(2, 1)[1]] == ["r4"]
    assert ring.added_since(5, 10) == (5, [])
    assert len(ring.added_since(6, 10)[1]) == 3
