"""Quantised checkpoints as others write them, by arithmetic of its own in numpy: quantisation_config and parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Matrix:
    """`parts`: tensors by the last words of their names; `weight` float32 [N, K]: what they stand for."""

    parts: dict[str, Tensor]
    weight: Array


@dataclass(frozen=True)
class Method:
    """`group` of inputs that share a scale: 0: a row, None: activations are not rounded."""

    config: dict[str, Any]
    write: Callable[[Array], Matrix]
    group: int | None
    spare: dict[str, Any] = field(default_factory=dict)  # shapes of tensors that come with a matrix and are not read


def write_checkpoint(
    plain: Path, directory: Path, method: Method, *, nested: str = "", besides: Sequence[str] = ()
) -> dict[str, Array]:
    """Copies `plain` with the decoder's matrices, and those `besides`, quantised; gives these dequantised, by name.
    `nested`: the part of config.json that says so."""
    shutil.copytree(plain, directory)
    tensors, dequantized = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if is_linear(name) or name in besides]:
        matrix = method.write(tensors.pop(name).float().numpy())
        dequantized[name] = matrix.weight
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{leaf}": part.contiguous() for leaf, part in matrix.parts.items()}
        tensors |= {f"{module}.{leaf}": torch.ones(shape) for leaf, shape in method.spare.items()}
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, lambda config: (config[nested] if nested else config).update(method.config))
    return dequantized


def write_dequantized(plain: Path, directory: Path, weights: Mapping[str, Array]) -> None:
    shutil.copytree(plain, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: torch.from_numpy(np.ascontiguousarray(weight)) for name, weight in weights.items()}
    save_file(tensors, directory / "model.safetensors")


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def is_linear(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in LINEARS and "vision_tower" not in name


def words(numbers: Array, bits: int) -> Tensor:
    """[R, C] of 0 .. 2 ** bits - 1 -> int32 [R, C * bits / 32], the first number in the lowest bits."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), dtype=np.uint64)
    padded[:, :columns] = numbers
    lanes = padded.reshape(rows, -1, per_word)
    total = sum(lanes[:, :, i] << np.uint64(i * bits) for i in range(per_word))
    return torch.from_numpy(np.asarray(total).astype(np.uint32).view(np.int32))


@dataclass(frozen=True)
class Rounded:
    numbers: Array  # [N, K], 0 .. 2 ** bits - 1
    scales: Array  # float32 [N, G], of float16
    zeros: Array  # [N, G]
    groups: Array  # [K]

    @property
    def weight(self) -> Array:
        wide = (self.numbers - self.zeros[:, self.groups]).astype(np.float32)
        return wide * self.scales[:, self.groups]


def rounded(weight: Array, bits: int, group: int, *, symmetric: bool, order: Array | None = None) -> Rounded:
    """`group` 0: a row. `order`: groups are made of the inputs in this order."""
    num_in = weight.shape[1]
    size = group or num_in
    groups = np.arange(num_in) // size
    if order is not None:
        groups = np.empty(num_in, dtype=np.int64)
        groups[order] = np.arange(num_in) // size
    scales = np.zeros((weight.shape[0], num_in // size), dtype=np.float32)
    zeros = np.zeros_like(scales)
    top = 2**bits - 1
    for index in range(scales.shape[1]):
        part = weight[:, groups == index]
        if symmetric:
            scales[:, index], zeros[:, index] = np.abs(part).max(1) / (top // 2), 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, index] = (high - low) / top
            zeros[:, index] = np.clip(np.rint(-low / scales[:, index]), 1, top)
    scales = scales.astype(np.float16).astype(np.float32)
    numbers = np.clip(np.rint(weight / scales[:, groups]) + zeros[:, groups], 0, top)
    return Rounded(numbers.astype(np.int64), scales, zeros.astype(np.int64), groups)


def half(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(torch.float16)


def compressed(bits: int, group: int, layout: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **strategy, **more}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head", "re:.*vision_tower.*"],
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
        }
    }


def packed(bits: int, group: int, *, symmetric: bool = True, order: bool = False) -> Method:
    def write(weight: Array) -> Matrix:
        mixed = np.random.default_rng(3).permutation(weight.shape[1]) if order else None
        r = rounded(weight, bits, group, symmetric=symmetric, order=mixed)
        parts = {
            "weight_packed": words(r.numbers, bits),
            "weight_scale": half(r.scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(r.zeros.T, bits).T
        if order:
            parts["weight_g_idx"] = torch.from_numpy(r.groups).to(torch.int32)
        return Matrix(parts, r.weight)

    more = {"actorder": "group"} if order else {}
    return Method(
        compressed(bits, group, "pack-quantized", symmetric=symmetric, **more), write, None if order else group
    )


def int8(*, symmetric: bool = True, layout: str = "int-quantized") -> Method:
    def write(weight: Array) -> Matrix:
        r = rounded(weight, 8, 0, symmetric=symmetric)
        parts = {"weight": torch.from_numpy(r.numbers - 128).to(torch.int8), "weight_scale": half(r.scales)}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy(r.zeros - 128).to(torch.int8)
        return Matrix(parts, r.weight)

    return Method(compressed(8, 0, layout, symmetric=symmetric), write, 0, {"input_scale": [1]})


def float8(kind: str, *, transformers: bool, block: tuple[int, int] = (32, 48)) -> Method:
    """`kind`: tensor, channel or block."""

    def write(weight: Array) -> Matrix:
        rows, columns = weight.shape
        height, width = {"tensor": weight.shape, "channel": (1, columns), "block": block}[kind]
        scales = np.zeros((-(-rows // height), -(-columns // width)), dtype=np.float32)
        wide, numbers = np.zeros_like(weight), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        for i, j in np.ndindex(*scales.shape):
            here = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = np.float32(np.float16(np.abs(weight[here]).max() / 448))
            numbers[here] = torch.from_numpy(weight[here] / scales[i, j]).to(torch.float8_e4m3fn)
            wide[here] = numbers[here].float().numpy() * scales[i, j]
        stored = torch.tensor(scales[0, 0] if kind == "tensor" else scales)
        name = "weight_scale_inv" if transformers and kind == "block" else "weight_scale"
        return Matrix({"weight": numbers, name: stored}, wide)

    sizes = {"weight_block_size": list(block)} if kind == "block" else {}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"], **sizes}
    if not transformers:
        more = {"strategy": kind, **({"block_structure": list(block)} if kind == "block" else {})}
        config = compressed(8, 0, "float-quantized", **more)["quantization_config"]
        config["config_groups"]["group_0"]["weights"]["type"] = "float"
    return Method({"quantization_config": config}, write, None, {"input_scale": []})


def gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = True,
    version: str = "gptq",
    order: bool = False,
    said: bool = True,
) -> Method:
    """`said`: whether the config tells that groups are in another order."""

    def write(weight: Array) -> Matrix:
        mixed = np.random.default_rng(3).permutation(weight.shape[1]) if order else None
        r = rounded(weight, bits, group, symmetric=symmetric, order=mixed)
        stored = r.zeros - 1 if version == "gptq" else r.zeros
        parts = {
            "qweight": words(r.numbers, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": half(r.scales.T),
            "g_idx": torch.from_numpy(r.groups).to(torch.int32),
        }
        return Matrix(parts, r.weight)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": order and said,
        "sym": symmetric,
    }
    config |= {"checkpoint_format": version} if version != "gptq" else {}
    return Method({"quantization_config": config}, write, None if order else group)


def awq(group: int) -> Method:
    def write(weight: Array) -> Matrix:
        r = rounded(weight, 4, group, symmetric=False)

        def mixed(numbers: Array) -> Tensor:
            return words(numbers.reshape(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(numbers.shape), 4)

        parts = {"qweight": mixed(r.numbers.T), "qzeros": mixed(r.zeros.T), "scales": half(r.scales.T)}
        return Matrix(parts, r.weight)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return Method({"quantization_config": config | {"modules_to_not_convert": None}}, write, group)


METHODS = {
    "w4-32": packed(4, 32),
    "w4-64": packed(4, 64),
    "w4-128": packed(4, 128),
    "w4-channel": packed(4, 0),
    "w4-128-zeros": packed(4, 128, symmetric=False),
    "w4-channel-zeros": packed(4, 0, symmetric=False),
    "w4-g_idx": packed(4, 32, order=True),
    "w8-packed": packed(8, 128),
    "w8-packed-zeros": packed(8, 0, symmetric=False),
    "w8a8": int8(),
    "w8a8-zeros": int8(symmetric=False),
    "w8-naive": int8(layout="naive-quantized"),
    "fp8-compressed-tensor": float8("tensor", transformers=False),
    "fp8-compressed-channel": float8("channel", transformers=False),
    "fp8-compressed-block": float8("block", transformers=False),
    "fp8": float8("block", transformers=True),
    "fp8-128": float8("block", transformers=True, block=(128, 128)),
    "fp8-tensor": float8("tensor", transformers=True),
    "gptq-4": gptq(4, 128),
    "gptq-4-row": gptq(4, 0),
    "gptq-4-zeros": gptq(4, 32, symmetric=False),
    "gptq-4-v2": gptq(4, 64, symmetric=False, version="gptq_v2"),
    "gptq-8": gptq(8, 128),
    "gptq-8-zeros": gptq(8, 32, symmetric=False),
    "gptq-act-order": gptq(4, 32, symmetric=False, order=True),
    "gptq-act-order-symmetric": gptq(4, 32, order=True),
    "gptq-act-order-unsaid": gptq(4, 32, order=True, said=False),
    "awq": awq(64),
}
