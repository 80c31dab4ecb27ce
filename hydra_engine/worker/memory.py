"""How many blocks each cache gets, how many slots recurrent states, and the longest request: once, at start.

Works from the spec's byte formulas and the free memory it is told. Allocates nothing, asks no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydra_engine.config import CacheConfig, EngineConfig
from hydra_engine.core.roles import Role
from hydra_engine.errors import ResourceError
from hydra_engine.specs.base import ModelSpec

GIB = 1 << 30
MEMORY_SHARE = 0.4  # of what is free beside the weights, for each cache
TYPICAL_TOKENS = 2048  # of one request, for the default size of the KV cache
TYPICAL_IMAGES = 16
MIN_TEXT_TOKENS = 8  # a request with one largest picture has room for this much text at least


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


def plan_memory(
    spec: ModelSpec, role: Role, config: EngineConfig, dtype: torch.dtype, free_bytes: int, *, shares: int = 1
) -> CachePlan:
    """`free_bytes` is what is free before the weights are loaded; `shares` instances on the device divide it. Sizes
    that the configuration gives are those of each instance. Raises ResourceError, saying what to change, when the
    longest request cannot be served."""
    reasons: list[str] = []
    if shares > 1:
        reasons.append(f"{shares} instances share the device: {_gib(free_bytes // shares)} of its free memory each")
        free_bytes //= shares
    vision_bytes, language_bytes = _weights_bytes(spec, role, dtype.itemsize)
    weights_bytes = vision_bytes + language_bytes
    num_slots, state_bytes = _states(spec, role, config, dtype.itemsize, free_bytes - weights_bytes, reasons)
    share_bytes = int(MEMORY_SHARE * max(free_bytes - weights_bytes - state_bytes, 0))
    wanted_len = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    if config.max_model_len is not None and config.max_model_len > spec.max_model_len:
        reasons.append(f"max_model_len {config.max_model_len} exceeds the model's {spec.max_model_len}, which is taken")
    num_kv, kv_block_bytes, max_model_len = 0, 0, wanted_len
    if role.needs_language:
        kv_block_bytes = config.cache.block_size * spec.language.kv_bytes_per_token(dtype.itemsize)
        num_kv = _kv_blocks(config, wanted_len, kv_block_bytes, share_bytes, reasons)
        max_model_len = _longest_request(spec, role, config, wanted_len, num_kv, kv_block_bytes, reasons)
    num_image, image_block_bytes = 0, 0
    if spec.vision is not None and (Role.E in role or Role.P in role):
        vision = spec.vision
        image_block_bytes = config.cache.image_block_size * vision.num_planes * vision.feature_size * dtype.itemsize
        num_image = _image_blocks(config, role, vision.max_tokens_per_item, image_block_bytes, share_bytes, reasons)
    return CachePlan(
        num_kv,
        num_image,
        max_model_len,
        num_kv * kv_block_bytes,
        num_image * image_block_bytes,
        tuple(reasons),
        num_slots,
        state_bytes,
        vision_bytes,
        language_bytes,
    )


def _states(
    spec: ModelSpec, role: Role, config: EngineConfig, dtype_bytes: int, free_bytes: int, reasons: list[str]
) -> tuple[int, int]:
    """(slots, bytes): one slot for every request that may run, each with two places, see `cache_store.py`."""
    if not (role.needs_language and spec.language.has_states):
        return 0, 0
    num_slots = config.scheduler.max_num_seqs
    slot_bytes = 2 * spec.language.state_bytes(dtype_bytes)
    if num_slots * slot_bytes > free_bytes:
        raise ResourceError(
            f"instance role {role.letters} needs {_gib(num_slots * slot_bytes)} for the recurrent states of "
            f"{num_slots} requests, of which {_gib(max(free_bytes, 0))} are free beside the weights; lower "
            "max_num_seqs or free memory",
            param="max_num_seqs",
        )
    reasons.append(f"recurrent states: {_gib(num_slots * slot_bytes)} for {num_slots} requests; KV is not reused")
    return num_slots, num_slots * slot_bytes


def _weights_bytes(spec: ModelSpec, role: Role, dtype_bytes: int) -> tuple[int, int]:
    """(vision, language): of the parts that the role loads."""
    language = spec.language.num_parameters() if role.needs_language else 0
    vision = spec.vision.num_parameters() if spec.vision is not None and role.needs_vision else 0
    return vision * dtype_bytes, language * dtype_bytes


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


def _longest_request(
    spec: ModelSpec,
    role: Role,
    config: EngineConfig,
    wanted_len: int,
    num_blocks: int,
    block_bytes: int,
    reasons: list[str],
) -> int:
    """`wanted_len`, or less where nobody asked for it by name and the cache holds less."""
    size = config.cache.block_size
    holds = num_blocks * size
    needed = _gib(_ceil(wanted_len, size) * block_bytes)
    if holds < wanted_len and config.max_model_len is not None:
        raise ResourceError(
            f"instance role {role.letters} needs KV for {wanted_len} tokens, which one request may have, but its KV "
            f"cache holds {holds}; give kv_cache_gib at least {needed} or lower max_model_len to {max(holds, 2)}",
            param="kv_cache_gib",
        )
    max_model_len = min(wanted_len, holds)
    least = 2 if spec.vision is None else spec.vision.max_tokens_per_image + MIN_TEXT_TOKENS
    if least > wanted_len:  # what was asked for, or what the model is: such pictures are refused one by one
        reasons.append(f"pictures of more than {wanted_len - MIN_TEXT_TOKENS} tokens do not fit max_model_len")
        least = wanted_len
    if max_model_len < least:
        raise ResourceError(
            f"instance role {role.letters} needs KV for {least} tokens, but its KV cache holds {holds}; give "
            f"kv_cache_gib at least {_gib(_ceil(least, size) * block_bytes)} ({needed} for the model's full context), "
            "free memory, take a smaller dtype, or put fewer instances on the device",
            param="kv_cache_gib",
        )
    if max_model_len < wanted_len:
        reasons.append(
            f"max_model_len lowered from {wanted_len} to {max_model_len}, what the KV cache holds; "
            f"kv_cache_gib {needed} holds it all"
        )
    return max_model_len


def _image_blocks(
    config: EngineConfig, role: Role, max_tokens: int, block_bytes: int, share_bytes: int, reasons: list[str]
) -> int:
    per_image = _ceil(max_tokens, config.cache.image_block_size)
    num_blocks = _given(config.cache, "num_image_blocks", "image_cache_gib", block_bytes, reasons)
    if num_blocks is None:
        num_images = max(TYPICAL_IMAGES, config.media.max_images)
        num_blocks = min(num_images * per_image, share_bytes // block_bytes)
        waiting = "" if Role.P in role else ", until other instances have fetched them"
        reasons.append(f"image cache: room for {num_blocks // per_image} of the largest images{waiting}")
    if num_blocks < per_image:
        raise ResourceError(
            f"instance role {role.letters} needs {per_image} image-cache blocks for one image and has {num_blocks}; "
            f"give image_cache_gib at least {_gib(per_image * block_bytes)} or free memory",
            param="image_cache_gib",
        )
    fitting = num_blocks // per_image
    if fitting < config.media.max_images:
        reasons.append(f"a request with more than {fitting} of the largest images does not fit the image cache")
    return num_blocks


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
