"""The decode child: `python -m hydra_engine.intake.child FD` turns files into small pictures until its socket closes.

A decoder that crashes, loops or eats memory takes this process with it and nothing else. A job comes through the
socket: a fixed head, now and then with a descriptor of memory to answer into, then the job itself. Pixels go into that
memory; the answer is one byte. Does not know where files come from.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.intake.containers import Container
from hydra_engine.intake.pixels import decode, num_bytes, render_into
from hydra_engine.intake.spawn import fill
from hydra_engine.specs.base import View

DONE, BROKEN = b"\0", b"\1"
HEAD = struct.Struct("<Q")  # bytes of the job. With it comes the descriptor of new memory, when the old is too small

MEMORY_BYTES = 1 << 30  # of address space; a WebP of 40 million pixels with transparency needs nine tenths of it
CPU_SECONDS = 5  # of one picture; the largest take one
MOST_CPU_SECONDS = 60  # of many pictures

Memory = npt.NDArray[np.uint8]
T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    """A picture's views."""

    container: Container
    views: tuple[View, ...]
    resample: str


class FramesJob(msgspec.Struct, frozen=True, array_like=True, tag="frames"):
    """Views of several pictures, `View.source` says which."""

    containers: tuple[Container, ...]
    views: tuple[View, ...]
    resample: str


def main() -> None:
    Image.init()
    serve(msgspec.msgpack.Decoder(Job | FramesJob), answer, cpu_seconds, MEMORY_BYTES)


def answer(job: Job | FramesJob, memory: Memory) -> bytes:
    try:
        render_into(map(decode, containers(job)), job.views, job.resample, memory[: num_bytes(job.views)])
    except (InvalidImage, MemoryError):
        return BROKEN
    return DONE


def cpu_seconds(job: Job | FramesJob) -> float:
    return min(CPU_SECONDS * len(containers(job)), MOST_CPU_SECONDS)


def containers(job: Job | FramesJob) -> tuple[Container, ...]:
    return (job.container,) if isinstance(job, Job) else job.containers


def serve(
    decoder: msgspec.msgpack.Decoder[T],
    answer: Callable[[T, Memory], bytes],
    cpu_seconds: Callable[[T], float],
    memory_bytes: int,
) -> None:
    """Answers jobs until the parent has gone. `answer` writes pixels into the memory and returns the rest."""
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.sendall(DONE)  # started
        memory = np.empty(0, np.uint8)
        while (received := _receive(connection)) is not None:
            data, descriptors = received
            if descriptors:
                memory = _map(descriptors[0])
            job = decoder.decode(data)
            ceiling = math.ceil(time.process_time() + cpu_seconds(job))
            resource.setrlimit(resource.RLIMIT_CPU, (ceiling, resource.RLIM_INFINITY))
            connection.sendall(answer(job, memory))


def _receive(connection: socket.socket) -> tuple[bytearray, list[int]] | None:
    """A job's bytes and the descriptors that came with them; None when the other side has gone."""
    first, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 1)
    head = bytearray(HEAD.size)
    head[: len(first)] = first
    if not first or not fill(connection, memoryview(head)[len(first) :]):
        return None
    job = bytearray(*HEAD.unpack(head))
    return (job, descriptors) if fill(connection, memoryview(job)) else None


def _map(descriptor: int) -> Memory:
    mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


if __name__ == "__main__":
    main()
