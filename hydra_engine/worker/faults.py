"""Named fault points: places in a step where a test may make something go wrong on purpose.

Off unless enabled before start; a point that is not armed costs one look at an empty dict. Does not know the steps
themselves. Armed from the instance thread, hit from the lanes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.request import Request
from hydra_engine.errors import ConfigError

BEFORE_LANGUAGE_STEP = "eng.before_step"  # nothing computed yet
MID_LANGUAGE_STEP = "eng.mid_step"  # KV written, no token sampled
BEFORE_VISION_STEP = "vis.before_step"
POINTS = frozenset({BEFORE_LANGUAGE_STEP, MID_LANGUAGE_STEP, BEFORE_VISION_STEP})
ACTIONS = frozenset({"raise", "delay", "nan", "kill", "off"})
KILLED_EXIT_CODE = 86

_NOBODY: frozenset[RequestId] = frozenset()


class InjectedFault(RuntimeError):
    """What the action `raise` raises: to the engine an exception like any other."""


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
    """`arm(point, action, argument)`, where argument is words such as `token=7 times=1`:

    token=N    only steps with a request whose prompt contains token N
    request=N  only steps with request N
    times=N    only the next N such steps
    seconds=X  how long `delay` sleeps (default 1)

    Actions: raise an exception, delay the step, make the matching requests' numbers NaN, kill the process, off.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self._armed: dict[str, _Armed] = {}
        self._lock = threading.Lock()

    def arm(self, point: str, action: str, argument: str = "") -> None:
        """Replaces what was armed at `point`. Raises ConfigError for anything it does not know."""
        if not self.enabled:
            raise ConfigError("fault points are not enabled in this process")
        if point not in POINTS:
            raise ConfigError(f"no fault point {point[:40]!r}; there are {', '.join(sorted(POINTS))}")
        if action not in ACTIONS:
            raise ConfigError(f"no fault action {action[:40]!r}; there are {', '.join(sorted(ACTIONS))}")
        armed = _parse(action, argument)
        with self._lock:
            if action == "off":
                self._armed.pop(point, None)
            else:
                self._armed[point] = armed

    def hit(self, point: str, requests: Iterable[Request]) -> frozenset[RequestId]:
        """Does what is armed at `point` if any of `requests` matches; returns whose numbers are to become NaN."""
        if not self._armed:
            return _NOBODY
        with self._lock:
            armed = self._armed.get(point)
            if armed is None:
                return _NOBODY
            victims = armed.victims(requests)
            if not victims:
                return _NOBODY
            if armed.remaining is not None:
                armed.remaining -= 1
                if armed.remaining <= 0:
                    del self._armed[point]
        if armed.action == "nan":
            return victims
        if armed.action == "kill":
            os._exit(KILLED_EXIT_CODE)
        if armed.action == "raise":
            raise InjectedFault(f"injected at {point}")
        time.sleep(armed.seconds)
        return _NOBODY


def _parse(action: str, argument: str) -> _Armed:
    values: dict[str, float] = {}
    for word in argument.split():
        name, _, value = word.partition("=")
        if name not in ("token", "request", "times", "seconds"):
            raise ConfigError(f"fault argument {word[:40]!r} is not token=, request=, times= or seconds=")
        try:
            values[name] = float(value) if name == "seconds" else int(value)
        except ValueError:
            raise ConfigError(f"fault argument {word[:40]!r} needs a number") from None
    return _Armed(
        action,
        token=_integer(values.get("token")),
        request=_integer(values.get("request")),
        seconds=values.get("seconds", 1.0),
        remaining=_integer(values.get("times")),
    )


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)
