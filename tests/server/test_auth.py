"""Authentication: accepted keys, the clients they stand for, and what no answer or log says of a key."""

from __future__ import annotations

import ast
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.cluster import spawn
from hydra_engine.config import SECRET_VARIABLES, ServerConfig
from hydra_engine.errors import ConfigError
from hydra_engine.server import runner
from hydra_engine.server.app import build_app
from hydra_engine.server.http.access_control import KEYS, MAX_KEY_CHARS, MAX_KEYS, KeyRing
from hydra_engine.server.http.listening import listen
from tests.server.conftest import Serve, chat_body
from tests.server.stub import StubEngine
from tests.server.test_runner import ServerProcess, port, processes  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]


def key_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def ring(path: str | None = None, *keys: str, admin: str | None = None, secret: bytes = b"s") -> KeyRing:
    return KeyRing(keys, path, admin, secret)


# ---- two headers


async def test_anthropics_header_opens_too(serve: Serve) -> None:
    served = await serve(api_key=("sesame",))
    for headers, status in (
        ({"x-api-key": "sesame"}, 200),
        ({"X-API-KEY": " sesame "}, 200),
        ({"x-api-key": "sesam"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "sesam", "Authorization": "Bearer sesame"}, 200),
        ({"x-api-key": "sesame", "Authorization": "Bearer none"}, 200),
        ({"x-api-key": "Bearer sesame"}, 401),
    ):
        async with served.get("/v1/models", headers=headers) as response:
            assert response.status == status, headers


# ---- files of keys


def test_a_file_has_keys_and_names(tmp_path: Path) -> None:
    path = key_file(tmp_path, "# who\n\n  alone-key  \nalice: a-1\nalice:a-2\nbob:with:colons\n")
    keys = ring(path, "given")
    names = {key.name for key in keys.keys}
    assert names == {"", "alice", "bob"} and len(keys.keys) == 5
    tenants = [key.tenant for key in keys.keys]
    # Both keys of one name are one tenant, all others are one each.
    assert len(set(tenants)) == 4
    assert set(tenants).isdisjoint(key.tenant for key in ring(path, "given", secret=b"other").keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("good\nalice:\n", "line 2"),
        ("two words\n", "line 1"),
        ("a b:key-hush\n", "line 1"),
        (":key-hush\n", "line 1"),
        ("x" * (MAX_KEY_CHARS + 1), "at most 512 characters"),
        ("\n".join(f"k{i}" for i in range(MAX_KEYS + 1)), "at most 1024"),
        ("a" * (1 << 20) + "\n", "more than 1048576"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_its_keys(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ring(key_file(tmp_path, text))
    assert "hush" not in caught.value.message and str(tmp_path) not in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in (("missing", "no such file"), ("", "directory"), ("binary", "UTF-8")):
        with pytest.raises(ConfigError, match=rf"(?i){words}") as caught:
            ring(str(tmp_path / name))
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o660, True)])
def test_a_file_that_others_may_open_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    assert ring(key_file(tmp_path, "hush-key\n", mode)).requires_key
    assert ("chmod 600" in caplog.text) is warned and "hush" not in caplog.text


async def test_a_file_is_read_again(serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "alice:old-key\n")
    app = build_app(StubEngine(), ServerConfig(api_key_file=path))
    keys = app[KEYS]
    tenant = keys.keys[0].tenant
    key_file(tmp_path, "alice:new-key\n")
    keys.reload()
    assert [key.tenant for key in keys.keys] == [tenant]  # a changed key does not lose its caches
    for broken in ("", "alice:\n"):
        key_file(tmp_path, broken)
        keys.reload()
        assert len(keys.keys) == 1 and "stay as they were" in caplog.text
    os.unlink(path)
    keys.reload()
    assert keys.requires_key and len(keys.keys) == 1
    assert "new-key" not in caplog.text and str(tmp_path) not in caplog.text


def test_sighup_reads_the_file_again(
    port: int,  # noqa: F811
    processes: list[ServerProcess],  # noqa: F811
    tmp_path: Path,
) -> None:
    path = key_file(tmp_path, "old-key\n")
    server = ServerProcess(port, config={"api_key_file": path})
    processes.append(server)
    server.wait_until("/health", 200)
    status = lambda key: _status(server.url + "/v1/models", key)  # noqa: E731
    assert (status("old-key"), status("new-key")) == (200, 401)
    key_file(tmp_path, "new-key\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_until("/health", 200)
    for _ in range(200):
        if status("new-key") == 200:
            break
    assert (status("old-key"), status("new-key")) == (401, 200)
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def _status(url: str, key: str) -> int:
    request = urllib.request.Request(url, headers={"X-Api-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_the_admin_key_is_no_api_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must not be one of"):
        ring(key_file(tmp_path, "alice:same\n"), admin="same")


# ---- what clients learn about keys


async def test_names_are_in_logs_and_metrics_and_keys_are_nowhere(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, "alice:hush-a\nhush-b\n")
    served = await serve(api_key_file=path, api_key=("hush-c",), admin_key="hush-d", enable_log_requests=True)
    with caplog.at_level(logging.DEBUG):
        for key, status in (("hush-a", 200), ("hush-b", 200), ("hush-wrong", 401)):
            async with served.post("/v1/chat/completions", chat_body(), headers={"X-Api-Key": key}) as response:
                assert response.status == status and "hush" not in str(response.headers) + await response.text()
    for key, shown in (("hush-a", True), ("hush-b", False), ("hush-d", True)):
        async with served.get("/metrics", headers={"Authorization": f"Bearer {key}"}) as response:
            page = await response.text()
        assert ('client="alice"' in page) is shown and "hush" not in page
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("server.loggers")]
    assert [line.endswith(" for alice") for line in lines] == [True, False, False]
    assert "hush" not in caplog.text
    config = ServerConfig(api_key=("hush-c",), admin_key="hush-d")
    assert "hush" not in repr(config) and "hush" not in repr(ring(path, "hush-c", admin="hush-d"))


def test_processes_of_instances_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "hush")
    code = f"import os, sys; sys.exit(3 if set({sorted(SECRET_VARIABLES)!r}) & set(os.environ) else 4)"
    one, other = socket.socketpair()
    with one, other:
        process: subprocess.Popen[Any] = spawn.start_python([sys.executable, "-c", code], one, other)
        assert process.wait(30) == 4


def test_a_process_that_starts_is_not_interrupted_with_its_group() -> None:
    """A new process blocks the interrupt until it ignores it itself, and from then on blocks nothing for its
    children."""
    interrupted = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    ignoring = (
        "import signal, sys\nfrom hydra_engine.cluster import process\n"
        "def load(): sys.exit(4 if signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 3)\n"
        "process.main(load)"
    )
    one, other = socket.socketpair()
    with one, other:
        for code, status in ((interrupted, 0), (ignoring, 4)):
            process: subprocess.Popen[Any] = spawn.start_python([sys.executable, "-c", code], one, other)
            assert process.wait(30) == status


@pytest.mark.parametrize(
    ("host", "options", "words"),
    [
        ("127.0.0.1", {}, None),
        ("0.0.0.0", {}, "asks for no API key"),
        ("0.0.0.0", {"api_key_file": True}, None),
        ("127.0.0.1", {"api_key": ("hush",)}, "on the command line"),
    ],
)
async def test_an_open_door_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, options: dict[str, Any], words: str | None
) -> None:
    if "api_key_file" in options:
        options = {"api_key_file": key_file(tmp_path, "some-key\n")}
    config = ServerConfig(host=host, port=0, **options)
    app = build_app(StubEngine(), config)
    listening = await listen(app, config.host, config.port)
    runner._warn_of_exposure(listening, app[KEYS], config)
    await listening.close()
    assert (words in caplog.text if words else caplog.text == "") and "hush" not in caplog.text


async def test_keys_of_the_environment_are_not_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "one, two")
    config = ServerConfig()
    app = build_app(StubEngine(), config)
    assert len(app[KEYS].keys) == 2
    listening = await listen(app, "0.0.0.0", 0)
    runner._warn_of_exposure(listening, app[KEYS], config)
    await listening.close()
    assert caplog.text == ""


# ---- names that are made to point here


@pytest.mark.parametrize(
    ("host", "origin", "options", "status"),
    [
        ("evil.example:8000", "http://evil.example:8000", {}, 400),
        ("EVIL.example", "http://evil.EXAMPLE", {}, 400),
        ("evil.localhost.example", "http://evil.localhost.example", {}, 400),
        ("evil.example", None, {}, 400),
        ("evil.example.", None, {}, 400),
        ("evil.example", "https://other.example", {}, 400),
        ("localhost", "https://other.example", {}, 200),  # another origin: the browser shows it nothing
        ("box:8000", None, {}, 200),
        ("localhost:8000", "http://localhost:8000", {}, 200),
        ("app.localhost", "http://app.localhost", {}, 200),
        ("box.local", "http://box.local", {}, 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", {}, 200),
        ("[::1]:8000", "http://[::1]:8000", {}, 200),
        ("chat.example", "https://chat.example", {"allow_origins": ("https://chat.example",)}, 200),
        ("evil.example", "http://evil.example", {"allow_origins": ("*",)}, 200),
        ("evil.example", "http://evil.example", {"host": "0.0.0.0"}, 200),
        ("[", None, {}, 200),
    ],
)
async def test_web_sites_cannot_rebind_their_name_to_a_server_without_keys(
    serve: Serve, host: str, origin: str | None, options: dict[str, Any], status: int
) -> None:
    served = await serve(**options)
    headers = {"Host": host} | ({"Origin": origin} if origin is not None else {})
    async with served.post("/v1/chat/completions", chat_body(), headers=headers) as response:
        assert response.status == status, await response.text()
    for path in ("/v1/models", "/metrics", "/"):  # a page's own GET has no Origin
        async with served.get(path, headers=headers) as response:
            assert response.status == status, await response.text()


async def test_with_keys_the_name_does_not_matter(serve: Serve) -> None:
    served = await serve(api_key=("sesame",))
    headers = {"Host": "chat.example", "Origin": "https://chat.example", "X-Api-Key": "sesame"}
    async with served.post("/v1/chat/completions", chat_body(), headers=headers) as response:
        assert response.status == 200


# ---- one place for salts and clients


def test_every_submission_of_the_server_takes_its_salt_and_its_client_from_one_place() -> None:
    seen = 0
    for path in (ROOT / "hydra_engine" / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "GenerationCall":
                continue
            seen += 1
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for name, maker in (("cache_salt", "cache_salt"), ("client", "client_of")):
                value = given.get(name)
                assert isinstance(value, ast.Call) and getattr(value.func, "id", "") == maker, (
                    f"{path.name}:{node.lineno} makes a call with a {name} of its own"
                )
    assert seen >= 3


async def test_salts_are_a_tenants_own(serve: Serve, tmp_path: Path) -> None:
    path = key_file(tmp_path, "alice:a-1\nalice:a-2\nbob:b-1\n")

    async def salts(**options: Any) -> list[str]:
        served = await serve(api_key_file=path, **options)
        for key in ("a-1", "a-2", "b-1"):
            for fields in ({}, {"cache_salt": "x"}):
                for route, prompt in (("chat/completions", chat_body()), ("completions", {"prompt": "a"})):
                    async with served.post(f"/v1/{route}", prompt | fields, headers={"X-Api-Key": key}) as response:
                        assert response.status == 200
        return [submission.cache_salt for submission in served.engine.submissions]

    isolated = await salts()
    assert isolated[:4] == isolated[4:8] and isolated[0] == isolated[1] and isolated[2] == isolated[3]
    assert len({*isolated}) == 4 and all(len(salt) == 64 for salt in isolated)
    assert not {*isolated} & {*await salts()}  # of another process
    assert await salts(share_caches=True) == ["", "", "x", "x"] * 3


async def test_keys_of_one_name_are_one_client(serve: Serve, tmp_path: Path) -> None:
    served = await serve(api_key_file=key_file(tmp_path, "alice:a-1\nalice:a-2\nbob:b-1\n"))
    for key in ("a-1", "a-2", "b-1"):
        async with served.post("/v1/completions", {"prompt": "a"}, headers={"X-Api-Key": key}) as response:
            assert response.status == 200
    one, same, other = [submission.client for submission in served.engine.submissions]
    assert one == same != other and one


async def test_without_keys_there_is_one_tenant(serve: Serve) -> None:
    served = await serve()
    for fields in ({}, {"cache_salt": "x"}):
        async with served.chat(**fields) as response:
            assert response.status == 200
    assert [submission.cache_salt for submission in served.engine.submissions] == ["", "x"]
