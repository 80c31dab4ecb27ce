"""`hydra-engine quantize`: what it writes is what `--quantization` makes at start, and it never overwrites."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine.backend.select import create_backend
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_quantizer.writer import write_quantized
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.quantized.written import METHODS, edit_config, write_checkpoint

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT = [1, *range(40, 60)]


def logits(directory: Path, quantization: str = "auto", dtype: torch.dtype = torch.float32) -> Tensor:
    backend = create_backend("cpu", dtype, backend="reference", threads=1)
    driver = Driver(directory, backend, options=SpecOptions(quantization=quantization))
    return driver.run(driver.request(PROMPT), [])


@pytest.mark.parametrize("wanted", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llava", "llama-tied"])
def test_what_is_written_is_what_a_start_makes(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str, wanted: str
) -> None:
    """Logits have the same bits, also where a tied head is stored apart and files are in shards."""
    if family == "llava":
        plain = checkpoint("write-llava", "llava", text=SIZES, dtype="bfloat16")
    else:
        plain = checkpoint("write-tied", "llama", text=SIZES | {"tie_word_embeddings": True}, dtype="bfloat16")
    seen: list[tuple[int, int]] = []
    write_quantized(plain, tmp_path / "out", wanted, (), lambda *done: seen.append(done), shard_bytes=50_000)
    assert torch.equal(logits(tmp_path / "out"), logits(plain, wanted))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    rest = {path.name for path in plain.iterdir()} - {"model.safetensors"}
    assert rest <= {path.name for path in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
def test_embeddings_under_the_heads_name_are_written_under_their_own(
    checkpoint: CheckpointFactory, tmp_path: Path, head: str
) -> None:
    """A text model, and one with pictures."""
    tied = {"tie_word_embeddings": True}
    if head == "lm_head.weight":
        made = checkpoint("write-tied", "llama", text=SIZES | tied, dtype="bfloat16")
    else:
        made = checkpoint("write-tied-llava", "llava", text=SIZES | tied, dtype="bfloat16", **tied)
    plain = Path(shutil.copytree(made, tmp_path / "plain"))
    tensors = load_file(plain / "model.safetensors")
    tensors[head] = tensors.pop(head.replace("lm_head", "model.embed_tokens"))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(plain), logits(made))
    write_quantized(plain, tmp_path / "out", "int8")
    assert torch.equal(logits(tmp_path / "out"), logits(plain, "int8"))


@pytest.mark.quick("fp8-int8", "w4-g_idx-int8")
@pytest.mark.parametrize("wanted", ["int4", "int8"])
@pytest.mark.parametrize("method", ["fp8", "fp8-compressed-channel", "gptq-act-order", "w4-g_idx"])
def test_matrices_that_a_start_takes_from_another_form_are_written_likewise(
    checkpoint: CheckpointFactory, tmp_path: Path, method: str, wanted: str
) -> None:
    """Matrices that stay have the checkpoint's dtype; files on the earlier quantisation are not copied."""
    plain, stored = checkpoint("write-again", "llama", text=SIZES, dtype="bfloat16"), tmp_path / "stored"
    write_checkpoint(plain, stored, METHODS[method])
    (stored / "quantize_config.json").write_text("{}")
    write_quantized(stored, tmp_path / "out", wanted)
    assert torch.equal(logits(tmp_path / "out", dtype=torch.bfloat16), logits(stored, wanted, torch.bfloat16))
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    write_quantized(stored, tmp_path / "part", wanted, ["0.mlp.up_proj"])
    weight = load_file(tmp_path / "part" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype is torch.bfloat16
    assert logits(tmp_path / "part", dtype=torch.bfloat16).isfinite().all()


def test_modules_that_are_ignored_stay(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("write-ignored", "llama", text=SIZES, dtype="bfloat16")
    write_quantized(plain, tmp_path / "out", "int4", ["lm_head", "1.mlp.down_proj", r"re:.*layers\.0\..*"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stayed = "lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
    assert {f"{name}.weight" for name in stayed} < tensors.keys()
    assert "model.layers.1.mlp.up_proj.weight_packed" in tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in config["ignore"]
    assert logits(tmp_path / "out").isfinite().all()


def test_nothing_is_overwritten_and_nothing_is_left_behind(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = Path(shutil.copytree(checkpoint("write-refused", "llama", text=SIZES), tmp_path / "plain"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists; name a folder that does not"):
        write_quantized(plain, tmp_path / "out", "int4")
    with pytest.raises(ConfigError, match="a regular expression cannot be read"):
        write_quantized(plain, tmp_path / "new", "int4", ["re:("])
    with pytest.raises(ConfigError, match="no module is named head; one is"):
        write_quantized(plain, tmp_path / "new", "int4", ["lm_head", "head"])
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match="not finite"):
        write_quantized(plain, tmp_path / "new", "int4")
    del tensors["model.norm.weight"]
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight"):
        write_quantized(plain, tmp_path / "new", "int4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_a_quantised_checkpoint_is_not_quantised_again(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("write-twice", "llama", text=SIZES | {"num_hidden_layers": 1}, dtype="bfloat16")
    write_quantized(plain, tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="quantised by compressed-tensors already"):
        write_quantized(tmp_path / "out", tmp_path / "again", "int8")
    write_checkpoint(plain, tmp_path / "gptq", METHODS["gptq-4"])
    edit_config(tmp_path / "gptq", lambda config: config["quantization_config"].update(desc_act=True))
    with pytest.raises(CheckpointError, match="is quantised in neighbouring groups"):
        write_quantized(tmp_path / "gptq", tmp_path / "again", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gptq", "out"]
