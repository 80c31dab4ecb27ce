"""A record of what happens in every queue of `core.fairness` in this process, made from outside of it."""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra_engine.core.fairness import FairQueue

FOLDER = "SIEGE_TURNS"  # the variable that names the folder where instances write
MAX_EVENTS = 200_000

Event = tuple[str, str, str]  # a queue's name, "push", "begin", "end" or "remove", whose job it was


def watch(note: Callable[[Event], object], where: str) -> None:
    """Logs every queue that is made from now on. `where` is part of its name."""
    made, numbers = FairQueue.__init__, itertools.count()

    def init(queue: Any, of: str, *rest: Any, **options: Any) -> None:
        queue.siege_name = f"{where}: {of}#{next(numbers)}"
        made(queue, of, *rest, **options)

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(queue: Any, client: str, *rest: Any, **options: Any) -> Any:
            result = method(queue, client, *rest, **options)
            note((queue.siege_name, name, client))
            return result

        return call

    FairQueue.__init__ = init  # type: ignore[method-assign]
    for name in ("push", "begin", "end", "remove"):
        setattr(FairQueue, name, noted(name, getattr(FairQueue, name)))


def watch_to_file() -> None:
    """Writes one line for each event of this instance to a file of its own in the folder."""
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.turns"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    watch(lambda event: os.write(descriptor, json.dumps(event).encode() + b"\n"), f"instance {os.getpid()}")


class Log:
    """Events of the front, in memory, and of its instances, from their files."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._read: dict[Path, int] = {}

    def watch(self) -> None:
        watch(self._events.append, "front")

    def events(self, *, reset: bool) -> list[Event]:
        """Events since the latest reset."""
        events = [*self._events, *self._of_instances(reset=reset)]
        if reset:
            self._events.clear()
        return events

    def _of_instances(self, *, reset: bool) -> Iterable[Event]:
        for path in Path(os.environ.get(FOLDER, "/nowhere")).glob("*.turns"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.readlines()
                if reset:
                    self._read[path] = file.tell()
            for line in lines:
                if line.endswith(b"\n"):
                    queue, what, client = json.loads(line)
                    yield queue, what, client
