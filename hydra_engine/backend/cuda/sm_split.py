"""A device whose SMs are divided between the lanes while both have work.

A partition is the language lane's SMs; the rest are the vision lane's. All partitions are made of the groups of one
split, so the smaller of two language parts lies inside the larger one. They are green contexts, since ordinary streams
run on every SM. Partition 0 is the whole device, on the lanes' ordinary streams. Only SMs are divided; bandwidth and L2
are not. A lane's jobs stay in order when it changes partition: its new stream waits for the old one. Only the language
and the vision lane are moved. Does not know what a job does, nor which split is best: each language step says that
(scheduler/latency/latency_budget.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

import torch

from hydra_engine import _C
from hydra_engine.backend.cpu.device import Job
from hydra_engine.backend.cuda.lanes import CudaLane
from hydra_engine.errors import BackendError, ConfigError

LANGUAGE, VISION = "language", "vision"


class Sharing:
    """Tracks which lanes have work, and chooses the partition of each job that begins. Thread-safe.

    A job has ended when the device has finished its launches. No lane gets an SM that a job of the other lane uses by
    an earlier choice: beside an encode of partition p, a step gets a language part within p's; beside a step of
    partition p, an encode gets a vision part within p's, until that job has ended. No job waits for that. The undivided
    device is shared on purpose: by an encode that began on it, and by a step that chose it; worker/vision/gate.py then
    bounds the encode by the step's limit.

    language_sms: SMs of the language part of partitions 1, 2, ..; () if they are ascending.
    """

    def __init__(self, language_sms: Sequence[int] = ()) -> None:
        self._lock = threading.Lock()
        self._language_sms = language_sms
        self._chosen = 1  # while both lanes have work
        self._open = {LANGUAGE: 0, VISION: 0}  # submitted jobs that have not launched all of their work
        self._beginning: dict[str, int | None] = {LANGUAGE: None, VISION: None}  # partition of the job that launches
        self._launched: dict[str, deque[_Launched]] = {LANGUAGE: deque(), VISION: deque()}  # jobs that have not ended
        self._steps = 0  # jobs of the language lane that have begun
        self._steps_seen = 0  # `_steps` when the vision lane's last job began

    def submitted(self, lane: str) -> None:
        """Counts a job that was submitted to the lane. Call `launched` or `withdrawn` once for each."""
        with self._lock:
            self._open[lane] += 1

    def withdrawn(self, lane: str) -> None:
        """Uncounts a submitted job that never begins."""
        with self._lock:
            self._open[lane] -= 1

    def launched(self, lane: str, is_done: Callable[[], bool]) -> None:
        """Records that the lane's present job launches nothing more. is_done: returns True once the device has finished
        what it launched."""
        with self._lock:
            self._open[lane] -= 1
            self._forget_ended(lane)
            self._launched[lane].append(_Launched(self._beginning[lane] or 0, is_done))
            self._beginning[lane] = None

    def begin(self, lane: str) -> int:
        """Chooses, records and returns the partition of the lane's next job, which begins now: `_step_partition` for a
        language step.

        An encode gets `_encode_partition` if the language lane has work, or if a step began since the last encode did:
        between two steps that lane has none for a moment, and an encode is longer than a step. Else the whole device.
        """
        with self._lock:
            if lane == LANGUAGE:
                self._steps += 1
                place = self._step_partition()
            else:
                shares = self._has_work(LANGUAGE) or self._steps > self._steps_seen
                self._steps_seen = self._steps
                place = self._encode_partition() if shares else 0
            self._beginning[lane] = place
            return place

    def set_partition(self, partition: int) -> int:
        """Sets the partition for when both lanes have work (0: the whole device). Chooses again for the language lane's
        present job, and returns the partition to which the caller must switch it."""
        with self._lock:
            self._chosen = partition
            place = self._step_partition()
            if self._beginning[LANGUAGE] is not None:
                self._beginning[LANGUAGE] = place
            return place

    def _step_partition(self) -> int:
        """The partition of a language step.

        The whole device if that is set, if the vision lane has no work, and while only encodes on the whole device are
        in flight, since on a part of it the step would wait for their blocks anyway. Otherwise, of the partition that
        is set and the partitions of encodes in flight, the one with the fewest language SMs.
        """
        if not self._has_work(VISION):
            return 0
        encodes = self._places(VISION)
        parts = [place for place in encodes if place]
        if encodes and not parts:
            return 0
        return min([self._chosen, *parts], key=self._num_language_sms) if self._chosen else 0

    def _encode_partition(self) -> int:
        """The partition of an encode beside language work: of the partition that is set and the partitions of steps in
        flight (the whole device left out), the one with the most language SMs; 0 if 0 is set and there are none."""
        parts = [place for place in self._places(LANGUAGE) if place]
        return max([self._chosen, *parts], key=self._num_language_sms)

    def _num_language_sms(self, partition: int) -> int:
        """SMs of a partition's language part, or a number in the same order if they are not given; 0 for the whole
        device."""
        return self._language_sms[partition - 1] if partition and self._language_sms else partition

    def _has_work(self, lane: str) -> bool:
        """True if the lane has submitted jobs that have not launched everything, or launches that the device has not
        finished."""
        return self._open[lane] > 0 or bool(self._places(lane))

    def _places(self, lane: str) -> list[int]:
        """Partitions of the lane's jobs that have begun and not ended."""
        self._forget_ended(lane)
        beginning = self._beginning[lane]
        return [job.place for job in self._launched[lane]] + ([] if beginning is None else [beginning])

    def _forget_ended(self, lane: str) -> None:
        """Drops the lane's jobs whose launches the device has finished."""
        launched = self._launched[lane]
        while launched and launched[0].is_done():  # a lane's jobs end in their order
            launched.popleft()


class _Launched(NamedTuple):
    """A job that launches nothing more. place: its partition. is_done: True once the device has finished its
    launches."""

    place: int
    is_done: Callable[[], bool]


def _is_done() -> bool:
    """Returns True: the `is_done` of a job whose launches the device had finished when it ended."""
    return True


class Track:
    """The streams of one lane by partition (0: the whole device), and its present partition. Only the lane's thread may
    call its methods. use: makes a stream the thread's current one."""

    def __init__(
        self, streams: Sequence[torch.cuda.Stream], use: Callable[[torch.cuda.Stream], None] = torch.cuda.set_stream
    ) -> None:
        self.streams = tuple(streams)
        self.partition = 0
        self._use = use

    def switch_to(self, partition: int) -> None:
        """Makes this partition's stream the thread's current one; on the device it waits for what the lane has
        launched."""
        if partition == self.partition:
            return
        self.streams[partition].wait_stream(self.streams[self.partition])
        self.partition = partition
        self._use(self.streams[partition])

    def end_of_job(self) -> Callable[[], bool]:
        """Returns a function that returns True once the device has finished what the lane has launched until now."""
        stream = self.streams[self.partition]
        if stream.query():
            return _is_done
        end = torch.cuda.Event()
        end.record(stream)
        return end.query

    @contextmanager
    def use(self, partition: int) -> Iterator[None]:
        """Switches to a partition inside the context, and back afterwards."""
        before = self.partition
        self.switch_to(partition)
        try:
            yield
        finally:
            self.switch_to(before)


class _ThreadLane(threading.local):
    """The calling thread's lane, if it is the language or the vision lane; else `track` is None."""

    track: Track | None = None
    name = ""


class SplitLane(CudaLane):
    """A `Lane` of backend/device.py that runs each job on the stream of the partition that `Sharing` chooses for it."""

    def __init__(
        self,
        name: str,
        device: SplitDevice,
        track: Track,
        threads: int,
        set_threads: Callable[[int], None],
    ) -> None:
        self._track = track
        self._sharing = device.sharing
        self._of_thread = device.of_thread
        super().__init__(name, device.torch_device, track.streams[0], threads, set_threads)

    def submit(self, job: Job) -> None:
        """Queues `job` and counts it as work of the lane. Raises RuntimeError if the lane is closed or a job of it has
        raised."""
        self._sharing.submitted(self.name)
        try:
            super().submit(job)
        except RuntimeError:  # the lane died or is closed
            self._sharing.withdrawn(self.name)
            raise

    def close(self) -> None:
        """Waits for submitted jobs and for their launches on all partitions, and stops the thread; after a job that
        raised, not for launches on partitions. Logs an error of the device. Idempotent."""
        with suppress(RuntimeError):  # closed already, or dead: then nothing that it launched is wanted
            self.submit(lambda: self._track.switch_to(0))
        super().close()

    def _begin(self, threads: int) -> None:
        """Prepares the lane's thread, and registers its track and name there for `SplitDevice`."""
        super()._begin(threads)
        self._of_thread.track, self._of_thread.name = self._track, self.name

    def _after_caller(self, job: Job) -> Job:
        """Returns `job`, made to run on the partition that `Sharing` chooses when it begins, and to report the end of
        its launches. On the device it waits for what the calling thread has launched."""
        after = super()._after_caller(job)

        def run() -> None:
            try:
                # First: the wait for the caller's launches must be on the stream of the job.
                self._track.switch_to(self._sharing.begin(self.name))
                after()
            finally:
                self._sharing.launched(self.name, self._track.end_of_job())

        return run


class SplitDevice:
    """`Partitions` of backend/device.py: the whole device, and one for each of `counts`, which gives the language lane
    at least that many SMs.

    priorities: stream priorities by lane. Raises BackendError if the driver cannot divide the device, ConfigError if
    the device does not allow these counts.
    """

    def __init__(
        self,
        device: torch.device,
        counts: Sequence[int],
        priorities: Mapping[str, int],
    ) -> None:
        self.torch_device = device
        splits = create_split_streams(device, counts, priorities.get(LANGUAGE, 0), priorities.get(VISION, 0))
        self._streams = {
            lane: [torch.cuda.ExternalStream(streams[i], device=device) for streams in splits]
            for i, lane in enumerate((LANGUAGE, VISION))
        }
        self._sms = {lane: [sms[i] for _, _, *sms in splits] for i, lane in enumerate((LANGUAGE, VISION))}
        self.sharing = Sharing(self._sms[LANGUAGE])
        self.of_thread = _ThreadLane()
        self.count = 1 + len(splits)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.note = describe_split(counts, [sms for _, _, *sms in splits], num_sms)

    def lane(self, name: str, whole: torch.cuda.Stream, threads: int, set_threads: Callable[[int], None]) -> CudaLane:
        """Starts a lane; the caller closes it. The language and the vision lane move between partitions, others do not.
        Start at most one of each: a partition has one stream for it. whole: the lane's stream on the whole device."""
        if name not in (LANGUAGE, VISION):
            return CudaLane(name, self.torch_device, whole, threads, set_threads)
        return SplitLane(name, self, Track([whole, *self._streams[name]]), threads, set_threads)

    def set_partition(self, partition: int) -> None:
        """Sets the partition for when both lanes have work; a number above the last means the last. If a job of the
        language lane calls this, it moves to the partition that it gets now. The vision lane must not call it."""
        place = self.sharing.set_partition(min(partition, self.count - 1))
        if self.of_thread.track is not None:
            self.of_thread.track.switch_to(place)

    def current(self) -> int:
        """The partition of the calling thread's present job; 0 outside of the language and the vision lane."""
        return 0 if self.of_thread.track is None else self.of_thread.track.partition

    def num_sms(self, whole: int) -> int:
        """SMs that launches of the calling thread get now. whole: SMs of the whole device."""
        partition = self.current()
        return whole if partition == 0 else self._sms[self.of_thread.name][partition - 1]

    def use(self, partition: int) -> AbstractContextManager[None]:
        """Runs the calling lane's launches inside the context on this partition. Raises ValueError if there is no such
        partition, or if it is not 0 and the caller is in no lane that moves."""
        if not 0 <= partition < self.count:
            raise ValueError(f"partition: expected 0 to {self.count - 1}, got {partition}")
        if self.of_thread.track is not None:
            return self.of_thread.track.use(partition)
        if partition != 0:
            raise ValueError(f"partition: expected 0 outside of the language and the vision lane, got {partition}")
        return nullcontext()


def create_split_streams(
    device: torch.device, counts: Sequence[int], language_priority: int, vision_priority: int, *, spread: bool = False
) -> list[tuple[int, int, int, int]]:
    """Returns (language stream, vision stream, language SMs, vision SMs) for each of `counts`, the SMs that the
    language part has at least. The two streams, raw handles, share no SM.

    The language part of a smaller count lies within that of a larger one. spread: the language lane gets every second
    group of SMs first, instead of adjacent groups. The streams stay until the process ends. Raises as `SplitDevice`.
    """
    try:
        return _C.cuda_split_streams(device.index, counts, language_priority, vision_priority, spread)
    except ValueError as error:
        raise ConfigError(f"sm_split: {_sentence(error)}", param="sm_split") from error
    except RuntimeError as error:
        raise BackendError(
            f"sm_split: the GPU's multiprocessors cannot be divided, {_sentence(error)}; set sm_split to off, or "
            "update the driver if it is older than CUDA 12.5",
            param="sm_split",
        ) from error


def describe_split(counts: Sequence[int], sms: Sequence[Sequence[int]], num_sms: int) -> str:
    """A note for the start-up summary. sms: (language, vision) SMs for each of `counts`. num_sms: SMs of the device."""
    partitions = [
        f"{language} for tokens and {vision} for pictures"
        + (f" ({count} asked for, the device divides by more)" if count != language else "")
        for count, (language, vision) in zip(counts, sms, strict=True)
    ]
    others = f"; with a TPOT limit also {', '.join(partitions[1:])}, step by step" if len(partitions) > 1 else ""
    unused = num_sms - sum(sms[0])
    left = f"; {unused} left over, which the driver leaves out of every part" if unused else ""
    return f"multiprocessors while both models run: {partitions[0]}; else all for either{others}{left}"


def _sentence(error: Exception) -> str:
    """The message of an error of the extension, without the source location and the prefix "counts: "."""
    return str(error).split(" [")[0].removeprefix("counts: ")
