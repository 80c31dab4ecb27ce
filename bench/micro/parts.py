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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bench.common import ROOT

TAIL_LINES = 25
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP)
_KEEP_EVERY_S = 15.0
_GRACE_S = 3.0  # from asking a part to end to ending it
_LINE_LENGTH, _SAID_LENGTH = 160, 100


@dataclass(frozen=True)
class Part:
    """`limit_s`: it is ended after that, or earlier to leave the parts behind it their `planned_s`, of which it has its
    own for certain. `min_s`: with less time left it is not begun. `packages`: what it imports, as modules. `after`:
    the part without which this one means nothing. `unless`: a part that this one repeats if it has not gone well."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    min_s: float = 5.0
    packages: tuple[str, ...] = ()
    after: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    planned_s: float = 0.0
    unless: str | None = None


@dataclass(frozen=True)
class Outcome:
    """`state`: "ok", "failed", "out of time", "interrupted" or "not run". `said`: why, or the last line of the
    output."""

    name: str
    state: str
    seconds: float
    said: str


class Interrupted(KeyboardInterrupt):
    """Interrupted by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Runner:
    """Runs parts for `budget_s` in all, of which the last `reserve_s` are not for parts. Calls `keep` after every part,
    every few seconds of one, and when a signal ends the run, before anything else."""

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        *,
        reserve_s: float = 0.0,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
        keep: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._say = say
        self._keep = keep
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
        with ended_by_signals():
            for index, part in enumerate(parts, 1):
                if part.unless is not None and self.outcomes[part.unless].state in ("ok", "not run"):
                    continue
                label = f"{index:2}/{len(parts)} {part.name:{width}}"
                kept_s = sum(later.planned_s for later in parts[index:])
                try:
                    outcome = self._refused(part) or self._run(part, label, kept_s)
                except OSError as error:  # no such program, or no room for its output
                    outcome = Outcome(part.name, "failed", 0.0, f"cannot be run: {error}")
                self.outcomes[part.name] = outcome
                self._keep()
                self._say(f"{self._stamp()} {label}  {outcome.state}, {outcome.seconds:.1f} s  {outcome.said}".rstrip())
                if outcome.state in ("failed", "out of time"):
                    for line in tail(self.log_of(part), TAIL_LINES):
                        self._say(f"          | {line}")

    def log_of(self, part: Part) -> Path:
        return self._folder / f"{part.name}.log"

    def _stamp(self) -> str:
        return f"[{self.elapsed_s:5.0f} s]"

    def _refused(self, part: Part) -> Outcome | None:
        """The outcome of a part that cannot begin, with the reason; None if it may."""
        before = self.outcomes.get(part.after) if part.after is not None else None
        absent = missing(part.packages)
        left_s = self._deadline_s - self._clock()
        if before is not None and before.state != "ok":
            why = f"{part.after}: {before.state}"
        elif absent:
            why = f"needs {', '.join(absent)}, not installed"
        elif left_s < part.min_s:
            why = f"{max(left_s, 0.0):.0f} s were left, it needs {part.min_s:.0f}"
        else:
            return None
        return Outcome(part.name, "not run", 0.0, why)

    def _run(self, part: Part, label: str, kept_s: float) -> Outcome:
        left_s = self._deadline_s - self._clock()
        limit_s = min(part.limit_s, left_s, max(left_s - kept_s, part.planned_s, part.min_s))
        self._say(f"{self._stamp()} {label}  ... at most {limit_s:.0f} s")
        began_s = self._clock()
        path = self.log_of(part)
        with path.open("wb") as log:
            # A session of its own, so that it ends with all that it started.
            process = subprocess.Popen(
                part.command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = self._wait(process, began_s + limit_s)
                state, message = ("ok" if code == 0 else "failed"), _last_line(path)
                if code < 0:
                    message = f"ended by {signal.Signals(-code).name}"
            except subprocess.TimeoutExpired:
                state, message = "out of time", f"ended after {limit_s:.0f} s"
            except KeyboardInterrupt as error:
                said = str(error) or "SIGINT"
                self.outcomes[part.name] = Outcome(part.name, "interrupted", self._clock() - began_s, said)
                self._keep()
                raise
            finally:
                _end(process)
        return Outcome(part.name, state, self._clock() - began_s, message)

    def _wait(self, process: subprocess.Popen[bytes], until_s: float) -> int:
        while True:
            left_s = until_s - self._clock()
            try:
                return process.wait(min(max(left_s, 0.0), _KEEP_EVERY_S))
            except subprocess.TimeoutExpired:
                if left_s <= _KEEP_EVERY_S:
                    raise
                self._keep()


def missing(packages: Sequence[str]) -> list[str]:
    """The packages that cannot be imported here. Imports none."""

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
    """The last line of the output that is not a document."""
    lines = [line for line in tail(path, 5) if line.strip() and not line.startswith(("{", "["))]
    return " ".join(lines[-1].split())[:_SAID_LENGTH] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part and what it left running, also if a signal comes meanwhile."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_GRACE_S)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver can hold a process that is dead
        process.wait(_GRACE_S)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Raises Interrupted. Further signals are ignored, so that results are kept."""
    for ending in ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise Interrupted(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """The first one that asks a process to end raises `Interrupted`, so that the running part is ended too."""
    if signal.getsignal(ENDING[0]) is _interrupt:  # the caller's
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
