"""The parent's side of the sandboxed children: starts them when needed, gives them jobs, ends those that do not answer.

A child that ends because of a limit or a crash does so because of its job, which is not tried again. A child that was
stopped or killed from outside says nothing about its job, which is tried once more in a new child. Does not know what
the jobs are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from hydra_engine.errors import EngineClosed, Unavailable
from hydra_engine.preprocess.sandbox.child_process import MAX_ANSWER_BYTES, Child, ChildDied

logger = logging.getLogger(__name__)

A = TypeVar("A")

_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH")  # what an interpreter needs


class ChildHost(Generic[A]):
    """The children that run one command, one per concurrent caller. Thread-safe."""

    def __init__(
        self,
        purpose: str,
        command: Sequence[str],
        answer_type: type[A],
        *,
        setup: object = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        inherited: Iterable[str] = (),
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """`command FD SETUP` is started with the environment that an interpreter needs, the variables `inherited` from
        this process, and `variables`. `purpose` is a verb and an object: "decode images"."""
        self._purpose = purpose
        self._command = tuple(command)
        self._setup = () if setup is None else (msgspec.json.encode(setup).decode(),)
        self._environment = {**environment(inherited), **variables}
        self._answer_type = answer_type
        self._max_answer_bytes = max_answer_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._children: set[Child] = set()
        self._idle: list[Child] = []

    def run(self, job: object, seconds: float, num_pixel_bytes: int = 0) -> tuple[A, bytes]:
        """Returns a child's answer and the `num_pixel_bytes` pixels that it has written. Blocking. Raises ChildDied if
        the job has ended its child, Unavailable if no child can be started or two were stopped or killed, a child's
        error about its setup, EngineClosed."""
        try:
            return self._run_once(self._started_child(), job, seconds, num_pixel_bytes)
        except ChildDied as death:
            if death.by_itself:
                raise
        try:
            return self._run_once(self._started_child(fresh=True), job, seconds, num_pixel_bytes)
        except ChildDied as death:
            if death.by_itself:
                raise
            reason = f"processes to {self._purpose} were stopped, killed or given no time; try again later"
            raise Unavailable(reason) from death

    def _run_once(
        self, started: AbstractContextManager[Child], job: object, seconds: float, num_pixel_bytes: int
    ) -> tuple[A, bytes]:
        with started as child:
            return child.run(job, seconds, num_pixel_bytes, self._max_answer_bytes, self._answer_type)

    def warm_up(self, num_children: int) -> None:
        """Starts children without waiting for them."""
        for _ in range(num_children):
            self._give_back(self._new_child())

    def start(self) -> None:
        """Starts one child and blocks until it is ready. Raises as `run` does."""
        try:
            with self._started_child():
                pass
        except ChildDied as death:
            raise self._unavailable() from death

    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._children]

    def close(self) -> None:
        """Ends all children now, whatever they do; callers that wait for one get EngineClosed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._children.difference(idle)
        for child in busy:
            child.kill()  # its descriptors are closed by the thread that waits for it
        for child in idle:
            self._end(child)

    @contextmanager
    def _started_child(self, *, fresh: bool = False) -> Iterator[Child]:
        """Yields a child that is ready; it is kept afterwards, or ended on an exception. A failed start does not count
        against the job."""
        child = (None if fresh else self._idle_child()) or self._new_child()
        try:
            try:
                child.wait_until_started()
            except ChildDied as death:
                if not death.by_itself:
                    raise
                raise self._unavailable() from death
            yield child
        except BaseException as error:
            self._end(child)
            if self._closed:
                raise _engine_closed() from error
            if isinstance(error, ChildDied):
                logger.warning("a process to %s %s", self._purpose, error)
            raise
        self._give_back(child)

    def _idle_child(self) -> Child | None:
        """An idle child that is still alive, None if there is none."""
        while True:
            with self._lock:
                if self._closed:
                    raise _engine_closed()
                if not self._idle:
                    return None
                child = self._idle.pop()
            if child.is_alive:
                return child
            self._end(child)

    def _new_child(self) -> Child:
        """A new child, which may still be starting."""
        try:
            child = Child(self._command, self._setup, self._environment, self._on_end)
        except (OSError, RuntimeError) as error:  # no process, or no thread to wait for it
            raise self._unavailable() from error
        with self._lock:
            if not self._closed:
                self._children.add(child)
                return child
        child.end()
        raise _engine_closed()

    def _give_back(self, child: Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        self._end(child)

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def _on_end(self, child: Child) -> None:
        """Drops an idle child that has ended; a busy one is noticed by its user. Runs on the child's thread."""
        with self._lock:
            if child not in self._idle:
                return
            self._idle.remove(child)
        logger.warning("a process to %s %s while it had nothing to do", self._purpose, child.exit_description)
        self._end(child)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"no process to {self._purpose} could be started; try again later")


def environment(inherited: Iterable[str]) -> dict[str, str]:
    variables = {name: os.environ[name] for name in (*_INHERITED, *inherited) if name in os.environ}
    package_parent = str(Path(__file__).parents[3])
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, variables.get("PYTHONPATH")]))}


def _engine_closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
