"""How many blocks each cache gets, how many slots recurrent states, and the longest request: once, at start.

Works from the spec's byte formulas and the free memory it is told. Host memory is shared with everything else on the
machine: caches get what requests are likely to need, bounded by a part of what is free. A GPU's memory is filled: what
weights, the measured working memory of steps and a margin leave of the instance's share goes to the caches. Allocates
nothing, asks no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydra_engine.config import CacheConfig, EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.errors import ResourceError
from hydra_engine.specs.base import ModelSpec, VisionSpec

GIB = 1 << 30
MEMORY_SHARE = 0.4  # of what is free beside the weights, for each cache; of a GPU's, at most, for the image cache
MARGIN_BYTES = 1 << 29  # of a GPU: what its allocators lose between pieces, and what no measured step has taken
TYPICAL_TOKENS = 2048  # of one request, for the default size of the KV cache
TYPICAL_IMAGES = 16
MIN_TEXT_TOKENS = 8  # a request with one largest picture has room for this much text at least


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """What an instance's steps take beside weights and caches, in bytes. An encode and a language step run at the same
    time, each at its largest. `graph_bytes` is kept free for steps that are captured."""

    encode_bytes: int = 0
    language_bytes: int = 0
    graph_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        return self.encode_bytes + self.language_bytes

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.graph_bytes

    def times(self, places: int) -> WorkingMemory:
        return WorkingMemory(self.encode_bytes * places, self.language_bytes * places, self.graph_bytes * places)


NOT_COUNTED = WorkingMemory()


@dataclass(frozen=True, slots=True)
class Filling:
    """An instance's part of a device whose memory is filled (`device_share.py`). `weights_bytes` None: they are not
    loaded yet, the spec says how many."""

    own_bytes: int
    working: WorkingMemory = NOT_COUNTED
    weights_bytes: int | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`max_model_len` is the longest request that fits both the model and the KV cache; without a KV cache, the model.
    Bytes of weights are what the spec makes of the role's part, without padding."""

    num_kv_blocks: int
    num_image_blocks: int
    max_model_len: int
    kv_bytes: int
    image_bytes: int
    reasons: tuple[str, ...]
    num_state_slots: int = 0  # 0: the model keeps no recurrent states
    state_bytes: int = 0
    vision_weights_bytes: int = 0
    language_weights_bytes: int = 0
    working: WorkingMemory = NOT_COUNTED


def plan_memory(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    dtype: torch.dtype,
    free_bytes: int,
    *,
    shares: int = 1,
    filling: Filling | None = None,
) -> CachePlan:
    """`free_bytes` is what is free before the weights are loaded, which `shares` instances on the device divide;
    `filling` says instead what this one has. Sizes that the configuration gives are those of each instance. Raises
    ResourceError, saying what to change, when the longest request cannot be served."""
    reasons: list[str] = []
    vision_bytes, language_bytes = weights_of(spec, role, dtype.itemsize)
    weights_bytes = vision_bytes + language_bytes
    if filling is None:
        own_bytes = _divided(free_bytes, shares, reasons)
    else:
        reasons += filling.reasons
        weights_bytes = weights_bytes if filling.weights_bytes is None else filling.weights_bytes
        own_bytes = filling.own_bytes - filling.working.total_bytes - MARGIN_BYTES
    num_slots, state_bytes = _states(spec, role, config, dtype.itemsize, own_bytes - weights_bytes, reasons)
    left_bytes = own_bytes - weights_bytes - state_bytes
    if filling is not None and left_bytes <= 0:
        raise _no_room(spec, role, weights_bytes + state_bytes, filling.working, left_bytes)
    share_bytes = int(MEMORY_SHARE * max(left_bytes, 0))
    image_reasons: list[str] = []
    most_bytes = share_bytes if filling is None or role.needs_language else left_bytes
    num_image, image_block_bytes = _images(spec, role, config, dtype.itemsize, most_bytes, image_reasons)
    room_bytes = share_bytes if filling is None else left_bytes - num_image * image_block_bytes
    num_kv, kv_block_bytes, max_model_len = _kv(
        spec, role, config, dtype.itemsize, room_bytes, reasons, filled=filling is not None
    )
    _check_images(spec, role, config, num_image, image_block_bytes)
    kv_bytes, image_bytes = num_kv * kv_block_bytes, num_image * image_block_bytes
    if filling is not None and kv_bytes + image_bytes > left_bytes:
        raise _too_large(role, kv_bytes + image_bytes, left_bytes)
    return CachePlan(
        num_kv,
        num_image,
        max_model_len,
        kv_bytes,
        image_bytes,
        (*reasons, *image_reasons),
        num_slots,
        state_bytes,
        vision_bytes,
        language_bytes,
        NOT_COUNTED if filling is None else filling.working,
    )


# ---- what there is


def _divided(free_bytes: int, shares: int, reasons: list[str]) -> int:
    if shares > 1:
        reasons.append(f"{shares} instances share the device: {_gib(free_bytes // shares)} of its free memory each")
    return free_bytes // shares


def _no_room(spec: ModelSpec, role: Role, weights_bytes: int, working: WorkingMemory, left_bytes: int) -> ResourceError:
    needed = f"weights ({_gib(weights_bytes)})"
    if working != NOT_COUNTED:
        needed += (
            f", its largest steps ({_gib(working.activation_bytes)}), captured steps ({_gib(working.graph_bytes)})"
        )
    return ResourceError(
        f"instance role {role.letters} has no memory for caches: {needed} and a margin of {_gib(MARGIN_BYTES)} are "
        f"{_gib(-left_bytes)} more than its part of the device; {_more_room(spec, role)}",
        param="gpu_memory_utilization",
    )


def _too_large(role: Role, cache_bytes: int, left_bytes: int) -> ResourceError:
    return ResourceError(
        f"instance role {role.letters} is to have caches of {_gib(cache_bytes)}, and {_gib(left_bytes)} of its part of "
        "the device are left for them; lower --kv-cache-gib or --image-cache-gib, or raise --gpu-memory-utilization",
        param="kv_cache_gib",
    )


def _more_room(spec: ModelSpec, role: Role) -> str:
    """What gives caches more of a device. Lower budgets make the largest steps smaller."""
    lower = ["--token-budget", "--max-num-seqs"] if role.needs_language else []
    if spec.vision is not None and role.needs_vision:
        lower += ["--image-budget", "--max-pixels"]
    return (
        f"raise --gpu-memory-utilization, lower {' or '.join(lower)}, take a smaller --dtype, or put fewer instances "
        "on the device with --topology"
    )


# ---- what is wanted


def _states(
    spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int, free_bytes: int, reasons: list[str]
) -> tuple[int, int]:
    """(slots, bytes): one slot for every request that may run, each with two places, see `cache_store.py`."""
    if not (role.needs_language and spec.language.has_states):
        return 0, 0
    num_slots = config.scheduler.max_num_seqs
    slot_bytes = _state_slot_bytes(spec, dtype_bytes)
    if num_slots * slot_bytes > free_bytes:
        raise ResourceError(
            f"instance role {role.letters} needs {_gib(num_slots * slot_bytes)} for the recurrent states of "
            f"{num_slots} requests, of which {_gib(max(free_bytes, 0))} are free beside the weights; lower "
            "max_num_seqs or free memory",
            param="max_num_seqs",
        )
    reasons.append(f"recurrent states: {_gib(num_slots * slot_bytes)} for {num_slots} requests; KV is not reused")
    return num_slots, num_slots * slot_bytes


def weights_of(spec: ModelSpec, role: Role, dtype_bytes: int) -> tuple[int, int]:
    """(vision, language): of the parts that the role loads."""
    language = spec.language.num_parameters() if role.needs_language else 0
    vision = spec.vision.num_parameters() if spec.vision is not None and role.needs_vision else 0
    return vision * dtype_bytes, language * dtype_bytes


def _state_slot_bytes(spec: ModelSpec, dtype_bytes: int) -> int:
    return 2 * spec.language.state_bytes(dtype_bytes)


def _kv(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    dtype_bytes: int,
    room_bytes: int,
    reasons: list[str],
    *,
    filled: bool,
) -> tuple[int, int, int]:
    """(blocks, bytes of each, the longest request). `filled`: the cache takes all of `room_bytes`."""
    wanted_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        reasons.append(f"max_model_len {config.max_model_len} exceeds the model's {spec.max_model_len}, which is taken")
    if not role.needs_language:
        return 0, 0, wanted_len
    block_bytes = config.cache.block_size * spec.language.kv_bytes_per_token(dtype_bytes)
    if filled:
        num_blocks = _filling_kv_blocks(config, block_bytes, room_bytes, reasons)
    else:
        num_blocks = _kv_blocks(config, wanted_len, block_bytes, room_bytes, reasons)
    longest = _longest_request(spec, role, config, wanted_len, num_blocks, block_bytes, reasons, filled=filled)
    return num_blocks, block_bytes, longest


def _kv_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, share_bytes: int, reasons: list[str]) -> int:
    given = _given(config.cache, "num_kv_blocks", "kv_cache_gib", block_bytes, reasons)
    if given is not None:
        return given
    size = config.cache.block_size
    max_num_seqs = config.scheduler.max_num_seqs
    per_request = _ceil(min(max_model_len, TYPICAL_TOKENS), size)
    wanted = max(max_num_seqs * per_request, _ceil(max_model_len, size))
    affordable = share_bytes // block_bytes
    what = f"KV cache: room for {max_num_seqs} requests of {min(max_model_len, TYPICAL_TOKENS)} tokens"
    if wanted <= affordable:
        reasons.append(what)
        return wanted
    reasons.append(f"{what} does not fit; {_gib(share_bytes)} taken, {MEMORY_SHARE:.0%} of the free memory")
    return affordable


def _filling_kv_blocks(config: EngineConfig, block_bytes: int, left_bytes: int, reasons: list[str]) -> int:
    given = _given(config.cache, "num_kv_blocks", "kv_cache_gib", block_bytes, reasons)
    if given is not None:
        return given
    num_blocks = max(left_bytes, 0) // block_bytes
    reasons.append(f"KV cache: {_gib(num_blocks * block_bytes)}, all that is left of the instance's part of the device")
    return num_blocks


def _longest_request(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    wanted_len: int,
    num_blocks: int,
    block_bytes: int,
    reasons: list[str],
    *,
    filled: bool,
) -> int:
    """`wanted_len`, or less where nobody asked for it by name and the cache holds less. `filled`: it got all there was,
    unless it was given its size."""
    size = config.cache.block_size
    holds = num_blocks * size
    needed = _gib(_ceil(wanted_len, size) * block_bytes)
    filled = filled and config.cache.kv_cache_gib is None and config.cache.num_kv_blocks is None
    if holds < wanted_len and config.max_model_len is not None:
        more = _more_room(spec, role) if filled else f"give kv_cache_gib at least {needed}"
        raise ResourceError(
            f"instance role {role.letters} needs KV for {wanted_len} tokens, which one request may have, but its KV "
            f"cache holds {holds}; {more} or lower max_model_len to {max(holds, 2)}",
            param="kv_cache_gib",
        )
    max_model_len = min(wanted_len, holds)
    least = 2 if spec.vision is None else spec.vision.max_tokens_per_image + MIN_TEXT_TOKENS
    if least > wanted_len:  # what was asked for, or what the model is: such pictures are refused one by one
        reasons.append(f"pictures of more than {wanted_len - MIN_TEXT_TOKENS} tokens do not fit max_model_len")
        least = wanted_len
    if max_model_len < least:
        more = (
            f"give kv_cache_gib at least {_gib(_ceil(least, size) * block_bytes)} ({needed} for the model's full "
            "context), free memory, take a smaller dtype, or put fewer instances on the device"
        )
        raise ResourceError(
            f"instance role {role.letters} needs KV for {least} tokens, but its KV cache holds {holds}; "
            + (_more_room(spec, role) if filled else more),
            param="kv_cache_gib",
        )
    if max_model_len < wanted_len:
        whole = f"a KV cache of {needed} would hold" if filled else f"kv_cache_gib {needed} holds"
        reasons.append(
            f"max_model_len lowered from {wanted_len} to {max_model_len}, what the KV cache holds; {whole} it all"
        )
    return max_model_len


def _images(
    spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int, most_bytes: int, reasons: list[str]
) -> tuple[int, int]:
    """(blocks, bytes of each); none where no feature ever comes."""
    if not _keeps_images(spec, role) or spec.vision is None:
        return 0, 0
    per_image, block_bytes = _image_sizes(config, spec.vision, dtype_bytes)
    num_blocks = _given(config.cache, "num_image_blocks", "image_cache_gib", block_bytes, reasons)
    if num_blocks is None:
        num_blocks = min(_wanted_images(config) * per_image, most_bytes // block_bytes)
        waiting = "" if Role.P in role else ", until other instances have fetched them"
        reasons.append(f"image cache: room for {num_blocks // per_image} of the largest images{waiting}")
    fitting = num_blocks // per_image
    if fitting < config.media.max_images:
        reasons.append(f"a request with more than {fitting} of the largest images does not fit the image cache")
    return num_blocks, block_bytes


def _check_images(spec: ModelSpec, role: Role, config: EngineConfig, num_blocks: int, block_bytes: int) -> None:
    if not _keeps_images(spec, role) or spec.vision is None:
        return
    per_image = _ceil(spec.vision.max_tokens_per_item, config.cache.image_block_size)
    if num_blocks < per_image:
        raise ResourceError(
            f"instance role {role.letters} needs {per_image} image-cache blocks for one image and has {num_blocks}; "
            f"give image_cache_gib at least {_gib(per_image * block_bytes)} or free memory",
            param="image_cache_gib",
        )


def _keeps_images(spec: ModelSpec, role: Role) -> bool:
    return spec.vision is not None and (Role.E in role or Role.P in role)


def _image_sizes(config: EngineConfig, vision: VisionSpec, dtype_bytes: int) -> tuple[int, int]:
    """Blocks of one largest image, bytes of a block."""
    size = config.cache.image_block_size
    return _ceil(vision.max_tokens_per_item, size), size * vision.num_planes * vision.feature_size * dtype_bytes


def _wanted_images(config: EngineConfig) -> int:
    """Largest pictures that an image cache has room for unless told otherwise."""
    return max(TYPICAL_IMAGES, config.media.max_images)


# ---- of instances that are not here


def usual_cache_bytes(spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int) -> int:
    """States and caches of given or usual sizes, KV only where its size is given."""
    cache, total = config.cache, 0
    if role.needs_language:
        block_bytes = cache.block_size * spec.language.kv_bytes_per_token(dtype_bytes)
        total += config.scheduler.max_num_seqs * _state_slot_bytes(spec, dtype_bytes)
        total += block_bytes * (_given(cache, "num_kv_blocks", "kv_cache_gib", block_bytes, []) or 0)
    if _keeps_images(spec, role) and spec.vision is not None:
        per_image, block_bytes = _image_sizes(config, spec.vision, dtype_bytes)
        given = _given(cache, "num_image_blocks", "image_cache_gib", block_bytes, [])
        total += block_bytes * (_wanted_images(config) * per_image if given is None else given)
    return total


def _given(cache: CacheConfig, number_field: str, size_field: str, block_bytes: int, reasons: list[str]) -> int | None:
    """What the configuration says about one cache, in blocks."""
    number: int | None = getattr(cache, number_field)
    if number is not None:
        reasons.append(f"{number_field} {number} as configured")
        return number
    gib: float | None = getattr(cache, size_field)
    if gib is None:
        return None
    reasons.append(f"{size_field} {gib:g} as configured")
    return int(gib * GIB) // block_bytes


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2g} GiB" if num_bytes >= GIB // 100 else f"{num_bytes / GIB:.1e} GiB"
