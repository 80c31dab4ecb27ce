"""GGUF files as a checkpoint: canonical names and shapes, tensors read one at a time in the precision of the file.

The folder is one that `preprocess/model_files.py` made: a Hugging Face directory with links to the files. Does not know
models.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

import torch
from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight, stacked
from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError
from hydra_engine.models.loading.checkpoint import StoredTensor, check_experts, list_names
from hydra_engine.models.loading.gguf_names import Decoder, Order, Source, sources_by_name
from hydra_engine.models.loading.gguf_tensors import decoded
from hydra_engine.models.specs.fields import Fields, read_json
from hydra_engine.models.specs.gguf_config import UNREAD
from hydra_engine.models.specs.gguf_file import GgufHeader, GgufTensor, read_gguf

logger = logging.getLogger(__name__)

_MODEL_FILES = "model*.gguf"
_MMPROJ = "mmproj.gguf"
_EXPERTS = re.compile(r"(blk\.\d+\.ffn_)(gate_up|gate|up|down)_exps\.weight")


def has_gguf(model_dir: Path) -> bool:
    return next(model_dir.glob(_MODEL_FILES), None) is not None


class GgufCheckpoint:
    """An open model in GGUF: one or several files of the text model, and the mmproj if there is one."""

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
        config = read_json(model_dir, "config.json")
        if unread := config.get(UNREAD):
            logger.warning(
                "%s: these settings are not known and not read: %s", headers[0].path.name, list_names(unread)
            )
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        self._sources = sources_by_name(shapes, config.text("model_type"), _decoder(config, headers[0]))
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
        if source.order is not None:
            whole = ordered(whole, source.order)
        if source.joined in ("row", "batch", "taps"):
            return _plain(whole).view(self.entries[name].shape)
        if source.value == "x":
            return whole
        plain = _plain(whole)
        return plain - 1 if source.value == "x - 1" else torch.log(-plain)

    def _open(self, path: Path) -> GgufHeader:
        header = read_gguf(path)
        file = open_weights(path)
        self._files.append(file)
        if twice := header.tensors.keys() & self._tensors.keys():
            raise CheckpointError(f"these tensors are in two of the GGUF files: {list_names(twice)}")
        for tensor in header.tensors.values():
            if len(tensor.shape) == 3:
                check_experts(tensor.name, len(self._tensors) // 3 + tensor.shape[0])
            self._tensors |= {part.name: (file, part) for part in _experts_of(tensor)}
        return header

    def _entry(self, source: Source) -> StoredTensor:
        parts = [self._tensors[name][1] for name in source.parts]
        first, rest = parts[0].shape, parts[0].shape[1:]
        nbytes = sum(part.nbytes for part in parts)
        wrong = tuple(f"{p.name} is {list(p.shape)} beside {list(first)}" for p in parts if p.shape[1:] != rest)
        if source.order is not None:
            count, what = (first[-1], "columns") if source.order.columns else (first[0], "rows")
            if count < source.order.keep or (count - source.order.keep) % source.order.unit:
                wrong += (f"{parts[0].name} has {count} {what}, which its heads cannot share",)
        if source.joined == "frames":
            return StoredTensor((*first[:2], len(parts), *first[2:]), nbytes, misshaped=wrong)
        if source.joined in ("row", "batch"):
            return StoredTensor((*[1] * ((2 if source.joined == "row" else 3) - len(first)), *first), nbytes)
        if source.joined == "taps":
            return StoredTensor((*first[:-1], 1, first[-1]), nbytes, misshaped=wrong)
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


def _experts_of(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Cuts a tensor that holds all experts of a layer, [E, rows, columns], into theirs: ffn_up_exps.weight into
    ffn_up_exps.0.weight and so on, and ffn_gate_up_exps.weight, gate first, into those of gate and up. Yields others
    as they are."""
    match = _EXPERTS.fullmatch(tensor.name)
    names = () if match is None else ("gate", "up") if match[2] == "gate_up" else (match[2],)
    if match is None or len(tensor.shape) != 3 or tensor.shape[1] % len(names):
        yield tensor
        return
    shape, size = (tensor.shape[1] // len(names), tensor.shape[2]), tensor.nbytes // (tensor.shape[0] * len(names))
    for index in range(tensor.shape[0] * len(names)):
        expert, part = divmod(index, len(names))
        begin = tensor.begin + index * size
        yield GgufTensor(f"{match[1]}{names[part]}_exps.{expert}.weight", tensor.type, shape, begin, begin + size)


def _joined(parts: list[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """Stacks the parts by rows; the result stays quantised if all have one format."""
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and len({part.stack_key for part in quantized}) == 1:
        return stacked(quantized)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([_plain(part) for part in parts])


def _plain(part: Tensor | QuantizedWeight) -> Tensor:
    """Converts a part to float32, the common type of different parts."""
    return part.dequantized(torch.float32) if isinstance(part, QuantizedWeight) else part.float()


def _decoder(config: Fields, text: GgufHeader) -> Decoder:
    decoder = config.section_if_present("text_config") or config
    num_layers = decoder.integer("num_hidden_layers")
    if "linear_num_key_heads" in decoder:
        key_heads, value_heads = (decoder.integer(f"linear_num_{part}_heads") for part in ("key", "value"))
        key_rows = 2 * key_heads * decoder.integer("linear_key_head_dim")
        return Decoder(num_layers, delta=(key_heads, value_heads, key_rows))
    if text.settings.text("general.architecture") != "llama":
        return Decoder(num_layers)
    return Decoder(num_layers, (decoder.integer("num_attention_heads"), decoder.integer("num_key_value_heads")))


def ordered(whole: Tensor | QuantizedWeight, order: Order) -> Tensor | QuantizedWeight:
    """Permutes rows or columns. Quantised columns are permuted by whole groups, or dequantised if a head is not a
    multiple of a group."""
    if not order.columns:
        rows = _places(whole.shape[0], order)
        return whole.rows(rows) if isinstance(whole, QuantizedWeight) else whole[rows]
    if isinstance(whole, QuantizedWeight) and whole.scales.shape[1] % order.unit == 0:
        whole = whole.flatten_scales()  # blocks may be larger than heads
        groups = _places(whole.scales.shape[1], order)
        values = whole.values.unflatten(1, (len(groups), -1))[:, groups].flatten(1)
        offsets = None if whole.offsets is None else whole.offsets[:, groups]
        return QuantizedWeight(values, whole.scales[:, groups], offsets, whole.num_bits)
    plain = _plain(whole)
    return plain[:, _places(plain.shape[1], order)]


def _places(count: int, order: Order) -> Tensor:
    """Index in the file of each row of the result."""
    kept, others = torch.arange(count).split((order.keep, count - order.keep))
    return torch.cat((kept, others.view(order.cut).transpose(1, 2).flatten()))
