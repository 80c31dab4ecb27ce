"""GGUF ids such as OWNER/REPO:Q4_K_M: found in a cache and fetched from a hub on loopback, the wanted files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hydra_engine.config import EngineConfig, find_model
from hydra_engine.config.hub import ModelPaths, find_hub_model
from hydra_engine.errors import CheckpointError, ConfigError, ResourceError
from hydra_engine.preprocess.model_files import find_model_files, is_gguf_model
from tests.config.hub import Hub, fill_cache
from tests.models.specs.test_model_files import text as gguf_text

NAME = "acme/Tiny-VL-GGUF"
PARTS = [f"BF16/x-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
FILES = ["x-Q4_K_M.gguf", "x-Q8_0.gguf", *PARTS, "mmproj-F16.gguf", "mmproj-F32.gguf", "README.md", "config.json"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def fill(cache: Path, *names: str, name: str = NAME) -> Path:
    """A cached repository with these files."""
    files = cache.parent / f"files-{len(list(cache.parent.iterdir()))}"
    for each in names:
        (files / each).parent.mkdir(parents=True, exist_ok=True)
        (files / each).write_text(each)
    return fill_cache(cache, name, files)


def find(model: str, **options: Any) -> ModelPaths:
    found = find_hub_model(EngineConfig(model=model, **options))
    assert found is not None
    return found


def found_names(model: str, **options: Any) -> list[str]:
    found = find(model, **options)
    return [path.relative_to(found.folder).as_posix() for path in (*found.gguf, *filter(None, [found.mmproj]))]


def refusal(model: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(model, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_tag_names_a_cached_model_and_its_mmproj(cache: Path, tmp_path: Path) -> None:
    snapshot = fill(cache, *FILES)
    assert found_names(f"{NAME}:q8_0") == ["x-Q8_0.gguf", "mmproj-F16.gguf"]
    assert find(f"{NAME}:Q8_0").folder == snapshot
    assert found_names(f"{NAME}:BF16") == [*PARTS, "mmproj-F16.gguf"]
    for default in (NAME, f"{NAME}:", f"{NAME}:latest"):
        assert found_names(default) == ["x-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert found_names(NAME, mmproj="mmproj-F32.gguf")[1:] == ["mmproj-F32.gguf"]
    (tmp_path / "own.gguf").touch()
    assert find(NAME, mmproj="own.gguf").mmproj is None  # the caller has it
    assert "no file 'none.gguf'; mmproj files of acme/Tiny-VL-GGUF here: mmproj-F16" in refusal(
        NAME, mmproj="none.gguf"
    )
    for model in (NAME, str(snapshot)):
        with pytest.raises(CheckpointError, match="of GGUF files, which are served as they are; give the folder or"):
            find_model(EngineConfig(model=model))
    with pytest.raises(ConfigError, match="GGUF files are for native models"):
        find(NAME, model_impl="transformers")


def test_a_gguf_file_may_have_any_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs of Ollama's store and of the Hugging Face cache are called by their hashes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = gguf_text(cache.parent / "model.gguf").rename(cache.parent / "sha256-0123")
    config = find_model_files(EngineConfig(model="sha256-0123"))
    assert is_gguf_model(config) and (config.model_path / "model-00001.gguf").resolve() == path
    with pytest.raises(ConfigError, match="MODEL is a file"):
        find_model_files(EngineConfig(model="sha256-0123", revision="v2"))


def test_an_id_of_both_kinds_is_safetensors_unless_it_has_a_tag(cache: Path) -> None:
    fill(cache, "x-Q4_K_M.gguf", "config.json", "tokenizer.json", "model.safetensors", name="acme/both")
    assert not find("acme/both").gguf
    assert found_names("acme/both:Q4_K_M") == ["x-Q4_K_M.gguf"]


def test_what_is_not_cached_is_told_with_the_commands_and_the_nearest_tag(cache: Path) -> None:
    fetch = "fetches it, and so does --download"
    mmproj = "--include '*mmproj*.gguf'`"
    for model, tag in ((NAME, "Q4_K_M"), (f"{NAME}:Q6_K", "Q6_K")):
        assert refusal(model) == (
            f"'{model}' is not here: the Hugging Face cache has no GGUF model of it; `hydra-engine pull {model}` or "
            f"`hf download {NAME} --include '*{tag}*.gguf' {mmproj} {fetch}"
        )
    fill(cache, "x-Q8_0.gguf", "x-Q5_0.gguf", PARTS[1], "mmproj.gguf")
    said = refusal(f"{NAME}:Q8_1", revision="main")
    assert (
        f"cache has BF16, Q5_0, Q8_0 of it; name one, such as {NAME}:Q8_0; `hydra-engine pull {NAME}:Q8_1 --rev" in said
    )
    assert f"the Hugging Face cache has it without {PARTS[0]}; `hydra" in refusal(f"{NAME}:bf16")


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(NAME, {name: name.encode() for name in FILES}).serving() as served:
        served.answer_here(monkeypatch)
        yield served


def fetched(hub: Hub) -> list[str]:
    return [line.rpartition("/main/")[2] for line in hub.asked if line.startswith("GET /acme")]


def test_a_download_takes_one_model_and_one_mmproj_once(hub: Hub) -> None:
    assert found_names(NAME, download=True) == ["x-Q4_K_M.gguf", "mmproj-F16.gguf"] == fetched(hub)
    hub.asked.clear()
    assert found_names(f"{NAME}:q4_k_m", download=True) == found_names(NAME) and not hub.asked
    assert found_names(f"{NAME}:BF16", download=True) == [*PARTS, "mmproj-F16.gguf"]
    assert sorted(fetched(hub)) == PARTS
    said = refusal(f"{NAME}:Q6_0", download=True)
    assert said == (
        f"'{NAME}:Q6_0' cannot be served: its repository has BF16, Q4_K_M, Q8_0 of it; name one, such as {NAME}:Q8_0"
    )


def test_a_disk_without_room_is_told_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(
        ResourceError, match=f"'{NAME}' needs 28 B more on the disk of .*, which has 10 B free; make room"
    ):
        find(NAME, download=True)
    assert not fetched(hub)
