"""The decode child: `python -m hydra_engine.intake.child FD` turns files into small pictures until its socket closes.

A decoder that crashes, loops or eats memory takes this process with it and nothing else. Job: a fixed header, then the
file. Answer: one byte, and after 0 exactly width x height x 3 bytes. Does not know where files come from.
"""

from __future__ import annotations

import math
import resource
import signal
import socket
import struct
import sys
import time
from io import BufferedRWPair
from typing import NamedTuple

from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.intake.containers import Container
from hydra_engine.intake.pixels import Fit, decode, fit

DONE, BROKEN = b"\0", b"\1"
MEMORY_BYTES = 1 << 30  # of address space; a WebP of 40 million pixels needs two thirds of it
CPU_SECONDS = 5  # of one picture; the largest take one

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_HEADER = struct.Struct("<BBIIIIIBQ")


class Job(NamedTuple):
    container: Container
    target: Fit

    def pack(self) -> bytes:
        """The header of the frame; `container.data` follows it."""
        format, width, height, orientation, data = self.container
        target = self.target
        return _HEADER.pack(
            *(_FORMATS.index(format), orientation, width, height),
            *(target.width, target.height, target.shortest_edge, target.resample, len(data)),
        )


def read_job(stream: BufferedRWPair) -> Job | None:
    """The next job; None when the other side has gone."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    format, orientation, width, height, *target, num_bytes = _HEADER.unpack(header)
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        return None
    out_width, out_height, shortest_edge, resample = target
    fitted = Fit(out_width, out_height, shortest_edge, Image.Resampling(resample))
    return Job(Container(_FORMATS[format], width, height, orientation, data), fitted)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as stream:
        Image.init()
        stream.write(DONE)  # started
        stream.flush()
        while (job := read_job(stream)) is not None:
            ceiling = math.ceil(time.process_time()) + CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (ceiling, resource.RLIM_INFINITY))
            stream.write(answer(job))
            stream.flush()


def answer(job: Job) -> bytes:
    try:
        return DONE + fit(decode(job.container), job.target).tobytes()
    except (InvalidImage, MemoryError):
        return BROKEN


if __name__ == "__main__":
    main()
