"""The one screen of `serve`: what it says, how wide it is, and that its command works as printed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hydra_engine.cli.summary import screen_lines
from hydra_engine.config import EngineConfig, SchedulerConfig, ServerConfig
from hydra_engine.core.reports import LimitSummary
from hydra_engine.core.sampling import SamplingParams
from tests.cli.conftest import KEY, Started
from tests.cli.test_summary import BUDGETS, instance

URL = "http://127.0.0.1:8000"


def screen(*summaries: object, config: EngineConfig | None = None, url: str = URL, **server: object) -> list[str]:
    shown = summaries or (instance("epd0", "EPD", notes=("dtype bfloat16: " + "because " * 12,)),)
    return screen_lines(
        shown, config or EngineConfig(), ServerConfig(**server), SamplingParams(), url=url, model_name="m"
    )  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "hydra-engine" else which(name))


def test_one_screen() -> None:
    lines = screen()
    assert lines[1:] == [
        "  model        m (llava), 7.5 billion parameters, bfloat16",
        "  instance     epd0, role EPD, cpu, 2 threads per lane, ops native-amx, deterministic",
        "  memory       weights 14 GiB, KV cache 512 MiB (8192 tokens), image cache 8 MiB (512 rows)",
        "  limits       4096 tokens a request, 512 tokens a language step, 1152 patches a vision step",
        "  loaded in    1.0 s",
        "  budgets      fixed, as above; --tpot-slo 40ms derives them from step times of this machine",
        "  admission    64 requests at once, 512 accepted; 500 pictures a request, bodies of 64 MiB",
        "  access       this machine only, asks for no key",
        "  note         dtype bfloat16: because because because because because because because because",
        "               because because because because",
        "  page         http://127.0.0.1:8000/",
        "  try it       hydra-engine chat, or:",
        f"curl -s {URL}/v1/chat/completions -H 'Content-Type: application/json' \\",
        """  -d '{"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}'""",
    ]
    assert max(map(len, lines)) <= 100


def test_a_model_that_takes_one_picture_a_request() -> None:
    lines = screen(instance("epd0", "EPD", one_picture=True))
    assert any("; 1 picture a request, bodies" in line for line in lines)


@pytest.mark.parametrize("every", ["0.0.0.0", "[::]"])
def test_the_address_of_a_server_on_every_address_is_one_of_this_machine(every: str) -> None:
    lines = screen(url=f"http://{every}:8010", host=every.strip("[]"))
    page = next(line.split()[1] for line in lines if line.startswith("  page"))
    shown = urlsplit(page)
    host = ip_address(shown.hostname or "")
    assert shown.port == 8010 and host.version == (6 if every == "[::]" else 4) and not host.is_unspecified
    if host.version == 4:
        with socket.socket() as own:
            own.bind((str(host), 0))  # refused for an address that is not of this machine
    assert any(f"chat --url {page.rstrip('/')}," in line for line in lines)
    assert any(f"curl -s {page}v1/" in line for line in lines)


def test_sampling_defaults_and_where_they_are_from() -> None:
    greedy, none = SamplingParams(temperature=0.0, top_k=3, max_tokens=200), SamplingParams()
    line = lambda sampling, **options: [  # noqa: E731
        line
        for line in screen_lines(
            [instance("epd0", "EPD")], EngineConfig(**options), ServerConfig(), sampling, url=URL, model_name="m"
        )
        if line.startswith("  sampling")
    ]
    assert line(none) == []
    assert line(greedy) == ["  sampling     temperature 0, top_k 3, max_tokens 200 by default (generation_config.json)"]
    overridden = {"override_generation_config": '{"top_k": 3}', "generation_config": "none"}
    assert line(SamplingParams(top_k=3), **overridden) == [
        "  sampling     top_k 3 by default (--override-generation-config)"
    ]


def test_with_a_limit_the_budgets_are_those_that_follow() -> None:
    limits = LimitSummary(0.04, 1.0, "saved profile", BUDGETS)
    lines = screen(
        instance("epd0", "EPD", limits=limits), config=EngineConfig(scheduler=SchedulerConfig(tpot_slo=0.04))
    )
    assert sum(line.startswith("  budgets") for line in lines) == 1
    assert not any("--tpot-slo" in line for line in lines)
    assert "  budgets      beside 1 decode (12.3 ms alone): 480 prefill tokens, or vision for the whole step" in lines
    assert 10 <= len(lines) + 1 <= 17


def test_instances_that_are_alike_share_a_line() -> None:
    summaries = [instance("e0", "E"), *(instance(f"pd{i}", "PD") for i in range(8))]
    lines = screen(*summaries)
    assert [line.split()[0] for line in lines[3:6]] == ["instance", "e0", "pd0..pd7"]
    assert 10 <= len(lines) + 1 <= 17 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({}, "this machine only, asks for no key"),
        ({"host": "localhost", "api_key": ("a",)}, "this machine only, asks for an API key"),
        ({"host": "::1", "api_key": ("a", "b", "a")}, "this machine only, asks for one of 2 API keys"),
        ({"host": "0.0.0.0"}, "OPEN TO THE NETWORK, asks for no key"),
        (
            {"host": "10.0.0.1", "api_key": ("a",), "admin_key": "b"},
            "the network, asks for an API key, /admin with its own",
        ),
    ],
)
def test_who_may_ask(server: dict[str, object], words: str) -> None:
    lines = screen(**server)
    assert f"  access       {words}" in lines
    assert any("$HYDRA_API_KEY" in line for line in lines) == ("api_key" in server)
    assert not any("'a'" in line or "'b'" in line for line in lines)


def test_the_program_is_named_so_that_the_shell_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert "  try it       hydra-engine chat, or:" in screen()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "hydra-engine").touch()
    assert "  try it       .venv/bin/hydra-engine chat, or:" in screen()


def test_chat_is_told_where_the_server_is() -> None:
    assert "  try it       hydra-engine chat --url http://127.0.0.1:9, or:" in screen(url="http://127.0.0.1:9")


def test_the_screen_of_a_real_server_and_its_command(server: Started) -> None:
    """Pasted into a shell as it stands, with the key in the variable that it names."""
    title = next(i for i, line in enumerate(server.screen) if line.startswith("hydra-engine "))
    phases = [line.partition(" hydra_engine: ")[2] for line in server.screen[:title]]
    assert phases[:2] == ["starting", "loading weights"] and "warm-up" in phases and len(set(phases)) == len(phases)
    assert server.screen[-1].startswith("ready on http://127.0.0.1:")
    assert 10 <= len(server.screen) - title <= 20 and max(map(len, server.screen[title:])) <= 100
    assert KEY not in "\n".join(server.screen) and "\x1b" not in "\n".join(server.screen)
    begin = next(i for i, line in enumerate(server.screen) if line.startswith("curl "))
    command = "\n".join(server.screen[begin:-1])
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    environment = {**os.environ, "HYDRA_API_KEY": KEY}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
