"""GGUF files as a checkpoint: canonical names and shapes, tensors read one at a time in the precision of the file.

The folder is one that `gguf_folder.py` made: a Hugging Face directory with links to the files. Does not know models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight, stacked
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, listed
from hydra_engine.models.loading.gguf_names import Source, sources
from hydra_engine.models.loading.gguf_tensors import decoded
from hydra_engine.models.specs.fields import read_json
from hydra_engine.models.specs.gguf_file import GgufHeader, GgufTensor, read_gguf

_MODEL_FILES = "model*.gguf"
_MMPROJ = "mmproj.gguf"


def has_gguf(model_dir: Path) -> bool:
    return next(model_dir.glob(_MODEL_FILES), None) is not None


class GgufCheckpoint:
    """The files of a model, open: one or several of the text model, and the mmproj where there is one."""

    def __init__(self, model_dir: Path) -> None:
        self._files: list[BinaryIO] = []
        self._tensors: dict[str, tuple[BinaryIO, GgufTensor]] = {}  # by the names of the files
        paths = sorted(model_dir.glob(_MODEL_FILES))
        if (model_dir / _MMPROJ).exists():
            paths.append(model_dir / _MMPROJ)
        try:
            headers = [self._open(path) for path in paths]
        except BaseException:
            self.close()
            raise
        model_type = read_json(model_dir, "config.json").text("model_type")
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        self._sources = sources(shapes, model_type, _rotated_heads(headers[0]))
        self.entries = {name: self._entry(source) for name, source in self._sources.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def read(self, name: str) -> Tensor | QuantizedWeight:
        source = self._sources[name]
        parts = [self._part(part) for part in source.parts]
        if source.joined == "frames":
            return torch.stack([_plain(part) for part in parts], dim=2)
        whole = _joined(parts)
        if source.joined == "batch":
            return _plain(whole).view(self.entries[name].shape)
        if not source.heads:
            return whole
        order = _rotary_order(whole.shape[0], source.heads)
        return whole.rows(order) if isinstance(whole, QuantizedWeight) else whole[order]

    def _open(self, path: Path) -> GgufHeader:
        header = read_gguf(path)
        file = open(path, "rb", buffering=0)  # noqa: SIM115, closed by `close`
        self._files.append(file)
        if twice := header.tensors.keys() & self._tensors.keys():
            raise CheckpointError(f"these tensors are in two of the GGUF files: {listed(twice)}")
        self._tensors |= {name: (file, tensor) for name, tensor in header.tensors.items()}
        return header

    def _entry(self, source: Source) -> StoredTensor:
        parts = [self._tensors[name][1] for name in source.parts]
        first, rest = parts[0].shape, parts[0].shape[1:]
        nbytes = sum(part.nbytes for part in parts)
        wrong = tuple(f"{p.name} is {list(p.shape)} beside {list(first)}" for p in parts if p.shape[1:] != rest)
        if source.heads and first[0] % (2 * source.heads):
            wrong += (f"{parts[0].name} has {first[0]} rows for {source.heads} heads",)
        if source.joined == "frames":
            return StoredTensor((*first[:2], len(parts), *first[2:]), nbytes, misshaped=wrong)
        if source.joined == "batch":
            return StoredTensor((*[1] * (3 - len(first)), *first), nbytes)
        return StoredTensor((sum(part.shape[0] for part in parts), *rest), nbytes, misshaped=wrong)

    def _part(self, name: str) -> Tensor | QuantizedWeight:
        file, tensor = self._tensors[name]
        data = torch.empty(tensor.nbytes, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        while done < tensor.nbytes:
            try:
                count = os.preadv(file.fileno(), [view[done:]], tensor.begin + done)
            except OSError as error:
                raise CheckpointError(f"tensor {name} cannot be read: {error.strerror}") from None
            if not count:
                raise CheckpointError(f"the GGUF file ended while tensor {name} was read; it is truncated")
            done += count
        return decoded(data, tensor.type, tensor.shape)


def _joined(parts: list[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """One below the other; quantised where all are in one form."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and len({part.form for part in quantized}) == 1:
        return stacked(quantized)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([_plain(part) for part in parts])


def _plain(part: Tensor | QuantizedWeight) -> Tensor:
    """Parts of different types meet in float32."""
    return part.dequantized(torch.float32) if isinstance(part, QuantizedWeight) else part.float()


def _rotated_heads(text: GgufHeader) -> tuple[int, int] | None:
    """Heads of queries and of keys, where numbers that turn together lie side by side: in files of llama's type."""
    if text.settings.text("general.architecture") != "llama":
        return None
    heads = text.settings.integer("llama.attention.head_count")
    return heads, text.settings.integer("llama.attention.head_count_kv", heads)


def _rotary_order(num_rows: int, heads: int) -> Tensor:
    """The file's row of each row of ours: of a head (pair, half) there and (half, pair) here."""
    rows = torch.arange(num_rows).view(heads, num_rows // heads // 2, 2)
    return rows.transpose(1, 2).flatten()
