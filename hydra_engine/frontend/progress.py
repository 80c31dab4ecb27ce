"""Progress for a person: loading a model, and a batch of requests. Silent unless asked; standard error only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from hydra_engine.core.messages import Loading
from hydra_engine.core.outputs import Result
from hydra_engine.core.reports import Status

OnProgress = Callable[[Loading], None]


class _Bars:
    """Owner of one tqdm bar. `enabled` None: on if standard error is a terminal."""

    def __init__(self, enabled: bool | None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LoadProgress(_Bars):
    """A bar per phase of start-up: bytes of weights, then steps of warm-up. Without bars, `tell` (if given) receives a
    line per phase."""

    def __init__(self, enabled: bool | None, tell: Callable[[str], None] | None = None) -> None:
        super().__init__(enabled)
        self._phase: str | None = None
        self._tell = tell
        self._reported: set[str] = set()

    def __enter__(self) -> Self:
        self._tell_once("starting")
        return self

    def _tell_once(self, phase: str) -> None:
        """Reports a phase once, although each instance goes through it."""
        if self._tell is not None and not self._enabled and phase not in self._reported:
            self._reported.add(phase)
            self._tell(phase)

    def update(self, loading: Loading) -> None:
        self._tell_once("loading weights" if loading.what == "weights" else loading.what)
        if not self._enabled:
            return
        if loading.what != self._phase:
            self._close()
            self._phase = loading.what
            in_bytes = loading.what == "weights"
            self._bar = tqdm(
                total=loading.total,
                desc=f"loading {loading.what}" if in_bytes else loading.what,
                unit="B" if in_bytes else "step",
                unit_scale=in_bytes,
                unit_divisor=1024,
                mininterval=0.1,
            )
        self._bar.total = loading.total
        self._bar.update(loading.done - self._bar.n)


class JointProgress:
    """Progress of several instances as one: the sum of the first phase that is not complete."""

    def __init__(self) -> None:
        self._phases: dict[str, dict[str, Loading]] = {}  # by phase, in order of first appearance

    def add(self, name: str, loading: Loading) -> Loading:
        self._phases.setdefault(loading.what, {})[name] = loading
        for what, reports in self._phases.items():
            done, total = (sum(getattr(report, of) for report in reports.values()) for of in ("done", "total"))
            if done < total:
                return Loading(what, done, total)
        return Loading(what, done, total)


class BatchProgress(_Bars):
    """A bar of finished requests, with tokens per second and how busy both lanes have been since its start."""

    def __init__(self, total: int, enabled: bool | None, stats: Callable[[], Status | None]) -> None:
        super().__init__(enabled)
        self._stats = stats
        self._tokens = 0
        self._began_s = time.monotonic()
        self._first = stats()
        if self._enabled:
            self._bar = tqdm(total=total, unit="req", mininterval=0.2)

    def add(self, result: Result) -> None:
        self._tokens += result.usage.completion_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(), refresh=False)
            self._bar.update(1)

    def _postfix(self) -> str:
        elapsed = max(time.monotonic() - self._began_s, 1e-9)
        parts = [f"{self._tokens / elapsed:.0f} tok/s"]
        now, first = self._stats(), self._first
        if now is not None and first is not None and now.time_s > first.time_s:
            span = now.time_s - first.time_s
            parts.append(f"vision lane {100 * (now.vision_busy_s - first.vision_busy_s) / span:.0f}%")
            parts.append(f"language lane {100 * (now.language_busy_s - first.language_busy_s) / span:.0f}%")
        return ", ".join(parts)
