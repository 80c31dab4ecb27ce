"""How a checkpoint's weights are quantised, from `quantization_config` of config.json, and what --quantization asks.

Which matrices are quantised is what the files hold, so `ignore`, `targets` and `modules_to_not_convert` are not looked
at; what is read here are the numbers that tensors do not tell. Does not know tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.specs.fields import Fields

COMPRESSED, GPTQ, AWQ, FP8, GGUF = "compressed-tensors", "gptq", "awq", "fp8", "gguf"
METHODS = (COMPRESSED, GPTQ, AWQ, FP8, GGUF)
AT_LOAD: dict[str, Literal[4, 8]] = {"int4": 4, "int8": 8}
AT_LOAD_GROUP = 32  # inputs that share a scale in 4 bits; in 8 bits a row does
ROW = -1  # a group size: all inputs
_PLACES = ("quantization_config", "compression_config")
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class Quantization:
    """`num_bits` and `group_sizes` (inputs; ROW) are those that matrices may have. `floats`: weights of 8 bits are
    floating-point numbers, with scales of blocks of `block` (outputs, inputs), rows, or whole matrices."""

    method: str
    num_bits: tuple[int, ...]
    group_sizes: tuple[int, ...] = (ROW,)
    floats: bool = False
    block: tuple[int, int] | None = None
    zero_offset: int = 0  # added to stored zero points
    has_zeros: bool = False
    mean_bytes: float | None = None  # of a weight with its scales, where files of several kinds say it

    @property
    def stays(self) -> bool:
        """Weights are computed with as they are stored; 8-bit floats are not, they become the compute dtype."""
        return not self.floats

    @property
    def bytes_per_weight(self) -> float:
        """With scales of two bytes, and offsets of four."""
        if self.mean_bytes is not None:
            return self.mean_bytes
        group = min((size for size in self.group_sizes if size != ROW), default=0)
        return min(self.num_bits) / 8 + ((2 + 4 * self.has_zeros) / group if group else 0)


def at_load(name: str) -> Quantization:
    """What `--quantization int8|int4` makes of the decoder's matrices."""
    bits = AT_LOAD[name]
    return Quantization("quantised at start", (bits,), (AT_LOAD_GROUP if bits == 4 else ROW,))


def check_wish(wanted: str, stored: Quantization | None) -> None:
    """Raises ConfigError where --quantization does not fit what the checkpoint has."""
    has = "not quantised" if stored is None else f"quantised by {stored.method}"
    if wanted in METHODS and (stored is None or stored.method != wanted):
        hint = "; leave --quantization out" if stored else "; --quantization int8 or int4 quantises it while it is read"
        raise ConfigError(f"quantization {wanted}: the checkpoint is {has}{hint}", param="quantization")
    if wanted in AT_LOAD and stored is not None and stored.stays:
        raise ConfigError(
            f"quantization {wanted}: the checkpoint is {has} already; leave --quantization out", param="quantization"
        )


def read_quantization(config: Fields, text: Fields | None = None) -> Quantization | None:
    """None for a checkpoint that is not quantised. Raises CheckpointError, naming what is supported, for others."""
    for place in (config, text):
        for name in _PLACES:
            if place is not None and (section := place.section_if_present(name)) is not None and section.values:
                return _read(section)
    return None


def _read(section: Fields) -> Quantization | None:
    # compressed-tensors wrote no method where transformers did not add one
    method = section.text("quant_method", COMPRESSED if "config_groups" in section else None)
    readers = {COMPRESSED: _compressed, GPTQ: _gptq, AWQ: _awq, FP8: _fp8, GGUF: _gguf}
    if method not in readers:
        raise CheckpointError(
            f"weights quantised by {method[:40]!r} are not supported; supported are {', '.join(METHODS)}; or take the "
            "model's unquantised weights and --quantization int8 or int4"
        )
    return readers[method](section)


def _compressed(section: Fields) -> Quantization | None:
    # "fakequant" is what tools write before weights are compressed
    layout = section.text("format", "dense")
    layouts = {layout} - {"fakequant"}
    sparsity = section.section_if_present("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise CheckpointError(f"sparse weights ({sparsity.text('format')[:40]}) are not supported; only dense ones are")
    if section.get("transform_config"):
        raise CheckpointError("transforms of compressed-tensors (transform_config) are not supported; only weights are")
    groups = section.section("config_groups")
    bits, sizes, blocks, zeros, floats = set[int](), set[int](), set[tuple[int, int]](), False, set[bool]()
    for name in groups.values:
        group = groups.section(name)
        layouts |= {group.text("format", layout)} - {"fakequant"}
        weights = group.section_if_present("weights")
        if weights is None:
            continue
        bits.add(weights.integer("num_bits", 8))
        floats.add(weights.text("type", "int") == "float")
        zeros |= not weights.flag("symmetric", True)
        if "block_structure" in weights:
            blocks.add(_pair(weights, "block_structure"))
        sizes.add(_group_size(weights))
    if unknown := layouts - set(_FORMATS):
        raise CheckpointError(
            f"compressed-tensors format {min(unknown)[:40]!r} is not supported; supported are {', '.join(_FORMATS)}"
        )
    if not bits:
        return None
    if not bits <= {4, 8} or (True in floats and 4 in bits):
        raise CheckpointError(
            f"compressed-tensors weights of {', '.join(map(str, sorted(bits)))} bits are not supported; supported are "
            "integers of 4 and 8 bits and floating-point numbers of 8"
        )
    if len(blocks) > 1:
        raise CheckpointError("compressed-tensors weights with blocks of several sizes are not supported; one size is")
    return Quantization(
        COMPRESSED, tuple(sorted(bits)), tuple(sorted(sizes)), floats == {True}, next(iter(blocks), None), 0, zeros
    )


def _gptq(section: Fields) -> Quantization:
    layout = section.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"GPTQ checkpoint_format {layout[:40]!r} is not supported; supported are gptq and gptq_v2"
        )
    bits, sizes = {section.integer("bits")}, {_group_size(section)}
    for name, override in (section.get("dynamic") or {}).items() if isinstance(section.get("dynamic"), dict) else ():
        own = Fields(override if isinstance(override, dict) else {}, f"dynamic {name[:40]} of {section.where}")
        bits.add(own.integer("bits", min(bits)))
        sizes.add(_group_size(own, min(sizes)))
    if not bits <= {4, 8}:
        raise CheckpointError(f"GPTQ weights of {min(bits - {4, 8})} bits are not supported; supported are 4 and 8")
    return Quantization(
        GPTQ,
        tuple(sorted(bits)),
        tuple(sorted(sizes)),
        zero_offset=1 if layout == "gptq" else 0,
        has_zeros=not section.flag("sym", True),
    )


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
    block = _pair(section, "weight_block_size") if "weight_block_size" in section else None
    return Quantization(FP8, (8,), floats=True, block=block)


def _gguf(section: Fields) -> Quantization:
    """Written by `gguf_config.describe`; the files themselves say how each tensor is quantised."""
    bits = section.get("bits")
    if not isinstance(bits, list) or not bits or not set(bits) <= {4, 6, 8}:
        raise section.wrong("bits", "a list of 4, 6 and 8")
    return Quantization(GGUF, tuple(bits), mean_bytes=section.number("bytes_per_weight"))


def _group_size(section: Fields, default: int = ROW) -> int:
    size = section.get("group_size")
    size = default if size is None else size
    if type(size) is not int or (size != ROW and not 0 < size <= 1 << 20):
        raise section.wrong("group_size", "a whole number above 0, or -1 for whole rows")
    return size


def _pair(section: Fields, name: str) -> tuple[int, int]:
    value = section.get(name)
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or not 0 < n <= 1 << 20 for n in value):
        raise section.wrong(name, "a list of two whole numbers above 0")
    return value[0], value[1]
