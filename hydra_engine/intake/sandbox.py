"""The parent's side of the decode children: starts them when needed, gives them jobs, ends those that do not answer.

One picture costs at most one child. Does not trust what a child says: an answer is one byte, and the pixels are as many
bytes of shared memory as the parent expects, copied out before anybody looks at them. Does not know formats or models.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from hydra_engine.errors import InvalidImage, Unavailable
from hydra_engine.intake.child import BROKEN, DONE, HEAD, FramesJob, Job
from hydra_engine.intake.containers import broken
from hydra_engine.intake.pixels import num_bytes
from hydra_engine.intake.spawn import SpawnedChild, fill, spawn
from hydra_engine.intake.videos import INFO, ProbeJob, VideoJob, broken_video
from hydra_engine.specs.base import VideoInfo

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
ANSWER_SECONDS = 30.0  # for a picture; the child's own limit is CPU time, this one is for a child that sleeps
VIDEO_ANSWER_SECONDS = 180.0

_LEAST_BYTES = 4 << 20  # of shared memory
_KEPT_BYTES = 64 << 20  # more is given back when the next answer needs less than half of it

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # whose stacks would count as memory
_COMMAND = (sys.executable, "-m", "hydra_engine.intake.child")
_VIDEO_COMMAND = (sys.executable, "-m", "hydra_engine.intake.video_child")


class Sandbox:
    """Safe from any thread; as many children of a kind as threads that call at the same time. Pictures and videos have
    children of their own, because a decoder of videos needs more memory and time than any picture may take."""

    def __init__(
        self,
        command: Sequence[str] = _COMMAND,
        answer_seconds: float = ANSWER_SECONDS,
        video_command: Sequence[str] = _VIDEO_COMMAND,
        video_answer_seconds: float = VIDEO_ANSWER_SECONDS,
    ) -> None:
        self._pictures = _Children(command)
        self._videos = _Children(video_command)
        self._answer_seconds = answer_seconds
        self._video_answer_seconds = video_answer_seconds

    def render(self, job: Job | FramesJob | VideoJob) -> bytes:
        """Blocking. The pixels of the job's views. Raises InvalidImage, Unavailable when no child can be started."""
        size = num_bytes(job.views)
        if isinstance(job, VideoJob):
            return self._videos.run(job, size, self._video_answer_seconds, broken_video)[1]
        seconds = self._video_answer_seconds if isinstance(job, FramesJob) else self._answer_seconds
        return self._pictures.run(job, size, seconds, broken)[1]

    def probe_video(self, data: bytes) -> VideoInfo:
        """Blocking. What a video file is; not checked against limits. Raises as `render` does."""
        answer, _ = self._videos.run(ProbeJob(data), 0, self._video_answer_seconds, broken_video, INFO.size)
        return VideoInfo(*INFO.unpack(answer))

    def warm_up(self) -> None:
        """Starts the first child and does not wait for it: the first picture waits for what is left of that."""
        self._pictures.warm_up()

    def close(self) -> None:
        """Ends the idle children now and the busy ones after their job."""
        self._pictures.close()
        self._videos.close()


class _Children:
    """Processes that run one command."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._closed = False
        self.idle: list[_Child] = []

    def run(
        self,
        job: Struct,
        num_pixel_bytes: int,
        seconds: float,
        broken: Callable[[str], InvalidImage],
        num_more: int = 0,
    ) -> tuple[bytes, bytes]:
        """The `num_more` bytes of the answer, and the pixels."""
        child = self._take()
        try:
            answer = child.run(job, num_pixel_bytes, seconds, num_more)
        except (OSError, EOFError) as error:  # timeouts are OSErrors too
            logger.warning("a decode process ended with status %s", child.end())
            raise broken("its decoder failed") from error
        self._give_back(child)
        if answer is None:
            raise broken("its data is damaged or incomplete")
        return answer

    def warm_up(self) -> None:
        self._give_back(self._start())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self.idle = self.idle, []
        for child in idle:
            child.end()

    def _take(self) -> _Child:
        """One that has started."""
        child = self._idle_child() or self._start()
        try:
            child.wait_until_started()
        except (OSError, EOFError) as error:
            child.end()
            raise _no_child() from error
        return child

    def _idle_child(self) -> _Child | None:
        with self._lock:
            while self.idle:
                child = self.idle.pop()
                if child.is_alive:
                    return child
                child.end()
        return None

    def _start(self) -> _Child:
        try:
            return _Child(self._command)
        except OSError as error:
            raise _no_child() from error

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self.idle.append(child)
                return
        child.end()


def _no_child() -> Unavailable:
    return Unavailable("no process to decode images could be started; try again later")


class _Memory:
    """Shared with one child, whose pixels go there. Sealed, so its size is what it was made with."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            self.close()
            raise

    def read(self, size: int) -> bytes:
        """The first `size` bytes as they are now. Raises EOFError where there are less."""
        data = os.pread(self.descriptor, size, 0)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        os.close(self.descriptor)


class _Child(SpawnedChild):
    """Still starting when this returns. Raises OSError."""

    def __init__(self, command: Sequence[str]) -> None:
        self._memory: _Memory | None = None
        self._started = False
        super().__init__(spawn(command, settings=_ONE_THREAD))

    def wait_until_started(self) -> None:
        """Raises OSError or EOFError when it does not start."""
        if not self._started:
            self._socket.settimeout(START_SECONDS)
            if self._read(1) != DONE:
                raise EOFError
            self._started = True

    def run(self, job: Struct, num_pixel_bytes: int, seconds: float, num_more: int) -> tuple[bytes, bytes] | None:
        """None when the file is broken. Raises OSError or EOFError when the child is."""
        self._socket.settimeout(seconds)
        memory = self._send(msgspec.msgpack.encode(job), num_pixel_bytes)
        verdict = self._read(1)
        if verdict == BROKEN:
            return None
        if verdict != DONE:
            raise EOFError
        return self._read(num_more), memory.read(num_pixel_bytes)

    def end(self) -> int:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return super().end()

    def _send(self, job: bytes, size: int) -> _Memory:
        """With memory for `size` bytes of answer, if the child does not have that."""
        head = HEAD.pack(len(job))
        memory = self._memory
        if memory is None or not size <= memory.size <= max(_KEPT_BYTES, 2 * size):
            if memory is not None:
                memory.close()
            memory = self._memory = _Memory(max(_LEAST_BYTES, size))
            socket.send_fds(self._socket, [head], [memory.descriptor])
        else:
            self._socket.sendall(head)
        self._socket.sendall(job)
        return memory

    def _read(self, size: int) -> bytes:
        answer = bytearray(size)
        if not fill(self._socket, memoryview(answer)):
            raise EOFError
        return bytes(answer)
