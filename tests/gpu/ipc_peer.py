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
from hydra_engine.backend.cuda import shared_memory as cuda_memory
from hydra_engine.errors import TransferError


def refusal(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except TransferError as error:
        return error.message
    return ""


def pull(pool: cuda_memory.OpenedPool, handle: bytes, shape: list[int], pairs: Any) -> dict[str, Any]:
    again = cuda_memory.PEER_POOLS.open(handle, pool.num_bytes, 0)
    count = torch.Size(shape).numel() * 4
    theirs = PagedCache(pool.tensor()[:count].view(torch.float32).view(shape))
    ours = PagedCache(torch.zeros([9, *shape[1:]], device="cuda:0"))
    cuda_cache.CudaCacheOps(torch.device("cuda:0")).copy_blocks(theirs, ours, torch.tensor(pairs))
    torch.cuda.synchronize()
    return {"opened_once": again is pool and len(cuda_memory.PEER_POOLS) == 1, "blocks": ours.data.cpu().tolist()}


def main() -> None:
    stream = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    first = json.loads(stream.readline())
    handle, num_bytes = base64.b64decode(first["handle"]), first["nbytes"]
    pools = cuda_memory.PEER_POOLS
    answer: dict[str, Any] = {"larger_than_the_pool": refusal(pools.open, handle, 2 * num_bytes, 0)}
    pool = pools.open(handle, num_bytes, 0)
    answer |= pull(pool, handle, first["shape"], first["pairs"])
    answer["other_size"] = refusal(pools.open, handle, 2 * num_bytes, 0)
    pool.close()
    answer["closed"] = refusal(pools.open, handle, num_bytes, 0)
    answer["open"] = len(pools)
    stream.write(json.dumps(answer) + "\n")
    stream.flush()
    stream.readline()


if __name__ == "__main__":
    main()
