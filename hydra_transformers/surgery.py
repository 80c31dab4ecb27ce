"""Changes to transformers' modules: matrix products are replaced by the engine's, parts that a role does not need
removed.

Knows torch modules only by their tree; does not know models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hydra_engine.backend.base import Ops


class OpsLinear(nn.Module):
    """A linear layer that computes with `Ops.linear`. `weight` has shape and dtype for code that reads them, but no
    memory."""

    def __init__(self, linear: nn.Linear, ops: Ops, stored: torch.dtype, out_dtype: torch.dtype | None) -> None:
        super().__init__()
        self._ops = ops
        self._out_dtype = out_dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        narrow = weight.to(stored)
        kept = narrow if bool((narrow == weight).all()) else weight  # as the checkpoint has it, where that was widened
        self.packed = ops.pack_linear(kept, bias, weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._ops.linear(rows, self.packed, out_dtype=self._out_dtype).view(*x.shape[:-1], self.out_features)


def replace_linears(root: nn.Module, ops: Ops, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Replaces the plain linear layers of `dtype` below `root`; others keep their own arithmetic. Weights that are
    exact in `stored`, the dtype of the checkpoint, may be kept in that."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype is dtype:
                setattr(parent, name, OpsLinear(child, ops, stored, None))


def replace_head(root: Any, ops: Ops, dtype: torch.dtype, stored: torch.dtype) -> nn.Module:
    """Replaces the layer over the vocabulary by one with float32 results, if it is a plain linear layer of `dtype`.
    Returns the layer in use. Raises ValueError if the model has none."""
    head = root.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise ValueError("the model has no layer over its vocabulary")
    if type(head) is not nn.Linear or head.weight.dtype is not dtype:
        return head
    ours = OpsLinear(head, ops, stored, torch.float32)
    replace(root, head, ours)
    return ours


def has_products(root: nn.Module) -> bool:
    """True if a matrix other than an embedding table is left below `root`."""
    tables = {id(module.weight) for module in root.modules() if isinstance(module, nn.Embedding)}
    return any(parameter.dim() > 1 and id(parameter) not in tables for parameter in root.parameters())


def call_before_listed(root: nn.Module, without: nn.Module, call: Callable[[], None]) -> None:
    """Registers `call` to run before each module of a module list below `root`, but not below `without`."""
    inside = {id(module) for module in without.modules()}

    def hook(_module: nn.Module, _arguments: object) -> None:
        call()

    for parent in root.modules():
        if isinstance(parent, nn.ModuleList) and id(parent) not in inside:
            for child in parent:
                child.register_forward_pre_hook(hook)


def replace(root: nn.Module, old: nn.Module, new: nn.Module | None) -> None:
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def drop_all_but(root: nn.Module, kept: Sequence[nn.Module]) -> None:
    """Removes all modules below `root` that neither contain one of `kept` nor belong to one."""
    for name, child in list(root.named_children()):
        if any(child is module for module in kept):
            continue
        if any(module is part for module in kept for part in child.modules()):
            drop_all_but(child, kept)
        else:
            setattr(root, name, None)


def weights_bytes(root: nn.Module) -> int:
    """Bytes of parameters, buffers and packed weights, each counted once."""
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in (*root.parameters(), *root.buffers())}
    packed = sum(module.packed.nbytes for module in root.modules() if isinstance(module, OpsLinear))
    return sum(tensor.nbytes for tensor in tensors.values()) + packed


def set_attention(module: Any, name: str) -> None:
    """Sets the decoder's attention function; towers keep theirs. A decoder may have a copy of the text config."""
    for config in (module.get_decoder().config, module.config.get_text_config(decoder=True)):
        config._attn_implementation = name


def disable_temperatures(decoder: nn.Module) -> None:
    """Turns off attention temperatures: they depend on the number of rows of a call, which is a step of several
    requests, and are 1 within the context."""
    for module in decoder.modules():
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "floor_scale"):
            setattr(module, "floor_scale", math.inf)  # noqa: B010 - modules declare no such numbers


def accepts(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters
