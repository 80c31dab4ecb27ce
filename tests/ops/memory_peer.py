"""The other process of test_shared_memory.py: owns a pool and control words, sends their descriptors over an inherited
socket and follows commands, one JSON document per line. `python -m tests.ops.memory_peer FD NUM_BYTES`."""

import itertools
import json
import os
import socket
import sys
import time

import torch

from hydra_engine.backend.cpu.shared_memory import ControlWords, SharedPool

NUM_WORDS = 8
PRIME = 251


def pattern(num_bytes: int) -> torch.Tensor:
    return (torch.arange(num_bytes) % PRIME).to(torch.uint8)


def rewrite_for_ever(pool: SharedPool, words: ControlWords) -> None:
    """Odd words: the pool is being written. Word 2 * i: all of its bytes are i % PRIME."""
    data = pool.tensor().numpy()
    for turn in itertools.count(1):
        words.store(0, 2 * turn - 1)
        data[:] = turn % PRIME
        words.store(0, 2 * turn)
        time.sleep(turn % 4 * 1e-4)  # sometimes long enough for a copy, sometimes not


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    num_bytes = int(sys.argv[2])
    pool, words = SharedPool(num_bytes), ControlWords(NUM_WORDS)
    pool.tensor().copy_(pattern(num_bytes))
    words.store(3, (1 << 64) - 1)
    socket.send_fds(channel, [b"!"], [pool.descriptor, words.descriptor])
    stream = channel.makefile("rw")
    for line in stream:
        command = json.loads(line)
        answer: object = None
        if command[0] == "write":
            pool.tensor()[command[1]] = command[2]
        elif command[0] == "store":
            words.store(command[1], command[2])
        elif command[0] == "rewrite":
            stream.write("null\n")
            stream.flush()
            rewrite_for_ever(pool, words)
        elif command[0] == "descriptors":
            answer = len(os.listdir("/proc/self/fd"))
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


if __name__ == "__main__":
    main()
