"""LLaVA-1.5 in its authors' layout, whose vision tower may be stored elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine.backend.select import create_backend
from hydra_engine.errors import CheckpointError
from tests.models.conftest import CheckpointFactory
from tests.models.families.base import Pair, picture
from tests.models.families.cases import CASES
from tools.miniatures.llava import TOWER

PREFIX = "model.vision_tower.vision_tower."


def features(directory: Path) -> Tensor:
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    pair = Pair(CASES["llava_llama"], "gqa", directory, backend)
    return pair.driver.features(pair.driver.encode(pair.spans([picture((40, 30))]))[0])


@pytest.mark.parametrize("place", ["folder", "cache"])
def test_the_tower_is_found(
    checkpoint: CheckpointFactory, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint("tower-inside", "llava_llama")
    model = Path(shutil.copytree(whole, tmp_path / "model"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    tensors = load_file(model / "model.safetensors")
    tower = {name.removeprefix(PREFIX): tensors.pop(name) for name in [*tensors] if name.startswith(PREFIX)}
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"hold no vision tower, and 'someone/{TOWER}' is not in the Hugging"):
        features(model)
    folder = model / TOWER
    if place == "cache":
        repository = tmp_path / "cache" / f"models--someone--{TOWER}"
        folder = repository / "snapshots" / ("0" * 40)
        (repository / "refs").mkdir(parents=True)
        folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        (folder / "pytorch_model.bin").touch()
        with pytest.raises(
            CheckpointError, match=rf"vision tower 'someone/{TOWER}' cannot be read: the weights are pic"
        ):
            features(model)
    # The whole CLIP model: what is not the tower is not read.
    save_file(tower | {"text_model.final_layer_norm.bias": torch.zeros(3)}, folder / "model.safetensors")
    assert torch.equal(features(model), features(whole))
