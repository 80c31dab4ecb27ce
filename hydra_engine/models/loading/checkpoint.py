"""The loader's view of a checkpoint of any format: canonical names with shapes, read one tensor at a time.

A format is a class with this protocol; `open_checkpoint.py` chooses one. Does not know files or models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.errors import CheckpointError

MAX_EXPERTS = 1 << 18  # in all layers of a checkpoint together; a header of few bytes may name any number
_SHOWN = 8  # names per complaint; the log has all of them


class StoredTensor(NamedTuple):
    """An entry of a checkpoint that is not read yet. Parts of one quantised matrix (numbers, scales, ..) make one entry
    with the matrix's name and shape. Problems of the parts are reported with the names that do not fit a model; the
    shape is then meaningless."""

    shape: tuple[int, ...]
    nbytes: int  # in the file, for progress
    missing: tuple[str, ...] = ()  # names of parts
    misshaped: tuple[str, ...] = ()  # sentences: a part and what is wrong with it
    quantized: bool = False
    spare: bool = False  # a model may ignore it: it would change nothing
    misplaced: tuple[str, ...] = ()  # names of parts that are in another file than the index says


class TensorEntry(NamedTuple):
    """A tensor in a safetensors file, or the part of one that is one matrix. `columns`: the part has inputs before
    outputs; the first of its outputs, and how many lie side by side in `begin` to `end`."""

    file: str
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int
    columns: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Checkpoint(Protocol):
    """An open checkpoint: weights by canonical names. Opening reads headers only and raises CheckpointError for damaged
    files or an unsupported format."""

    @property
    def entries(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str) -> Tensor | QuantizedWeight:
        """Reads a tensor in the stored precision, into new CPU memory. Raises CheckpointError naming the tensor."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def check_experts(name: str, count: int) -> None:
    """Raises CheckpointError if a checkpoint has more than MAX_EXPERTS experts; `name` is the tensor with the last of
    them."""
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"the weights name more than {MAX_EXPERTS} experts, up to tensor {name[:120]}; no model has as many"
        )


def list_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(name[:120] for name in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")
