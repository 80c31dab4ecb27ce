"""The other process of test_ipc.py: takes a pool's handle from an inherited socket, pulls blocks out of it, says what
happened. `python -m tests.gpu.ipc_peer FD`; one JSON document per line."""

import base64
import json
import socket
import sys
from typing import Any

import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import cache as cuda_cache
from hydra_engine.backend.cuda import ipc as cuda_ipc


def refusal(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def pull(handle: cuda_ipc.PoolHandle, shape: list[int], pairs: Any) -> dict[str, Any]:
    pool = cuda_ipc.PEER_POOLS.open(handle, 0)
    again = cuda_ipc.PEER_POOLS.open(handle, 0)
    count = torch.Size(shape).numel() * 4
    theirs = PagedCache(pool.tensor()[:count].view(torch.float32).view(shape))
    ours = PagedCache(torch.zeros([9, *shape[1:]], device="cuda:0"))
    cuda_cache.CudaCacheOps(torch.device("cuda:0")).copy_blocks(theirs, ours, torch.tensor(pairs))
    torch.cuda.synchronize()
    return {"opened_once": again is pool and len(cuda_ipc.PEER_POOLS) == 1, "blocks": ours.data.cpu().tolist()}


def main() -> None:
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    first = json.loads(stream.readline())
    data = base64.b64decode(first["handle"])
    handle = cuda_ipc.PoolHandle(data, first["nbytes"], first["owner"], first["generation"])
    pools = cuda_ipc.PEER_POOLS
    larger = cuda_ipc.PoolHandle(data, first["nbytes"] * 2, first["owner"], first["generation"])
    answer: dict[str, Any] = {"larger_than_the_pool": refusal(pools.open, larger, 0)}
    answer |= pull(handle, first["shape"], first["pairs"])
    answer["other_size"] = refusal(pools.open, larger, 0)
    pools.close(handle.owner, handle.generation)
    answer["closed"] = refusal(pools.open, handle, 0)
    answer["open"] = len(pools)
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
    stream.readline()


if __name__ == "__main__":
    main()
