"""The tensors of a quantised matrix: their shapes and types checked before they are read, and integers of 4 and 8 bits
unpacked from words. Does not know formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from hydra_engine.backend.quantized import MIN_GROUP, QuantizedWeight
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry
from hydra_engine.models.loading.safetensors_checkpoint import FLOATS
from hydra_engine.models.specs.quantization import ROW, Quantization

SCALES = tuple(FLOATS)
ZERO = {4: 8, 8: 128}  # zero point in the middle of the range, by number of bits


class Parts:
    """The parts of one module, from the files' headers, and a list of their problems. `shape` is None for a part that
    is missing or has another type or number of dimensions."""

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

    def check_part(self, leaf: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> bool:
        """Returns True if the part has one of the types and one of the shapes; records a problem otherwise."""
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
        """Number of columns of a matrix with `num_rows` rows; 1 for a vector of that length or a single number. None if
        missing."""
        entry = self._entries.get(leaf)
        if entry is not None and len(entry.shape) == 2 and entry.shape[0] == num_rows and entry.shape[1]:
            self.check_part(leaf, dtypes, entry.shape)
            return entry.shape[1]
        self.check_part(leaf, dtypes, (num_rows, 1), (num_rows,), (1,), (1, 1), ())
        return None if entry is None else 1

    def check_groups(self, leaf: str, num_in: int, num_groups: int, allowed: Quantization) -> None:
        """Records a problem unless rows of `num_in` inputs divide into groups of a size that config.json allows."""
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
        """Returns the entry with all recorded problems. `shape` is the matrix's, if the parts determine it."""
        nbytes = sum(entry.nbytes for entry in self._entries.values())
        return StoredTensor(shape, nbytes, tuple(self._missing), tuple(self._wrong), quantized=True)


class Format(Protocol):
    """A storage format of quantised matrices. `leaves`: last words of the parts' names; `unread`: names of accompanying
    tensors that this engine's arithmetic does not use."""

    leaves: tuple[str, ...]
    unread: tuple[str, ...]

    def is_quantized(self, entries: Mapping[str, TensorEntry]) -> bool:
        """True if a module with these tensors is quantised."""
        ...

    def describe(self, parts: Parts, read: Callable[[str], Tensor]) -> StoredTensor:
        """Checks the parts. `read` reads a part, for the few whose values determine how others are read."""
        ...

    def build(self, parts: Mapping[str, Tensor]) -> Tensor | QuantizedWeight:
        """Builds the weight from parts that `describe` accepted. Raises ValueError for impossible values."""
        ...


def unpacked(words: Tensor, num_bits: int) -> Tensor:
    """Unpacks int32 [R, C] to uint8 [R, C * 32 / num_bits], lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if num_bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2).flatten(1)


def integers(octets: Tensor, scales: Tensor, zeros: Tensor | None, num_bits: int) -> QuantizedWeight:
    """Builds a weight scales[n, g] * (q[n, k] - zeros[n, g]). `octets`: unsigned numbers, uint8 [N, K * num_bits / 8],
    with even k in the lower half of a byte; `zeros`: [N, G], None for the middle of the range."""
    values = octets if num_bits == 4 else (octets ^ 128).view(torch.int8)
    return from_signed(values, scales, None if zeros is None else zeros.to(torch.int16) - ZERO[num_bits], num_bits)


def from_signed(values: Tensor, scales: Tensor, zeros: Tensor | None, num_bits: int) -> QuantizedWeight:
    """Builds a weight from signed `values` in the layout of QuantizedWeight; `zeros`: signed zero points, [N, G]."""
    offsets = None if zeros is None or not zeros.any() else -scales.float() * zeros.float()
    kept = scales.to(torch.float32) if scales.dtype is torch.float64 else scales
    return QuantizedWeight(values.contiguous(), kept.contiguous(), offsets, num_bits)


def ungrouped(numbers: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Tensor:
    """Dequantises scales[n, g] * (numbers[n, k] - zeros[n, g]), g = groups[k], to float32 [N, K], for groups of inputs
    that are not adjacent. Raises ValueError for a group that does not exist."""
    order = groups.long()
    if int(order.min()) < 0 or int(order.max()) >= scales.shape[1]:
        raise ValueError(f"its groups are numbered from 0 to {scales.shape[1] - 1}, and its inputs name others")
    wide = numbers.float()
    if zeros is not None:
        wide -= zeros.float()[:, order]
    return wide.mul_(scales.float()[:, order])


def middle(scales: Tensor, num_bits: int) -> Tensor:
    """Zero points [N, G] in the middle of the range."""
    return torch.full(scales.shape, ZERO[num_bits])


def in_order(groups: Tensor, num_groups: int) -> bool:
    """True if every group is a run of adjacent inputs, in order."""
    return torch.equal(groups.long(), torch.arange(len(groups)) // (len(groups) // num_groups))
