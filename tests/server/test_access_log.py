"""The access log: one line per request with what an operator needs, whatever a client sends, and nothing of what was
asked.
"""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine import log
from hydra_engine.config import ServerConfig
from hydra_engine.errors import ConfigError, Unavailable
from hydra_engine.server import loggers
from tests.server.conftest import Serve, Served, chat_body, until
from tests.server.test_cancel import request_bytes

ROOT = Path(__file__).parents[2]

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """JSON lines so far."""
    stream = io.StringIO()
    loggers.enable_access_log("json")
    (handler,) = loggers.access_log.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    loggers.access_log.handlers.clear()
    loggers.access_log.propagate = True
    loggers.access_log.setLevel(logging.NOTSET)


def ask(served: Served, headers: dict[str, str], text: str, **fields: Any) -> Any:
    return served.post("/v1/chat/completions", chat_body(text, **fields), headers=headers)


async def test_a_line_says_who_asked_for_how_much(serve: Serve, lines: Lines, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("alice:hush-a\nhush-b\n")
    served = await serve(access_log="json", api_key_file=str(keys))
    async with ask(served, {"X-Api-Key": "hush-a", "X-Request-Id": "mine.1"}, "one two three") as response:
        size = len(await response.read())
    async with ask(served, {"X-Api-Key": "hush-b"}, "four five", stream=True) as response:
        streamed = len(await response.read())
    async with served.chat("six") as response:
        assert response.status == 401
    whole, stream, refused = lines()
    assert whole["request_id"] == "mine.1" and whole["client"] == "alice" and whole["status"] == 200
    assert (whole["method"], whole["route"]) == ("POST", "/v1/chat/completions")
    assert whole["bytes_out"] == size and whole["bytes_in"] > 50
    assert (whole["prompt_tokens"], whole["completion_tokens"], whole["finish_reason"]) == (3, 3, "stop")
    assert whole["ttft_s"] == 0.2 and 0 < whole["duration_s"] < 10 and "error_code" not in whole
    assert whole["time"].endswith("Z") and whole["level"] == "info" and whole["logger"] == "hydra_engine.access"
    assert stream["client"] == "127.0.0.1" and stream["bytes_out"] == streamed and stream["completion_tokens"] == 2
    assert (refused["status"], refused["error_code"], refused["bytes_in"]) == (401, "invalid_api_key", 0)
    assert "ttft_s" not in refused and "finish_reason" not in refused
    assert not any(secret in json.dumps(lines()) for secret in ("hush", "four", "six"))


async def test_health_probes_leave_no_line(serve: Serve, lines: Lines, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(access_log="json", enable_log_requests=True)
    caplog.set_level(logging.INFO, "hydra_engine.server.loggers")
    caplog.handler.setLevel(logging.INFO)
    logging.getLogger("hydra_engine.server.loggers").addHandler(caplog.handler)
    for path in ("/livez", "/health", "/ready", "/ping", "/version"):
        async with served.http.get(served.url + path) as response:
            assert response.status == 200
    assert [line["route"] for line in lines()] == ["/version"]
    logging.getLogger("hydra_engine.server.loggers").removeHandler(caplog.handler)
    assert {record.args[2] for record in caplog.records if record.name == "hydra_engine.server.loggers"} == {"/version"}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_are_one_line(serve: Serve, lines: Lines, stream: bool) -> None:
    served = await serve(access_log="json")
    async with served.chat("a b c", n=2, stream=stream) as response:
        await response.read()
    (line,) = lines()
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (3, 6, "stop")


async def test_a_line_for_every_way_to_end(serve: Serve, lines: Lines) -> None:
    served = await serve(access_log="json", max_body_bytes=1000)
    served.engine.refusal = Unavailable("full", code="overloaded")
    async with served.chat() as response:
        assert response.status == 503
    served.engine.refusal = None
    async with served.chat("x" * 2000) as response:
        assert response.status == 413
    async with served.get("/no/such/place") as response:
        assert response.status == 404
    served.engine.fail_after, served.engine.error = 1, Unavailable("lost", code="instance_lost")
    async with served.chat(stream=True) as response:
        assert response.status == 200
        await response.read()
    served.engine.error = None
    served.engine.prefill_s = 600
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_bytes(stream=False))
    await until(lambda: len(served.engine.submissions) == 2)
    writer.transport.abort()
    await until(lambda: len(lines()) == 5)
    del reader
    assert [(line["status"], line.get("error_code")) for line in lines()] == [
        (503, "overloaded"),
        (413, "payload_too_large"),
        (404, "not_found"),
        (200, "instance_lost"),
        (499, None),
    ]
    assert lines()[2]["route"] == "unknown" and "such" not in json.dumps(lines())


async def test_nothing_a_client_sends_breaks_a_line(serve: Serve, lines: Lines) -> None:
    served = await serve(access_log="json")
    for method, path, headers in (
        ("PROPFIND", "/v1/models/%22%0a%7b", {"X-Request-Id": 'a"b\\c'}),
        ("GET", "/v1/models/%e2%80%a8%ed%a0%80", {"X-Request-Id": "x" * 200, "User-Agent": '"\\'}),
        ("!#$%", "/%00%0d%0aforged", {"X-Api-Key": "\udcff"}),
    ):
        raw = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        raw += [f"{name}: {value}" for name, value in headers.items()]
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write("\r\n".join([*raw, "", ""]).encode("utf-8", "surrogateescape"))
        await reader.read()
        writer.close()
    assert len(lines()) >= 2
    for line in lines():
        assert line["route"] in ("unknown", "/v1/models/{model}") and len(line["method"]) <= 16
        assert len(line["request_id"]) == 32


async def test_text_is_the_one_line_of_the_log(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(access_log="text", enable_log_requests=True)
    with caplog.at_level(logging.INFO, "hydra_engine"):
        async with served.chat("one two") as response:
            await response.read()
    (text,) = [record.getMessage() for record in caplog.records if "/v1/chat/completions" in record.getMessage()]
    assert "method=POST route=/v1/chat/completions status=200" in text and "completion_tokens=2" in text
    assert "one" not in text


async def test_off_by_default(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with served.chat() as response:
            await response.read()
    assert not [record for record in caplog.records if record.name == "hydra_engine.access"]
    with pytest.raises(ConfigError, match="access_log must be off, text or json"):
        ServerConfig(access_log="xml")


def test_json_is_json_whatever_is_logged() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log.JsonFormatter("p0"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("no such model %s", 'x"\n\u2028\x1b[2J\ud800\\ 猫')
    logger.info("%s", "ignored", extra={log.FACTS: {"status": 200, "client": "a\udcffb", "ttft_s": 0.25}})
    try:
        raise ValueError("bad\nline")
    except ValueError:
        logger.exception("it failed")
    assert stream.getvalue().isascii() and len(stream.getvalue().splitlines()) == 3
    first, facts, failed = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == 'no such model x"\n\u2028\x1b[2J?\\ 猫' and first["instance"] == "p0"
    assert (facts["status"], facts["client"], facts["ttft_s"]) == (200, "a?b", 0.25) and "message" not in facts
    assert "ValueError: bad" in failed["exception"] and failed["level"] == "error"


def test_every_line_of_a_server_is_json_where_that_is_asked_for() -> None:
    """Lines from the first to the last, also those of the instances."""
    command = [sys.executable, "-m", "hydra_engine", "serve", "demo", "--port", "0", "--threads", "1"]
    flags = ["--log-format", "json", "--log-level", "info", "--access-log", "json", "--enable-log-requests"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if lines[-1].get("message", "").startswith("ready on http") and lines[-1]["logger"] == "hydra_engine":
            break
    url = lines[-1]["message"].removeprefix("ready on ")
    body = {"model": "demo", "prompt": "Hush now", "max_tokens": 4, "ignore_eos": True}
    asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=30) as response:
        assert response.status == 200
    process.terminate()
    lines += [json.loads(line) for line in process.stderr]
    process.stderr.close()
    assert process.wait(30) == 0
    (access_line,) = [line for line in lines if line["logger"] == "hydra_engine.access"]
    assert access_line["route"] == "/v1/completions" and access_line["completion_tokens"] == 4
    assert "Hush" not in json.dumps(lines)


@pytest.mark.slow
def test_a_standard_error_that_nobody_reads_stops_nothing() -> None:
    """Requests are answered and a signal ends the server although start screen and log lines fill the pipe."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "hydra_engine", "serve", "demo", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen([*command, "--access-log", "json", "--log-level", "info"], stderr=into, cwd=ROOT)
    os.close(into)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        statuses = []
        limit = time.monotonic() + 120
        while len(statuses) < 300 and process.poll() is None and time.monotonic() < limit:
            try:
                connection.request("GET", "/version" if statuses else "/health")
                response = connection.getresponse()
                response.read()
            except ConnectionRefusedError:  # it has not begun
                connection.close()
                time.sleep(0.05)
                continue
            if statuses or response.status == 200:
                statuses.append(response.status)
            else:
                time.sleep(0.05)
        connection.close()
        assert statuses == [200] * 300
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        with open(out, "rb") as pipe:
            written = pipe.read()
    assert len(written) > 3700  # it was full: not one more line fits
