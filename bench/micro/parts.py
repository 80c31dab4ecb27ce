"""Commands one after another, each in a process of its own with a limit of time: what long checks are made of.

A part that fails, hangs or cannot run takes nothing from the others. Its output goes to `NAME.log`; the end of it is
shown when it fails. Standard library only, so that it runs where the engine's packages are missing. Does not know what
the parts do.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bench.common import ROOT

TAIL_LINES = 25
_GRACE_S = 3.0  # from asking a part to end to ending it
_LINE_LENGTH, _SAID_LENGTH = 160, 100


@dataclass(frozen=True)
class Part:
    """`limit_s`: it is ended after that. `least_s`: with less time left it is not begun. `packages`: what it imports,
    as modules. `after`: the part without which this one means nothing."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    least_s: float = 5.0
    packages: tuple[str, ...] = ()
    after: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """`state`: "ok", "failed", "out of time" or "not run". `said`: why, or the last line of the output."""

    name: str
    state: str
    seconds: float
    said: str


class Runner:
    """Runs parts for `budget_s` in all, of which the last `reserve_s` are not for parts."""

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        *,
        reserve_s: float = 0.0,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._say = say
        self._clock = clock
        self._began_s = clock()
        self._deadline_s = self._began_s + budget_s - reserve_s
        self.outcomes: dict[str, Outcome] = {}

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def run(self, parts: Sequence[Part]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        width = max((len(part.name) for part in parts), default=0)
        with _terminated_as_interrupted():
            for index, part in enumerate(parts, 1):
                label = f"{index:2}/{len(parts)} {part.name:{width}}"
                outcome = self._refused(part) or self._run(part, label)
                self.outcomes[part.name] = outcome
                self._say(f"{self._stamp()} {label}  {outcome.state}, {outcome.seconds:.1f} s  {outcome.said}".rstrip())
                if outcome.state in ("failed", "out of time"):
                    for line in tail(self.log_of(part), TAIL_LINES):
                        self._say(f"          | {line}")

    def log_of(self, part: Part) -> Path:
        return self._folder / f"{part.name}.log"

    def _stamp(self) -> str:
        return f"[{self.elapsed_s:5.0f} s]"

    def _refused(self, part: Part) -> Outcome | None:
        """Why it is not even begun."""
        before = self.outcomes.get(part.after) if part.after is not None else None
        absent = missing(part.packages)
        left_s = self._deadline_s - self._clock()
        if before is not None and before.state != "ok":
            why = f"{part.after}: {before.state}"
        elif absent:
            why = f"needs {', '.join(absent)}, not installed"
        elif left_s < part.least_s:
            why = f"{max(left_s, 0.0):.0f} s were left, it needs {part.least_s:.0f}"
        else:
            return None
        return Outcome(part.name, "not run", 0.0, why)

    def _run(self, part: Part, label: str) -> Outcome:
        limit_s = min(part.limit_s, self._deadline_s - self._clock())
        self._say(f"{self._stamp()} {label}  ... at most {limit_s:.0f} s")
        began_s = self._clock()
        path = self.log_of(part)
        with path.open("wb") as log:
            # A session of its own, so that it ends with all that it started.
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**os.environ, **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                state, message = ("ok" if code == 0 else "failed"), _last_line(path)
            except subprocess.TimeoutExpired:
                state, message = "out of time", f"ended after {limit_s:.0f} s"
            finally:
                _end(process)
        return Outcome(part.name, state, self._clock() - began_s, message)


def missing(packages: Sequence[str]) -> list[str]:
    """Those that cannot be imported here, without importing any."""

    def there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):  # something in its place that is no package
            return False

    return [name for name in packages if not there(name)]


def tail(path: Path, count: int) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line[:_LINE_LENGTH] for line in text.splitlines()[-count:]]


def _last_line(path: Path) -> str:
    """Of the output, unless it is a document, which is no message."""
    lines = [line for line in tail(path, 5) if line.strip() and not line.startswith(("{", "["))]
    return " ".join(lines[-1].split())[:_SAID_LENGTH] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part and what it left running."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A SIGTERM ends the running part too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
