"""Experts of a mixture that a safetensors file holds in one tensor, as entries of single experts.

    experts.gate_up_proj [E, 2F, C], gate first, and experts.down_proj [E, C, F]     Qwen3.5-MoE, transformers 5
    experts.gate_up_proj [E, C, 2F]              and experts.down_proj [E, F, C]     Qwen3-VL-MoE

become experts.3.gate_proj.weight [F, C], .up_proj.weight [F, C] and .down_proj.weight [C, F]; a suffix such as
_scale_inv goes to .weight_scale_inv. An expert's part of a fused tensor is one run of bytes, so nothing is read that an
expert does not have. The two shapes together tell the layouts apart. Does not know files or models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import TensorEntry, check_experts

_FUSED = re.compile(r"(.*\bexperts\.)(gate_up|down)_proj((?:_[a-z_]+)?)(?:\.weight)?")


def is_fused(name: str) -> bool:
    """True if a tensor of this name holds all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def split_experts(stored: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str, TensorEntry]]:
    """Yields the entries of single experts of all fused tensors in `stored`: (name of the fused tensor, name, entry).
    Raises CheckpointError if a fused tensor lacks the other of its pair or their shapes do not belong together."""
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    for name in stored:
        if (match := _FUSED.fullmatch(name)) is not None:
            module, kind, suffix = match.groups()
            pairs.setdefault((module, suffix), {})[kind] = name
    count = 0
    for (module, suffix), names in pairs.items():
        found = list(names.values())
        if len(found) < 2:
            other = "down_proj" if "gate_up" in names else "gate_up_proj"
            raise CheckpointError(f"tensor {found[0][:120]} has no {other} beside it for the same experts")
        gate_up, down = (stored[names[kind]] for kind in ("gate_up", "down"))
        transposed = _is_transposed(gate_up.shape, down.shape)
        if transposed is None:
            raise CheckpointError(
                f"tensors {names['gate_up'][:120]} {list(gate_up.shape)} and {names['down'][:120]} {list(down.shape)} "
                "are not the matrices of the same experts"
            )
        count += gate_up.shape[0]
        check_experts(names["gate_up"], count)
        for expert in range(gate_up.shape[0]):
            own = f"{module}{expert}."
            gate, up = _halves(_part(gate_up, expert), transposed=transposed)
            yield names["gate_up"], f"{own}gate_proj.weight{suffix}", gate
            yield names["gate_up"], f"{own}up_proj.weight{suffix}", up
            (whole,) = _cut(_part(down, expert), 1, transposed=transposed)
            yield names["down"], f"{own}down_proj.weight{suffix}", whole


def _is_transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool | None:
    """Tells inputs before outputs from outputs before inputs by the shapes of a pair; None if they are no pair. A scale
    for each whole expert counts as not transposed."""
    if len(gate_up) != 3 or len(down) != 3 or gate_up[0] != down[0] or 0 in gate_up:
        return None
    if gate_up[1:] == down[1:] == (1, 1) or (gate_up[1], gate_up[2]) == (2 * down[2], down[1]):
        return False
    return True if (gate_up[1], gate_up[2]) == (down[2], 2 * down[1]) else None


def _part(entry: TensorEntry, expert: int) -> TensorEntry:
    """The matrix of one expert in a tensor [E, rows, columns]."""
    size = entry.nbytes // entry.shape[0]
    begin = entry.begin + expert * size
    return entry._replace(shape=entry.shape[1:], begin=begin, end=begin + size)


def _halves(entry: TensorEntry, *, transposed: bool) -> list[TensorEntry]:
    """Entries of gate and up in the matrix of both; a single scale of both is that of each."""
    return [entry, entry] if entry.shape == (1, 1) else _cut(entry, 2, transposed=transposed)


def _cut(entry: TensorEntry, count: int, *, transposed: bool) -> list[TensorEntry]:
    """Cuts a matrix into `count` matrices of as many outputs each."""
    rows, columns = entry.shape
    if transposed:
        width = columns // count
        return [entry._replace(shape=(width, rows), columns=(i * width, columns)) for i in range(count)]
    size, height = entry.nbytes // count, rows // count
    begins = (entry.begin + i * size for i in range(count))
    return [entry._replace(shape=(height, columns), begin=begin, end=begin + size) for begin in begins]
