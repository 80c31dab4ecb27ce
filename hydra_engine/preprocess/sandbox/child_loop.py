"""The loop of every sandboxed child process, `launch.command(CHILD) FD [SETUP]`: it answers one job after another until
its socket closes.

Before the first job the process gives up what no job needs (`containment.py`). A frame in either direction is a length
and a msgpack message. A job may come with a descriptor of shared memory, to which the child writes pixels. A job can
harm its own process only. Both sides import this file, so it imports nothing heavy. Does not know what the jobs are.
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
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from hydra_engine.core.processes.launch import bind_to_parent
from hydra_engine.errors import ErrorInfo, HydraError
from hydra_engine.preprocess.sandbox.containment import forbid_calls, give_up_privileges

Memory = npt.NDArray[np.uint8]
J = TypeVar("J")

_LENGTH = struct.Struct("<Q")
_NO_LIMIT = 0.0
_ONE_PIECE_BYTES = 1 << 16  # up to this, length and message are sent at once and wake the receiver once


class Started(msgspec.Struct):
    """The first message of a child: ready for jobs, or the `error` of its setup, which no child with this setup can
    avoid. `uncontained`: why system calls are not forbidden to it."""

    error: ErrorInfo | None = None
    uncontained: str | None = None


def serve(
    jobs: msgspec.msgpack.Decoder[J],
    start: Callable[[], Callable[[J, Memory], object]],
    cpu_seconds: Callable[[J], float] | None = None,
    *,
    network: bool = False,
) -> None:
    """Answers jobs until the parent has gone. `start` loads what jobs need, may raise a HydraError, and returns the
    function that answers a job and may write pixels to the memory. `cpu_seconds` is the limit of a job. Jobs start no
    processes and change no files; with `network` they may make connections."""
    bind_to_parent()
    give_up_privileges()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    limit(resource.RLIMIT_CORE, 0)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            answer = start()
        except HydraError as error:
            send(connection, Started(error.info()))
            return
        send(connection, Started(uncontained=forbid_calls(network=network)))
        memory = np.empty(0, np.uint8)
        while (received := _receive_job(connection)) is not None:
            data, descriptors = received
            if descriptors:
                memory = _map(descriptors[0])
            job = jobs.decode(data)
            if cpu_seconds is not None:
                _limit_cpu(cpu_seconds(job))
            message = answer(job, memory)
            signal.setitimer(signal.ITIMER_PROF, _NO_LIMIT)
            send(connection, message)


def limit(what: int, value: int) -> None:
    """Sets a resource limit, resource.RLIMIT_..., for good."""
    resource.setrlimit(what, (value, value))


def limit_memory_beyond(num_bytes: int) -> None:
    """Limits memory, for good, to `num_bytes` of address space more than the process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        num_pages = int(file.read().split()[0])
    limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + num_bytes)


def send(
    connection: socket.socket, message: object, descriptors: Sequence[int] = (), look: Callable[[], None] | None = None
) -> None:
    """Sends a message. `look`: as for `receive`."""
    data = msgspec.msgpack.encode(message)
    head = _LENGTH.pack(len(data))
    if len(data) <= _ONE_PIECE_BYTES:
        head, data = head + data, b""
    num_sent = socket.send_fds(connection, [head], descriptors) if descriptors else 0
    for rest in (memoryview(head)[num_sent:], memoryview(data)):
        while rest:
            try:
                rest = rest[connection.send(rest) :]
            except TimeoutError:
                if look is None:
                    raise
            if rest and look is not None:
                look()


def receive(connection: socket.socket, max_bytes: int, look: Callable[[], None]) -> bytearray:
    """Returns the bytes of a message. Raises EOFError if the other side has gone, DecodeError for a length above
    `max_bytes`. `look` is called after every part and every timeout of the connection, and may raise."""
    length = bytearray(_LENGTH.size)
    _fill(connection, memoryview(length), look)
    (size,) = _LENGTH.unpack(length)
    if size > max_bytes:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    data = bytearray(size)
    _fill(connection, memoryview(data), look)
    return data


def _receive_job(connection: socket.socket) -> tuple[bytearray, list[int]] | None:
    """Returns a job's bytes and the descriptors that came with it; None if the parent has gone."""
    first, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    length = bytearray(_LENGTH.size)
    length[: len(first)] = first
    try:
        _fill(connection, memoryview(length)[len(first) :])
        job = bytearray(*_LENGTH.unpack(length))
        _fill(connection, memoryview(job))
    except EOFError:
        return None
    return job, descriptors


def _fill(connection: socket.socket, rest: memoryview, look: Callable[[], None] | None = None) -> None:
    while rest:
        try:
            num_read = connection.recv_into(rest)
        except TimeoutError:
            if look is None:
                raise
            look()
            continue
        if num_read == 0:
            raise EOFError
        rest = rest[num_read:]
        if rest and look is not None:
            look()


def _map(descriptor: int) -> Memory:
    mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def _limit_cpu(seconds: float) -> None:
    """Limits CPU time from now on. The timer is exact and ends the process; the limit, in whole seconds, also holds for
    processes that a compromised decoder would start."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    ceiling = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (ceiling, resource.RLIM_INFINITY))
