"""Rewrites a native model's checkpoint with its decoder quantised, as compressed-tensors stores it.

4 bits: pack-quantized (W4A16), with the head packed in 8 bits; 8 bits: int-quantized (W8A8, activation scales per
token). The numbers are those of `--quantization` at start. Matrices in 8-bit floats or in scattered groups are first
converted to the dtype of config.json, as at a start with that dtype, and stay so if ignored. Keeps one tensor in memory
at a time; sizes of shards follow from shapes, so headers are written first. A tied head is stored apart from the
embeddings, which stay unquantised.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.backend.select import DTYPES, create_backend
from hydra_engine.core.instances import Role
from hydra_engine.errors import CheckpointError, ConfigError, ResourceError
from hydra_engine.models.build import build_model, vision_class
from hydra_engine.models.loading.checkpoint import StoredTensor, list_names
from hydra_engine.models.loading.quantize import quantized_matrix
from hydra_engine.models.loading.quantized_checkpoint import QuantizedCheckpoint
from hydra_engine.models.loading.safetensors_checkpoint import FLOATS, INDEX, SINGLE, SafetensorsCheckpoint
from hydra_engine.models.loading.weights import Progress, all_finite, check_names
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.fields import read_json
from hydra_engine.models.specs.quantization import AT_LOAD, AT_LOAD_GROUP, COMPRESSED, FILES, PLACES
from hydra_engine.models.specs.registry import load_spec

SHARD_BYTES = 4 << 30
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4, "I64": 8}
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NAMES = {dtype: name for name, dtype in FLOATS.items()} | {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64"}


class Part(NamedTuple):
    """A tensor of the new files, as in their header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * _WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the old files and its new form. `num_bits` None: it is copied."""

    canonical: str
    num_bits: int | None
    parts: tuple[Part, ...]


def write_quantized(
    model_dir: Path,
    target: Path,
    wanted: str,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a quantised checkpoint to `target`. `wanted`: int8 or int4. `ignore`: modules that stay unquantised, by
    name in the files, by the end of a name, or by a regular expression after `re:`; each must match. Raises ConfigError
    or CheckpointError before anything is written, except for values that are not finite; the files written by then are
    removed."""
    if target.exists():
        raise ConfigError(f"{str(target)[:200]!r} exists; name a folder that does not", param="out")
    create_backend("cpu", torch.float32)  # for the thread counts of this thread
    spec = load_spec(model_dir)
    if spec.quantization is not None and spec.quantization.stays_quantized:
        raise CheckpointError(f"the weights are quantised by {spec.quantization.method} already")
    renames = () if spec.vision is None else vision_class(spec).renames
    with SafetensorsCheckpoint(model_dir, renames) as files, torch.inference_mode():
        files.check_places()
        files.split_experts()
        source, stays = _Source(files, spec), _Ignored(ignore)
        pieces = _pieces(source, spec, AT_LOAD[wanted], stays)
        stays.check(source.stored_name(name).removesuffix(".weight") for name in source.entries)
        partial = target.with_name(f".{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            _copy_rest(model_dir, partial)
            _write_config(model_dir, partial, spec, wanted, pieces)
            _write_shards(source, pieces, partial, progress or (lambda _done, _total: None), shard_bytes)
            partial.rename(target)
        except OSError as error:
            raise ResourceError(
                f"the checkpoint cannot be written: {error.strerror or type(error).__name__}"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


class _Source:
    """The tensors to write, by canonical name."""

    entries: Mapping[str, StoredTensor]

    def __init__(self, files: SafetensorsCheckpoint, spec: ModelSpec) -> None:
        self._files = files
        self._matrices = None if spec.quantization is None else QuantizedCheckpoint(files, spec.quantization)
        self._dtype = DTYPES.get(spec.dtype, torch.float32)
        self.entries = (self._matrices or files).entries

    def stored_name(self, name: str) -> str:
        return (self._matrices or self._files).stored_name(name)

    def dtype(self, name: str) -> str:
        """Dtype in which a tensor is read, as named in headers."""
        return _NAMES[self._dtype] if self.entries[name].quantized else self._files.stored[name].dtype

    def read(self, name: str) -> Tensor:
        if self._matrices is None or not self.entries[name].quantized:
            return self._files.read_stored(name)
        matrix = self._matrices.read(name)
        if isinstance(matrix, QuantizedWeight):
            raise CheckpointError(f"tensor {name} is quantised in neighbouring groups, which stay as they are at start")
        return matrix.to(self._dtype)


class _Ignored:
    """The set of modules that stay unquantised."""

    def __init__(self, ignore: Sequence[str]) -> None:
        try:
            self._patterns = {
                item: re.compile(item[3:] if item.startswith("re:") else rf"(.*\.)?{re.escape(item)}$")
                for item in ignore
            }
        except re.error as error:
            raise ConfigError(f"--ignore: a regular expression cannot be read: {error}", param="ignore") from error
        self._matched: set[str] = set()

    def __call__(self, module: str) -> bool:
        matched = {item for item, pattern in self._patterns.items() if pattern.match(module)}
        self._matched |= matched
        return bool(matched)

    def check(self, modules: Iterable[str]) -> None:
        """Raises ConfigError if an item matches none of the modules and matched no earlier query."""
        example = ""
        for module in modules:
            self(module)
            example = module
        if missing := self._patterns.keys() - self._matched:
            raise ConfigError(f"--ignore: no module is named {list_names(missing)}; one is {example!r}", param="ignore")


def _pieces(source: _Source, spec: ModelSpec, num_bits: int, stays: _Ignored) -> list[Piece]:
    model = build_model(spec, ReferenceOps(), torch.float32, Role.parse("EPD"), held=source.entries)
    check_names(model, source.entries)
    decoder = build_model(spec, ReferenceOps(), torch.float32, Role.parse("D")).slots
    matrices = {name for name, slot in decoder.items() if slot.fill_quantized and not name.endswith(_EMBEDDING)}
    result, has_head = [], any(name.endswith(_HEAD) for name in source.entries)
    for name, entry in source.entries.items():
        if entry.spare and name not in model.slots:
            continue
        stored, dtype = source.stored_name(name), source.dtype(name)
        module = stored.removesuffix(".weight")
        if name.endswith(_HEAD) and model.slots[name].optional and (other := _embedding_of(name, source)) is not None:
            result.append(Piece(name, None, (Part(other, dtype, entry.shape),)))
        if name in matrices and not stays(module):
            bits = 8 if name.endswith(_HEAD) or entry.shape[1] % AT_LOAD_GROUP else num_bits
            result.append(Piece(name, bits, _parts(module, dtype, entry.shape, bits, packed=num_bits == 4)))
            continue
        result.append(Piece(name, None, (Part(stored, dtype, entry.shape),)))
        head = _head_of(stored)
        tied = name in decoder and name.endswith(_EMBEDDING) and spec.language.tie_embeddings and not has_head
        if tied and not stays(head):
            result.append(Piece(name, 8, _parts(head, dtype, entry.shape, 8, packed=num_bits == 4)))
    unknown = [f"{piece.canonical} ({piece.parts[0].dtype})" for piece in result if piece.parts[0].dtype not in _WIDTHS]
    if unknown:
        raise CheckpointError(f"tensors of these types cannot be copied: {list_names(unknown)}")
    return result


def _embedding_of(head: str, source: _Source) -> str | None:
    """Returns the name under which to store a copy of the head as the embeddings, which are tied to it; None if the
    files have embeddings."""
    decoder = f"{head.removesuffix(_HEAD)}model."
    if f"{decoder}embed_tokens.weight" in source.entries:
        return None
    return source.stored_name(f"{decoder}norm.weight").removesuffix("norm.weight") + "embed_tokens.weight"


def _head_of(embedding: str) -> str:
    """Module of the head, for the stored name of the embeddings in old or new checkpoints."""
    inside = embedding.startswith("language_model.")
    return "language_model.lm_head" if inside else "lm_head"


def _parts(module: str, dtype: str, shape: tuple[int, ...], num_bits: int, *, packed: bool) -> tuple[Part, ...]:
    num_out, num_in = shape
    scale = Part(f"{module}.weight_scale", dtype if dtype in ("BF16", "F16") else "F32", (num_out, 1))
    if not packed:
        return Part(f"{module}.weight", "I8", shape), scale
    groups = num_in // AT_LOAD_GROUP if num_bits == 4 else 1
    return (
        Part(f"{module}.weight_packed", "I32", (num_out, num_in * num_bits // 32)),
        scale._replace(shape=(num_out, groups)),
        Part(f"{module}.weight_shape", "I64", (2,)),
    )


def _tensors(piece: Piece, weight: Tensor) -> Iterator[Tensor]:
    if piece.num_bits is None:
        yield weight
        return
    quantized: QuantizedWeight = quantized_matrix(weight, piece.num_bits)
    values = quantized.values
    if piece.parts[0].dtype == "I32":
        octets = values if quantized.num_bits == 4 else values.view(torch.uint8) ^ 128
        values = octets.contiguous().view(torch.int32)
    yield values
    yield quantized.scales
    if len(piece.parts) > 2:
        yield torch.tensor(quantized.shape)


def _write_shards(source: _Source, pieces: list[Piece], target: Path, progress: Progress, shard_bytes: int) -> None:
    shards: list[list[Piece]] = [[]]
    filled = 0
    for piece in pieces:
        size = sum(part.nbytes for part in piece.parts)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    total = sum(source.entries[piece.canonical].nbytes for piece in pieces)
    done, names = 0, {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with open(target / name, "wb") as file:
            file.write(_header([part for piece in shard for part in piece.parts]))
            for piece in shard:
                weight = source.read(piece.canonical)
                if weight.is_floating_point() and not all_finite(weight):
                    raise CheckpointError(
                        f"tensor {piece.canonical} holds values that are not finite (NaN or infinity)"
                    )
                for part, tensor in zip(piece.parts, _tensors(piece, weight), strict=True):
                    assert (tuple(tensor.shape), _NAMES.get(tensor.dtype)) == (part.shape, part.dtype), part
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                    names[part.name] = name
                done += source.entries[piece.canonical].nbytes
                progress(done, total)
    if len(shards) > 1:
        size = sum(part.nbytes for piece in pieces for part in piece.parts)
        _write_json(target / INDEX, {"metadata": {"total_size": size}, "weight_map": names})


def _header(parts: list[Part]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in parts:
        header[part.name] = {
            "dtype": part.dtype,
            "shape": part.shape,
            "data_offsets": [position, position + part.nbytes],
        }
        position += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _copy_rest(model_dir: Path, target: Path) -> None:
    """Copies tokenizer, processor and other small files, but no weights and no files about their old quantisation."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith((*_WEIGHTS, *FILES)):
            shutil.copyfile(path, target / path.name)
    if (model_dir / "additional_chat_templates").is_dir():
        shutil.copytree(model_dir / "additional_chat_templates", target / "additional_chat_templates")


def _write_config(model_dir: Path, target: Path, spec: ModelSpec, wanted: str, pieces: list[Piece]) -> None:
    config: Any = read_json(model_dir, "config.json").values
    modules = {piece.parts[0].name.rpartition(".")[0]: piece.num_bits for piece in pieces if piece.num_bits}
    if spec.language.tie_embeddings and any(module.endswith("lm_head") for module in modules):
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
        config["tie_word_embeddings"] = False
    for part in (config, config.get("text_config")):
        for place in PLACES if isinstance(part, dict) else ():
            part.pop(place, None)
    config["quantization_config"] = _quantization_config(wanted, spec, modules, pieces)
    _write_json(target / "config.json", config)


def _quantization_config(wanted: str, spec: ModelSpec, modules: dict[str, int], pieces: list[Piece]) -> dict[str, Any]:
    """Returns config.json's quantization_config. Targets are the last words of names, which are the same in files and
    in transformers' modules."""
    by_bits: dict[int, set[str]] = {}
    for module, bits in modules.items():
        by_bits.setdefault(bits, set()).add(module.rpartition(".")[2])
    layout = "pack-quantized" if AT_LOAD[wanted] == 4 else "int-quantized"
    groups = {
        f"group_{index}": _group([rf"re:.*\.{last}$|^{last}$" for last in sorted(lasts)], bits, layout)
        for index, (bits, lasts) in enumerate(sorted(by_bits.items()))
    }
    towers = (
        [] if spec.vision is None else [rf"re:.*{re.escape(n.rstrip('.'))}.*" for n in vision_class(spec).weight_names]
    )
    lasts = set[str]().union(*by_bits.values())
    kept = [piece.parts[0].name.removesuffix(".weight") for piece in pieces if piece.num_bits is None]
    left_out = [name for name in kept if name.rpartition(".")[2] in lasts]
    return {
        "quant_method": COMPRESSED,
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*towers, *left_out],
        "kv_cache_scheme": None,
    }


def _group(targets: list[str], num_bits: int, layout: str) -> dict[str, Any]:
    steps = {"strategy": "group", "group_size": AT_LOAD_GROUP} if num_bits == 4 else {"strategy": "channel"}
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "dynamic": False, **steps}
    by_token = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    activations = by_token if layout == "int-quantized" else None
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
        "format": layout,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
