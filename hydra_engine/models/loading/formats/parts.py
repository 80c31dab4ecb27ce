"""The tensors that a quantised matrix is stored in: their shapes and types checked before they are read, and integers
of 4 and 8 bits taken out of words. Does not know formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from hydra_engine.backend.quantized import MIN_GROUP, QuantizedWeight
from hydra_engine.models.loading.checkpoint import StoredTensor
from hydra_engine.models.loading.safetensors_file import FLOATS, TensorEntry
from hydra_engine.models.specs.quantization import ROW, Quantization

SCALES = tuple(FLOATS)
ZERO = {4: 8, 8: 128}  # what numbers of so many bits have for 0 in the middle of their range


class Parts:
    """What a module's parts are by the headers of files, and what is wrong with them. The shape of a part that is
    missing, or of another type or number of dimensions, is None."""

    def __init__(self, module: str, entries: Mapping[str, TensorEntry]) -> None:
        self._module = module
        self._entries = entries
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def __contains__(self, leaf: str) -> bool:
        return leaf in self._entries

    def dtype(self, leaf: str) -> str:
        return self._entries[leaf].dtype

    def shape(self, leaf: str, dtypes: tuple[str, ...], num_dims: int) -> tuple[int, ...] | None:
        entry = self._entries.get(leaf)
        if entry is None:
            self._missing.append(f"{self._module}.{leaf}")
        elif entry.dtype not in dtypes or len(entry.shape) != num_dims or 0 in entry.shape:
            self.complain(
                leaf, f"is {list(entry.shape)} {entry.dtype} instead of {num_dims} dimensions of {' or '.join(dtypes)}"
            )
        else:
            return entry.shape
        return None

    def expect(self, leaf: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> bool:
        """Whether it has one of the types and one of the shapes."""
        entry = self._entries.get(leaf)
        if entry is None:
            self._missing.append(f"{self._module}.{leaf}")
            return False
        if entry.dtype not in dtypes or entry.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            self.complain(leaf, f"is {list(entry.shape)} {entry.dtype} instead of {wanted} {' or '.join(dtypes)}")
            return False
        return True

    def num_columns(self, leaf: str, dtypes: tuple[str, ...], num_rows: int) -> int | None:
        """Of a matrix with that many rows; 1: of a vector of as many numbers, or of one number for all."""
        entry = self._entries.get(leaf)
        if entry is not None and len(entry.shape) == 2 and entry.shape[0] == num_rows and entry.shape[1]:
            self.expect(leaf, dtypes, entry.shape)
            return entry.shape[1]
        self.expect(leaf, dtypes, (num_rows, 1), (num_rows,), (1,), (1, 1), ())
        return None if entry is None else 1

    def check_groups(self, leaf: str, num_in: int, num_groups: int, allowed: Quantization) -> None:
        """That rows of `num_in` are cut into groups of a size that config.json names."""
        size, rest = divmod(num_in, num_groups)
        named = size in allowed.group_sizes or (num_groups == 1 and ROW in allowed.group_sizes)
        if rest or not named:
            sizes = ", ".join("whole rows" if size == ROW else str(size) for size in allowed.group_sizes)
            self.complain(leaf, f"has {num_groups} groups of {num_in} inputs, where config.json says groups of {sizes}")
        elif num_groups > 1 and size % MIN_GROUP:
            self.complain(leaf, f"has groups of {size} inputs; supported are multiples of {MIN_GROUP}")

    def complain(self, leaf: str, problem: str) -> None:
        self._wrong.append(f"{self._module}.{leaf} {problem}")

    def described(self, shape: tuple[int, ...] = ()) -> StoredTensor:
        """`shape` of the matrix, where its parts say it."""
        nbytes = sum(entry.nbytes for entry in self._entries.values())
        return StoredTensor(shape, nbytes, tuple(self._missing), tuple(self._wrong), quantized=True)


class Format(Protocol):
    """How one method stores a matrix in parts. `leaves`: the last words of their names; `unread`: those of tensors
    beside them that are for other arithmetic than ours."""

    leaves: tuple[str, ...]
    unread: tuple[str, ...]

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        """Of a module, by its tensors."""
        ...

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        """`read` gives a part, for the few whose numbers say how others are read."""
        ...

    def build(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        """From parts that `describe` had nothing to say against. Raises ValueError for numbers that cannot be."""
        ...


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """words int32 [R, C] -> uint8 [R, C * 32 / num_bits], the lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if num_bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def integers(octets: Tensor, scales: Tensor, zeros: Tensor | None, num_bits: int) -> QuantizedWeight:
    """scales[n, g] * (q[n, k] - zeros[n, g]). `octets` uint8 [N, K * num_bits / 8]: numbers without a sign, of two in
    an octet that of the even k is in the lower half; `zeros` [N, G], None: the middle of the range."""
    values = octets if num_bits == 4 else (octets ^ 128).view(torch.int8)
    return signed(values, scales, None if zeros is None else zeros.to(torch.int16) - ZERO[num_bits], num_bits)


def signed(values: Tensor, scales: Tensor, zeros: Tensor | None, num_bits: int) -> QuantizedWeight:
    """`values` as those of a QuantizedWeight; `zeros` [N, G], what stands for 0 among the numbers with a sign."""
    offsets = None if zeros is None or not zeros.any() else -scales.float() * zeros.float()
    kept = scales.to(torch.float32) if scales.dtype is torch.float64 else scales
    return QuantizedWeight(values.contiguous(), kept.contiguous(), offsets, num_bits)


def ungrouped(numbers: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Tensor:
    """float32 [N, K]: scales[n, g] * (numbers[n, k] - zeros[n, g]), g = groups[k], for groups whose inputs are not
    neighbours. Raises ValueError for a group that does not exist."""
    order = groups.long()
    if int(order.min()) < 0 or int(order.max()) >= scales.shape[1]:
        raise ValueError(f"its groups are numbered from 0 to {scales.shape[1] - 1}, and its inputs name others")
    wide = numbers.float()
    if zeros is not None:
        wide -= zeros.float()[:, order]
    return wide.mul_(scales.float()[:, order])


def middle(scales: Tensor, num_bits: int) -> Tensor:
    """The zeros [N, G] of numbers whose 0 is in the middle of their range."""
    return torch.full(scales.shape, ZERO[num_bits])


def in_order(groups: Tensor, num_groups: int) -> bool:
    """Whether neighbours make up each group, the groups in order."""
    return torch.equal(groups.long(), torch.arange(len(groups)) // (len(groups) // num_groups))
