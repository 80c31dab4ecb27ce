"""Declarations of a model's weights: named slots with shapes, each with the function that takes its tensor.

Layers declare slots while they are built; the loader fills them one tensor at a time, so no second copy of a model ever
exists. Names are those that `save_pretrained` writes. Does not know files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PackedExperts, PackedLinear
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.errors import CheckpointError

# (how a name begins in a file, how the canonical name does); first match counts. What begins with a dot is inside of
# names and replaced in those of which no beginning matches.
Renames = tuple[tuple[str, str], ...]


Kept = PackedLinear | PackedExperts | Tensor


class Holder(Protocol):
    """A layer that owns weights. Setting `packed` replaces filling its slots."""

    packed: tuple[Any, ...]  # of `Kept`


class Slot(NamedTuple):
    shape: tuple[int, ...]
    fill: Callable[[Tensor], None]  # takes the tensor in its dtype, on the device, and owns it
    optional: bool = False
    dtype: torch.dtype | None = None  # None: the compute dtype
    fill_quantized: Callable[[QuantizedWeight], None] | None = None  # None: dequantised for `fill`
    matrix: bool = False  # kernels widen 16 bits exactly, so 16-bit weights are kept if rows are float32
    substitute: str | None = None  # the slot that fills this one too where a checkpoint has that tensor alone

    def dtype_of(self, stored: torch.dtype, rows: torch.dtype) -> torch.dtype:
        """Dtype of the filled tensor, for a tensor stored as `stored` and the compute dtype `rows`."""
        if self.matrix and rows is torch.float32 and stored in (torch.bfloat16, torch.float16):
            return stored
        return self.dtype or rows


class Demands:
    """The slots of one model, prefixes of known names that it does not need, and the layers that own weights.
    `tensor_names`: names in the checkpoint; None if weights are drawn."""

    def __init__(self, held: Collection[str] | None = None) -> None:
        self.tensor_names = held
        self.slots: dict[str, Slot] = {}
        self.unneeded: list[str] = []
        self.holders: list[Holder] = []


class Scope:
    """A prefix of weight names, with what a layer needs to build itself there."""

    def __init__(
        self,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        demands: Demands,
        *,
        prefix: str = "",
        quantize: int | None = None,
    ) -> None:
        """`quantize`: bits of matrices that are quantised at load; None: they stay as stored."""
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.quantize = quantize
        self._demands = demands
        self._prefix = prefix

    def child(self, name: str, *, quantize: int | None = None) -> Scope:
        prefix = f"{self._prefix}{name}." if name else self._prefix
        bits = self.quantize if quantize is None else quantize
        return Scope(self.ops, self.dtype, self.device, self._demands, prefix=prefix, quantize=bits)

    def children(
        self, name: str, count: int, said_by: str, *, held: int | None = None, kind: str = "layers"
    ) -> list[Scope]:
        """Returns the scopes of `count` list entries, of this `kind`; `said_by` is the field of config.json with that
        count. Raises CheckpointError if the checkpoint has fewer entries than `count`, or than `held` if given (a list
        longer than what is built)."""
        if self._demands.tensor_names is not None:
            check_held(self._demands.tensor_names, self._prefix + name, count if held is None else held, said_by, kind)
        return [self.child(f"{name}.{index}") for index in range(count)]

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        fill: Callable[[Tensor], None],
        *,
        optional: bool = False,
        dtype: torch.dtype | None = None,
        fill_quantized: Callable[[QuantizedWeight], None] | None = None,
        matrix: bool = False,
        substitute: str | None = None,
    ) -> None:
        """Declares a slot; slots are filled in this order. `optional`: only if the checkpoint has it; `substitute`:
        full name of a slot that fills this one too if the checkpoint has only that tensor."""
        slot = Slot(shape, fill, optional, dtype, fill_quantized, matrix, substitute)
        self._demands.slots[self._prefix + name] = slot

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def holds(self, name: str) -> bool:
        """True if the checkpoint's names are known and this tensor is among them."""
        return self._prefix + name in (self._demands.tensor_names or ())

    def skip(self, *prefixes: str) -> None:
        """Declares prefixes of tensors that the checkpoint may have and that are not read."""
        self._demands.unneeded += [self._prefix + prefix for prefix in prefixes]

    def register(self, holder: Holder) -> None:
        self._demands.holders.append(holder)


# ---- the number of layers in tensor names and in config.json

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})\.")
_SHOWN = 4  # runs of layers


def check_held(names: Collection[str], stack: str, count: int, said_by: str, kind: str = "layers") -> None:
    """Raises CheckpointError if the weights have fewer than `count` layers, or others of a `kind`, below `stack`.
    `said_by` is the field of config.json with that count. Distinct numbers are counted, so that two names cannot stand
    for a thousand layers. If no layer is found, the tensors may have other names; then the list of missing tensors,
    made elsewhere, says more, so this raises only if `count` exceeds the number of tensors."""
    begin = f"{stack}."
    numbers = (_NUMBER.match(name, len(begin)) for name in names if name.startswith(begin))
    held = {int(number[1]) for number in numbers if number is not None}
    if len(held) < count and (held or count > len(names)):
        raise too_many_layers(count, said_by, stack, held, kind)


def too_many_layers(count: int, said_by: str, stack: str, held: Iterable[int], kind: str = "layers") -> CheckpointError:
    numbers = sorted(held)
    there = f"{len(numbers)} ({stack}.{_runs(numbers)})" if numbers else f"none (there is no {stack}.0)"
    return CheckpointError(
        f"config.json names {count} {kind} ({said_by}), the weights hold {there}; use the config.json that came with "
        "the weights"
    )


def _runs(numbers: Iterable[int]) -> str:
    """Formats ascending numbers as "0 to 4, 6 to 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:_SHOWN]]
    return ", ".join(shown) + (", .." if len(runs) > _SHOWN else "")
