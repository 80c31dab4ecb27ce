"""Activations that float16 cannot hold: what asked for them fails with a sentence, and nobody beside it notices."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hydra_engine.errors import RequestFailed
from tests.engine.conftest import EngineFactory, picture

HOT, CHANNEL = 77, 5  # a token, and the only channel in which its embedding is not zero
LAYER = "language_model.model.layers.0"


@pytest.fixture
def overflowing(tiny_model: Path, tmp_path: Path) -> Path:
    """A model in which one token, and every picture, overflows the first MLP."""
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["language_model.model.embed_tokens.weight"]
    embeddings[:, CHANNEL] = 0
    embeddings[HOT] = torch.nn.functional.one_hot(torch.tensor(CHANNEL), embeddings.shape[1]).float()
    tensors[f"{LAYER}.self_attn.o_proj.weight"][CHANNEL] = 0
    for part in ("gate", "up"):
        tensors[f"{LAYER}.mlp.{part}_proj.weight"][:, CHANNEL] = 1000
    first = tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"]
    tensors["vision_tower.encoder.layers.0.mlp.fc1.weight"] = first.sign() * 3e4
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def test_numbers_beyond_float16_are_their_requests_own_error(make_engine: EngineFactory, overflowing: Path) -> None:
    engine = make_engine(model=overflowing, dtype="float16")
    plain, options = [1, 40, 41, 42], {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    expected = engine.generate(plain, **options).token_ids
    beside = engine.submit(plain, **options)
    hot = engine.submit([1, 40, HOT, 42], **options)
    seen = engine.submit("What?", images=picture(1), **options)
    with pytest.raises(RequestFailed, match="the model's logits are not finite numbers") as caught:
        hot.result()
    assert caught.value.code == "numerical_error"
    with pytest.raises(RequestFailed, match="the model's image features are not finite numbers"):
        seen.result()
    assert beside.result().token_ids == expected
    assert engine.generate(plain, **options).token_ids == expected


def test_bfloat16_holds_them(make_engine: EngineFactory, overflowing: Path) -> None:
    engine = make_engine(model=overflowing, dtype="bfloat16")
    assert len(engine.generate([1, 40, HOT, 42], max_tokens=3, ignore_eos=True).token_ids) == 3
    assert len(engine.generate("What?", images=picture(1), max_tokens=3, ignore_eos=True).token_ids) == 3
