"""Runs the tests of this folder in one process of their own, with Triton's interpreter.

Triton decides when a kernel's module is imported whether its decorator makes something to compile or something to
interpret, so the two cannot share a process. The outer pytest collects the tests as usual; the first one starts an
inner pytest on all those selected, and each takes its own result from there as it arrives. In a process that has
TRITON_INTERPRET=1 set they run directly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RESULTS_VARIABLE = "HYDRA_INTERPRETED_RESULTS"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


class InnerRun:
    """One inner pytest; `result` waits for the outcome of a test."""

    def __init__(self, nodeids: list[str], output: Path) -> None:
        read, write = os.pipe()
        environment = {**os.environ, "TRITON_INTERPRET": "1", RESULTS_VARIABLE: str(write)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodeids]
        self._output = output
        with output.open("w") as sink:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, pass_fds=(write,)
            )
        os.close(write)
        self._pipe: IO[str] = os.fdopen(read)
        self._results: dict[str, tuple[str, str]] = {}

    def result(self, nodeid: str) -> tuple[str, str]:
        """(outcome, text) of a test."""
        while nodeid not in self._results:
            line = self._pipe.readline()
            if not line:
                return "failed", f"the interpreting process ended without a result:\n{self._output.read_text()[-4000:]}"
            name, outcome, text = json.loads(line)
            self._results[name] = (outcome, text)
        return self._results[nodeid]

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


# An exp that overflows to infinity is an answer on a GPU; numpy warns about it.
_OVERFLOW = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(_OVERFLOW)


_RUN = pytest.StashKey[InnerRun]()


@pytest.fixture(scope="session")
def interpreter_output(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where the inner run writes what it prints; ends that run with the session."""
    yield tmp_path_factory.mktemp("interpreted") / "output.txt"
    run = request.config.stash.get(_RUN, None)
    if run is not None:
        run.close()


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    """Starts the inner run at the first test."""
    if INTERPRETING or _RUN in request.config.stash:
        return
    output: Path = request.getfixturevalue("interpreter_output")
    nodeids = [item.nodeid for item in request.session.items if HERE in item.path.parents]
    request.config.stash[_RUN] = InnerRun(nodeids, output)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if INTERPRETING:
        return None
    outcome, text = pyfuncitem.config.stash[_RUN].result(pyfuncitem.nodeid)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome != "passed":
        pytest.fail(text, pytrace=False)
    return True


def pytest_runtest_logreport(report: Any) -> None:
    """In the inner run: one line of JSON per test, after its call or the phase that kept it from being called."""
    if RESULTS_VARIABLE not in os.environ or not INTERPRETING:
        return
    if report.when == "call" or not report.passed:
        line = json.dumps([report.nodeid, report.outcome, report.longreprtext])
        os.write(int(os.environ[RESULTS_VARIABLE]), f"{line}\n".encode())
