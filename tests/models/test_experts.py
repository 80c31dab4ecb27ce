"""Mixtures of experts: every layout of published weights gives the same model, what does not fit is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine.backend.base import Backend
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.experts import LinearExperts
from hydra_engine.backend.reference.ops import QuantizedLinear, ReferenceOps
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import build_model, load_model
from hydra_engine.models.layers.experts import Experts
from hydra_engine.models.loading.checkpoint import MAX_EXPERTS
from hydra_engine.models.loading.parameters import Demands, Scope
from hydra_engine.models.specs.base import Mixture
from hydra_engine.models.specs.registry import load_spec
from hydra_quantizer.writer import write_quantized
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.quantized.written import METHODS, edit_config, float8, write_checkpoint, write_dequantized

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    **{"num_hidden_layers": 3, "mlp_only_layers": [0]},
}
PROMPT = [1, *range(40, 55)]
LAYER = "model.layers.1.mlp.experts."
VL_LAYER = "model.language_model.layers.1.mlp.experts."


@pytest.fixture
def plain(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("plain-moe", "qwen3_moe", text=SIZES)


@pytest.fixture
def reference() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


def logits(directory: Path, backend: Backend, quantization: str = "auto") -> Tensor:
    driver = Driver(directory, backend, options=SpecOptions(quantization=quantization))
    return driver.run(driver.request(PROMPT), [])


def rewrite(plain: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    shutil.copytree(plain, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def fuse(tensors: dict[str, Tensor], *, transposed: bool = False) -> None:
    """Puts the experts of a layer, weights and scales, into one tensor each."""
    for layer in (1, 2):
        module = f"model.layers.{layer}.mlp.experts."
        parts = [
            name for name, tensor in tensors.items() if name.startswith(f"{module}0.gate_proj.") and tensor.dim() == 2
        ]
        for leaf in [name.rpartition(".")[2] for name in parts]:
            gate, up, down = (
                torch.stack([tensors.pop(f"{module}{i}.{part}.{leaf}") for i in range(SIZES["num_experts"])])
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            for name, whole in (("gate_up_proj", torch.cat((gate, up), dim=1)), ("down_proj", down)):
                suffix = leaf.removeprefix("weight")
                tensors[f"{module}{name}{suffix}"] = whole.transpose(1, 2) if transposed else whole


def refusal(directory: Path, backend: Backend) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, load_spec(directory), backend, EPD)
    assert "\n" not in caught.value.message and len(caught.value.message) < 300
    return caught.value.message


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [64, 96])
def test_fused_layouts_are_the_experts_one_by_one(
    checkpoint: CheckpointFactory, tmp_path: Path, reference: Backend, width: int, *, transposed: bool
) -> None:
    """The layouts are told apart even if a matrix of gate and up is square, so that its shape alone says nothing."""
    text = SIZES | {"moe_intermediate_size": width}
    made = checkpoint("plain-moe" if width == 64 else "wide-moe", "qwen3_moe", text=text)
    fused = rewrite(made, tmp_path / "fused", lambda tensors: fuse(tensors, transposed=transposed))
    assert torch.equal(logits(fused, reference), logits(made, reference))


def test_qwen3_vl_moe_is_read_as_it_was_published(
    checkpoint: CheckpointFactory, tmp_path: Path, reference: Backend
) -> None:
    """Published files have inputs before outputs, which transformers 5 writes the other way round."""
    made = checkpoint("plain-qwen3-vl-moe", "qwen3_vl_moe")

    def transpose(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2)

    published = rewrite(made, tmp_path / "published", transpose)
    assert load_file(published / "model.safetensors")[f"{VL_LAYER}gate_up_proj"].shape == (8, 64, 80)
    assert torch.equal(logits(published, reference), logits(made, reference))
    # The text part says true where the model says false: transformers 5 writes its default.
    assert not load_spec(made).language.tie_embeddings


def test_eight_bit_floats_in_fused_tensors_are_those_of_single_experts(
    plain: Path, tmp_path: Path, reference: Backend
) -> None:
    method = float8("block", transformers=True, block=(32, 32))
    write_checkpoint(plain, tmp_path / "single", method)
    fused = rewrite(tmp_path / "single", tmp_path / "fused", fuse)
    assert f"{LAYER}gate_up_proj_scale_inv" in load_file(fused / "model.safetensors")
    assert torch.equal(logits(fused, reference), logits(tmp_path / "single", reference))


@pytest.mark.quick("awq", "w4-32")
@pytest.mark.parametrize("name", ["awq", "w4-32", "w8a8", "gptq-4-zeros", "fp8"])
def test_experts_may_be_quantised_one_by_one(plain: Path, tmp_path: Path, reference: Backend, name: str) -> None:
    """Rounding of activations aside, logits are those of the dequantised weights."""
    weights = write_checkpoint(plain, tmp_path / "quantized", METHODS[name])
    assert f"{LAYER}3.down_proj.weight" in weights
    write_dequantized(plain, tmp_path / "tensors", weights)
    expected = logits(tmp_path / "tensors", reference)
    difference = (logits(tmp_path / "quantized", reference) - expected).abs().median()
    assert difference < 0.01 * expected.abs().max()


@pytest.mark.quick("int4")
@pytest.mark.parametrize("wanted", ["int8", "int4"])
def test_the_router_is_never_quantised(plain: Path, tmp_path: Path, wanted: str) -> None:
    """The rule holds at a start and in `hydra-engine quantize`, which writes what a start makes, also if fused."""
    fused = rewrite(plain, tmp_path / "fused", lambda tensors: fuse(tensors, transposed=True))
    write_quantized(fused, tmp_path / "out", wanted)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.1.mlp.gate.weight"].dtype is torch.float32
    leaf = "weight_packed" if wanted == "int4" else "weight"
    assert not written[f"{LAYER}5.up_proj.{leaf}"].is_floating_point()
    backend = create_backend("cpu", torch.float32, threads=1)
    assert torch.equal(logits(tmp_path / "out", backend), logits(plain, backend, wanted))


def test_experts_that_are_missing_or_of_another_shape_are_named(
    plain: Path, tmp_path: Path, reference: Backend
) -> None:
    down = f"{LAYER}4.down_proj.weight"
    lost = rewrite(plain, tmp_path / "lost", lambda tensors: tensors.pop(down))
    assert f"missing: {down}" in refusal(lost, reference)

    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{LAYER}4.")]:
            del tensors[name]

    message = refusal(rewrite(plain, tmp_path / "fewer", remove), reference)
    assert "names 6 experts (num_experts), the weights hold 5 (model.layers.1.mlp.experts.0 to 3, 5)" in message

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors[down] = tensors[down][:, :32]

    message = refusal(rewrite(plain, tmp_path / "narrow", narrow), reference)
    assert f"{down} is [128, 32] instead of [128, 64]" in message


def test_fused_tensors_that_do_not_fit_together_are_named(plain: Path, tmp_path: Path, reference: Backend) -> None:
    fused = rewrite(plain, tmp_path / "fused", fuse)
    lost = rewrite(fused, tmp_path / "lost", lambda tensors: tensors.pop(f"{LAYER}down_proj"))
    assert refusal(lost, reference) == f"tensor {LAYER}gate_up_proj has no down_proj beside it for the same experts"

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}down_proj"] = tensors[f"{LAYER}down_proj"][:5]

    message = refusal(rewrite(fused, tmp_path / "narrow", narrow), reference)
    assert f"{LAYER}gate_up_proj [6, 128, 128] and {LAYER}down_proj [5, 128, 64]" in message

    def double(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}2.up_proj.weight"] = tensors[f"{LAYER}gate_up_proj"][2, 64:].clone()

    message = refusal(rewrite(fused, tmp_path / "double", double), reference)
    assert message == f"tensor {LAYER}2.up_proj.weight is in the checkpoint twice, alone and in {LAYER}gate_up_proj"


def test_a_shared_expert_has_the_width_of_the_others(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    made = checkpoint("plain-qwen3_5-moe", "qwen3_5_moe_text", text={"num_hidden_layers": 4})
    directory = Path(shutil.copytree(made, tmp_path / "wide"))
    edit_config(directory, lambda config: config.update(shared_expert_intermediate_size=80))
    with pytest.raises(CheckpointError) as caught:
        load_spec(directory)
    assert "shared_expert_intermediate_size in config.json must be 40, as moe_intermediate_size" in caught.value.message


def test_a_small_file_cannot_name_experts_without_end(plain: Path, tmp_path: Path, reference: Backend) -> None:
    def multiply(tensors: dict[str, Tensor]) -> None:
        count = MAX_EXPERTS + 1
        tensors |= {f"{LAYER}gate_up_proj": torch.ones(count, 2, 1), f"{LAYER}down_proj": torch.ones(count, 1, 1)}

    message = refusal(rewrite(plain, tmp_path / "many", multiply), reference)
    assert (
        message
        == f"the weights name more than {MAX_EXPERTS} experts, up to tensor {LAYER}gate_up_proj; no model has as many"
    )


def test_counts_in_the_config_are_checked(plain: Path, tmp_path: Path) -> None:
    for number, (values, part) in enumerate(
        (
            ({"num_experts_per_tok": 7}, "num_experts_per_tok in config.json must be a whole number from 1 to 6"),
            ({"num_local_experts": 5000}, "num_local_experts in config.json must be a whole number from 2 to 4096"),
            ({"mlp_only_layers": ["x"]}, "mlp_only_layers in config.json must be a list of layers"),
        )
    ):
        directory = Path(shutil.copytree(plain, tmp_path / str(number)))
        edit_config(directory, lambda config, values=values: config.update(values))
        with pytest.raises(CheckpointError) as caught:
            load_spec(directory)
        assert part in caught.value.message


def test_experts_in_unlike_formats_are_brought_into_one(reference: Backend) -> None:
    """A weight without offsets beside one that has some, as AWQ and GPTQ give them; floats beside integers."""
    mixture, generator = Mixture(3, 1, 32, renormalise=True, shared=False), torch.Generator().manual_seed(0)
    demands = Demands()
    experts = Experts(Scope(ReferenceOps(), torch.float32, torch.device("cpu"), demands), 64, mixture)
    weights: dict[str, QuantizedWeight] = {}
    for name, slot in demands.slots.items():
        rows, columns = slot.shape
        numbers = torch.randint(-100, 100, (rows, columns), generator=generator).to(torch.int8)
        offsets = torch.randn(rows, 1, generator=generator) if name.startswith("experts.1.") else None
        weights[name] = QuantizedWeight(numbers, torch.full((rows, 1), 0.01), offsets)
        if name == "experts.2.down_proj.weight":
            slot.fill(weights[name].dequantized(torch.float32))
        else:
            assert slot.fill_quantized is not None
            slot.fill_quantized(weights[name])
    (packed,) = experts.packed
    assert isinstance(packed, LinearExperts)
    assert all(isinstance(weight, QuantizedLinear) for weight in packed.gate_up)
    assert not any(isinstance(weight, QuantizedLinear) for weight in packed.down)
    x, chosen = torch.randn(3, 64, generator=generator), torch.tensor([[0], [1], [2]], dtype=torch.int32)
    routes = reference.ops.route(torch.eye(3), 1, renormalise=True)
    assert torch.equal(routes.experts, chosen)
    for row, result in enumerate(reference.ops.experts(x, routes, packed, "silu")):
        gate, up, down = (
            weights[f"experts.{row}.{part}_proj.weight"].dequantized(torch.float32) for part in ("gate", "up", "down")
        )
        expected = torch.nn.functional.silu(gate @ x[row]) * (up @ x[row]) @ down.T
        assert (result - expected).abs().max() < 0.02 * expected.abs().max()


def test_figures_are_those_of_transformers(plain: Path) -> None:
    spec = load_spec(plain)
    config = transformers.AutoConfig.from_pretrained(plain)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    slots = build_model(spec, ReferenceOps(), torch.float32, Role.parse("D")).slots
    assert spec.num_parameters == sum(torch.Size(slot.shape).numel() for slot in slots.values())
    matrices = (slot for name, slot in slots.items() if slot.fill_quantized and "layers" in name)
    assert spec.language.num_matrix_parameters() == sum(torch.Size(slot.shape).numel() for slot in matrices)
    # Each of 9 tokens goes to two experts of a layer.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        model.model(input_ids=torch.arange(9)[None])
    assert 9 * spec.language.flops_per_token(9) == counted.get_total_flops()


def test_weights_that_a_step_reads() -> None:
    """A token reads 8 of 128 experts and the shared one; a large batch reads all."""
    mixture = Mixture(128, 8, 768, renormalise=True, shared=True)
    assert mixture.num_read(1) == pytest.approx(9)
    assert 60 < mixture.num_read(10) < 64
    assert mixture.num_read(4096) == pytest.approx(129)
