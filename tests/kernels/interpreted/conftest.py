"""Runs the tests of this folder in one process of their own, with Triton's interpreter.

Triton decides when a kernel's module is imported whether its decorator makes something to compile or something to
interpret, so the two cannot share a process. The outer pytest collects the tests as usual; the first one starts an
inner pytest that has all tests of their files, and each has itself run there when its turn comes: of several outer
processes nobody knows who gets which. In a process that has TRITON_INTERPRET=1 set they run directly.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from tests import forkserver

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOCKET_VARIABLE = "HYDRA_INTERPRETED_SOCKET"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


class InnerRun:
    """An inner pytest; `result` waits for the outcome of a test."""

    def __init__(self, files: list[str], output: Path) -> None:
        self._socket, theirs = socket.socketpair()
        environment = {**os.environ, "TRITON_INTERPRET": "1", SOCKET_VARIABLE: str(theirs.fileno())}
        environment[forkserver.EXEC_VARIABLE] = "1"  # these tests start no processes
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        self._output = output
        with output.open("w") as sink, theirs:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),)
            )
        self._answers: IO[str] = self._socket.makefile()
        self._results: dict[str, tuple[str, str]] = {}

    def result(self, nodeid: str) -> tuple[str, str]:
        """(outcome, text) of a test."""
        with suppress(BrokenPipeError):
            self._socket.sendall(f"{nodeid}\n".encode())
        while nodeid not in self._results:
            line = self._answers.readline()
            if not line:
                return "failed", f"the interpreting process ended without a result:\n{self._output.read_text()[-4000:]}"
            name, outcome, text = json.loads(line)
            self._results[name] = (outcome, text)
        return self._results[nodeid]

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def _round_products_once() -> None:
    """Computes the interpreter's products in float64. They are numpy's, whose kernels for some processors sum a row in
    an order that depends on its place in the tile; a GPU's do not."""
    from triton.language import float64
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def create_rounded_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return create_dot(self, a, b, d, *options)
        product = create_dot(self, a, b, TensorHandle(np.zeros(d.data.shape), float64), *options)
        return TensorHandle(product.data.astype(np.float32) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_rounded_dot


if INTERPRETING:
    _round_products_once()


# An exp that overflows to infinity is an answer on a GPU; numpy warns about it.
_OVERFLOW = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(_OVERFLOW)


_RUN = pytest.StashKey[InnerRun]()
_ANSWERS = pytest.StashKey[socket.socket]()


@pytest.fixture(scope="session")
def interpreter_output(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Output file of the inner run; ends that run with the session."""
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
    files = {str(item.path) for item in request.session.items if item.path.is_relative_to(HERE)}
    request.config.stash[_RUN] = InnerRun(sorted(files), output)


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


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs in the inner pytest the tests that the outer one asks for, until it asks for no more."""
    if SOCKET_VARIABLE not in os.environ or not INTERPRETING:
        return None
    items = {item.nodeid: item for item in session.items}
    with socket.socket(fileno=int(os.environ[SOCKET_VARIABLE])) as answers, answers.makefile() as asked:
        session.config.stash[_ANSWERS] = answers
        for nodeid in asked:
            item = items[nodeid.rstrip("\n")]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Sends from the inner run one line of JSON per test, after its call or the phase that prevented it."""
    report = yield
    answers = item.config.stash.get(_ANSWERS, None)
    if answers is not None and (report.when == "call" or not report.passed):
        answers.sendall(f"{json.dumps([report.nodeid, report.outcome, report.longreprtext])}\n".encode())
    return report
