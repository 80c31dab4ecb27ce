"""Checkpoints in the layouts that people publish: quantization_config word for word, names of tensors before and after
transformers 4.52, every part that comes with a matrix. Weights are those that a writer of its own says, bit for bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import load_model, vision_class
from hydra_engine.models.loading.open_checkpoint import open_checkpoint
from hydra_engine.models.loading.safetensors_checkpoint import canonical_name
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.quantized.written import Array, Matrix, awq, float8, gptq, int8, packed

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
DECODER = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")
# Delta nets too, but for the projections with one output per head, as Qwen/Qwen3.5-27B-FP8 has it.
HYBRID = re.compile(r"layers\.\d+\.((self_attn|mlp)\.\w+_proj|linear_attn\.(in_proj_(qkv|z)|out_proj))\.weight$")
EXPERTS = re.compile(r"layers\.\d+\.mlp\.(experts\.\d+|shared_expert)\.\w+_proj\.weight$")
TOWER_TOO = re.compile(r"(_proj|attn\.qkv|attn\.proj|mlp\.\d)\.weight$")
WIDE = re.compile(r"layers\.\d+.*(v_proj|down_proj)\.weight$")
HEAD = re.compile(r"lm_head\.weight$")
PROMPT = [1, *range(40, 55)]

Write = Callable[[Array], Matrix]


@dataclass(frozen=True)
class Layout:
    """`matrices`: who writes which; the first that fits. `beside`: further files, `more`: tensors of layer 0."""

    config: Mapping[str, Any] | None
    matrices: tuple[tuple[re.Pattern[str], Write], ...]
    family: str = "qwen2_5_vl"
    renamed: bool = False  # to the names that transformers 4.52 made
    more: tuple[str, ...] = ()
    beside: Mapping[str, Any] | None = None
    place: str = ""  # in config.json
    shards: int = 1


def with_parts(write: Write, **parts: Tensor) -> Write:
    """Parts that come with each matrix."""
    return lambda weight: replace(m := write(weight), parts=m.parts | {k: t.clone() for k, t in parts.items()})


def without(write: Write, part: str) -> Write:
    return lambda weight: replace(m := write(weight), parts={k: t for k, t in m.parts.items() if k != part})


def scaled(write: Write, shape: tuple[int, ...]) -> Write:
    """A writer that stores the scales of the whole in another shape."""
    return lambda weight: replace(
        m := write(weight), parts=m.parts | {"weight_scale": m.parts["weight_scale"].reshape(shape)}
    )


def with_zero_bias(write: Write) -> Write:
    return lambda weight: replace(m := write(weight), parts={"bias": torch.zeros(len(weight))} | m.parts)


ONE = torch.ones(1)
AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"], "quant_method": "awq"}
AWQ |= {"version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "damp_percent": 0.1}
GPTQ |= {"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "sym": True}
GPTQ |= {"modules_in_block_to_quantize": None, "quant_method": "gptq", "true_sequential": True, "use_exllama": True}
GPTQMODEL: dict[str, Any] = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
GPTQMODEL |= {"quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32"}
GPTQMODEL |= {"meta": {"quantizer": ["gptqmodel:2.0.0"]}, "dynamic": {"-:.*visual.*": {}}}
WIDER = {"+:.*v_proj.*": {"bits": 8, "group_size": 64}, "+:.*down_proj.*": {"bits": 8, "group_size": 64}}
ROUND: dict[str, Any] = {"autoround_version": "0.5.1", "bits": 4, "data_type": "int", "group_size": 128, "sym": True}
ROUND |= {"block_name_to_quantize": "model.layers", "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}
ROUND |= {"packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "iters": 200}
MODELOPT = {
    "quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "ignore": ["lm_head", "visual*"],
}
MODELOPT |= {"config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}}}
MODELOPT_FILE = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
OLD_NAMES = [*(f"visual.blocks.{i}.attn.qkv" for i in range(3)), "visual.merger.mlp.0", "lm_head"]
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [32, 48]}
FP8 |= {"modules_to_not_convert": ["lm_head", "model.visual.merger.linear_fc1"]}
GATES = [f"model.language_model.layers.{i}.linear_attn.{name}" for i in range(3) for name in ("in_proj_a", "in_proj_b")]
GATES += ["lm_head", "model.language_model.layers.0.linear_attn.conv1d", "mtp.fc", "model.visual.blocks.0.attn.qkv"]


def compressed(layout: str, bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it, null fields included."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "observer_kwargs": {}, "symmetric": True}
    weights |= {"num_bits": bits, "type": kind, **({"group_size": 128} if bits == 4 else {"group_size": None})}
    weights |= {"strategy": "group" if bits == 4 else "channel"}
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    config = {"config_groups": {"group_0": group}, "format": layout, "ignore": OLD_NAMES, "kv_cache_scheme": None}
    return config | {"quant_method": "compressed-tensors", "quantization_status": "compressed", **more}


def mixed() -> dict[str, Any]:
    config = compressed("mixed-precision", 4)
    four, eight = config["config_groups"]["group_0"], compressed("", 8, "float")["config_groups"]["group_0"]
    config["config_groups"] = {
        "group_0": four | {"targets": ["re:.*(gate|up|down)_proj"], "format": "pack-quantized"},
        "group_1": eight | {"targets": ["re:.*self_attn.(q|k|v|o)_proj$"], "format": "float-quantized"},
    }
    return config


GPTQ_4, GPTQ_8, AWQ_4, W4, W8 = (
    gptq(4, 128).write,
    gptq(8, 128).write,
    awq(128).write,
    packed(4, 128).write,
    int8().write,
)
BARE = without(GPTQ_4, "g_idx")
TENSOR, ROWS = float8("tensor", transformers=False).write, float8("channel", transformers=False).write
BLOCKS = float8("block", transformers=True).write
STATIC = with_parts(scaled(TENSOR, ()), input_scale=torch.tensor(1.0))
EIGHT = {"dynamic": False, "num_bits": 8, "type": "float"}
CACHE = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
TWO_WIDTHS = ((WIDE, without(gptq(8, 64).write, "g_idx")), (DECODER, BARE))

LAYOUTS = {
    "auto-round": Layout(ROUND, ((DECODER, BARE),), renamed=True),
    "auto-round in AWQ's layout": Layout(ROUND | {"packing_format": "auto_round:auto_awq"}, ((DECODER, AWQ_4),)),
    "auto-round of GPTQModel": Layout(
        ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
        ((DECODER, without(gptq(4, 128, symmetric=False, version="gptq_v2").write, "g_idx")),),
    ),
    "auto-round's first": Layout(
        {key: value for key, value in ROUND.items() if key != "packing_format"}
        | {"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"},
        ((DECODER, BARE),),
    ),
    "auto-round of two widths": Layout(
        ROUND | {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}}}, TWO_WIDTHS
    ),
    "GPTQ of two widths without g_idx": Layout(GPTQMODEL | {"dynamic": WIDER}, TWO_WIDTHS),
    "ModelOpt": Layout(MODELOPT | {"quant_method": "modelopt"}, ((DECODER, STATIC),), more=CACHE),
    "ModelOpt without a method": Layout(MODELOPT, ((DECODER, STATIC),), more=CACHE),
    "ModelOpt's file": Layout(None, ((DECODER, STATIC),), more=CACHE, beside={"hf_quant_config.json": MODELOPT_FILE}),
    "ModelOpt, a cache alone": Layout({"quant_method": "modelopt", "kv_cache_scheme": EIGHT}, (), more=CACHE),
    "a cache alone": Layout(
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": EIGHT},
        (),
        more=("self_attn.k_scale", "self_attn.v_scale"),
    ),
    "W4A16 and FP8": Layout(mixed(), ((re.compile(r"layers\.\d+\.mlp"), W4), (DECODER, ROWS))),
    "transforms of nothing": Layout(
        compressed("pack-quantized", 4, transform_config={"config_groups": {}}), ((DECODER, W4),)
    ),
    "fp8 with one scale for a cache": Layout(
        {"quant_method": "FP8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        ((DECODER, with_parts(scaled(TENSOR, (1,)), input_scale=ONE)),),
        more=("self_attn.kv_scale",),
    ),
    "compressed_tensors": Layout(compressed("int-quantized", 8, quant_method="compressed_tensors"), ((DECODER, W8),)),
}
# What loaded from the first.
FURTHER = {
    "Qwen2.5-VL AWQ": Layout(AWQ, ((DECODER, AWQ_4),)),
    "Qwen2.5-VL AWQ, new names": Layout(AWQ | {"modules_to_not_convert": None}, ((DECODER, AWQ_4),), renamed=True),
    "InternVL AWQ": Layout(AWQ | {"version": "GEMM"}, ((DECODER, AWQ_4),), family="internvl", place="text_config"),
    "Qwen2-VL GPTQ-Int4": Layout(GPTQ, ((DECODER, with_zero_bias(GPTQ_4)),), family="qwen2_vl"),
    "Qwen2-VL GPTQ-Int8": Layout(GPTQ | {"bits": 8}, ((DECODER, with_zero_bias(GPTQ_8)),), family="qwen2_vl"),
    "GPTQModel": Layout(GPTQMODEL | {"desc_act": True}, ((DECODER, gptq(4, 128, order=True).write),), renamed=True),
    "GPTQModel, the head too": Layout(GPTQMODEL | {"lm_head": True}, ((DECODER, GPTQ_4), (HEAD, GPTQ_4))),
    "W4A16": Layout(compressed("pack-quantized", 4), ((DECODER, W4),), shards=2),
    "W4A16, old names in ignore, new ones in files": Layout(
        compressed("pack-quantized", 4, ignore=["re:visual.*", "lm_head"], sparsity_config={}, transform_config={}),
        ((DECODER, W4),),
        renamed=True,
    ),
    "W8A8, the tower too": Layout(compressed("int-quantized", 8, ignore=["lm_head"]), ((TOWER_TOO, W8),)),
    "FP8-dynamic, the tower too": Layout(compressed("float-quantized", 8, "float"), ((TOWER_TOO, ROWS),), renamed=True),
    "FP8 with scales of a cache": Layout(
        compressed("float-quantized", 8, "float", kv_cache_scheme={"num_bits": 8, "type": "float"}),
        ((DECODER, with_parts(scaled(TENSOR, (1,)), input_scale=ONE)),),
        more=("self_attn.k_scale", "self_attn.v_scale"),
    ),
    "Qwen3-VL FP8": Layout(FP8, ((DECODER, BLOCKS),), family="qwen3_vl", shards=2),
    "Qwen3.5 FP8": Layout(FP8 | {"modules_to_not_convert": GATES}, ((HYBRID, BLOCKS),), family="qwen3_5", shards=2),
    "Qwen3.5 AWQ": Layout(
        AWQ | {"modules_to_not_convert": ["visual", "in_proj_a", "in_proj_b"]}, ((HYBRID, AWQ_4),), family="qwen3_5"
    ),
    "Qwen3.5 GPTQ-Int4": Layout(
        GPTQMODEL | {"dynamic": {"-:.*visual.*": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}}},
        ((re.compile(r"layers\.\d+\.mlp\.\w+_proj\.weight$"), BARE),),
        family="qwen3_5",
    ),
    "Qwen3.5-MoE FP8": Layout(
        FP8 | {"modules_to_not_convert": [*GATES, "model.language_model.layers.0.mlp.gate"]},
        ((HYBRID, BLOCKS), (EXPERTS, BLOCKS)),
        family="qwen3_5_moe",
        shards=2,
    ),
    "Qwen3.5-MoE GPTQ-Int4": Layout(
        GPTQMODEL | {"dynamic": {"-:.*visual.*": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}}},
        ((re.compile(r"layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight$"), BARE),),
        family="qwen3_5_moe",
    ),
    "Qwen3.5-MoE AWQ": Layout(
        AWQ | {"modules_to_not_convert": ["visual", "attn", "mlp.gate"]}, ((EXPERTS, AWQ_4),), family="qwen3_5_moe"
    ),
    "Qwen3.5-MoE W4A16": Layout(
        compressed("pack-quantized", 4, ignore=["lm_head", "re:.*mlp.gate$", "re:.*visual.*"]),
        ((EXPERTS, W4),),
        family="qwen3_5_moe",
    ),
    "Mistral's FP8": Layout(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        ((DECODER, with_parts(scaled(TENSOR, ()), activation_scale=torch.tensor(1.0))),),
        family="llava",
    ),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_weights_of_a_published_layout(checkpoint: CheckpointFactory, tmp_path: Path, name: str) -> None:
    layout = (LAYOUTS | FURTHER)[name]
    expected = write(layout, plain(checkpoint, layout.family), tmp_path)
    spec = load_spec(tmp_path)
    with open_checkpoint(tmp_path, vision_class(spec).renames, spec.quantization) as files:
        assert expected.keys() <= files.entries.keys()
        for matrix, weight in expected.items():
            stored = files.read(matrix)
            wide = stored.dequantized(torch.float32) if isinstance(stored, QuantizedWeight) else stored.float()
            torch.testing.assert_close(wide, weight, rtol=1e-6, atol=1e-7, msg=matrix)
    load_model(tmp_path, spec, create_backend("cpu", torch.float32, backend="reference", threads=1), EPD)


FLOATS = ["ModelOpt", "W4A16 and FP8", "FP8-dynamic, the tower too", "FP8 with scales of a cache", "Mistral's FP8"]


@pytest.mark.parametrize("name", [*FLOATS, "Qwen3-VL FP8"])
def test_a_gpu_keeps_eight_bit_floats(checkpoint: CheckpointFactory, tmp_path: Path, name: str) -> None:
    """Floats stay as stored, except where the last block of a row is smaller than others."""
    layout = (LAYOUTS | FURTHER)[name]
    expected = write(layout, plain(checkpoint, layout.family), tmp_path)
    spec = load_spec(tmp_path).held_on("cuda:0")
    assert spec.quantization is not None and spec.quantization.stays_quantized
    with open_checkpoint(tmp_path, vision_class(spec).renames, spec.quantization) as files:
        for matrix, weight in expected.items():
            stored = files.read(matrix)
            whole = name in FLOATS or weight.shape[1] % 48 == 0
            assert isinstance(stored, QuantizedWeight) == whole, matrix
            if isinstance(stored, QuantizedWeight):
                assert stored.is_float or name == "W4A16 and FP8"
                stored = stored.dequantized(torch.float32)
            torch.testing.assert_close(stored.float(), weight, rtol=1e-6, atol=1e-7, msg=matrix)


def test_of_numbers_that_no_float_is_none_is_kept(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """NaN has a bit pattern of its own in E4M3 as well."""
    write(LAYOUTS["ModelOpt"], plain(checkpoint, "qwen2_5_vl"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight") and "visual" not in name)
    tensors[name].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, tmp_path / "model.safetensors")
    for device in ("cpu", "cuda:0"):
        with pytest.raises(CheckpointError, match=r"q_proj\.weight holds values that are not finite"):
            load_model(tmp_path, load_spec(tmp_path).held_on(device), exact(), EPD)


def exact() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS | FURTHER)
def test_logits_of_a_published_layout(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to those of dequantised weights, where products do not round activations; near them where they do."""
    layout = (LAYOUTS | FURTHER)[name]
    source = plain(checkpoint, layout.family)
    expected = write(layout, source, tmp_path / "quantized")
    write(
        replace(layout, config=None, matrices=(), beside=None, place="", more=()),
        source,
        tmp_path / "tensors",
        expected,
    )
    near, actual = logits(tmp_path / "tensors"), logits(tmp_path / "quantized")
    assert (actual - near).abs().max() < 0.15 * near.abs().max()
    monkeypatch.setattr(
        "hydra_engine.models.loading.weights._fill_quantized",
        lambda name, slot, stored, target, device: slot.fill(stored.dequantized(target)),
    )
    assert (logits(tmp_path / "quantized") - near).abs().max() < 1e-3 * near.abs().max()


REFUSED: dict[str, tuple[Layout, str]] = {
    "no quantization_config": (
        Layout(None, ((DECODER, AWQ_4),)),
        r"quantised \(tensor model.layers.0.*\), but config.json has no quantization_config",
    ),
    "scales that divide": (
        Layout({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, ((DECODER, ROWS),)),
        "scales divide",
    ),
    "rotated": (Layout(GPTQMODEL | {"rotation": "hadamard"}, ((DECODER, GPTQ_4),)), r"rotated activations \(rotation"),
    "another layout of auto-round": (
        Layout(ROUND | {"packing_format": "auto_round"}, ((DECODER, BARE),)),
        "packing_format 'auto_round' is not supported",
    ),
    "auto-round's floats": (Layout(ROUND | {"data_type": "mx_fp"}, ((DECODER, BARE),)), "data_type 'mx_fp' are not"),
    "AWQ's layout in 8 bits": (
        Layout(ROUND | {"bits": 8, "packing_format": "auto_round:auto_awq"}, ((DECODER, AWQ_4),)),
        "with 4 bits only",
    ),
    "NVFP4": (Layout(MODELOPT | {"quant_algo": "NVFP4"}, ((DECODER, STATIC),)), "quant_algo 'NVFP4' are not supported"),
    "transforms": (
        Layout(compressed("pack-quantized", 4, transform_config={"config_groups": {"v": {}}}), ((DECODER, W4),)),
        "transform_config",
    ),
    "zero points of another width": (
        Layout(GPTQMODEL, ((DECODER, gptq(8, 128).write),)),
        r"qzeros is \[2, 32\], which are not numbers of 128 outputs in 4 bits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_would_be_read_wrongly_are_refused(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str
) -> None:
    layout, words = REFUSED[name]
    write(layout, plain(checkpoint, layout.family), tmp_path)
    with pytest.raises(CheckpointError, match=words):
        spec = load_spec(tmp_path)
        load_model(tmp_path, spec, create_backend("cpu", torch.float32, backend="reference", threads=1), EPD)


def test_weights_under_another_name_are_told(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    write(Layout(GPTQ, ((DECODER, GPTQ_4),)), plain(checkpoint, "qwen2_5_vl"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    spec = load_spec(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"but gptq_model-4bit-128g\.safetensors; if that .* rename it to model\."
    ):
        open_checkpoint(tmp_path, (), spec.quantization)


def plain(checkpoint: CheckpointFactory, family: str) -> Path:
    """A checkpoint with as many layers as DeepStack needs, and a head that can be cut into words."""
    layers = {"qwen3_vl": 3, "qwen3_5": 4, "qwen3_5_moe": 4}.get(family, 1)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text: dict[str, Any] = {**SIZES, "num_hidden_layers": layers, "vocab_size": 320}
    text |= {"rope_parameters": rope} if family.startswith("qwen2") else {}
    text |= {"moe_intermediate_size": 128, "num_experts": 4} if family.endswith("moe") else {}
    return checkpoint(f"published-{family}", family, text=text)


def write(
    layout: Layout, source: Path, directory: Path, weights: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Gives the matrices dequantised, by canonical names; `weights` of these take the place of those of `source`."""
    directory.mkdir(exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    renames = vision_class(load_spec(source)).renames
    tensors: dict[str, Tensor] = {}
    parts: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for stored, tensor in load_file(source / "model.safetensors").items():
        canonical, name = canonical_name(stored, renames), renamed(stored) if layout.renamed else stored
        writer = next((by for pattern, by in layout.matrices if tensor.dim() == 2 and pattern.search(stored)), None)
        if writer is None:
            tensors[name] = (weights or {}).get(canonical, tensor)
            continue
        matrix = writer(tensor.float().numpy())
        expected[canonical] = torch.from_numpy(np.ascontiguousarray(matrix.weight))
        parts |= {f"{name.removesuffix('weight')}{leaf}": part.contiguous() for leaf, part in matrix.parts.items()}
    tensors = parts | tensors  # a bias of its own stays
    layer = next(name.split("mlp")[0] for name in tensors if "layers.0.mlp" in name)
    tensors |= {f"{layer}{name}": torch.ones(1) for name in layout.more}
    save(tensors, directory, layout.shards)
    for file, values in (layout.beside or {}).items():
        (directory / file).write_text(json.dumps(values))
    config = json.loads((directory / "config.json").read_text())
    if layout.config is not None:
        (config[layout.place] if layout.place else config)["quantization_config"] = layout.config
    (directory / "config.json").write_text(json.dumps(config))
    return expected


def renamed(name: str) -> str:
    return re.sub(r"^visual\.", "model.visual.", re.sub(r"^model\.", "model.language_model.", name))


def save(tensors: dict[str, Tensor], directory: Path, shards: int) -> None:
    """Cut by turns, so that the parts of one matrix are in several files."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    names = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, directory / file)
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def logits(directory: Path) -> Tensor:
    driver = Driver(directory, create_backend("cpu", torch.float32, backend="reference", threads=1))
    return driver.run(driver.request(PROMPT), [])
