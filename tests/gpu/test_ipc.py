"""A pool of device memory between two real processes, and pinned host memory between devices."""

import base64
import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hydra_engine.backend.cuda import shared_memory as cuda_memory
from hydra_engine.backend.select import create_backend
from hydra_engine.errors import TransferError
from tests.worker import staging

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
SHAPE = [6, 2, 2, 4, 2, 16]
PAIRS = [[5, 0], [2, 8], [0, 3]]


def test_a_peer_maps_a_pool_once_and_pulls_blocks(cuda: torch.device) -> None:
    pool = cuda_memory.DevicePool(torch.Size(SHAPE).numel() * 4, 0)
    assert pool.num_bytes == 2 << 20 and not pool.tensor().any()
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.gpu.ipc_peer", str(theirs.fileno())]
    # The socket ends before the peer is waited for, so a failed assertion ends the peer too.
    peer = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
    theirs.close()
    with peer, ours, ours.makefile("rw") as stream:
        pool.tensor()[: values.nbytes].view(torch.float32).copy_(values.flatten())
        torch.cuda.synchronize()
        first = {
            "handle": base64.b64encode(pool.handle).decode(),
            "nbytes": pool.num_bytes,
            "shape": SHAPE,
            "pairs": PAIRS,
        }
        stream.write(json.dumps(first) + "\n")
        stream.flush()
        answer = json.loads(stream.readline())
        stream.write("end\n")
        stream.flush()
        assert peer.wait(60) == 0
    blocks = torch.tensor(answer["blocks"])
    for source, target in PAIRS:
        assert torch.equal(blocks[target], values[source])
    assert answer["opened_once"] and answer["open"] == 0
    assert "nbytes: the handle's allocation has" in answer["larger_than_the_pool"]
    assert "is open with" in answer["other_size"]
    assert "was closed" in answer["closed"]


def test_a_process_does_not_open_its_own_handles(cuda: torch.device) -> None:
    pool = cuda_memory.DevicePool(100, 0)
    with pytest.raises(TransferError, match="of this process"):
        cuda_memory.PEER_POOLS.open(pool.handle, pool.num_bytes, 0)


def test_an_error_of_cuda_says_what_and_where(cuda: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"CUDA error 2 .*out of memory.*cudaMalloc.*csrc/cuda/ipc\.cpp:\d+"):
        cuda_memory.DevicePool(1 << 50, 0)


@pytest.mark.parametrize(
    ("source", "target"), [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")]
)
def test_blocks_go_through_host_memory_that_is_pinned(
    cuda: torch.device, caplog: pytest.LogCaptureFixture, source: str, target: str
) -> None:
    if target == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    sides = [create_backend(device, torch.float32, threads=1) for device in (source, target)]
    options = {"through_host": True, "staging_bytes": 8 * staging.BLOCK_BYTES}
    with caplog.at_level(logging.WARNING), torch.inference_mode(), staging.sides(*sides, **options) as pair:
        staging.moves_blocks(*pair)
    assert "cannot be pinned" not in caplog.text
