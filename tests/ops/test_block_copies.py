"""Block copies of every size and alignment: each byte arrives, and none beside it changes."""

from __future__ import annotations

import pytest
import torch

from hydra_engine.backend.base import Ops, PagedCache

# (layers, tensors, slots, heads, dim) of a block: bytes below and above what streams at once, a piece and a thread take
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 2, 3, 1, 5),
    (3, 1, 7, 1, 37),
    (1, 1, 16, 1, 128),
    (2, 2, 16, 2, 65),
    (5, 2, 16, 4, 128),
    (7, 2, 16, 5, 117),
]


def filled(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [0, 2, 34])
def test_every_byte_arrives_and_none_beside_it_changes(
    ops: Ops, threads: int, shape: tuple[int, ...], shift: int
) -> None:
    block_bytes = 2 * torch.Size(shape).numel()
    theirs, ours = filled(shift + 5 * block_bytes, 1), filled(64 + 4 * block_bytes, 2)
    before = ours.clone()
    source = PagedCache(theirs[shift:].view(torch.bfloat16).view(5, *shape))
    target = PagedCache(ours[30 : 30 + 4 * block_bytes].view(torch.bfloat16).view(4, *shape))
    ops.copy_blocks(source, target, torch.tensor([[4, 1], [0, 2], [4, 0]]))
    rows = theirs[shift:].view(5, block_bytes)
    expected = before.clone()
    expected[30 : 30 + 3 * block_bytes] = rows[[4, 4, 0]].flatten()
    assert torch.equal(ours, expected)
