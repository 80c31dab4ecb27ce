"""The packed weights of the kernels of hydra_kernels, read again by their definition."""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_kernels.quantized_linear import PackedWeight


def dequantized(weight: PackedWeight) -> Tensor:
    """float32 [N, K]"""
    places = range(0, 16, weight.num_bits)
    blocks = weight.words.int().unflatten(1, (-1, weight.part))
    fields = torch.stack([blocks >> place & (1 << weight.num_bits) - 1 for place in places], dim=2)
    octets = torch.float8_e4m3fn if weight.floats else torch.int8
    numbers = fields - 8 if weight.num_bits == 4 else fields.to(torch.uint8).view(octets)
    groups = numbers.flatten(1)[:, : weight.num_in].float().unflatten(1, (-1, weight.group_size))
    wide = groups * weight.scales.t().float()[:, :, None]
    if weight.offsets is not None:
        wide = wide + weight.offsets.t()[:, :, None]
    return wide.flatten(1)
