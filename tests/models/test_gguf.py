"""GGUF files against the Hugging Face directories that they were made from: the same tensors, logits and tokens."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import Backend
from hydra_engine.backend.cpu.rounding import GGML_TYPES, decoded_blocks
from hydra_engine.backend.quantized import QuantizedWeight, quantized_rows
from hydra_engine.backend.reference import ops as reference_ops
from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.loading.checkpoint import MAX_EXPERTS
from hydra_engine.models.loading.gguf_checkpoint import ordered
from hydra_engine.models.loading.gguf_names import Order
from hydra_engine.models.loading.gguf_tensors import decode_in_torch, decoded
from hydra_engine.models.loading.open_checkpoint import open_checkpoint
from hydra_engine.models.specs.gguf_config import llama3_factors
from hydra_engine.models.specs.gguf_file import TENSOR_TYPES
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.model_files import find_model_files
from tests.gguf_files import add_tensor, finish, gguf, write_gguf
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.families.base import Pair, conversations, words
from tests.models.families.cases import CASES
from tools.miniatures.gguf_text import random_blocks, write_random_text

TOLERANCE = 1e-5
# The files of Qwen2.5-VL do not say how wide windows are; all published ones have this width.
WITH_PICTURES: dict[str, dict[str, Any]] = {
    "llava": {},
    "internvl": {},
    "qwen2_vl": {},
    "qwen2_5_vl": {"vision": {"window_size": 112}},
    "qwen3_vl": {},
    "qwen3_5": {"text": {"linear_num_value_heads": 8}},
    "qwen3_vl_moe": {},
    "qwen3_5_moe": {},
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "num_hidden_layers": 4}
TEXT_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"text": {"rope_parameters": LINEAR}}),
    "llama-tied": ("llama", {"text": {"tie_word_embeddings": True, "num_key_value_heads": 1}}),
    "llama-biases": ("llama", {"text": {"attention_bias": True}}),
    "mistral": ("mistral", {"text": {"sliding_window": None}}),
    "qwen2": ("qwen2", {"text": {"tie_word_embeddings": True}}),
    "qwen3": ("qwen3", {"text": {"head_dim": 24}}),
    "qwen3_5": ("qwen3_5_text", {"text": {**DELTA, "linear_num_value_heads": 6}}),
    "qwen3_moe": ("qwen3_moe", {"text": {"norm_topk_prob": True, "mlp_only_layers": [1]}}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"text": {**DELTA, "linear_num_value_heads": 6}}),
    "qwen3_5-alike": ("qwen3_5_text", {"text": {**DELTA, "linear_num_value_heads": 2}}),
}
QUANTISED = [kind.name for kind in TENSOR_TYPES.values() if kind.name not in ("F32", "F16", "BF16")]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder


@pytest.fixture
def reference() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


def folder_of(model: Path, mmproj: Path | None = None) -> Path:
    return find_model_files(EngineConfig(model=str(model), mmproj=None if mmproj is None else str(mmproj))).model_path


@pytest.mark.quick("llava", "qwen3_5]")
@pytest.mark.parametrize("family", WITH_PICTURES)
def test_logits_with_pictures_are_those_of_the_directory(
    family: str, checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    directory = checkpoint(f"gguf-{family}", family, **WITH_PICTURES[family])
    variant = next(iter(CASES[family].variants))
    pair = Pair(CASES[family], variant, directory, reference, num_blocks=768)
    made = Pair(CASES[family], variant, directory, reference, num_blocks=768)
    made.driver = Driver(folder_of(*write_gguf(directory, tmp_path)), reference, num_blocks=768)
    assert made.driver.spec.language == pair.spec.language
    prompts = conversations(CASES[family], pair)
    for name in ("text only", "many images", "two turns"):
        ours, theirs = made.request(prompts[name]), pair.request(prompts[name])
        assert_near(made.driver.run(ours, []), pair.driver.run(theirs, []), name)
        ours, theirs = made.request(prompts[name]), pair.request(prompts[name])
        assert made.driver.generate(ours, 8, [11]) == pair.driver.generate(theirs, 8, [11])


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_vl"])
def test_frames_of_a_video_are_sized_as_by_the_published_processors(
    family: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    """A video as long as its frames are small has more pixels than any picture; other types take a picture's limits."""
    directory = checkpoint(f"gguf-{family}", family, **WITH_PICTURES[family])
    vision: Any = load_spec(folder_of(*write_gguf(directory, tmp_path))).vision
    videos = vision.frames if family == "qwen3_5" else vision.sampling
    published = {"qwen3_5": (4096, 25165824), "qwen2_vl": (56 * 56, 3584 * 3584)}[family]
    assert (videos.limits.min_pixels, videos.limits.max_pixels) == published


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_logits_of_text_models_are_those_of_the_directory(
    name: str, checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    family, overrides = TEXT_ONLY[name]
    directory = checkpoint(f"gguf-text-{name}", family, **overrides)
    assert_near(logits(folder_of(write_gguf(directory, tmp_path)[0]), reference), logits(directory, reference), name)


def test_a_text_model_of_a_family_with_pictures_runs_without_its_tower(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    directory = checkpoint("gguf-qwen2_vl", "qwen2_vl")
    alone = folder_of(write_gguf(directory, tmp_path)[0])
    assert load_spec(alone).vision is None
    assert_near(logits(alone, reference), logits(directory, reference), "text")


def test_layers_that_guess_further_tokens_are_left_out(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    """Files of Qwen3.5 have them after the others, and say of each layer whether it is a delta net."""
    directory = checkpoint("gguf-text-qwen3_5", "qwen3_5_text", text=TEXT_ONLY["qwen3_5"][1]["text"])
    text, _ = write_gguf(directory, tmp_path)
    further = {"blk.4.attn_norm.weight": torch.ones(64), "blk.4.nextn.eh_proj.weight": torch.ones(64, 128)}
    changed = {"qwen35.block_count": 5, "qwen35.full_attention_interval": 1}
    copied(text, tmp_path / "more.gguf", added=further, changed=changed, recurrent=[True, True, True, False, False])
    assert_near(logits(folder_of(tmp_path / "more.gguf"), reference), logits(directory, reference), "more")


@pytest.mark.slow
def test_experts_are_cut_out_of_the_tensors_of_all(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    """Gate and up may be one tensor, and the gate of a shared expert a vector; routers are never quantised."""
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_hidden_layers": 4}
    directory = checkpoint("gguf-experts", "qwen3_5_moe_text", text=sizes)
    text, _ = write_gguf(directory, tmp_path, "Q8_0")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(text).tensors}
    with open_checkpoint(folder_of(text)) as files:
        for part in ("gate", "up", "down"):
            tensor = stored[f"blk.1.ffn_{part}_exps.weight"]
            assert tensor.tensor_type.name == "Q8_0"
            for expert, expected in enumerate(gguf.quants.dequantize(tensor.data, tensor.tensor_type)):
                weight = files.read(f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight")
                assert isinstance(weight, QuantizedWeight)
                assert np.array_equal(weight.dequantized(torch.float32).numpy(), expected)
        assert isinstance(files.read("model.layers.1.mlp.gate.weight"), Tensor)
    many = {"blk.0.ffn_up_exps.weight": torch.ones(MAX_EXPERTS, 1, 1)}
    copied(text, tmp_path / "many.gguf", added=many, leave_out=set(many))
    folder = folder_of(tmp_path / "many.gguf")
    with pytest.raises(
        CheckpointError, match=f"name more than {MAX_EXPERTS} experts, up to tensor blk.0.ffn_up_exps.weight"
    ):
        open_checkpoint(folder)
    plain, _ = write_gguf(directory, tmp_path / "plain")
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(plain).tensors}
    added, gone = {}, set()
    for layer in range(4):
        gate, up, both = (f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "gate_up"))
        shared = f"blk.{layer}.ffn_gate_inp_shexp.weight"
        added |= {both: torch.cat((tensors[gate], tensors[up]), dim=1), shared: tensors[shared][0]}
        gone |= {gate, up, shared}
    copied(plain, tmp_path / "fused.gguf", added=added, leave_out=gone)
    assert torch.equal(logits(folder_of(tmp_path / "fused.gguf"), reference), logits(directory, reference))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_columns_of_blocks_change_places(kind: str) -> None:
    """Heads of 128 inputs lie across blocks of 256; those of 24 across groups, and stay no blocks."""
    numbers = next(known for known in TENSOR_TYPES.values() if known.name == kind)
    weight = decoded(torch.from_numpy(random_blocks(kind, 5, 768)).flatten(), numbers, (5, 768))
    assert isinstance(weight, QuantizedWeight)
    plain = weight.dequantized(torch.float32)
    for dim in (128, 24):
        found = ordered(weight, Order((1, 768 // dim // 2, 2, -1), columns=True))
        expected = plain.unflatten(1, (-1, 2, dim)).transpose(1, 2).flatten(1)
        assert isinstance(found, QuantizedWeight) == (dim == 128)
        dense = found.dequantized(torch.float32) if isinstance(found, QuantizedWeight) else found
        assert torch.equal(dense, expected)


def test_both_towers_of_internvl_are_told_by_their_tensors(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """The large one has root mean square norms, also of queries and keys, and no biases there."""
    tower = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    directory = checkpoint("gguf-intern-6b", "internvl", text={"model_type": "qwen3"}, vision=tower)
    folder = folder_of(*write_gguf(directory, tmp_path))
    assert load_spec(folder).vision == load_spec(directory).vision
    with open_checkpoint(folder) as files, open_checkpoint(directory) as origin:
        assert files.entries.keys() == origin.entries.keys()
        for name in origin.entries:
            assert torch.equal(files.read(name), origin.read(name)), name


def test_scaled_rotary_frequencies_are_llama_3s(tmp_path: Path, checkpoint: CheckpointFactory) -> None:
    """A file has what frequencies are divided by, and not the parameters of the formula."""
    scaled = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaled, "original_max_position_embeddings": 8192}
    directory = checkpoint("gguf-llama3", "llama", text={"rope_parameters": rope})
    text, _ = write_gguf(directory, tmp_path)
    factors = llama3_factors(1e6, 16, 32.0, 8192)
    assert factors[0] == 1.0 and factors[-1] == 32.0 and any(1.0 < factor < 32.0 for factor in factors)
    add_rope_factors(text, tmp_path / "scaled.gguf", factors)
    spec = load_spec(folder_of(tmp_path / "scaled.gguf"))
    assert spec.language.rope_parameters == load_spec(directory).language.rope_parameters
    add_rope_factors(text, tmp_path / "odd.gguf", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 32.0])
    with pytest.raises(CheckpointError, match=r"odd.gguf scales rotary frequencies .* not Llama 3's"):
        folder_of(tmp_path / "odd.gguf")


SCALINGS: dict[str, tuple[dict[str, float | str], dict[str, Any]]] = {  # of GGUF, of transformers
    "linear by the older name": ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "linear without a type": ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            **{"rope.scaling.attn_factor": 0.8, "rope.scaling.yarn_beta_fast": 16.0},
        },
        {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
            "attention_factor": 0.8 * (1 + 0.1 * math.log(4)),
        },
    ),
}


@pytest.mark.quick("llama", "qwen3-yarn")
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_scaled_positions_give_the_logits_of_transformers(
    family: str, scaling: str, checkpoint: CheckpointFactory, tmp_path: Path
) -> None:
    directory = checkpoint(f"gguf-scaled-{family}", family)
    settings, rope = SCALINGS[scaling]
    text, _ = write_gguf(directory, tmp_path)
    copied(text, tmp_path / "scaled.gguf", settings=settings)
    scaled = Path(shutil.copytree(directory, tmp_path / "scaled"))
    config = json.loads((scaled / "config.json").read_text())
    config.get("text_config", config)["rope_parameters"] |= rope
    (scaled / "config.json").write_text(json.dumps(config))
    found = logits(folder_of(tmp_path / "scaled.gguf"), create_backend("cpu", torch.float32, threads=1))
    auto = transformers.AutoModelForImageTextToText if family in WITH_PICTURES else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(scaled, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([words(3, 40)])).logits[0]
    assert_near(found, expected, scaling, 1e-4)
    assert (found - logits(directory, create_backend("cpu", torch.float32, threads=1))).abs().max() > 1e-2


@pytest.mark.parametrize("kind", QUANTISED)
def test_blocks_are_what_llama_cpp_says_they_are(kind: str) -> None:
    """Bits are equal, except for types with offsets in 4 bits, where one sum is rounded."""
    raw = random_blocks(kind, 37, 768)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    numbers = next(known for known in TENSOR_TYPES.values() if known.name == kind)
    weight = decoded(torch.from_numpy(raw).flatten(), numbers, (37, 768))
    assert isinstance(weight, QuantizedWeight)
    difference = np.abs(weight.dequantized(torch.float32).numpy() - expected)
    assert difference.max() <= (2**-20 * np.abs(expected).max() if kind in ("Q4_1", "Q4_K") else 0)
    assert weight.num_bits == (4 if kind.startswith("Q4") else 6 if kind in ("Q5_K", "Q6_K") else 8)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", GGML_TYPES)
def test_blocks_are_taken_apart_as_the_formulas_say(kind: str, threads: int) -> None:
    """Uses the extension on one and on two threads; also a scale that is no number."""
    numbers = next(known for known in TENSOR_TYPES.values() if known.name == kind)
    for rows, width in ((1, 256), (37, 768), (301, 1536)):
        raw = torch.from_numpy(random_blocks(kind, rows, width)).flatten()
        raw[-2:] = 255  # the scale of the last block of Q6_K; elsewhere numbers
        expected = decode_in_torch(raw, numbers, rows)
        _C.set_num_threads(threads)
        weight = decoded_blocks(raw, kind, rows)
        _C.set_num_threads(1)
        assert weight.stack_key == expected.stack_key and torch.equal(weight.values, expected.values)
        for part in ("scales", "offsets", "block_scales"):
            found, wanted = getattr(weight, part), getattr(expected, part)
            assert (found is None) == (wanted is None)
            assert found is None or torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), part
        with pytest.raises(ValueError, match="expected whole blocks"):
            decoded_blocks(raw[:-1], kind, rows)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_models_compute_what_their_dequantised_weights_do(
    kind: str, checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are rounded as quantised products round them."""
    directory = checkpoint("gguf-qwen2_vl", "qwen2_vl")
    pair = Pair(CASES["qwen2_vl"], "plain", directory, reference, num_blocks=768)
    pair.driver = Driver(folder_of(*write_gguf(directory, tmp_path, kind)), reference, num_blocks=768)
    prompt = conversations(CASES["qwen2_vl"], pair)["one image"]
    found = pair.driver.run(pair.request(prompt), [])
    products = 0

    def dequantised_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
        nonlocal products
        products += 1
        rows, steps = quantized_rows(x, weight.group_size)
        wide = (rows.double() * steps[..., None].double()).flatten(2)[:, :, : weight.group_size].flatten(1)
        return (wide @ weight.dequantized(torch.float32).double().T).float()

    monkeypatch.setattr(reference_ops, "reference_product", dequantised_product)
    assert_near(pair.driver.run(pair.request(prompt), []), found, kind, 1e-3)
    assert products > 0


def test_scales_in_two_levels_compute_what_they_stand_for_and_some_are_not_zero(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    """Layers in Q4_K, the head in Q6_K, on the kernels and by the formulas; the folder says what they take."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    directory = checkpoint("gguf-k", "llama", text={**sizes, "tie_word_embeddings": False})
    with open_checkpoint(directory) as files:
        shapes = {name: entry.shape for name, entry in files.entries.items()}
    write_random_text(tmp_path / "k.gguf", directory, shapes, seed=1)
    folder = folder_of(tmp_path / "k.gguf")
    expected = logits(folder, reference)
    by_row = (logits(folder, create_backend("cpu", torch.float32)) - expected).abs().amax(1) / expected.abs().max()
    # Where a number is rounded to its neighbour, or a part to 8 bits and not to 16, for float32 rounding before.
    assert by_row.median() < 1e-5 and by_row.max() < 0.02
    kept = load_spec(folder).quantization
    assert kept is not None and kept.num_bits == (4,) and kept.bytes_per_weight == 18.5 / 32
    block = np.frombuffer(bytes(4) + bytes(range(140)), np.uint8)  # d and dmin are 0
    named = next(t for t in gguf.GGUFReader(tmp_path / "k.gguf").tensors if t.name == "blk.0.attn_q.weight")
    zeros = named._replace(data=np.tile(block, (named.data.shape[0], 1)))
    copied(tmp_path / "k.gguf", tmp_path / "zero.gguf", replaced={named.name: zeros})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has numbers, but its scales are all zero"):
        Driver(folder_of(tmp_path / "zero.gguf"), reference)


def test_parts_of_one_matrix_may_have_different_types(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    """Files of mixed precision are like this: values in more bits than queries and keys."""
    directory = checkpoint("gguf-llama-mixed", "llama", text={"tie_word_embeddings": True})
    folders = {kind: folder_of(write_gguf(directory, tmp_path / kind, kind)[0]) for kind in ("F32", "Q4_0", "Q8_0")}
    mixed = mix(tmp_path / "Q4_0" / "model.gguf", tmp_path / "Q8_0" / "model.gguf", tmp_path / "mixed.gguf")
    found = logits(folder_of(mixed), reference)
    expected = logits(folders["F32"], reference)
    assert (found - expected).abs().mean() < (logits(folders["Q4_0"], reference) - expected).abs().mean()
    with open_checkpoint(folder_of(mixed)) as checkpoint_of_both:
        names = ("self_attn.q_proj", "self_attn.v_proj")
        q, v = (checkpoint_of_both.read(f"model.layers.0.{name}.weight") for name in names)
    assert isinstance(q, QuantizedWeight) and isinstance(v, QuantizedWeight)
    assert (q.num_bits, v.num_bits) == (4, 8)


def test_settings_say_how_layers_are_quantised(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    directory = checkpoint("gguf-llama-mixed", "llama", text={"tie_word_embeddings": True})
    files = {kind: write_gguf(directory, tmp_path / kind, kind)[0] for kind in ("F32", "Q4_0", "Q8_0")}
    assert load_spec(folder_of(files["F32"])).quantization is None
    mixed = folder_of(mix(files["Q4_0"], files["Q8_0"], tmp_path / "mixed.gguf"))
    kept = load_spec(mixed).quantization
    assert kept is not None and kept.method == "gguf" and kept.num_bits == (4, 8)
    with open_checkpoint(mixed) as files_of_both:
        names = [name for name in files_of_both.entries if ".layers." in name]
        weights = [weight for name in names if isinstance(weight := files_of_both.read(name), QuantizedWeight)]
    num_weights = sum(weight.num_out * weight.num_in for weight in weights)
    assert kept.bytes_per_weight == pytest.approx(sum(weight.nbytes for weight in weights) / num_weights)
    assert load_spec(mixed, SpecOptions(quantization="gguf")).at_load is None
    with pytest.raises(ConfigError, match="quantised by gguf already; leave --quantization out"):
        load_spec(mixed, SpecOptions(quantization="int4"))
    with pytest.raises(ConfigError, match="quantised by gguf; leave --quantization out"):
        load_spec(mixed, SpecOptions(quantization="awq"))


def test_tensors_that_do_not_fit_are_named(checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path) -> None:
    directory = checkpoint("gguf-text-llama", "llama", text={"rope_parameters": LINEAR})
    text, _ = write_gguf(directory, tmp_path)
    copied(text, tmp_path / "short.gguf", leave_out={"blk.1.attn_q.weight"})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        Driver(folder_of(tmp_path / "short.gguf"), reference)
    copied(text, tmp_path / "long.gguf", added={"blk.0.extra.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"not expected: blk\.0\.extra\.weight"):
        Driver(folder_of(tmp_path / "long.gguf"), reference)


def test_an_mmproj_that_does_not_fit_is_named(
    checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path
) -> None:
    text, mmproj = write_gguf(checkpoint("gguf-internvl", "internvl"), tmp_path)
    assert mmproj is not None
    read = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(mmproj).tensors}
    positions, last = "v.position_embd.weight", "mm.model.mlp.3.weight"
    for name, left_out, added, message in (
        ("short", "v.blk.1.ls1.weight", None, r"missing: vision_tower\.encoder\.layer\.1\.lambda_1$"),
        ("odd", positions, read[positions][:, 1:], r"position_embeddings is \[1, 16, 48\] instead of \[1, 17, 48\]"),
        ("wide", last, torch.zeros(96, 64), r"wide.gguf makes features of 96 numbers, and the text model takes 64;"),
    ):
        changed = tmp_path / f"{name}.gguf"
        copied(mmproj, changed, leave_out={left_out}, added={} if added is None else {left_out: added})
        with pytest.raises(CheckpointError, match=message):
            Driver(folder_of(text, changed), reference)


def assert_near(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape, what
    assert (actual - expected).abs().max().item() <= tolerance, what


def logits(folder: Path, backend: Backend) -> Tensor:
    driver = Driver(folder, backend)
    return driver.run(driver.request(words(3, 40)), [])


def mix(path: Path, values: Path, out: Path) -> Path:
    """`path` with the matrices of values of another file."""
    better = {tensor.name: tensor for tensor in gguf.GGUFReader(values).tensors if ".attn_v." in tensor.name}
    copied(path, out, replaced=better)
    return out


def add_rope_factors(path: Path, out: Path, factors: list[float]) -> None:
    copied(path, out, added={"rope_freqs.weight": torch.tensor(factors)})


def copied(
    path: Path,
    out: Path,
    *,
    added: Any = (),
    replaced: Any = (),
    leave_out: frozenset[str] | set[str] = frozenset(),
    changed: Mapping[str, int] = MappingProxyType({}),
    settings: Mapping[str, float | str] = MappingProxyType({}),
    recurrent: Sequence[bool] = (),
) -> None:
    """A file with the settings and other tensors of another one. `changed`: settings. `recurrent`: which layers
    are delta nets, of which the last one guesses further tokens. `settings`: further ones of the architecture."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changed.get(name, field.contents()), kind, inner)
    for name, value in settings.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{writer.arch}.{name}", value, kind)
    if recurrent:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", list(recurrent))
        writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    for tensor in reader.tensors:
        if tensor.name not in leave_out:
            tensor = dict(replaced).get(tensor.name, tensor)
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, extra in dict(added).items():
        add_tensor(writer, name, extra, "F32")
    finish(writer)
