"""Weights quantised while they are loaded: the rounding, which matrices, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hydra_engine.backend.quantized import QuantizedWeight, quantized
from hydra_engine.backend.reference.ops import QuantizedLinear, ReferenceOps
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import ConfigError
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.basic import Linear
from hydra_engine.models.loading.parameters import Demands, Scope
from hydra_engine.models.loading.quantize import quantized_matrix
from hydra_engine.models.specs.quantization import at_load
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.quantized.written import METHODS, Method, write_checkpoint

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
CPU = torch.device("cpu")


def error(weight: torch.Tensor, result: QuantizedWeight) -> float:
    return float((result.dequantized(torch.float32) - weight).norm() / weight.norm())


def test_four_bits_have_less_error_than_steps_from_the_largest_number() -> None:
    """Errors for normal numbers: llama.cpp's Q4_0 0.086, symmetric numbers 0.097, the least possible 0.081."""
    weight = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    assert error(weight, quantized(weight, 4, 32, torch.float32)) > 0.095
    assert error(weight, quantized_matrix(weight, 4)) < 0.082
    assert error(weight, quantized_matrix(weight, 8)) < 0.009


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_do_not_depend_on_their_neighbours(num_bits: int, dtype: torch.dtype) -> None:
    """A row gets the same numbers however the matrix is cut; rows and groups of zeros stay zeros."""
    weight = torch.randn(4099, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[7] = 0
    weight[8, :32] = 0
    whole, part = quantized_matrix(weight, num_bits), quantized_matrix(weight[5:11], num_bits)
    assert torch.equal(whole.values[5:11], part.values) and torch.equal(whole.scales[5:11], part.scales)
    assert whole.scales.dtype is dtype
    assert part.numbers()[2].eq(0).all() and part.numbers()[3, :32].eq(0).all()
    assert part.scales.isfinite().all()


def test_inputs_that_do_not_fit_groups_have_eight_bits() -> None:
    assert quantized_matrix(torch.randn(5, 80), 4).num_bits == 8


def test_a_fused_layer_is_its_parts() -> None:
    """`hydra-engine quantize` quantises the parts one by one."""
    parts = {"a": 8, "b": 16}
    demands = Demands()
    linear = Linear(Scope(ReferenceOps(), torch.float32, CPU, demands, quantize=4), parts, 64, bias=False)
    weights = {name: torch.randn(num_out, 64) for name, num_out in parts.items()}
    for name, weight in weights.items():
        demands.slots[f"{name}.weight"].fill(weight)
    (packed,) = linear.packed
    assert isinstance(packed, QuantizedLinear)
    for name, rows in (("a", slice(0, 8)), ("b", slice(8, 24))):
        assert torch.equal(packed.weight.values[rows], quantized_matrix(weights[name], 4).values)


@pytest.mark.quick("llama-int4", "llava-int4")
@pytest.mark.parametrize("wanted", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "llava", "openpangu_vl", "qwen3_5_text", "qwen3_5"])
def test_a_model_s_decoder_is_quantised_and_nothing_else(
    checkpoint: CheckpointFactory, tmp_path: Path, family: str, wanted: str
) -> None:
    layers = {"num_hidden_layers": 4} if family.startswith("qwen3_5") else {}
    directory = checkpoint(f"quantizing-{family}", family, text=SIZES | layers)
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    plain = Driver(directory, backend)
    less = Driver(directory, backend, options=SpecOptions(quantization=wanted))
    prompt = [1, *range(40, 60)]
    expected, actual = (driver.run(driver.request(prompt), []) for driver in (plain, less))
    difference = (actual - expected).norm() / expected.norm()
    assert 0 < difference < (0.6 if wanted == "int4" else 0.15)
    spec = less.spec
    vision = 0 if spec.vision is None else 4 * spec.vision.num_parameters()
    # Scales of float32 weights are float32 too, and not of two bytes.
    assert less.model.weights_bytes == pytest.approx(vision + spec.language_bytes(4, 4), rel=0.12)
    assert less.model.weights_bytes < 0.6 * plain.model.weights_bytes or family == "llava"


def test_what_does_not_fit_the_checkpoint_is_refused(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("plain-llama-wishes", "llama", text=SIZES)
    write_checkpoint(plain, tmp_path / "awq", METHODS["awq"])
    write_checkpoint(plain, tmp_path / "fp8", METHODS["fp8"])

    def refusal(directory: Path, **options: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_spec(directory, SpecOptions(**options))
        return caught.value.message

    assert "is not quantised; --quantization int8 or int4" in refusal(plain, quantization="awq")
    assert "is quantised by awq; leave" in refusal(tmp_path / "awq", quantization="gptq")
    assert "is quantised by awq already; leave" in refusal(tmp_path / "awq", quantization="int8")
    assert "needs a native model" in refusal(plain, quantization="int8", model_impl="transformers")
    assert load_spec(tmp_path / "awq", SpecOptions(quantization="awq")).quantized_as == "awq, 4 bits"
    write_checkpoint(plain, tmp_path / "act-order", METHODS["gptq-act-order"])
    for name in ("fp8", "act-order"):  # neither is computed with as it is stored
        assert load_spec(tmp_path / name, SpecOptions(quantization="int4")).quantized_as == "quantised at start, 4 bits"


def test_floats_beside_integers_are_reckoned_as_what_they_become(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("plain-llama-mixed", "llama", text=SIZES | {"num_hidden_layers": 2})
    four, eight = METHODS["w4-32"], METHODS["fp8-compressed-channel"]
    config = copy.deepcopy(four.config)
    section = config["quantization_config"]
    section["config_groups"]["group_1"] = eight.config["quantization_config"]["config_groups"]["group_0"]
    section["format"] = "mixed-precision"
    # down_proj has the only matrices of so many inputs
    mixed = Method(config, lambda weight: (eight if weight.shape[1] == 256 else four).write(weight), None)
    write_checkpoint(plain, tmp_path / "mixed", mixed)
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    spec = load_spec(tmp_path / "mixed")
    held = load_model(tmp_path / "mixed", spec, backend, EPD).weights_bytes
    assert held == pytest.approx(spec.language_bytes(4, 4), rel=0.05)
    assert spec.language_bytes(4, 4) > 1.5 * replace(spec, quantization=at_load("int4")).language_bytes(4, 4)
    for damaged in (b"", b"\xff" * 8 + b"{", (1 << 18).to_bytes(8, "little") + b"[" * (1 << 18), bytes(8) + b"[]"):
        for path in (tmp_path / "mixed").glob("*.safetensors"):
            path.write_bytes(damaged)
        quantization = load_spec(tmp_path / "mixed").quantization
        assert quantization is not None and quantization.float_share == 1


def test_matrices_that_become_tensors_are_told(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    plain = checkpoint("plain-llama-notes", "llama", text=SIZES | {"num_hidden_layers": 1})
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    for name, told in (("fp8", True), ("gptq-act-order", True), ("w4-g_idx", True), ("gptq-4", False)):
        write_checkpoint(plain, tmp_path / name, METHODS[name])
        spec = load_spec(tmp_path / name)
        model = load_model(tmp_path / name, spec, backend, EPD)
        assert bool(model.notes) == told
        assert model.weights_bytes == pytest.approx(spec.language_bytes(4, 4), rel=0.12)
        assert not told or "7 matrices" in model.notes[0]


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-128", "fp8-compressed-channel"])
def test_a_gpu_holds_a_byte_of_each_eight_bit_float(checkpoint: CheckpointFactory, tmp_path: Path, name: str) -> None:
    """Half of what it would in 16 bits, and as many as the plan of the caches and `hydra-engine memory` reckon."""
    plain = checkpoint("plain-llama-floats", "llama", text=SIZES | {"num_hidden_layers": 2})
    weights = write_checkpoint(plain, tmp_path / name, METHODS[name])
    spec = load_spec(tmp_path / name)
    matrices = sum(weight.size for weight in weights.values())
    held = spec.held_on("cuda:0")
    assert spec.language_bytes(2, 2) - held.language_bytes(2, 2) == pytest.approx(matrices, rel=0.04)
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    model = load_model(tmp_path / name, held, backend, EPD)
    assert not model.notes and model.weights_bytes == pytest.approx(held.language_bytes(4, 4), rel=0.05)
    at_start = load_spec(tmp_path / name, SpecOptions(quantization="int8")).held_on("cuda:0")
    assert at_start.quantization is not None and not at_start.quantization.stays_quantized, (
        "they are to be quantised anew"
    )
    assert load_model(tmp_path / name, at_start, backend, EPD).weights_bytes < 1.1 * model.weights_bytes
