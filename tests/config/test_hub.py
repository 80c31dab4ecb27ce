"""Hub ids: found in a cache as huggingface_hub makes it, whole or in part; downloaded from a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hydra_engine.config import EngineConfig, find_model
from hydra_engine.config.hub_download import one_sentence
from hydra_engine.errors import CheckpointError, ConfigError, ResourceError
from hydra_engine.models.specs.registry import load_spec
from tests.config.hub import Hub, fill_cache

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "hydra_engine" / "demo" / "model"
NAME = "acme/Tiny-VLM_2.1"
COMMAND = f"`hydra-engine pull {NAME}` or `hf download {NAME}` fetches it, and so does --download"

KINDS = "MODEL is a folder, a GGUF file, ORG/NAME of the Hugging Face Hub with --download, or demo"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def find(model: str = NAME, **options: Any) -> EngineConfig:
    return find_model(EngineConfig(model=model, **options))


def refusal(model: str = NAME, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(model, **options)
    assert caught.value.exit_code == 3 and "\n" not in caught.value.message
    return caught.value.message


def test_a_cached_model_is_found_and_keeps_its_name(cache: Path) -> None:
    snapshot = fill_cache(cache, NAME, DEMO)
    config = find()
    assert config.model_path == snapshot and (config.model, config.model_name) == (NAME, NAME)
    assert load_spec(config.model_path).family == "llava"
    assert find_model(config) is config


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache: Path) -> None:
    first = fill_cache(cache, NAME, DEMO)
    second = fill_cache(cache, NAME, DEMO, revision="v2", commit="f" * 40)
    assert find().model_path == first
    for revision in ("v2", "f" * 40):
        assert find(revision=revision).model_path == second
    assert f"`hf download {NAME} --revision v3`" in refusal(revision="v3")


def test_what_is_not_there_is_told_by_its_whole_name_and_with_the_command(cache: Path) -> None:
    assert refusal() == f"there is no folder '{NAME}', nor a model of that name in the Hugging Face cache; {COMMAND}"
    for name in ("/no/such", "such", "a/b/c", "acme/x..y", "../such", "acme/-x", "acme/", "acme\0", "a/b/c:Q4_0"):
        assert refusal(name) == f"there is no model directory {name!r}; {KINDS}"
    for name in ("a" * 5000, "acme/" + "a" * 5000, "a" * 5000 + "/tiny"):
        assert refusal(name) == f"there is no model directory '{name[:200]}'; {KINDS}"


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    fill_cache(cache, NAME, DEMO)
    (tmp_path / NAME).mkdir(parents=True)
    assert find().model_path == Path(NAME)
    with pytest.raises(ConfigError, match="revision is for models of the Hugging Face Hub"):
        find(revision="v2")


def sharded(tmp_path: Path) -> Path:
    """A checkpoint of several files; which there are is all that counts."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    shards = [f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)]
    for shard in shards:
        (folder / shard).write_bytes(shard.encode())
    places = {f"layer.{number}": shard for number, shard in enumerate(shards)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (("config.json",), "config.json"),
        (("tokenizer.json",), "tokenizer.json"),
        (("processor_config.json",), "preprocessor_config.json"),
        (("model-00002-of-00006.safetensors",), "model-00002-of-00006.safetensors"),
        (("model.safetensors.index.json",), "model.safetensors.index.json"),
        (
            ("tokenizer.json", *(f"model-0000{number}-of-00006.safetensors" for number in range(1, 7))),
            "tokenizer.json, model-00001-of-00006.safetensors, model-00002-of-00006.safetensors, "
            "model-00003-of-00006.safetensors and 3 more",
        ),
    ],
)
def test_a_model_that_is_there_in_part(cache: Path, tmp_path: Path, without: tuple[str, ...], missing: str) -> None:
    fill_cache(cache, NAME, sharded(tmp_path), without=without)
    assert refusal() == f"'{NAME}' is in the Hugging Face cache without {missing}; {COMMAND}"


def test_a_link_to_a_blob_that_is_not_there_is_a_missing_file(cache: Path) -> None:
    snapshot = fill_cache(cache, NAME, DEMO)
    (snapshot / "model.safetensors").resolve().unlink()
    assert "cache without model.safetensors; " in refusal()
    assert find(load_format="random").model_path == snapshot  # which needs no weights


def test_pickles_are_for_the_loader_which_says_what_to_do(cache: Path, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    for path in files.glob("*.safetensors*"):
        path.unlink()
    (files / "pytorch_model.bin").write_bytes(b"pickle")
    snapshot = fill_cache(cache, NAME, files)
    assert find().model_path == snapshot


def test_a_full_disk_is_told_as_such(cache: Path) -> None:
    full = pytest.raises(ResourceError, match=f"'{NAME}' cannot be downloaded: the disk of {cache} is full; make room")
    with full, one_sentence(NAME, None), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


# ---- a hub, and what it costs to ask

LOOK = """
import json, sys
from hydra_engine.config import EngineConfig, find_model
from hydra_engine.errors import HydraError
said = []
for options in json.loads(sys.argv[1]):
    try:
        said.append(sorted(path.name for path in find_model(EngineConfig(**options)).model_path.iterdir()))
    except HydraError as error:
        said.append(error.message)
print(json.dumps([said, "torch" in sys.modules, "transformers" in sys.modules]))
"""


def look(home: Path, url: str, *asked: dict[str, Any]) -> list[Any]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", LOOK, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    said, *imported = json.loads(done.stdout)
    assert imported == [False, False]
    return list(said)


@pytest.mark.slow
def test_download_fetches_what_is_needed_once_and_says_why_it_cannot(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir()}
    unneeded = ["pytorch_model.bin", "model.pt", "consolidated.safetensors", "onnx/model.json", "modeling.py"]
    with Hub(NAME, files | dict.fromkeys(unneeded, b"not needed")).serving() as hub:
        whole = {"model": NAME, "download": True}
        absent, fetched, again, offline, gated, other, revision = look(
            tmp_path,
            hub.url,
            {"model": NAME},
            whole,
            whole,
            {"model": NAME},
            *({"model": f"acme/{name}", "download": True} for name in ("gated", "other")),
            whole | {"revision": "v9"},
        )
        asked = list(hub.asked)
    assert COMMAND in absent
    assert fetched == again == offline == sorted(files.keys() - {"README.md"})
    assert sum(line.startswith(f"GET /api/models/{NAME}/revision/main") for line in asked) == 1
    assert not [line for line in asked if line.endswith(tuple(unneeded))]
    assert gated.startswith("'acme/gated' cannot be downloaded: accept its conditions at ")
    assert other.startswith("'acme/other' cannot be downloaded: the Hugging Face Hub has no such model, or it is ")
    assert revision == f"'{NAME}' cannot be downloaded: it has no revision 'v9'"
    # Of a hub that is not there; and one that has no safetensors.
    with Hub("acme/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"}).serving() as hub:
        (pickles,) = look(tmp_path, hub.url, {"model": "acme/pickles", "download": True})
    assert pickles == "'acme/pickles' cannot be served: its repository has no tokenizer.json, model.safetensors"
    (gone,) = look(tmp_path, hub.url, {"model": "acme/gone", "download": True})
    assert gone.startswith("'acme/gone' cannot be downloaded: ") and "Connect" in gone


COMMANDS = """
import json, sys
from hydra_engine.__main__ import main
print(json.dumps([main(arguments) for arguments in json.loads(sys.argv[1])]))
print([name for name in ("torch", "transformers", "aiohttp", "hydra_engine.engine") if name in sys.modules])
"""


def test_every_command_says_it_before_it_imports_anything_large(tmp_path: Path) -> None:
    """A missing hub id, a partial one and a missing folder have exit codes of their own."""
    fill_cache(tmp_path / "hub", NAME, DEMO, without=("model.safetensors",))
    asked = [
        ["serve", "acme/none"],
        ["serve", "--model", NAME, "--revision", "main"],
        ["generate", "Hello", "--model", NAME],
        ["run-batch", "-", "-o", "-", "--model", "/no/such"],
        ["memory", NAME],
        ["profile", NAME],
    ]
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", COMMANDS, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert done.stdout.split("\n")[:2] == [str([3] * len(asked)), "[]"], done.stderr
    said = done.stderr.strip().split("\n")
    assert len(said) == len(asked) and all(line.startswith("hydra-engine: ") for line in said)
    assert "no folder 'acme/none', nor a model" in said[0] and "--revision main`" in said[1]
    assert all(f"'{NAME}' is in the Hugging Face cache without model.safetensors" in said[at] for at in (1, 2, 4, 5))
    assert said[3] == f"hydra-engine: there is no model directory '/no/such'; {KINDS}"
