"""Named fault points: places in a step or a migration where a test injects a fault.

The engine does not know them: `worker.py` and `instance.py` beside this file put them into a worker and an instance.
Armed from the instance thread, hit from the lanes and, for migrations, from the instance thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hydra_engine.core.ids import RequestId
from hydra_engine.core.request import Request
from hydra_engine.errors import ConfigError

BEFORE_LANGUAGE_STEP = "eng.before_step"  # nothing computed yet
MID_LANGUAGE_STEP = "eng.mid_step"  # KV written, no token sampled
BEFORE_VISION_STEP = "vis.before_step"
BEFORE_COMPILE = "eng.before_compile"  # of a grammar, whose requests are held
MID_COPY = "dst.mid_copy"  # half of the blocks of another instance are copied
AFTER_COPY = "dst.after_copy"  # all are copied, the control word has not been read
AFTER_STAGING = "src.after_staging"  # a piece is in host memory, the target is not notified
AFTER_OFFER = "src.after_offer"  # the target knows the blocks
BEFORE_FREE = "src.before_free"  # the target has copied the blocks, the source still holds them
AFTER_RESERVE = "dst.after_reserve"  # the target has allocated blocks, nothing is copied
BEFORE_ACK = "dst.before_ack"  # copied and valid, the source is not notified
AFTER_ACK = "dst.after_ack"
STEP_POINTS = frozenset({BEFORE_LANGUAGE_STEP, MID_LANGUAGE_STEP, BEFORE_VISION_STEP})
COPY_POINTS = frozenset({MID_COPY, AFTER_COPY, AFTER_STAGING})
# In the instance's own thread, where an exception is a bug: `raise` ends the instance.
MIGRATION_POINTS = frozenset({AFTER_OFFER, BEFORE_FREE, AFTER_RESERVE, BEFORE_ACK, AFTER_ACK})
_ANYWHERE = frozenset({"raise", "delay", "kill", "off"})
ACTIONS = {
    **dict.fromkeys(STEP_POINTS, _ANYWHERE | {"nan", "oom"}),
    BEFORE_COMPILE: _ANYWHERE,
    **dict.fromkeys(COPY_POINTS, _ANYWHERE | {"corrupt"}),
    **dict.fromkeys(MIGRATION_POINTS, _ANYWHERE),
}
KILLED_EXIT_CODE = 86

_NO_REQUESTS: frozenset[RequestId] = frozenset()


class InjectedFault(RuntimeError):
    """The exception of the action `raise`; the engine does not treat it specially."""


@dataclass(slots=True)
class _Armed:
    action: str
    token: int | None
    request: int | None
    seconds: float
    remaining: int | None  # None: every time

    def victims(self, requests: Iterable[Request]) -> frozenset[RequestId]:
        return frozenset(r.id for r in requests if self._matches(r))

    def _matches(self, request: Request) -> bool:
        if self.request is not None and request.id != self.request:
            return False
        return self.token is None or self.token in request.prompt_token_ids


class FaultPoints:
    """The armed fault points of a process. `arm(point, action, argument)` takes words such as `token=7 times=1`:

    token=N    only steps with a request whose prompt contains token N
    request=N  only steps with request N
    times=N    only the next N such steps
    seconds=X  how long `delay` sleeps (default 1)

    Actions: raise an exception, delay the step, set the matching requests' values to NaN (nan), run out of memory
    (oom), kill the process, off. Copies know no requests: they take times= and seconds= only, and corrupt a copied byte
    (corrupt) instead of nan.
    """

    def __init__(self) -> None:
        self._armed: dict[str, _Armed] = {}
        self._lock = threading.Lock()

    def arm(self, point: str, action: str, argument: str = "") -> None:
        """Arms `point`, replacing the fault armed there; `off` disarms it. Raises ConfigError for an unknown
        point, action or argument."""
        if point not in ACTIONS:
            raise ConfigError(f"no fault point {point[:40]!r}; there are {', '.join(sorted(ACTIONS))}")
        if action not in ACTIONS[point]:
            raise ConfigError(
                f"no fault action {action[:40]!r} at {point}; there are {', '.join(sorted(ACTIONS[point]))}"
            )
        armed = _parse(action, argument)
        if point in COPY_POINTS and (armed.token is not None or armed.request is not None):
            raise ConfigError(f"fault point {point} knows no requests: it takes times= and seconds=")
        with self._lock:
            if action == "off":
                self._armed.pop(point, None)
            else:
                self._armed[point] = armed

    def hit(self, point: str, requests: Iterable[Request]) -> frozenset[RequestId]:
        """Performs the action armed at `point` if any of `requests` matches. Returns the requests whose values the
        caller must set to NaN."""
        if not self._armed:
            return _NO_REQUESTS
        with self._lock:
            armed = self._armed.get(point)
            victims = _NO_REQUESTS if armed is None else armed.victims(requests)
            if armed is None or not victims:
                return _NO_REQUESTS
            self._count(point, armed)
        return victims if _act(point, armed) else _NO_REQUESTS

    def is_armed(self, point: str) -> bool:
        return point in self._armed

    def hit_copy(self, point: str) -> bool:
        """Performs the action armed at `point`. Returns True if the caller must corrupt a copied byte."""
        if not self._armed:
            return False
        with self._lock:
            armed = self._armed.get(point)
            if armed is None:
                return False
            self._count(point, armed)
        return _act(point, armed)

    def _count(self, point: str, armed: _Armed) -> None:
        """Counts one hit, and disarms the point after the last. The caller holds the lock."""
        if armed.remaining is not None:
            armed.remaining -= 1
            if armed.remaining <= 0:
                del self._armed[point]


def _act(point: str, armed: _Armed) -> bool:
    """Performs the armed action. Returns True if the caller must corrupt its output."""
    if armed.action == "kill":
        os._exit(KILLED_EXIT_CODE)
    if armed.action == "raise":
        raise InjectedFault(f"injected at {point}")
    if armed.action == "oom":
        raise torch.OutOfMemoryError(f"injected at {point}")
    if armed.action == "delay":
        time.sleep(armed.seconds)
        return False
    return True


def _parse(action: str, argument: str) -> _Armed:
    numbers: dict[str, int] = {}
    seconds = 1.0
    for word in argument.split():
        name, _, value = word.partition("=")
        if name not in ("token", "request", "times", "seconds"):
            raise ConfigError(f"fault argument {word[:40]!r} is not token=, request=, times= or seconds=")
        try:
            if name == "seconds":
                seconds = float(value)
            else:
                numbers[name] = int(value)
        except ValueError:
            raise ConfigError(f"fault argument {word[:40]!r} needs a number") from None
    return _Armed(action, numbers.get("token"), numbers.get("request"), seconds, remaining=numbers.get("times"))
