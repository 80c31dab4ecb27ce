"""Error messages for what does not fit on a device: what, by how much, and which flags change it, as they are typed.

Weights come first, then what steps take, then caches with the least that they need. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.roles import Role
from hydra_engine.core.units import GIB, size
from hydra_engine.errors import ResourceError
from hydra_engine.models.specs.base import ModelSpec

_NAMES = {"kv": "KV cache", "image": "image cache"}


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks that a cache gets and the least that it works with; `min_is` says what that is for. `given`: the flag
    that says its size, if one does."""

    kind: str  # kv or image
    num_blocks: int = 0
    block_bytes: int = 0
    min_blocks: int = 0
    min_is: str = ""
    given: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def min_bytes(self) -> int:
        return self.min_blocks * self.block_bytes

    @property
    def too_small(self) -> bool:
        return self.num_blocks < self.min_blocks

    @property
    def min_flag(self) -> str:
        """The flag with the least value, as it is typed."""
        if self.given == f"--num-{self.kind}-blocks":
            return f"{self.given} {self.min_blocks}"
        return f"--{self.kind}-cache-gib {typed_gib(self.min_bytes)}"


@dataclass(frozen=True, slots=True)
class DevicePart:
    """An instance's part of a device. `filled`: a part of a GPU, which caches fill. `shares`: instances on it."""

    spec: ModelSpec
    role: Role
    dtype_bytes: int
    shares: int
    filled: bool

    def more_room(self) -> str:
        """Advice on how to give caches more memory. Lower budgets make the largest steps smaller."""
        has_tower = self.spec.vision is not None and self.role.needs_vision
        ways = ["raise --gpu-memory-utilization"] if self.filled else ["free memory"]
        if self.filled:
            lower = ["--token-budget", "--max-num-seqs"] if self.role.needs_language else []
            lower += ["--image-budget", "--max-pixels"] if has_tower else []
            ways.append(f"lower {' or '.join(lower)}")
        if self.dtype_bytes > 2:
            ways.append("take a smaller --dtype")
        ways.append("put fewer instances on the device with --topology" if self.shares > 1 else "take a smaller model")
        return f"{', '.join(ways[:-1])} or {ways[-1]}"


def typed_gib(num_bytes: int) -> str:
    """`num_bytes` in GiB, rounded up to three digits."""
    digits = max(2 - math.floor(math.log10(max(num_bytes, 1) / GIB)), 0)
    return f"{math.ceil(num_bytes / GIB * 10**digits) / 10**digits:.{digits}f}"


def no_room(part: DevicePart, terms: Sequence[tuple[str, int]], own_bytes: int) -> ResourceError:
    """The error that `terms` (name, bytes) together exceed `own_bytes` or leave nothing for caches."""
    needed = " + ".join(f"{name} {size(num_bytes)}" for name, num_bytes in terms if num_bytes)
    shared = ""
    if part.shares > 1 and not part.filled:
        shared = f", its part of the {size(own_bytes * part.shares)} that {part.shares} instances share"
    return ResourceError(
        f"{needed} > {size(max(own_bytes, 0))} for instance role {part.role.letters}{shared}; {part.more_room()}",
        param="gpu_memory_utilization" if part.filled else "model",
    )


def no_states(role: Role, num_slots: int, num_bytes: int, left_bytes: int) -> ResourceError:
    return ResourceError(
        f"recurrent states {size(num_bytes)} of {num_slots} requests > {size(left_bytes)} that the weights leave to "
        f"instance role {role.letters}; lower --max-num-seqs or free memory",
        param="max_num_seqs",
    )


def caches_too_small(
    part: DevicePart, caches: Sequence[CacheSize], left_bytes: int, *, lower_to: int | None
) -> ResourceError:
    """The error that caches are below their minimum. `lower_to`: a --max-model-len for which the KV cache suffices."""
    short = [cache for cache in caches if cache.too_small]
    sizes = " and ".join(f"{_NAMES[c.kind]} {size(c.num_bytes)} < {size(c.min_bytes)} ({c.min_is})" for c in short)
    ways = [cache.min_flag for cache in short if cache.given]
    min_bytes = sum(max(c.min_bytes, c.num_bytes if c.given else 0) for c in caches)
    if not all(cache.given for cache in short):
        if not part.filled and min_bytes <= left_bytes:
            ways = [cache.min_flag for cache in short]
        else:
            ways = []
    change = f"give at least {' '.join(ways)}" if ways else part.more_room()
    if lower_to is not None:
        change += f", or lower --max-model-len to {lower_to}"
    left = f", {size(max(left_bytes, 0))} are left beside the weights" if not ways and not part.filled else ""
    return ResourceError(
        f"{sizes} for instance role {part.role.letters}{left}; {change}",
        param=f"{short[0].kind}_cache_gib",
    )


def caches_too_large(part: DevicePart, caches: Sequence[CacheSize], left_bytes: int) -> ResourceError:
    cache_bytes = sum(cache.num_bytes for cache in caches)
    flags = " or ".join(cache.given for cache in caches if cache.given)
    return ResourceError(
        f"caches {size(cache_bytes)} > {size(max(left_bytes, 0))} that are left of the device for instance role "
        f"{part.role.letters}; lower {flags}" + (", or raise --gpu-memory-utilization" if part.filled else ""),
        param="kv_cache_gib",
    )
