"""Step times of a model on a device that is not here: a cost surface from its datasheet and the model's spec.

A step takes as long as its arithmetic or its memory traffic, whichever is longer, and its launches. The shares of a
datasheet's peaks that kernels reach are constants below, fitted to the decodes, prompts and encodes that one H200 has
measured (bench/results/h200; tests/planner/test_hardware.py holds them against each other). Taken for every device they
are a guess: one that is not at its power cap reaches more of its FLOP/s. A profile measured on a device is better
wherever there is one.

Weights that are quantized are read in their bytes and multiplied at the rate of the dtype. Does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import DTYPE_BYTES, ModelSpec, VisionSpec
from hydra_planner.hardware.corun import shares
from hydra_planner.hardware.devices import LINK_SHARE, Device
from hydra_planner.simulator.costs import Corun, Costs, DeviceKind

DTYPES = ("bfloat16", "float16")

# Of the memory bandwidth. Reads reach 0.92 to 0.95 of an H200's, products 0.72 to 0.9 of that and attention of many
# requests 0.96 ("layer", "attn_decode" of bench/NOTES.md). A copy reaches 0.87.
WEIGHTS_SHARE = 0.78
KEYS_SHARE = 0.86
COPY_SHARE = 0.87
# Of the FLOP/s. Square products reach 0.80 of an H200's in bursts and 0.68 at its power cap, prompts 0.76 of the burst
# with all that is not products ("prefill"); attention of prompts 320, of pictures 385 TFLOP/s ("attn_prefill").
PRODUCTS_SHARE = 0.66
ATTENTION_SHARE = 0.36
# Rows that tiles of 128 and the last wave compute for nothing: 5.2 ms where 256 rows of LLaVA-1.5-7B alone are 4.7.
IDLE_ROWS = 32
# What a layer takes more than its kernels' floors, of up to 16 rows and, as ten gaps of 1 to 2 us, from there on
# ("layer", "profile"; how much of it lies between kernels is not known); and a short wave of attention.
LAUNCHES_S = 15e-6
SHORT_WAVE_S = 2.5e-6
# Of a tower of 24 to 32 layers: what lies around its graph, and launches in it; specs do not say how many there are.
TOWER_LAUNCHES_S = 1e-3
LOGIT_BYTES = 12  # of one: written and read in 16 bits by the head, in float32 by the sampler
# A plan on its way to the device and a result on its way back, which the engine hides behind the step before.
SUBMIT_S, COLLECT_S = 2e-5, 3e-5

_ROWS = tuple(1 << exponent for exponent in range(14))
_PATCHES = tuple(1 << exponent for exponent in range(4, 18))
# The steps whose shares of the device stand for their kinds.
_DECODES = LanguageLoad(num_decodes=32, decode_context=32 * 1024)
_PREFILL = LanguageLoad(prefill_tokens=1024, prefill_pairs=1024 * 1025 / 2, num_chunks=1)
_ENCODE_PATCHES = 4096


@dataclass(frozen=True, slots=True)
class Use:
    """Shares of its time for which a step, alone, keeps the arithmetic units and the memory bandwidth busy."""

    compute: float
    memory: float


def corun_bound(one: Use, other: Use) -> float:
    """Least slowdown of two concurrent steps, between 1 and 2: if both shared the device perfectly, it would be busy
    for the sum of what each needs of its scarcer resource."""
    return max(1.0, one.compute + other.compute, one.memory + other.memory)


def corun_factor(one: Use, other: Use, share: float) -> float:
    """Slowdown of two concurrent steps: the time of each beside the other over its time alone. Taking turns it is 2;
    `share` says how much is saved of what `corun_bound` allows (`corun.py`)."""
    return 2.0 - share * (2.0 - corun_bound(one, other))


def roofline_costs(spec: ModelSpec, device: Device, dtype: str) -> Costs:
    """Raises ConfigError for a dtype whose rates no datasheet figure here gives."""
    if dtype not in DTYPES:
        raise ConfigError(
            f"the roofline of {device.name} knows {' and '.join(DTYPES)}, not {dtype[:20]}; choose one of them or give "
            "a profile that was measured",
            param="dtype",
        )
    roofline = Roofline(spec, device, DTYPE_BYTES[dtype])
    surface = roofline.surface()
    return Costs(
        surface,
        submit_s=SUBMIT_S,
        collect_s=COLLECT_S,
        cores=1,
        threads=0,
        dtype=dtype,
        alike=2.0,
        corun=roofline.corun(surface),
        source=f"roofline of {device.name}, {dtype}",
    )


def device_kind(spec: ModelSpec, device: Device, dtype: str) -> DeviceKind:
    """The device as a simulation takes it, with what is reached of its links. Raises ConfigError as above."""
    return DeviceKind(
        device.name,
        roofline_costs(spec, device, dtype),
        memory_bytes=device.memory_bytes,
        link_bytes_per_s=LINK_SHARE * device.link_bytes_per_s,
        copy_bytes_per_s=COPY_SHARE * device.copy_bytes_per_s,
        price=device.price,
        hour_price=device.hour_price,
    )


def weight_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    """Bytes of the weights that a language step reads: layers and head, not the table of embeddings."""
    language = spec.language
    held = spec.held_on("cuda:0").language_bytes(dtype_bytes, dtype_bytes)
    shared = language.tie_embeddings and spec.at_load is None  # the table is the head too
    return held - (0 if shared else language.vocab_size * language.hidden_size * dtype_bytes)


def patch_pair_flops(vision: VisionSpec) -> float:
    """FLOPs of a pair of patches in layers over whole pictures: the quadratic part of `flops`, 0 for
    towers with pictures or windows of one size, whose work is linear in patches."""
    count = vision.max_patches_per_image
    return max(vision.flops(2 * count) - 2 * vision.flops(count), 0) / (2 * count * count)


class Roofline:
    """The roofline of a model on a device."""

    def __init__(self, spec: ModelSpec, device: Device, dtype_bytes: int) -> None:
        self._spec = spec
        self._dtype_bytes = dtype_bytes
        self._products_per_s = PRODUCTS_SHARE * device.flops_per_s
        self._attention_per_s = ATTENTION_SHARE * device.flops_per_s
        self._weights_per_s = WEIGHTS_SHARE * device.memory_bytes_per_s
        self._keys_per_s = KEYS_SHARE * device.memory_bytes_per_s
        self._copied_per_s = COPY_SHARE * device.memory_bytes_per_s  # read and written bytes together
        self._weights_bytes = weight_bytes(spec, dtype_bytes)
        kept = spec.held_on("cuda:0").at_load or spec.held_on("cuda:0").quantization
        self._expert_bytes = dtype_bytes if kept is None else kept.held_bytes(dtype_bytes)  # of a weight
        self._row_s = spec.language.flops_per_token(0) / self._products_per_s

    def surface(self) -> CostSurface:
        language, vision = self._spec.language, self._spec.vision
        logits = language.vocab_size * (2 * language.hidden_size / self._products_per_s)
        sample_s = logits + language.vocab_size * LOGIT_BYTES / self._copied_per_s
        state_s = 2 * language.state_bytes(self._dtype_bytes) / self._copied_per_s
        pair_flops = language.flops_per_token(1) - language.flops_per_token(0)
        surface = CostSurface(
            rows=self._rows(),
            per_key_s=language.kv_bytes_per_token(self._dtype_bytes) / self._keys_per_s,
            per_pair_s=pair_flops / self._attention_per_s,
            per_chunk_s=sample_s + state_s,
            patches=Curve((0.0,), (0.0,)) if vision is None else self._patches(vision),
            per_patch_pair_s=0.0 if vision is None else patch_pair_flops(vision) / self._attention_per_s,
            per_decode_s=sample_s + state_s,
        )
        return surface if vision is None else self._beside(surface, vision)

    def _rows(self) -> Curve:
        """Weights are read once, however many rows there are, but for experts that no row chose; from the ridge on
        arithmetic takes longer."""
        ridge = round(self._weights_s(_ROWS[-1]) / self._row_s) - IDLE_ROWS
        knots = sorted({*_ROWS, max(ridge, 1)})
        return Curve(tuple(map(float, knots)), tuple(map(self._rows_s, knots)))

    def _weights_s(self, rows: int) -> float:
        unread = self._spec.language.num_unread_parameters(rows) * self._expert_bytes
        return (self._weights_bytes - unread) / self._weights_per_s

    def _rows_s(self, rows: int) -> float:
        launches_s = self._spec.language.num_layers * (SHORT_WAVE_S + LAUNCHES_S)
        return max(self._weights_s(rows), (rows + IDLE_ROWS) * self._row_s) + launches_s

    def _patches(self, vision: VisionSpec) -> Curve:
        return Curve(tuple(map(float, _PATCHES)), tuple(self._patches_s(vision, count) for count in _PATCHES))

    def _patches_s(self, vision: VisionSpec, count: int) -> float:
        """Seconds of an encode of `count` patches without its pairs, which `per_patch_pair_s` has."""
        return max(self._tower_s(vision), self._linear_s(vision, count)) + TOWER_LAUNCHES_S

    def _tower_s(self, vision: VisionSpec) -> float:
        return vision.num_parameters() * self._dtype_bytes / self._weights_per_s

    def _linear_s(self, vision: VisionSpec, count: int) -> float:
        linear = vision.flops(count) - patch_pair_flops(vision) * count * count
        return linear * (count + IDLE_ROWS) / count / self._products_per_s

    # ---- two steps at once

    def corun(self, surface: CostSurface) -> Corun:
        found, vision = shares(), self._spec.vision
        decode, prefill = self.language_use(surface, _DECODES), self.language_use(surface, _PREFILL)
        encode = Use(1.0, 1.0) if vision is None else self.vision_use(surface, vision, _ENCODE_PATCHES)
        return Corun(
            found.ratios,
            (corun_factor(encode, decode, found.short_encodes), corun_factor(encode, decode, found.long_encodes)),
            corun_factor(encode, prefill, found.long_encodes),
            corun_factor(prefill, decode, found.prompts),
        )

    def _beside(self, surface: CostSurface, vision: VisionSpec) -> CostSurface:
        """Returns the surface with the factors of typical steps, which budgets reckon with. A vision step is slowed by
        whatever step runs: the mean of decodes and chunks."""
        encode_s = surface.vision_s(_encode(vision, _ENCODE_PATCHES))
        factors = self.corun(surface)
        decode, prefill = (factors.encode(encode_s, surface.language_s(_DECODES), prompts) for prompts in (0.0, 1.0))
        return replace(
            surface, decode_slowdown=decode, prefill_slowdown=prefill, vision_slowdown=mean((decode, prefill))
        )

    def language_use(self, surface: CostSurface, load: LanguageLoad) -> Use:
        compute_s = load.num_rows * self._row_s + surface.per_pair_s * load.prefill_pairs
        memory_s = self._weights_s(load.num_rows) + surface.per_key_s * load.decode_context
        return _use(compute_s, memory_s, surface.language_s(load))

    def vision_use(self, surface: CostSurface, vision: VisionSpec, num_patches: int) -> Use:
        load = _encode(vision, num_patches)
        compute_s = self._linear_s(vision, num_patches) + surface.per_patch_pair_s * load.pairs
        return _use(compute_s, self._tower_s(vision), surface.vision_s(load))


def _encode(vision: VisionSpec, num_patches: int) -> VisionLoad:
    """An encode of so many patches, of one picture or of several."""
    return VisionLoad(num_patches, float(num_patches * min(num_patches, vision.max_patches_per_image)))


def _use(compute_s: float, memory_s: float, whole_s: float) -> Use:
    return Use(min(compute_s / whole_s, 1.0), min(memory_s / whole_s, 1.0))
