"""A MODEL that is none: one sentence with the nearest right thing."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hydra_engine.config import EngineConfig
from hydra_engine.errors import CheckpointError, ConfigError, HydraError
from hydra_engine.preprocess.model_files import find_model_files

KINDS = "MODEL is a folder, a GGUF file, ORG/NAME of the Hugging Face Hub with --download, or demo"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models in it, and a cache with others."""
    for name in ("Qwen--Qwen2-VL-2B-Instruct", "llava-hf--llava-1.5-7b-hf", "acme--broken"):
        (tmp_path / "hub" / f"models--{name}" / "snapshots" / "1").mkdir(parents=True)
    for name in ("models/mine", "models/acme/other", "models/empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("models/mine/config.json", "models/mine/model.safetensors", "models/acme/other/x.gguf", "README.md"):
        (tmp_path / name).write_text("{}")
    for name in ("alone.safetensors", "weights.pt"):
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(model: str) -> HydraError:
    with pytest.raises(HydraError) as caught:
        find_model_files(EngineConfig(model=model))
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llava", "there is no model directory 'llava'; the nearest are llava-hf/llava-1.5-7b-hf, llava-1.5-7b with"),
        ("qwen2-vl-2b", "there is no model directory 'qwen2-vl-2b'; the nearest are Qwen/Qwen2-VL-2B-Instruct"),
        (
            "models/mien",
            "'models/mien', nor a model of that name in the Hugging Face cache; the nearest is models",
        ),
        ("./models/mien", "there is no model directory './models/mien'; the nearest is models/mine"),
        ("dmeo", "there is no model directory 'dmeo'; the nearest is demo"),
        ("nonsense", f"there is no model directory 'nonsense'; {KINDS}"),
        ("README.md", f"'README.md' is a file, and no GGUF file; {KINDS}"),
        ("models/mine/model.safetensors", "is a file of a model; MODEL is its folder, models/mine"),
        ("models/mine/config.json", "is a file of a model; MODEL is its folder, models/mine"),
        ("alone.safetensors", "has weights alone; beside it config.json and the tokenizer are missing"),
        ("weights.pt", "is a file of PyTorch's, which can run code when opened and is not read"),
        ("gone.gguf", "there is no file 'gone.gguf'"),
        ("models", "'models' is no model, but there are models in it: models/acme/other, models/mine"),
        ("models/acme", "'models/acme' is no model, but there is one in it: models/acme/other"),
        ("hub/models--acme--broken", "is a repository of the Hugging Face cache; write acme/broken"),
        ("https://huggingface.co/Qwen/Qwen2-VL-2B-Instruct", "write Qwen/Qwen2-VL-2B-Instruct --download"),
        ("huggingface.co/acme/x/tree/v2", "is an address; write acme/x --download --revision v2"),
        ("https://hf.co/acme/x/blob/main/x-Q4_0.gguf?download=true", "is an address; write acme/x:Q4_0 --download"),
        ("hf.co/acme/x-GGUF:Q8_0", "is an address; write acme/x-GGUF:Q8_0 --download"),
        ("https://example.org/x", f"'https://example.org/x' is an address; {KINDS}"),
        ("qwen2-vl:2b", "is a name of Ollama's library, which is not read; GGUF files of the Hugging Face Hub are"),
        ("~/models/mine", "the shell has not replaced ~; write "),
        ("~/models/none", "the shell has not replaced ~; and there is no "),
        ("Qwen/Qwen2-VL-2B-Instruct/", "a hub id ends without a slash: Qwen/Qwen2-VL-2B-Instruct"),
        ("Qwen/Qwen2-VL-2B-Instuct", "; the nearest is Qwen/Qwen2-VL-2B-Instruct; `hydra-engine pull"),
    ],
)
def test_it_names_the_nearest_right_thing(model: str, said: str) -> None:
    error = refusal(model)
    assert said in error.message and isinstance(error, CheckpointError)


@pytest.mark.parametrize("model", ["~\0", "~a\nb", "a\nb", "x/" * 3000, "a/b:" + "c" * 5000, "\udcff", "hf.co/a\n/b"])
def test_any_text_is_answered_in_one_short_line(model: str) -> None:
    assert len(refusal(model).message) < 1000


def test_an_empty_name_is_a_wrong_setting() -> None:
    for model in ("", "  "):
        error = refusal(model)
        assert isinstance(error, ConfigError) and error.message == f"MODEL is empty; {KINDS}"


def test_other_folders_are_judged_where_they_are_read() -> None:
    for folder in ("models/empty", "models/mine"):
        assert find_model_files(EngineConfig(model=folder)).model == folder


def test_a_revision_is_of_a_hub_id() -> None:
    for model, kind in (("demo", "demo"), ("models/mine", "a folder")):
        with pytest.raises(ConfigError, match=f"MODEL is {kind}"):
            find_model_files(EngineConfig(model=model, revision="v2"))
