"""Threads on a virtual clock: one runs at a time, that with the smallest time, and time passes only where it is said.

A thread that waits, for a lock, a condition, a queue or the device, hands its turn on and gets it back with the time of
what woke it. So an order of events follows from their times alone, however loaded the machine is, and a test of minutes
takes as long as its Python. `VirtualTime.threading` and `.queue` go in place of the modules of that name in files whose
threads are to take part. Does not know what a device is: what is given as `outside` lets events happen between threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any, Protocol


class Outside(Protocol):
    """A source of events in the same time while threads wait."""

    def advance(self, until_s: float) -> bool:
        """Lets happen what happens up to `until_s`, but nothing behind the first event that wakes a thread; whether
        there was one."""
        ...


class Stopped(BaseException):
    """The test is over, or no thread can go on: what a thread that waits gets."""


class Member:
    """A thread that takes part. `time_s`: its own, or when it wakes by itself if it waits."""

    def __init__(self, number: int, time_s: float, name: str) -> None:
        self.number, self.time_s, self.name = number, time_s, name
        self.began_s = time_s  # to wait
        self.waits_in: deque[Member] | None = None
        self.was_woken = False
        self.turn = threading.Semaphore(0)

    @property
    def key(self) -> tuple[float, int]:
        return self.time_s, self.number


class VirtualTime:
    """A `Clock` of hydra_engine/clock.py: each thread that takes part has its own time. Used as a context by the
    thread that starts the others; it must end or join them."""

    def __init__(self, outside: Outside | None = None) -> None:
        self._outside = outside
        self._of_thread = threading.local()
        self._members: list[Member] = []
        self._count = 0
        self._failure = ""
        self.threading = SimpleNamespace(
            Thread=self._maker(Thread),
            Lock=self._maker(Lock),
            RLock=self._maker(Lock),
            Condition=self._maker(Condition),
            Event=self._maker(Event),
            local=threading.local,
            get_native_id=threading.get_native_id,
            current_thread=threading.current_thread,
        )
        self.queue = SimpleNamespace(SimpleQueue=self._maker(SimpleQueue))

    def _maker(self, made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: made(self, *args, **kwargs)

    def __enter__(self) -> VirtualTime:
        self._of_thread.member = self.join_in("main", 0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._of_thread.member = None
        self._failure = self._failure or "the test is over"
        for member in self._members:
            member.turn.release()

    # ---- the calling thread

    @property
    def me(self) -> Member:
        member: Member | None = getattr(self._of_thread, "member", None)
        assert member is not None, "a thread that does not take part"
        return member

    @property
    def takes_part(self) -> bool:
        return getattr(self._of_thread, "member", None) is not None

    def now(self) -> float:
        return self.me.time_s

    def spend(self, seconds: float) -> None:
        """Lets so many seconds of the calling thread's processor time pass."""
        assert seconds >= 0, "time does not go back"
        self.me.time_s += seconds
        self.turn()

    def turn(self) -> None:
        """Lets all others run that are behind the calling thread."""
        self._hand_on(self.me)

    def wait_in(self, place: deque[Member], timeout_s: float = inf) -> bool:
        """Waits in `place` until `wake` removes this thread. False if the time was over first."""
        me = self.me
        me.began_s, me.was_woken, me.waits_in = me.time_s, False, place
        place.append(me)
        me.time_s += timeout_s
        self._hand_on(me)
        return me.was_woken

    def wake(self, member: Member, at_s: float) -> None:
        """Wakes a waiting thread at that time, or when it began to wait if that is later."""
        assert member.waits_in is not None
        member.waits_in.remove(member)
        member.waits_in, member.was_woken = None, True
        member.time_s = max(member.began_s, at_s)

    # ---- turns

    def join_in(self, name: str, time_s: float) -> Member:
        self._count += 1
        member = Member(self._count, time_s, name)
        self._members.append(member)
        return member

    @contextmanager
    def part_of(self, member: Member) -> Iterator[None]:
        """Runs a new thread's part: waits for its first turn, and leaves with the last."""
        member.turn.acquire()
        self._of_thread.member = member
        try:
            self._check()
            yield
        finally:
            self._of_thread.member = None
            self._members.remove(member)
            if not self._failure:
                self._next().turn.release()

    def _hand_on(self, me: Member) -> None:
        self._check()
        following = self._next()
        if following is not me:
            following.turn.release()
            me.turn.acquire()
            self._check()
        if me.waits_in is not None:  # its time is over
            me.waits_in.remove(me)
            me.waits_in = None

    def _next(self) -> Member:
        while True:
            member = min(self._members, key=lambda member: member.key)
            if self._outside is not None and self._outside.advance(member.time_s):
                continue
            if member.time_s == inf:
                self._failure = f"all threads wait: {', '.join(member.name for member in self._members)}"
                for waiting in self._members:
                    waiting.turn.release()
            return member

    def _check(self) -> None:
        if self._failure:
            raise Stopped(self._failure)


class Lock:
    """Emulates threading.Lock and RLock: a thread that has it may take it again."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiting: deque[Member] = deque()
        self._owner: Member | None = None
        self._depth = 0

    def acquire(self) -> bool:
        me = self._time.me
        if self._owner is not me:
            self._time.turn()
            while self._owner is not None:
                self._time.wait_in(self._waiting)
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        assert self._owner is self._time.me, "a lock of another thread"
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._time.wake(self._waiting[0], self._time.now())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        if self._time.takes_part and not self._time._failure:
            self.release()


class Condition(Lock):
    """Emulates threading.Condition with a lock of its own."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time)
        self._sleeping: deque[Member] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        self.release()
        woken = self._time.wait_in(self._sleeping, inf if timeout is None else timeout)
        self.acquire()
        return woken

    def wait_for(self, holds: Callable[[], bool]) -> bool:
        while not holds():
            self.wait()
        return True

    def notify_all(self) -> None:
        for member in [*self._sleeping]:
            self._time.wake(member, self._time.now())

    def notify(self) -> None:
        if self._sleeping:
            self._time.wake(self._sleeping[0], self._time.now())


class Event:
    """Emulates threading.Event."""

    def __init__(self, time: VirtualTime) -> None:
        self._changed = Condition(time)
        self._is_set = False

    def is_set(self) -> bool:
        self._changed._time.turn()
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._is_set:
                self._changed.wait(timeout)
            return self._is_set


class SimpleQueue:
    """Emulates queue.SimpleQueue."""

    def __init__(self, time: VirtualTime) -> None:
        self._changed = Condition(time)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items))
            return self._items.popleft()


class Thread:
    """Emulates threading.Thread; it starts at the time of the thread that starts it. `join` raises what it raised."""

    def __init__(
        self,
        time: VirtualTime,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self._time, self._call, self.name = time, lambda: target(*args), name
        self._ended = False
        self._joining: deque[Member] = deque()
        self._error: BaseException | None = None

    def start(self) -> None:
        member = self._time.join_in(self.name, self._time.now())
        threading.Thread(target=self._run, args=(member,), name=self.name, daemon=True).start()

    def join(self, timeout: float | None = None) -> None:
        self._time.turn()
        if not self._ended:
            self._time.wait_in(self._joining, inf if timeout is None else timeout)
        if self._error is not None:
            raise self._error

    def is_alive(self) -> bool:
        return not self._ended

    def _run(self, member: Member) -> None:
        try:
            with self._time.part_of(member):
                try:
                    self._call()
                except Exception as error:  # noqa: BLE001 - kept for the thread that joins this one
                    self._error = error
                self._ended = True
                for waiting in [*self._joining]:
                    self._time.wake(waiting, self._time.now())
        except Stopped:
            pass
