"""Workers of one role over a miniature, whose caches others can map, and pull jobs between them, within one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.config import CacheConfig, EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.pools import PoolKind
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.transfer.plans import PullJob, PullResult
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache
from hydra_engine.worker.memory.plan import plan_memory
from tests.faults.points import FaultPoints
from tests.worker.fakes import BLOCK, IMAGE_BLOCK, Rig, poisoned

VALID = (7 << 8) | 1


def make_rig(
    model_dir: Path,
    letters: str,
    *,
    backend_name: str = "auto",
    dtype: torch.dtype = torch.float32,
    block: int = BLOCK,
    shared: bool = True,
    backend: Backend | None = None,
) -> Rig:
    """Caches full of NaN; those that the role sends lie in memory that peers can map."""
    role, spec = Role.parse(letters), load_spec(model_dir)
    backend = backend or create_backend("cpu", dtype, backend=backend_name, threads=1)
    on = backend.device.torch_device
    config = EngineConfig(cache=CacheConfig(num_kv_blocks=64, num_image_blocks=48))
    plan = plan_memory(spec, role, config, dtype.itemsize, 1 << 30, shares=3)
    share = backend.device.share if shared else None
    kv_share = share if Role.P in role else None
    kv = allocate_kv_cache(spec, plan, block, dtype, device=on, share=kv_share)
    image_share = share if role.needs_vision else None
    images = allocate_image_cache(spec, plan, IMAGE_BLOCK, dtype, device=on, share=image_share)
    poisoned(kv.data, *(() if images is None else (images.data,)))
    return Rig(
        load_model(model_dir, spec, backend, role),
        backend=backend,
        spec=spec,
        caches=(kv if role.needs_language else None, images),
        faults=FaultPoints(),
        role=role,
        shared=shared,
    )


def connect(target: Rig, name: str, source: Rig) -> None:
    exports, descriptors = source.exchange.exports()
    target.exchange.open_peer(name, exports, [os.dup(descriptor) for descriptor in descriptors])


def job(
    rig: Rig, pool: PoolKind, pairs: Sequence[tuple[int, int]], *, slot: int = 0, word: int = VALID, **rest: Any
) -> PullJob:
    blocks = np.asarray(pairs, dtype=np.int32).reshape(-1, 2)
    peer = rest.pop("peer", "source")
    return PullJob(rig.next_step(), peer, pool, blocks[:, 0].copy(), blocks[:, 1].copy(), slot, word, **rest)


def pull(rig: Rig, *args: Any, **rest: Any) -> PullResult:
    wanted = job(rig, *args, **rest)
    rig.exchange.submit_pull(wanted)
    result = rig.wait(wanted.step_id)
    assert isinstance(result, PullResult)
    return result


def num_descriptors() -> int:
    gc.collect()  # of rigs of earlier tests
    gc.freeze()  # the next full collection has only what is new
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    """Number of mappings of peers, which are read-only; those of owners are writable."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:hydra-engine" in line and line.split()[1] == "r--s" for line in lines)
