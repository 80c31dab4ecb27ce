"""Safetensors files with quantised matrices: the tensors of one module together make one matrix.

Does not know models; the files determine which matrices are quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, TensorEntry
from hydra_engine.models.loading.formats.compressed_tensors import CompressedTensors
from hydra_engine.models.loading.formats.float8 import Float8
from hydra_engine.models.loading.formats.gptq import Awq, Gptq
from hydra_engine.models.loading.formats.parts import Format, Parts
from hydra_engine.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from hydra_engine.models.specs.quantization import AWQ, COMPRESSED, FP8, GPTQ, Quantization

_FORMATS: dict[str, Callable[[Quantization], Format]] = {
    COMPRESSED: CompressedTensors,
    GPTQ: Gptq,
    AWQ: Awq,
    FP8: Float8,
}
# Scales of a quantised KV cache, which a checkpoint may have in its attention modules, or beside the key projection.
_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point")
_ATTENTION = ("attn", "attention", ".q_proj", ".k_proj", ".v_proj")


class QuantizedCheckpoint:
    """A checkpoint with quantised matrices. It owns `files` and closes them."""

    def __init__(self, files: SafetensorsCheckpoint, quantization: Quantization) -> None:
        self._files = files
        self._format: Format = _FORMATS[quantization.method](quantization)
        self._parts: dict[str, dict[str, str]] = {}  # name of a matrix -> last word of a part's name -> its name
        self.entries: dict[str, StoredTensor] = {}
        modules: dict[str, dict[str, TensorEntry]] = {}
        for name, entry in files.stored.items():
            module, _, leaf = name.rpartition(".")
            modules.setdefault(module, {})[leaf] = entry
        for module, entries in modules.items():
            self._add(module, entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def read(self, name: str) -> Tensor | QuantizedWeight:
        parts = self._parts.get(name)
        if parts is None:
            return self._files.read(name)
        try:
            return self._format.build({leaf: self._files.read_stored(part) for leaf, part in parts.items()})
        except ValueError as error:
            raise CheckpointError(f"tensor {name} cannot be read: {error}") from error

    def stored_name(self, name: str) -> str:
        """Name in the file; for a matrix in several parts, the name of the plain matrix in that module."""
        part = next(iter(self._parts.get(name, {}).values()), name)
        stored = self._files.stored_name(part)
        return stored if part == name else f"{stored.rpartition('.')[0]}.weight"

    def _add(self, module: str, entries: dict[str, TensorEntry]) -> None:
        matrix = f"{module}.weight"
        own: dict[str, TensorEntry] = {}
        quantized = self._format.is_quantized(entries)
        if quantized:
            own = {leaf: entry for leaf, entry in entries.items() if leaf in self._format.leaves}
            self._parts[matrix] = {leaf: f"{module}.{leaf}" for leaf in own}
            parts = Parts(module, own)
            described = self._format.describe(parts, lambda leaf: self._files.read_stored(f"{module}.{leaf}"))
            found = [self._files.described(f"{module}.{leaf}") for leaf in own]
            self.entries[matrix] = described._replace(
                spare=all(part.spare for part in found),
                misplaced=tuple(name for part in found for name in part.misplaced),
            )
        is_attention = module.endswith(_ATTENTION)
        for leaf in entries:
            if leaf in own or (quantized and leaf in self._format.unread) or (is_attention and leaf in _CACHE_SCALES):
                continue
            name = f"{module}.{leaf}" if module else leaf
            # Some GPTQ tools add a bias to every matrix.
            spare = quantized and leaf == "bias" and not self._files.read_stored(name).any().item()
            plain = self._files.described(name)
            self.entries[name] = plain._replace(spare=plain.spare or spare)
