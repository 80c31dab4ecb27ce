"""The other process of test_ipc.py: takes a pool's handle from an inherited socket, pulls blocks out of it, says what
happened. `python -m tests.gpu.ipc_peer FD`; one JSON document per line."""

import base64
import json
import socket
import sys
from typing import Any

import torch

from hydra_engine.backend import cuda_cache, cuda_ipc
from hydra_engine.backend.base import PagedCache


def refusal(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def pull(handle: cuda_ipc.PoolHandle, event: cuda_ipc.EventHandle, shape: list[int], pairs: Any) -> dict[str, Any]:
    pool = cuda_ipc.PEER_POOLS.open(handle, 0)
    again = cuda_ipc.PEER_POOLS.open(handle, 0)
    count = torch.Size(shape).numel() * 4
    theirs = PagedCache(pool.tensor()[:count].view(torch.float32).view(shape))
    ours = PagedCache(torch.zeros([9, *shape[1:]], device="cuda:0"))
    written = cuda_ipc.SharedEvent(0, event)
    written.wait()
    descs = cuda_cache.make_desc(theirs, 0), cuda_cache.make_desc(ours)
    cuda_cache.copy_blocks(*descs, theirs, ours, torch.tensor(pairs))
    torch.cuda.synchronize()
    written.close()
    return {"opened_once": again is pool and len(cuda_ipc.PEER_POOLS) == 1, "blocks": ours.data.cpu().tolist()}


def main() -> None:
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    first = json.loads(stream.readline())
    data = base64.b64decode(first["handle"])
    handle = cuda_ipc.PoolHandle(data, first["nbytes"], first["owner"], first["generation"])
    event = cuda_ipc.EventHandle(base64.b64decode(first["event"]), first["owner"])
    pools = cuda_ipc.PEER_POOLS
    larger = cuda_ipc.PoolHandle(data, first["nbytes"] * 2, first["owner"], first["generation"])
    answer: dict[str, Any] = {"larger_than_the_pool": refusal(pools.open, larger, 0)}
    answer |= pull(handle, event, first["shape"], first["pairs"])
    answer["other_size"] = refusal(pools.open, larger, 0)
    pools.close(handle.owner, handle.generation)
    answer["closed"] = refusal(pools.open, handle, 0)
    pools.retire(handle.owner, handle.generation + 1)
    newer = cuda_ipc.PoolHandle(data, handle.nbytes, handle.owner, handle.generation + 1)
    answer["stale"] = refusal(pools.open, newer, 0)
    answer["open"] = len(pools)
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
    stream.readline()


if __name__ == "__main__":
    main()
