"""Keys, origins, request ids, HEAD, and requests that are not HTTP."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys

import aiohttp
import pytest

from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from tests.faults.server import with_ledger
from tests.server.conftest import Serve, Served
from tests.server.stub import StubEngine

KEYED = {"Authorization": "Bearer sesame"}


@pytest.fixture
async def keyed(serve: Serve) -> Served:
    return await serve(api_key=("sesame", "öffne"))


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer sesam",
        "Bearer sesamee",
        "Bearer SESAME",
        "Basic sesame",
        "sesame",
        "Bearer ö",
        "Bearer sesame sesame",
        "Bearer " + "x" * 8000,
    ],
)
async def test_everything_but_life_signs_needs_a_key(keyed: Served, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("OPTIONS", "/v1/models"),
        ("DELETE", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/ready"),
        ("GET", "/version"),
        ("GET", "/nowhere"),
        ("GET", "//health"),
        ("GET", "/metrics/"),
        ("GET", "/HEALTH"),
        ("GET", "/health/../v1/models"),
        ("GET", "/livez%2f..%2fmetrics"),
    ):
        async with keyed.http.request(method, keyed.url + path, headers=headers) as response:
            assert response.status == 401, (method, path)
            assert response.headers["WWW-Authenticate"] == "Bearer"
            if method != "HEAD":
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/livez"):
        async with keyed.get(path, headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize("authorization", ["Bearer sesame", "bearer  sesame", "Bearer öffne"])
async def test_any_of_the_keys_opens(keyed: Served, authorization: str) -> None:
    async with keyed.get("/v1/models", headers={"Authorization": authorization}) as response:
        assert response.status == 200


async def test_keys_come_from_the_environment_too(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "one,two")
    served = await serve()
    async with served.get("/v1/models") as response:
        assert response.status == 401
    async with served.get("/v1/models", headers={"Authorization": "Bearer two"}) as response:
        assert response.status == 200


# ---- origins

PREFLIGHT = {
    "Origin": "https://a.example",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_no_origin_is_allowed_by_default(served: Served) -> None:
    async with served.get("/v1/models", headers={"Origin": "https://a.example"}) as response:
        assert not any(name.startswith("Access-Control") for name in response.headers)
    async with served.http.options(served.url + "/v1/models", headers=PREFLIGHT) as response:
        assert response.status == 405


@pytest.mark.parametrize(("allowed", "echo"), [("*", "*"), ("https://a.example", "https://a.example")])
async def test_allowed_origins(serve: Serve, allowed: str, echo: str) -> None:
    served = await serve(allow_origins=(allowed,), api_key=("sesame",))
    async with served.http.options(served.url + "/v1/chat/completions", headers=PREFLIGHT) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == echo
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert "Access-Control-Allow-Credentials" not in response.headers
    for key, status in (({}, 401), (KEYED, 200)):  # errors and streams carry it too
        headers = {"Origin": "https://a.example", **key}
        async with served.post("/v1/completions", {"prompt": "a", "stream": True}, headers=headers) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (status, echo)


async def test_other_origins_are_not_named(serve: Serve) -> None:
    served = await serve(allow_origins=("https://b.example",))
    async with served.get("/v1/models", headers={"Origin": "https://a.example"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers
        assert response.headers["Vary"] == "Origin"


# ---- ids, HEAD, logs


async def test_request_ids_are_echoed_or_made(served: Served) -> None:
    async with served.get("/version", headers={"X-Request-Id": "abc-1.2:3_x"}) as response:
        assert response.headers["X-Request-Id"] == "abc-1.2:3_x"
    for odd in ("", "a b", "x" * 129, "ä", "<script>"):
        async with served.get("/nowhere", headers={"X-Request-Id": odd}) as response:
            assert len(response.headers["X-Request-Id"]) == 32
    async with served.chat(request_id="mine") as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "chatcmpl-mine"
    assert served.engine.submissions[0].request_id == "chatcmpl-mine"


async def test_head_and_version(served: Served) -> None:
    for path in ("/health", "/livez", "/metrics", "/version", "/v1/models"):
        async with served.http.head(served.url + path) as response:
            assert response.status == 200
            assert int(response.headers["Content-Length"]) > 0
            assert await response.read() == b""
            assert response.headers["Server"].startswith("hydra-engine/")
            assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_servers_of_tests_show_the_ledger() -> None:
    listening = await listen(with_ledger(build_app)(StubEngine(), ServerConfig()), "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http, http.get(f"{listening.url}/debug/ledger") as response:
        report = await response.json()
    await listening.close()
    assert report["at_rest"] is True and report["kv_blocks_total"] == 8


async def test_one_log_line_per_request(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(enable_log_requests=True)
    with caplog.at_level(logging.INFO, "hydra_engine.server"):
        async with served.chat("secret words", request_id="r9") as response:
            assert response.status == 200
        async with served.get("/no%0awhere/secret") as response:
            assert response.status == 404
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("server.loggers")]
    assert len(lines) == 2
    assert lines[0].startswith("r9 POST /v1/chat/completions 200 ")
    assert " GET unknown 404 " in lines[1]
    assert "secret" not in caplog.text


# ---- not HTTP


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Header\r\n\r\n",
    ],
    ids=range(9),
)
async def test_malformed_http_is_refused_in_our_words(
    served: Served, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.") and head.split()[1] == b"400"
    assert b'"type":"invalid_request_error"' in body
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_bad_chunks_end_the_request_only(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    writer.write(head + b"\r\nzz\r\n{}\r\n0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert answer == b"" or answer.split()[1] == b"400"
    async with served.get("/health") as response:
        assert response.status == 200


def test_the_server_imports_no_torch() -> None:
    code = "import sys, hydra_engine.server.runner; assert not {'torch', 'transformers', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
