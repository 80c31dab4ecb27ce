"""`pull` fetches what `serve` needs, once, and says what it takes; `list` shows what is there, whole or not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hydra_engine.core.units import size
from tests.cli.conftest import ROOT, Here
from tests.config.hub import COMMIT, Hub, fill_cache
from tests.models.specs.test_model_files import text as gguf_text

DEMO = ROOT / "hydra_engine" / "demo" / "model"
NAME, GGUF = "acme/tiny", "acme/tiny-GGUF"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir()}
    with Hub(NAME, files | {"pytorch_model.bin": b"not needed"}).serving() as served:
        served.answer_here(monkeypatch)
        yield served


def test_pull_fetches_once_and_says_how_to_go_on(here: Here, hub: Hub, cache: Path) -> None:
    done = here("pull", NAME)
    folder = cache / "models--acme--tiny" / "snapshots" / COMMIT
    kept = sum(path.stat().st_size for path in DEMO.iterdir() if path.name != "README.md")
    assert done.returncode == 0
    assert done.stdout == (
        f"{NAME} is in the Hugging Face cache: {kept / 2**20:.1f} MiB in {folder}\ngo on: hydra-engine run {NAME}\n"
    )
    assert not [line for line in hub.asked if line.endswith(".bin")]
    hub.asked.clear()
    again = here("pull", NAME, "--revision", "main")
    assert again.stdout.startswith(f"{NAME} is there already: ") and not hub.asked
    assert again.stdout.endswith(f"hydra-engine run {NAME} --revision main\n")
    missing = here("pull", "acme/other")
    assert (
        missing.returncode == 3
        and "'acme/other' cannot be downloaded: the Hugging Face Hub has no such" in missing.stderr
    )


def test_pull_of_what_cannot_be_served_fetches_no_weights(here: Here, hub: Hub, cache: Path) -> None:
    hub.files["config.json"] = b'{"architectures": ["BertModel"]}'
    done = here("pull", NAME)
    assert done.returncode == 3 and "architecture 'BertModel' has no native implementation" in done.stderr
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


def test_pull_says_first_that_the_disk_has_too_little_room(
    here: Here, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sum(path.stat().st_size for path in DEMO.iterdir() if path.suffix in (".json", ".jinja"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": small + 1000}))
    done = here("pull", NAME)
    assert done.returncode == 4 and f"'{NAME}' needs " in done.stderr and "set HF_HOME to a folder of" in done.stderr
    assert not [line for line in hub.asked if line.endswith(".safetensors")]


def test_pull_refuses_what_is_not_fetched_and_asks_nobody(here: Here, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for model, code, said in (
        ("demo", 2, "demo ships with the engine: `hydra-engine run demo`"),
        ("mine", 2, "'mine' is there already: `hydra-engine run mine`"),
        ("qwen2-vl-7b", 2, "ships without weights"),
        ("nonsense", 3, "there is no model directory 'nonsense'; MODEL is"),
        ("https://huggingface.co/acme/tiny", 3, "is an address; write acme/tiny"),
    ):
        done = here("pull", model)
        assert done.returncode == code and said in done.stderr, done
    assert not hub.asked


def test_a_hub_without_an_answer_costs_one_sentence(
    here: Here, hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = here("pull", NAME)
    assert "HF_HUB_OFFLINE forbids it; unset it, or copy the model's folder here" in offline.stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # a port without a server
    gone = here("serve", NAME, "--download")
    assert offline.returncode == gone.returncode == 3 and not hub.asked
    assert gone.stderr.startswith(
        f"hydra-engine: '{NAME}' cannot be downloaded: no answer from http://127.0.0.1:9 (Conn"
    )
    assert "HF_ENDPOINT names another hub" in gone.stderr


@pytest.mark.slow
def test_an_interrupt_ends_a_download_which_goes_on_later(tmp_path: Path) -> None:
    """Leaves nothing half-written in the cache; files that were complete are not fetched again."""
    files = {path.name: path.read_bytes() for path in DEMO.iterdir()}
    command = [sys.executable, "-m", "hydra_engine", "pull", NAME]
    serve = [sys.executable, "-m", "hydra_engine", "serve", NAME, "--download", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    blobs = tmp_path / "hub" / "models--acme--tiny" / "blobs"
    with Hub(NAME, files, stalled=("model.safetensors",)).serving() as hub:
        environment["HF_ENDPOINT"] = hub.url
        for started, number, code in (
            *((command, signal.SIGINT, 130), (command, signal.SIGTERM, -signal.SIGTERM)),
            *((serve, signal.SIGINT, 130), (serve, signal.SIGTERM, 0)),
        ):
            hub.halfway.clear()
            with subprocess.Popen(started, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
                assert hub.halfway.wait(60)
                process.send_signal(number)
                _, said = process.communicate(timeout=30)
            assert process.returncode == code and "Traceback" not in said
            assert len(list(blobs.iterdir())) >= 3 and not list(blobs.glob("*.incomplete"))
    with Hub(NAME, files).serving() as hub:
        environment["HF_ENDPOINT"] = hub.url
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert [line for line in hub.asked if "GET /acme" in line] == [f"GET /{NAME}/resolve/main/model.safetensors"]


def test_list_shows_the_models_and_what_is_wrong_with_them(here: Here, cache: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    model = gguf_text(files / "tiny-Q8_0.gguf")
    (files / "cut-Q4_0.gguf").write_bytes(model.read_bytes()[:1000])
    (files / "big-F16-00001-of-00002.gguf").touch()
    fill_cache(cache, GGUF, files)
    (tmp_path / "towers").mkdir()
    (tmp_path / "towers" / "mmproj-F16.gguf").touch()
    fill_cache(cache, "acme/towers", tmp_path / "towers")
    fill_cache(cache, NAME, DEMO)
    fill_cache(cache, NAME, DEMO, revision="v2", commit="f" * 40, without=("model.safetensors",))
    broken = tmp_path / "mine" / "acme" / "bert"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (cache / "models--acme--begun" / "blobs").mkdir(parents=True)
    (cache / "models--acme--begun" / "blobs" / "1.incomplete").write_bytes(bytes(2048))
    (cache / "models--acme--odd" / "refs").mkdir(parents=True)
    (cache / "models--acme--odd" / "refs" / "main").write_bytes(b"\xff../../..\n")
    (cache / "models--acme--odd" / "blobs").touch()
    done = here("list", "mine", "files")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", " ".join(line.split())) for line in done.stdout.splitlines()]
    demo, gguf = (size(sum(path.stat().st_size for path in found)) for found in (DEMO.iterdir(), [model]))
    cut = size(1000)
    rest = "`hydra-engine pull {}` fetches the rest"
    assert lines[0] == "NAME FAMILY WEIGHTS SIZE MODIFIED"
    assert lines[1] == f"demo llava bfloat16 {demo} DATE"
    assert lines[2] == f"acme/begun - - 2 KiB DATE incomplete: {rest.format('acme/begun')}"
    assert lines[3] == f"acme/odd - - 0 B - incomplete: {rest.format('acme/odd')}"
    assert lines[4] == f"acme/tiny llava bfloat16 {demo} DATE"
    assert lines[5].startswith("acme/tiny --revision v2 llava bfloat16 ")
    assert lines[5].endswith(f"incomplete, without model.safetensors: {rest.format('acme/tiny --revision v2')}")
    missing = "incomplete, without big-F16-00002-of-00002.gguf"
    assert lines[6] == f"{GGUF}:F16 - F16 0 B DATE {missing}: {rest.format(f'{GGUF}:F16')}"
    assert lines[7].startswith(f"{GGUF}:Q4_0 - Q4_0 {cut} DATE cut-Q4_0.gguf is truncated")
    assert lines[8] == f"{GGUF}:Q8_0 llama Q8_0 {gguf} DATE"
    assert lines.pop(9).endswith(f"incomplete, without a text model: {rest.format('acme/towers')}")
    assert lines[9].endswith("architecture 'BertModel' has no native implementation")
    assert lines[9].startswith("mine/acme/bert - - ")
    assert [line.split()[0] for line in lines[10:]] == [
        *("files/big-F16-00001-of-00002.gguf", "files/cut-Q4_0.gguf", "files/tiny-Q8_0.gguf")
    ]
    missing = here("list", "none")
    assert missing.returncode == 2 and "there is no folder 'none' to list" in missing.stderr
