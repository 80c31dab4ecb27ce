"""A plugin for pytest: what became of each test, as a line of JSON as soon as it is known, so that a run that is ended
has said all that it knew. And what a run of tests says together.

`--outcomes FILE`. Under pytest-xdist the first process writes; another one writes only when it ends because its device
has failed: after an illegal address no launch of the process works, so all its later tests would fail for nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_SAID_LENGTH = 300
_WORST = ("begun", "passed", "skipped", "failed")  # of several things that are said of a test the last one counts
DEVICE_LOST = 70  # exit status
_NAMED, _SLOWEST = 6, 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, default=None, help="a file that gets a line of JSON for every test")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None:
        workers = Worker(config, path) if hasattr(config, "workerinput") else Writer(path)
        config.pluginmanager.register(workers, "outcomes-writer")


class Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        write(self._path, nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            write(self._path, report.nodeid, report.outcome, report.duration, said(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write(self._path, report.nodeid, "failed", 0.0, said(report))


class Worker:
    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config, self._path = config, path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and device_is_lost():
            write(self._path, report.nodeid, "failed", report.duration, f"{said(report)} (the device has failed)")
            capture = self._config.pluginmanager.getplugin("capturemanager")
            capture.suspend_global_capture(item)
            print(report.longreprtext, file=sys.__stderr__, flush=True)
            os._exit(DEVICE_LOST)
        return report


def device_is_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def said(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skip, or the first line of an error, cut to `_SAID_LENGTH` characters."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:_SAID_LENGTH]
    lines = [line for line in report.longreprtext.splitlines() if not line.startswith("[gw")]  # whose test it was
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or [line for line in lines if line.strip()] or [""])[0][:_SAID_LENGTH]


def write(path: Path, test: str, state: str, seconds: float = 0.0, text: str = "") -> None:
    """Appends a line by one write, so that processes can share the file."""
    line = json.dumps({"test": test, "state": state, "seconds": round(seconds, 3), "said": text}) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


# ---- what was written


class Tests(NamedTuple):
    """States and reasons of tests by name. `begun`: running when the run was ended."""

    states: Mapping[str, str]
    reasons: Mapping[str, str]
    seconds: Mapping[str, float]

    def of(self, state: str) -> list[str]:
        return [name for name, found in self.states.items() if found == state]

    def counts(self) -> str:
        words = {"passed": "passed", "failed": "failed", "skipped": "skipped", "begun": "not ended"}
        return ", ".join(f"{len(self.of(state))} {word}" for state, word in words.items() if self.of(state))


def read(path: Path) -> Tests:
    """Empty where there is no file; a line that is not whole is left out."""
    states: dict[str, str] = {}
    reasons: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        name, state = found["test"], found["state"]
        if _WORST.index(state) > _WORST.index(states.get(name, "begun")) or name not in states:
            states[name], reasons[name] = state, found["said"]
        seconds[name] = max(seconds.get(name, 0.0), found["seconds"])
    return Tests(states, reasons, seconds)


def summary(part: str, tests: Tests) -> list[str]:
    """Lines of Markdown: counts, what failed and was left out by reason, what did not end, what took longest."""
    lines = [f"{part}: {tests.counts() or 'no test ran'}"]
    for state, word in (("failed", "failed"), ("skipped", "skipped")):
        by_reason: dict[str, list[str]] = {}
        for name in tests.of(state):
            by_reason.setdefault(tests.reasons[name], []).append(name)
        for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            lines.append(f"{part}, {word}: {', '.join(f'`{name}`' for name in names[:_NAMED])}{more}: {reason}")
    lines += [f"{part}, did not end: `{name}`" for name in tests.of("begun")]
    slowest = sorted(tests.seconds.items(), key=lambda item: -item[1])[:_SLOWEST]
    if slowest:
        lines.append(f"{part}, slowest: {', '.join(f'`{name}` {seconds:.1f} s' for name, seconds in slowest)}")
    return lines
