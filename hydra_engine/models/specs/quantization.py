"""Quantisation of a checkpoint's weights, from `quantization_config` of config.json, and by `--quantization`.

Which matrices are quantised follows from the files, so `ignore`, `targets` and `modules_to_not_convert` are not read;
only the numbers that tensors do not show are read here. Does not know tensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hydra_engine.core.model_folder import open_weights
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.specs.fields import Fields, read_json_if_present

COMPRESSED, GPTQ, AWQ, FP8, GGUF = "compressed-tensors", "gptq", "awq", "fp8", "gguf"
METHODS = (COMPRESSED, GPTQ, AWQ, FP8, GGUF)
_AUTO_ROUND, _MODELOPT = "auto-round", "modelopt"  # which store weights like GPTQ or AWQ, and like fp8
_SAME = {"compressed_tensors": COMPRESSED, "intel/auto-round": _AUTO_ROUND}
_MODELOPT_FILE = "hf_quant_config.json"
FILES = (_MODELOPT_FILE, "quantize_config.json", "quant_config.json")  # that say it beside config.json
_MAX_HEADER_BYTES = 16 << 20  # of a safetensors file
AT_LOAD: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
AT_LOAD_GROUP = 32  # inputs that share a scale in 4 bits; in 8 bits a row does
ROW = -1  # a group size: all inputs
_MODELOPT_FLOATS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_ROTATIONS = ("rotation", "rotation_config", "spinquant_config")  # of GPTQModel and auto-round
PLACES = ("quantization_config", "compression_config")
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class Quantization:
    """A quantisation scheme. `num_bits` and `group_sizes` (inputs; ROW) are the values that occur among the matrices.
    `floats`: 8-bit weights are floating-point numbers, with scales per block of `block` (outputs, inputs), per row or
    per matrix. `scattered`: the inputs of a group are not adjacent (act-order)."""

    method: str
    num_bits: tuple[int, ...]
    group_sizes: tuple[int, ...] = (ROW,)
    floats: bool = False
    block: tuple[int, int] | None = None
    zero_offset: int = 0  # added to stored zero points
    has_zeros: bool = False
    mean_bytes: float | None = None  # of a weight with its scales, where files of several kinds say it
    scattered: bool = False
    float_share: float = 0  # of weights that are 8-bit floats where others are integers
    keeps_floats: bool = False  # 8-bit floats stay so on the device

    @property
    def stays_quantized(self) -> bool:
        """True if weights stay quantised in memory. Scattered groups are converted to the compute dtype, and so are
        8-bit floats unless `keeps_floats`."""
        return (self.keeps_floats or not self.floats) and not self.scattered

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per stored weight: scales have two bytes (four for 8-bit floats), offsets four."""
        if self.mean_bytes is not None:
            return self.mean_bytes
        if self.floats:
            return 1 + (4 / self.block[1] if self.block else 0)
        group = min((size for size in self.group_sizes if size != ROW), default=0)
        return min(self.num_bits) / 8 + ((2 + 4 * self.has_zeros) / group if group else 0)

    def held_bytes(self, compute_bytes: int) -> float:
        """Bytes per weight in memory; the compute dtype has `compute_bytes`."""
        widened = (0 if self.keeps_floats else self.float_share) if self.stays_quantized else 1
        return widened * compute_bytes + (1 - widened) * self.bytes_per_weight


def at_load(name: str) -> Quantization:
    """The scheme of the decoder's matrices with `--quantization int8|int4`."""
    bits = AT_LOAD[name]
    return Quantization("quantised at start", (bits,), (AT_LOAD_GROUP if bits == 4 else ROW,))


def check_requested(wanted: str, stored: Quantization | None) -> None:
    """Raises ConfigError if --quantization does not fit the checkpoint."""
    has = "not quantised" if stored is None else f"quantised by {stored.method}"
    if wanted in METHODS and (stored is None or stored.method != wanted):
        hint = "; leave --quantization out" if stored else "; --quantization int8 or int4 quantises it while it is read"
        raise ConfigError(f"quantization {wanted}: the checkpoint is {has}{hint}", param="quantization")
    if wanted in AT_LOAD and stored is not None and stored.stays_quantized:
        raise ConfigError(
            f"quantization {wanted}: the checkpoint is {has} already; leave --quantization out", param="quantization"
        )


def read_quantization(model_dir: Path, config: Fields, text: Fields | None = None) -> Quantization | None:
    """Returns the checkpoint's scheme, or None if it is not quantised. Raises CheckpointError, naming the supported
    schemes, for others. `model_dir` may contain the separate file of ModelOpt's first versions."""
    for place in (config, text):
        for name in PLACES:
            if place is not None and (section := place.section_if_present(name)) is not None and section.values:
                found = _read(section)
                if found is None or not found.float_share:
                    return found
                return replace(found, float_share=_float_share(model_dir, found))
    beside = read_json_if_present(model_dir, _MODELOPT_FILE)
    return None if beside is None else _modelopt(beside.section("quantization"))


def _float_share(model_dir: Path, quantization: Quantization) -> float:
    """Share of 8-bit floats among the quantised weights, from the headers of the weights files; 1 if one cannot be
    read."""
    counts = {"F8_E4M3": 0.0, "I8": 0.0, "I32": 0.0}
    for path in filter(Path.is_file, model_dir.glob("*.safetensors")):
        try:
            with open_weights(path) as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
            for name, entry in header.items():
                if name.endswith((".weight", ".weight_packed")) and entry["dtype"] in counts:
                    counts[entry["dtype"]] += math.prod(entry["shape"])
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return 1
    counts["I32"] *= 32 / min(quantization.num_bits)
    return counts["F8_E4M3"] / (sum(counts.values()) or 1)


def _read(section: Fields) -> Quantization | None:
    # compressed-tensors and ModelOpt wrote no method where transformers did not add one
    unnamed = _MODELOPT if "quant_algo" in section else COMPRESSED if "config_groups" in section else None
    method = section.text("quant_method", unnamed).lower()
    method = _SAME.get(method, method)
    readers = {COMPRESSED: _compressed, GPTQ: _gptq, AWQ: _awq, FP8: _fp8, GGUF: _gguf}
    readers |= {_AUTO_ROUND: _auto_round, _MODELOPT: _modelopt}
    if method not in readers:
        raise CheckpointError(
            f"weights quantised by {method[:40]!r} are not supported; supported are {', '.join(readers)}; or take the "
            "model's unquantised weights and --quantization int8 or int4"
        )
    if rotation := next((name for name in _ROTATIONS if section.get(name)), None):
        raise CheckpointError(
            f"weights for rotated activations ({rotation} in {section.where}) are not supported; take unrotated ones"
        )
    return readers[method](section)


def _compressed(section: Fields) -> Quantization | None:
    # tools write "fakequant" before weights are compressed
    layout = section.text("format", "dense")
    layouts = {layout} - {"fakequant"}
    sparsity = section.section_if_present("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise CheckpointError(f"sparse weights ({sparsity.text('format')[:40]}) are not supported; only dense ones are")
    if (transforms := section.section_if_present("transform_config")) is not None and any(transforms.values.values()):
        raise CheckpointError("transforms of compressed-tensors (transform_config) are not supported; only weights are")
    groups = section.section("config_groups")
    kinds, sizes, blocks, zeros = set[tuple[int, str]](), set[int](), set[tuple[int, int]](), False
    scattered = False
    for name in groups.values:
        group = groups.section(name)
        layouts |= {group.text("format", layout)} - {"fakequant"}
        weights = group.section_if_present("weights")
        if weights is None:
            continue
        kinds.add((weights.integer("num_bits", 8), weights.text("type", "int")))
        zeros |= not weights.flag("symmetric", True)
        scattered |= weights.get("actorder") in (True, "group", "dynamic")
        if "block_structure" in weights:
            blocks.add(_pair(weights, "block_structure"))
        sizes.add(_group_size(weights))
    if unknown := layouts - set(_FORMATS):
        raise CheckpointError(
            f"compressed-tensors format {min(unknown)[:40]!r} is not supported; supported are {', '.join(_FORMATS)}"
        )
    if not kinds:  # a KV cache may be all that is quantised, and leaves scales in the files
        only_cache = Quantization(COMPRESSED, (8,), floats=True, mean_bytes=2)
        return only_cache if "kv_cache_scheme" in section else None
    if unread := kinds - {(4, "int"), (8, "int"), (8, "float")}:
        raise CheckpointError(
            f"compressed-tensors weights of {min(unread)[0]} bits are not supported as {min(unread)[1][:40]}; "
            "supported are int of 4 and 8 bits and float of 8"
        )
    if len(blocks) > 1:
        raise CheckpointError("compressed-tensors weights with blocks of several sizes are not supported; one size is")
    bits, floats = {number for number, _ in kinds}, all(kind == "float" for _, kind in kinds)
    return Quantization(
        *(COMPRESSED, tuple(sorted(bits)), tuple(sorted(sizes)), floats, next(iter(blocks), None), 0, zeros),
        scattered=scattered,
        float_share=1 if {kind for _, kind in kinds} == {"int", "float"} else 0,  # until the files say
    )


def _gptq(section: Fields) -> Quantization:
    layout = section.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"GPTQ checkpoint_format {layout[:40]!r} is not supported; supported are gptq and gptq_v2"
        )
    return _words(section, "dynamic", zero_offset=1 if layout == "gptq" else 0)


def _auto_round(section: Fields) -> Quantization:
    """Reads auto-round's settings. Its first versions have the layout in `backend`."""
    layout = section.text("packing_format", section.text("backend", "auto"))
    if (kind := section.text("data_type", "int")) != "int":
        raise CheckpointError(f"auto-round weights of data_type {kind[:40]!r} are not supported; supported is int")
    if "awq" in layout:
        widths, sizes = _widths(section, "extra_config")
        if widths != (4,):
            raise CheckpointError("auto-round weights in AWQ's layout are supported with 4 bits only")
        return Quantization(AWQ, widths, sizes, has_zeros=True)
    if "gptq" not in layout and layout != "auto":
        raise CheckpointError(
            f"auto-round packing_format {layout[:40]!r} is not supported; supported are auto_round:auto_gptq, "
            "auto_round:gptqmodel and auto_round:auto_awq"
        )
    return _words(section, "extra_config", zero_offset=0 if "gptqmodel" in layout else 1)


def _words(section: Fields, overrides: str, *, zero_offset: int) -> Quantization:
    """Reads settings in GPTQ's layout."""
    bits, sizes = _widths(section, overrides)
    if unread := set(bits) - {4, 8}:
        raise CheckpointError(f"GPTQ weights of {min(unread)} bits are not supported; supported are 4 and 8")
    # With `static_groups` a group's inputs are neighbours again, and a row's always are.
    scattered = section.flag("desc_act", False) and not section.flag("static_groups", False) and sizes != (ROW,)
    return Quantization(
        GPTQ, bits, sizes, zero_offset=zero_offset, has_zeros=not section.flag("sym", True), scattered=scattered
    )


def _widths(section: Fields, overrides: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the bits and group sizes that occur, per-module `overrides` included."""
    common, size = section.integer("bits"), _group_size(section)
    bits, sizes = {common}, {size}
    modules = section.get(overrides)
    for name, values in modules.items() if isinstance(modules, dict) else ():
        own = Fields(values if isinstance(values, dict) else {}, f"{overrides} {name[:40]} of {section.where}")
        if (width := own.integer("bits", common)) < 16:  # else the module is not quantised
            bits.add(width)
            sizes.add(_group_size(own, size))
    return tuple(sorted(bits)), tuple(sorted(sizes))


def _awq(section: Fields) -> Quantization:
    version, bits = section.text("version", "gemm").lower(), section.integer("bits", 4)
    if version != "gemm":
        raise CheckpointError(f"AWQ version {version[:40]!r} is not supported; supported is gemm")
    if bits != 4:
        raise CheckpointError(f"AWQ weights of {bits} bits are not supported; supported are 4")
    return Quantization(AWQ, (4,), (_group_size(section, 128),), has_zeros=section.flag("zero_point", True))


def _fp8(section: Fields) -> Quantization:
    if (layout := section.text("fmt", "e4m3")) != "e4m3":
        raise CheckpointError(f"fp8 weights of fmt {layout[:40]!r} are not supported; supported is e4m3")
    if section.text("weight_scale_semantics", "") == "inverse":
        raise CheckpointError(
            "fp8 weights whose scales divide (weight_scale_semantics inverse) are not supported; scales multiply"
        )
    block = _pair(section, "weight_block_size") if "weight_block_size" in section else None
    return Quantization(FP8, (8,), floats=True, block=block)


def _modelopt(section: Fields) -> Quantization:
    # no algorithm: only a KV cache is quantised
    if (algorithm := section.text("quant_algo", _MODELOPT_FLOATS[0])) not in _MODELOPT_FLOATS:
        raise CheckpointError(
            f"ModelOpt weights of quant_algo {algorithm[:40]!r} are not supported; supported are "
            f"{' and '.join(_MODELOPT_FLOATS)}; or take the model's unquantised weights and --quantization int8 or int4"
        )
    return Quantization(FP8, (8,), floats=True, mean_bytes=None if "quant_algo" in section else 2)


def _gguf(section: Fields) -> Quantization:
    """Reads the section that `gguf_config.describe` writes; the files hold each tensor's own type."""
    bits = section.get("bits")
    if not isinstance(bits, list) or not bits or not set(bits) <= {4, 6, 8}:
        raise section.wrong_value("bits", "a list of 4, 6 and 8")
    return Quantization(GGUF, tuple(bits), mean_bytes=section.number("bytes_per_weight"))


def _group_size(section: Fields, default: int = ROW) -> int:
    size = section.get("group_size")
    size = default if size is None else size
    if type(size) is not int or (size != ROW and not 0 < size <= 1 << 20):
        raise section.wrong_value("group_size", "a whole number above 0, or -1 for whole rows")
    return size


def _pair(section: Fields, name: str) -> tuple[int, int]:
    value = section.get(name)
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or not 0 < n <= 1 << 20 for n in value):
        raise section.wrong_value(name, "a list of two whole numbers above 0")
    return value[0], value[1]
