"""Quantised checkpoints of every format: weights and logits as those of a writer of its own, every damage refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine.backend.base import Activation, Backend, PackedLinear
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.ops import PlainLinear, ReferenceOps
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD, Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import load_model
from hydra_engine.models.loading.open_checkpoint import open_checkpoint
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.quantized.written import METHODS, compressed, edit_config, write_checkpoint, write_dequantized

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    "num_hidden_layers": 1,
}
NUM_WORDS = 262
PROMPT = [1, *range(40, 55)]
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def plain(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("plain-llama", "llama", text=SIZES)


def reference() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


def written(plain: Path, tmp_path: Path, name: str) -> Path:
    write_checkpoint(plain, tmp_path / name, METHODS[name])
    return tmp_path / name


def logits(directory: Path, backend: Backend) -> Tensor:
    driver = Driver(directory, backend)
    return driver.run(driver.request(PROMPT), [])


def rounded_part(part: Tensor) -> Tensor:
    """[T, G, inputs] in whole steps of 1/127 of the largest magnitude, or of 1/256 of that where most are small."""
    step = part.abs().amax(-1, keepdim=True) / 127
    numbers = (part / step).round()
    energy = numbers.abs().clamp_max(32).square().sum(-1, keepdim=True)
    fine = (part / (step / 256)).round() / 256
    return torch.where(energy < 64 * (part.shape[-1] + 20), fine, numbers) * step


class RoundingOps(ReferenceOps):
    """Products with tensors, but for those with `unrounded` outputs, of rows in which 128 inputs of a group share a
    step."""

    def __init__(self, group: int | None, *, unrounded: int = NUM_WORDS) -> None:
        super().__init__()
        self._group, self._unrounded = group, unrounded

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(weight, PlainLinear)
        if self._group is not None and weight.num_out != self._unrounded:
            groups = x.unflatten(1, (-1, self._group or x.shape[1]))
            x = torch.cat([rounded_part(part) for part in groups.split(128, dim=-1)], dim=-1).flatten(1)
        return super().linear(x, weight, act=act, residual=residual, out_dtype=out_dtype)


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_dequantised_weights(plain: Path, tmp_path: Path, name: str) -> None:
    """Rows of activations are rounded as the arithmetic of quantised weights says, where weights stay quantised: but
    for float32 rounding, which now and then turns a number of a row to its neighbour. The product without rounding
    is near."""
    method = METHODS[name]
    weights = write_checkpoint(plain, tmp_path / "quantized", method)
    spec = load_spec(tmp_path / "quantized")
    with open_checkpoint(tmp_path / "quantized", (), spec.quantization) as checkpoint:
        for matrix, expected in weights.items():
            stored = checkpoint.read(matrix)
            is_kept = isinstance(stored, QuantizedWeight)
            assert is_kept == (method.group is not None)
            wide = stored.dequantized(torch.float32) if isinstance(stored, QuantizedWeight) else stored
            torch.testing.assert_close(wide, torch.from_numpy(expected), rtol=1e-6, atol=1e-7)
    write_dequantized(plain, tmp_path / "tensors", weights)
    actual = logits(tmp_path / "quantized", reference())
    rounding = replace(reference(), ops=RoundingOps(method.group))
    expected_logits = logits(tmp_path / "tensors", rounding)
    by_row = (actual - expected_logits).abs().amax(1)
    assert by_row.median() < 1e-5
    assert by_row.max() < (1e-3 * expected_logits.abs().max() if method.group is not None else 1e-5)
    float_logits = logits(tmp_path / "tensors", reference())
    distance = (actual - float_logits).abs().max() / float_logits.abs().max()
    assert distance < 0.05


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FURTHER: dict[str, tuple[bool, tuple[str, ...]]] = {  # tied or not, what is quantised besides the layers
    "embeddings": (False, (EMBEDDINGS,)),
    "head": (False, (HEAD,)),
    "both": (False, (EMBEDDINGS, HEAD)),
    "tied embeddings": (True, (EMBEDDINGS,)),
    "tied under the head's name": (True, (HEAD,)),
    "a head beside tied embeddings": (True, (HEAD, "plain embeddings")),
}


@pytest.mark.quick("gptq-8-tied embeddings", "fp8-both", "w4-32-tied under", "awq-a head beside")
@pytest.mark.parametrize("case", FURTHER)
@pytest.mark.parametrize("name", ["w4-32", "w8a8", "gptq-8", "awq", "fp8"])
def test_embeddings_and_heads_may_be_quantised(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, case: str
) -> None:
    method, (tied, besides) = METHODS[name], FURTHER[case]
    # A number of rows that fills whole words in every layout.
    made = checkpoint(f"words-{tied}", "llama", text={**SIZES, "tie_word_embeddings": tied, "vocab_size": 264})
    plain = Path(shutil.copytree(made, tmp_path / "plain"))
    if tied and HEAD in besides:
        tensors = load_file(plain / "model.safetensors")
        embeddings = tensors[EMBEDDINGS] if "plain embeddings" in besides else tensors.pop(EMBEDDINGS)
        tensors[HEAD] = (embeddings * 1.5).contiguous()
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    weights = write_checkpoint(plain, tmp_path / "quantized", method, besides=besides)
    assert weights.keys() > {part for part in besides if part.endswith(".weight")}
    write_dequantized(plain, tmp_path / "tensors", weights)
    actual = logits(tmp_path / "quantized", reference())
    ops = RoundingOps(method.group, unrounded=264 if case == "embeddings" else 0)
    expected = logits(tmp_path / "tensors", replace(reference(), ops=ops))
    by_row = (actual - expected).abs().amax(1)
    assert by_row.median() < 1e-5
    assert by_row.max() < (1e-2 * expected.abs().max() if method.group is not None else 1e-5)
    assert not torch.allclose(actual, logits(plain, reference()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["w4-32", "w8a8", "gptq-4-zeros", "fp8"])
def test_a_vision_language_checkpoint_with_its_text_part_quantised(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str
) -> None:
    """The family renames tensors, and the quantisation is in text_config."""
    plain = checkpoint("plain-llava", "llava", text=SIZES)
    weights = write_checkpoint(plain, tmp_path / "quantized", METHODS[name], nested="text_config")
    write_dequantized(plain, tmp_path / "tensors", weights)
    actual, near = logits(tmp_path / "quantized", reference()), logits(tmp_path / "tensors", reference())
    assert (actual - near).abs().max() < 0.05 * near.abs().max()


def test_matrices_that_are_not_quantised_stay(plain: Path, tmp_path: Path) -> None:
    """Leaves out the query matrix, which is fused with keys and values."""
    weights = write_checkpoint(plain, tmp_path / "quantized", METHODS["w4-32"])
    original = load_file(plain / "model.safetensors")[f"{QUERY}.weight"]

    def change(tensors: dict[str, Tensor]) -> None:
        for leaf in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{QUERY}.{leaf}"]
        tensors[f"{QUERY}.weight"] = original

    rewrite(tmp_path / "quantized", change)
    del weights[f"{QUERY}.weight"]
    write_dequantized(plain, tmp_path / "tensors", weights)
    actual, near = logits(tmp_path / "quantized", reference()), logits(tmp_path / "tensors", reference())
    assert (actual - near).abs().max() < 0.05 * near.abs().max()


def test_biases_of_zeros_that_a_writer_added_are_not_read(plain: Path, tmp_path: Path) -> None:
    directory = written(plain, tmp_path, "gptq-4")
    expected = logits(directory, reference())
    rewrite(directory, lambda tensors: tensors.update({f"{QUERY}.bias": torch.zeros(128)}))
    assert torch.equal(logits(directory, reference()), expected)
    rewrite(directory, lambda tensors: tensors.update({f"{QUERY}.bias": torch.ones(128)}))
    assert f"not expected: {QUERY}.bias" in refusal(directory)


def test_scales_of_a_cache_are_not_read(plain: Path, tmp_path: Path) -> None:
    directory = written(plain, tmp_path, "w8a8")
    attention = QUERY.rpartition(".")[0]
    rewrite(directory, lambda tensors: tensors.update({f"{attention}.k_scale": torch.ones(1)}))
    load(directory)
    rewrite(directory, lambda tensors: tensors.update({f"{attention}.x_scale": torch.ones(1)}))
    assert f"not expected: {attention}.x_scale" in refusal(directory)


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def load(directory: Path, role: Role = EPD) -> None:
    load_model(directory, load_spec(directory), reference(), role)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert "\n" not in caught.value.message and str(directory) not in caught.value.message
    return caught.value.message


Damage = Callable[[dict[str, Tensor]], object]
DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "no scale": ("w4-32", lambda t: t.pop(f"{QUERY}.weight_scale"), f"missing: {QUERY}.weight_scale"),
    "no shape": ("w4-32", lambda t: t.pop(f"{QUERY}.weight_shape"), f"missing: {QUERY}.weight_shape"),
    "no zero points": ("w4-128-zeros", lambda t: t.pop(f"{QUERY}.weight_zero_point"), "missing: model.layers.0"),
    "no numbers": ("gptq-4", lambda t: t.pop(f"{QUERY}.qweight"), f"missing: {QUERY}.weight; not expected: {QUERY}"),
    "no zeros": ("gptq-4", lambda t: t.pop(f"{QUERY}.qzeros"), f"missing: {QUERY}.qzeros"),
    "no scales of blocks": ("fp8", lambda t: t.pop(f"{QUERY}.weight_scale_inv"), f"missing: {QUERY}.weight_scale_inv"),
    "rows of scales": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_scale": torch.ones(127, 4)}),
        f"{QUERY}.weight_scale is [127, 4] F32 instead of [128, 1] or",
    ),
    "groups of another size": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_scale": torch.ones(128, 8)}),
        "has 8 groups of 128 inputs, where config.json says groups of 32",
    ),
    "groups that do not divide": (
        "gptq-4-zeros",
        lambda t: t.update({f"{QUERY}.scales": torch.ones(3, 128), f"{QUERY}.qzeros": t[f"{QUERY}.qzeros"][:3]}),
        "has 3 groups of 128 inputs, where config.json says groups of 32",
    ),
    "no groups": ("gptq-4", lambda t: t.update({f"{QUERY}.scales": torch.ones(0, 128)}), f"{QUERY}.scales is [0, 128]"),
    "another shape": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_shape": torch.tensor([128, 120])}),
        f"{QUERY}.weight_packed is [128, 16], which are not [128, 120] numbers of 4 bits",
    ),
    "an endless shape": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_shape": torch.tensor([128, 1 << 62])}),
        "numbers of 4 bits",
    ),
    "a negative shape": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_shape": torch.tensor([-128, -128])}),
        "numbers of 4 bits",
    ),
    "shape of a row": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight_shape": torch.tensor([128])}),
        f"{QUERY}.weight_shape is [1] I64",
    ),
    "of floats": (
        "gptq-4",
        lambda t: t.update({f"{QUERY}.qweight": t[f"{QUERY}.qweight"].float()}),
        f"{QUERY}.qweight is [16, 128] F32 instead of 2 dimensions of I32",
    ),
    "of another model": (
        "awq",
        lambda t: t.update(
            {
                f"{QUERY}.qweight": torch.zeros(256, 16, dtype=torch.int32),
                f"{QUERY}.qzeros": t[f"{QUERY}.qzeros"].repeat(2, 1),
                f"{QUERY}.scales": t[f"{QUERY}.scales"].repeat(2, 1),
            }
        ),
        f"{QUERY}.weight is [128, 256] instead of [128, 128]",
    ),
    "scales that are not finite": (
        "w8a8",
        lambda t: t[f"{QUERY}.weight_scale"].view(-1)[3:4].fill_(float("nan")),
        f"tensor {QUERY}.weight has scales or zero points that are not finite",
    ),
    "infinite scales of zero points": (
        "gptq-4-zeros",
        lambda t: t[f"{QUERY}.scales"][1].fill_(float("inf")),
        f"tensor {QUERY}.weight has scales or zero points that are not finite",
    ),
    "scales of zero": (
        "w8a8",
        lambda t: t[f"{QUERY}.weight_scale"].zero_(),
        f"tensor {QUERY}.weight has numbers, but its scales are all zero",
    ),
    "4-bit scales of zero": (
        "gptq-4-zeros",
        lambda t: t[f"{QUERY}.scales"].zero_(),
        f"tensor {QUERY}.weight has numbers, but its scales are all zero",
    ),
    "floats with scales of zero": (
        "fp8",
        lambda t: t[f"{QUERY}.weight_scale_inv"].zero_(),
        f"tensor {QUERY}.weight cannot be read: its scales are all zero",
    ),
    "numbers and the matrix": (
        "w4-32",
        lambda t: t.update({f"{QUERY}.weight": torch.ones(128, 128)}),
        f"{QUERY}.weight is there besides weight_packed",
    ),
    "floats that are not finite": (
        "fp8",
        lambda t: t[f"{QUERY}.weight_scale_inv"].fill_(float("nan")),
        f"tensor {QUERY}.weight holds values that are not finite",
    ),
    "groups that do not exist": (
        "gptq-act-order",
        lambda t: t[f"{QUERY}.g_idx"].fill_(7),
        f"tensor {QUERY}.weight cannot be read: its groups are numbered from 0 to 3",
    ),
    "negative groups": (
        "w4-g_idx",
        lambda t: t[f"{QUERY}.weight_g_idx"].fill_(-1),
        f"tensor {QUERY}.weight cannot be read: its groups are numbered from 0 to 3",
    ),
    "too few groups": (
        "w4-g_idx",
        lambda t: t.update({f"{QUERY}.weight_g_idx": t[f"{QUERY}.weight_g_idx"][:64]}),
        f"{QUERY}.weight_g_idx is [64] I32 instead of [128]",
    ),
    "blocks of another size": (
        "fp8",
        lambda t: t.update({f"{QUERY}.weight_scale_inv": torch.ones(4, 4)}),
        f"{QUERY}.weight_scale_inv is [4, 4] F32 instead of",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parts_are_refused(plain: Path, tmp_path: Path, damage: str) -> None:
    name, change, words = DAMAGE[damage]
    directory = written(plain, tmp_path, name)
    rewrite(directory, change)
    assert words in refusal(directory)


def test_everything_that_does_not_fit_is_named_at_once(plain: Path, tmp_path: Path) -> None:
    directory = written(plain, tmp_path, "w4-32")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"], tensors[f"{QUERY}.weight_scale"]
        tensors["stray.weight_packed"] = torch.zeros(2, 2, dtype=torch.int32)
        tensors["model.layers.0.mlp.up_proj.weight_shape"] = torch.tensor([3, 4])

    rewrite(directory, change)
    message = refusal(directory)
    for words in (
        f"missing: {QUERY}.weight_scale, model.norm.weight;",
        "not expected: stray.weight;",
        "of the wrong shape: model.layers.0.mlp.up_proj.weight_packed is",
    ):
        assert words in message


def test_a_truncated_file_is_refused(plain: Path, tmp_path: Path) -> None:
    directory = written(plain, tmp_path, "w4-32")
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert "truncated" in refusal(directory)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header[f"{QUERY}.weight_packed"]["shape"] = [1 << 40, 1 << 40]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert f"describes tensor {QUERY}.weight_packed wrongly" in refusal(directory)


def of_group(**fields: Any) -> Callable[[dict[str, Any]], object]:
    """Fields of the weights of the one group of compressed-tensors."""
    return lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "bitsandbytes": (
        "w4-32",
        lambda c: c.update(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "'bitsandbytes' are not supported; supported are compressed-tensors, gptq, awq, fp8",
    ),
    "no method": ("gptq-4", lambda c: c["quantization_config"].pop("quant_method"), "has no field quant_method"),
    "no object": ("w4-32", lambda c: c.update(quantization_config=3), "must be an object"),
    "layout": (
        "w4-32",
        lambda c: c["quantization_config"].update(format="nvfp4-pack-quantized"),
        "format 'nvfp4-pack-quantized' is not supported",
    ),
    "3 bits": ("w4-32", of_group(num_bits=3), "weights of 3 bits are not supported"),
    "no bits": ("w4-32", of_group(num_bits="four"), "num_bits"),
    "4-bit floats": ("w4-32", of_group(type="float"), "weights of 4 bits are not supported"),
    "a group of nothing": ("w4-32", of_group(group_size=0), "must be a whole number above 0"),
    "blocks": ("fp8-compressed-block", of_group(block_structure=[0, 4]), "must be a list of two whole numbers above 0"),
    "sparse": (
        "w4-32",
        lambda c: c["quantization_config"].update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse weights (sparse-24-bitmask) are not supported",
    ),
    "gptq of 3 bits": ("gptq-4", lambda c: c["quantization_config"].update(bits=3), "GPTQ weights of 3 bits"),
    "gptq in another layout": (
        "gptq-4",
        lambda c: c["quantization_config"].update(checkpoint_format="marlin"),
        "GPTQ checkpoint_format 'marlin' is not supported",
    ),
    "gptq groups": (
        "gptq-4",
        lambda c: c["quantization_config"].update(group_size=-2),
        "must be a whole number above 0",
    ),
    "awq for vectors": ("awq", lambda c: c["quantization_config"].update(version="gemv"), "supported is gemm"),
    "fp8 of another kind": ("fp8", lambda c: c["quantization_config"].update(fmt="e5m2"), "supported is e4m3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schemes_that_are_not_known_are_refused(plain: Path, tmp_path: Path, case: str) -> None:
    name, change, words = REFUSED[case]
    directory = written(plain, tmp_path, name)
    edit_config(directory, change)
    assert words in refusal(directory)


def test_a_config_that_is_not_the_files(plain: Path, tmp_path: Path) -> None:
    """Quantised tensors without a config that says so, and the other way round, which changes nothing."""
    directory = written(plain, tmp_path, "w4-32")
    edit_config(directory, lambda config: config.pop("quantization_config"))
    message = refusal(directory)
    assert "quantised (tensor model.layers.0" in message and "config.json has no quantization_config" in message
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    edit_config(copy, lambda config: config.update(compressed(4, 32, "pack-quantized")))
    assert torch.equal(logits(copy, reference()), logits(plain, reference()))
